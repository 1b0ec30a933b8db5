//! What all connections of an agent share: counters, bounds, the list of them.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use portico_net::MemoryBudget;
use portico_net::access::AccessLog;
use portico_tunnel::client::Endpoint;
use slab::Slab;
use tokio::sync::Notify;

use crate::forward::Forward;
use crate::record::{ConnectionId, Record};
use crate::refusal::{ENDS, Refusal};

/// Upper bounds, in seconds, of the times until a gateway has opened a connection: a round trip next door to the open timeout.
pub const OPEN_BUCKETS: [f64; 13] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 20.0];

/// Between two lines about refusals of one kind.
const COMPLAIN_AGAIN: Duration = Duration::from_secs(10);

/// A forward and what is counted of it.
#[derive(Debug)]
pub struct ForwardState {
    /// Where it listens.
    pub listen: SocketAddr,
    /// What the gateway is asked for.
    pub authority: Box<str>,
    pub(crate) accepted: AtomicU64,
    pub(crate) opened: AtomicU64,
    pub(crate) up: AtomicU64,
    pub(crate) down: AtomicU64,
}

impl ForwardState {
    /// Connections accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Relaxed)
    }

    /// Connections a gateway has opened.
    pub fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }

    /// Bytes passed to gateways.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to clients.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }
}

/// Shared by all connections.
#[derive(Debug)]
pub struct Shared {
    /// The forwards, in the order they were given.
    pub forwards: Vec<Arc<ForwardState>>,
    /// Where access lines go.
    pub access: AccessLog,
    /// What connections hold for receivers that do not take it.
    pub memory: MemoryBudget,
    gateways: Vec<Box<str>>,
    max_connections: u32,
    max_waiting: u32,
    started: Instant,
    ids: AtomicU64,
    open: Mutex<Slab<Arc<Record>>>,
    none_left: Notify,
    waiting: AtomicU32,
    accept_errors: AtomicU64,
    refusals: [AtomicU64; Refusal::WORDS.len()],
    ends: [AtomicU64; ENDS.len()],
    opening: [AtomicU64; OPEN_BUCKETS.len() + 1],
    opening_micros: AtomicU64,
    complaints: Mutex<[Complaint; Refusal::WORDS.len() + 1]>,
}

/// What was said about refusals of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Complaint {
    last: Option<Instant>,
    untold: u64,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Connections that wait for a gateway now.
    pub waiting: u32,
    /// Connections there are now, these included.
    pub open: usize,
    /// Failed attempts to accept.
    pub accept_errors: u64,
    /// Connections not carried, in the order of [`Refusal::WORDS`].
    pub refusals: [u64; Refusal::WORDS.len()],
    /// Connections ended, in the order of [`ENDS`].
    pub ends: [u64; ENDS.len()],
    /// How many were opened within each of [`OPEN_BUCKETS`], and in longer.
    pub opening: [u64; OPEN_BUCKETS.len() + 1],
    /// How long that took together.
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
        let forwards = forwards.into_iter().map(|Forward { listen, authority }| {
            Arc::new(ForwardState {
                listen,
                authority,
                accepted: AtomicU64::default(),
                opened: AtomicU64::default(),
                up: AtomicU64::default(),
                down: AtomicU64::default(),
            })
        });
        Self {
            forwards: forwards.collect(),
            access,
            memory,
            gateways,
            max_connections,
            max_waiting,
            started: Instant::now(),
            // Unlikely to repeat across restarts: the upper half differs from process to process.
            ids: AtomicU64::new(RandomState::new().hash_one("portico") << 32),
            open: Mutex::default(),
            none_left: Notify::new(),
            waiting: AtomicU32::default(),
            accept_errors: AtomicU64::default(),
            refusals: Default::default(),
            ends: Default::default(),
            opening: Default::default(),
            opening_micros: AtomicU64::default(),
            complaints: Mutex::default(),
        }
    }

    /// Time since the agent started.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The gateway of a connection, as it is configured.
    pub fn gateway_name(&self, endpoint: Endpoint) -> Option<&str> {
        self.gateways.get(endpoint.gateway).map(|name| &**name)
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
        ConnectionId(self.ids.fetch_add(1, Relaxed))
    }

    pub(crate) fn list(&self, record: Arc<Record>) -> usize {
        self.open().insert(record)
    }

    pub(crate) fn unlist(&self, slot: usize) {
        let mut open = self.open();
        open.remove(slot);
        if open.is_empty() {
            // Ten thousand connections that were there once need not be remembered.
            open.shrink_to_fit();
            drop(open);
            self.none_left.notify_waiters();
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        // One more is listed already: the one that is asked about.
        self.open().len() > self.max_connections as usize
    }

    /// A place among those that wait for a gateway.
    pub(crate) fn wait(self: &Arc<Self>) -> Option<Waiting> {
        let waiting = self.waiting.fetch_add(1, Relaxed);
        let guard = Waiting(Arc::clone(self));
        (waiting < self.max_waiting).then_some(guard)
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

    /// Whether to write a line about a refusal, `None` for failures to accept; how many were passed over since the last one.
    pub(crate) fn may_complain(&self, refusal: Option<Refusal>) -> Option<u64> {
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        let complaint = &mut complaints[refusal.map_or(Refusal::WORDS.len(), Refusal::index)];
        let now = Instant::now();
        if complaint.last.is_some_and(|last| now.duration_since(last) < COMPLAIN_AGAIN) {
            complaint.untold += 1;
            return None;
        }
        complaint.last = Some(now);
        Some(std::mem::take(&mut complaint.untold))
    }

    fn open(&self) -> MutexGuard<'_, Slab<Arc<Record>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that waits for a gateway, counted.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Shared>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}
