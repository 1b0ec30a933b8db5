//! The state that the sockets of a responder share: peers, bounds and counts. By it each socket decides what
//! it answers.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::Semaphore;

use crate::bucket::Bucket;
use crate::check::Limits;
use crate::transport::Transport;

/// What a responder spends at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at a time; more are closed at once. A full mesh of a thousand machines opens some dozens.
    pub connections: usize,
    /// How long a connection may last.
    pub connection: Duration,
    /// Datagrams that are answered each second; more are dropped.
    pub datagrams_per_second: u32,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { connections: 256, connection: Duration::from_secs(15), datagrams_per_second: 2000 }
    }
}

/// What a responder has counted since its start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Connections and datagrams of peers.
    pub answered: AtomicU64,
    /// Connections and datagrams of others, which get no answer.
    pub strangers: AtomicU64,
    /// Connections and datagrams above the bounds.
    pub over_bounds: AtomicU64,
}

/// What all sockets of a responder share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) peers: Vec<IpNet>,
    pub(super) may_try: BTreeSet<Transport>,
    pub(super) silent: BTreeSet<Transport>,
    pub(super) limits: Limits,
    pub(super) bounds: Bounds,
    pub(super) connections: Arc<Semaphore>,
    pub(super) datagrams: Bucket,
    pub(super) counts: Arc<Counts>,
}

impl Shared {
    /// Whether a datagram of this sender is answered. Counts it.
    pub(super) fn admits_datagram(&self, from: IpAddr) -> bool {
        if !self.knows(from) {
            return false;
        }
        let is_within = self.datagrams.take();
        let counter = if is_within { &self.counts.answered } else { &self.counts.over_bounds };
        counter.fetch_add(1, Relaxed);
        is_within
    }

    /// Whether it is a peer. Counts strangers.
    pub(super) fn knows(&self, from: IpAddr) -> bool {
        let from = from.to_canonical();
        let is_peer = self.peers.iter().any(|network| network.contains(&from));
        if !is_peer && self.counts.strangers.fetch_add(1, Relaxed).is_power_of_two() {
            tracing::warn!(
                src.addr = %from,
                "not answered: no machine of the inventory has this address; an address translation on the \
                 way looks like this, too"
            );
        }
        is_peer
    }
}
