//! The queue for the Connect stream of an upstream server: control packets first, then one chunk of each
//! connection in turn.
//!
//! A connection has one chunk here at a time and is not read meanwhile, so that none holds up another.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use portico_net::MemoryBudget;
use portico_net::memory::Reservation;
use portico_wire::konnectivity::{ConnectId, Packet};

use super::endpoint::Endpoint;

/// Bytes of control packets that may wait: several packets for each connection that an agent has. A server
/// that does not read so many makes us answer for nothing.
const CONTROL: usize = 4 << 20;

/// How long they may wait when others need the memory: with the stream all its connections end.
const UNREAD: Duration = Duration::from_secs(3);

/// The queues of one stream.
#[derive(Debug)]
pub(super) struct Outbound {
    queues: Mutex<Queues>,
    /// Counts the control packets that wait.
    held: Reservation,
}

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
}

impl Outbound {
    pub(super) fn new(memory: &MemoryBudget) -> Self {
        Self { queues: Mutex::default(), held: Reservation::new(vec![memory.clone()], UNREAD) }
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        // A panic elsewhere leaves nothing half done here.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a packet that goes before all data.
    pub(super) fn control(&self, packet: Packet) {
        let mut queues = self.queues();
        let cost = packet.memory();
        if self.held.held() + cost <= CONTROL {
            self.held.charge(cost);
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

    /// Ready when the server does not read what it asked for, and the bytes that wait exceed their bound or
    /// others need the memory. It also wakes the task for window, and for all that is queued.
    pub(super) fn poll_full(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut queues = self.queues();
        if queues.is_full {
            return Poll::Ready(());
        }
        match &mut queues.writer {
            Some(writer) => writer.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        // The reservation wakes the task once it is evicted.
        self.held.poll_evicted(cx)
    }

    /// What is to be sent next. `None`: [`Self::poll_full`] wakes its task once there is something.
    pub(super) fn next(&self) -> Option<Next> {
        let mut queues = self.queues();
        if let Some(packet) = queues.control.pop_front() {
            self.held.release(packet.memory());
            return Some(Next::Control(packet));
        }
        let chunk = queues.data.pop_front()?;
        if queues.data.is_empty() {
            // A stream at rest needs no memory for a burst.
            queues.data.shrink_to(16);
            queues.control.shrink_to(16);
        }
        drop(queues);
        chunk.endpoint.free_lane();
        Some(Next::Data(chunk))
    }
}

impl Queues {
    fn wake(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::future::poll_immediate;
    use portico_wire::konnectivity::DialId;

    use super::*;

    fn refusal() -> Packet {
        Packet::DialResponse { dial: DialId(1), result: Err("x".repeat(1_000)) }
    }

    async fn is_full(outbound: &Outbound) -> bool {
        poll_immediate(poll_fn(|cx| outbound.poll_full(cx))).await.is_some()
    }

    #[tokio::test]
    async fn answers_that_wait_are_counted_until_they_are_sent() {
        let memory = MemoryBudget::new(1 << 20);
        let outbound = Outbound::new(&memory);
        for _ in 0..100 {
            outbound.control(refusal());
        }
        assert!(memory.held() > 100_000, "{} bytes", memory.held());
        for _ in 0..100 {
            assert!(matches!(outbound.next(), Some(Next::Control(_))));
        }
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test]
    async fn a_server_that_does_not_read_its_answers_is_given_up() {
        let memory = MemoryBudget::new(1 << 30);
        let outbound = Outbound::new(&memory);
        for _ in 0..10_000 {
            outbound.control(refusal());
        }
        assert!(memory.held() <= CONTROL, "{} bytes", memory.held());
        assert!(is_full(&outbound).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_reads_late_is_given_up_only_when_others_need_the_memory_of_its_answers() {
        let memory = MemoryBudget::new(100_000);
        let outbound = Outbound::new(&memory);
        outbound.control(refusal());
        outbound.control(refusal());
        let other = Reservation::new(vec![memory.clone()], Duration::ZERO);
        other.charge(200_000);
        assert!(other.is_evicted());
        assert!(!is_full(&outbound).await, "it has just begun to wait");
        tokio::time::advance(UNREAD).await;
        let other = Reservation::new(vec![memory], UNREAD);
        other.charge(200_000);
        assert!(is_full(&outbound).await);
    }
}
