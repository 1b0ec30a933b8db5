//! Resets that do not take back what was written before them.

use std::os::fd::AsFd;
use std::time::Duration;

use socket2::SockRef;
use tokio::time::{Instant, sleep};

use crate::sys::send_queue;

/// How long bytes that came before a reset may take to be delivered. A peer that reads at all takes a window
/// in far less.
pub const LINGER: Duration = Duration::from_secs(1);

/// Between two looks at a send queue that is not empty yet: the kernel reports no event when it runs empty.
/// Rare and bounded.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Waits, until `deadline` at most, for the peer to acknowledge all that was written. Closing with a reset
/// throws away what is not.
pub async fn sent(socket: impl AsFd, deadline: Instant) {
    while send_queue(&socket) > 0 && Instant::now() < deadline {
        sleep(LOOK_AGAIN).await;
    }
}

/// Makes the closing of a TCP socket a reset.
pub fn abort(socket: impl AsFd) {
    // A socket that is gone already needs no reset.
    let _ = SockRef::from(&socket).set_linger(Some(Duration::ZERO));
}
