//! The end of a task's turn.

use std::pin::pin;
use std::task::Context;

/// Wakes this task behind those that are ready, and behind those that the sockets make ready meanwhile. A
/// task that wakes itself is always ready, and the runtime then looks at sockets only every 61st time.
pub fn wake_last(cx: &mut Context<'_>) {
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}
