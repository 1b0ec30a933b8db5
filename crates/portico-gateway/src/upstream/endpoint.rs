//! One endpoint and what is known of it: its connections and its health.
//!
//! An endpoint that fails [`FAILURES_UNTIL_SKIPPED`] times in a row is skipped, at first for [`FIRST_SKIP`],
//! then for twice as long each time. When the time is over, one connection probes it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use portico_net::access::millis;

/// One failure may be chance, two a restart; the third in a row is a pattern.
pub(super) const FAILURES_UNTIL_SKIPPED: u32 = 3;
/// Short enough for a restarting API server, long enough to spare a dead one.
pub(super) const FIRST_SKIP: Duration = Duration::from_millis(250);
/// A dead endpoint costs one attempt every ten seconds.
const LONGEST_SKIP: Duration = Duration::from_secs(10);
/// Clients that wait at a time for an endpoint that did not answer before. It is enough for an endpoint that
/// is merely slow. It is also few enough: a hundred dead clusters take 3,200 descriptors and not 100,000.
pub(super) const MOST_LAST_RESORTS: u16 = 32;

/// One endpoint and what is known of it.
#[derive(Debug)]
pub struct Endpoint {
    /// Its address.
    pub address: SocketAddr,
    connections: AtomicU32,
    failures: AtomicU32,
    last_failure: AtomicU8,
    /// How often it left its upstream or came back.
    moves: AtomicU32,
    /// Clients that wait for it though it is skipped.
    pub(super) last_resorts: AtomicU16,
    /// Milliseconds since the gateway started.
    skipped_until: AtomicU64,
}

/// How an endpoint failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// At once.
    Refused = 1,
    /// Not at all: no answer in time.
    Silent = 2,
}

/// A connection to an endpoint, counted while it is held.
#[derive(Debug)]
pub(crate) struct EndpointUse(Arc<Endpoint>);

/// An attempt to connect to an endpoint that is skipped, counted while it is held.
#[derive(Debug)]
pub(super) struct LastResort(pub(super) Arc<Endpoint>);

impl Endpoint {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self {
            address,
            connections: AtomicU32::default(),
            failures: AtomicU32::default(),
            last_failure: AtomicU8::default(),
            moves: AtomicU32::default(),
            last_resorts: AtomicU16::default(),
            skipped_until: AtomicU64::default(),
        }
    }

    /// Connections open to it now, through this gateway.
    pub fn connections(&self) -> u32 {
        self.connections.load(Relaxed)
    }

    /// Attempts to connect that failed since the last one that did not.
    pub fn failures(&self) -> u32 {
        self.failures.load(Relaxed)
    }

    /// How much longer it is skipped, if it is. Until then it is tried only where there is no other.
    pub fn skipped_for(&self, now: Duration) -> Option<Duration> {
        self.is_skipped(now)
            .then(|| Duration::from_millis(self.skipped_until.load(Relaxed)).saturating_sub(now))
    }

    /// Whether so many attempts failed that the next attempt is a probe or a last resort.
    pub fn is_failing(&self) -> bool {
        self.failures() >= FAILURES_UNTIL_SKIPPED
    }

    /// Changes whenever it leaves its upstream or comes back.
    pub(crate) fn moves(&self) -> u32 {
        self.moves.load(Relaxed)
    }

    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Relaxed);
    }

    fn is_skipped(&self, now: Duration) -> bool {
        self.is_failing() && millis(now) < self.skipped_until.load(Relaxed)
    }

    pub(super) fn last_failure_was_silent(&self) -> bool {
        self.last_failure.load(Relaxed) == Failure::Silent as u8
    }

    pub(super) fn succeeded(&self) {
        // A plain load first: this line of memory is shared by all workers and nearly always zero.
        if self.failures() != 0 {
            self.failures.store(0, Relaxed);
        }
    }

    pub(super) fn failed(&self, failure: Failure, now: Duration) {
        let failures = self.failures.fetch_add(1, Relaxed).saturating_add(1);
        self.last_failure.store(failure as u8, Relaxed);
        self.skipped_until.store(millis(now + skip_after(failures)), Relaxed);
    }

    /// Whether the caller may probe. Exactly one of the connections that ask at the end of a skip may; for
    /// the others the endpoint stays skipped.
    pub(super) fn may_probe(&self, now: Duration) -> bool {
        let until = self.skipped_until.load(Relaxed);
        let next = millis(now + skip_after(self.failures()));
        millis(now) >= until && self.skipped_until.compare_exchange(until, next, Relaxed, Relaxed).is_ok()
    }
}

impl EndpointUse {
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Self {
        endpoint.connections.fetch_add(1, Relaxed);
        Self(endpoint)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for EndpointUse {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

impl LastResort {
    /// `None` if enough wait.
    pub(super) fn new(endpoint: &Arc<Endpoint>) -> Option<Self> {
        let waiting = endpoint.last_resorts.fetch_add(1, Relaxed);
        // Given back on drop, also where there were too many.
        let resort = Self(Arc::clone(endpoint));
        (waiting < MOST_LAST_RESORTS).then_some(resort)
    }
}

impl Drop for LastResort {
    fn drop(&mut self) {
        self.0.last_resorts.fetch_sub(1, Relaxed);
    }
}

fn skip_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(FAILURES_UNTIL_SKIPPED).min(6);
    (FIRST_SKIP * 2u32.pow(doublings)).min(LONGEST_SKIP)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn each_failed_probe_doubles_the_skip_up_to_a_bound() {
        assert_eq!(skip_after(FAILURES_UNTIL_SKIPPED), FIRST_SKIP);
        assert_eq!(skip_after(FAILURES_UNTIL_SKIPPED + 1), FIRST_SKIP * 2);
        assert_eq!(skip_after(u32::MAX), LONGEST_SKIP);
    }

    #[test]
    fn a_skipped_endpoint_says_for_how_long() {
        let endpoint = Endpoint::new(([127, 0, 0, 1], 1).into());
        assert_eq!(endpoint.skipped_for(NOW), None);
        (0..FAILURES_UNTIL_SKIPPED).for_each(|_| endpoint.failed(Failure::Silent, NOW));
        assert_eq!(endpoint.skipped_for(NOW), Some(FIRST_SKIP));
        assert_eq!(endpoint.skipped_for(NOW + FIRST_SKIP), None);
    }
}
