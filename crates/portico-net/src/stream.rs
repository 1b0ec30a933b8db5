//! A connected stream socket, and the calls on it that neither wait nor waste a system call.
//!
//! [`Stream`] is TCP or Unix; [`Socket`] is what the engines ask of either. [`receive`], [`send_some`] and
//! [`attempt`] are the calls of a loop that knows from the result of one call that the next would fail. For
//! TLS and HTTP/2 a [`Stream`] has `AsyncRead` and `AsyncWrite`.

use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::BufMut;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
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

    /// Reads into `buffer` what the socket has, without waiting.
    fn try_read_buf<B: BufMut>(&self, buffer: &mut B) -> io::Result<usize>;

    /// Says that the last read emptied the socket, as a short one does. Spares the read that would only learn
    /// it. On the thread that reads, before it waits: bytes that come meanwhile would be forgotten elsewhere.
    fn emptied(&self) {
        let empty = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
        let _ = self.try_io(Interest::READABLE, empty);
    }

    /// Writes what the socket takes, without waiting.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Like [`Self::try_write`], from several slices.
    fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Resolves once the socket has failed: a reset, or a time-out. Needs no read interest.
    fn failed(&self) -> impl Future<Output = ()> + Send;

    /// Whether a peer that has ended its direction takes nothing more either, and has read all. Only a Unix
    /// socket knows that: TCP learns it from the reset that answers the next bytes.
    fn is_gone(&self) -> bool {
        false
    }

    /// Resolves once that is so, or the socket has failed.
    fn gone(&self) -> impl Future<Output = ()> + Send {
        self.failed()
    }
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

    fn try_read_buf<B: BufMut>(&self, buffer: &mut B) -> io::Result<usize> {
        self.try_read_buf(buffer)
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_write(bytes)
    }

    fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(slices)
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

    fn try_read_buf<B: BufMut>(&self, buffer: &mut B) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(buffer),
            Self::Unix(stream) => stream.try_read_buf(buffer),
        }
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }

    fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(slices),
            Self::Unix(stream) => stream.try_write_vectored(slices),
        }
    }

    async fn failed(&self) {
        // See above.
        let _ready = match self {
            Self::Tcp(stream) => stream.ready(Interest::ERROR).await,
            Self::Unix(stream) => stream.ready(Interest::ERROR).await,
        };
    }

    fn is_gone(&self) -> bool {
        let Self::Unix(stream) = self else { return false };
        hang_up(stream) == PollFlags::HUP
    }

    async fn gone(&self) {
        let Self::Unix(stream) = self else { return self.failed().await };
        if !hang_up(stream).is_empty() {
            return;
        }
        // Tokio takes a hang-up for writable, which the socket may be all the time. A registration of its own
        // can wait for the next event without keeping the writer from writing.
        let handle = stream.as_fd().try_clone_to_owned();
        let Ok(watched) = handle.and_then(|handle| UnixStream::from_std(handle.into())) else {
            // No descriptor is left.
            return self.failed().await;
        };
        let look = || if hang_up(stream).is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) };
        // Fails only when the runtime stops.
        let _ = watched.async_io(Interest::WRITABLE, look).await;
    }
}

/// Whether the peer of a Unix socket is gone. One that has only ended its direction is there.
pub fn has_hung_up(stream: &UnixStream) -> bool {
    !hang_up(stream).is_empty()
}

/// HUP: the peer is gone. ERR: it had not read all. Neither: it is there.
fn hang_up(stream: &UnixStream) -> PollFlags {
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    // Fails only without memory; the next write tells as well.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    polled[0].revents()
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

// === AsyncRead, AsyncWrite ===

/// The interface of both kinds of socket for TLS and HTTP/2.
trait ReadWrite: AsyncRead + AsyncWrite + Unpin {}

impl<S: AsyncRead + AsyncWrite + Unpin> ReadWrite for S {}

impl Stream {
    fn inner(self: Pin<&mut Self>) -> Pin<&mut dyn ReadWrite> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Unix(stream) => Pin::new(stream),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(cx)
    }

    /// Closes the direction to the peer. The other stays open.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(cx)
    }
}

