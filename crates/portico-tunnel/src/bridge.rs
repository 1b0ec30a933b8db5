//! One HTTP/2 stream and one TCP connection, made one: every promise of TCP kept on both sides.
//!
//! | On the stream | On the TCP connection |
//! |---|---|
//! | DATA | bytes |
//! | END_STREAM | FIN |
//! | RST_STREAM from the peer, or its connection lost | RST |
//! | RST_STREAM `CONNECT_ERROR` from us (RFC 9113 section 8.5) | RST |
//!
//! Both ends of a tunnel have one: at the gateway the stream is the client's and the socket the control plane's, at the client it is the other
//! way round. Seen from here there are only the *peer*, which speaks HTTP/2, and the *socket*.
//!
//! Both directions live in one future, so that a tunnel is one task and each side knows of the other. From the peer, frames are
//! taken from h2 as they come and [wait](Waiting); window is given back only for what the socket took, so a stalled socket
//! holds one stream window and nobody else. Towards the peer, the socket is read only while the peer gives window and the connection
//! has room: back-pressure reaches the other side through TCP. Whoever is not read is still watched for a reset. What is held
//! is in the process's [account](crate::account), which may end the stream.
//!
//! Bytes that came before a reset are delivered before it, as far as the other side takes them within [`LINGER`].

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use portico_net::linger::{self, LINGER};
use portico_net::{ErrorWatch, Idle};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::chunk::{self, CHUNK};
use crate::handler::{End, Meter, Side};
use crate::io::Pulse;
use crate::payload::{MOST, Payload, SharedPipe};
use crate::queue::Waiting;

/// Full reads in a row before a pipe is lent: one may be a list of pods, two are a transfer.
const FULL_READS: u8 = 2;

pub(crate) struct Bridge<M> {
    /// Whose side the peer is on.
    peer: Side,
    from_peer: RecvStream,
    to_peer: SendStream<Payload>,
    socket: Arc<TcpStream>,
    meter: M,
    pulse: Arc<Pulse>,
    /// The last moment bytes were queued for the peer, for [`Pulse::flushed_since`].
    queued: u64,
    /// Boxed, for it is rarely needed: only while the socket takes less than comes.
    waiting: Option<Box<Waiting>>,
    /// Lent while a transfer keeps coming, and the connection is one that can splice.
    pipe: Option<Arc<SharedPipe>>,
    /// Full reads in a row.
    full_reads: u8,
    /// Set only while the connection has no room for what the socket sent.
    room: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Whether it was this stream's turn to have that room.
    turn: bool,
    /// Whether window is reserved on the connection for what the socket sent.
    reserved: bool,
    /// Set only while the socket is not read.
    watch: ErrorWatch<'static>,
    idle: Idle,
    inbound: FromPeer,
    outbound: ToPeer,
    /// Who was the first to say it is done.
    first: Option<Party>,
}

/// The two a bridge stands between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Party {
    Peer,
    Socket,
}

/// How a bridge ended: [`End`], before anybody asks whose side is which.
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
    /// The peer said END_STREAM; what waits must be written before the FIN.
    Ending,
    /// FIN sent.
    Done,
    /// The socket is gone. What it sent before may still be there to be read; what the peer sends is for nobody.
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

impl<M: Meter> Bridge<M> {
    /// `early` is what the peer has sent already.
    pub(crate) fn new(
        peer: Side,
        (to_peer, from_peer): (SendStream<Payload>, RecvStream),
        socket: TcpStream,
        meter: M,
        pulse: Arc<Pulse>,
        early: Option<Box<Waiting>>,
        idle: Option<Duration>,
    ) -> Self {
        Self {
            peer,
            from_peer,
            to_peer,
            socket: Arc::new(socket),
            meter,
            queued: pulse.mark(),
            pulse,
            waiting: early,
            pipe: None,
            full_reads: 0,
            room: None,
            turn: false,
            reserved: false,
            watch: ErrorWatch::default(),
            idle: Idle::new(idle),
            inbound: FromPeer::Open,
            outbound: ToPeer::Open,
            first: None,
        }
    }

