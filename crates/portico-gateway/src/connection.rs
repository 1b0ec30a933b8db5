//! The life of one connection, in phases: *learn* where it wants to go, *decide* whether it may, *connect*, *copy*, *record*.
//!
//! Whatever fails before the first byte is copied is a [`Refusal`] and is told to the client in its own protocol; whatever
//! happens afterwards is an [`End`](crate::record::End). [`serve_sni`] and [`serve_port`] are called by
//! [`listen`](crate::listen) for each accepted connection, each in a task of its own; CONNECT streams take the same phases
//! in [`connect`](crate::connect).

use std::borrow::Cow;
use std::cell::RefCell;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use portico_api::names::HostName;
use portico_wire::{Parse, alert, hello, proxy};
use rustix::io::Errno;
use rustix::net::Shutdown;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::access::Refused;
use crate::cluster::OpenGuard;
use crate::config::ProxyMode;
use crate::connect::{Welcomed, serve_welcomed};
use crate::copy::{attempt, copy, receive, send};
use crate::deadline::unless_at_once;
use crate::descriptors::Promise;
use crate::record::{ConnectionId, Listener, Opening, Session};
use crate::refusal::Refusal;
use crate::spare;
use crate::upstream::{Connected, EndpointUse, Upstream};
use crate::worker::{Alive, HandshakeGuard, Worker};

/// One read of a hello: any but the longest arrive whole.
const READ: usize = 16 * 1024;

/// How long a refused client may take to fetch the alert. Closing before it has would reset the connection, and with it the alert.
const ALERT_GRACE: Duration = Duration::from_secs(1);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into());
}

/// An accepted connection, before anything is known of it.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) id: ConnectionId,
    pub(crate) listener: Listener,
    /// Who connected: the client, or the hop before us.
    pub(crate) peer: SocketAddr,
    /// When, as time since the gateway started.
    pub(crate) accepted: Duration,
    /// The descriptor its connection to an endpoint will need.
    pub(crate) promise: Promise,
}

impl Arrival {
    pub(crate) fn new(worker: &Worker, listener: Listener, peer: SocketAddr) -> Self {
        // Dual-stack listeners show IPv4 clients mapped into IPv6; people and allow lists want them plain.
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        let shared = &worker.shared;
        let promise = shared.descriptors.promise();
        Self { id: shared.next_id(), listener, peer, accepted: shared.now(), promise }
    }
}

/// Where a ClientHello, or what came in its place, leads.
enum Way {
    /// Through, to the route of its name.
    Through,
    /// To the tunnel, on a port that serves both.
    Tunnel,
}

/// What [`learn_hello`] found out; kept up to date as it does, so that a refusal can say as much as is known.
#[derive(Debug)]
struct Learned {
    client: SocketAddr,
    name: Option<Arc<str>>,
    /// For the alert; of the hello once there is one.
    tls_version: u16,
    upstream: Option<Arc<Upstream>>,
}

/// A client that may be connected, and what is held for it.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) open: OpenGuard,
}

/// Serves a connection that says by its ClientHello where it wants to go.
///
/// Not an `async fn`, whose future would keep room for its arguments as long as it lives: this one lives for hours, by the
/// ten thousand, and what it needs to establish the connection it needs for milliseconds.
pub(crate) fn serve_sni(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
    alive: Alive,
) -> impl Future<Output = ()> + Send {
    let idle = worker.shared.config.idle.sni;
    carry(establish_sni(worker, stream, arrival), idle, alive)
}

/// Serves a connection whose destination is the port it came in by.
pub(crate) fn serve_port(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
    port: u16,
    alive: Alive,
) -> impl Future<Output = ()> + Send {
    let idle = worker.shared.config.idle.node_port;
    carry(establish_port(worker, stream, arrival, port), idle, alive)
}

/// Both ends of a connection, and what keeps count of it.
struct Established {
    session: Session,
    downstream: TcpStream,
    upstream: TcpStream,
    /// What goes to the upstream before all else.
    first: Vec<u8>,
}

/// A connection that is being established, unless it is refused or for the tunnel. In a box of its own, and small: beyond a
/// kilobyte the allocator of the C library takes five times as long.
type Establishing<F> = Pin<Box<F>>;

async fn carry(
    establishing: Establishing<impl Future<Output = Option<Established>> + Send>,
    idle: Option<Duration>,
    alive: Alive,
) {
    let Some(Established { session, downstream, upstream, first }) = establishing.await else { return };
    let end = copy(&downstream, &upstream, first, session.record(), idle).await;
    session.finish(end);
    // The sockets are closed before the gateway may count this connection as ended.
    drop((downstream, upstream, alive));
}

