//! The state that all connections of an agent share: counters, bounds, the list of them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_net::access::AccessLog;
use portico_net::line_limit::{LineLimit, Pace};
use portico_net::{ConnectionId, ConnectionIds, MemoryBudget};
use slab::Slab;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::forward::{Forward, ForwardState};
use crate::record::{Record, Upstream};
use crate::refusal::{ENDS, Refusal};

/// Upper bounds, in seconds, of the times until a gateway has opened a connection: from a round trip next
/// door to the open timeout.
pub const OPEN_BUCKETS: [f64; 13] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 20.0];

/// The position of a connection in the list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionIndex(usize);

/// Shared by all connections.
#[derive(Debug)]
pub struct Shared {
    /// The forwards, in the order they were given.
    pub forwards: Vec<Arc<ForwardState>>,
    /// Where access lines go.
    pub access: AccessLog,
    /// The memory budget: bytes that connections hold for receivers that do not take them.
    pub memory: MemoryBudget,
    gateways: Vec<Box<str>>,
    max_connections: u32,
    max_waiting: u32,
    started: Instant,
    ids: ConnectionIds,
    open: Mutex<Slab<Arc<Record>>>,
    none_left: Notify,
    stopping: watch::Sender<bool>,
    waiting: AtomicU32,
    accept_errors: AtomicU64,
    refusals: [AtomicU64; Refusal::REASONS.len()],
    ends: [AtomicU64; ENDS.len()],
    opening: [AtomicU64; OPEN_BUCKETS.len() + 1],
    opening_micros: AtomicU64,
    /// Limits of log lines about refusals, in the order of [`Refusal::REASONS`], and about failures to
    /// accept.
    lines: [LineLimit; Refusal::REASONS.len() + 1],
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Connections that wait for a gateway now.
    pub waiting: u32,
    /// Connections open now, these included.
    pub open: usize,
    /// Failed attempts to accept.
    pub accept_errors: u64,
    /// Connections not carried, in the order of [`Refusal::REASONS`].
    pub refusals: [u64; Refusal::REASONS.len()],
    /// Connections ended, in the order of [`ENDS`].
    pub ends: [u64; ENDS.len()],
    /// How many were opened within each of [`OPEN_BUCKETS`], and after the last of them.
    pub opening: [u64; OPEN_BUCKETS.len() + 1],
    /// The sum of these times.
    pub opening_seconds: f64,
}

impl Shared {
    pub(crate) fn new(
        forwards: Vec<Forward>,
        gateways: Vec<Box<str>>,
        access: AccessLog,
        memory: MemoryBudget,
        max_connections: u32,
        max_waiting: u32,
    ) -> Self {
        Self {
            forwards: forwards.into_iter().map(|forward| Arc::new(ForwardState::new(forward))).collect(),
            access,
            memory,
            gateways,
            max_connections,
            max_waiting,
            started: Instant::now(),
            ids: ConnectionIds::default(),
            open: Mutex::default(),
            none_left: Notify::new(),
            stopping: watch::Sender::new(false),
            waiting: AtomicU32::default(),
            accept_errors: AtomicU64::default(),
            refusals: Default::default(),
            ends: Default::default(),
            opening: Default::default(),
            opening_micros: AtomicU64::default(),
            lines: Default::default(),
        }
    }

    /// Time since the agent started.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The gateway of a connection, as it is configured.
    pub fn gateway_name(&self, upstream: Upstream) -> Option<&str> {
        self.gateways.get(upstream.gateway).map(|name| &**name)
    }

    /// Every connection, waiting or carried, in no order.
    pub fn connections(&self) -> Vec<Arc<Record>> {
        self.open().iter().map(|(_, record)| Arc::clone(record)).collect()
    }

    /// The counters as they are now.
    pub fn totals(&self) -> Totals {
        #[allow(clippy::cast_precision_loss, reason = "a metric")]
        let opening_seconds = self.opening_micros.load(Relaxed) as f64 / 1e6;
        Totals {
            waiting: self.waiting.load(Relaxed),
            open: self.open().len(),
            accept_errors: self.accept_errors.load(Relaxed),
            refusals: std::array::from_fn(|index| self.refusals[index].load(Relaxed)),
            ends: std::array::from_fn(|index| self.ends[index].load(Relaxed)),
            opening: std::array::from_fn(|index| self.opening[index].load(Relaxed)),
            opening_seconds,
        }
    }

    pub(crate) fn next_id(&self) -> ConnectionId {
        self.ids.next()
    }

    /// Lists a connection until [`unlist`](Self::unlist).
    pub(crate) fn list(&self, record: Arc<Record>) -> ConnectionIndex {
        ConnectionIndex(self.open().insert(record))
    }

    pub(crate) fn unlist(&self, slot: ConnectionIndex) {
        let mut open = self.open();
        open.remove(slot.0);
        if open.is_empty() {
            // The list of ten thousand connections that were open once is given back.
            open.shrink_to_fit();
            drop(open);
            self.none_left.notify_waiters();
        }
    }

    /// Whether the connection that was listed last is one too many.
    pub(crate) fn is_full(&self) -> bool {
        self.open().len() > self.max_connections as usize
    }

