//! Moves the bytes of one connection, both directions, in one future.
//!
//! At rest a connection owns its two sockets and a few words of state: the buffer belongs to the thread, a pipe for
//! splice(2) is lent only while a transfer is large. After a read that did not fill the buffer the socket is taken to be
//! empty, which saves the read that would only learn so. What TCP promises is kept:
//!
//! - *Half-close*: the end of one direction is passed on once all its bytes are, and the other goes on.
//! - *Reset*: bytes that arrived before it are delivered as far as the peer takes them, then the peer is reset too.
//! - *A reset is noticed at once*, also from a side nobody is reading because the other side is blocked, and from one that has
//!   closed its direction: whichever socket no direction waits for is watched for errors.
//!
//! Memory: at most [`COPY_CHUNK`] a direction while the receiver is blocked, else nothing.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use portico_net::pipe::Pipe;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::gather::Gather;
use crate::record::{End, Record};
use crate::refusal::Side;
use crate::sys::send_queue;

/// The buffer of a thread. No TCP receive window of a connection at rest is larger.
const SCRATCH: usize = 64 * 1024;

/// What one read takes where no pipe is to be had, and therefore the most a blocked direction holds.
const COPY_CHUNK: usize = 16 * 1024;

/// A read of this size suggests that more is coming.
const LARGE_READ: usize = 16 * 1024;

/// Large reads in a row before a pipe is lent: one may be a certificate or a list of pods, two are a transfer.
const LARGE_READS: u8 = 2;

/// Bytes one direction may move before the other connections of the thread get their turn.
const TURN: usize = 512 * 1024;

/// How long bytes that arrived before a reset may take to reach the other side.
const RESET_GRACE: Duration = Duration::from_secs(1);

/// How often the send queue is looked at meanwhile: the kernel tells nobody when it has run empty.
const RESET_POLL: Duration = Duration::from_millis(5);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into());
}

/// Copies both ways until both directions have ended or something ends them. `first` goes to the upstream before all else.
/// The sockets are then to be closed, which resets them if that is how the connection ended.
///
/// The future is as small as it can be: an idle connection consists of it, and of its two sockets.
pub(crate) fn copy<'a>(
    downstream: &'a TcpStream,
    upstream: &'a TcpStream,
    first: Vec<u8>,
    record: &'a Record,
    idle: Option<Duration>,
) -> impl Future<Output = End> + Send + 'a {
    let mut pump = Pump::new(downstream, upstream, first, record, idle);
    async move {
        let end = poll_fn(|cx| pump.poll(cx)).await;
        if let End::Reset(by) = end {
            Box::pin(pump.pass_reset_on(by)).await;
        }
        end
    }
}

/// Makes the closing of a socket a reset.
pub(crate) fn abort(socket: &TcpStream) {
    // A socket that is gone already needs no reset.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

/// Reads what the socket has into `buffer`; 0 is its end.
pub(crate) fn receive(from: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    retry_on_intr(|| rustix::net::recv(from.as_fd(), &mut *buffer, RecvFlags::empty())).map(|(read, _)| read)
}

/// Writes `bytes` as far as the socket takes them.
pub(crate) fn send(to: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    retry_on_intr(|| rustix::net::send(to.as_fd(), bytes, SendFlags::NOSIGNAL))
}

async fn deliver_rest(rest: &mut Direction, to: &TcpStream) {
    let flushed = poll_fn(|cx| {
        loop {
            match rest.flush(to) {
                Ok(_) if !rest.holds() => return Poll::Ready(true),
                Ok(_) => {}
                Err(Errno::WOULDBLOCK) => {
                    if ready!(to.poll_write_ready(cx)).is_err() {
                        return Poll::Ready(false);
                    }
                }
                Err(_) => return Poll::Ready(false),
            }
        }
    });
    if flushed.await {
        while send_queue(to) > 0 {
            sleep(RESET_POLL).await;
        }
    }
}

struct Pump<'a> {
    downstream: &'a TcpStream,
    upstream: &'a TcpStream,
    record: &'a Record,
    to_upstream: Direction,
    to_downstream: Direction,
    /// A side that reported an error on writing: what it sent before is still read, its end then counts as a reset.
    broken: Option<Side>,
    first_to_close: Option<Side>,
    watch_downstream: Option<ErrorWatch<'a>>,
    watch_upstream: Option<ErrorWatch<'a>>,
    idle: Option<IdleLimit>,
    started: bool,
}

/// Resolves when the socket has an error. Boxed, for it is rarely needed and an idle connection should not carry it.
type ErrorWatch<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

struct IdleLimit {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    seen: u64,
}