/// What is next for a client whose hello was read.
enum Next {
    /// Its bytes are carried to this endpoint.
    Connected(Admitted, Connected),
    /// It has a tunnel to ask for.
    Tunnel(HandshakeGuard),
}

fn establish_sni(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
) -> Establishing<impl Future<Output = Option<Established>> + Send> {
    Box::pin(async move {
        let mut learned = Learned { client: arrival.peer, name: None, tls_version: 0x0303, upstream: None };
        let mut bytes = spare::take();
        let outcome = async {
            let handshake = worker.shared.start_handshake()?;
            let limit = worker.shared.config.hello_timeout;
            let learn = learn_hello(&worker, &stream, &arrival, &mut bytes, &mut learned);
            let way = unless_at_once(limit, pin!(learn)).await.unwrap_or(Err(Refusal::TooSlow))?;
            if let Way::Tunnel = way {
                return Ok(Next::Tunnel(handshake));
            }
            drop(handshake);
            let admitted = decide(&worker, learned.upstream.clone(), learned.client.ip())?;
            put_proxy_header(&stream, &arrival, &learned, &admitted.upstream, &mut bytes);
            let connected = reach(&worker, &admitted.upstream, true, &bytes).await?;
            Ok(Next::Connected(admitted, connected))
        }
        .await;
        let refusal = match outcome {
            Ok(Next::Tunnel(handshake)) => {
                let Arrival { id, accepted, promise, .. } = arrival;
                let welcomed =
                    Welcomed { id, client: learned.client, accepted, handshake, promise, first: bytes };
                // Boxed by itself: connections that are passed through must not carry its room.
                Box::pin(serve_welcomed(worker, stream, welcomed)).await;
                return None;
            }
            Ok(Next::Connected(admitted, connected)) => {
                return Some(open_session(&worker, stream, arrival, learned, admitted, connected, bytes));
            }
            Err(refusal) => refusal,
        };
        refuse(&worker, &arrival, &learned, refusal);
        drop(arrival);
        if let Some(description) = refusal.alert() {
            let alert = alert::fatal(description, learned.tls_version);
            let _elapsed = timeout(ALERT_GRACE, send_last_words(&stream, &alert)).await;
        }
        None
    })
}

fn establish_port(
    worker: Arc<Worker>,
    stream: TcpStream,
    arrival: Arrival,
    port: u16,
) -> Establishing<impl Future<Output = Option<Established>> + Send> {
    Box::pin(async move {
        let mut learned = Learned { client: arrival.peer, name: None, tls_version: 0, upstream: None };
        let mut bytes = Vec::new();
        let outcome = async {
            let mode = worker.shared.config.proxy_protocol.node_port;
            if mode != ProxyMode::Off {
                let _handshake = worker.shared.start_handshake()?;
                let learn = learn_proxy_header(&worker, &stream, &arrival, mode, &mut bytes);
                let limit = worker.shared.config.hello_timeout;
                let client = unless_at_once(limit, pin!(learn)).await;
                learned.client = client.unwrap_or(Err(Refusal::TooSlow))?;
            }
            learned.upstream = worker.shared.live.routes().ports.get(&port).cloned();
            let admitted = decide(&worker, learned.upstream.clone(), learned.client.ip())?;
            put_proxy_header(&stream, &arrival, &learned, &admitted.upstream, &mut bytes);
            let connected = reach(&worker, &admitted.upstream, false, &bytes).await?;
            Ok((admitted, connected))
        }
        .await;
        match outcome {
            Ok((admitted, connected)) => {
                Some(open_session(&worker, stream, arrival, learned, admitted, connected, bytes))
            }
            Err(refusal) => {
                refuse(&worker, &arrival, &learned, refusal);
                None
            }
        }
    })
}

/// Reads until the ClientHello is complete. All that was read of the client's own bytes ends up in `bytes`.
async fn learn_hello(
    worker: &Worker,
    stream: &TcpStream,
    arrival: &Arrival,
    bytes: &mut Vec<u8>,
    learned: &mut Learned,
) -> Result<Way, Refusal> {
    let config = &worker.shared.config;
    let mode = config.proxy_protocol.sni;
    if mode != ProxyMode::Off {
        learned.client = learn_proxy_header(worker, stream, arrival, mode, bytes).await?;
    }
    let mut progress = hello::Progress::default();
    loop {
        if !bytes.is_empty() {
            match progress.parse(bytes) {
                Parse::Complete(hello) => {
                    learned.tls_version = hello.legacy_version;
                    if config.shared_port && leads_to_tunnel(worker, &hello) {
                        return Ok(Way::Tunnel);
                    }
                    let name = hello.server_name.ok_or(Refusal::NoServerName)?;
                    return route_by_name(worker, &name, learned).map(|()| Way::Through);
                }
                // Whether it is HTTP, the tunnel finds out.
                Parse::Malformed(_) if config.shared_port && config.tunnel.plaintext && !is_tls(bytes) => {
                    return Ok(Way::Tunnel);
                }
                Parse::Malformed(_) => return Err(Refusal::Malformed),
                Parse::NeedMore if bytes.len() >= hello::MAX_HELLO => return Err(Refusal::Malformed),
                Parse::NeedMore => {}
            }
        }
        read_more(stream, bytes, hello::MAX_HELLO).await?;
    }
}

