//! What waits for the Connect stream of an upstream server: control packets first, then one chunk of each
//! connection in turn.
//!
//! A connection has one chunk here at a time and is not read meanwhile, so that none holds up another.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use portico_wire::konnectivity::{ConnectId, Packet};

use super::endpoint::Endpoint;

/// Control packets that may wait: several for each connection that an agent has. A server that does not read
/// so many makes us answer for nothing.
const CONTROL: usize = 64 * 1024;

/// The queues of one stream.
#[derive(Debug, Default)]
pub(super) struct Outbound(Mutex<Queues>);

#[derive(Debug, Default)]
struct Queues {
    control: VecDeque<Packet>,
    data: VecDeque<Chunk>,
    writer: Option<Waker>,
    is_full: bool,
}

#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) connection: ConnectId,
    /// Counted by the activity of the connection to the server.
    pub(super) payload: Bytes,
    endpoint: Arc<Endpoint>,
}

/// What is next.
#[derive(Debug)]
pub(super) enum Next {
    Control(Packet),
    Data(Chunk),
    /// The server does not read what it asked for.
    Full,
}

impl Outbound {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a packet that goes before all data.
    pub(super) fn control(&self, packet: Packet) {
        let mut queues = self.queues();
        if queues.control.len() < CONTROL {
            queues.control.push_back(packet);
        } else {
            queues.is_full = true;
        }
        queues.wake();
    }

    /// Queues the chunk of an endpoint, which must have none here.
    pub(super) fn data(&self, endpoint: &Arc<Endpoint>, connection: ConnectId, payload: Bytes) {
        endpoint.occupy_lane();
        let mut queues = self.queues();
        queues.data.push_back(Chunk { connection, payload, endpoint: Arc::clone(endpoint) });
        queues.wake();
    }

    /// What is to be sent next. Wakes the writer.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Next> {
        let mut queues = self.queues();
        if queues.is_full {
            return Poll::Ready(Next::Full);
        }
        if let Some(packet) = queues.control.pop_front() {
            return Poll::Ready(Next::Control(packet));
        }
        if let Some(chunk) = queues.data.pop_front() {
            if queues.data.is_empty() {
                // A stream at rest needs no memory for a burst.
                queues.data.shrink_to(16);
                queues.control.shrink_to(16);
            }
            drop(queues);
            chunk.endpoint.free_lane();
            return Poll::Ready(Next::Data(chunk));
        }
        queues.writer = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Queues {
    fn wake(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }
}
