//! One HTTP/2 stream and one TCP connection, made one: every promise of TCP kept on both sides.
//!
//! | On the stream | On the TCP connection |
//! |---|---|
//! | DATA | bytes |
//! | END_STREAM | FIN |
//! | RST_STREAM from the client, or its connection lost | RST |
//! | RST_STREAM `CONNECT_ERROR` from us (RFC 9113 section 8.5) | RST |
//!
//! Both directions live in one future, so that a tunnel is one task and each side knows of the other. In the direction up, frames are
//! taken from h2 as they come and wait in a [`Queue`]; window is given back only for what the upstream took, so a stalled upstream
//! holds one stream window and nobody else. In the direction down, the upstream is read only while the client has window:
//! back-pressure reaches the upstream through TCP. Whoever is not read is still watched for a reset.
//!
//! Bytes that came before a reset are delivered before it, as far as the other side takes them within [`LINGER`].

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use crate::chunk::{self, CHUNK};
use crate::handler::{End, Meter, Side, Upstream};
use crate::idle::Idle;
use crate::io::Pulse;
use crate::queue::Queue;
use crate::tcp;
use crate::watch::Watch;

/// How long bytes that came before a reset may take to be delivered. A peer that reads at all takes a window in far less.
const LINGER: Duration = Duration::from_secs(1);

pub(crate) struct Bridge<M> {
    from_client: RecvStream,
    to_client: SendStream<Bytes>,
    upstream: Arc<TcpStream>,
    meter: M,
    pulse: Arc<Pulse>,
    /// The last moment bytes were queued for the client, for [`Pulse::flushed_since`].
    queued: u64,
    /// Boxed, for it is rarely needed: only while the upstream takes less than comes.
    waiting: Option<Box<Queue>>,
    /// Whether window is reserved on the connection for what the upstream sent.
    reserved: bool,
    /// Set only while the upstream is not read.
    watch: Watch,
    idle: Idle,
    up: Up,
    down: Down,
    /// Who was the first to say it is done.
    first: Option<Side>,
}

/// The direction from client to upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Up {
    /// Bytes may come.
    Open,
    /// The client said END_STREAM; what waits must be written before the FIN.
    Ending,
    /// FIN sent.
    Done,
    /// The upstream is gone. What it sent before may still be there to be read; what the client sends is for nobody.
    Lost,
}

/// The direction from upstream to client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Down {
    /// Bytes may come.
    Open,
    /// END_STREAM sent.
    Done,
}

impl<M: Meter> Bridge<M> {
    pub(crate) fn new(
        from_client: RecvStream,
        to_client: SendStream<Bytes>,
        upstream: Upstream<M>,
        pulse: Arc<Pulse>,
        idle: Option<Duration>,
    ) -> Self {
        Self {
            from_client,
            to_client,
            upstream: Arc::new(upstream.stream),
            meter: upstream.meter,
            queued: pulse.mark(),
            pulse,
            waiting: None,
            reserved: false,
            watch: Watch::default(),
            idle: Idle::new(idle),
            up: Up::Open,
            down: Down::Open,
            first: None,
        }
    }

    /// Carries bytes until the tunnel is over, ends both sides accordingly and reports.
    pub(crate) async fn run(mut self) {
        let end = poll_fn(|cx| self.poll(cx)).await;
        match end {
            End::Closed { .. } => {}
            // Boxed: the way out must not make every resting tunnel larger.
            End::Reset { by: Side::Downstream } => Box::pin(self.deliver_up()).await,
            End::Reset { by: Side::Upstream } => Box::pin(self.deliver_down()).await,
            End::Idle | End::Cut => self.to_client.send_reset(Reason::CANCEL),
        }
        if !matches!(end, End::Closed { .. }) {
            // Nothing to be done if it fails: the socket is closed either way.
            let _ = self.upstream.set_zero_linger();
        }
        self.meter.ended(end);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if self.meter.poll_cut(cx).is_ready() {
            return Poll::Ready(End::Cut);
        }
        if self.poll_up(cx).is_err() {
            return Poll::Ready(End::Reset { by: Side::Downstream });
        }
        if let Err(side) = self.poll_down(cx) {
            return Poll::Ready(End::Reset { by: side });
        }
        if self.up == Up::Done && self.down == Down::Done {
            return Poll::Ready(End::Closed { first: self.first.unwrap_or(Side::Upstream) });
        }
        // After END_STREAM a reset shows only here.
        if self.to_client.poll_reset(cx).is_ready() {
            return Poll::Ready(End::Reset { by: Side::Downstream });
        }
        self.idle.poll(cx).map(|()| End::Idle)
    }

