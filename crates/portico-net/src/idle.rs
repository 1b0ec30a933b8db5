//! Ends a connection on which nothing moves.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// An idle limit. Costs one pointer where it is off, and reads the clock only when its time would be over.
pub struct Idle(Option<Box<Timer>>);

struct Timer {
    after: Duration,
    moved: bool,
    sleep: Pin<Box<Sleep>>,
}

impl Idle {
    /// A limit of `after`; `None` never ends anything.
    pub fn new(after: Option<Duration>) -> Self {
        Self(after.map(|after| Box::new(Timer { after, moved: false, sleep: Box::pin(sleep(after)) })))
    }

    /// A byte moved.
    pub fn moved(&mut self) {
        if let Some(timer) = &mut self.0 {
            timer.moved = true;
        }
    }

    /// Ready when no byte has moved for one to two times the limit.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.0 else { return Poll::Pending };
        loop {
            ready!(timer.sleep.as_mut().poll(cx));
            if !std::mem::take(&mut timer.moved) {
                return Poll::Ready(());
            }
            timer.sleep.as_mut().reset(Instant::now() + timer.after);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_ends_after_the_limit() {
        let begun = Instant::now();
        let mut idle = Idle::new(Some(LIMIT));
        poll_fn(|cx| idle.poll(cx)).await;
        assert!((LIMIT..LIMIT + Duration::from_millis(10)).contains(&begun.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_byte_that_moves_starts_the_limit_anew() {
        let begun = Instant::now();
        let mut idle = Idle::new(Some(LIMIT));
        idle.moved();
        poll_fn(|cx| idle.poll(cx)).await;
        assert!((LIMIT * 2..LIMIT * 2 + Duration::from_millis(10)).contains(&begun.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_nothing_ends() {
        let mut idle = Idle::new(None);
        let ended = poll_fn(|cx| idle.poll(cx));
        assert!(tokio::time::timeout(LIMIT * 1_000, ended).await.is_err());
    }
}
