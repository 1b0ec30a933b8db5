//! CONNECT streams: the bridge to `portico-tunnel`, which speaks HTTP and TLS and knows nothing of routes.
//!
//! Each request takes the phases of [`connection`](crate::connection) (learn, decide, connect, record) by itself: a connection of a
//! node agent carries many streams, each with its own line in the access log, its own place in the cluster's budget and its own
//! end. Only what fails before there is a request is a refusal of the connection as a whole.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use portico_api::names::Authority;
use portico_tunnel::{Failure, Handler, Meter, Presented, Request, Served, Settings};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::access::Refused;
use crate::api_server::reviewer_of;
use crate::auth::{Credential, Credentials, Denied, Eviction, Slot, Wanted};
use crate::config::ProxyMode;
use crate::connection::{Admitted, Arrival, connect, decide, learn_proxy_header, printable, proxy_header};
use crate::copy::copy;
use crate::descriptors::Promise;
use crate::record::{ConnectionId, End, Listener, Opening, Session};
use crate::refusal::{Refusal, Side};
use crate::upstream::Upstream;
use crate::worker::{Alive, HandshakeGuard, Worker};

/// Serves a connection to the tunnel port until it ends.
pub(crate) async fn serve_tunnel(worker: Arc<Worker>, stream: TcpStream, arrival: Arrival) {
    let known = Learned::nothing(arrival.id, arrival.peer, arrival.accepted);
    match welcome(&worker, &stream, arrival).await {
        Ok(welcomed) => serve_welcomed(worker, stream, welcomed).await,
        Err(refusal) => refuse(&worker, &known, refusal),
    }
}

/// A connection of which it is known who really calls.
pub(crate) struct Welcomed {
    pub(crate) id: ConnectionId,
    pub(crate) client: SocketAddr,
    pub(crate) accepted: Duration,
    /// Its place among those that have not said what they want, and the descriptor its first stream will need.
    pub(crate) handshake: HandshakeGuard,
    pub(crate) promise: Promise,
    /// What was read of it already.
    pub(crate) first: Vec<u8>,
}

/// Serves a connection that is for the tunnel, however that was found out.
pub(crate) async fn serve_welcomed(worker: Arc<Worker>, stream: TcpStream, welcomed: Welcomed) {
    let config = &worker.shared.config;
    let settings = Settings {
        hello_timeout: config.hello_timeout,
        stream_idle: config.idle.tunnel_stream,
        ..config.tunnel.clone()
    };
    let Welcomed { id, client, accepted, handshake, promise, first } = welcomed;
    let handler = Arc::new(Connection {
        worker: Arc::clone(&worker),
        client,
        // Fails only for a client that is gone, and then nobody reads the header.
        local: stream.local_addr().unwrap_or(client),
        standing: Mutex::new(Standing { handshake: Some((handshake, promise)), ..Standing::default() }),
        credentials: Credentials::default(),
    });
    let mut draining = worker.shared.draining().subscribe();
    // An error says that the gateway is gone without a word, and with it soon this task.
    let drain = async move { drop(draining.wait_for(|draining| *draining).await) };
    // Boxed: HTTP/1.1 tunnels need none of it while they rest.
    let served = Box::pin(portico_tunnel::serve(stream, first.into(), &settings, drain, &handler)).await;
    match served {
        Ok(Served::Finished(_)) => {}
        Ok(Served::Carry { downstream, early, upstream }) => {
            drop(handler);
            let Tunnel { session, alive, .. } = upstream.meter;
            let end =
                copy(&downstream, &upstream.stream, early.into(), session.record(), settings.stream_idle)
                    .await;
            session.finish(end);
            drop(alive);
        }
        Err(failure) => {
            tracing::debug!(client = %handler.client, %failure, "tunnel connection failed");
            if let Some(refusal) = handler.refusal_of(&failure) {
                refuse(&worker, &Learned::nothing(id, client, accepted), refusal);
            }
        }
    }
}

/// Finds out who really calls, and takes a place among the handshakes.
async fn welcome(worker: &Arc<Worker>, stream: &TcpStream, arrival: Arrival) -> Result<Welcomed, Refusal> {
    let handshake = worker.shared.start_handshake()?;
    let mode = worker.shared.config.proxy_protocol.tunnel;
    let mut first = Vec::new();
    let client = if mode == ProxyMode::Off {
        arrival.peer
    } else {
        let learn = learn_proxy_header(worker, stream, &arrival, mode, &mut first);
        timeout(worker.shared.config.hello_timeout, learn).await.unwrap_or(Err(Refusal::TooSlow))?
    };
    let Arrival { id, accepted, promise, .. } = arrival;
    Ok(Welcomed { id, client, accepted, handshake, promise, first })
}

/// One connection to the tunnel port: what its requests have in common.
struct Connection {
    worker: Arc<Worker>,
    /// Where a trusted hop sent a PROXY header, the address in it.
    client: SocketAddr,
    local: SocketAddr,
    standing: Mutex<Standing>,
    /// What was accepted of it, by cluster.
    credentials: Credentials,
}

