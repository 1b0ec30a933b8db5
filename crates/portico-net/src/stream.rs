//! A connected stream socket, and the calls on it that neither wait nor waste a system call.
//!
//! [`Stream`] is TCP or Unix; [`Socket`] is what the engines ask of either. [`receive`], [`send_some`] and
//! [`attempt`] are the calls of a loop that knows from the result of one call that the next would fail.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

/// A connected stream socket.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

/// A stream socket registered with tokio, without a buffer of its own.
pub trait Socket: AsFd + Send + Sync {
    /// Ready when a read may succeed. Wakes the task that asked last.
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when a write may succeed. Wakes the task that asked last.
    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Makes a system call if the socket is ready for it. `WouldBlock` from the call takes the readiness
    /// back.
    fn try_io<R>(&self, interest: Interest, call: impl FnOnce() -> io::Result<R>) -> io::Result<R>;

    /// Resolves once the socket has failed: a reset, or a time-out. Needs no read interest.
    fn failed(&self) -> impl Future<Output = ()> + Send;
}

impl Socket for TcpStream {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_read_ready(cx)
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_write_ready(cx)
    }

    fn try_io<R>(&self, interest: Interest, call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        self.try_io(interest, call)
    }

    async fn failed(&self) {
        // Fails only when the runtime stops, and then nothing polls this any more.
        let _ready = self.ready(Interest::ERROR).await;
    }
}

impl Socket for Stream {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(cx),
            Self::Unix(stream) => stream.poll_read_ready(cx),
        }
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_write_ready(cx),
            Self::Unix(stream) => stream.poll_write_ready(cx),
        }
    }

    fn try_io<R>(&self, interest: Interest, call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        match self {
            Self::Tcp(stream) => stream.try_io(interest, call),
            Self::Unix(stream) => stream.try_io(interest, call),
        }
    }

    async fn failed(&self) {
        // See above.
        let _ready = match self {
            Self::Tcp(stream) => stream.ready(Interest::ERROR).await,
            Self::Unix(stream) => stream.ready(Interest::ERROR).await,
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(stream)
    }
}

/// Reads into `buffer` what the socket has; 0 is its end. A read that does not fill the buffer has emptied
/// the socket, and tokio learns so.
pub fn receive(from: &impl Socket, buffer: &mut [u8]) -> Result<usize, Errno> {
    let room = buffer.len();
    let call = || {
        retry_on_intr(|| rustix::net::recv(from.as_fd(), &mut *buffer, RecvFlags::empty()))
            .map(|(read, _)| read)
    };
    attempt(from, Interest::READABLE, call, |read| read > 0 && read < room)
}

/// Writes `bytes` as far as the socket takes them, and has tokio wait for more room if that was not all.
pub fn send_some(to: &impl Socket, bytes: &[u8]) -> Result<usize, Errno> {
    let call = || retry_on_intr(|| rustix::net::send(to.as_fd(), bytes, SendFlags::NOSIGNAL));
    attempt(to, Interest::WRITABLE, call, |sent| sent < bytes.len())
}

/// One system call on a socket that is ready for it. If its result says that the socket `is_spent`, tokio
/// waits for the next event, which saves the call that would only learn it.
pub fn attempt(
    socket: &impl Socket,
    interest: Interest,
    call: impl FnOnce() -> Result<usize, Errno>,
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
