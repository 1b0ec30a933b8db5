//! Time that moves when a test says so, while bytes move as ever.

use std::pin::pin;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Longer than any promise that is waited for here.
const LONG: Duration = Duration::from_secs(600);

/// Shorter than most timers of the agent, so that their order stays what it is.
const STEP: Duration = Duration::from_millis(50);

/// How often sockets and tasks get their turn before time moves on.
const TURNS: usize = 200;

/// A paused clock. A task of it is always busy, because a runtime whose tasks all wait moves the time itself.
pub(crate) struct Clock(JoinHandle<()>);

impl Clock {
    pub(crate) fn new() -> Self {
        tokio::time::pause();
        Self(tokio::spawn(async {
            loop {
                tokio::task::yield_now().await;
            }
        }))
    }

    /// Lets time pass until it is so.
    pub(crate) async fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < LONG, "never: {what}");
            step().await;
        }
    }

    /// Lets time pass until the future is ready.
    pub(crate) async fn by<T>(&self, future: impl Future<Output = T>) -> T {
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
