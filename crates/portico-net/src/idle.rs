//! Ends a tunnel on which nothing moves, if the operator wants that.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Costs one pointer where it is off. Looks at the clock only when its time would be over, not each time a byte moves.
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
