//! The messages that leave.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use h2::{Reason, SendStream};
use http::HeaderMap;
use portico_tunnel::connection::Activity;

use super::error::{Error, Status};

/// A payload up to this is copied behind its head: one frame in place of two.
const COPIED: usize = 8 * 1024;

/// Sends messages on one stream.
#[derive(Debug)]
pub struct Sender {
    stream: SendStream<Bytes>,
    activity: Arc<Activity>,
    /// Bytes that the peer gave no window for yet: at most one message.
    rest: VecDeque<Bytes>,
}

impl Sender {
    pub(super) fn new(stream: SendStream<Bytes>, activity: &Arc<Activity>) -> Self {
        Self { stream, activity: Arc::clone(activity), rest: VecDeque::new() }
    }

    /// Ready when the last message is on its way, and another one may be sent.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while let Some(part) = self.rest.front_mut() {
            // As much as is sent, or other streams of the connection would lack it.
            self.stream.reserve_capacity(part.len());
            match self.stream.capacity() {
                0 => match self.stream.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(_))) => {}
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error.into())),
                    Poll::Ready(None) => return Poll::Ready(Err(self.closed(cx))),
                    Poll::Pending => return Poll::Pending,
                },
                window => {
                    let sent = part.split_to(part.len().min(window));
                    if part.is_empty() {
                        self.rest.pop_front();
                    }
                    self.stream.send_data(sent, false)?;
                    self.activity.queue();
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Waits until [`poll_ready`](Self::poll_ready) is.
    pub async fn ready(&mut self) -> Result<(), Error> {
        poll_fn(|cx| self.poll_ready(cx)).await
    }

    /// Sends a message, in two parts that follow each other: prefix and head, and a payload. Only when
    /// ready; [`poll_ready`](Self::poll_ready) must be polled for it to leave.
    pub fn send(&mut self, head: &[u8], payload: Bytes) {
        let payload = self.push(head, payload);
        if !payload.is_empty() {
            self.rest.push_back(self.activity.counted(payload));
        }
    }

    /// Like [`Self::send`], for a payload that [`Activity::counted`] has counted on this connection already.
    pub fn send_counted(&mut self, head: &[u8], payload: Bytes) {
        let payload = self.push(head, payload);
        if !payload.is_empty() {
            self.rest.push_back(payload);
        }
    }

    /// Queues the head, with a small payload behind it. Returns the payload if it is not small.
    fn push(&mut self, head: &[u8], payload: Bytes) -> Bytes {
        let copied = if payload.len() <= COPIED { payload.len() } else { 0 };
        let mut first = BytesMut::with_capacity(head.len() + copied);
        first.extend_from_slice(head);
        first.extend_from_slice(&payload[..copied]);
        self.rest.push_back(self.activity.counted(first.freeze()));
        if copied > 0 { Bytes::new() } else { payload }
    }

    /// A server ends the stream with a status, when ready.
    pub fn finish(mut self, status: &Status) -> Result<(), Error> {
        let mut trailers = HeaderMap::new();
        status.write(&mut trailers);
        self.stream.send_trailers(trailers)?;
        self.activity.queue();
        Ok(())
    }

    /// Ends the stream at once, in both directions.
    pub fn reset(&mut self, reason: Reason) {
        self.stream.send_reset(reason);
    }

    /// Ready when the peer has reset the stream, or the connection is lost. Needed by an owner that has
    /// nothing to send: a receiver does not see it after END_STREAM.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reason, h2::Error>> {
        self.stream.poll_reset(cx)
    }

    fn closed(&mut self, cx: &mut Context<'_>) -> Error {
        match self.stream.poll_reset(cx) {
            Poll::Ready(Ok(reason)) => Error::Http(reason.into()),
            Poll::Ready(Err(error)) => Error::Http(error),
            Poll::Pending => Error::Closed,
        }
    }
}
