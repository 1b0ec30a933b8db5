//! Ends of a socket that do not take back what was written before them.

use std::future::poll_fn;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::io::Errno;
use socket2::SockRef;
use tokio::time::{Instant, sleep, sleep_until};

use crate::stream::{Socket, receive};
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

/// Sends the FIN, and waits, until `deadline` at most, until the socket can be closed without loss. The bytes
/// that the peer still sends are dropped. If a socket is closed with unread bytes, or more arrive, the kernel
/// resets the connection and throws away what the peer has not taken.
pub async fn close(socket: &impl Socket, deadline: Instant) {
    let _ = SockRef::from(&socket.as_fd()).shutdown(Shutdown::Write);
    // The FIN counts as a byte.
    if send_queue(socket.as_fd()) > 1 {
        tokio::select! {
            () = discard(socket, deadline) => {}
            () = sent(socket.as_fd(), deadline) => {}
        }
    }
}

/// Reads and drops what the peer sends, until it ends or `deadline`.
pub async fn discard(socket: &impl Socket, deadline: Instant) {
    let mut timer = pin!(sleep_until(deadline));
    poll_fn(|cx| {
        // First, because a peer that never stops sending uses up what tokio lets a task do at once.
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        poll_discard(socket, cx)
    })
    .await;
}

/// Reads and drops what the peer has sent. Ready once it sends nothing more.
pub fn poll_discard(socket: &impl Socket, cx: &mut Context<'_>) -> Poll<()> {
    let mut dropped = [0; 16 * 1024];
    loop {
        if ready!(socket.poll_read_ready(cx)).is_err() {
            return Poll::Ready(());
        }
        match receive(socket, &mut dropped) {
            Ok(0) => return Poll::Ready(()),
            Ok(_) | Err(Errno::WOULDBLOCK) => {}
            Err(_) => return Poll::Ready(()),
        }
    }
}

/// Makes the closing of a TCP socket a reset.
pub fn abort(socket: impl AsFd) {
    // A socket that is gone already needs no reset.
    let _ = SockRef::from(&socket).set_linger(Some(Duration::ZERO));
}
