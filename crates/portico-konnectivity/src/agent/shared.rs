//! The state that all parts of an agent share: settings, counters, and the list of connections to endpoints.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_wire::konnectivity::{Code, Packet};
use slab::Slab;
use tokio::sync::watch;

use super::dial::DialFailure;
use super::record::{EndpointEnd, Record};
use super::settings::Settings;
use crate::counting::{Histogram, PacketCounts};
use crate::requests::Requests;

/// Upper bounds of the buckets of times, of dials and of requests about Leases, in seconds: upstream's.
pub const DIAL_BUCKETS: [f64; 7] = [0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0];

/// Counters of one agent.
#[derive(Debug, Default)]
pub struct Counters {
    /// Dials that succeeded, by time.
    pub dials: Histogram<{ DIAL_BUCKETS.len() }>,
    /// Dials that failed, as [`DialFailure::ALL`].
    pub dial_failures: [AtomicU64; DialFailure::ALL.len()],
    /// Dials that the server abandoned.
    pub dials_abandoned: AtomicU64,
    /// Ends of connections, as [`EndpointEnd::ALL`].
    pub ends: [AtomicU64; EndpointEnd::ALL.len()],
    /// Bytes passed to endpoints.
    pub bytes_up: AtomicU64,
    /// Bytes passed to servers.
    pub bytes_down: AtomicU64,
    /// Packets that came.
    pub received: PacketCounts,
    /// Packets that were sent.
    pub sent: PacketCounts,
    /// Connections to servers that came up.
    pub joined: AtomicU64,
    /// Attempts that led to a server that is connected already.
    pub duplicates: AtomicU64,
    /// Attempts that failed.
    pub join_failures: AtomicU64,
    /// Connections to servers that ended because the server was silent.
    pub silent: AtomicU64,
    /// Connections to servers that ended otherwise.
    pub lost: AtomicU64,
    /// Connect streams that ended with an error, by the number of its gRPC code.
    pub stream_errors: [AtomicU64; Code::COUNT],
    /// Lists of Leases.
    pub lease_lists: Requests<{ DIAL_BUCKETS.len() }>,
    /// Watches of them, from the request to the head of the answer.
    pub lease_watches: Requests<{ DIAL_BUCKETS.len() }>,
    /// Lists and watches that failed, with or without an answer of the API server.
    pub lease_failures: AtomicU64,
}

/// State that outlives any one connection.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) counters: Counters,
    pub(super) known_servers: AtomicU32,
    dialling: AtomicU32,
    records: Mutex<Slab<Arc<Record>>>,
    draining: watch::Sender<bool>,
    /// Changes when a connection opens or closes.
    open: watch::Sender<usize>,
}

/// A dial under way.
#[derive(Debug)]
pub(super) struct Dialling(Arc<Shared>);

impl Drop for Dialling {
    fn drop(&mut self) {
        self.0.dialling.fetch_sub(1, Relaxed);
    }
}

impl Shared {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            counters: Counters::default(),
            known_servers: AtomicU32::new(1),
            dialling: AtomicU32::new(0),
            records: Mutex::default(),
            draining: watch::Sender::new(false),
            open: watch::Sender::new(0),
        }
    }

    fn records(&self) -> MutexGuard<'_, Slab<Arc<Record>>> {
        // A panic elsewhere leaves nothing half done here.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections to endpoints that are open.
    pub(super) fn connections(&self) -> Vec<Arc<Record>> {
        self.records().iter().map(|(_, record)| Arc::clone(record)).collect()
    }

    pub(super) fn dialling(&self) -> u32 {
        self.dialling.load(Relaxed)
    }

    /// Counts a dial. `None` if as many are under way as may be.
    pub(super) fn begin_dial(self: &Arc<Self>) -> Option<Dialling> {
        let most = self.settings.max_dials;
        let up = |dialling| (dialling < most).then_some(dialling + 1);
        self.dialling.fetch_update(Relaxed, Relaxed, up).ok()?;
        Some(Dialling(Arc::clone(self)))
    }

    /// Lists a connection. `None` if there are as many as may be.
    pub(super) fn list(&self, record: &Arc<Record>) -> Option<usize> {
        let mut records = self.records();
        if records.len() >= self.settings.max_connections as usize {
            return None;
        }
        let slot = records.insert(Arc::clone(record));
        self.open.send_replace(records.len());
        Some(slot)
    }

    pub(super) fn unlist(&self, slot: usize, end: EndpointEnd) {
        let mut records = self.records();
        records.remove(slot);
        if records.is_empty() {
            // A burst needs no memory afterwards.
            records.shrink_to_fit();
        }
        self.open.send_replace(records.len());
        drop(records);
        let index = EndpointEnd::ALL.iter().position(|(known, _)| *known == end);
        self.counters.ends[index.unwrap_or_default()].fetch_add(1, Relaxed);
    }

    /// Connections to endpoints now, and a way to wait for another number.
    pub(super) fn open(&self) -> watch::Receiver<usize> {
        self.open.subscribe()
    }

    pub(super) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    pub(super) fn draining(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    pub(super) fn drain(&self) {
        self.draining.send_replace(true);
    }

    pub(super) fn dialled(&self, took: Duration) {
        self.counters.dials.observe(&DIAL_BUCKETS, took);
    }

    pub(super) fn dial_failed(&self, failure: DialFailure) {
        let index = DialFailure::ALL.iter().position(|(known, _)| *known == failure);
        self.counters.dial_failures[index.unwrap_or_default()].fetch_add(1, Relaxed);
    }

    pub(super) fn received(&self, packet: &Packet) {
        self.counters.received.packet(packet);
    }

    pub(super) fn sent(&self, packet: &Packet) {
        self.counters.sent.packet(packet);
    }

    pub(super) fn sent_data(&self) {
        self.counters.sent.data();
    }
}
