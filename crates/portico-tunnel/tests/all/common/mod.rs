//! A tunnel server on loopback, and the helpers of the tests.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Method, StatusCode};
use portico_net::MemoryBudget;
use portico_tunnel::{
    BadRequest, End, Failure, Finished, Handler, Meter, Refusal, Request, Served, Settings, Upstream, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Long enough for the slowest machine, short enough that a hang is seen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The authority that leads to the test's upstream. Every other one is refused; see [`Routes`].
pub(crate) const UPSTREAM: &str = "apiserver-external.cluster-a.svc.cluster.local:443";

/// What a tunnel reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) up: usize,
    pub(crate) down: usize,
    pub(crate) end: Option<End>,
}

/// Routes [`UPSTREAM`] to an address and refuses others by the status that is their host name.
pub(crate) struct Routes {
    cluster: Option<MemoryBudget>,
    upstream: SocketAddr,
    pub(crate) requests: Mutex<Vec<Request>>,
    pub(crate) verified: Mutex<Vec<Request>>,
    pub(crate) refusals: Mutex<Vec<StatusCode>>,
    reports: mpsc::UnboundedSender<Report>,
    /// Requests wait here until it is true.
    pub(crate) gate: watch::Sender<bool>,
    /// Questions about an identity wait here until it is true.
    pub(crate) verifies: watch::Sender<bool>,
    /// Connections are asked to leave once it is true.
    pub(crate) full: watch::Sender<bool>,
    /// Whether clients count as authenticated.
    pub(crate) is_authenticated: AtomicBool,
}

pub(crate) struct Count {
    cluster: Option<MemoryBudget>,
    report: Report,
    to: mpsc::UnboundedSender<Report>,
}

impl Meter for Count {
    fn carried(&mut self, up: usize, down: usize) {
        self.report.up += up;
        self.report.down += down;
    }

    fn budget(&self) -> Option<&MemoryBudget> {
        self.cluster.as_ref()
    }

    fn ended(mut self, end: End) {
        self.report.end = Some(end);
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let _ = self.to.send(self.report);
    }
}

impl Handler for Routes {
    type Meter = Count;

    async fn connect(&self, request: &Request) -> Result<Upstream<Count>, Refusal> {
        self.requests.lock().unwrap().push(request.clone());
        self.gate.subscribe().wait_for(|open| *open).await.unwrap();
        if &*request.authority != UPSTREAM {
            let status = request.authority.split('.').next().and_then(|host| host.parse::<StatusCode>().ok());
            return Err(Refusal::new(status.unwrap_or(StatusCode::NOT_FOUND), "as the test wants it"));
        }
        let stream = TcpStream::connect(self.upstream).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Ok(Upstream {
            stream,
            meter: Count {
                cluster: self.cluster.clone(),
                report: Report { up: 0, down: 0, end: None },
                to: self.reports.clone(),
            },
        })
    }

    async fn verify(&self, request: &Request) -> Result<(), Refusal> {
        self.verified.lock().unwrap().push(request.clone());
        self.verifies.subscribe().wait_for(|open| *open).await.unwrap();
        if &*request.authority == UPSTREAM {
            return Ok(());
        }
        Err(Refusal::new(StatusCode::UNAUTHORIZED, "as the test wants it"))
    }

    fn is_authenticated(&self) -> bool {
        self.is_authenticated.load(Relaxed)
    }

    fn memory(&self) -> Option<MemoryBudget> {
        self.cluster.clone()
    }

    async fn evicted(&self) -> Refusal {
        let _ = self.full.subscribe().wait_for(|full| *full).await;
        Refusal::new(StatusCode::TOO_MANY_REQUESTS, "others need the slot")
    }

    fn refused(&self, request: &BadRequest) -> StatusCode {
        let status = match request {
            BadRequest::Method => StatusCode::METHOD_NOT_ALLOWED,
            BadRequest::Malformed(_) => StatusCode::BAD_REQUEST,
            BadRequest::TooSlow => StatusCode::REQUEST_TIMEOUT,
            BadRequest::TooManyWait | BadRequest::TooManyCancelled => StatusCode::TOO_MANY_REQUESTS,
        };
        self.refusals.lock().unwrap().push(status);
        status
    }

