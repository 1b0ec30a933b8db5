//! When to write: after a burst of changes has settled, but never later than a bound.
//!
//! A cloud load balancer takes tens of seconds to change, and queues or refuses changes that come faster. So ten clusters created one
//! after the other should cost one update. Pure: the caller brings the time.

use std::time::Duration;

use tokio::time::Instant;

/// A pause of this length ends a burst.
pub const DEFAULT_SETTLE: Duration = Duration::from_secs(1);

/// However long the burst, its first change waits no longer than this.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(10);

/// The first pause after a write that failed; doubled with every further failure.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// A write that keeps failing is tried again this often: somebody may have mended the cause.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Changes that wait to be written.
#[derive(Debug)]
pub struct Settle {
    quiet: Duration,
    max_wait: Duration,
    /// First and last change not written yet.
    burst: Option<(Instant, Instant)>,
    not_before: Option<Instant>,
    failures: u32,
}

impl Settle {
    /// Writes after a pause of `quiet`, or `max_wait` after the first change.
    pub fn new(quiet: Duration, max_wait: Duration) -> Self {
        Self { quiet, max_wait, burst: None, not_before: None, failures: 0 }
    }

    /// Something changed.
    pub fn changed(&mut self, now: Instant) {
        let first = self.burst.map_or(now, |(first, _)| first);
        self.burst = Some((first, now));
    }

    /// When to write; `None` if nothing changed.
    pub fn due(&self) -> Option<Instant> {
        let (first, last) = self.burst?;
        let due = (last + self.quiet).min(first + self.max_wait);
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }

    /// What had changed is written, or needed no writing.
    pub fn written(&mut self) {
        (self.burst, self.not_before, self.failures) = (None, None, 0);
    }

    /// Writing failed: it is due again, later and later.
    pub fn failed(&mut self, now: Instant) {
        let pause = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(LAST_RETRY);
        self.failures += 1;
        self.not_before = Some(now + pause);
        self.changed(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle() -> (Settle, Instant) {
        (Settle::new(DEFAULT_SETTLE, DEFAULT_MAX_WAIT), Instant::now())
    }

    #[test]
    fn a_burst_is_written_once_after_it_pauses() {
        let (mut settle, start) = settle();
        assert_eq!(settle.due(), None);
        for tenth in 0..10 {
            settle.changed(start + Duration::from_millis(100) * tenth);
        }
        assert_eq!(settle.due(), Some(start + Duration::from_millis(900) + DEFAULT_SETTLE));
        settle.written();
        assert_eq!(settle.due(), None);
    }

    #[test]
    fn a_burst_without_end_does_not_put_writing_off_for_ever() {
        let (mut settle, start) = settle();
        for second in 0..100 {
            settle.changed(start + Duration::from_millis(500) * second);
        }
        assert_eq!(settle.due(), Some(start + DEFAULT_MAX_WAIT));
    }

    #[test]
    fn what_keeps_failing_is_tried_less_and_less_often_but_never_given_up() {
        let (mut settle, mut now) = settle();
        let mut pauses = Vec::new();
        for _ in 0..40 {
            settle.failed(now);
            let due = settle.due().unwrap();
            pauses.push(due - now);
            now = due;
        }
        assert!(pauses.is_sorted());
        assert_eq!((pauses[0], pauses[39]), (FIRST_RETRY, LAST_RETRY));
    }
}
