//! How long a cluster that held a slot for long leaves the slots to others, whatever came of its pass.
//!
//! The pauses between retries do not bound that: each change of a cluster's objects on the seed begins a
//! pass. So a few clusters that hang, and are touched again and again, would hold all slots for ever.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The back-off lasts this many times as long as the pass: a cluster holds a slot for a third of the time at
/// most.
const TIMES: u32 = 2;

/// After a pass that took less, there is none.
const SHORT: Duration = Duration::from_secs(2);

/// The clusters that back off, by name, and until when.
#[derive(Debug, Default)]
pub(super) struct Backoffs(Mutex<BTreeMap<String, Instant>>);

impl Backoffs {
    /// A pass over a cluster has ended.
    pub(super) fn passed(&self, name: &str, started: Instant, now: Instant) {
        let took = now - started;
        if took < SHORT {
            self.all().remove(name);
        } else {
            self.all().insert(name.to_owned(), now + took * TIMES);
        }
    }

    /// How long a cluster still backs off, if it does.
    pub(super) fn left(&self, name: &str, now: Instant) -> Option<Duration> {
        self.all().get(name)?.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// Forgets clusters that are gone.
    pub(super) fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.all().retain(|name, _| exists(name));
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_hangs_and_is_touched_all_the_time_holds_a_slot_for_a_third_of_it() {
        let (backoffs, start) = (Backoffs::default(), Instant::now());
        let (mut now, mut held) = (start, Duration::ZERO);
        let (pass, touch) = (Duration::from_secs(60), Duration::from_secs(1));
        while now - start < Duration::from_hours(1) {
            if backoffs.left("hangs", now).is_none() {
                backoffs.passed("hangs", now, now + pass);
                now += pass;
                held += pass;
            }
            assert_eq!(backoffs.left("other", now), None);
            now += touch;
        }
        assert!(held < Duration::from_mins(21), "{held:?} of an hour");
        assert!(held > Duration::from_mins(18), "it is tried all the same: {held:?}");
    }

    #[test]
    fn a_cluster_that_answers_in_time_does_not_back_off() {
        let (backoffs, now) = (Backoffs::default(), Instant::now());
        backoffs.passed("a", now, now + Duration::from_secs(60));
        assert!(backoffs.left("a", now).is_some());
        backoffs.passed("a", now, now + Duration::from_secs(1));
        assert_eq!(backoffs.left("a", now), None);
    }
}
