//! Moves the bytes of one connection, both directions, in one future.
//!
//! At rest a connection owns its two sockets and a few words of state. What TCP promises is kept:
//!
//! - *Half-close*: the end of one direction is passed on once all its bytes are, and the other goes on.
//! - *Reset*: bytes that arrived before it are delivered as far as the peer takes them, then the peer is
//!   reset too.
//! - *A reset is noticed at once*, also on a side that has closed its direction, or is not read because the
//!   other side is blocked. A socket that no direction waits for is watched for errors.
//! - *No false end*: a connection that is cut is reset. If an idle one still has bytes, their receiver is
//!   reset too.
//!
//! Memory: at most 16 KiB a direction while the receiver is blocked, and a pipe while a transfer is large.

mod direction;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use self::direction::{Direction, Stop};
use crate::error_watch::ErrorWatch;
use crate::idle::Idle;
use crate::linger::{self, LINGER};
use crate::meter::{End, Meter, Side, set_due_keepalive};
use crate::stream::Stream;
use crate::turn::wake_last;

/// Copies both ways until both directions have ended or something ends them. `first` goes to the upstream
/// before all else. The caller closes the sockets afterwards, which resets them if that is how the connection
/// ended.
///
/// Not an `async fn`, whose future would keep room for its arguments: an idle connection consists of this
/// future and its two sockets.
pub fn copy<'a, M: Meter>(
    downstream: &'a Stream,
    upstream: &'a Stream,
    first: Vec<u8>,
    meter: &'a mut M,
    idle: Option<Duration>,
) -> impl Future<Output = End> + Send + 'a {
    let mut pump = Pump {
        downstream,
        upstream,
        meter,
        to_upstream: Direction::starting_with(first),
        to_downstream: Direction::default(),
        broken: None,
        first_to_close: None,
        watch_downstream: ErrorWatch::default(),
        watch_upstream: ErrorWatch::default(),
        idle: Idle::new(idle),
    };
    async move {
        let end = poll_fn(|cx| pump.poll(cx)).await;
        match end {
            // Boxed: the way out must not make every resting connection larger.
            End::Reset { by } => Box::pin(pump.pass_reset_on(by)).await,
            // Either side may have bytes on their way, and must not take what came for all there is.
            End::Cut | End::Memory => [downstream, upstream].into_iter().for_each(linger::abort),
            End::Idle => pump.reset_truncated(),
            End::Closed { .. } => {}
        }
        end
    }
}

struct Pump<'a, M> {
    downstream: &'a Stream,
    upstream: &'a Stream,
    meter: &'a mut M,
    to_upstream: Direction,
    to_downstream: Direction,
    /// A side that reported an error on writing: what it sent before is still read, its end then counts as a
    /// reset.
    broken: Option<Side>,
    first_to_close: Option<Side>,
    watch_downstream: ErrorWatch<'a>,
    watch_upstream: ErrorWatch<'a>,
    idle: Idle,
}

impl<M: Meter> Pump<'_, M> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        set_due_keepalive(self.meter, self.upstream);
        if self.meter.poll_cut(cx).is_ready() {
            return Poll::Ready(End::Cut);
        }
        let (meter, idle) = (&mut *self.meter, &mut self.idle);
        let up = self.to_upstream.advance(
            cx,
            self.downstream,
            self.upstream,
            self.to_downstream.has_ended(),
            |bytes| {
                meter.carried(bytes, 0);
                idle.moved();
            },
        );
        if let Some(end) = self.judge(up, Side::Downstream, Side::Upstream) {
            return Poll::Ready(end);
        }
        let (meter, idle) = (&mut *self.meter, &mut self.idle);
        let down = self.to_downstream.advance(
            cx,
            self.upstream,
            self.downstream,
            self.to_upstream.has_ended(),
            |bytes| {
                meter.carried(0, bytes);
                idle.moved();
            },
        );
        if let Some(end) = self.judge(down, Side::Upstream, Side::Downstream) {
            return Poll::Ready(end);
        }
        if up == Stop::Turn || down == Stop::Turn {
            wake_last(cx);
            return Poll::Pending;
        }
        // A socket is waited for by the direction that reads it or by the one that is blocked on it.
        let downstream_unwatched = up != Stop::Idle && down != Stop::Blocked;
        let upstream_unwatched = down != Stop::Idle && up != Stop::Blocked;
        if watch(cx, &mut self.watch_downstream, downstream_unwatched, self.downstream) {
            return Poll::Ready(End::Reset { by: Side::Downstream });
        }
        if watch(cx, &mut self.watch_upstream, upstream_unwatched, self.upstream) {
            return Poll::Ready(End::Reset { by: Side::Upstream });
        }
        self.idle.poll(cx).map(|()| End::Idle)
    }

    /// Has the receiver of bytes that are lost closed by a reset.
    fn reset_truncated(&self) {
        if self.to_upstream.holds() {
            linger::abort(self.upstream);
        }
        if self.to_downstream.holds() {
            linger::abort(self.downstream);
        }
    }

    /// Delivers what came before the reset, then has the other socket closed by a reset too.
    async fn pass_reset_on(&mut self, by: Side) {
        let (rest, alive) = match by {
            Side::Downstream => (&mut self.to_upstream, self.upstream),
            Side::Upstream => (&mut self.to_downstream, self.downstream),
        };
        let deadline = Instant::now() + LINGER;
        // Bytes left after the grace are lost, as they would be in a reset without a gateway between.
        if let Ok(true) = timeout_at(deadline, pin!(poll_fn(|cx| rest.poll_flush_all(cx, alive)))).await {
            linger::sent(alive, deadline).await;
        }
        linger::abort(alive);
    }

    /// The effect of the stop of one direction on the connection; `None` if it goes on.
    fn judge(&mut self, stop: Stop, sender: Side, receiver: Side) -> Option<End> {
        match stop {
            Stop::SenderFailed => return Some(End::Reset { by: sender }),
            Stop::ReceiverFailed => {
                let back = match sender {
                    Side::Downstream => &self.to_downstream,
                    Side::Upstream => &self.to_upstream,
                };
                self.broken.get_or_insert(receiver);
                if back.has_ended() {
                    return Some(End::Reset { by: receiver });
                }
            }
            Stop::Ended if self.broken == Some(sender) => return Some(End::Reset { by: sender }),
            Stop::Ended if self.first_to_close.is_none() && self.broken.is_none() => {
                self.first_to_close = Some(sender);
            }
            Stop::Idle | Stop::Blocked | Stop::Turn | Stop::Ended => {}
        }
        let both = self.to_upstream.has_ended() && self.to_downstream.has_ended();
        both.then(|| End::Closed { first: self.first_to_close.unwrap_or(sender) })
    }
}

/// Watches `socket` for an error while `wanted`; true if there is one.
fn watch<'a>(cx: &mut Context<'_>, watch: &mut ErrorWatch<'a>, wanted: bool, socket: &'a Stream) -> bool {
    if !wanted {
        watch.stop();
        return false;
    }
    watch.poll(&socket, cx).is_ready()
}

#[cfg(test)]
mod tests;
