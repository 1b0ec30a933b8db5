//! The connections that are open, for `/connections` and for what is counted when they end.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_net::{End, Meter, Side};
use slab::Slab;
use tokio::time::Instant;

use super::backend::Backend;
use super::counters::Counters;
use super::shared::Shared;

/// All connections that are open.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<Slab<Arc<Record>>>);

/// One connection.
#[derive(Debug)]
pub(crate) struct Record {
    address: Box<str>,
    backend: Arc<Backend>,
    since: Instant,
    up: AtomicU64,
    down: AtomicU64,
}

/// One row of `/connections`.
#[derive(Debug, Clone)]
pub struct ConnectionRow {
    /// What was dialled.
    pub address: String,
    /// The agent that did.
    pub agent: String,
    /// For how long.
    pub age: Duration,
    /// Bytes to the endpoint.
    pub up: u64,
    /// Bytes from it.
    pub down: u64,
}

impl Connections {
    fn all(&self) -> MutexGuard<'_, Slab<Arc<Record>>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rows(&self) -> Vec<ConnectionRow> {
        let row = |(_, record): (usize, &Arc<Record>)| ConnectionRow {
            address: record.address.to_string(),
            agent: record.backend.agent.to_string(),
            age: record.since.elapsed(),
            up: record.up.load(Relaxed),
            down: record.down.load(Relaxed),
        };
        self.all().iter().map(row).collect()
    }
}

/// An established connection; counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Established {
    shared: Arc<Shared>,
    record: Arc<Record>,
    slot: usize,
    /// Why it ended, if nobody says better.
    end: &'static str,
}

impl Established {
    pub(crate) fn new(shared: &Arc<Shared>, address: &str, backend: Arc<Backend>) -> Self {
        let (up, down) = (AtomicU64::new(0), AtomicU64::new(0));
        let record = Arc::new(Record { address: address.into(), backend, since: Instant::now(), up, down });
        let slot = shared.connections.all().insert(Arc::clone(&record));
        shared.counters.established.fetch_add(1, Relaxed);
        Self { shared: Arc::clone(shared), record, slot, end: "frontend_lost" }
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub(crate) fn moved(&self, up: usize, down: usize) {
        self.shared.counters.carried(up, down);
        self.record.up.fetch_add(up as u64, Relaxed);
        self.record.down.fetch_add(down as u64, Relaxed);
    }

    /// Notes why the connection ends.
    pub(crate) fn ends(&mut self, reason: &'static str) {
        self.end = reason;
    }
}

impl Drop for Established {
    fn drop(&mut self) {
        let age = self.record.since.elapsed();
        let mut all = self.shared.connections.all();
        all.remove(self.slot);
        if all.is_empty() {
            all.shrink_to_fit();
        }
        drop(all);
        self.shared.counters.established.fetch_sub(1, Relaxed);
        self.shared.counters.ended(self.end, age);
        let (up, down) = (self.record.up.load(Relaxed), self.record.down.load(Relaxed));
        let (address, agent) = (&self.record.address, &self.record.backend.agent);
        tracing::debug!(dst.addr = %address, %agent, end = self.end, ?age, up, down, "connection ended");
    }
}

/// What the bridge of a connection with a stream of its own reports. The frontend is downstream.
impl Meter for Established {
    fn carried(&mut self, up: usize, down: usize) {
        self.moved(up, down);
    }

    fn ended(mut self, end: End) {
        self.ends(match end {
            End::Closed { first: Side::Downstream } => "frontend_closed",
            End::Closed { first: Side::Upstream } => "endpoint_closed",
            End::Reset { by: Side::Downstream } => "frontend_lost",
            End::Reset { by: Side::Upstream } | End::Idle | End::Cut => "agent_lost",
            End::Memory => "memory",
        });
    }
}
