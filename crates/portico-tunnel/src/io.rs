//! [`Probe`] lets the HTTP/2 connection see what its socket is doing (h2 owns the socket and
//! tells nobody), ends it where memory is short, and splices bytes into it that are in a pipe ([`payload`](crate::payload)).

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use portico_dial::Socket;
use portico_net::{Rewind, SharedTcp};
use rustix::net::{SendAncillaryBuffer, SendFlags};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::account::{Account, Ledger};
use crate::payload::{Payload, SharedPipe};

/// What a [`Probe`] saw. Shared by the connection and its streams, all on one thread.
#[derive(Debug)]
pub(crate) struct Pulse {
    /// What the connection and its streams hold.
    pub(crate) ledger: Ledger,
    /// Bytes came since this was last asked.
    heard: AtomicBool,
    /// The socket took less than it was offered.
    blocked: AtomicBool,
    /// How often the connection had nothing left to write.
    flushes: AtomicU64,
    flushed: Notify,
    /// Whether payloads may be in pipes: the connection's stream is a TCP socket with nothing around it.
    splices: AtomicBool,
    /// The pipe that the slice stands for which is written next.
    outlet: Mutex<Option<Arc<SharedPipe>>>,
    /// Nothing may be written any more.
    failed: AtomicBool,
    /// Requests cancelled by their client before they were answered.
    pub(crate) cancelled: AtomicU32,
}

impl Pulse {
    pub(crate) fn new(account: &Account) -> Self {
        Self {
            ledger: Ledger::new(account),
            heard: AtomicBool::default(),
            blocked: AtomicBool::default(),
            flushes: AtomicU64::default(),
            flushed: Notify::new(),
            splices: AtomicBool::default(),
            outlet: Mutex::default(),
            failed: AtomicBool::default(),
            cancelled: AtomicU32::default(),
        }
    }

    /// Bytes came.
    pub(crate) fn hear(&self) {
        self.heard.store(true, Relaxed);
    }

    /// Whether bytes came since [`take_heard`](Self::take_heard) was called.
    pub(crate) fn heard(&self) -> bool {
        self.heard.load(Relaxed)
    }

    /// Whether bytes came since the last call.
    pub(crate) fn take_heard(&self) -> bool {
        self.heard.swap(false, Relaxed)
    }

    /// To be called by the connection each time it has done all it could.
    pub(crate) fn rested(&self) {
        self.ledger.rested();
        if !self.blocked.load(Relaxed) {
            self.flushes.fetch_add(1, Relaxed);
            self.flushed.notify_waiters();
        }
    }

    /// A mark for [`flushed_since`](Self::flushed_since).
    pub(crate) fn mark(&self) -> u64 {
        self.flushes.load(Relaxed)
    }

    /// Waits until all that was queued before `mark` was taken has been handed to the socket. The connection's task is awake
    /// then: queueing is what woke it.
    pub(crate) async fn flushed_since(&self, mark: u64) {
        loop {
            let flushed = self.flushed.notified();
            if self.flushes.load(Relaxed) > mark {
                return;
            }
            flushed.await;
        }
    }

    /// Whether payloads may be in pipes.
    pub(crate) fn splices(&self) -> bool {
        self.splices.load(Relaxed)
    }

    /// To be called by a payload whose slice is written next.
    pub(crate) fn set_outlet(&self, pipe: &Arc<SharedPipe>) {
        // Nothing in here can be left half done by a panic elsewhere.
        *self.outlet.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(pipe));
    }

    fn take_outlet(&self) -> Option<Arc<SharedPipe>> {
        self.outlet.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Bytes are lost: the connection ends with its next write.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Relaxed);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    fn wrote<T>(&self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.blocked.store(result.is_pending(), Relaxed);
        self.unless_given_up(cx, result)
    }

    /// The connection's task rests only after one of its reads or writes was pending, so this is where it hears that it is to end.
    fn unless_given_up<T>(&self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_pending() && self.ledger.poll_end(cx).is_ready() {
            return Poll::Ready(Err(io::Error::other(
                "the peer does not read what it asked for, and the memory for that is used up",
            )));
        }
        result
    }
}

