//! A rate limit: so many a second, and a burst of a tenth of that.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Permits that come back with time.
#[derive(Debug)]
pub(crate) struct Bucket {
    between: Duration,
    burst: Duration,
    /// When the last permit that was taken is due.
    due: Mutex<Instant>,
}

impl Bucket {
    pub(crate) fn new(per_second: u32) -> Self {
        let between = Duration::from_secs(1) / per_second.max(1);
        Self { between, burst: Duration::from_millis(100), due: Mutex::new(Instant::now()) }
    }

    /// Takes a permit, if there is one.
    pub(crate) fn take(&self) -> bool {
        let now = Instant::now();
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let next = (*due).max(now) + self.between;
        let is_there = next <= now + self.burst.max(self.between);
        if is_there {
            *due = next;
        }
        is_there
    }

    /// Waits for a permit.
    pub(crate) async fn wait(&self) {
        let due = {
            let now = Instant::now();
            let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
            *due = (*due).max(now) + self.between;
            *due
        };
        sleep_until(due).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn permits_come_back_with_time_and_are_not_hoarded() {
        let bucket = Bucket::new(100);
        assert_eq!((0..50).filter(|_| bucket.take()).count(), 10);
        tokio::time::advance(Duration::from_millis(20)).await;
        assert_eq!((0..50).filter(|_| bucket.take()).count(), 2);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..50).filter(|_| bucket.take()).count(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_waits_at_a_hundred_a_second_take_a_second() {
        let bucket = Bucket::new(100);
        let start = Instant::now();
        for _ in 0..100 {
            bucket.wait().await;
        }
        assert_eq!(start.elapsed(), Duration::from_secs(1));
    }
}