/// One direction.
#[derive(Debug, Default)]
struct Direction {
    /// Read but not yet written; what is before `sent` has gone.
    unsent: Vec<u8>,
    sent: usize,
    pipe: Option<Box<Pipe>>,
    /// Large reads in a row; while splicing, how many small rounds are still forgiven.
    large_reads: u8,
    /// Whether bytes go through a pipe, as long as one is to be had.
    splicing: bool,
    gather: Gather,
    /// Whether the task is to be woken once the sender has something: so it is from when it was found to have nothing until
    /// it is found to have something, as only this direction waits for that and only one task ever polls it.
    waiting: bool,
    state: DirectionState,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum DirectionState {
    /// Bytes may still come.
    #[default]
    Open,
    /// The sender has closed; the receiver has not been told yet.
    Ending,
    /// Nothing more will be moved.
    Ended,
}

/// Why a direction stopped for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// It waits for the sender.
    Idle,
    /// It waits for the receiver; nobody looks at the sender.
    Blocked,
    /// It has had its turn.
    Turn,
    /// It has ended.
    Ended,
    /// Reading failed.
    SenderFailed,
    /// Writing failed.
    ReceiverFailed,
}

impl<'a> Pump<'a> {
    fn new(
        downstream: &'a TcpStream,
        upstream: &'a TcpStream,
        first: Vec<u8>,
        record: &'a Record,
        idle: Option<Duration>,
    ) -> Self {
        Self {
            downstream,
            upstream,
            record,
            to_upstream: Direction::starting_with(first),
            to_downstream: Direction::default(),
            broken: None,
            first_to_close: None,
            watch_downstream: None,
            watch_upstream: None,
            idle: idle.map(|limit| IdleLimit { limit, timer: Box::pin(sleep(limit)), seen: 0 }),
            started: false,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if !self.started {
            self.record.wake_on_cancel(cx.waker());
            self.started = true;
        }
        if let Some(end) = self.record.cancelled() {
            return Poll::Ready(end);
        }
        let last = self.to_downstream.state == DirectionState::Ended;
        let count = |bytes| self.record.count_up(bytes);
        let up = self.to_upstream.advance(cx, self.downstream, self.upstream, last, count);
        if let Some(end) = self.judge(up, Side::Downstream, Side::Upstream) {
            return Poll::Ready(end);
        }
        let last = self.to_upstream.state == DirectionState::Ended;
        let count = |bytes| self.record.count_down(bytes);
        let down = self.to_downstream.advance(cx, self.upstream, self.downstream, last, count);
        if let Some(end) = self.judge(down, Side::Upstream, Side::Downstream) {
            return Poll::Ready(end);
        }
        if up == Stop::Turn || down == Stop::Turn {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        // A socket is waited for by the direction that reads it or by the one that is blocked on it.
        let downstream_unwatched = up != Stop::Idle && down != Stop::Blocked;
        let upstream_unwatched = down != Stop::Idle && up != Stop::Blocked;
        if watch(cx, &mut self.watch_downstream, downstream_unwatched, self.downstream) {
            return Poll::Ready(End::Reset(Side::Downstream));
        }
        if watch(cx, &mut self.watch_upstream, upstream_unwatched, self.upstream) {
            return Poll::Ready(End::Reset(Side::Upstream));
        }
        self.poll_idle(cx)
    }

    /// Delivers what came before the reset, then has both sockets closed by a reset.
    async fn pass_reset_on(&mut self, by: Side) {
        let (rest, alive) = match by {
            Side::Downstream => (&mut self.to_upstream, self.upstream),
            Side::Upstream | Side::Gateway => (&mut self.to_downstream, self.downstream),
        };
        // Whatever is left after the grace is lost, as it would be in a reset without a gateway between.
        let _elapsed = timeout(RESET_GRACE, deliver_rest(rest, alive)).await;
        abort(self.downstream);
        abort(self.upstream);
    }

    /// What the stop of one direction means for the connection; `None` if it goes on.
    fn judge(&mut self, stop: Stop, sender: Side, receiver: Side) -> Option<End> {
        match stop {
            Stop::SenderFailed => return Some(End::Reset(sender)),
            Stop::ReceiverFailed => {
                let back = match sender {
                    Side::Downstream => &mut self.to_downstream,
                    Side::Upstream | Side::Gateway => &mut self.to_upstream,
                };
                self.broken.get_or_insert(receiver);
                if back.state == DirectionState::Ended {
                    return Some(End::Reset(receiver));
                }
            }
            Stop::Ended if self.broken == Some(sender) => return Some(End::Reset(sender)),
            Stop::Ended if self.first_to_close.is_none() && self.broken.is_none() => {
                self.first_to_close = Some(sender);
            }
            Stop::Idle | Stop::Blocked | Stop::Turn | Stop::Ended => {}
        }
        let ended = |direction: &Direction| direction.state == DirectionState::Ended;
        let both = ended(&self.to_upstream) && ended(&self.to_downstream);
        both.then(|| End::Closed(self.first_to_close.unwrap_or(sender)))
    }

    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        let Some(idle) = &mut self.idle else { return Poll::Pending };
        loop {
            ready!(idle.timer.as_mut().poll(cx));
            let moved = self.record.bytes_up().wrapping_add(self.record.bytes_down());
            if moved == idle.seen {
                return Poll::Ready(End::Idle);
            }
            idle.seen = moved;
            idle.timer.as_mut().reset(Instant::now() + idle.limit);
        }
    }
}

/// Watches `socket` for an error while `wanted`; true if there is one.
fn watch<'a>(
    cx: &mut Context<'_>,
    slot: &mut Option<ErrorWatch<'a>>,
    wanted: bool,
    socket: &'a TcpStream,
) -> bool {
    if !wanted {
        *slot = None;
        return false;
    }
    let watch = slot.get_or_insert_with(|| {
        Box::pin(async move {
            // Fails only when the runtime stops, and then nobody asks any more.
            let _ready = socket.ready(Interest::ERROR).await;
        })
    });
    watch.as_mut().poll(cx).is_ready()
}

