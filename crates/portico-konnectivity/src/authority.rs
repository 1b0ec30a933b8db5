//! A Unix socket whose requests have an `:authority` that HTTP libraries accept: see
//! [`portico_wire::authority`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use portico_wire::authority::Rewriter;
use tokio::io::{AsyncRead, ReadBuf};

/// Most bytes of one read while a header block is not whole.
const READ: usize = 4 * 1024;

/// A stream whose reader gets requests with an acceptable authority.
#[derive(Debug)]
pub struct Authority<S> {
    stream: S,
    rewriter: Rewriter,
}

impl<S> Authority<S> {
    /// Reads HTTP/2 with prior knowledge from `stream`, from its first byte on.
    pub fn new(stream: S) -> Self {
        Self { stream, rewriter: Rewriter::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Authority<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, rewriter } = &mut *self;
        loop {
            let ready = rewriter.ready();
            if !ready.is_empty() {
                let len = ready.len().min(buf.remaining());
                buf.put_slice(&ready.split_to(len));
                if ready.is_empty() {
                    // A connection at rest keeps no buffer.
                    *ready = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if rewriter.holds() {
                let mut block = [0; READ];
                let mut block = ReadBuf::new(&mut block);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut block))?;
                match block.filled() {
                    [] => rewriter.end(),
                    read => drop(rewriter.push(read)),
                }
                continue;
            }
            // Bytes of connections stay where the reader wants them.
            let before = buf.filled().len();
            ready!(Pin::new(&mut *stream).poll_read(cx, buf))?;
            let read = &buf.filled()[before..];
            let is_end = read.is_empty();
            let passing = rewriter.push(read);
            buf.set_filled(before + passing);
            if passing > 0 || is_end {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

portico_net::forward_writes!(Authority<S>);

#[cfg(test)]
mod tests;
