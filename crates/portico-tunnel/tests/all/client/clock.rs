//! Time that moves when a test says so, while bytes move as ever.

use std::pin::pin;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Longer than any promise that is waited for here.
const LONG: Duration = Duration::from_secs(1_200);

/// No timer of the client is shorter than this by much.
const STEP: Duration = Duration::from_millis(50);

/// Looks at sockets and tasks after each step: more than the longest chain of them that has to come to rest.
const TURNS: usize = 60;

/// A paused clock. A task of it is always busy, or the runtime would move the time itself as soon as all wait
/// for sockets.
pub(super) struct Clock(JoinHandle<()>);

impl Clock {
    pub(super) fn new() -> Self {
        tokio::time::pause();
        Self(tokio::spawn(async {
            loop {
                tokio::task::yield_now().await;
            }
        }))
    }

    /// Lets time pass until it is so.
    pub(super) async fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !so() {
            assert!(begin.elapsed() < LONG, "never: {what}");
            step().await;
        }
    }

    /// Lets time pass until this is ready.
    pub(super) async fn by<T>(&self, future: impl Future<Output = T>) -> T {
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

    pub(super) async fn pass(&self, time: Duration) {
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