    fn plaintext_status(&self) -> StatusCode {
        StatusCode::FORBIDDEN
    }
}

/// A running tunnel server with one upstream, both on loopback.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) upstreams: TcpListener,
    pub(crate) routes: Arc<Routes>,
    pub(crate) reports: mpsc::UnboundedReceiver<Report>,
    /// How each connection ended, in the order they did.
    pub(crate) results: mpsc::UnboundedReceiver<Result<Finished, Failure>>,
    pub(crate) drain: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn plaintext() -> Settings {
    Settings { plaintext: true, ..Settings::default() }
}

impl Server {
    pub(crate) async fn start(settings: Settings) -> Self {
        Self::start_with(settings, None).await
    }

    /// A server whose tunnels all belong to a cluster with a memory budget.
    pub(crate) async fn start_with(settings: Settings, cluster: Option<MemoryBudget>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstreams = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to_reports, reports) = mpsc::unbounded_channel();
        let (to_results, results) = mpsc::unbounded_channel();
        let drain = watch::Sender::new(false);
        let routes = Arc::new(Routes {
            cluster,
            upstream: upstreams.local_addr().unwrap(),
            requests: Mutex::default(),
            verified: Mutex::default(),
            refusals: Mutex::default(),
            reports: to_reports,
            gate: watch::Sender::new(true),
            verifies: watch::Sender::new(true),
            full: watch::Sender::new(false),
            is_authenticated: AtomicBool::new(true),
        });
        let task = tokio::spawn(accept(listener, settings, Arc::clone(&routes), drain.clone(), to_results));
        Self { address, upstreams, routes, reports, results, drain, task }
    }

    /// Takes the upstream end of the next tunnel.
    pub(crate) async fn upstream(&self) -> TcpStream {
        let (stream, _) = patiently(self.upstreams.accept()).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub(crate) async fn report(&mut self) -> Report {
        patiently(self.reports.recv()).await.unwrap()
    }

    pub(crate) async fn result(&mut self) -> Result<Finished, Failure> {
        patiently(self.results.recv()).await.unwrap()
    }

    /// An HTTP/2 client with prior knowledge.
    pub(crate) async fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client::over(stream).await
    }

    /// A client with one tunnel to the upstream, both ends in hand.
    pub(crate) async fn tunnel(&self) -> (Client, Ends, TcpStream) {
        let mut client = self.client().await;
        let (ends, upstream) = self.tunnel_of(&mut client).await;
        (client, ends, upstream)
    }

    pub(crate) async fn tunnel_of(&self, client: &mut Client) -> (Ends, TcpStream) {
        let (answer, to_upstream) = client.connect(UPSTREAM).await;
        let upstream = self.upstream().await;
        let answer = patiently(answer).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        (Ends { send: to_upstream, recv: answer.into_body() }, upstream)
    }
}

async fn accept(
    listener: TcpListener,
    settings: Settings,
    routes: Arc<Routes>,
    drain: watch::Sender<bool>,
    results: mpsc::UnboundedSender<Result<Finished, Failure>>,
) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (settings, routes, mut drain, results) =
            (settings.clone(), Arc::clone(&routes), drain.subscribe(), results.clone());
        tokio::spawn(async move {
            let drain = async move { drop(drain.wait_for(|drain| *drain).await) };
            let result = match serve(stream, Bytes::new(), &settings, drain, &routes).await {
                Ok(Served::Finished(finished)) => Ok(finished),
                Ok(Served::Carry { mut downstream, early, mut upstream }) => {
                    upstream.stream.write_all(&early).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut downstream, &mut upstream.stream).await;
                    Ok(Finished::Closed)
                }
                Err(failure) => Err(failure),
            };
            let _ = results.send(result);
        });
    }
}

