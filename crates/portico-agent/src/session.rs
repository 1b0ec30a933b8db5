//! A connection of a pod, listed and counted while its [`Session`] is held. Dropped, it writes the access
//! line.

use std::sync::Arc;
use std::task::{Context, Poll};

use jiff::Timestamp;
use portico_net::access::millis;
use portico_tunnel::{End, Meter};

use crate::access::Line;
use crate::record::{Record, Upstream};
use crate::refusal::{ENDS, Refusal, end_index};
use crate::shared::{ConnectionIndex, Shared};

/// A connection that is being served.
#[derive(Debug)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    record: Arc<Record>,
    slot: ConnectionIndex,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// It is open, or its task was dropped.
    None,
    Refused(Refusal),
    Ended(End),
}

impl Session {
    pub(crate) fn new(shared: &Arc<Shared>, record: Record) -> Self {
        let record = Arc::new(record);
        let slot = shared.list(Arc::clone(&record));
        Self { shared: Arc::clone(shared), record, slot, outcome: Outcome::None }
    }

    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A gateway has opened it.
    pub(crate) fn opened(&self, upstream: Upstream) {
        self.record.set_upstream(upstream);
        self.shared.opened_after(self.shared.now().saturating_sub(self.record.accepted));
    }

    /// It is not carried.
    pub(crate) fn refused(mut self, refusal: Refusal) {
        self.outcome = Outcome::Refused(refusal);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.unlist(self.slot);
        let (side, reason, status) = match self.outcome {
            Outcome::Refused(refusal) => {
                self.shared.count_refusal(refusal);
                (refusal.side(), refusal.reason(), refusal.status())
            }
            outcome => {
                let index = end_index(if let Outcome::Ended(end) = outcome { Some(end) } else { None });
                self.shared.count_end(index);
                let (reason, side) = ENDS[index];
                (side, reason, None)
            }
        };
        let (shared, record) = (&self.shared, &self.record);
        let upstream = record.upstream();
        shared.access.write(|| Line {
            time: Timestamp::now(),
            forward: record.forward().listen,
            client: record.client,
            name: &record.forward().authority,
            gateway: upstream.and_then(|upstream| shared.gateway_name(upstream)),
            upstream: upstream.map(|upstream| upstream.address),
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

impl Meter for Session {
    fn carried(&mut self, up: usize, down: usize) {
        self.record.count_bytes(up, down);
    }

    fn ended(mut self, end: End) {
        self.outcome = Outcome::Ended(end);
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.record.poll_cut(cx)
    }
}
