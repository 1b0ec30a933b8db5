//! HTTP CONNECT: one connection of the frontend becomes one connection to an endpoint.
//!
//! The head of the response leaves alone. Bytes of the endpoint follow once the frontend has read it.
//! kube-apiserver gives a connection up if its first read has more than the head. While a dial is under way
//! the frontend is read, so that its end is noticed.

use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use portico_net::linger;
use portico_net::memory::Reservation;
use portico_net::slots::Slot;
use portico_net::{MemoryBudget, Side, Socket, Stream, has_hung_up};
use portico_tunnel::connection::{Bridge, LEAVING};
use portico_wire::Parse;
use portico_wire::connect::parse;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, split};
use tokio::net::unix::OwnedReadHalf;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::server::backend::{Backend, Opened};
use crate::server::connection_end::ConnectionEnd;
use crate::server::counters::Counted;
use crate::server::established::Established;
use crate::server::native::Answered;
use crate::server::relay::{FrontendLost, Sink, Source, relay};
use crate::server::settings::{ANSWER, CLOSING, REQUEST};
use crate::server::shared::{DialError, Shared};

/// Most bytes that may come behind the head before the endpoint is connected. Thousands of dials may be under
/// way. A frontend that sends more is refused: it could leave unseen.
const MAX_EARLY: usize = 4 * 1024;

/// Bytes for which a read of the head makes room. Those of kube-apiserver have a hundred.
const READ_HEAD: usize = 1024;

/// Most bytes of one read.
const READ: usize = 16 * 1024;

/// How long a frontend may take to read the head of the response.
const HEAD_READ: Duration = Duration::from_secs(1);

/// How long a refused frontend may take to read why.
const GOODBYE: Duration = Duration::from_secs(2);

const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";

/// Serves one connection on a Unix socket. It has `slot` until it has asked for something.
pub(crate) async fn serve_plain(shared: Arc<Shared>, mut stream: UnixStream, slot: Slot) {
    let counted = Counted::new(&shared.counters.http_connections);
    // Boxed: a connection at rest does not keep the memory that opening needs.
    let opened = Box::pin(open(&shared, &mut stream, slot)).await;
    let Some(Ready { opened, mut early, mut established }) = opened else { return };
    // The frontend that speaks first has read the head.
    let speaks = poll_fn(|cx| stream.poll_read_ready(cx));
    tokio::select! {
        _ = speaks => {}
        () = linger::sent(&stream, Instant::now() + HEAD_READ) => {}
        reason = opened.pace() => return established.ends(reason),
    }
    match opened {
        Opened::Native(native) => {
            // Only now: it leaves with the first bytes of a frontend that has spoken.
            let Ok(mut native) = native.answer() else { return established.ends(ConnectionEnd::AgentLost) };
            while early.has_remaining() {
                // An agent that gives no window has not taken the connection.
                let Ok(Ok(sent)) = timeout(CLOSING, send_early(&mut native, &mut early)).await else {
                    return established.ends(ConnectionEnd::AgentLost);
                };
                established.moved(sent, 0);
            }
            let Answered { to_agent, from_agent, activity } = native;
            let (stream_of_agent, socket) = ((to_agent, from_agent), Stream::Unix(stream));
            let carry =
                Bridge::new(Side::Upstream, stream_of_agent, socket, established, activity, None, None).run();
            tokio::select! {
                () = carry => {}
                () = shared.stopped() => {}
            }
        }
        // Boxed, or connections of agents of ours would have room for it.
        Opened::Packets(_) => {
            let ready = Ready { opened, early, established };
            Box::pin(carry(&shared, stream.into_split(), None, ready)).await
        }
    }
    drop(counted);
}

/// Sends what the frontend sent behind its head, as far as the agent gives window.
async fn send_early(native: &mut Answered, early: &mut Bytes) -> Result<usize, h2::Error> {
    native.to_agent.reserve_capacity(early.len());
    while native.to_agent.capacity() == 0 {
        match poll_fn(|cx| native.to_agent.poll_capacity(cx)).await {
            Some(given) => drop(given?),
            None => return Err(h2::Reason::CANCEL.into()),
        }
    }
    let part = early.split_to(native.to_agent.capacity().min(early.len()));
    let sent = part.len();
    native.to_agent.send_data(native.activity.counted(part), false)?;
    native.activity.queue();
    Ok(sent)
}

