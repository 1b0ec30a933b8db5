//! Reads more at once than the reader above asks for: rustls asks for 4 KiB at a time, a fourth of a record.
//!
//! Bytes read ahead take memory. So a peer that may not have much of it is read by a [`ReadLimit`] until it
//! has earned more.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use crate::forward_writes;

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
    limit: Option<Arc<ReadLimit>>,
}

/// The bound of the bytes read of a peer of which little is known. It is shared with the layers above: they
/// learn more.
#[derive(Debug)]
pub struct ReadLimit {
    /// Bytes that may still be read. `usize::MAX` means no limit.
    left: AtomicUsize,
    is_lifted: AtomicBool,
}

impl ReadLimit {
    /// At most `most` bytes, and none ahead.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(most), is_lifted: AtomicBool::default() })
    }

    /// Stops counting. Nothing is read ahead before [`lift`](Self::lift).
    pub fn uncount(&self) {
        self.left.store(usize::MAX, Relaxed);
    }

    /// From now on there is no limit.
    pub fn lift(&self) {
        self.is_lifted.store(true, Relaxed);
    }

    /// Reads what is asked for, of what is left.
    fn poll_read<S: AsyncRead + Unpin>(
        &self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let left = self.left.load(Relaxed);
        if left == 0 {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sends too much")));
        }
        let room = buf.remaining().min(left);
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        ready!(Pin::new(stream).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        buf.advance(read);
        if left != usize::MAX {
            self.left.store(left - read, Relaxed);
        }
        Poll::Ready(Ok(()))
    }
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
        Self { stream, left: None, limit: None }
    }

    /// Reads from `stream` as the limit allows, and ahead once it is lifted.
    pub fn limited(stream: S, limit: &Arc<ReadLimit>) -> Self {
        Self { stream, left: None, limit: Some(Arc::clone(limit)) }
    }

    /// The stream below.
    pub fn get_ref(&self) -> &S {
        &self.stream
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
        let Self { stream, limit, .. } = &mut *self;
        if let Some(limit) = limit {
            if !limit.is_lifted.load(Relaxed) {
                return limit.poll_read(stream, cx, buf);
            }
            self.limit = None;
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

forward_writes!(ReadAhead<S>);

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

    #[tokio::test]
    async fn of_a_peer_with_a_limit_no_more_is_read_and_nothing_ahead_until_it_is_lifted() {
        let limit = ReadLimit::new(100);
        let mut stream = ReadAhead::limited(&[7; 1_000][..], &limit);
        let mut bytes = [0; 60];
        stream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(stream.stream.len(), 940, "the rest stays where it is");
        assert_eq!(stream.read(&mut bytes).await.unwrap(), 40);
        assert_eq!(stream.read(&mut bytes).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        limit.uncount();
        stream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(stream.stream.len(), 840);
        limit.lift();
        stream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(stream.stream.len(), 0);
    }
}
