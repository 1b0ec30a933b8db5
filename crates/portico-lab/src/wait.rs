//! Waiting for a condition, never for a time.
//!
//! Real programs start when they start. A test polls what it needs to be true. When the deadline passes, it
//! gets the last reason why it was not. It reads "waited 60 s for node seed to be Ready: the container
//! runtime is down" instead of a bare timeout.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::ended::Ended;

/// The shortest and the longest time between two looks at a condition: a quarter of the time waited so far.
/// Most probes start a program (`kubectl`, about 60 ms of one of two cores). So looking more often slows down
/// what is waited for, and tests that wait at the same time took most of the machine.
const BETWEEN_LOOKS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_secs(1));

/// Calls `probe` until it succeeds and returns its value.
///
/// `what` completes the sentence "waited for ...". When `limit` has passed the error carries the
/// probe's last error. The probe runs at least once. An error that says a process has ended
/// ([`Process::check`](crate::Process::check)) ends the wait at once: it will not come back.
pub fn until<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(reason) if start.elapsed() >= limit || reason.is::<Ended>() => {
                let waited = start.elapsed().as_secs();
                return Err(reason).with_context(|| format!("waited {waited} s for {what}"));
            }
            Err(_) => thread::sleep((start.elapsed() / 4).clamp(BETWEEN_LOOKS.0, BETWEEN_LOOKS.1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{anyhow, bail};

    use super::*;

    #[test]
    fn a_condition_that_comes_true_ends_the_wait() {
        let mut looks = 0;
        let seen = until("the third look", Duration::from_secs(30), || {
            looks += 1;
            if looks < 3 { bail!("look {looks}") } else { Ok(looks) }
        });
        assert_eq!(seen.unwrap(), 3);
    }

    #[test]
    fn a_timeout_tells_what_was_awaited_and_the_last_reason() {
        let error = until::<()>("rain", Duration::ZERO, || Err(anyhow!("the sky is blue"))).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("for rain") && text.contains("the sky is blue"), "{text}");
    }
}
