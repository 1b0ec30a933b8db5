//! The connections that are open, for `/connections`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

use super::registry::Candidate;

/// All connections that are open.
#[derive(Debug)]
pub(crate) struct Connections<C>(Mutex<Slab<Arc<Record<C>>>>);

/// One connection.
#[derive(Debug)]
pub(crate) struct Record<C> {
    pub(crate) address: Box<str>,
    pub(crate) backend: Arc<C>,
    pub(crate) since: Instant,
    pub(crate) up: AtomicU64,
    pub(crate) down: AtomicU64,
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

impl<C: Candidate> Connections<C> {
    pub(crate) fn new() -> Self {
        Self(Mutex::default())
    }

    fn all(&self) -> MutexGuard<'_, Slab<Arc<Record<C>>>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rows(&self) -> Vec<ConnectionRow> {
        let row = |(_, record): (usize, &Arc<Record<C>>)| ConnectionRow {
            address: record.address.to_string(),
            agent: record.backend.agent().to_owned(),
            age: record.since.elapsed(),
            up: record.up.load(Relaxed),
            down: record.down.load(Relaxed),
        };
        self.all().iter().map(row).collect()
    }

    /// Returns its slot.
    pub(crate) fn insert(&self, record: Arc<Record<C>>) -> usize {
        self.all().insert(record)
    }

    pub(crate) fn remove(&self, slot: usize) {
        let mut all = self.all();
        all.remove(slot);
        if all.is_empty() {
            all.shrink_to_fit();
        }
    }
}