/// Serves one connection under TLS, of which `socket` is the one below. It has `slot` until it has asked for
/// something.
pub(crate) async fn serve_tls<S>(shared: Arc<Shared>, mut stream: S, socket: Option<TcpStream>, slot: Slot)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let counted = Counted::new(&shared.counters.http_connections);
    let opened = Box::pin(open(&shared, &mut stream, slot)).await;
    if let Some(ready) = opened {
        carry(&shared, split(stream), socket.as_ref(), ready).await;
    }
    drop(counted);
}

/// Carries between a frontend and its agent until either ends, or the server.
async fn carry(
    shared: &Shared,
    (reader, writer): (impl Half, impl AsyncWrite + Unpin + Send),
    socket: Option<&TcpStream>,
    Ready { opened, early, established }: Ready,
) {
    let mut reader = Reader::new(reader, &shared.memory);
    let mut writer = Writer { half: writer, socket };
    let carried = async {
        let is_notified = relay(opened, &mut reader, &mut writer, early, established).await;
        if is_notified && let Some(socket) = socket {
            // Its further bytes would have the kernel reset it, and throw away what it has not read.
            linger::close(socket, Instant::now() + CLOSING).await;
        }
    };
    tokio::select! {
        () = carried => {}
        () = shared.stopped() => {}
    }
}

/// A frontend that has got its 200.
struct Ready {
    opened: Opened,
    early: Bytes,
    established: Established,
}

/// Reads the request, has an agent connect, and responds. `None` if there is no connection.
async fn open<S>(shared: &Arc<Shared>, stream: &mut S, slot: Slot) -> Option<Ready>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut bytes = BytesMut::new();
    let head = tokio::select! {
        head = timeout(REQUEST, read_head(stream, &mut bytes)) => head.ok()?,
        () = poll_fn(|cx| slot.poll_evicted(cx)) => return None,
    };
    drop(slot);
    let address = match head {
        Ok(address) => address,
        Err(refusal) => {
            refuse(stream, refusal.as_bytes()).await;
            return None;
        }
    };
    let dialled = tokio::select! {
        // First, so that no agent is asked for what is refused already.
        biased;
        is_there = sends_too_much(stream, &mut bytes) => {
            if is_there {
                refuse(stream, too_much().as_bytes()).await;
            }
            return None;
        }
        dialled = shared.dial(&address) => dialled,
        () = shared.stopped() => Err(DialError::Draining),
    };
    match dialled {
        Ok((opened, backend)) => respond(shared, stream, &address, opened, backend, bytes).await,
        Err(error) => {
            refuse(stream, response(&error).as_bytes()).await;
            None
        }
    }
}

async fn respond<S: AsyncWrite + Unpin>(
    shared: &Arc<Shared>,
    stream: &mut S,
    address: &str,
    opened: Opened,
    backend: Arc<Backend>,
    early: BytesMut,
) -> Option<Ready> {
    let (mut established, begun) = (Established::new(shared, address, backend), Instant::now());
    let written = async {
        stream.write_all(ESTABLISHED).await?;
        stream.flush().await
    };
    let is_notified = tokio::select! {
        written = timeout(ANSWER, written) => matches!(written, Ok(Ok(()))),
        // Bytes that the endpoint sends meanwhile must not hold up other connections of the agent.
        reason = opened.pace() => {
            established.ends(reason);
            false
        }
    };
    if !is_notified {
        shared.counters.dial_failed("send_rsp");
        return None;
    }
    shared.counters.frontend_written(begun.elapsed());
    // Copied, for even without bytes it would keep the memory that reading the head took.
    Some(Ready { opened, early: Bytes::copy_from_slice(&early), established })
}

/// Reads until the head is whole. Leaves what follows it in `bytes`. An error is the response.
async fn read_head<S: AsyncRead + Unpin>(stream: &mut S, bytes: &mut BytesMut) -> Result<String, String> {
    loop {
        match parse(bytes) {
            Parse::Complete(head) if !head.is_connect() => return Err(method_not_allowed()),
            Parse::Complete(head) => {
                let target = if head.target.is_empty() { head.host.unwrap_or_default() } else { head.target };
                let (address, len) = (target.to_owned(), head.len);
                bytes.advance(len);
                return Ok(address);
            }
            Parse::Malformed(malformed) => {
                return Err(plain("400 Bad Request", &format!("{malformed}\n")));
            }
            Parse::NeedMore => {}
        }
        bytes.reserve(READ_HEAD);
        match stream.read_buf(bytes).await {
            Ok(0) | Err(_) => return Err(String::new()),
            Ok(_) => {}
        }
    }
}

