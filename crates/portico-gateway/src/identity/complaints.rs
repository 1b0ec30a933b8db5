//! Log lines that anybody on the network can cause: a few, then a number.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Lines in one [`WINDOW`]: a misconfigured cluster is seen at once, a thousand of them do not fill a disk.
const MOST: u32 = 10;

/// Over which lines are counted.
const WINDOW: Duration = Duration::from_secs(10);

/// Says when a line may be written.
#[derive(Debug, Default)]
pub(crate) struct Complaints(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    since: Duration,
    written: u32,
    kept_back: u64,
}

impl Complaints {
    /// `None` if not now; else how many were not written since the last that was.
    pub(crate) fn may_write(&self, now: Duration) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(state.since) >= WINDOW {
            *state = State { since: now, written: 0, kept_back: state.kept_back };
        }
        if state.written == MOST {
            state.kept_back += 1;
            return None;
        }
        state.written += 1;
        Some(std::mem::take(&mut state.kept_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_ten_lines_and_a_number() {
        let complaints = Complaints::default();
        let start = Duration::from_secs(100);
        let written: Vec<_> = (0..1_000).filter_map(|_| complaints.may_write(start)).collect();
        assert_eq!(written, [0; 10]);
        assert_eq!(complaints.may_write(start + WINDOW), Some(990));
        assert_eq!(complaints.may_write(start + WINDOW), Some(0));
    }
}
