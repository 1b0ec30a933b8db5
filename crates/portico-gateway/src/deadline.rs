//! Time limits that are set a thousand times a second and hardly ever reached.
//!
//! tokio tells its own event loop, by a write to an eventfd, of every timer that is due before all others: one system call and
//! one event for nearly every connection, as each has a limit shorter than whatever else is waited for. One timer a thread
//! that is always due a little earlier, set again once it has passed and then only if it is needed, takes their place.

use std::cell::Cell;
use std::future::Future;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep_until, timeout};

thread_local! {
    /// When the early timer of this thread is due.
    static EARLY: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// [`tokio::time::timeout`] for limits that are the same for very many futures.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    let now = Instant::now();
    // Limits differ by listener and by phase: the shortest in use is the one that counts.
    let due = now + limit;
    if EARLY.get().is_none_or(|early| early <= now || due < early) {
        EARLY.set(Some(due));
        tokio::spawn(sleep_until(due));
    }
    timeout(limit, work).await
}