/// What an HTTP/2 connection runs over.
pub(crate) trait Wire {
    /// The TCP socket, if there is nothing between it and the bytes written.
    fn plain(&self) -> Option<&TcpStream>;
}

impl Wire for TcpStream {
    fn plain(&self) -> Option<&TcpStream> {
        Some(self)
    }
}

impl Wire for SharedTcp {
    fn plain(&self) -> Option<&TcpStream> {
        Some(&self.0)
    }
}

impl Wire for Socket {
    fn plain(&self) -> Option<&TcpStream> {
        Socket::plain(self)
    }
}

impl<S: Wire> Wire for Rewind<S> {
    fn plain(&self) -> Option<&TcpStream> {
        self.stream().plain()
    }
}

impl<S> Wire for tokio_rustls::server::TlsStream<S> {
    fn plain(&self) -> Option<&TcpStream> {
        None
    }
}

impl<S> Wire for tokio_rustls::client::TlsStream<S> {
    fn plain(&self) -> Option<&TcpStream> {
        None
    }
}

/// Any stream, watched.
#[derive(Debug)]
pub(crate) struct Probe<S> {
    stream: S,
    pulse: Arc<Pulse>,
}

impl<S: Wire> Probe<S> {
    pub(crate) fn new(stream: S, pulse: Arc<Pulse>) -> Self {
        pulse.splices.store(stream.plain().is_some(), Relaxed);
        Self { stream, pulse }
    }
}

/// Writes what is in `memory`, then what is in the pipe, as far as the socket takes it.
fn poll_splice(
    socket: &TcpStream,
    cx: &mut Context<'_>,
    memory: &[IoSlice<'_>],
    pipe: &SharedPipe,
    piped: usize,
) -> Poll<io::Result<usize>> {
    let length: usize = memory.iter().map(|slice| slice.len()).sum();
    // The header waits in the kernel for what it announces.
    let flags = SendFlags::NOSIGNAL | SendFlags::MORE;
    let send = || {
        if memory.is_empty() {
            return Ok(0);
        }
        Ok(rustix::net::sendmsg(socket, memory, &mut SendAncillaryBuffer::default(), flags)?)
    };
    let splice = || Ok(pipe.drain(socket, piped)?);
    let sent = loop {
        ready!(socket.poll_write_ready(cx))?;
        match socket.try_io(Interest::WRITABLE, send) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => break sent?,
        }
    };
    if sent < length {
        return Poll::Ready(Ok(sent));
    }
    loop {
        match socket.poll_write_ready(cx) {
            Poll::Ready(ready) => ready?,
            Poll::Pending if sent > 0 => return Poll::Ready(Ok(sent)),
            Poll::Pending => return Poll::Pending,
        }
        match socket.try_io(Interest::WRITABLE, splice) {
            Ok(moved) => return Poll::Ready(Ok(sent + moved)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Poll::Ready(Err(error)),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Probe<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        if result.is_ready() {
            self.pulse.hear();
        }
        self.pulse.unless_given_up(cx, result)
    }
}

impl<S: AsyncWrite + Wire + Unpin> AsyncWrite for Probe<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.pulse.has_failed() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        // Only the payload of the last frame can be in a pipe, and its part in the pipe is the last of it.
        let result = match (bufs.split_last(), self.stream.plain(), self.pulse.take_outlet()) {
            (Some((last, memory)), Some(socket), Some(pipe)) if Payload::is_piped(last) => {
                poll_splice(socket, cx, memory, &pipe, last.len())
            }
            _ => Pin::new(&mut self.stream).poll_write_vectored(cx, bufs),
        };
        self.pulse.wrote(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.pulse.wrote(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