impl Direction {
    fn starting_with(unsent: Vec<u8>) -> Self {
        let mut direction = Self::default();
        direction.unsent = unsent;
        direction
    }

    /// Moves what can be moved now. Where this is the `last` direction, its end is told by the closing of the sockets, which
    /// follows at once: one call less a connection.
    fn advance(
        &mut self,
        cx: &mut Context<'_>,
        from: &TcpStream,
        to: &TcpStream,
        last: bool,
        count: impl Fn(usize),
    ) -> Stop {
        let mut moved = 0;
        while self.state != DirectionState::Ended {
            if self.holds() {
                match self.flush(to) {
                    Ok(sent) => {
                        count(sent);
                        moved += sent;
                    }
                    Err(Errno::WOULDBLOCK) => match to.poll_write_ready(cx) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return self.fail(Stop::ReceiverFailed),
                        Poll::Pending => return Stop::Blocked,
                    },
                    Err(_) => return self.fail(Stop::ReceiverFailed),
                }
                continue;
            }
            if self.state == DirectionState::Ending {
                if !last {
                    // Fails where the receiver is gone; its own direction says so.
                    let _ = rustix::net::shutdown(to, Shutdown::Write);
                }
                self.give_pipe_back();
                self.state = DirectionState::Ended;
                break;
            }
            if moved >= TURN {
                return Stop::Turn;
            }
            match self.poll_sender(cx, from) {
                Poll::Pending => {
                    self.rest(cx, from, moved);
                    return Stop::Idle;
                }
                Poll::Ready(Err(_)) => return self.fail(Stop::SenderFailed),
                Poll::Ready(Ok(())) => {}
            }
            match self.fill(from, to) {
                Ok(sent) => {
                    count(sent);
                    moved += sent;
                }
                // Nothing there after all: the next look at the socket waits for it.
                Err(Failed::Sender(Errno::WOULDBLOCK)) => {}
                Err(Failed::Sender(_)) => return Stop::SenderFailed,
                Err(Failed::Receiver) => return self.fail(Stop::ReceiverFailed),
            }
        }
        Stop::Ended
    }

    /// Whether the sender has something. A task is woken for either of its sockets and then looks at both: the one that it
    /// waits for already it need not wait for again, which takes a lock and two looks at the task's budget.
    fn poll_sender(&mut self, cx: &mut Context<'_>, from: &TcpStream) -> Poll<io::Result<()>> {
        // Only looks: it is the call itself that tells tokio that a socket is not ready.
        if from.try_io(Interest::READABLE, || Ok(())).is_ok() {
            self.waiting = false;
            return Poll::Ready(Ok(()));
        }
        if self.waiting {
            return Poll::Pending;
        }
        let ready = from.poll_read_ready(cx);
        self.waiting = ready.is_pending();
        ready
    }

    /// Whether bytes that were read are still to be written.
    fn holds(&self) -> bool {
        self.sent < self.unsent.len() || self.pipe.as_ref().is_some_and(|pipe| pipe.held() > 0)
    }

    /// Writes held bytes as far as `to` takes them.
    fn flush(&mut self, to: &TcpStream) -> Result<usize, Errno> {
        if self.sent < self.unsent.len() {
            let sent = write_some(to, &self.unsent[self.sent..])?;
            self.sent += sent;
            if self.sent == self.unsent.len() {
                self.unsent = Vec::new();
                self.sent = 0;
            }
            return Ok(sent);
        }
        match &mut self.pipe {
            // Not "short means full": splice may stop early for reasons of the pipe, and no event would follow.
            Some(pipe) => attempt(to, Interest::WRITABLE, || pipe.drain(to, pipe.held()), |_| false),
            None => Ok(0),
        }
    }

    /// Reads once and passes on what it can; returns the bytes passed on.
    fn fill(&mut self, from: &TcpStream, to: &TcpStream) -> Result<usize, Failed> {
        if self.splicing && self.pipe.is_none() {
            self.pipe = Pipe::lend();
        }
        if let Some(pipe) = &mut self.pipe {
            // Not "short means empty": a pipe takes a limited number of segments, whatever their size.
            let read = attempt(from, Interest::READABLE, || pipe.fill(from, pipe.capacity()), |_| false)
                .map_err(Failed::Sender)?;
            if read == 0 {
                self.state = DirectionState::Ending;
            }
            self.gather.earn(read);
            return Ok(0);
        }
        BUFFER.with_borrow_mut(|buffer| {
            let size = if self.splicing { COPY_CHUNK } else { SCRATCH };
            let buffer = &mut buffer[..size];
            let short = |read: usize| read > 0 && read < size;
            let read =
                attempt(from, Interest::READABLE, || receive(from, buffer), short).map_err(Failed::Sender)?;
            if read == 0 {
                self.state = DirectionState::Ending;
                return Ok(0);
            }
            if read < LARGE_READ {
                self.large_reads = 0;
            } else if self.large_reads < LARGE_READS {
                self.large_reads += 1;
            }
            self.splicing |= self.large_reads == LARGE_READS;
            let sent = match write_some(to, &buffer[..read]) {
                Ok(sent) => sent,
                Err(Errno::WOULDBLOCK) => 0,
                Err(_) => return Err(Failed::Receiver),
            };
            if sent < read {
                self.unsent = buffer[sent..read].to_vec();
            }
            Ok(sent)
        })
    }

    /// The sender has nothing for now. A transfer that pauses goes on splicing, for the first reads of a copy cost as much as
    /// all that a splice saves; what has become a conversation goes back to copying, which is cheaper for few bytes.
    fn rest(&mut self, cx: &mut Context<'_>, from: &TcpStream, moved: usize) {
        self.give_pipe_back();
        if !self.splicing {
            return;
        }
        match moved {
            // The other direction was woken.
            0 => {}
            1..LARGE_READ => self.large_reads -= 1,
            LARGE_READ.. => self.large_reads = LARGE_READS,
        }
        self.splicing = self.large_reads > 0;
        if self.splicing {
            self.gather.pause(cx, from);
        } else {
            self.gather.stop(from);
        }
    }

    /// An idle connection should not hold a pipe.
    fn give_pipe_back(&mut self) {
        if let Some(pipe) = self.pipe.take() {
            pipe.give_back();
        }
    }

    fn fail(&mut self, stop: Stop) -> Stop {
        self.give_pipe_back();
        self.unsent = Vec::new();
        self.sent = 0;
        self.state = DirectionState::Ended;
        stop
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.give_pipe_back();
    }
}

/// Which side of a direction failed.
#[derive(Debug)]
enum Failed {
    Sender(Errno),
    Receiver,
}

/// Writes `bytes` as far as the socket takes them, and takes note if that was not all.
pub(crate) fn write_some(to: &TcpStream, bytes: &[u8]) -> Result<usize, Errno> {
    attempt(to, Interest::WRITABLE, || send(to, bytes), |sent| sent < bytes.len())
}

/// One system call on a socket that is ready for it. If its result says that the socket `is_spent`, tokio is told so, which
/// saves the call that would only learn it.
pub(crate) fn attempt(
    socket: &TcpStream,
    interest: Interest,
    mut call: impl FnMut() -> Result<usize, Errno>,
    is_spent: impl Fn(usize) -> bool,
) -> Result<usize, Errno> {
    let mut done = None;
    let outcome = socket.try_io(interest, || {
        let count = call()?;
        done = Some(count);
        if is_spent(count) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    match (done, outcome) {
        (Some(count), _) => Ok(count),
        (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => Err(Errno::WOULDBLOCK),
        (None, Err(error)) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        (None, Ok(())) => Err(Errno::WOULDBLOCK),
    }
}