/// On a port that serves both: whether a hello is for the gateway itself. Agents say so; a route has its name; the gateway's own
/// certificate has its names; and a client that asks for no name at all has not asked for a route.
fn leads_to_tunnel(worker: &Worker, hello: &hello::ClientHello<'_>) -> bool {
    let Some(tls) = &worker.shared.config.tunnel.tls else { return false };
    if hello.alpn.iter().any(|protocol| protocol == portico_tunnel::ALPN) {
        return true;
    }
    match hello.server_name.as_deref().map(HostName::parse) {
        None => true,
        Some(Err(_)) => false,
        Some(Ok(name)) => {
            !worker.shared.live.routes().hosts.contains_key(&name) && tls.is_named(name.as_str())
        }
    }
}

/// Whether the first byte begins a TLS record.
fn is_tls(bytes: &[u8]) -> bool {
    const HANDSHAKE: u8 = 22;
    bytes.first() == Some(&HANDSHAKE)
}

fn route_by_name(worker: &Worker, name: &str, learned: &mut Learned) -> Result<(), Refusal> {
    let Ok(host) = HostName::parse(name) else {
        learned.name = Some(printable(name).into());
        return Err(Refusal::Unknown);
    };
    let routes = worker.shared.live.routes();
    // A known name is the table's own, so that ten thousand connections to one host share it.
    let (host, upstream) = match routes.hosts.get_key_value(&host) {
        Some((known, upstream)) => (known.clone(), Some(Arc::clone(upstream))),
        None => (host, None),
    };
    learned.name = Some(host.into());
    learned.upstream = upstream;
    Ok(())
}

/// What is shown of a name that is none.
pub(crate) fn printable(name: &str) -> Cow<'_, str> {
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => Cow::Owned(format!("{}...", &name[..end])),
        None => Cow::Borrowed(name),
    }
}

/// Reads a PROXY header, if there is one, and returns who the client really is. What follows it stays in `bytes`.
pub(crate) async fn learn_proxy_header(
    worker: &Worker,
    stream: &TcpStream,
    arrival: &Arrival,
    mode: ProxyMode,
    bytes: &mut Vec<u8>,
) -> Result<SocketAddr, Refusal> {
    let trusted = worker.shared.config.proxy_protocol.trusts(arrival.peer.ip());
    if !trusted {
        // An optional header is a thing between us and trusted hops: nobody else's bytes are even looked at.
        return if mode == ProxyMode::Required { Err(Refusal::ProxyHeader) } else { Ok(arrival.peer) };
    }
    loop {
        match if bytes.is_empty() { Parse::NeedMore } else { proxy::parse(bytes) } {
            Parse::Complete(header) => {
                let (client, length) = match header {
                    proxy::Header::Proxied { source, len, .. } => (source, len),
                    proxy::Header::Local { len } => (arrival.peer, len),
                };
                bytes.drain(..length);
                return Ok(client);
            }
            Parse::Malformed(_) if mode == ProxyMode::Optional => return Ok(arrival.peer),
            Parse::Malformed(_) => return Err(Refusal::ProxyHeader),
            Parse::NeedMore => {}
        }
        read_more(stream, bytes, proxy::MAX_V2 + hello::MAX_HELLO).await?;
    }
}

/// Appends what the client has sent, at least one byte, to `bytes`, which holds at most `cap`.
async fn read_more(stream: &TcpStream, bytes: &mut Vec<u8>, cap: usize) -> Result<(), Refusal> {
    loop {
        poll_fn(|cx| stream.poll_read_ready(cx)).await.map_err(|_| Refusal::ClosedEarly)?;
        let read = BUFFER.with_borrow_mut(|buffer| {
            let room = cap.saturating_sub(bytes.len()).min(READ);
            let buffer = &mut buffer[..room];
            // A short read has emptied the socket.
            let short = |read| read > 0 && read < room;
            let read = attempt(stream, Interest::READABLE, || receive(stream, buffer), short)?;
            bytes.extend_from_slice(&buffer[..read]);
            Ok(read)
        });
        match read {
            Ok(0) => return Err(Refusal::ClosedEarly),
            Ok(_) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {}
            Err(_) => return Err(Refusal::ClosedEarly),
        }
    }
}

