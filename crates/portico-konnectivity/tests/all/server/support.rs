//! A server with its certificates, and peers to play its agents and its frontends.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue};
use portico_konnectivity::grpc::{self, Error, Receiver, Request, Sender};
use portico_konnectivity::server::{
    Authentication, Binding, FrontendListen, Mode, Server, ServerTls, Settings, Status, TlsFiles, TlsOptions,
};
use portico_konnectivity::streams::{OFFER, VERSION};
use portico_lab::pki::{Authority, Certificate, Identity};
use portico_net::MemoryBudget;
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::{CONNECT_PATH, ConnectId, DialId, PROXY_PATH, Packet};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Window of each stream that peers of these tests have.
pub(crate) const AGENT_WINDOW: u64 = 8 << 20;

pub(crate) const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// What never takes so long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn patiently<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("it takes too long")
}

/// Waits until something outside has happened.
pub(crate) async fn until(mut happened: impl FnMut() -> bool) {
    patiently(async {
        while !happened() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// How many connections to the agent port were refused for that reason.
pub(crate) fn refused(rig: &Rig, reason: &str) -> u64 {
    rig.status.counters().agents_refused().find(|(known, _)| *known == reason).unwrap().1
}

/// A server on a Unix socket, and what its agents need.
pub(crate) struct Rig {
    pub(crate) status: Status,
    pub(crate) server: Server,
    pub(crate) socket: PathBuf,
    pub(crate) tls: Arc<ServerTls>,
    pub(crate) ca: Authority,
    pub(crate) agent: Identity,
    pub(crate) folder: tempfile::TempDir,
}

impl Rig {
    /// The reasons that connections have ended for, each with its number.
    pub(crate) fn ends(&self) -> Vec<(&'static str, u64)> {
        self.status.counters().ends().filter(|(_, count)| *count > 0).collect()
    }

    /// The dials under way.
    pub(crate) fn pending(&self) -> u64 {
        self.status.counters().pending.load(Relaxed)
    }

    pub(crate) async fn start(mode: Mode) -> Self {
        Self::with(mode, |_| {}).await
    }

    pub(crate) async fn with(mode: Mode, change: impl FnOnce(&mut Settings)) -> Self {
        Self::of(mode, Authentication::none(), change).await
    }

    /// With identities that are bound to identifiers.
    pub(crate) async fn bound(mode: Mode, bindings: Vec<Binding>) -> Self {
        Self::of(mode, Authentication::none().bound(bindings), |_| {}).await
    }

    pub(crate) async fn of(
        mode: Mode,
        authentication: Authentication,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let at =
            |socket: &Path, _: &Arc<ServerTls>| FrontendListen::Unix { path: socket.into(), replace: true };
        Self::new(mode, authentication, at, change).await
    }

    /// With frontends over TCP in place of the Unix socket.
    pub(crate) async fn over_tls(mode: Mode, change: impl FnOnce(&mut Settings)) -> Self {
        let at =
            |_: &Path, tls: &Arc<ServerTls>| FrontendListen::Tcp { address: LOOPBACK, tls: Arc::clone(tls) };
        Self::new(mode, Authentication::none(), at, change).await
    }

    async fn new(
        mode: Mode,
        authentication: Authentication,
        frontends: impl FnOnce(&Path, &Arc<ServerTls>) -> FrontendListen,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca = Authority::new("konnectivity").unwrap();
        std::fs::write(folder.path().join("ca.crt"), ca.cert()).unwrap();
        issue(&ca, folder.path());
        let file = |name: &str| folder.path().join(name);
        let files = TlsFiles {
            certificate: file("server.crt"),
            key: file("server.key"),
            client_ca: Some(file("ca.crt")),
        };
        let tls = Arc::new(ServerTls::load(files, TlsOptions::default(), b"h2").unwrap());
        let socket = file("frontend.socket");
        let frontends = frontends(&socket, &tls);
        let mut settings = Settings { id: "server-1".to_owned(), ..Settings::default() };
        change(&mut settings);
        let agents = (LOOPBACK, Arc::clone(&tls));
        let server = Server::start(settings, mode, frontends, agents, authentication).unwrap();
        let agent = ca.issue(Certificate::client("agent")).unwrap();
        Self { status: server.status(), server, socket, tls, ca, agent, folder }
    }

    /// An agent as upstream has it.
    pub(crate) async fn agent(&self, id: &str) -> Agent {
        self.agent_with(id, "", false).await
    }

    /// One of ours.
    pub(crate) async fn native_agent(&self, id: &str) -> Agent {
        self.agent_with(id, "", true).await
    }

    pub(crate) async fn agent_with(&self, id: &str, identifiers: &str, is_native: bool) -> Agent {
        let before = self.status.agents().len();
        let agent = self.connect(metadata(id, identifiers, is_native)).await.unwrap();
        until(|| self.status.agents().len() == before + 1).await;
        agent
    }

    /// Calls Connect with this metadata.
    pub(crate) async fn connect(&self, metadata: HeaderMap) -> Result<Agent, Error> {
        let mut peer = self.peer().await;
        let is_native = metadata.contains_key(OFFER);
        let (stream, answer) = peer.connects(metadata).await?;
        Ok(Agent { peer, stream, answer, is_native })
    }

    /// A connection to the port of agents.
    pub(crate) async fn peer(&self) -> Peer {
        Peer::over(self.tls_to(self.server.agent_address()).await.unwrap()).await
    }

    /// A TLS connection with the certificate of an agent of this server.
    pub(crate) async fn tls_to(&self, address: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
        self.tls_over(TcpStream::connect(address).await?).await
    }

    /// TLS over a connection, with the certificate of agents.
    pub(crate) async fn tls_over(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        // As every agent has it.
        stream.set_nodelay(true)?;
        let config = self.ca.client_config(Some(&self.agent), &[b"h2"]).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    /// The certificate that agents get.
    pub(crate) async fn certificate(&self) -> Vec<u8> {
        let stream = self.tls_to(self.server.agent_address()).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    }

    /// Writes another certificate for agents.
    pub(crate) fn issue(&self) {
        issue(&self.ca, self.folder.path());
    }

    /// A Proxy stream on a connection of its own.
    pub(crate) async fn proxy(&self) -> Stream {
        proxy_over(UnixStream::connect(&self.socket).await.unwrap()).await
    }

    /// A connection for HTTP CONNECT that has sent its request.
    pub(crate) async fn http(&self, target: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }
}

/// A Proxy stream, the only one of its connection.
pub(crate) async fn proxy_over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Stream {
    let mut peer = Peer::over(stream).await;
    let authority = "localhost".parse().unwrap();
    let request = Request { authority, path: PROXY_PATH, metadata: HeaderMap::new() };
    let (mut stream, _) = peer.call(request).await.unwrap();
    stream.peer = Some(peer);
    stream
}

/// An established connection of a frontend by gRPC: its number for the frontend, and for the agent.
pub(crate) async fn established(
    agent: &mut Agent,
    frontend: &mut Stream,
    number: i64,
) -> (ConnectId, ConnectId) {
    frontend.asks("node:10250", 77).await;
    accepted(agent, frontend, number).await
}

/// The same for a frontend that has asked.
pub(crate) async fn accepted(
    agent: &mut Agent,
    frontend: &mut Stream,
    number: i64,
) -> (ConnectId, ConnectId) {
    let of_agent = agent.accepts("node:10250", number).await;
    match frontend.packet().await {
        Packet::DialResponse { dial: DialId(77), result: Ok(of_frontend) } => (of_frontend, of_agent),
        other => panic!("{other:?}"),
    }
}

fn issue(ca: &Authority, folder: &Path) {
    let certificate = Certificate::server(&["localhost", "127.0.0.1"]);
    ca.issue(certificate).unwrap().write(folder, "server").unwrap();
}

/// What an agent says of itself.
pub(crate) fn metadata(id: &str, identifiers: &str, is_native: bool) -> HeaderMap {
    let mut metadata = HeaderMap::new();
    metadata.insert("agentid", HeaderValue::try_from(id).unwrap());
    metadata.insert("agentidentifiers", HeaderValue::try_from(identifiers).unwrap());
    if is_native {
        metadata.insert(OFFER, HeaderValue::from_static(VERSION));
    }
    metadata
}

/// One end of an HTTP/2 connection.
pub(crate) struct Peer {
    pub(crate) requests: SendRequest<Bytes>,
    driver: JoinHandle<()>,
    activity: Arc<Activity>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Peer {
    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(AGENT_WINDOW as u32).initial_connection_window_size(64 << 20);
        let (requests, connection) = builder.handshake(stream).await.unwrap();
        let driver = tokio::spawn(async { drop(connection.await) });
        let activity = Arc::new(Activity::new(&MemoryBudget::new(64 << 20)));
        Self { requests, driver, activity }
    }

    /// Waits for the end of the connection.
    pub(crate) async fn ends(&mut self) {
        patiently(&mut self.driver).await.unwrap();
    }

    /// Calls Connect with this metadata.
    pub(crate) async fn connects(&mut self, metadata: HeaderMap) -> Result<(Stream, HeaderMap), Error> {
        let authority = "localhost".parse().unwrap();
        self.call(Request { authority, path: CONNECT_PATH, metadata }).await
    }

    async fn call(&mut self, request: Request) -> Result<(Stream, HeaderMap), Error> {
        let memory = [MemoryBudget::new(64 << 20)];
        let (sender, answer) =
            patiently(grpc::call(&mut self.requests, request, &self.activity, &memory)).await?;
        let (answer, receiver) = patiently(answer.answered()).await?;
        Ok((Stream { sender, receiver, peer: None }, answer))
    }
}

/// A stream of packets.
pub(crate) struct Stream {
    sender: Sender,
    receiver: Receiver,
    /// The connection below, if it is this stream's alone.
    peer: Option<Peer>,
}

impl Stream {
    pub(crate) async fn send(&mut self, packet: Packet) {
        patiently(self.sender.ready()).await.unwrap();
        self.sender.send(&packet.encoded(), Bytes::new());
        patiently(self.sender.ready()).await.unwrap();
    }

    /// Returns false if the server has ended the stream.
    pub(crate) async fn try_send(&mut self, packet: Packet) -> bool {
        self.try_bytes(&packet.encoded()).await
    }

    /// Like [`Self::try_send`], for bytes that need be no packet.
    pub(crate) async fn try_bytes(&mut self, bytes: &[u8]) -> bool {
        let sent = async {
            self.sender.ready().await?;
            self.sender.send(bytes, Bytes::new());
            self.sender.ready().await
        };
        patiently(sent).await.is_ok()
    }

    /// The next packet; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Packet> {
        let message = patiently(self.receiver.message()).await.ok()??;
        self.receiver.release(message.window);
        Some(Packet::decode(&message.bytes).unwrap())
    }

    pub(crate) async fn packet(&mut self) -> Packet {
        self.next().await.expect("the stream ended")
    }

    pub(crate) async fn data(&mut self, connection: ConnectId, payload: &[u8]) {
        self.send(Packet::Data { connection, payload: Bytes::copy_from_slice(payload) }).await;
    }

    pub(crate) async fn asks(&mut self, address: &str, dial: i64) {
        let (protocol, address) = ("tcp".to_owned(), address.to_owned());
        self.send(Packet::DialRequest { protocol, address, dial: DialId(dial) }).await;
    }

    /// Payloads until there are `len` bytes.
    pub(crate) async fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            match self.packet().await {
                Packet::Data { payload, .. } => {
                    assert!(!payload.is_empty(), "an empty DATA is the end to a frontend");
                    bytes.extend_from_slice(&payload);
                }
                other => panic!("{other:?} after {} bytes", bytes.len()),
            }
        }
        bytes
    }

    /// Another Proxy stream on the same connection.
    pub(crate) async fn beside(&mut self) -> Self {
        let authority = "localhost".parse().unwrap();
        let request = Request { authority, path: PROXY_PATH, metadata: HeaderMap::new() };
        self.peer.as_mut().expect("a connection of its own").call(request).await.unwrap().0
    }

    pub(crate) fn reset(mut self) {
        self.sender.reset(h2::Reason::CANCEL);
    }

    /// Sends bytes that are no message with a packet. Returns why the server has reset the stream; `None` if
    /// it ends, or the connection does.
    pub(crate) async fn lies(&mut self, bytes: &[u8]) -> Option<h2::Reason> {
        patiently(self.sender.ready()).await.unwrap();
        self.sender.send(bytes, Bytes::new());
        patiently(self.sender.ready()).await.unwrap();
        match patiently(self.receiver.message()).await {
            Err(Error::Http(error)) if error.is_reset() => error.reason(),
            _ => None,
        }
    }
}

/// An agent's connection with its Connect stream.
pub(crate) struct Agent {
    pub(crate) peer: Peer,
    pub(crate) stream: Stream,
    pub(crate) answer: HeaderMap,
    /// Whether it gives each connection a stream.
    pub(crate) is_native: bool,
}

impl Agent {
    /// The next packet is a DIAL_REQ for `address`, but for those that end what was before.
    pub(crate) async fn asked(&mut self, address: &str) -> DialId {
        loop {
            match self.stream.packet().await {
                Packet::DialRequest { protocol, address: asked, dial } => {
                    assert_eq!((protocol.as_str(), asked.as_str()), ("tcp", address));
                    return dial;
                }
                Packet::CloseRequest(_) | Packet::CloseDial(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Answers the DIAL_REQ that comes with a connection.
    pub(crate) async fn accepts(&mut self, address: &str, connection: i64) -> ConnectId {
        let dial = self.asked(address).await;
        self.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(connection)) }).await;
        ConnectId(connection)
    }

    /// Opens the stream of a connection for a dial, as an agent of ours.
    pub(crate) async fn opens(&mut self, dial: DialId) -> Result<Native, h2::Error> {
        let request = http::Request::post("https://localhost/portico.Konnectivity/Stream")
            .header("portico-dial", dial.0)
            .body(())
            .unwrap();
        let mut requests = self.peer.requests.clone().ready().await?;
        let (response, to_server) = requests.send_request(request, false)?;
        let response = patiently(response).await?;
        assert_eq!(response.status(), 200);
        Ok(Native { to_server, from_server: response.into_body() })
    }
}

/// The stream of one connection.
pub(crate) struct Native {
    pub(crate) to_server: h2::SendStream<Bytes>,
    pub(crate) from_server: h2::RecvStream,
}

impl Native {
    pub(crate) async fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let chunk = patiently(self.from_server.data()).await.unwrap().unwrap();
            self.from_server.flow_control().release_capacity(chunk.len()).unwrap();
            bytes.extend_from_slice(&chunk);
        }
        bytes
    }

    /// Waits for the server to reset the stream.
    pub(crate) async fn reset(&mut self) -> h2::Reason {
        patiently(std::future::poll_fn(|cx| self.to_server.poll_reset(cx))).await.unwrap()
    }

    /// Whether the server ends its direction next.
    pub(crate) async fn ends(&mut self) -> bool {
        loop {
            match patiently(self.from_server.data()).await {
                None => return true,
                Some(Ok(chunk)) if chunk.is_empty() => {}
                Some(_) => return false,
            }
        }
    }
}

/// The head of an HTTP response.
pub(crate) async fn head(stream: &mut UnixStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(patiently(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

pub(crate) async fn rest(stream: &mut UnixStream) -> String {
    let mut rest = String::new();
    // A reset is an end, too.
    let _ = patiently(stream.read_to_string(&mut rest)).await;
    rest
}

pub(crate) async fn read(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    patiently(stream.read_exact(&mut bytes)).await.unwrap();
    bytes
}
