//! Bodies of answers: short ones whole, long ones piece by piece, so that a listing of 30,000 routes never
//! stands in memory.
//!
//! A long answer is written by a blocking thread into a channel of two pieces. A client that reads slowly
//! holds that thread and two pieces. If a client leaves, or its time is over, the writing ends at the next
//! piece. Few are written at a time, because a table stands in memory until its first piece. The next one
//! begins when another ends.

use std::convert::Infallible;
use std::io::{self, Write};

use futures_util::StreamExt;
use futures_util::stream::{once, unfold};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use tokio::sync::{Semaphore, mpsc};

/// Large enough that the channel costs nothing, small enough to forget.
const PIECE: usize = 32 * 1024;
/// Long answers held at once, by all listeners of the process: two Prometheis and two people.
pub(crate) const MOST_LONG: usize = 4;
/// One on its way to the socket, one being filled behind it.
const PIECES_AHEAD: usize = 2;

/// Long answers that are written at once.
static WRITERS: Semaphore = Semaphore::const_new(MOST_LONG);

/// The body of every answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A body that is there already.
pub fn whole(text: String) -> Body {
    Full::new(Bytes::from(text)).boxed_unsync()
}

/// A body as `write` writes it.
pub fn stream(write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static) -> Body {
    let started = async move {
        // It is never closed. That a client left meanwhile shows with the first piece that is written to it.
        let writing = WRITERS.acquire().await;
        let (pieces, receiver) = mpsc::channel(PIECES_AHEAD);
        tokio::task::spawn_blocking(move || {
            let mut out = Pieces { pieces, piece: Vec::with_capacity(PIECE) };
            if let Err(error) = write(&mut out).and_then(|()| out.flush()) {
                tracing::debug!(%error, "an answer of the admin listener was not written to its end");
            }
            drop(writing);
        });
        receiver
    };
    let next = |mut receiver: mpsc::Receiver<Bytes>| async move {
        let piece = receiver.recv().await?;
        Some((Ok(Frame::data(piece)), receiver))
    };
    let pieces = once(started).flat_map(move |receiver| unfold(receiver, next));
    StreamBody::new(pieces).boxed_unsync()
}

/// Cuts what is written into pieces for the channel.
struct Pieces {
    pieces: mpsc::Sender<Bytes>,
    piece: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.piece.len() + bytes.len() > PIECE {
            self.flush()?;
        }
        self.piece.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.pieces.blocking_send(piece.into()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_long_answer_arrives_whole_and_in_order() {
        let body = stream(|out| (0..20_000).try_for_each(|number| writeln!(out, "{number}")));
        let bytes = body.collect().await.unwrap().to_bytes();
        let expected: String = (0..20_000).map(|number| format!("{number}\n")).collect();
        assert_eq!(bytes, expected);
    }

    #[tokio::test]
    async fn a_client_that_leaves_ends_the_writing() {
        let (ended, outcome) = tokio::sync::oneshot::channel();
        let mut body = stream(move |out| {
            let outcome = (0..10_000_000).try_for_each(|number| writeln!(out, "{number}"));
            let _ = ended.send(outcome.is_err());
            outcome
        });
        assert!(body.frame().await.is_some());
        drop(body);
        assert!(outcome.await.unwrap());
    }
}
