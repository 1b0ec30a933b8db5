//! Bounds the access lines of refused clients, which anyone on the network can cause: so many a second of
//! each cluster, and as many of clients that ask for none that is known. The next line has the number left
//! out.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::cluster::Rate;

/// Lines a second.
const LINES_PER_SECOND: u32 = 20;

/// Decides whether a line may be written.
#[derive(Debug, Default)]
pub(crate) struct LineLimit {
    rate: Rate,
    left_out: AtomicU64,
}

impl LineLimit {
    /// Returns how many lines were left out since the last one, or `None` if this one is left out too.
    pub(crate) fn admit(&self, now: Duration) -> Option<u64> {
        if self.rate.take(LINES_PER_SECOND, now) {
            return Some(self.left_out.swap(0, Relaxed));
        }
        self.left_out.fetch_add(1, Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_second_of_lines_and_a_number() {
        let limit = LineLimit::default();
        let written = (0..1_000).filter_map(|_| limit.admit(Duration::ZERO)).count();
        assert_eq!(written, LINES_PER_SECOND as usize);
        assert_eq!(limit.admit(Duration::from_secs(1)), Some(980));
        assert_eq!(limit.admit(Duration::from_secs(1)), Some(0));
    }
}
