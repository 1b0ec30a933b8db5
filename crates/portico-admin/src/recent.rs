//! A costly list is not made anew for each reader: the thread that makes it also answers probes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// A listing is shown again for this many times as long as it took to make. So making it takes a tenth of the
/// thread at most, however many ask.
const REPEATED: u32 = 10;

/// The last listing, while it may be shown again.
#[derive(Debug)]
pub struct Recent<T>(Arc<Mutex<Option<Made<T>>>>);

#[derive(Debug)]
struct Made<T> {
    what: Arc<T>,
    until: Instant,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + Sync + 'static> Recent<T> {
    /// The last listing, or one that is made now. It is kept no longer than it may be shown; that takes a
    /// runtime.
    pub fn get(&self, make: impl FnOnce() -> T) -> Arc<T> {
        if let Some(made) = lock(&self.0).as_ref().filter(|made| Instant::now() < made.until) {
            return Arc::clone(&made.what);
        }
        // Not within the lock: it may take a while. It is called on one thread.
        let begun = Instant::now();
        let what = Arc::new(make());
        let took = begun.elapsed();
        if took > Duration::from_millis(1) {
            let until = Instant::now() + took * REPEATED;
            *lock(&self.0) = Some(Made { what: Arc::clone(&what), until });
            tokio::spawn(forget(Arc::clone(&self.0), until));
        }
        what
    }
}

/// Drops a listing that is too old to be shown.
async fn forget<T>(slot: Arc<Mutex<Option<Made<T>>>>, until: Instant) {
    sleep_until(until).await;
    lock(&slot).take_if(|made| made.until <= until);
}

fn lock<T>(slot: &Mutex<Option<Made<T>>>) -> MutexGuard<'_, Option<Made<T>>> {
    // Nothing in here can be left half done by a panic elsewhere.
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_takes_long_to_make_is_shown_again_for_ten_times_as_long_and_not_kept_longer() {
        let recent = Recent::default();
        let made = |number: u32, took: u64| {
            let make = || {
                // A thread that lists holds everything up: as does this, on a clock that stands still.
                futures_util::FutureExt::now_or_never(tokio::time::advance(Duration::from_millis(took)));
                number
            };
            *recent.get(make)
        };
        assert_eq!((made(1, 0), made(2, 0)), (1, 2), "what takes no time is always new");
        let first = Instant::now();
        assert_eq!(made(3, 20), 3);
        assert_eq!(made(4, 20), 3);
        tokio::time::sleep_until(first + Duration::from_millis(219)).await;
        assert_eq!(made(5, 20), 3);
        tokio::time::sleep_until(first + Duration::from_millis(221)).await;
        assert!(lock(&recent.0).is_none(), "nothing is kept");
        assert_eq!(made(6, 20), 6);
    }
}
