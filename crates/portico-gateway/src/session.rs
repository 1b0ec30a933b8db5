//! An open connection while its bytes move: listed, counted, and closed by one access line.
//!
//! The task that carries the bytes holds a [`Session`]. A session ends when it is finished, or dropped
//! because its task was cancelled. Then bytes are added up, the connection leaves the list, and the access
//! line is written.

use std::sync::Arc;
use std::task::{Context, Poll};

use portico_net::socket::Keepalive;
use portico_net::{MemoryBudget, Meter};

use crate::access::Line;
use crate::outcome::End;
use crate::record::Record;
use crate::shared::Alive;
use crate::worker::Worker;

/// An open connection, listed and counted while this is held.
#[derive(Debug)]
pub(crate) struct Session {
    worker: Arc<Worker>,
    record: Arc<Record>,
    slot: usize,
    end: End,
    /// Whether the connection lasted when the record got the waker of the task that carries the bytes.
    /// `None` before it got one.
    waker_set: Option<bool>,
    /// Whether the socket to the endpoint has got what only a lasting connection needs.
    has_keepalive: bool,
    /// Set for CONNECT only. The task of a stream can end after that of its connection, while it delivers the
    /// last bytes. The drain waits for it.
    alive: Option<Alive>,
}

impl Session {
    /// Lists the connection and counts it as established.
    pub(crate) fn open(worker: &Arc<Worker>, record: Record) -> Self {
        let handshake = worker.shared.now().saturating_sub(record.accepted);
        record.upstream.cluster.count_established(record.listener.kind(), handshake);
        let record = Arc::new(record);
        let slot = worker.list(Arc::clone(&record));
        Self {
            worker: Arc::clone(worker),
            record,
            slot,
            end: End::Cancelled,
            waker_set: None,
            has_keepalive: false,
            alive: None,
        }
    }

    /// Keeps the gateway from having ended for as long as the session lives.
    pub(crate) fn set_alive(&mut self, alive: Alive) {
        self.alive = Some(alive);
    }

    pub(crate) fn record(&self) -> &Arc<Record> {
        &self.record
    }
}

impl Meter for Session {
    fn carried(&mut self, up: usize, down: usize) {
        // One direction at a time: the other need not be touched.
        if up > 0 {
            self.record.count_up(up);
        }
        if down > 0 {
            self.record.count_down(down);
        }
    }

    fn ended(mut self, end: portico_net::End) {
        self.end = match end {
            portico_net::End::Closed { first } => End::Closed(first.into()),
            portico_net::End::Reset { by } => End::Reset(by.into()),
            portico_net::End::Idle => End::Idle,
            portico_net::End::Memory => End::Memory,
            portico_net::End::Cut => self.record.cancelled().unwrap_or(End::Cancelled),
        };
    }

    fn budget(&self) -> Option<&MemoryBudget> {
        Some(self.record.upstream.cluster.memory())
    }

    /// Due once the connection lasts: four system calls that a connection of milliseconds, which most are,
    /// does not need.
    fn take_due_keepalive(&mut self) -> Option<Keepalive> {
        if self.has_keepalive || !self.record.lasts() {
            return None;
        }
        self.has_keepalive = true;
        Some(self.worker.shared.config.upstream_keepalive)
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // Twice at most: telling the connection that it lasts has taken the first waker.
        let lasts = Some(self.record.lasts());
        if self.waker_set != lasts {
            self.waker_set = lasts;
            self.record.set_waker(cx.waker());
        }
        if self.record.cancelled().is_some() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.worker.unlist(self.slot);
        let (record, shared) = (&self.record, &self.worker.shared);
        let (listener, client, now) = (record.listener.kind(), record.client.ip(), shared.now());
        let bytes = (record.bytes_up(), record.bytes_down());
        record.upstream.cluster.count_ended(listener, client, bytes, self.end, now);
        shared.count_end(self.end);
        shared.access.write(|| Line::ended(now, record, self.end));
    }
}
