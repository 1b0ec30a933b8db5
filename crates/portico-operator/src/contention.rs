//! Another client that writes the same fields: KKP's updater where it still runs, or an admission webhook.
//!
//! What it changed is put back [`TOLERATED`] times. If it goes on, this controller yields: two writers that
//! overwrite each other cost a cloud load balancer more than ports that are missing. After [`PAUSE`] it tries
//! once more; if that stands for [`WINDOW`], the other has gone.
//!
//! Pure: the caller passes the time.

use std::time::Duration;

use tokio::time::Instant;

/// Reverts within [`WINDOW`] that are put back. A person with kubectl needs one or two to see who writes.
const TOLERATED: usize = 2;

/// How long a revert counts, and how long a write must stand to count as accepted.
const WINDOW: Duration = Duration::from_mins(10);

/// Pause before the next attempt after yielding.
const PAUSE: Duration = Duration::from_mins(10);

/// Who reverted writes, and what follows.
#[derive(Debug, Default)]
pub(crate) struct Contention {
    /// Reverts within the window.
    reverts: Vec<Instant>,
    yielded: Option<Yielded>,
}

#[derive(Debug)]
struct Yielded {
    to: String,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Nothing is written until then.
    Pausing(Instant),
    /// Writes are allowed again since this time. One revert ends it.
    Trying(Instant),
}

impl Contention {
    /// What was written last has been changed by `writer`.
    pub(crate) fn reverted(&mut self, writer: String, now: Instant) {
        self.forget(now);
        self.reverts.push(now);
        if self.yielded.is_some() || self.reverts.len() > TOLERATED {
            self.yielded = Some(Yielded { to: writer, phase: Phase::Pausing(now + PAUSE) });
        }
    }

    /// Lets time pass. Returns whether writes are allowed.
    pub(crate) fn may_write(&mut self, now: Instant) -> bool {
        self.forget(now);
        let Some(yielded) = &mut self.yielded else { return true };
        match yielded.phase {
            Phase::Pausing(until) if now < until => return false,
            Phase::Pausing(_) => yielded.phase = Phase::Trying(now),
            Phase::Trying(since) if now.duration_since(since) >= WINDOW => {
                self.yielded = None;
                self.reverts.clear();
            }
            Phase::Trying(_) => {}
        }
        true
    }

    fn forget(&mut self, now: Instant) {
        self.reverts.retain(|&at| now.duration_since(at) < WINDOW);
    }

    /// The client that this controller yields to, until it is gone.
    pub(crate) fn yielded_to(&self) -> Option<&str> {
        self.yielded.as_ref().map(|yielded| yielded.to.as_str())
    }

    /// When time alone changes something.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.yielded.as_ref().map(|yielded| match yielded.phase {
            Phase::Pausing(until) => until,
            Phase::Trying(since) => since + WINDOW,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fought() -> (Contention, Instant) {
        let (mut contention, now) = (Contention::default(), Instant::now());
        for _ in 0..=TOLERATED {
            assert!(contention.may_write(now) && contention.yielded_to().is_none());
            contention.reverted("updater".into(), now);
        }
        (contention, now)
    }

    #[test]
    fn a_writer_that_goes_on_is_yielded_to() {
        let (mut contention, now) = fought();
        assert_eq!(contention.yielded_to(), Some("updater"));
        assert!(!contention.may_write(now));
        assert!(!contention.may_write(now + PAUSE - Duration::from_secs(1)));
    }

    #[test]
    fn changes_of_now_and_then_are_put_back() {
        let (mut contention, mut now) = (Contention::default(), Instant::now());
        for _ in 0..100 {
            contention.reverted("kubectl".into(), now);
            assert!(contention.may_write(now));
            now += WINDOW / 2;
        }
        assert!(contention.reverts.len() <= TOLERATED);
    }

    #[test]
    fn after_a_pause_one_attempt_is_made_and_one_revert_ends_it() {
        let (mut contention, start) = fought();
        let again = contention.due().unwrap();
        assert_eq!(again, start + PAUSE);
        assert!(contention.may_write(again));
        assert_eq!(contention.yielded_to(), Some("updater"));
        contention.reverted("updater".into(), again);
        assert!(!contention.may_write(again));
        assert_eq!(contention.due(), Some(again + PAUSE));
    }

    #[test]
    fn an_attempt_that_stands_ends_the_contention() {
        let (mut contention, _) = fought();
        let again = contention.due().unwrap();
        assert!(contention.may_write(again));
        let over = contention.due().unwrap();
        assert_eq!(over, again + WINDOW);
        assert!(contention.may_write(over) && contention.yielded_to().is_none());
        assert_eq!(contention.due(), None);
        contention.reverted("kubectl".into(), over);
        assert!(contention.may_write(over), "one revert is tolerated again");
    }
}
