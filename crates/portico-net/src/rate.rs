//! How often something may happen.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A rate limit without a lock: the generic cell rate algorithm. Holds the time at which the bucket will be
/// full again.
#[derive(Debug, Default)]
pub struct Rate {
    full_at_nanos: AtomicU64,
}

impl Rate {
    /// Takes one event out of a bucket that refills `per_second` events a second and holds one second's
    /// worth.
    pub fn take(&self, per_second: u32, now: Duration) -> bool {
        const SECOND: Duration = Duration::from_secs(1);
        per_second > 0 && self.take_each(SECOND / per_second, SECOND, now)
    }

    /// Takes one event out of a bucket to which one comes each `every`. The bucket holds as many as come
    /// within `burst`, but one at least.
    pub fn take_each(&self, every: Duration, burst: Duration, now: Duration) -> bool {
        let (cost, burst, now) = (nanos(every), nanos(burst), nanos(now));
        let take = |full_at: u64| {
            let next = full_at.max(now).saturating_add(cost);
            (next - now <= burst.max(cost)).then_some(next)
        };
        self.full_at_nanos.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Whether no event was taken that has not come back.
    pub fn is_full(&self, now: Duration) -> bool {
        self.full_at_nanos.load(Relaxed) <= nanos(now)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_one_seconds_worth_is_admitted_and_then_the_rate() {
        let rate = Rate::default();
        let start = Duration::from_secs(7);
        assert_eq!((0..100).filter(|_| rate.take(10, start)).count(), 10);
        let later = start + Duration::from_millis(500);
        assert_eq!((0..100).filter(|_| rate.take(10, later)).count(), 5);
    }

    #[test]
    fn a_rate_of_one_a_second_admits_the_first_at_once() {
        let rate = Rate::default();
        assert!(rate.take(1, Duration::ZERO));
        assert!(!rate.take(1, Duration::from_millis(999)));
        assert!(rate.take(1, Duration::from_secs(1)));
    }

    #[test]
    fn a_rate_of_nothing_admits_nothing() {
        assert!(!Rate::default().take(0, Duration::ZERO));
    }
}
