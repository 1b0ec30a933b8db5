//! Joins one HTTP/2 stream and one TCP connection, with every promise of TCP kept on both sides (RFC 9113
//! section 8.5).
//!
//! | On the stream | On the TCP connection |
//! |---|---|
//! | DATA | bytes |
//! | END_STREAM | FIN |
//! | END_STREAM, then RST_STREAM `NO_ERROR`: nothing more is read | FIN, and closed |
//! | another RST_STREAM from the peer, `CONNECT_ERROR` from us, or the connection lost | RST |
//!
//! Both halves of a tunnel use it. The *peer* speaks HTTP/2: the client for a gateway, the gateway for a
//! client. The *socket* is the other side. Both directions are one future, so a tunnel is one task. Neither
//! direction reads more than the other side takes, and a side that is not read is still watched for a reset.
//! Bytes that came before a reset are delivered before it, as far as the other side takes them within
//! [`LINGER`].

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use portico_net::linger::{self, LINGER};
use portico_net::meter::set_due_keepalive;
use portico_net::socket::UnsentLimit;
use portico_net::{ErrorWatch, Idle, Socket};
use socket2::SockRef;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::activity::{Activity, RoomTurn};
use crate::chunk;
use crate::handler::{End, Meter, Side};
use crate::reset;
use crate::settings::{SEND_BUFFER, STREAM_WINDOW};
use crate::waiting::Waiting;

/// Bytes that the kernel takes for a receiver beyond those it could send: as many as wait here. By itself it
/// takes four megabytes for one that does not read, outside all budgets. What is under way is not bounded.
const UNSENT: u32 = STREAM_WINDOW;

/// How long the peer may take no byte of a socket that is gone. Long enough for an endpoint that is busy.
pub const LEAVING: Duration = Duration::from_secs(30);

/// One stream and one socket.
pub struct Bridge<S, M> {
    /// Which side the peer is.
    peer: Side,
    from_peer: RecvStream,
    to_peer: SendStream<Bytes>,
    socket: Arc<S>,
    meter: M,
    activity: Arc<Activity>,
    /// When bytes were last queued for the peer, for [`Activity::flushed_since`]. `None` if it has them all.
    queued: Option<u64>,
    unsent_limit: UnsentLimit,
    /// Set only while the socket takes less than comes, so boxed.
    waiting: Option<Box<Waiting>>,
    /// For room on the connection for what the socket sent.
    line: RoomTurn,
    /// Whether window is reserved on the connection for what the socket sent.
    reserved: bool,
    /// Set only while the socket is not read.
    watch: ErrorWatch<'static>,
    idle: Idle,
    /// Set only while the socket is not read.
    stalled: Option<Idle>,
    inbound: FromPeer,
    outbound: ToPeer,
    /// Which was the first to end.
    first: Option<Party>,
}

/// The two ends of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Party {
    Peer,
    Socket,
}

/// How a bridge ended: an [`End`] in terms of peer and socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Closed { first: Party },
    Reset { by: Party },
    Idle,
    Cut,
    Memory,
}

/// The direction from peer to socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FromPeer {
    /// Bytes may come.
    Open,
    /// The peer sent END_STREAM; what waits has to be written before the FIN.
    Ending,
    /// FIN sent.
    Done,
    /// The socket is gone. The bytes that it sent before may still have to be read. Those that the peer sends
    /// are dropped.
    Lost,
}

/// The direction from socket to peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToPeer {
    /// Bytes may come.
    Open,
    /// END_STREAM sent.
    Done,
}