    /// Returns a permit to wait for a gateway, if fewer than `max_waiting` are out.
    pub(crate) fn wait(self: &Arc<Self>) -> Option<Waiting> {
        let waiting = self.waiting.fetch_add(1, Relaxed);
        // Dropped over the limit, it takes itself off the count again.
        let permit = Waiting(Arc::clone(self));
        (waiting < self.max_waiting).then_some(permit)
    }

    /// From now on no connection should wait for a gateway.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Returns once [`stop`](Self::stop) was called.
    pub(crate) async fn stopping(&self) {
        // Fails only if the sender is gone, and it is in `self`.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    /// Returns once there is no connection.
    pub(crate) async fn all_ended(&self) {
        loop {
            let none_left = self.none_left.notified();
            if self.open().is_empty() {
                return;
            }
            none_left.await;
        }
    }

    pub(crate) fn opened_after(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = OPEN_BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(OPEN_BUCKETS.len());
        self.opening[bucket].fetch_add(1, Relaxed);
        self.opening_micros.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn count_refusal(&self, refusal: Refusal) {
        self.refusals[refusal.index()].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_end(&self, index: usize) {
        self.ends[index].fetch_add(1, Relaxed);
    }

    pub(crate) fn count_accept_error(&self) {
        self.accept_errors.fetch_add(1, Relaxed);
    }

    /// Returns how many refusals of this kind were not logged since the last line, or `None` if this one is
    /// not logged either. A `refusal` of `None` is a failure to accept.
    pub(crate) fn may_log(&self, refusal: Option<Refusal>) -> Option<u64> {
        let limit = &self.lines[refusal.map_or(Refusal::REASONS.len(), Refusal::index)];
        limit.admit(Pace::SAME_KIND, self.now())
    }

    fn open(&self) -> MutexGuard<'_, Slab<Arc<Record>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit to wait for a gateway. Counted while it is held.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Shared>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use portico_net::access::AccessFormat;
    use tokio::time::advance;

    use super::*;

    fn shared(max_connections: u32, max_waiting: u32) -> Arc<Shared> {
        let forward = Forward { listen: ([127, 0, 0, 1], 6443).into(), authority: "api:443".into() };
        let gateways = vec!["tls://gateway:8088".into()];
        let access = AccessLog::start(AccessFormat::Off).unwrap();
        let memory = MemoryBudget::new(1 << 20);
        Arc::new(Shared::new(vec![forward], gateways, access, memory, max_connections, max_waiting))
    }

    fn record(shared: &Shared) -> Arc<Record> {
        let client = ([10, 0, 0, 1], 40_000).into();
        Arc::new(Record::new(shared.next_id(), client, shared.now(), Arc::clone(&shared.forwards[0])))
    }

    #[tokio::test]
    async fn a_connection_over_the_limit_is_one_too_many_until_another_ends() {
        let shared = shared(1, 1);
        let first = shared.list(record(&shared));
        assert!(!shared.is_full());
        let second = shared.list(record(&shared));
        assert!(shared.is_full());
        shared.unlist(second);
        assert!(!shared.is_full());
        assert_eq!((shared.totals().open, shared.connections().len()), (1, 1));
        shared.unlist(first);
        assert_eq!(shared.totals().open, 0);
    }

    #[tokio::test]
    async fn a_permit_to_wait_is_given_back_when_it_is_dropped() {
        let shared = shared(9, 1);
        let waiting = shared.wait().unwrap();
        assert!(shared.wait().is_none());
        assert_eq!(shared.totals().waiting, 1);
        drop(waiting);
        assert_eq!(shared.totals().waiting, 0);
        assert!(shared.wait().is_some());
    }

    #[tokio::test]
    async fn all_ended_waits_for_the_last_connection() {
        let shared = shared(9, 9);
        shared.all_ended().await;
        let slots = [shared.list(record(&shared)), shared.list(record(&shared))];
        let ended = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.all_ended().await }
        });
        shared.unlist(slots[0]);
        tokio::task::yield_now().await;
        assert!(!ended.is_finished());
        shared.unlist(slots[1]);
        ended.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_of_one_kind_are_logged_every_ten_seconds_with_the_number_of_the_rest() {
        let shared = shared(9, 9);
        assert_eq!(shared.may_log(Some(Refusal::NoTunnel)), Some(0));
        assert_eq!(shared.may_log(Some(Refusal::NoTunnel)), None);
        assert_eq!(shared.may_log(Some(Refusal::Full)), Some(0), "each kind has a limit of its own");
        assert_eq!(shared.may_log(None), Some(0));
        assert_eq!(shared.may_log(Some(Refusal::NoTunnel)), None);
        advance(Duration::from_secs(10)).await;
        assert_eq!(shared.may_log(Some(Refusal::NoTunnel)), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn times_until_opened_are_counted_in_the_first_bucket_that_holds_them() {
        let shared = shared(9, 9);
        for millis in [1, 3, 21_000] {
            shared.opened_after(Duration::from_millis(millis));
        }
        let totals = shared.totals();
        assert_eq!((totals.opening[0], totals.opening[2], totals.opening[OPEN_BUCKETS.len()]), (1, 1, 1));
        assert!((totals.opening_seconds - 21.004).abs() < 1e-9);
        advance(Duration::from_secs(3)).await;
        assert_eq!(shared.now(), Duration::from_secs(3));
    }
}