/// An HTTP/2 client.
pub(crate) struct Client {
    pub(crate) requests: SendRequest<Bytes>,
    pub(crate) connection: JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    pub(crate) async fn over<S>(stream: S) -> Self
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        // With a connection window no larger than its stream windows, one stream that is not read holds all
        // others, and the sender can do nothing about it.
        let handshake =
            h2::client::Builder::new().initial_connection_window_size(16 << 20).handshake(stream).await;
        let (requests, connection) = handshake.unwrap();
        Self { requests, connection: tokio::spawn(connection) }
    }

    pub(crate) async fn connect(&mut self, authority: &str) -> (ResponseFuture, SendStream<Bytes>) {
        let uri = http::Uri::builder().authority(authority).build().unwrap();
        let request = http::Request::builder().method(Method::CONNECT).uri(uri).body(()).unwrap();
        let mut ready = patiently(self.requests.clone().ready()).await.unwrap();
        ready.send_request(request, false).unwrap()
    }

    /// `OPTIONS *`: asks whether the server accepts this client.
    pub(crate) async fn refresh(
        &mut self,
        authority: &str,
        authorization: Option<&str>,
    ) -> http::Response<RecvStream> {
        let uri =
            http::Uri::builder().scheme("https").authority(authority).path_and_query("*").build().unwrap();
        let mut request = http::Request::builder().method(Method::OPTIONS).uri(uri);
        if let Some(authorization) = authorization {
            request = request.header("authorization", authorization);
        }
        let mut ready = patiently(self.requests.clone().ready()).await.unwrap();
        let (answer, _) = ready.send_request(request.body(()).unwrap(), true).unwrap();
        patiently(answer).await.unwrap()
    }
}

/// The client's ends of a tunnel.
pub(crate) struct Ends {
    pub(crate) send: SendStream<Bytes>,
    pub(crate) recv: RecvStream,
}

impl Ends {
    pub(crate) fn write(&mut self, bytes: &'static [u8]) {
        self.send.send_data(Bytes::from_static(bytes), false).unwrap();
    }

    pub(crate) async fn write_all(&mut self, bytes: Bytes) -> Result<(), h2::Error> {
        send_all(&mut self.send, bytes).await
    }

    pub(crate) fn finish(&mut self) {
        self.send.send_data(Bytes::new(), true).unwrap();
    }

    /// The next bytes; empty at END_STREAM.
    pub(crate) async fn read(&mut self) -> Result<Bytes, h2::Error> {
        receive(&mut self.recv).await
    }

    /// Everything until END_STREAM, or what came before the reset together with its reason.
    pub(crate) async fn read_to_end(&mut self) -> (Vec<u8>, Option<h2::Reason>) {
        receive_all(&mut self.recv).await
    }
}

async fn receive(recv: &mut RecvStream) -> Result<Bytes, h2::Error> {
    match patiently(recv.data()).await {
        None => Ok(Bytes::new()),
        Some(frame) => {
            let frame = frame?;
            recv.flow_control().release_capacity(frame.len())?;
            Ok(frame)
        }
    }
}

pub(crate) async fn receive_all(recv: &mut RecvStream) -> (Vec<u8>, Option<h2::Reason>) {
    let mut all = Vec::new();
    loop {
        match receive(recv).await {
            Ok(bytes) if bytes.is_empty() && recv.is_end_stream() => return (all, None),
            Ok(bytes) => all.extend_from_slice(&bytes),
            Err(error) => return (all, error.reason()),
        }
    }
}

/// Sends as the window allows.
pub(crate) async fn send_all(send: &mut SendStream<Bytes>, mut bytes: Bytes) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let window = patiently(std::future::poll_fn(|cx| send.poll_capacity(cx))).await.unwrap()?;
        send.send_data(bytes.split_to(window.min(bytes.len())), false)?;
    }
    Ok(())
}

/// A client that speaks bytes.
pub(crate) async fn raw(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// What came until the end, and how it ended.
pub(crate) async fn read_to_end(stream: &mut TcpStream) -> (Vec<u8>, std::io::Result<()>) {
    let mut all = BytesMut::new();
    loop {
        match patiently(stream.read_buf(&mut all)).await {
            Ok(0) => return (all.to_vec(), Ok(())),
            Ok(_) => {}
            Err(error) => return (all.to_vec(), Err(error)),
        }
    }
}

pub(crate) fn is_reset(result: &std::io::Result<()>) -> bool {
    matches!(result, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset)
}

/// Fails the test instead of hanging.
pub(crate) async fn patiently<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("nothing happened for 30 s")
}

/// Bytes that say where they stand, so that a lost, doubled or swapped piece is seen.
pub(crate) fn pattern(length: usize) -> Bytes {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}
