//! One established connection: its bytes and its end are counted, and it is listed while it is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use portico_net::{End, Meter};
use tokio::time::Instant;

use super::backend::Backend;
use super::connection_end::ConnectionEnd;
use super::connections::Record;
use super::counters::Counters;
use super::shared::Shared;

/// An established connection; counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Established {
    shared: Arc<Shared>,
    record: Arc<Record<Backend>>,
    slot: usize,
    /// Why it ended, if nobody says better.
    end: ConnectionEnd,
    /// The agent says that it was the endpoint.
    is_endpoint_reset: bool,
}

impl Established {
    pub(crate) fn new(shared: &Arc<Shared>, address: &str, backend: Arc<Backend>) -> Self {
        let (up, down) = (AtomicU64::new(0), AtomicU64::new(0));
        let record = Arc::new(Record { address: address.into(), backend, since: Instant::now(), up, down });
        let slot = shared.connections.insert(Arc::clone(&record));
        shared.counters.established.fetch_add(1, Relaxed);
        Self {
            shared: Arc::clone(shared),
            record,
            slot,
            end: ConnectionEnd::FrontendLost,
            is_endpoint_reset: false,
        }
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
    pub(crate) fn ends(&mut self, end: ConnectionEnd) {
        self.end = end;
    }
}

impl Drop for Established {
    fn drop(&mut self) {
        let age = self.record.since.elapsed();
        self.shared.connections.remove(self.slot);
        self.shared.counters.established.fetch_sub(1, Relaxed);
        self.shared.counters.ended(self.end, age);
        let (up, down) = (self.record.up.load(Relaxed), self.record.down.load(Relaxed));
        let (address, agent) = (&self.record.address, &self.record.backend.agent);
        let end = self.end.as_str();
        tracing::debug!(dst.addr = %address, %agent, end, ?age, up, down, "connection ended");
    }
}

/// The reports of the bridge of a connection with a stream of its own.
impl Meter for Established {
    fn carried(&mut self, up: usize, down: usize) {
        self.moved(up, down);
    }

    fn broke_behind_peer(&mut self) {
        self.is_endpoint_reset = true;
    }

    fn ended(mut self, end: End) {
        self.ends(ConnectionEnd::of_bridge(end, self.is_endpoint_reset));
    }
}
