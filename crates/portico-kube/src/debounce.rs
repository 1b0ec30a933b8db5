//! Merges bursts of changes: reconcile once a burst pauses, but never later than a bound.
//!
//! Some things are slow to change: a cloud load balancer takes tens of seconds, and queues or refuses changes
//! that come faster. Ten clusters created one after the other should cost one update of it. kube's own
//! debounce ([`kube::runtime::Config::debounce`]) has no upper bound.
//!
//! Pure: the caller passes the time. A controller calls [`Debounce::changed`] for every change and
//! [`Debounce::start`] in its reconciler, which requeues until [`Debounce::due`].

use std::time::Duration;

use tokio::time::Instant;

/// A pause of this length ends a burst.
pub const DEFAULT_QUIET: Duration = Duration::from_secs(1);

/// The first change of a burst waits no longer than this, however long the burst.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(10);

/// The first pause after a failure; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Changes that wait to be reconciled.
#[derive(Debug)]
pub struct Debounce {
    quiet: Duration,
    max_wait: Duration,
    /// Time of the first and the last change that wait.
    burst: Option<(Instant, Instant)>,
    /// End of the back-off after a failure.
    not_before: Option<Instant>,
    failures: u32,
}

impl Debounce {
    /// A burst is due after a pause of `quiet`, or `max_wait` after its first change.
    pub fn new(quiet: Duration, max_wait: Duration) -> Self {
        Self { quiet, max_wait, burst: None, not_before: None, failures: 0 }
    }

    /// Adds a change to the burst.
    pub fn changed(&mut self, now: Instant) {
        let first = self.burst.map_or(now, |(first, _)| first);
        self.burst = Some((first, now));
    }

    /// When the burst is due; `None` if nothing changed.
    pub fn due(&self) -> Option<Instant> {
        let (first, last) = self.burst?;
        let due = (last + self.quiet).min(first + self.max_wait);
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }

    /// Ends the burst if it is due, and returns whether it was. A change after this starts a new burst.
    pub fn start(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if due {
            self.burst = None;
        }
        due
    }

    /// The changes that were started are reconciled.
    pub fn succeeded(&mut self) {
        (self.not_before, self.failures) = (None, 0);
    }

    /// Reconciling failed: it is due again after a pause that doubles with each failure in a row.
    pub fn failed(&mut self, now: Instant) {
        let pause = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(LAST_RETRY);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pause);
        self.changed(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn debounce() -> (Debounce, Instant) {
        (Debounce::new(DEFAULT_QUIET, DEFAULT_MAX_WAIT), Instant::now())
    }

    #[test]
    fn a_burst_is_reconciled_once_after_it_pauses() {
        let (mut debounce, start) = debounce();
        assert_eq!(debounce.due(), None);
        for tenth in 0..10 {
            debounce.changed(start + Duration::from_millis(100) * tenth);
        }
        let due = start + Duration::from_millis(900) + DEFAULT_QUIET;
        assert_eq!(debounce.due(), Some(due));
        assert!(!debounce.start(due - Duration::from_millis(1)));
        assert!(debounce.start(due));
        assert_eq!(debounce.due(), None);
        assert!(!debounce.start(due));
    }

    #[test]
    fn a_burst_without_end_does_not_put_reconciling_off_for_ever() {
        let (mut debounce, start) = debounce();
        for second in 0..100 {
            debounce.changed(start + Duration::from_millis(500) * second);
        }
        assert_eq!(debounce.due(), Some(start + DEFAULT_MAX_WAIT));
    }

    #[test]
    fn a_change_while_the_last_burst_is_reconciled_is_not_lost() {
        let (mut debounce, start) = debounce();
        debounce.changed(start);
        assert!(debounce.start(start + DEFAULT_QUIET));
        debounce.changed(start + DEFAULT_QUIET);
        debounce.succeeded();
        assert_eq!(debounce.due(), Some(start + DEFAULT_QUIET * 2));
    }

    #[test]
    fn a_reconciliation_that_keeps_failing_is_tried_less_and_less_often_but_never_given_up() {
        let (mut debounce, mut now) = debounce();
        let mut pauses = Vec::new();
        for _ in 0..40 {
            debounce.failed(now);
            let due = debounce.due().unwrap();
            pauses.push(due - now);
            now = due;
        }
        assert!(pauses.is_sorted());
        assert_eq!((pauses[0], pauses[39]), (FIRST_RETRY, LAST_RETRY));
    }
}
