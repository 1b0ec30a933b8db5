//! One connection to an endpoint whose bytes share the Connect stream with all others, as with an upstream
//! server.
//!
//! | From the server | On the socket | To the server |
//! |---|---|---|
//! | DATA | bytes | |
//! | CLOSE_REQ | all that came before, FIN; a reset if that takes longer than [`CLOSING`] | CLOSE_RSP |
//! | | bytes | DATA |
//! | | FIN or reset | all that came before, CLOSE_RSP |
//! | connection lost | all that came before, reset | |
//!
//! The protocol has no window for a connection and no half-close. Bytes that the endpoint does not take wait
//! in an [`Inbox`] up to a bound. Beyond it, [`Blocked`] holds the Connect stream until the endpoint has
//! taken as much as the next message has. So an upload goes as fast as the endpoint reads. An endpoint that
//! takes too little within [`HELD`] is closed with the reason.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use portico_net::linger::{self, LINGER};
use portico_net::socket::UnsentLimit;
use portico_tunnel::connection::{Activity, RoomTurn, Waiting, read_chunk};
use portico_wire::konnectivity::ConnectId;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use super::record::{EndpointEnd, Guard};
use super::session::Session;

/// Most bytes of one DATA packet: what other connections wait for at most.
const CHUNK: usize = 32 * 1024;

/// How long one message may hold the stream, whatever its endpoint takes meanwhile. Longer than a disk that
/// is busy, or two segments that are lost. Frontends send 32 KiB at most in a message as a rule: 256 kbit/s
/// are enough. Counted from when the endpoint last took something, or those of many that have stopped would
/// add up.
const HELD: Duration = Duration::from_secs(1);

/// How long an endpoint may take for what came before CLOSE_REQ: as long as kube-apiserver waits for
/// CLOSE_RSP.
const CLOSING: Duration = Duration::from_secs(10);

/// Bytes that the kernel takes for an endpoint beyond those it could send. By itself it takes megabytes, and
/// says that there is room only once a third of them are gone. A steady reader would seem to have stopped.
const UNSENT: u32 = 64 * 1024;

/// Shared by the task of the connection and that of the Connect stream.
#[derive(Debug)]
pub(super) struct Endpoint {
    inbox: Mutex<Inbox>,
    /// Whether a chunk waits for the Connect stream.
    lane: AtomicBool,
    task: AtomicWaker,
    /// The task of the Connect stream, while it waits for room.
    stream: AtomicWaker,
}

/// What came from the server.
#[derive(Debug)]
struct Inbox {
    waiting: Waiting,
    bytes: usize,
    /// When the endpoint last took something, or had nothing to take.
    took: Instant,
    end: Option<ServerEnd>,
}

/// How the server's side ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerEnd {
    /// CLOSE_REQ.
    Close,
    /// More waited than may wait.
    Full,
    /// The connection to the server is lost.
    Lost,
}

/// The fate of the bytes that still waited for an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivered {
    /// The endpoint has it, or takes nothing more by its own wish.
    All,
    /// It has not taken all in time.
    Late,
    /// Others needed that memory.
    Evicted,
}

/// Why the connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    ByServer(ServerEnd),
    /// The endpoint closed or reset it, and all it sent is on its way.
    Endpoint,
    /// What waited held memory that others needed.
    Memory,
}