/// Reads what comes behind the head. Ready when that is too much (true), or the frontend is gone.
async fn sends_too_much<S: AsyncRead + Unpin>(stream: &mut S, bytes: &mut BytesMut) -> bool {
    while bytes.len() <= MAX_EARLY {
        bytes.reserve(READ_HEAD);
        if !matches!(stream.read_buf(bytes).await, Ok(1..)) {
            return false;
        }
    }
    true
}

/// Sends a response that is the last on its connection.
async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, response: &[u8]) {
    let sent = async {
        stream.write_all(response).await?;
        stream.shutdown().await
    };
    // A frontend that does not read it is gone, or will not miss it.
    let _ = timeout(GOODBYE, sent).await;
}

fn method_not_allowed() -> String {
    let body = "this proxy only supports CONNECT passthrough\n";
    format!(
        "HTTP/1.1 405 Method Not Allowed\r\nContent-Type: text/plain; charset=utf-8\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn too_much() -> String {
    plain(
        "400 Bad Request",
        &format!("more than {MAX_EARLY} bytes came before the connection was there; wait for the 200\n"),
    )
}

fn plain(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n{body}")
}

/// The response to a dial that failed, as upstream's server words it.
fn response(error: &DialError) -> String {
    match error {
        DialError::NoAgent => {
            plain("500 Internal Server Error", "currently no tunnels available: No agent available")
        }
        DialError::Draining => plain("503 Service Unavailable", &format!("{error}\n")),
        DialError::Address => plain("400 Bad Request", &format!("{error}\n")),
        DialError::Lost(_) => plain("502 Bad Gateway", &format!("Backend context error: {error}\r\n")),
        DialError::Timeout => plain("504 Gateway Timeout", &format!("Backend dial timeout: {error}\r\n")),
        DialError::Refused(text) => plain(status_of(text), text),
    }
}

/// The status for an agent's error, as upstream's server finds it in the text.
fn status_of(text: &str) -> &'static str {
    let text = text.to_ascii_lowercase();
    if text.contains("timeout") || text.contains("deadline exceeded") {
        "504 Gateway Timeout"
    } else if text.contains("too many open files") {
        "503 Service Unavailable"
    } else {
        "502 Bad Gateway"
    }
}

// === The socket as a frontend ===

/// The half of a frontend's socket that is read.
trait Half: AsyncRead + Unpin + Send {
    /// Whether this half shows that the frontend is gone. Otherwise the socket below tells the writer.
    const SHOWS_GONE: bool = false;

    /// Whether the frontend is gone.
    fn is_gone(&self) -> bool {
        false
    }
}

impl<S: AsyncRead + Send> Half for ReadHalf<S> {}

impl Half for OwnedReadHalf {
    const SHOWS_GONE: bool = true;

    fn is_gone(&self) -> bool {
        has_hung_up(self.as_ref())
    }
}

struct Reader<R> {
    half: R,
    /// Set only while the endpoint takes nothing: has the frontend looked at.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Bytes of the last read.
    last: usize,
    /// Counts them while the endpoint takes nothing.
    held: Reservation,
}

impl<R> Reader<R> {
    fn new(half: R, memory: &MemoryBudget) -> Self {
        let held = Reservation::new(vec![memory.clone()], Duration::ZERO);
        Self { half, stalled: None, last: 0, held }
    }
}

impl<R: Half> Source for Reader<R> {
    async fn read(&mut self) -> Result<Option<Bytes>, FrontendLost> {
        self.stalled = None;
        self.held.release(self.held.held());
        let mut buffer = BytesMut::new();
        // A connection at rest holds no buffer: the bytes are on the stack until there are some.
        let read = poll_fn(|cx| {
            let mut bytes = [std::mem::MaybeUninit::uninit(); READ];
            let mut bytes = tokio::io::ReadBuf::uninit(&mut bytes);
            let polled = Pin::new(&mut self.half).poll_read(cx, &mut bytes);
            buffer.extend_from_slice(bytes.filled());
            polled
        });
        read.await.map_err(|_| FrontendLost)?;
        self.last = buffer.len();
        Ok((!buffer.is_empty()).then(|| buffer.freeze()))
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        if self.last > 0 {
            self.held.charge(std::mem::take(&mut self.last));
        }
        if self.held.poll_evicted(cx).is_ready() {
            return Poll::Ready(ConnectionEnd::Memory);
        }
        // What it sends waits in the kernel. The bytes that it sent before it left are for the endpoint, as
        // long as that takes some.
        if !R::SHOWS_GONE {
            return Poll::Pending;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(LEAVING)));
        while stalled.as_mut().poll(cx).is_ready() {
            if self.half.is_gone() {
                return Poll::Ready(ConnectionEnd::FrontendLost);
            }
            stalled.as_mut().reset(Instant::now() + LEAVING);
        }
        Poll::Pending
    }

    fn closes_both(&self) -> bool {
        false
    }
}

