//! How long to wait before the next repair. Two parties that disagree about the address do not use up a
//! processor.

use std::time::Duration;

use tokio::time::Instant;

/// If the address is removed again within this time, the removal is deliberate: back off between repairs.
const WINDOW: Duration = Duration::from_secs(2);

/// The bounds of the wait: it doubles from one repair to the next.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// The wait before each repair, and before another try when one has failed.
#[derive(Debug, Default)]
pub(super) struct RepairBackoff {
    last: Option<Instant>,
    wait: Duration,
}

impl RepairBackoff {
    /// Returns the wait before a repair that is due now: none, unless the last one was a moment ago.
    pub(super) fn wait(&mut self) -> Duration {
        let now = Instant::now();
        let again = self.last.is_some_and(|last| now.duration_since(last) < WINDOW);
        self.wait = if again { (self.wait * 2).clamp(SHORTEST, LONGEST) } else { Duration::ZERO };
        self.last = Some(now + self.wait);
        self.wait
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_first_repair_does_not_wait_and_later_ones_wait_ever_longer_up_to_a_second() {
        let mut backoff = RepairBackoff::default();
        let mut waits = Vec::new();
        for _ in 0..9 {
            let wait = backoff.wait();
            waits.push(wait.as_millis());
            sleep(wait).await;
        }
        assert_eq!(waits, [0, 20, 40, 80, 160, 320, 640, 1000, 1000]);
    }

    #[tokio::test(start_paused = true)]
    async fn after_two_quiet_seconds_a_repair_does_not_wait_again() {
        let mut backoff = RepairBackoff::default();
        for _ in 0..3 {
            sleep(backoff.wait()).await;
        }
        advance(WINDOW).await;
        assert_eq!(backoff.wait(), Duration::ZERO);
    }
}
