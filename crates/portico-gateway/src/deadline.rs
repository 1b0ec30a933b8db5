//! Time limits that are set a thousand times a second and hardly ever reached.
//!
//! tokio tells its own event loop, by a write to an eventfd, of every timer that is due before all others: one system call and
//! one event for nearly every connection, as each has a limit shorter than whatever else is waited for. One timer a thread
//! that is always due a little earlier, set again once it has passed and then only if it is needed, takes their place.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::{Instant, Timeout, sleep_until, timeout, timeout_at};

thread_local! {
    /// When the early timer of this thread is due.
    static EARLY: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// [`tokio::time::timeout`] for limits that are the same for very many futures.
///
/// Not an `async fn`, whose future would have room for the work twice.
pub(crate) fn within<F: Future>(limit: Duration, work: F) -> Timeout<F> {
    let now = Instant::now();
    // Limits differ by listener and by phase: the shortest in use is the one that counts.
    let due = now + limit;
    if EARLY.get().is_none_or(|early| early <= now || due < early) {
        EARLY.set(Some(due));
        tokio::spawn(sleep_until(due));
    }
    timeout_at(due, work)
}

/// [`tokio::time::timeout`] for work that is mostly done at once: what needs no waiting needs no timer.
pub(crate) async fn unless_at_once<T>(
    limit: Duration,
    mut work: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Elapsed> {
    match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => timeout(limit, work).await,
    }
}
