//! Bounds log lines that anyone on the network can cause: a few in each window, then a number.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Lines in one [`WINDOW`]: a misconfigured cluster is seen at once, a thousand of them do not fill a disk.
const MAX_LINES: u32 = 10;

const WINDOW: Duration = Duration::from_secs(10);

/// Decides whether a line may be written.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    window_start: Instant,
    written: u32,
    kept_back: u64,
}

impl LogLimit {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { window_start: Instant::now(), written: 0, kept_back: 0 }))
    }

    /// Returns how many lines were kept back since the last one, or `None` if this one is kept back too.
    pub(crate) fn admit(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now.duration_since(state.window_start) >= WINDOW {
            state.window_start = now;
            state.written = 0;
        }
        if state.written == MAX_LINES {
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

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_ten_lines_and_a_number() {
        let limit = LogLimit::new();
        let written: Vec<_> = (0..1_000).filter_map(|_| limit.admit()).collect();
        assert_eq!(written, [0; 10]);
        tokio::time::advance(WINDOW).await;
        assert_eq!(limit.admit(), Some(990));
        assert_eq!(limit.admit(), Some(0));
    }
}
