//! A stream whose first bytes were read already, to detect its protocol.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, ReadBuf};

use crate::forward_writes;

/// A stream that yields the bytes already read from it first.
#[derive(Debug)]
pub struct Rewind<S> {
    first: Bytes,
    stream: S,
}

impl<S> Rewind<S> {
    /// Yields `first`, then what `stream` has.
    pub fn new(first: Bytes, stream: S) -> Self {
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

forward_writes!(Rewind<S>);