/// Reads into `buffer` what the socket has; 0 is its end. A read that does not fill the buffer has emptied
/// the socket, and tokio learns so.
pub fn receive(from: &impl Socket, buffer: &mut [u8]) -> Result<usize, Errno> {
    let room = buffer.len();
    let call = || receive_now(from, buffer);
    attempt(from, Interest::READABLE, call, |read| read > 0 && read < room)
}

/// Like [`receive`], but neither asks whether tokio holds the socket for ready, nor reports the result to
/// tokio.
pub fn receive_now(from: &impl Socket, buffer: &mut [u8]) -> Result<usize, Errno> {
    retry_on_intr(|| rustix::net::recv(from.as_fd(), &mut *buffer, RecvFlags::empty())).map(|(read, _)| read)
}

/// Writes `bytes` as far as the socket takes them, and has tokio wait for more room if that was not all.
pub fn send_some(to: &impl Socket, bytes: &[u8]) -> Result<usize, Errno> {
    let call = || retry_on_intr(|| rustix::net::send(to.as_fd(), bytes, SendFlags::NOSIGNAL));
    attempt(to, Interest::WRITABLE, call, |sent| sent < bytes.len())
}

/// One system call on a socket that is ready for it. If its result says that the socket `is_spent`, tokio
/// waits for the next event. This saves the call that would only learn it.
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Connected sockets of both kinds.
    async fn pairs() -> [(Stream, Stream); 2] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        [(client.into(), server.into()), (one.into(), other.into())]
    }

    #[tokio::test]
    async fn a_stream_that_was_shut_down_still_reads() {
        for (mut client, mut server) in pairs().await {
            client.write_all(b"question").await.unwrap();
            client.shutdown().await.unwrap();
            let mut read = String::new();
            server.read_to_string(&mut read).await.unwrap();
            server.write_all(b"reply").await.unwrap();
            server.shutdown().await.unwrap();
            client.read_to_string(&mut read).await.unwrap();
            assert_eq!(read, "questionreply");
            assert!(client.write(b"more").await.is_err(), "its direction is closed");
        }
    }

    #[tokio::test]
    async fn slices_leave_in_one_write() {
        for (mut client, mut server) in pairs().await {
            assert!(client.is_write_vectored());
            let slices = ["head", " and ", "body"].map(|text| IoSlice::new(text.as_bytes()));
            assert_eq!(client.write_vectored(&slices).await.unwrap(), 13);
            drop(client);
            let mut read = String::new();
            server.read_to_string(&mut read).await.unwrap();
            assert_eq!(read, "head and body");
        }
    }

    #[tokio::test]
    async fn a_unix_socket_tells_a_peer_that_is_gone_from_one_that_still_reads() {
        let [_, (mut client, server)] = pairs().await;
        assert!(!server.is_gone());
        client.shutdown().await.unwrap();
        assert!(!server.is_gone(), "it still reads");
        drop(client);
        assert!(server.is_gone());
    }

    #[tokio::test]
    async fn both_directions_wait_for_each_other_without_loss() {
        // More than the buffers of either kind of socket.
        let bytes: Vec<u8> = (0..4_u32 << 20).map(|index| index as u8).collect();
        for (client, server) in pairs().await {
            let echo = tokio::spawn(async move {
                let (mut reader, mut writer) = tokio::io::split(server);
                tokio::io::copy(&mut reader, &mut writer).await.unwrap();
                writer.shutdown().await.unwrap();
            });
            let (mut reader, mut writer) = tokio::io::split(client);
            let mut read = Vec::new();
            let write = async {
                writer.write_all(&bytes).await.unwrap();
                writer.shutdown().await.unwrap();
            };
            let (_, result) = tokio::join!(write, reader.read_to_end(&mut read));
            result.unwrap();
            echo.await.unwrap();
            assert!(read == bytes);
        }
    }
}
