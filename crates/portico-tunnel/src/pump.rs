//! HTTP/1.1 CONNECT under TLS: bytes between a TLS stream and an upstream. (Without TLS the gateway's splice engine does this.)
//!
//! Same promises as the [bridge](crate::bridge) makes for HTTP/2: FIN and close_notify are the same word, a reset is passed on as a
//! reset after the bytes that came before it, and the side that is not read is watched. A TLS client that ends without
//! close_notify has been cut off; its upstream gets a reset, not an end that nobody said.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use portico_net::linger::{self, LINGER};
use portico_net::{ErrorWatch, Idle};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::chunk;
use crate::handler::{End, Meter, Side};
use crate::http1::Opened;

/// One TLS record of plaintext.
const RECORD: usize = 16 * 1024;

thread_local! {
    /// Where a record is decrypted to. Leaves with no one: what the upstream does not take at once is copied.
    static PLAIN: RefCell<Box<[u8]>> = RefCell::new(vec![0; RECORD].into());
}

pub(crate) struct Pump<S, M> {
    client: S,
    /// The socket under `client`.
    socket: Arc<TcpStream>,
    upstream: Arc<TcpStream>,
    meter: M,
    idle: Idle,
    up: Direction,
    down: Direction,
    client_watch: ErrorWatch<'static>,
    upstream_watch: ErrorWatch<'static>,
    first: Option<Side>,
}

/// One direction: what was read and not written yet, and whether more may come.
struct Direction {
    waiting: Bytes,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    /// Bytes may come.
    Open,
    /// The reading side said its end; what waits must be written before it is passed on.
    Ending,
    /// The end was passed on.
    Done,
}

impl<S: AsyncRead + AsyncWrite + Unpin, M: Meter> Pump<S, M> {
    pub(crate) fn new(client: S, socket: Arc<TcpStream>, opened: Opened<M>, idle: Option<Duration>) -> Self {
        Self {
            client,
            socket,
            upstream: Arc::new(opened.upstream.stream),
            meter: opened.upstream.meter,
            idle: Idle::new(idle),
            up: Direction { waiting: opened.early, state: State::Open },
            down: Direction { waiting: Bytes::new(), state: State::Open },
            client_watch: ErrorWatch::default(),
            upstream_watch: ErrorWatch::default(),
            first: None,
        }
    }

    /// Carries bytes until the tunnel is over, ends both sides accordingly and reports.
    pub(crate) async fn run(mut self) {
        let end = poll_fn(|cx| self.poll(cx)).await;
        match end {
            End::Closed { .. } => {}
            End::Reset { by: Side::Downstream } => Box::pin(self.deliver_up()).await,
            End::Reset { by: Side::Upstream } => Box::pin(self.deliver_down()).await,
            End::Idle | End::Cut | End::Memory => {}
        }
        if !matches!(end, End::Closed { .. }) {
            // Nothing to be done if it fails: the sockets are closed either way.
            let _ = self.upstream.set_zero_linger();
            let _ = self.socket.set_zero_linger();
        }
        self.meter.ended(end);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if self.meter.poll_cut(cx).is_ready() {
            return Poll::Ready(End::Cut);
        }
        // Each direction is driven as far as it goes; what stops it wakes the task.
        for direction in [self.poll_up(cx), self.poll_down(cx)] {
            if let Poll::Ready(Err(by)) = direction {
                return Poll::Ready(End::Reset { by });
            }
        }
        if self.up.state == State::Done && self.down.state == State::Done {
            return Poll::Ready(End::Closed { first: self.first.unwrap_or(Side::Upstream) });
        }
        self.idle.poll(cx).map(|()| End::Idle)
    }

    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Side>> {
        loop {
            if self.poll_write_up(cx)?.is_pending() {
                // Not read while its bytes wait.
                return self.client_watch.poll(&self.socket, cx).map(|()| Err(Side::Downstream));
            }
            match self.up.state {
                State::Open => self.up.waiting = ready!(self.poll_read_up(cx))?,
                State::Ending => {
                    SockRef::from(&*self.upstream).shutdown(Shutdown::Write).map_err(|_| Side::Upstream)?;
                    self.up.state = State::Done;
                }
                State::Done => {
                    return self.client_watch.poll(&self.socket, cx).map(|()| Err(Side::Downstream));
                }
            }
        }
    }

