//! The one thing about TCP that sockets do not offer by themselves: an abort that does not take back what was written before it.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// How long bytes that came before a reset may take to be delivered. A peer that reads at all takes a window in far less.
pub const LINGER: Duration = Duration::from_secs(1);

/// Between two looks at a send queue that is not empty yet. Rare and bounded, so it may be as simple as this.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Waits, until `deadline` at most, for all that was written to be on the wire. Closing with a reset throws away what is not.
pub async fn sent(stream: &TcpStream, deadline: Instant) {
    // With this mark the kernel calls the socket writable only when nothing is left to send.
    if SockRef::from(stream).set_tcp_notsent_lowat(1).is_err() {
        return;
    }
    while !is_writable(stream) && Instant::now() < deadline {
        sleep(LOOK_AGAIN).await;
    }
}

/// Asks the kernel, not tokio: tokio knows only that the socket was writable once.
fn is_writable(stream: &TcpStream) -> bool {
    let mut sockets = [PollFd::new(stream, PollFlags::OUT)];
    // An error is no reason to wait.
    !matches!(poll(&mut sockets, Some(&Timespec::default())), Ok(0))
}