struct Writer<'a, W> {
    half: W,
    /// The socket below, to see that it fails.
    socket: Option<&'a TcpStream>,
}

impl<W: AsyncWrite + Unpin + Send> Sink for Writer<'_, W> {
    async fn write(&mut self, bytes: Bytes) -> Result<(), FrontendLost> {
        let written = async {
            self.half.write_all(&bytes).await?;
            self.half.flush().await
        };
        written.await.map_err(|_| FrontendLost)
    }

    async fn end(&mut self) -> Result<(), FrontendLost> {
        self.half.shutdown().await.map_err(|_| FrontendLost)
    }

    async fn lost(&mut self) {
        match self.socket {
            Some(socket) => socket.failed().await,
            None => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::settings::Settings;

    #[tokio::test(start_paused = true)]
    async fn a_frontend_that_left_its_unix_socket_is_lost_once_the_endpoint_has_taken_nothing_for_long() {
        let (frontend, server) = UnixStream::pair().unwrap();
        let (half, _writer) = server.into_split();
        let mut reader = Reader::new(half, &MemoryBudget::new(1 << 20));
        let mut stalls = async || timeout(10 * LEAVING, poll_fn(|cx| reader.poll_ahead(cx))).await;
        assert!(stalls().await.is_err(), "it is there");
        drop(frontend);
        let left = Instant::now();
        assert_eq!(stalls().await, Ok(ConnectionEnd::FrontendLost));
        assert!(left.elapsed() <= LEAVING);
    }

    #[tokio::test(start_paused = true)]
    async fn a_frontend_that_sends_too_much_ahead_is_refused_at_once_and_one_that_leaves_is_noticed() {
        let shared = Shared::new(Settings::default());
        let dial = |ahead: usize, leaves: bool| {
            let shared = Arc::clone(&shared);
            async move {
                let (mut frontend, server) = tokio::io::duplex(64 * 1024);
                let slot = shared.idle_frontends.enter(None);
                let served = tokio::spawn(serve_tls(Arc::clone(&shared), server, None, slot));
                let mut bytes = b"CONNECT node:10250 HTTP/1.1\r\n\r\n".to_vec();
                bytes.resize(bytes.len() + ahead, b'x');
                frontend.write_all(&bytes).await.unwrap();
                if leaves {
                    drop(frontend);
                    served.await.unwrap();
                    return String::new();
                }
                let mut response = String::new();
                frontend.read_to_string(&mut response).await.unwrap();
                response
            }
        };
        let begun = Instant::now();
        assert!(dial(MAX_EARLY + 1, false).await.starts_with("HTTP/1.1 400 "));
        dial(MAX_EARLY, true).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert!(dial(MAX_EARLY, false).await.contains("No agent available"));
    }

    #[tokio::test]
    async fn a_frontend_that_goes_on_sending_ahead_reads_why_it_is_refused() {
        let shared = Shared::new(Settings::default());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut frontend = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let served = serve_tls(Arc::clone(&shared), server, None, shared.idle_frontends.enter(None));
        let asks = async {
            let head = b"CONNECT node:10250 HTTP/1.1\r\n\r\n".to_vec();
            frontend.write_all(&[head, vec![b'x'; 256 * 1024]].concat()).await.unwrap();
            let mut response = String::new();
            frontend.read_to_string(&mut response).await.unwrap();
            drop(frontend);
            response
        };
        let ((), response) = tokio::join!(served, asks);
        assert!(response.contains("wait for the 200"), "{response}");
    }

    #[test]
    fn the_status_follows_the_agents_text_as_upstreams_does() {
        for (text, status) in [
            ("dial tcp 127.0.0.1:9: connect: connection refused", "502 Bad Gateway"),
            ("dial tcp 1.2.3.4:80: i/o timeout", "504 Gateway Timeout"),
            ("context Deadline Exceeded", "504 Gateway Timeout"),
            ("socket: too many open files", "503 Service Unavailable"),
            ("dial tcp: lookup x on 10.0.0.10:53: no such host", "502 Bad Gateway"),
        ] {
            assert_eq!(status_of(text), status, "{text}");
        }
    }
}
