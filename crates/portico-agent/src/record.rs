//! What is known of each connection of a pod, from its arrival to the one line that is left of it.
//!
//! An [`Entry`] is held by whoever serves a connection: as long as it lives the connection is listed and counted; dropped, it writes
//! the line.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use jiff::Timestamp;
use portico_net::access::millis;
use portico_tunnel::client::Endpoint;
use portico_tunnel::{End, Meter};
use serde::Serialize;

use crate::access::Line;
use crate::refusal::{ENDS, Refusal, end_index};
use crate::shared::{ForwardState, Shared};

/// Names one connection in access lines and in `/connections`. Written in hex, also in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub(crate) u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl Serialize for ConnectionId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One connection.
#[derive(Debug)]
pub struct Record {
    /// Unique within this process.
    pub id: ConnectionId,
    /// Who connected.
    pub client: SocketAddr,
    /// When, as time since the agent started.
    pub accepted: Duration,
    forward: Arc<ForwardState>,
    place: OnceLock<Endpoint>,
    up: AtomicU64,
    down: AtomicU64,
    cut: AtomicBool,
    cutter: AtomicWaker,
}

impl Record {
    pub(crate) fn new(
        id: ConnectionId,
        client: SocketAddr,
        accepted: Duration,
        forward: Arc<ForwardState>,
    ) -> Self {
        Self {
            id,
            client,
            accepted,
            forward,
            place: OnceLock::new(),
            up: AtomicU64::default(),
            down: AtomicU64::default(),
            cut: AtomicBool::default(),
            cutter: AtomicWaker::new(),
        }
    }

    /// Where it was accepted, and what it leads to.
    pub fn forward(&self) -> &ForwardState {
        &self.forward
    }

    /// The gateway it goes through; `None` while it waits for one.
    pub fn place(&self) -> Option<Endpoint> {
        self.place.get().copied()
    }

    /// Bytes passed to the gateway so far.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to the client so far.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }

    /// Ends the connection.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Relaxed);
        self.cutter.wake();
    }
}

/// A connection, listed and counted while this is held.
#[derive(Debug)]
pub(crate) struct Entry {
    shared: Arc<Shared>,
    record: Arc<Record>,
    slot: usize,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// It waits, or its task was cancelled.
    None,
    Refused(Refusal),
    Ended(End),
}

impl Entry {
    pub(crate) fn new(shared: &Arc<Shared>, record: Record) -> Self {
        let record = Arc::new(record);
        let slot = shared.list(Arc::clone(&record));
        Self { shared: Arc::clone(shared), record, slot, outcome: Outcome::None }
    }

    pub(crate) fn record(&self) -> &Arc<Record> {
        &self.record
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A gateway has opened it.
    pub(crate) fn opened(&self, endpoint: Endpoint) {
        // It is opened once.
        let _ = self.record.place.set(endpoint);
        let forward = &self.record.forward;
        forward.opened.fetch_add(1, Relaxed);
        self.shared.opened_after(self.shared.now().saturating_sub(self.record.accepted));
    }

    /// It is not carried.
    pub(crate) fn refused(mut self, refusal: Refusal) {
        self.outcome = Outcome::Refused(refusal);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.shared.unlist(self.slot);
        let (side, reason, status) = match self.outcome {
            Outcome::Refused(refusal) => {
                self.shared.count_refusal(refusal);
                let status =
                    if let Refusal::Refused(status) = refusal { Some(status.as_u16()) } else { None };
                (refusal.side(), refusal.reason(), status)
            }
            outcome => {
                let index = end_index(if let Outcome::Ended(end) = outcome { Some(end) } else { None });
                self.shared.count_end(index);
                let (reason, side) = ENDS[index];
                (side, reason, None)
            }
        };
        let (shared, record) = (&self.shared, &self.record);
        shared.access.write(|| Line {
            time: Timestamp::now(),
            forward: record.forward.listen,
            client: record.client,
            name: &record.forward.authority,
            gateway: record.place().and_then(|place| shared.gateway_name(place)),
            upstream: record.place().map(|place| place.address),
            bytes_up: record.bytes_up(),
            bytes_down: record.bytes_down(),
            duration_ms: millis(shared.now().saturating_sub(record.accepted)),
            side,
            reason,
            status,
            connection: record.id,
        });
    }
}

impl Meter for Entry {
    fn carried(&mut self, up: usize, down: usize) {
        let (up, down) = (up as u64, down as u64);
        let (record, forward) = (&self.record, &self.record.forward);
        if up > 0 {
            record.up.fetch_add(up, Relaxed);
            forward.up.fetch_add(up, Relaxed);
        }
        if down > 0 {
            record.down.fetch_add(down, Relaxed);
            forward.down.fetch_add(down, Relaxed);
        }
    }

    fn ended(mut self, end: End) {
        self.outcome = Outcome::Ended(end);
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.record.cut.load(Relaxed) {
            return Poll::Ready(());
        }
        self.record.cutter.register(cx.waker());
        if self.record.cut.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }
}
