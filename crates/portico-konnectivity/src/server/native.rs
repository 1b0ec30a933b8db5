//! A connection that has an HTTP/2 stream of its own, which an agent of ours has opened.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::Response;
use portico_tunnel::connection::{Activity, RoomTurn, Waiting};
use portico_tunnel::reset;

use super::inbox::Ended;

/// A stream that the agent has opened, and that nobody has answered. Dropped, it is reset.
#[derive(Debug)]
pub(crate) struct NativeStream {
    pub(crate) respond: SendResponse<Bytes>,
    pub(crate) from_agent: RecvStream,
    pub(crate) activity: Arc<Activity>,
}

/// Both directions. Dropped before it is split, it is reset.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) to_agent: SendStream<Bytes>,
    pub(crate) from_agent: RecvStream,
    pub(crate) activity: Arc<Activity>,
}

/// The direction from the agent.
#[derive(Debug)]
pub(crate) struct NativeReader {
    stream: RecvStream,
    activity: Arc<Activity>,
    /// Read last, and passed on once the next is asked for.
    unreleased: usize,
    /// Set only while the frontend takes less than comes, so boxed.
    waiting: Option<Box<Waiting>>,
    /// How the stream ends, behind what waits.
    ended: Option<Ended>,
}

/// The direction to the agent.
#[derive(Debug)]
pub(crate) struct NativeWriter {
    stream: SendStream<Bytes>,
    activity: Arc<Activity>,
}

/// Why a stream is over that was reset so, or lost with its connection.
fn lost(reset: Option<Reason>) -> Ended {
    if reset == Some(reset::BROKEN) { Ended::EndpointReset } else { Ended::AgentLost }
}

impl NativeStream {
    /// Answers 200. The answer leaves with the bytes that are sent next in the same turn. A frontend may
    /// speak first, and an answer of its own would then cost both ends a record and a wake-up.
    pub(crate) fn answer(mut self) -> Result<Answered, Ended> {
        let to_agent = self.respond.send_response(Response::new(()), false).map_err(|_| Ended::AgentLost)?;
        let Self { from_agent, activity, .. } = self;
        Ok(Answered { to_agent, from_agent, activity })
    }
}

impl Answered {
    pub(crate) fn split(self) -> (NativeReader, NativeWriter) {
        let Self { to_agent, from_agent, activity } = self;
        let reader = NativeReader {
            stream: from_agent,
            activity: Arc::clone(&activity),
            unreleased: 0,
            waiting: None,
            ended: None,
        };
        (reader, NativeWriter { stream: to_agent, activity })
    }
}

impl NativeReader {
    /// The next bytes, or why there are none. What was read before counts as passed on.
    pub(crate) async fn read(&mut self) -> Result<Bytes, Ended> {
        // Fails only after a reset.
        let _ = self.stream.flow_control().release_capacity(std::mem::take(&mut self.unreleased));
        let bytes = match self.waiting.as_mut().and_then(|waiting| waiting.pop()) {
            Some(bytes) => bytes,
            None => {
                self.waiting = None;
                poll_fn(|cx| self.poll_next(cx)).await?
            }
        };
        self.unreleased = bytes.len();
        Ok(bytes)
    }

    /// Keeps the next bytes while the frontend does not take the last ones. h2 would keep them without
    /// counting them. Ready when others need that memory, and the connection has to end.
    pub(crate) fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Poll::Ready(next) = self.poll_next(cx) {
            match next {
                Ok(bytes) => {
                    let waiting = || Box::new(Waiting::new(&self.activity, None));
                    self.waiting.get_or_insert_with(waiting).push(bytes);
                }
                Err(_) => break,
            }
        }
        self.waiting.as_ref().map_or(Poll::Pending, |waiting| waiting.poll_evicted(cx))
    }

    /// The next bytes of the stream, which are some.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Ended>> {
        if let Some(ended) = self.ended {
            return Poll::Ready(Err(ended));
        }
        loop {
            let ended = match ready!(self.stream.poll_data(cx)) {
                None => Ended::Closed,
                Some(Err(error)) => lost(error.reason()),
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => return Poll::Ready(Ok(bytes)),
            };
            return Poll::Ready(Err(*self.ended.insert(ended)));
        }
    }
}

impl NativeWriter {
    /// Sends bytes as far and as fast as the agent gives window, and its connection takes them. The bytes
    /// that wait for that are bounded, however many streams it has.
    pub(crate) async fn write(&mut self, mut bytes: Bytes) -> Result<(), Ended> {
        // Given up with the write: nobody else would have the room that it keeps in line for.
        let mut turn = RoomTurn::default();
        while !bytes.is_empty() {
            self.stream.reserve_capacity(bytes.len());
            let most = poll_fn(|cx| self.poll_most(&mut turn, cx)).await?;
            let part = bytes.split_to(most.min(bytes.len()));
            let sent = self.stream.send_data(self.activity.counted(part), false);
            self.activity.queue();
            turn.pass_on(&self.activity);
            sent.map_err(|_| self.why())?;
        }
        Ok(())
    }

    /// How many bytes may be sent now.
    fn poll_most(&mut self, turn: &mut RoomTurn, cx: &mut Context<'_>) -> Poll<Result<usize, Ended>> {
        // Looked at each time: window that was given may be taken back.
        let window = match self.stream.capacity() {
            0 => {
                turn.leave();
                return match ready!(self.stream.poll_capacity(cx)) {
                    Some(Ok(_)) => {
                        cx.waker().wake_by_ref();
                        Poll::Pending
                    }
                    _ => Poll::Ready(Err(self.why())),
                };
            }
            window => window,
        };
        match turn.poll(&self.activity, cx) {
            Poll::Ready(room) => Poll::Ready(Ok(window.min(room))),
            // Room says nothing of a stream that is reset, or lost with its connection.
            Poll::Pending => self.poll_lost(cx).map(Err),
        }
    }

    /// Ready once the stream is reset, or lost with its connection.
    pub(crate) async fn lost(&mut self) -> Ended {
        poll_fn(|cx| self.poll_lost(cx)).await
    }

    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<Ended> {
        self.stream.poll_reset(cx).map(|reset| lost(reset.ok()))
    }

    /// Nothing more comes from the frontend.
    pub(crate) fn end(&mut self) -> Result<(), Ended> {
        let ended = self.stream.send_data(Bytes::new(), true);
        self.activity.queue();
        ended.map_err(|_| self.why())
    }

    /// Why nothing can be sent any more.
    fn why(&mut self) -> Ended {
        lost(reset::of(&mut self.stream))
    }

    /// Aborts the connection.
    pub(crate) fn reset(&mut self) {
        self.stream.send_reset(Reason::CANCEL);
    }
}