    /// Takes what the client sent and writes what the upstream takes. An error is the client's reset.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> Result<(), h2::Error> {
        if self.waiting.is_some() {
            self.write_waiting(cx);
        }
        while matches!(self.up, Up::Open | Up::Lost) {
            match self.from_client.poll_data(cx) {
                Poll::Pending => break,
                Poll::Ready(Some(frame)) => self.send_up(frame?, cx),
                Poll::Ready(None) if self.up == Up::Lost => break,
                Poll::Ready(None) => {
                    self.up = Up::Ending;
                    self.first.get_or_insert(Side::Downstream);
                }
            }
        }
        if self.up == Up::Ending && self.waiting.is_none() {
            self.up = match SockRef::from(&*self.upstream).shutdown(Shutdown::Write) {
                Ok(()) => Up::Done,
                Err(_) => Up::Lost,
            };
        }
        Ok(())
    }

    fn send_up(&mut self, mut frame: Bytes, cx: &mut Context<'_>) {
        if self.up == Up::Lost {
            return self.release(frame.len());
        }
        if self.waiting.is_none() {
            match self.upstream.try_write(&frame) {
                Ok(written) if written == frame.len() => return self.wrote(written),
                Ok(written) => {
                    self.wrote(written);
                    frame = frame.split_off(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.up = Up::Lost;
                    return self.release(frame.len());
                }
            }
        }
        self.waiting.get_or_insert_default().push(frame);
        self.write_waiting(cx);
    }

    /// Writes what waits until nothing does or the upstream takes no more; then its becoming writable wakes the task.
    fn write_waiting(&mut self, cx: &mut Context<'_>) {
        while let Some(waiting) = &mut self.waiting {
            match waiting.write_to(&self.upstream) {
                Ok(written) => {
                    if waiting.is_empty() {
                        self.waiting = None;
                    }
                    self.wrote(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.upstream.poll_write_ready(cx).is_pending() {
                        return;
                    }
                }
                Err(_) => {
                    self.up = Up::Lost;
                    self.waiting = None;
                }
            }
        }
    }

    fn wrote(&mut self, bytes: usize) {
        self.meter.carried(bytes, 0);
        self.idle.moved();
        self.release(bytes);
    }

    /// Gives window back to the client.
    fn release(&mut self, bytes: usize) {
        // Fails only for more than was received, or after a reset, when it does not matter any more.
        let _ = self.from_client.flow_control().release_capacity(bytes);
    }

    /// Reads what the upstream sent as far as the client has window for it. An error says who is gone.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> Result<(), Side> {
        if self.down == Down::Open {
            let all_read = self.read_down(cx)?;
            if all_read {
                self.unreserve();
                self.watch.stop();
                return Ok(());
            }
        }
        self.poll_watch(cx)
    }

    /// True if the upstream has nothing more to say for now, false if it is not to be read for now or ever.
    fn read_down(&mut self, cx: &mut Context<'_>) -> Result<bool, Side> {
        loop {
            match self.upstream.poll_read_ready(cx) {
                Poll::Pending => return Ok(true),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Err(Side::Upstream),
            }
            let Some(window) = self.poll_window(cx)? else { return Ok(false) };
            let chunk = match chunk::read(&self.upstream, window) {
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => return Err(Side::Upstream),
            };
            if chunk.is_empty() {
                self.end_down()?;
                return Ok(false);
            }
            let read = chunk.len();
            self.to_client.send_data(chunk, false).map_err(|_| Side::Downstream)?;
            self.queued = self.pulse.mark();
            self.meter.carried(0, read);
            self.idle.moved();
            if read < window {
                // A short read emptied the socket. Saying so spares the read that would only learn it.
                let _ = self
                    .upstream
                    .try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
            }
        }
    }

    /// Bytes the client takes now, at most a chunk; `None` if it takes none.
    fn poll_window(&mut self, cx: &mut Context<'_>) -> Result<Option<usize>, Side> {
        self.to_client.reserve_capacity(CHUNK);
        self.reserved = true;
        loop {
            match self.to_client.capacity() {
                0 => {}
                window => return Ok(Some(window.min(CHUNK))),
            }
            match self.to_client.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(_) => return Err(Side::Downstream),
                Poll::Pending => return Ok(None),
            }
        }
    }

    /// Window that is reserved and not used would be missing elsewhere on the connection.
    fn unreserve(&mut self) {
        if std::mem::take(&mut self.reserved) {
            self.to_client.reserve_capacity(0);
        }
    }

    /// The upstream's FIN, or what looks like one after its reset was seen elsewhere.
    fn end_down(&mut self) -> Result<(), Side> {
        if self.up == Up::Lost {
            return Err(Side::Upstream);
        }
        self.to_client.send_data(Bytes::new(), true).map_err(|_| Side::Downstream)?;
        self.queued = self.pulse.mark();
        self.down = Down::Done;
        self.first.get_or_insert(Side::Upstream);
        Ok(())
    }

    /// While the upstream is not read (the client has no window, or the upstream said its FIN), its reset is seen here.
    fn poll_watch(&mut self, cx: &mut Context<'_>) -> Result<(), Side> {
        if self.up == Up::Lost && self.down == Down::Done {
            return Err(Side::Upstream);
        }
        if self.watch.poll(&self.upstream, cx).is_ready() { Err(Side::Upstream) } else { Ok(()) }
    }

    /// The client is gone: what it sent goes to the upstream before the reset does.
    async fn deliver_up(&mut self) {
        let deadline = Instant::now() + LINGER;
        let mut timer = std::pin::pin!(sleep_until(deadline));
        poll_fn(|cx| {
            self.write_waiting(cx);
            if self.waiting.is_none() { Poll::Ready(()) } else { timer.as_mut().poll(cx) }
        })
        .await;
        self.watch.stop();
        tcp::sent(&self.upstream, deadline).await;
    }

    /// The upstream is gone: what it sent goes to the client before the reset does.
    async fn deliver_down(&mut self) {
        let lost = async {
            // The rest of what the upstream sent is still in the socket's receive queue, if the client had no window for it.
            self.up = Up::Lost;
            poll_fn(|cx| match self.down {
                Down::Done => Poll::Ready(()),
                Down::Open => match self.read_down(cx) {
                    Ok(_) if self.to_client.poll_reset(cx).is_pending() => Poll::Pending,
                    _ => Poll::Ready(()),
                },
            })
            .await;
            self.pulse.flushed_since(self.queued).await;
        };
        // A client that takes no more gets the reset without the rest.
        let _ = timeout(LINGER, lost).await;
        self.to_client.send_reset(Reason::CONNECT_ERROR);
    }
}