    fn poll_read_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Side>> {
        self.client_watch.stop();
        let read = PLAIN.with_borrow_mut(|plain| {
            let mut buffer = ReadBuf::new(plain);
            ready!(Pin::new(&mut self.client).poll_read(cx, &mut buffer)).map_err(|_| Side::Downstream)?;
            Poll::Ready(Ok(Bytes::copy_from_slice(buffer.filled())))
        });
        if let Poll::Ready(Ok(bytes)) = &read
            && bytes.is_empty()
        {
            self.up.state = State::Ending;
            self.first.get_or_insert(Side::Downstream);
        }
        read
    }

    fn poll_write_up(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Side>> {
        while !self.up.waiting.is_empty() {
            match self.upstream.try_write(&self.up.waiting) {
                Ok(written) => {
                    self.up.waiting.advance(written);
                    self.meter.carried(written, 0);
                    self.idle.moved();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.upstream.poll_write_ready(cx)).map_err(|_| Side::Upstream)?;
                }
                Err(_) => return Poll::Ready(Err(Side::Upstream)),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Side>> {
        loop {
            if self.poll_write_down(cx)?.is_pending() {
                return self.upstream_watch.poll(&self.upstream, cx).map(|()| Err(Side::Upstream));
            }
            match self.down.state {
                State::Open => self.down.waiting = ready!(self.poll_read_down(cx))?,
                State::Ending => {
                    ready!(Pin::new(&mut self.client).poll_shutdown(cx)).map_err(|_| Side::Downstream)?;
                    self.down.state = State::Done;
                }
                State::Done => {
                    return self.upstream_watch.poll(&self.upstream, cx).map(|()| Err(Side::Upstream));
                }
            }
        }
    }

    fn poll_read_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Side>> {
        self.upstream_watch.stop();
        loop {
            ready!(self.upstream.poll_read_ready(cx)).map_err(|_| Side::Upstream)?;
            match chunk::read(&self.upstream, RECORD) {
                Ok(bytes) => {
                    if bytes.is_empty() {
                        self.down.state = State::Ending;
                        self.first.get_or_insert(Side::Upstream);
                    }
                    return Poll::Ready(Ok(bytes));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Poll::Ready(Err(Side::Upstream)),
            }
        }
    }

    fn poll_write_down(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Side>> {
        while !self.down.waiting.is_empty() {
            let written = ready!(Pin::new(&mut self.client).poll_write(cx, &self.down.waiting))
                .map_err(|_| Side::Downstream)?;
            self.down.waiting.advance(written);
            self.meter.carried(0, written);
            self.idle.moved();
        }
        // TLS records that do not fit the socket wait inside the stream.
        Pin::new(&mut self.client).poll_flush(cx).map_err(|_| Side::Downstream)
    }

    /// The client is gone: what it sent goes to the upstream before the reset does.
    async fn deliver_up(&mut self) {
        let deadline = Instant::now() + LINGER;
        let mut timer = std::pin::pin!(sleep_until(deadline));
        poll_fn(
            |cx| if self.poll_write_up(cx).is_ready() { Poll::Ready(()) } else { timer.as_mut().poll(cx) },
        )
        .await;
        linger::sent(&self.upstream, deadline).await;
        self.upstream_watch.stop();
    }

    /// The upstream is gone: what it sent goes to the client before the reset does.
    async fn deliver_down(&mut self) {
        let deadline = Instant::now() + LINGER;
        let mut timer = std::pin::pin!(sleep_until(deadline));
        poll_fn(
            |cx| if self.poll_rest_down(cx).is_ready() { Poll::Ready(()) } else { timer.as_mut().poll(cx) },
        )
        .await;
        linger::sent(&self.socket, deadline).await;
    }

    /// Ready when all that is left of the upstream's bytes is written, or cannot be.
    fn poll_rest_down(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match ready!(self.poll_write_down(cx)) {
                Ok(()) if self.down.state == State::Open => match ready!(self.poll_read_down(cx)) {
                    Ok(bytes) => self.down.waiting = bytes,
                    Err(_) => return Poll::Ready(()),
                },
                _ => return Poll::Ready(()),
            }
        }
    }
}
