//! Bounds log lines that anyone on the network can cause: a few in each window, then a number. Each tenant
//! has windows of its own, so that what happens to one does not hide what happens to another.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portico_api::names::Tenant;
use tokio::time::Instant;

/// Lines in one [`WINDOW`]: a misconfigured cluster is seen at once, a thousand of them do not fill a disk.
const MAX_LINES: u32 = 10;

const WINDOW: Duration = Duration::from_secs(10);

/// From so many windows on, those that are over are forgotten.
const PRUNE_AT: usize = 1_024;

/// Decides whether a line may be written.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    /// `None` is for clients that asked for no tenant that is known.
    windows: HashMap<Option<Tenant>, Window>,
    prune_at: usize,
}

#[derive(Debug)]
struct Window {
    start: Instant,
    written: u32,
    kept_back: u64,
}

impl LogLimit {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { windows: HashMap::new(), prune_at: PRUNE_AT }))
    }

    /// Returns how many lines about this tenant were kept back since the last one, or `None` if this one is
    /// kept back too.
    pub(crate) fn admit(&self, tenant: Option<&Tenant>) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state.windows.len() >= state.prune_at {
            state.windows.retain(|_, window| now.duration_since(window.start) < WINDOW);
            state.prune_at = PRUNE_AT.max(2 * state.windows.len());
        }
        let new = Window { start: now, written: 0, kept_back: 0 };
        let window = state.windows.entry(tenant.cloned()).or_insert(new);
        if now.duration_since(window.start) >= WINDOW {
            window.start = now;
            window.written = 0;
        }
        if window.written == MAX_LINES {
            window.kept_back += 1;
            return None;
        }
        window.written += 1;
        Some(std::mem::take(&mut window.kept_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_ten_lines_and_a_number() {
        let limit = LogLimit::new();
        let written: Vec<_> = (0..1_000).filter_map(|_| limit.admit(None)).collect();
        assert_eq!(written, [0; 10]);
        tokio::time::advance(WINDOW).await;
        assert_eq!(limit.admit(None), Some(990));
        assert_eq!(limit.admit(None), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_flood_of_one_tenant_does_not_silence_another() {
        let limit = LogLimit::new();
        let [a, b] = ["a", "b"].map(Tenant::of_text);
        assert_eq!((0..1_000).filter_map(|_| limit.admit(Some(&a))).count(), 10);
        assert_eq!((limit.admit(Some(&b)), limit.admit(None)), (Some(0), Some(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn windows_that_are_over_are_forgotten() {
        let limit = LogLimit::new();
        for round in 0..10 {
            for number in 0..1_000 {
                limit.admit(Some(&Tenant::of_text(&format!("{round}-{number}"))));
            }
            tokio::time::advance(WINDOW).await;
        }
        assert!(limit.0.lock().unwrap().windows.len() <= 2 * PRUNE_AT);
    }
}