impl Endpoint {
    pub(super) fn new(activity: &Activity) -> Arc<Self> {
        let waiting = Waiting::new(activity, None);
        Arc::new(Self {
            inbox: Mutex::new(Inbox { waiting, bytes: 0, took: Instant::now(), end: None }),
            lane: AtomicBool::new(false),
            task: AtomicWaker::new(),
            stream: AtomicWaker::new(),
        })
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // A panic elsewhere leaves nothing half done here.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// DATA came. `None`: it waits, or is not wanted any more. Otherwise so much waits already that it has to
    /// be given again.
    fn push(&self, payload: Bytes, limit: usize) -> Option<Bytes> {
        let mut inbox = self.inbox();
        if inbox.end.is_some() || payload.is_empty() {
            return None;
        }
        if inbox.bytes > 0 && inbox.bytes + payload.len() > limit {
            return Some(payload);
        }
        if inbox.bytes == 0 {
            inbox.took = Instant::now();
        }
        inbox.bytes += payload.len();
        inbox.waiting.push(payload);
        drop(inbox);
        self.task.wake();
        None
    }

    /// CLOSE_REQ came.
    pub(super) fn close(&self) {
        self.end(ServerEnd::Close);
    }

    /// The connection to the server is lost.
    pub(super) fn lost(&self) {
        self.end(ServerEnd::Lost);
    }

    fn end(&self, end: ServerEnd) {
        self.inbox().end.get_or_insert(end);
        self.task.wake();
        self.stream.wake();
    }

    pub(super) fn occupy_lane(&self) {
        self.lane.store(true, Relaxed);
    }

    pub(super) fn free_lane(&self) {
        self.lane.store(false, Relaxed);
        self.task.wake();
    }
}

/// DATA that an endpoint has no room for.
pub(super) struct Blocked {
    endpoint: Arc<Endpoint>,
    payload: Option<Bytes>,
    limit: usize,
    time: Pin<Box<Sleep>>,
}

impl Blocked {
    /// Gives the payload to the endpoint. Returns what the Connect stream has to wait for, if it has.
    pub(super) fn push(endpoint: Arc<Endpoint>, payload: Bytes, limit: usize) -> Option<Self> {
        let payload = endpoint.push(payload, limit)?;
        let time = sleep_until(endpoint.inbox().took + HELD);
        Some(Self { endpoint, payload: Some(payload), limit, time: Box::pin(time) })
    }

    /// Ready once there was room, or the connection is to be closed for want of it.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.endpoint.stream.register(cx.waker());
        self.payload = self.payload.take().and_then(|payload| self.endpoint.push(payload, self.limit));
        if self.payload.is_none() {
            return Poll::Ready(());
        }
        ready!(self.time.as_mut().poll(cx));
        self.endpoint.end(ServerEnd::Full);
        Poll::Ready(())
    }
}

/// The task of one connection.
pub(super) struct Carrier {
    endpoint: Arc<Endpoint>,
    socket: TcpStream,
    unsent_limit: UnsentLimit,
    session: Arc<Session>,
    connection: ConnectId,
    record: Guard,
    turn: RoomTurn,
    /// The endpoint sends nothing more.
    is_ended: bool,
    /// It takes nothing more: what comes is dropped.
    is_deaf: bool,
}

impl Carrier {
    pub(super) fn new(
        endpoint: Arc<Endpoint>,
        socket: TcpStream,
        session: Arc<Session>,
        connection: ConnectId,
        record: Guard,
    ) -> Self {
        let turn = RoomTurn::default();
        Self {
            endpoint,
            socket,
            unsent_limit: UnsentLimit::new(UNSENT),
            session,
            connection,
            record,
            turn,
            is_ended: false,
            is_deaf: false,
        }
    }

