//! Tokio's clock, moved by a test, while bytes move as ever.
//!
//! With the feature `clock` only: tokio's clock can be paused in tests, and not in what ships.

use std::pin::pin;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Longer than any promise that is waited for.
const LONG: Duration = Duration::from_secs(600);

/// Shorter than most timers of the agent and the tunnel, so that their order stays what it is.
const STEP: Duration = Duration::from_millis(50);

/// How often sockets and tasks get their turn before time moves on: more than the longest chain of them that
/// has to come to rest.
const TURNS: usize = 60;

/// A paused clock. A task of it is always busy, because a runtime whose tasks all wait moves the time itself.
pub struct Clock(JoinHandle<()>);

impl Clock {
    /// Pauses the clock of this runtime, which must have one thread.
    #[allow(clippy::new_without_default, reason = "it changes the runtime")]
    pub fn new() -> Self {
        tokio::time::pause();
        Self(tokio::spawn(async {
            loop {
                tokio::task::yield_now().await;
            }
        }))
    }

    /// Lets time pass until it is so.
    ///
    /// # Panics
    ///
    /// After ten minutes of this clock.
    pub async fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < LONG, "never: {what}");
            step().await;
        }
    }

    /// Lets time pass until the future is ready.
    ///
    /// # Panics
    ///
    /// After ten minutes of this clock.
    pub async fn by<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let begin = Instant::now();
        loop {
            tokio::select! {
                biased;
                ready = &mut future => return ready,
                () = step() => assert!(begin.elapsed() < LONG, "nothing comes of it"),
            }
        }
    }

    /// Lets this much time pass.
    pub async fn pass(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            step().await;
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn step() {
    for _ in 0..TURNS {
        tokio::task::yield_now().await;
    }
    tokio::time::advance(STEP).await;
}