    /// Carries bytes until the tunnel is over, ends both sides accordingly and reports.
    pub(crate) async fn run(mut self) {
        let mut outcome = poll_fn(|cx| self.poll(cx)).await;
        if outcome == (Outcome::Reset { by: Party::Peer }) && self.pulse.ledger.is_to_end() {
            outcome = Outcome::Memory;
        }
        match outcome {
            Outcome::Closed { .. } => {}
            // Boxed: the way out must not make every resting tunnel larger.
            Outcome::Reset { by: Party::Peer } => Box::pin(self.deliver_to_socket()).await,
            Outcome::Reset { by: Party::Socket } => Box::pin(self.deliver_to_peer()).await,
            Outcome::Idle | Outcome::Cut => self.to_peer.send_reset(Reason::CANCEL),
            Outcome::Memory => self.to_peer.send_reset(Reason::ENHANCE_YOUR_CALM),
        }
        if !matches!(outcome, Outcome::Closed { .. }) {
            // Nothing to be done if it fails: the socket is closed either way.
            let _ = self.socket.set_zero_linger();
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
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if self.meter.poll_cut(cx).is_ready() {
            return Poll::Ready(Outcome::Cut);
        }
        if self.poll_given_up(cx).is_ready() {
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

    /// Ready if what waits is to be given up.
    fn poll_given_up(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waiting.as_ref().map_or(Poll::Pending, |waiting| waiting.poll_end(cx))
    }

    /// Takes what the peer sent and writes what the socket takes. An error is the peer's reset.
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
            self.inbound = match SockRef::from(&*self.socket).shutdown(Shutdown::Write) {
                Ok(()) => FromPeer::Done,
                Err(_) => FromPeer::Lost,
            };
        }
        Ok(())
    }

    fn send_on(&mut self, mut frame: Bytes, cx: &mut Context<'_>) {
        if self.inbound == FromPeer::Lost {
            return self.release(frame.len());
        }
        if self.waiting.is_none() {
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
        self.waiting.get_or_insert_with(|| Box::new(Waiting::new(&self.pulse))).push(frame);
        self.write_waiting(cx);
    }

    /// Writes what waits until nothing does or the socket takes no more; then its becoming writable wakes the task.
    fn write_waiting(&mut self, cx: &mut Context<'_>) {
        while let Some(waiting) = &mut self.waiting {
            match waiting.write_to(&self.socket) {
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

    /// Reads what the socket sent as far as the peer has window for it. An error says who is gone.
    fn poll_to_peer(&mut self, cx: &mut Context<'_>) -> Result<(), Party> {
        if self.outbound == ToPeer::Open {
            let all_read = self.read_socket(cx)?;
            if all_read {
                self.unreserve();
                self.watch.stop();
                return Ok(());
            }
        }
        self.poll_watch(cx)
    }

    /// True if the socket has nothing more to say for now, false if it is not to be read for now or ever.
    fn read_socket(&mut self, cx: &mut Context<'_>) -> Result<bool, Party> {
        let all_read = self.read_while_there_is_room(cx);
        if std::mem::take(&mut self.turn) {
            self.pulse.ledger.pass_on();
        }
        all_read
    }

    fn read_while_there_is_room(&mut self, cx: &mut Context<'_>) -> Result<bool, Party> {
        loop {
            match self.socket.poll_read_ready(cx) {
                Poll::Pending => {
                    self.leave_line();
                    return Ok(true);
                }
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Err(Party::Socket),
            }
            let Some(window) = self.poll_window(cx)? else {
                self.leave_line();
                return Ok(false);
            };
            let Poll::Ready(room) = self.poll_room(cx) else { return Ok(false) };
            let window = window.min(room);
            let limit = window.min(CHUNK);
            let (payload, read) = match self.read_some(window) {
                Ok(some) => some,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.rest();
                    continue;
                }
                Err(_) => return Err(Party::Socket),
            };
            if read == 0 {
                self.rest();
                self.end_to_peer()?;
                return Ok(false);
            }
            self.to_peer.send_data(payload, false).map_err(|_| Party::Peer)?;
            self.queued = self.pulse.mark();
            self.carried(0, read);
            if read >= limit {
                self.full_reads = self.full_reads.saturating_add(1);
            } else if self.pipe.is_none() {
                self.full_reads = 0;
                // A short read emptied the socket. Saying so spares the read that would only learn it.
                let _ =
                    self.socket.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            }
        }
    }

    /// Reads once: into the pipe in the middle of a transfer, else into memory.
    fn read_some(&mut self, window: usize) -> io::Result<(Payload, usize)> {
        if self.pipe.is_none() && self.full_reads >= FULL_READS && self.pulse.splices() {
            self.pipe = SharedPipe::lend();
        }
        if let Some(pipe) = &self.pipe
            && let Ok(read) = pipe.fill(&self.socket, window)
        {
            return Ok((Payload::piped(pipe, &self.pulse, read), read));
        }
        // Where the pipe had no answer it may be full, or the socket empty or broken: reading tells.
        let chunk = chunk::read(&self.socket, window.min(CHUNK))?;
        let read = chunk.len();
        Ok((Payload::memory(chunk, &self.pulse), read))
    }

    /// The transfer has come to rest.
    fn rest(&mut self) {
        self.full_reads = 0;
        self.pipe = None;
    }

    /// Bytes the peer takes now; `None` if it takes none.
    fn poll_window(&mut self, cx: &mut Context<'_>) -> Result<Option<usize>, Party> {
        self.to_peer.reserve_capacity(MOST);
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

    /// Bytes that may wait for the connection's socket now. After the window, never before it: only the socket is to be waited for by whoever
    /// has a part of the room, not somebody's reader.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        loop {
            let room = self.pulse.ledger.room();
            if room > 0 {
                self.leave_line();
                return Poll::Ready(room);
            }
            let pulse = &self.pulse;
            let freed = self.room.get_or_insert_with(|| {
                let pulse = Arc::clone(pulse);
                Box::pin(async move { pulse.ledger.freed().await })
            });
            ready!(freed.as_mut().poll(cx));
            self.room = None;
            self.turn = true;
        }
    }

    /// Waits for room no more. A turn that has come meanwhile is the next one's.
    fn leave_line(&mut self) {
        self.room = None;
    }

    /// Window that is reserved and not used would be missing elsewhere on the connection.
    fn unreserve(&mut self) {
        if std::mem::take(&mut self.reserved) {
            self.to_peer.reserve_capacity(0);
        }
    }

    /// The socket's FIN, or what looks like one after its reset was seen elsewhere.
    fn end_to_peer(&mut self) -> Result<(), Party> {
        if self.inbound == FromPeer::Lost {
            return Err(Party::Socket);
        }
        self.to_peer.send_data(Bytes::new().into(), true).map_err(|_| Party::Peer)?;
        self.queued = self.pulse.mark();
        self.outbound = ToPeer::Done;
        self.first.get_or_insert(Party::Socket);
        Ok(())
    }

    /// While the socket is not read (the peer has no window, or the socket said its FIN), its reset is seen here.
    fn poll_watch(&mut self, cx: &mut Context<'_>) -> Result<(), Party> {
        if self.inbound == FromPeer::Lost && self.outbound == ToPeer::Done {
            return Err(Party::Socket);
        }
        if self.watch.poll(&self.socket, cx).is_ready() { Err(Party::Socket) } else { Ok(()) }
    }

    /// The peer is gone: what it sent goes to the socket before the reset does.
    async fn deliver_to_socket(&mut self) {
        self.leave_line();
        let deadline = Instant::now() + LINGER;
        let mut timer = pin!(sleep_until(deadline));
        poll_fn(|cx| {
            self.write_waiting(cx);
            if self.waiting.is_none() || self.poll_given_up(cx).is_ready() {
                return Poll::Ready(());
            }
            timer.as_mut().poll(cx)
        })
        .await;
        self.watch.stop();
        linger::sent(&self.socket, deadline).await;
    }

    /// The socket is gone: what it sent goes to the peer before the reset does.
    async fn deliver_to_peer(&mut self) {
        let deadline = Instant::now() + LINGER;
        self.inbound = FromPeer::Lost;
        self.waiting = None;
        // The rest of what the socket sent is still in the socket's receive queue, if the peer had no window for it.
        let all_read = poll_fn(|cx| {
            // What comes is for nobody, and not to be held by h2, which counts nothing.
            if self.poll_from_peer(cx).is_err() || self.to_peer.poll_reset(cx).is_ready() {
                return Poll::Ready(());
            }
            let more_may_come = self.outbound == ToPeer::Open && self.read_socket(cx).is_ok();
            if more_may_come { Poll::Pending } else { Poll::Ready(()) }
        });
        // A peer that takes no more gets the reset without the rest.
        if timeout_at(deadline, all_read).await.is_ok() {
            let pulse = Arc::clone(&self.pulse);
            let mut flushed = pin!(pulse.flushed_since(self.queued));
            let all_sent = poll_fn(|cx| {
                if self.poll_from_peer(cx).is_err() { Poll::Ready(()) } else { flushed.as_mut().poll(cx) }
            });
            let _ = timeout_at(deadline, all_sent).await;
        }
        self.to_peer.send_reset(Reason::CONNECT_ERROR);
    }
}