impl<S: Socket + 'static, M: Meter> Bridge<S, M> {
    /// `early` is what the peer sent before the socket was connected.
    pub fn new(
        peer: Side,
        (to_peer, from_peer): (SendStream<Bytes>, RecvStream),
        socket: S,
        meter: M,
        activity: Arc<Activity>,
        early: Option<Box<Waiting>>,
        idle: Option<Duration>,
    ) -> Self {
        if let (Some(early), Some(cluster)) = (&early, meter.budget()) {
            early.count_in(cluster);
        }
        Self {
            peer,
            from_peer,
            to_peer,
            socket: Arc::new(socket),
            meter,
            queued: Some(activity.queue()),
            activity,
            unsent_limit: UnsentLimit::new(UNSENT),
            waiting: early,
            line: RoomTurn::default(),
            reserved: false,
            watch: ErrorWatch::default(),
            idle: Idle::new(idle),
            stalled: None,
            inbound: FromPeer::Open,
            outbound: ToPeer::Open,
            first: None,
        }
    }

    /// The peer has answered the bytes sent before. At the end, only bytes queued from here on are waited
    /// for.
    #[must_use]
    pub fn answered(mut self) -> Self {
        self.queued = None;
        self
    }

    /// Carries bytes until the tunnel is over, ends both sides accordingly and reports.
    pub async fn run(mut self) {
        let mut outcome = poll_fn(|cx| self.poll(cx)).await;
        if outcome == (Outcome::Reset { by: Party::Peer }) && self.activity.is_evicted() {
            outcome = Outcome::Memory;
        }
        match outcome {
            Outcome::Closed { .. } => {}
            // Boxed: the way out must not make every resting tunnel larger.
            Outcome::Reset { by: Party::Peer } => {
                let in_order = Box::pin(self.deliver_to_socket()).await;
                if in_order {
                    outcome = Outcome::Closed { first: Party::Peer };
                }
            }
            Outcome::Reset { by: Party::Socket } => Box::pin(self.deliver_to_peer()).await,
            Outcome::Idle | Outcome::Cut => self.to_peer.send_reset(reset::CUT),
            Outcome::Memory => self.to_peer.send_reset(reset::MEMORY),
        }
        if !matches!(outcome, Outcome::Closed { .. }) {
            linger::abort(&*self.socket);
        }
        if outcome == (Outcome::Reset { by: Party::Peer })
            && reset::of(&mut self.to_peer) == Some(reset::BROKEN)
        {
            self.meter.broke_behind_peer();
        }
        let end = match outcome {
            Outcome::Closed { first } => End::Closed { first: self.side(first) },
            Outcome::Reset { by } => End::Reset { by: self.side(by) },
            Outcome::Idle => End::Idle,
            Outcome::Cut => End::Cut,
            Outcome::Memory => End::Memory,
        };
        self.meter.ended(end);
    }

    fn side(&self, party: Party) -> Side {
        match (party, self.peer) {
            (Party::Peer, side) => side,
            (Party::Socket, Side::Downstream) => Side::Upstream,
            (Party::Socket, Side::Upstream) => Side::Downstream,
        }
    }

    fn carried(&mut self, from_peer: usize, to_peer: usize) {
        match self.peer {
            Side::Downstream => self.meter.carried(from_peer, to_peer),
            Side::Upstream => self.meter.carried(to_peer, from_peer),
        }
        self.idle.moved();
        if let Some(stalled) = &mut self.stalled {
            stalled.moved();
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if self.peer == Side::Downstream {
            set_due_keepalive(&mut self.meter, &*self.socket);
        }
        if self.meter.poll_cut(cx).is_ready() {
            return Poll::Ready(Outcome::Cut);
        }
        if self.poll_evicted(cx).is_ready() {
            return Poll::Ready(Outcome::Memory);
        }
        if self.poll_from_peer(cx).is_err() {
            return Poll::Ready(Outcome::Reset { by: Party::Peer });
        }
        if let Err(side) = self.poll_to_peer(cx) {
            return Poll::Ready(Outcome::Reset { by: side });
        }
        if self.inbound == FromPeer::Done && self.outbound == ToPeer::Done {
            return Poll::Ready(Outcome::Closed { first: self.first.unwrap_or(Party::Socket) });
        }
        // After END_STREAM a reset shows only here.
        if self.to_peer.poll_reset(cx).is_ready() {
            return Poll::Ready(Outcome::Reset { by: Party::Peer });
        }
        self.idle.poll(cx).map(|()| Outcome::Idle)
    }

    /// Ready if others need the memory of what waits.
    fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waiting.as_ref().map_or(Poll::Pending, |waiting| waiting.poll_evicted(cx))
    }

    /// Writes what the peer sent, as far as the socket takes it. An error is the peer's reset.
    fn poll_from_peer(&mut self, cx: &mut Context<'_>) -> Result<(), h2::Error> {
        if self.waiting.is_some() {
            self.write_waiting(cx);
        }
        while matches!(self.inbound, FromPeer::Open | FromPeer::Lost) {
            match self.from_peer.poll_data(cx) {
                Poll::Pending => break,
                Poll::Ready(Some(frame)) => self.send_on(frame?, cx),
                Poll::Ready(None) if self.inbound == FromPeer::Lost => break,
                Poll::Ready(None) => {
                    self.inbound = FromPeer::Ending;
                    self.first.get_or_insert(Party::Peer);
                }
            }
        }
        if self.inbound == FromPeer::Ending && self.waiting.is_none() {
            self.inbound = match self.outbound {
                // Both have ended: closing the socket sends the FIN.
                ToPeer::Done => FromPeer::Done,
                ToPeer::Open => match SockRef::from(&*self.socket).shutdown(Shutdown::Write) {
                    Ok(()) => FromPeer::Done,
                    Err(_) => FromPeer::Lost,
                },
            };
        }
        Ok(())
    }

    fn send_on(&mut self, mut frame: Bytes, cx: &mut Context<'_>) {
        if frame.is_empty() {
            // An END_STREAM that came alone. Writing nothing is a system call all the same.
            return;
        }
        if self.inbound == FromPeer::Lost {
            return self.release(frame.len());
        }
        if self.waiting.is_none() {
            self.unsent_limit.before_write(&*self.socket, frame.len());
            match self.socket.try_write(&frame) {
                Ok(written) if written == frame.len() => return self.wrote(written),
                Ok(written) => {
                    self.wrote(written);
                    frame = frame.split_off(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.inbound = FromPeer::Lost;
                    return self.release(frame.len());
                }
            }
        }
        self.waiting
            .get_or_insert_with(|| Box::new(Waiting::new(&self.activity, self.meter.budget())))
            .push(frame);
        self.write_waiting(cx);
    }

    /// Writes what waits until nothing does or the socket takes no more; then its becoming writable wakes the
    /// task.
    fn write_waiting(&mut self, cx: &mut Context<'_>) {
        while let Some(waiting) = &mut self.waiting {
            self.unsent_limit.before_write(&*self.socket, waiting.len());
            match waiting.write_to(&*self.socket) {
                Ok(written) => {
                    if waiting.is_empty() {
                        self.waiting = None;
                    }
                    self.wrote(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.socket.poll_write_ready(cx).is_pending() {
                        return;
                    }
                }
                Err(_) => {
                    self.inbound = FromPeer::Lost;
                    self.waiting = None;
                }
            }
        }
    }

    fn wrote(&mut self, bytes: usize) {
        self.carried(bytes, 0);
        self.release(bytes);
    }

    /// Gives window back to the peer.
    fn release(&mut self, bytes: usize) {
        // Fails only for more than was received, or after a reset, when it does not matter any more.
        let _ = self.from_peer.flow_control().release_capacity(bytes);
    }

    /// Reads what the socket sent, as far as the peer gives window for it. An error says which is gone.
    fn poll_to_peer(&mut self, cx: &mut Context<'_>) -> Result<(), Party> {
        if self.outbound == ToPeer::Open {
            let all_read = self.read_socket(cx)?;
            if all_read {
                self.unreserve();
                self.unwatch();
                return Ok(());
            }
        }
        self.poll_watch(cx)
    }

    /// Returns true if the socket is empty, false if it is not to be read for now or ever.
    fn read_socket(&mut self, cx: &mut Context<'_>) -> Result<bool, Party> {
        let all_read = self.read_while_there_is_room(cx);
        self.line.pass_on(&self.activity);
        all_read
    }

    fn read_while_there_is_room(&mut self, cx: &mut Context<'_>) -> Result<bool, Party> {
        loop {
            match self.socket.poll_read_ready(cx) {
                Poll::Pending => {
                    self.line.leave();
                    return Ok(true);
                }
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Err(Party::Socket),
            }
            let Some(window) = self.poll_window(cx)? else {
                self.line.leave();
                return Ok(false);
            };
            // After the window, never before it: a stream that has room and waits for its reader would keep
            // the room from others.
            let Poll::Ready(room) = self.line.poll(&self.activity, cx) else { return Ok(false) };
            let limit = window.min(room);
            let chunk = match chunk::read(&*self.socket, limit) {
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return Err(Party::Socket),
            };
            let read = chunk.len();
            if read == 0 {
                self.end_to_peer()?;
                return Ok(false);
            }
            self.to_peer.send_data(self.activity.counted(chunk), false).map_err(|_| Party::Peer)?;
            self.queued = Some(self.activity.queue());
            self.carried(0, read);
        }
    }

    /// Bytes for which the peer gives window now; `None` if it gives none.
    fn poll_window(&mut self, cx: &mut Context<'_>) -> Result<Option<usize>, Party> {
        self.to_peer.reserve_capacity(SEND_BUFFER);
        self.reserved = true;
        loop {
            match self.to_peer.capacity() {
                0 => {}
                window => return Ok(Some(window)),
            }
            match self.to_peer.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(_) => return Err(Party::Peer),
                Poll::Pending => return Ok(None),
            }
        }
    }

    /// Returns window that is reserved and not used, which other streams of the connection would lack.
    fn unreserve(&mut self) {
        if std::mem::take(&mut self.reserved) {
            self.to_peer.reserve_capacity(0);
        }
    }

    /// Passes on the socket's FIN. After a reset was seen elsewhere, an end of the stream is that reset.
    fn end_to_peer(&mut self) -> Result<(), Party> {
        if self.inbound == FromPeer::Lost {
            return Err(Party::Socket);
        }
        self.to_peer.send_data(Bytes::new(), true).map_err(|_| Party::Peer)?;
        self.queued = Some(self.activity.queue());
        self.outbound = ToPeer::Done;
        self.first.get_or_insert(Party::Socket);
        // From now on it is watched for more.
        self.unwatch();
        Ok(())
    }

    /// Ends what [`poll_watch`](Self::poll_watch) began.
    fn unwatch(&mut self) {
        self.watch.stop();
        self.stalled = None;
    }

    /// Sees the reset of a socket that is not read: the peer gives no window, or the FIN came. After the FIN
    /// it also sees that the socket is gone.
    fn poll_watch(&mut self, cx: &mut Context<'_>) -> Result<(), Party> {
        if self.inbound == FromPeer::Lost && self.outbound == ToPeer::Done {
            return Err(Party::Socket);
        }
        if self.outbound == ToPeer::Open {
            return if self.watch.poll(&self.socket, cx).is_ready() || self.has_left(cx) {
                Err(Party::Socket)
            } else {
                Ok(())
            };
        }
        if self.inbound == FromPeer::Done || self.watch.poll_gone(&self.socket, cx).is_pending() {
            return Ok(());
        }
        if !self.socket.is_gone() {
            return Err(Party::Socket);
        }
        // Nobody takes what the peer still sends. As the stream is dropped, h2 says so: `NO_ERROR`, behind
        // all that was sent.
        self.inbound = FromPeer::Done;
        self.waiting = None;
        Ok(())
    }

    /// Whether the socket's program is gone and the peer took no byte for [`LEAVING`]. While the peer takes
    /// bytes, it still gets what was sent. A timer checks, because the socket gives no further event.
    fn has_left(&mut self, cx: &mut Context<'_>) -> bool {
        let stalled = self.stalled.get_or_insert_with(|| Idle::new(Some(LEAVING)));
        while stalled.poll(cx).is_ready() {
            // After the peer's end it also hangs up when both directions have ended. Then it has got all that
            // it will get, and is treated alike.
            if self.socket.is_gone() {
                return true;
            }
            *stalled = Idle::new(Some(LEAVING));
        }
        false
    }

    /// Whether the peer has sent all and takes nothing more: its stream was reset without an error.
    fn peer_has_closed(&mut self) -> bool {
        self.inbound != FromPeer::Open && reset::of(&mut self.to_peer) == Some(Reason::NO_ERROR)
    }

    /// The peer is gone: what it sent goes to the socket. Returns whether it has closed in order; if not, the
    /// reset follows.
    async fn deliver_to_socket(&mut self) -> bool {
        self.line.leave();
        self.unwatch();
        let in_order = self.peer_has_closed();
        let deadline = Instant::now() + LINGER;
        let mut timer = pin!(sleep_until(deadline));
        poll_fn(|cx| {
            if timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            if in_order {
                // It may have to get rid of what it sends before it reads.
                let _ = linger::poll_discard(&*self.socket, cx);
            }
            self.write_waiting(cx);
            if self.waiting.is_none() { Poll::Ready(()) } else { self.poll_evicted(cx) }
        })
        .await;
        if in_order && self.waiting.is_none() {
            linger::close(&*self.socket, deadline).await;
            return true;
        }
        linger::sent(&self.socket, deadline).await;
        false
    }

    /// The socket is gone: what it sent goes to the peer before the reset.
    async fn deliver_to_peer(&mut self) {
        let deadline = Instant::now() + LINGER;
        self.inbound = FromPeer::Lost;
        self.waiting = None;
        // Bytes that the peer had no window for are still in the socket's receive queue.
        let all_read = poll_fn(|cx| {
            // Further bytes are dropped here: h2 would hold them without counting them.
            if self.poll_from_peer(cx).is_err() || self.to_peer.poll_reset(cx).is_ready() {
                return Poll::Ready(());
            }
            let more_may_come = self.outbound == ToPeer::Open && self.read_socket(cx).is_ok();
            if more_may_come { Poll::Pending } else { Poll::Ready(()) }
        });
        // A peer that takes no more gets the reset without the rest.
        if timeout_at(deadline, all_read).await.is_ok()
            && let Some(queued) = self.queued
        {
            let activity = Arc::clone(&self.activity);
            let mut flushed = pin!(activity.flushed_since(queued));
            let all_sent = poll_fn(|cx| {
                if self.poll_from_peer(cx).is_err() { Poll::Ready(()) } else { flushed.as_mut().poll(cx) }
            });
            let _ = timeout_at(deadline, all_sent).await;
        }
        self.to_peer.send_reset(reset::BROKEN);
    }
}