    /// Carries bytes until the connection is over, and ends both sides accordingly.
    pub(super) async fn run(mut self) {
        let over = poll_fn(|cx| self.poll(cx)).await;
        // It reads no more, and the room that it waited for is for others.
        self.turn.leave();
        self.turn.pass_on(self.session.activity());
        let deadline = Instant::now() + LINGER;
        match over {
            Over::ByServer(ServerEnd::Close) => match self.deliver(Instant::now() + CLOSING).await {
                Delivered::All => {
                    // Closed with unread bytes, the socket would reset what is on its way.
                    let _ = SockRef::from(&self.socket).shutdown(Shutdown::Write);
                    self.answer(String::new());
                    linger::discard(&self.socket, Instant::now() + LINGER).await;
                    self.record.ended(EndpointEnd::ByServer);
                }
                Delivered::Late => {
                    self.answer("the endpoint has not taken all that was sent before the end".to_owned());
                    linger::abort(&self.socket);
                    self.record.ended(EndpointEnd::ByServer);
                }
                Delivered::Evicted => {
                    self.evict();
                    self.record.ended(EndpointEnd::Memory);
                }
            },
            Over::Endpoint => {
                self.answer(String::new());
                if self.deliver(deadline).await != Delivered::All {
                    linger::abort(&self.socket);
                }
                self.record.ended(EndpointEnd::ByEndpoint);
            }
            Over::ByServer(ServerEnd::Full) => {
                let limit = self.session.connection_buffer();
                self.answer(format!(
                    "the endpoint does not read: while {limit} bytes waited it took too little in {HELD:?}"
                ));
                linger::abort(&self.socket);
                self.record.ended(EndpointEnd::Buffer);
            }
            Over::Memory => {
                self.evict();
                self.record.ended(EndpointEnd::Memory);
            }
            Over::ByServer(ServerEnd::Lost) => {
                self.deliver(deadline).await;
                linger::sent(&self.socket, deadline).await;
                linger::abort(&self.socket);
                self.record.ended(EndpointEnd::ServerLost);
            }
        }
        // Nothing more may wait for it, nor hold the Connect stream.
        self.endpoint.end(ServerEnd::Lost);
    }

    /// Ends it because others need the memory.
    fn evict(&self) {
        self.answer("the endpoint does not read, and the memory of the agent is used up".to_owned());
        linger::abort(&self.socket);
    }

