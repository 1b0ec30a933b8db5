//! The messages that come.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use h2::{FlowControl, RecvStream};
use portico_net::MemoryBudget;
use portico_net::memory::Reservation;
use portico_wire::Parse;
use portico_wire::konnectivity::frame::{MAX_MESSAGE, PREFIX, prefix};

use super::error::{Error, Status};

/// Most window that an unfinished message keeps: half of the smallest that anybody gives a stream.
const WITHHELD: usize = 32 * 1024;

/// Bytes that came ahead are copied together up to this: a frame of a few bytes pins the whole buffer around
/// it.
const AHEAD: usize = 64 * 1024;

/// How the peer ends the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// A client does it by END_STREAM alone.
    Plainly,
    /// A server adds a status.
    WithStatus,
}

/// One message, without its prefix.
#[derive(Debug)]
pub struct Message {
    /// What is in it.
    pub bytes: Bytes,
    /// Window that the peer gets back by [`Receiver::release`] once the message is passed on. A large message
    /// has less: some was needed for the rest of it.
    pub window: usize,
}

/// Messages of one stream.
#[derive(Debug)]
pub struct Receiver {
    stream: RecvStream,
    ends: Ends,
    /// Bytes that came and are not a message yet, in the buffer of h2.
    chunk: Bytes,
    /// The bytes behind it, see [`poll_ahead`](Self::poll_ahead); small frames together.
    ahead: VecDeque<BytesMut>,
    /// Bytes of the last message, while it is not passed on.
    last: usize,
    /// Whether they are counted.
    is_counted: bool,
    /// The beginning of a message that came in pieces, with its prefix.
    partial: BytesMut,
    /// Window of `partial` that was not given back.
    withheld: usize,
    /// Counts `partial`, `ahead`, and the last message.
    reservation: Reservation,
    is_over: bool,
}

impl Receiver {
    pub(super) fn new(stream: RecvStream, ends: Ends, memory: &[MemoryBudget]) -> Self {
        let reservation = Reservation::new(memory.to_vec(), std::time::Duration::ZERO);
        Self {
            stream,
            ends,
            chunk: Bytes::new(),
            ahead: VecDeque::new(),
            last: 0,
            is_counted: false,
            partial: BytesMut::new(),
            withheld: 0,
            reservation,
            is_over: false,
        }
    }

    /// The next message; `None` once the peer has ended the stream as it should.
    pub async fn message(&mut self) -> Result<Option<Message>, Error> {
        poll_fn(|cx| self.poll_message(cx)).await
    }

    /// Like [`Self::message`], for a caller that waits for other things too. The previous message counts as
    /// passed on.
    pub fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Message>, Error>> {
        if std::mem::take(&mut self.is_counted) {
            self.reservation.release(self.last);
        }
        loop {
            if let Some(message) = self.take_message()? {
                self.last = message.bytes.len();
                return Poll::Ready(Ok(Some(message)));
            }
            if self.reservation.poll_evicted(cx).is_ready() {
                return Poll::Ready(Err(Error::Memory));
            }
            if let Some(chunk) = self.ahead.pop_front() {
                self.reservation.release(chunk.len());
                self.chunk = chunk.freeze();
                continue;
            }
            // A connection at rest holds no buffer.
            self.ahead = VecDeque::new();
            if self.is_over {
                return self.poll_end(cx);
            }
            match ready!(self.stream.poll_data(cx)) {
                Some(chunk) => self.chunk = chunk?,
                None => self.is_over = true,
            }
        }
    }

    /// Counts the last message while it is not passed on, and keeps the next bytes. h2 would keep them
    /// without counting them. Ready when the stream is lost, or others need that memory.
    pub fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.reservation.charge(self.last);
        }
        while !self.is_over
            && let Poll::Ready(next) = self.stream.poll_data(cx)
        {
            match next {
                Some(Ok(chunk)) => {
                    self.reservation.charge(chunk.len());
                    self.put_ahead(&chunk);
                }
                Some(Err(error)) => return Poll::Ready(error.into()),
                None => self.is_over = true,
            }
        }
        self.reservation.poll_evicted(cx).map(|()| Error::Memory)
    }

    fn put_ahead(&mut self, chunk: &[u8]) {
        match self.ahead.back_mut() {
            Some(last) if last.len() + chunk.len() <= AHEAD => last.extend_from_slice(chunk),
            _ => self.ahead.push_back(chunk.into()),
        }
    }

    /// Gives the peer window for so many bytes more.
    pub fn release(&mut self, window: usize) {
        release(self.stream.flow_control(), window);
    }

    /// What [`release`](Self::release) does, for another task.
    pub fn flow_control(&mut self) -> FlowControl {
        self.stream.flow_control().clone()
    }

    /// A message, if all of it has come. Afterwards all of `chunk` is used up, if there is none.
    fn take_message(&mut self) -> Result<Option<Message>, Error> {
        if self.partial.is_empty() {
            let Some(len) = length(&self.chunk)? else { return Ok(self.keep(PREFIX)) };
            if self.chunk.len() < len {
                return Ok(self.keep(len));
            }
            self.chunk.advance(PREFIX);
            return Ok(Some(Message { bytes: self.chunk.split_to(len - PREFIX), window: len }));
        }
        if length(&self.partial)?.is_none() {
            self.keep(PREFIX);
        }
        let Some(len) = length(&self.partial)? else { return Ok(None) };
        self.keep(len);
        if self.partial.len() < len {
            return Ok(None);
        }
        self.reservation.release(len);
        let mut bytes = std::mem::take(&mut self.partial).freeze();
        bytes.advance(PREFIX);
        Ok(Some(Message { bytes, window: std::mem::take(&mut self.withheld) }))
    }

    /// Moves bytes of the chunk into the partial message until that has `len`. If they are many their window
    /// goes back: the rest of the message may need it, and the limit for messages bounds them.
    fn keep(&mut self, len: usize) -> Option<Message> {
        let moved = self.chunk.len().min(len - self.partial.len());
        if moved > 0 {
            self.partial.extend_from_slice(&self.chunk.split_to(moved));
            self.reservation.charge(moved);
            self.withheld += moved;
            if self.withheld > WITHHELD {
                let window = std::mem::take(&mut self.withheld);
                self.release(window);
            }
        }
        None
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Message>, Error>> {
        if !self.partial.is_empty() {
            return Poll::Ready(Err(Error::Truncated("within a message")));
        }
        if self.ends == Ends::Plainly {
            return Poll::Ready(Ok(None));
        }
        let trailers = ready!(self.stream.poll_trailers(cx))?;
        // Asked again, there are none.
        self.ends = Ends::Plainly;
        let status = trailers.as_ref().and_then(Status::of).ok_or(Error::Truncated("without a status"))?;
        Poll::Ready(if status.code == Status::ok().code { Ok(None) } else { Err(Error::Status(status)) })
    }
}

/// Length of the message at the start of `bytes`, with its prefix, if that is there.
fn length(bytes: &[u8]) -> Result<Option<usize>, Error> {
    match prefix(bytes, MAX_MESSAGE) {
        Parse::Complete(frame) => Ok(Some(frame.len())),
        Parse::NeedMore => Ok(None),
        Parse::Malformed(why) => Err(why.into()),
    }
}

fn release(window: &mut FlowControl, bytes: usize) {
    // Fails only for more than was received, or after a reset, when it does not matter any more.
    let _ = window.release_capacity(bytes);
}