/// What a connection holds until it has shown that it may stay.
#[derive(Default)]
struct Standing {
    /// Until the client has said what it speaks.
    handshake: Option<(HandshakeGuard, Promise)>,
    /// From then on until it has authenticated.
    unauthenticated: Option<Slot>,
    /// Until somebody waits for it.
    eviction: Option<Eviction>,
}

impl Handler for Connection {
    type Meter = Tunnel;

    async fn connect(
        &self,
        request: &Request,
    ) -> Result<portico_tunnel::Upstream<Tunnel>, portico_tunnel::Refusal> {
        let mut attempt = Attempt::new(self);
        match attempt.connect(request).await {
            Ok(upstream) => {
                attempt.open = false;
                Ok(upstream)
            }
            Err(denied) => Err(attempt.deny(denied)),
        }
    }

    async fn verify(&self, request: &Request) -> Result<(), portico_tunnel::Refusal> {
        let mut attempt = Attempt::new(self);
        match attempt.learn(request).await {
            Ok(_) => {
                attempt.open = false;
                Ok(())
            }
            Err(denied) => Err(attempt.deny(denied)),
        }
    }

    fn greeted(&self, tls: bool, certificate: Option<&Presented>) {
        let slot = if tls { self.worker.shared.identities.enter(certificate) } else { None };
        let mut standing = self.standing();
        (standing.unauthenticated, standing.eviction) = slot.unzip();
        standing.handshake = None;
    }

    async fn unwanted(&self) {
        let eviction = self.standing().eviction.take();
        let is_evicted = match eviction {
            Some(eviction) => eviction.await.is_ok(),
            None => false,
        };
        if !is_evicted {
            // It has authenticated, or need not.
            std::future::pending().await
        }
    }

    fn refused(&self, refusal: &portico_tunnel::Refusal) {
        let refusal = match refusal.status.as_u16() {
            405 => Refusal::Method,
            408 => Refusal::TooSlow,
            _ => Refusal::Malformed,
        };
        Attempt::new(self).refuse(refusal);
    }
}

impl Connection {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a connection that failed before it was served counts as; `None` for one that got further.
    fn refusal_of(&self, failure: &Failure) -> Option<Refusal> {
        let greeted = self.standing().handshake.is_none();
        Some(match failure {
            Failure::Unwanted => Refusal::Unproven,
            _ if greeted => return None,
            Failure::ClosedEarly => Refusal::ClosedEarly,
            Failure::TooSlow => Refusal::TooSlow,
            Failure::PlaintextNotServed | Failure::Untrusted(_) => Refusal::NotAuthorized,
            _ => Refusal::Malformed,
        })
    }
}

/// What is known of a request; for the access line, also where it is refused.
struct Learned {
    id: ConnectionId,
    client: SocketAddr,
    accepted: Duration,
    name: Option<Arc<str>>,
    upstream: Option<Arc<Upstream>>,
}

impl Learned {
    fn nothing(id: ConnectionId, client: SocketAddr, accepted: Duration) -> Self {
        Self { id, client, accepted, name: None, upstream: None }
    }
}

/// One request on its way to an upstream. Dropped while it is `open`, the client gave up before we were done.
struct Attempt<'a> {
    connection: &'a Connection,
    learned: Learned,
    open: bool,
}

impl<'a> Attempt<'a> {
    fn new(connection: &'a Connection) -> Self {
        let shared = &connection.worker.shared;
        let learned = Learned::nothing(shared.next_id(), connection.client, shared.now());
        Self { connection, learned, open: true }
    }

    /// Finds out where the request leads, and whether who asks may go there.
    async fn learn(&mut self, request: &Request) -> Result<Option<Arc<Credential>>, Denied> {
        if let Err(refusal) = self.route(&request.authority) {
            return Err(match refusal {
                // By now it is a request, and the rest of it was well formed.
                Refusal::Malformed => Denied::new(refusal, AUTHORITY_FORM),
                refusal => refusal.into(),
            });
        }
        let Learned { upstream, name, client, .. } = &self.learned;
        let shared = &self.connection.worker.shared;
        let wanted = Wanted {
            cluster: upstream.as_ref().map(|upstream| &upstream.cluster.name),
            client_admitted: upstream
                .as_ref()
                .is_some_and(|upstream| upstream.backend().policy.allow.admits(client.ip())),
            reviewer: &|| reviewer_of(shared, upstream.as_ref()?, name.as_deref()?),
        };
        let credential =
            shared.identities.authenticate(&self.connection.credentials, request, &wanted).await?;
        if credential.is_some() {
            self.connection.standing().unauthenticated = None;
        }
        if upstream.is_none() { Err(Refusal::Unknown.into()) } else { Ok(credential) }
    }