    fn answer(&self, error: String) {
        self.session.close_response(self.connection, error);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Over> {
        self.endpoint.task.register(cx.waker());
        if self.poll_inbox(cx).is_err() {
            return Poll::Ready(Over::Memory);
        }
        if let Some(end) = self.endpoint.inbox().end {
            return Poll::Ready(Over::ByServer(end));
        }
        if !self.is_ended {
            self.read(cx);
            let activity = self.session.activity();
            self.turn.pass_on(activity);
        }
        let all_sent = self.is_ended && !self.endpoint.lane.load(Relaxed);
        if all_sent { Poll::Ready(Over::Endpoint) } else { Poll::Pending }
    }

    /// Writes what came, as far as the endpoint takes it. An error: others need that memory.
    fn poll_inbox(&mut self, cx: &mut Context<'_>) -> Result<(), ()> {
        let mut inbox = self.endpoint.inbox();
        if inbox.waiting.poll_evicted(cx).is_ready() {
            return Err(());
        }
        while !inbox.waiting.is_empty() && !self.is_deaf {
            self.unsent_limit.before_write(&self.socket, inbox.bytes);
            match inbox.waiting.write_to(&self.socket) {
                Ok(written) => {
                    inbox.bytes -= written;
                    inbox.took = Instant::now();
                    self.endpoint.stream.wake();
                    self.record.carried_up(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.socket.poll_write_ready(cx).is_pending() {
                        return Ok(());
                    }
                }
                // What it sent before is still read.
                Err(_) => self.is_deaf = true,
            }
        }
        if self.is_deaf && inbox.bytes > 0 {
            inbox.waiting = Waiting::new(self.session.activity(), None);
            inbox.bytes = 0;
            self.endpoint.stream.wake();
        }
        Ok(())
    }

    /// Reads what the endpoint sent, while its lane is free and the connection to the server has room.
    fn read(&mut self, cx: &mut Context<'_>) {
        while !self.endpoint.lane.load(Relaxed) {
            match self.socket.poll_read_ready(cx) {
                Poll::Pending => return self.turn.leave(),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return self.is_ended = true,
            }
            let Poll::Ready(room) = self.turn.poll(self.session.activity(), cx) else { return };
            let limit = room.min(CHUNK);
            match read_chunk(&self.socket, limit) {
                Ok(chunk) if chunk.is_empty() => return self.is_ended = true,
                Ok(chunk) => self.send(chunk),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return self.is_ended = true,
            }
        }
    }

    fn send(&mut self, chunk: Bytes) {
        self.record.carried_down(chunk.len());
        let payload = self.session.activity().counted(chunk);
        self.session.outbound().data(&self.endpoint, self.connection, payload);
    }

    /// Writes what still waits, until `deadline` at most.
    async fn deliver(&mut self, deadline: Instant) -> Delivered {
        let mut timer = pin!(sleep_until(deadline));
        poll_fn(|cx| {
            // First: an endpoint that floods us uses up what the task may do at once.
            let is_late = timer.as_mut().poll(cx).is_ready();
            self.endpoint.task.register(cx.waker());
            if self.poll_inbox(cx).is_err() {
                return Poll::Ready(Delivered::Evicted);
            }
            if self.endpoint.inbox().waiting.is_empty() {
                return Poll::Ready(Delivered::All);
            }
            if is_late {
                return Poll::Ready(Delivered::Late);
            }
            // It may have to get rid of what it sends before it reads.
            let _ = linger::poll_discard(&self.socket, cx);
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use portico_net::MemoryBudget;
    use tokio::time::sleep;

    use super::*;

    const LIMIT: usize = 100_000;

    /// An endpoint with a full buffer, and the message that waits for it.
    fn full() -> (Arc<Endpoint>, Blocked) {
        let endpoint = Endpoint::new(&Activity::new(&MemoryBudget::new(1 << 20)));
        assert!(Blocked::push(Arc::clone(&endpoint), vec![1; LIMIT].into(), LIMIT).is_none());
        let blocked = Blocked::push(Arc::clone(&endpoint), vec![2; 30_000].into(), LIMIT);
        (endpoint, blocked.expect("there is no room"))
    }

    /// How long the stream waits for an endpoint that takes `bytes` each 100 ms, and how the server's side
    /// of it ends.
    async fn wait(bytes: usize) -> (Duration, Option<ServerEnd>) {
        let (endpoint, mut blocked) = full();
        let begun = Instant::now();
        let takes = async {
            loop {
                sleep(Duration::from_millis(100)).await;
                let mut inbox = endpoint.inbox();
                inbox.bytes -= bytes;
                inbox.took = Instant::now();
                endpoint.stream.wake();
            }
        };
        tokio::select! {
            () = poll_fn(|cx| blocked.poll(cx)) => {}
            () = takes => {}
        }
        (begun.elapsed(), endpoint.inbox().end)
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_trickles_holds_up_the_others_for_a_second_and_is_closed() {
        let (took, end) = wait(1).await;
        assert_eq!(end, Some(ServerEnd::Full));
        assert!(took <= HELD + Duration::from_millis(10), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn endpoints_that_stopped_together_hold_up_the_others_for_a_second_together() {
        let begun = Instant::now();
        let mut stopped = [full(), full(), full()];
        for (endpoint, blocked) in &mut stopped {
            poll_fn(|cx| blocked.poll(cx)).await;
            assert_eq!(endpoint.inbox().end, Some(ServerEnd::Full));
        }
        let (endpoint, _) = full();
        assert!(begun.elapsed() <= HELD + Duration::from_millis(10), "{:?}", begun.elapsed());
        sleep(2 * HELD).await;
        let mut late = Blocked::push(Arc::clone(&endpoint), vec![3; LIMIT].into(), LIMIT);
        let held = Instant::now();
        poll_fn(|cx| late.as_mut().unwrap().poll(cx)).await;
        assert!(held.elapsed() <= Duration::from_millis(10), "it had its second");
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_reads_slowly_and_steadily_is_kept() {
        // 40 kB each second.
        let (took, end) = wait(4_000).await;
        assert_eq!(end, None);
        assert!(took <= HELD, "{took:?}");
    }
}