/// Whether the client may have a connection to `upstream`, and takes it out of the cluster's budget.
pub(crate) fn decide(
    worker: &Worker,
    upstream: Option<Arc<Upstream>>,
    client: IpAddr,
) -> Result<Admitted, Refusal> {
    let upstream = upstream.ok_or(Refusal::Unknown)?;
    let backend = upstream.backend();
    if !backend.policy.allow.admits(client) {
        return Err(Refusal::NotAllowed);
    }
    if backend.endpoints.is_empty() {
        return Err(Refusal::NotReady);
    }
    let budget = backend.policy.budget.or(worker.shared.config.budget);
    let open = upstream.cluster.admit(budget, worker.shared.now())?;
    Ok(Admitted { upstream, open })
}

/// Connects an admitted client to an endpoint.
pub(crate) async fn connect(
    worker: &Worker,
    admitted: Admitted,
    client_first: bool,
) -> Result<(Admitted, TcpStream, EndpointUse), Refusal> {
    let Connected { stream, endpoint, .. } = reach(worker, &admitted.upstream, client_first, &[]).await?;
    Ok((admitted, stream, endpoint))
}

/// Connects to an endpoint of `upstream` and sends it the `first` bytes.
async fn reach(
    worker: &Worker,
    upstream: &Upstream,
    client_first: bool,
    first: &[u8],
) -> Result<Connected, Refusal> {
    let config = &worker.shared.config;
    let _connecting = upstream.cluster.start_connecting(config.max_connecting)?;
    upstream.connect_and_send(config, || worker.shared.now(), client_first, first).await
}

/// Puts a PROXY header before the client's own `bytes`, if the Service asks for one.
fn put_proxy_header(
    stream: &TcpStream,
    arrival: &Arrival,
    learned: &Learned,
    upstream: &Upstream,
    bytes: &mut Vec<u8>,
) {
    if !upstream.backend().send_proxy {
        return;
    }
    // Fails only for a client that is gone, and then nobody reads the header.
    let local = stream.local_addr().unwrap_or(arrival.peer);
    let header = proxy_header(learned.client, local, learned.name.as_deref(), arrival.id);
    bytes.splice(..0, header);
}

/// A PROXY v2 header with the name the client asked for and the id this connection has in access lines.
pub(crate) fn proxy_header(
    client: SocketAddr,
    local: SocketAddr,
    name: Option<&str>,
    id: ConnectionId,
) -> Vec<u8> {
    let unique_id = id.to_string();
    let tlvs =
        proxy::Tlvs { authority: name, unique_id: Some(unique_id.as_bytes()), ..proxy::Tlvs::default() };
    proxy::encode_v2(client, local, tlvs)
}

/// Opens the session of a connection that has an endpoint, to which some of its first `bytes`, mostly all, have gone.
fn open_session(
    worker: &Arc<Worker>,
    downstream: TcpStream,
    arrival: Arrival,
    learned: Learned,
    admitted: Admitted,
    connected: Connected,
    mut bytes: Vec<u8>,
) -> Established {
    let Connected { stream: upstream, endpoint, sent } = connected;
    let opening = Opening {
        id: arrival.id,
        listener: arrival.listener,
        client: learned.client,
        name: learned.name,
        upstream: admitted.upstream,
        accepted: arrival.accepted,
        endpoint,
        open: admitted.open,
        credential: None,
    };
    let session = Session::open(worker, opening);
    session.record().count_up(sent);
    bytes.drain(..sent);
    let first = if bytes.is_empty() {
        spare::give_back(bytes);
        Vec::new()
    } else {
        bytes
    };
    Established { session, downstream, upstream, first }
}

fn refuse(worker: &Worker, arrival: &Arrival, learned: &Learned, refusal: Refusal) {
    worker.shared.refuse(&Refused {
        id: arrival.id,
        listener: arrival.listener,
        client: learned.client,
        name: learned.name.as_deref(),
        upstream: learned.upstream.as_deref(),
        accepted: arrival.accepted,
        refusal,
    });
}

/// Sends `words`, closes our direction and reads what the client still sends, so that closing does not become a reset.
async fn send_last_words(stream: &TcpStream, words: &[u8]) {
    if stream.writable().await.is_err() {
        return;
    }
    let sent = stream.try_io(Interest::WRITABLE, || Ok(send(stream, words)?));
    if sent.is_err() || rustix::net::shutdown(stream, Shutdown::Write).is_err() {
        return;
    }
    let mut rest = Vec::new();
    while read_more(stream, &mut rest, READ).await.is_ok() {
        rest.clear();
    }
}