    async fn connect(&mut self, request: &Request) -> Result<portico_tunnel::Upstream<Tunnel>, Denied> {
        let credential = self.learn(request).await?;
        let worker = &self.connection.worker;
        let admitted = decide(worker, self.learned.upstream.clone(), self.learned.client.ip())?;
        // The upstream may speak first: what the client sends early is not known to be there.
        let (Admitted { upstream, open }, mut stream, endpoint) = connect(worker, admitted, false).await?;
        if upstream.backend().send_proxy {
            let Learned { id, client, name, .. } = &self.learned;
            let header = proxy_header(*client, self.connection.local, name.as_deref(), *id);
            stream.write_all(&header).await.map_err(|_| Refusal::ConnectFailed)?;
        }
        let rests_on = credential.clone();
        let session = Session::open(
            worker,
            Opening {
                id: self.learned.id,
                listener: Listener::Tunnel,
                client: self.learned.client,
                name: self.learned.name.clone(),
                upstream,
                accepted: self.learned.accepted,
                endpoint,
                open,
                credential,
            },
        );
        // It may have been revoked while we connected, before this stream was listed.
        if rests_on.is_some_and(|credential| credential.is_revoked()) {
            session.record().cancel(End::Revoked);
        }
        Ok(portico_tunnel::Upstream {
            stream,
            meter: Tunnel { session, watched: false, alive: worker.shared.keep_alive() },
        })
    }

    fn route(&mut self, authority: &str) -> Result<(), Refusal> {
        let Ok(authority) = Authority::parse(authority) else {
            self.learned.name = Some(printable(authority).into());
            return Err(Refusal::Malformed);
        };
        let routes = self.connection.worker.shared.live.routes();
        // A known name is the table's own, so that all streams to one authority share it.
        let (authority, upstream) = match routes.authorities.get_key_value(&authority) {
            Some((known, upstream)) => (known.clone(), Some(Arc::clone(upstream))),
            None => (authority, None),
        };
        self.learned.name = Some(authority.into());
        self.learned.upstream = upstream;
        Ok(())
    }

    /// Counts and notes why the request is not served; what the client is told.
    fn deny(&mut self, denied: Denied) -> portico_tunnel::Refusal {
        let Denied { refusal, shown, reason, detail } = denied;
        self.refuse(refusal);
        let shared = &self.connection.worker.shared;
        let Learned { client, name, upstream, .. } = &self.learned;
        let of_identity =
            matches!(shown, Refusal::Unauthenticated | Refusal::NotAuthorized | Refusal::ReviewFailed);
        if of_identity && let Some(kept_back) = shared.identities.log().admit() {
            let cluster = upstream.as_ref().map(|upstream| upstream.cluster.name.as_str());
            let (name, refused) = (name.as_deref(), refusal.reason());
            tracing::warn!(%client, name, cluster, refused, %reason, %detail, kept_back, "a tunnel client was turned away");
        }
        let status = shown.status();
        let status = portico_tunnel::StatusCode::from_u16(status)
            .unwrap_or(portico_tunnel::StatusCode::INTERNAL_SERVER_ERROR);
        portico_tunnel::Refusal { status, reason }
    }

    fn refuse(&mut self, refusal: Refusal) {
        self.open = false;
        refuse(&self.connection.worker, &self.learned, refusal);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.open {
            self.refuse(Refusal::ClosedEarly);
        }
    }
}

fn refuse(worker: &Worker, learned: &Learned, refusal: Refusal) {
    worker.shared.refuse(&Refused {
        id: learned.id,
        listener: Listener::Tunnel,
        client: learned.client,
        name: learned.name.as_deref(),
        upstream: learned.upstream.as_deref(),
        accepted: learned.accepted,
        refusal,
    });
}

/// What the client of an authority that is none is told.
const AUTHORITY_FORM: &str =
    "the authority must be HOST:PORT, such as apiserver-external.cluster-a.svc.cluster.local:443";

/// One open tunnel, listed and counted while this is held.
struct Tunnel {
    session: Session,
    /// Whether the task is woken when the gateway wants it to end.
    watched: bool,
    /// A stream may outlive its connection by the moment it takes to deliver what is left.
    alive: Alive,
}

impl Meter for Tunnel {
    fn carried(&mut self, up: usize, down: usize) {
        let record = self.session.record();
        // One direction at a time: the other need not be touched.
        if up > 0 {
            record.count_up(up);
        }
        if down > 0 {
            record.count_down(down);
        }
    }

    fn ended(self, end: portico_tunnel::End) {
        let end = match end {
            portico_tunnel::End::Closed { first } => End::Closed(side(first)),
            portico_tunnel::End::Reset { by } => End::Reset(side(by)),
            portico_tunnel::End::Idle => End::Idle,
            portico_tunnel::End::Memory => End::Memory,
            portico_tunnel::End::Cut => self.session.record().cancelled().unwrap_or(End::Cancelled),
        };
        self.session.finish(end);
        drop(self.alive);
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let record = self.session.record();
        if !std::mem::replace(&mut self.watched, true) {
            record.wake_on_cancel(cx.waker());
        }
        if record.cancelled().is_some() { Poll::Ready(()) } else { Poll::Pending }
    }
}

fn side(side: portico_tunnel::Side) -> Side {
    match side {
        portico_tunnel::Side::Downstream => Side::Downstream,
        portico_tunnel::Side::Upstream => Side::Upstream,
    }
}
