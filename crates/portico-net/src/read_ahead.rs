//! Reads more at once than the reader above asks for: rustls asks for 4 KiB at a time, a fourth of a record.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of one read: an HTTP/2 frame of 120 KiB with its eight TLS records. Below 128 KiB, from which on the
/// C library maps and unmaps every buffer.
const READ: usize = 124 * 1024;

thread_local! {
    /// One buffer a thread, between two reads of any of its connections.
    static BUFFER: RefCell<Option<Box<[u8]>>> = const { RefCell::new(None) };
}

/// A stream that is read in large pieces and written directly. It holds a buffer only while the reader above
/// has not taken all of it.
#[derive(Debug)]
pub struct ReadAhead<S> {
    stream: S,
    left: Option<Left>,
}

/// What was read and not taken yet.
#[derive(Debug)]
struct Left {
    buffer: Box<[u8]>,
    range: Range<usize>,
}

impl<S> ReadAhead<S> {
    /// Reads ahead from `stream`.
    pub fn new(stream: S) -> Self {
        Self { stream, left: None }
    }

    /// Hands over what was read, and gives the buffer back after the last byte.
    fn hand_over(&mut self, mut left: Left, buf: &mut ReadBuf<'_>) {
        let taken = left.range.len().min(buf.remaining());
        buf.put_slice(&left.buffer[left.range.start..][..taken]);
        left.range.start += taken;
        if left.range.is_empty() {
            give_back(left.buffer);
        } else {
            self.left = Some(left);
        }
    }
}

fn give_back(buffer: Box<[u8]>) {
    BUFFER.with_borrow_mut(|free| *free = Some(buffer));
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(left) = self.left.take() {
            self.hand_over(left, buf);
            return Poll::Ready(Ok(()));
        }
        if buf.remaining() >= READ {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let buffer = BUFFER.with_borrow_mut(Option::take);
        let mut buffer = buffer.unwrap_or_else(|| vec![0; READ].into());
        let mut ahead = ReadBuf::new(&mut buffer);
        let read = Pin::new(&mut self.stream).poll_read(cx, &mut ahead);
        let range = 0..ahead.filled().len();
        if range.is_empty() {
            give_back(buffer);
            return read;
        }
        ready!(read)?;
        self.hand_over(Left { buffer, range }, buf);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn bytes_come_in_order_whatever_the_reader_asks_for() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|index| index as u8).collect();
        let mut stream = ReadAhead::new(&bytes[..]);
        let mut read = Vec::new();
        for most in [1, 4096, 100_000, 3].into_iter().cycle() {
            if (&mut stream).take(most).read_to_end(&mut read).await.unwrap() == 0 {
                break;
            }
        }
        assert!(read == bytes);
        assert!(stream.left.is_none(), "at rest it holds no buffer");
    }
}
