//! Bounds the lines that anyone on the network can cause, or anyone who may change an object: in the access
//! log and in the log. It admits some at once, and then one each so often. The next line has the number left
//! out.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::rate::Rate;

/// How many lines may be written.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    at_once: u32,
    every: Duration,
}

impl Pace {
    /// Access lines of refused clients.
    pub const ACCESS: Self = Self { at_once: 20, every: Duration::from_millis(50) };

    /// Warnings: a misconfigured cluster is seen at once, a thousand of them do not fill a disk.
    pub const WARNINGS: Self = Self { at_once: 10, every: Duration::from_secs(10) };

    /// Problems of objects and manifests: the first ones of a change, and then one a second.
    pub const PROBLEMS: Self = Self { at_once: 20, every: Duration::from_secs(1) };

    /// Warnings of one kind: a line is an example of those left out.
    pub const SAME_KIND: Self = Self { at_once: 1, every: Duration::from_secs(10) };
}

/// Decides whether a line may be written.
#[derive(Debug, Default)]
pub struct LineLimit {
    rate: Rate,
    left_out: AtomicU64,
}

impl LineLimit {
    /// Returns how many lines were left out since the last one, or `None` if this one is left out too. `now`
    /// is the time since some moment, always the same.
    pub fn admit(&self, pace: Pace, now: Duration) -> Option<u64> {
        if self.rate.take_each(pace.every, pace.every * pace.at_once, now) {
            return Some(self.left_out.swap(0, Relaxed));
        }
        self.left_out.fetch_add(1, Relaxed);
        None
    }

    /// Whether no line was written lately.
    pub fn is_full(&self, now: Duration) -> bool {
        self.rate.is_full(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_some_lines_and_a_number() {
        let limit = LineLimit::default();
        let written = (0..1_000).filter_map(|_| limit.admit(Pace::ACCESS, Duration::ZERO)).count();
        assert_eq!(written, 20);
        assert_eq!(limit.admit(Pace::ACCESS, Duration::from_secs(1)), Some(980));
        assert_eq!(limit.admit(Pace::ACCESS, Duration::from_secs(1)), Some(0));
    }
}
