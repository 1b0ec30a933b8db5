//! A server made of plain h2, the agent under test, and endpoints.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use portico_dial::{ClientTls, ClientTlsFiles, Dialer, ProxyFiles, ProxySetting, Target};
use portico_konnectivity::agent::{Agent, CountSource, Policy, Settings};
use portico_konnectivity::streams::{DIAL, STREAM_PATH};
use portico_lab::pki::{Certificate, Pki};
use portico_net::MemoryBudget;
use portico_wire::konnectivity::frame::{MAX_MESSAGE, PREFIX, prefix};
use portico_wire::konnectivity::{CONNECT_PATH, Code, ConnectId, DialId, Packet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::freezable::Freezable;

/// What never takes so long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for what must happen.
pub(crate) async fn patiently<T>(what: impl Future<Output = T>) -> T {
    timeout(PATIENCE, what).await.expect("this takes a moment only")
}

/// Returns once it is so.
pub(crate) async fn until(what: impl Fn() -> bool) {
    patiently(async {
        while !what() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// How a server answers.
#[derive(Clone)]
pub(crate) struct Says {
    pub(crate) id: &'static str,
    pub(crate) count: u32,
    pub(crate) has_streams: bool,
    pub(crate) absence: Option<Absence>,
}

/// How one learns that there is no server at an address.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Absence {
    /// A load balancer hangs up.
    HangsUp,
    /// A gateway sends an alert.
    Alert,
    /// A server is there, but not the API server that reviews tokens.
    Unavailable,
}

impl Says {
    pub(crate) fn upstream(id: &'static str) -> Self {
        Self { id, count: 1, has_streams: false, absence: None }
    }

    pub(crate) fn ours(id: &'static str) -> Self {
        Self { has_streams: true, ..Self::upstream(id) }
    }

    pub(crate) fn nothing(absence: Absence) -> Self {
        Self { absence: Some(absence), ..Self::ours("s") }
    }
}

/// A server that hands out what agents open.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) connects: mpsc::UnboundedReceiver<Connect>,
    /// Set, no connection is read any more.
    pub(crate) is_frozen: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

impl Server {
    /// Answers connections in turn as `says` has it; the last goes for all that follow.
    pub(crate) async fn start(pki: &Pki, says: &[Says]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tls = TlsAcceptor::from(Arc::new(pki.identity("server").server_config(&[b"h2"]).unwrap()));
        let (sender, connects) = mpsc::unbounded_channel();
        let says = says.to_vec();
        let mut tasks = JoinSet::new();
        let is_frozen = Arc::new(AtomicBool::new(false));
        let freezes = Arc::clone(&is_frozen);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            for turn in 0.. {
                let (socket, _) = listener.accept().await.unwrap();
                let says = says[turn.min(says.len() - 1)].clone();
                let (tls, sender) = (tls.clone(), sender.clone());
                connections.spawn(serve(Freezable(socket, Arc::clone(&freezes)), tls, says, sender));
            }
        });
        Self { address, connects, is_frozen, _tasks: tasks }
    }

    pub(crate) async fn connect(&mut self) -> Connect {
        patiently(self.connects.recv()).await.unwrap()
    }
}

async fn serve(
    mut socket: Freezable<TcpStream>,
    tls: TlsAcceptor,
    says: Says,
    connects: mpsc::UnboundedSender<Connect>,
) {
    match says.absence {
        Some(Absence::HangsUp) => return,
        Some(Absence::Alert) => {
            let mut hello = [0; 16 * 1024];
            // It comes as one.
            let _ = socket.0.read(&mut hello).await.unwrap();
            // internal_error, as the gateway answers while no endpoint is ready.
            return socket.0.write_all(&[21, 3, 3, 0, 2, 2, 80]).await.unwrap();
        }
        Some(Absence::Unavailable) | None => {}
    }
    let Ok(stream) = tls.accept(socket).await else { return };
    let mut builder = h2::server::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(1 << 30);
    let Ok(mut connection) = builder.handshake(stream).await else { return };
    let (streams, opened) = mpsc::unbounded_channel();
    let mut opened = Some(opened);
    let goaway = Arc::new(Notify::new());
    loop {
        let (request, mut respond) = tokio::select! {
            () = goaway.notified() => {
                connection.graceful_shutdown();
                continue;
            }
            accepted = connection.accept() => match accepted {
                Some(Ok(accepted)) => accepted,
                _ => return,
            },
        };
        if request.uri().path() == STREAM_PATH {
            let _ = streams.send(Stream { request, respond });
            continue;
        }
        assert_eq!(request.uri().path(), CONNECT_PATH);
        let (head, from_agent) = request.into_parts();
        let response = Response::builder().header("content-type", "application/grpc");
        if says.absence.is_some() {
            let refusal = response.header("grpc-status", u16::from(Code::UNAVAILABLE.number()));
            respond.send_response(refusal.body(()).unwrap(), true).unwrap();
            continue;
        }
        let mut response = response.header("serverid", says.id).header("servercount", says.count);
        if says.has_streams {
            response = response.header("portico-streams", "1");
        }
        let to_agent = respond.send_response(response.body(()).unwrap(), false).unwrap();
        let connect = Connect {
            metadata: head.headers,
            to_agent,
            from_agent,
            buffer: BytesMut::new(),
            streams: opened.take().expect("one Connect stream a connection"),
            goaway: Arc::clone(&goaway),
        };
        let _ = connects.send(connect);
    }
}

/// The window that the server gives.
pub(crate) const WINDOW: u32 = 65_535;

/// A stream that the agent opened for a connection.
pub(crate) struct Stream {
    pub(crate) request: Request<RecvStream>,
    pub(crate) respond: SendResponse<Bytes>,
}

impl Stream {
    pub(crate) fn dial(&self) -> DialId {
        DialId(self.request.headers()[DIAL].to_str().unwrap().parse().unwrap())
    }

    pub(crate) fn accept(self) -> (SendStream<Bytes>, RecvStream) {
        self.try_accept().unwrap()
    }

    /// Fails if the agent has reset it.
    pub(crate) fn try_accept(mut self) -> Result<(SendStream<Bytes>, RecvStream), h2::Error> {
        let to_agent = self.respond.send_response(Response::new(()), false)?;
        Ok((to_agent, self.request.into_body()))
    }
}

/// A Connect stream, as a server sees it.
pub(crate) struct Connect {
    pub(crate) metadata: HeaderMap,
    pub(crate) to_agent: SendStream<Bytes>,
    pub(crate) from_agent: RecvStream,
    buffer: BytesMut,
    pub(crate) streams: mpsc::UnboundedReceiver<Stream>,
    goaway: Arc<Notify>,
}

impl Connect {
    pub(crate) fn goaway(&self) {
        self.goaway.notify_one();
    }

    pub(crate) fn send(&mut self, packet: &Packet) {
        self.to_agent.send_data(packet.encoded(), false).unwrap();
    }

    pub(crate) fn dial(&mut self, address: impl ToString, dial: i64) {
        let address = address.to_string();
        self.send(&Packet::DialRequest { protocol: "tcp".into(), address, dial: DialId(dial) });
    }

    pub(crate) fn data(&mut self, connection: ConnectId, payload: &[u8]) {
        self.send(&Packet::Data { connection, payload: Bytes::copy_from_slice(payload) });
    }

    /// The next packet. `None`: the agent has left.
    pub(crate) async fn next(&mut self) -> Option<Packet> {
        loop {
            if let Some(frame) = prefix(&self.buffer, MAX_MESSAGE).complete()
                && self.buffer.len() >= frame.len()
            {
                let message = self.buffer.split_to(frame.len()).freeze().slice(PREFIX..);
                return Some(Packet::decode(&message).unwrap());
            }
            let bytes = patiently(self.from_agent.data()).await?.ok()?;
            self.from_agent.flow_control().release_capacity(bytes.len()).unwrap();
            self.buffer.extend_from_slice(&bytes);
        }
    }

    pub(crate) async fn packet(&mut self) -> Packet {
        self.next().await.expect("the agent stays")
    }

    /// Dials, and returns the number of the connection.
    pub(crate) async fn connected(&mut self, address: SocketAddr, dial: i64) -> ConnectId {
        self.dial(address, dial);
        match self.packet().await {
            Packet::DialResponse { dial: answered, result: Ok(connection) } => {
                assert_eq!(answered, DialId(dial));
                connection
            }
            other => panic!("{other:?} in place of a DIAL_RSP"),
        }
    }

    /// The bytes of a connection until it is closed, and why.
    pub(crate) async fn rest(&mut self, connection: ConnectId) -> (Vec<u8>, String) {
        let mut bytes = Vec::new();
        loop {
            match self.packet().await {
                Packet::Data { connection: of, payload } if of == connection => {
                    bytes.extend_from_slice(&payload)
                }
                Packet::CloseResponse { connection: of, error } if of == connection => return (bytes, error),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The certificates of a test.
pub(crate) fn pki() -> Pki {
    let pki = Pki::new();
    pki.issue("server", Certificate::server(&["localhost", "127.0.0.1", "server.example.com"]));
    pki
}

fn dialer() -> Arc<Dialer> {
    let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
    Arc::new(dialer)
}

/// An agent of these servers, with limits of a test.
pub(crate) fn settings(pki: &Pki, servers: &[SocketAddr]) -> Settings {
    let files = ClientTlsFiles { ca: Some(pki.file("ca.crt")), ..ClientTlsFiles::default() };
    let target = |address: &SocketAddr| Target { host: "localhost".into(), port: address.port() };
    Settings {
        servers: servers.iter().map(target).collect(),
        to_servers: dialer(),
        to_endpoints: dialer(),
        tls: Arc::new(ClientTls::konnectivity(files, vec![b"h2".to_vec()]).unwrap()),
        token: None,
        agent_id: HeaderValue::from_static("agent-1"),
        identifiers: HeaderValue::from_static("host=node-1"),
        user_agent: HeaderValue::from_static("portico/test"),
        sync_interval: Duration::from_millis(10),
        sync_interval_cap: Duration::from_millis(100),
        sync_forever: false,
        count: CountSource::Responses,
        keepalive_time: Duration::from_secs(3600),
        policy: Policy::default(),
        connection_buffer: 1 << 20,
        memory: MemoryBudget::new(64 << 20),
        max_connections: 10_000,
        max_dials: 1_000,
        hello_timeout: Duration::from_secs(15),
    }
}

/// An agent with one server, connected.
pub(crate) async fn connected(says: Says) -> (Agent, Server, Connect) {
    connected_with(says, |settings| settings).await
}

pub(crate) async fn connected_with(
    says: Says,
    change: impl FnOnce(Settings) -> Settings,
) -> (Agent, Server, Connect) {
    let pki = pki();
    let mut server = Server::start(&pki, &[says]).await;
    let agent = Agent::start(change(settings(&pki, &[server.address])));
    let connect = server.connect().await;
    until(|| agent.servers().len() == 1).await;
    (agent, server, connect)
}

/// An endpoint that a test plays itself.
pub(crate) struct Endpoint(TcpListener);

impl Endpoint {
    pub(crate) async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    pub(crate) async fn accept(&self) -> TcpStream {
        patiently(self.0.accept()).await.unwrap().0
    }
}

/// An endpoint that sends back what it gets.
pub(crate) async fn echo() -> (SocketAddr, AbortHandle) {
    let endpoint = Endpoint::start().await;
    let address = endpoint.address();
    let task = tokio::spawn(async move {
        loop {
            let mut socket = endpoint.accept().await;
            tokio::spawn(async move {
                let (mut read, mut write) = socket.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    (address, task.abort_handle())
}

pub(crate) async fn read(socket: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    patiently(socket.read_exact(&mut bytes)).await.unwrap();
    bytes
}

pub(crate) async fn read_to_end(socket: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    patiently(socket.read_to_end(&mut bytes)).await.map(|_| bytes)
}

pub(crate) async fn write(socket: &mut TcpStream, bytes: &[u8]) {
    patiently(socket.write_all(bytes)).await.unwrap();
}
