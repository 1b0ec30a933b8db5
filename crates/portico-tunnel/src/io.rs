//! The coats a client's connection wears: [`Rewind`] gives back the bytes that were read to find out what it speaks, [`Shared`]
//! leaves a hand on the socket under TLS, and [`Probe`] lets the HTTP/2 connection see what its socket is doing (h2 owns the socket and tells nobody).

use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// A stream that yields the bytes already read from it first.
#[derive(Debug)]
pub(crate) struct Rewind<S> {
    first: Bytes,
    stream: S,
}

impl<S> Rewind<S> {
    pub(crate) fn new(first: Bytes, stream: S) -> Self {
        Self { first, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let taken = self.first.len().min(buf.remaining());
        buf.put_slice(&self.first[..taken]);
        self.first.advance(taken);
        if self.first.is_empty() {
            // Gives the allocation back: this connection may live for weeks.
            self.first = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A TCP stream whose owner can still watch and abort it while TLS reads and writes it.
#[derive(Debug)]
pub(crate) struct Shared(pub(crate) Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read_buf(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result.map(drop)),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write_vectored(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.0).shutdown(Shutdown::Write))
    }
}

/// What a [`Probe`] saw. Shared by the connection and its streams, all on one thread.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// Bytes came since this was last asked.
    heard: AtomicBool,
    /// The socket took less than it was offered.
    blocked: AtomicBool,
    /// How often the connection had nothing left to write.
    flushes: AtomicU64,
    flushed: Notify,
    /// Requests cancelled by their client before they were answered.
    pub(crate) cancelled: AtomicU32,
}

impl Pulse {
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

    fn wrote<T>(&self, result: Poll<T>) -> Poll<T> {
        self.blocked.store(result.is_pending(), Relaxed);
        result
    }
}

/// Any stream, watched.
#[derive(Debug)]
pub(crate) struct Probe<S> {
    stream: S,
    pulse: Arc<Pulse>,
}

impl<S> Probe<S> {
    pub(crate) fn new(stream: S, pulse: Arc<Pulse>) -> Self {
        Self { stream, pulse }
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
            self.pulse.heard.store(true, Relaxed);
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Probe<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.pulse.wrote(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.pulse.wrote(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.pulse.wrote(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
