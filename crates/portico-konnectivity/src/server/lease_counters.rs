//! What a server counts of Leases.

use std::sync::atomic::AtomicU64;

use crate::requests::Requests;

/// Upper bounds of the times of requests, in seconds. As upstream's, which takes the defaults of Prometheus.
pub const REQUEST_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// What a server counts of Leases.
#[derive(Debug, Default)]
pub struct LeaseCounters {
    /// Leases of others that were removed.
    pub culled: AtomicU64,
    /// Steps that failed: renewals, removals, with or without an answer of the API server.
    pub failed: AtomicU64,
    /// Lists of Leases.
    pub lists: Requests<{ REQUEST_BUCKETS.len() }>,
    /// Removals of Leases of others.
    pub deletes: Requests<{ REQUEST_BUCKETS.len() }>,
}
