//! The requests that wait for a verdict about a token, each of which holds memory for seconds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portico_api::names::Tenant;

/// One cluster may use 1/`SHARES` of the memory for waiting requests. So one hanging API server leaves room
/// for three more. With 1 GiB of memory for the gateway, and tokens of 1 KiB, two thousand nodes of a cluster
/// may come at once.
pub(super) const SHARES: usize = 4;

/// What a request that waits takes beside its token: its stream, its task, and what it asks for.
pub(super) const WAITER: usize = 3 * 1024;

/// Counts them.
#[derive(Debug)]
pub(super) struct Waiters {
    all: AtomicU32,
    bytes: AtomicUsize,
    most_bytes: usize,
    /// Bytes by cluster.
    clusters: Mutex<HashMap<Tenant, usize>>,
}

/// One of them.
pub(super) struct Waiter {
    of: Arc<Waiters>,
    cluster: Tenant,
    bytes: usize,
}

impl Waiters {
    /// At most so many bytes are held.
    pub(super) fn new(most_bytes: usize) -> Self {
        Self {
            all: AtomicU32::default(),
            bytes: AtomicUsize::default(),
            most_bytes,
            clusters: Mutex::default(),
        }
    }

    /// One more request of `cluster`, with a token of so many bytes. `None` if too many wait.
    pub(super) fn enter(self: &Arc<Self>, cluster: &Tenant, token: usize) -> Option<Waiter> {
        let bytes = WAITER + token;
        // The numbers beside change under this lock only.
        let mut clusters = self.clusters();
        let of_cluster = clusters.get(cluster).copied().unwrap_or_default();
        if of_cluster + bytes > self.most_bytes / SHARES || self.bytes.load(Relaxed) + bytes > self.most_bytes
        {
            return None;
        }
        clusters.insert(cluster.clone(), of_cluster + bytes);
        self.all.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        Some(Waiter { of: Arc::clone(self), cluster: cluster.clone(), bytes })
    }

    /// How many wait now.
    pub(super) fn count(&self) -> u32 {
        self.all.load(Relaxed)
    }

    /// Bytes that these are reckoned to take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    fn clusters(&self) -> MutexGuard<'_, HashMap<Tenant, usize>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut clusters = self.of.clusters();
        self.of.all.fetch_sub(1, Relaxed);
        self.of.bytes.fetch_sub(self.bytes, Relaxed);
        if let Some(bytes) = clusters.get_mut(&self.cluster) {
            *bytes -= self.bytes;
            if *bytes == 0 {
                clusters.remove(&self.cluster);
            }
        }
    }
}
