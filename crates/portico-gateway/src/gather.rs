//! Larger batches for transfers that keep coming.
//!
//! A gateway that is quicker than its sender takes each segment alone: a wake-up, two system calls and a wake-up of the
//! receiver for 64 KiB. Once a transfer has shown that it keeps coming, its socket counts as readable only with [`BATCH`] bytes
//! (`SO_RCVLOWAT`, socket(7)), which saves a quarter of the CPU that a byte costs.
//!
//! The kernel does not wait for the mark when the sender closes or resets, nor when it has used up its window. For one that
//! pauses or is slower than that, the mark is taken back after [`PATIENCE`]; the next time it must have moved twice as much,
//! so that a client that asks for one large object after the other does not pay that pause for each of them.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::sys::set_receive_low_water_mark;

/// Readable with this many bytes: half of a pipe, and a small part of the window that such a sender has by then.
const BATCH: u32 = 512 * 1024;

/// What a transfer must have moved before it is made to wait for the first time. Most lists of objects are smaller, and
/// answered without delay.
const EARNED: u32 = 1024 * 1024;

/// How often that amount is doubled: to 8 MiB, for which a pause of [`PATIENCE`] is little.
const MOST_DOUBLINGS: u8 = 3;

/// Batches in a row, 16 MiB, after which earlier pauses are forgotten.
const FORGIVEN: u8 = 32;

/// How long bytes may wait for more of them. A sender with a few transfers in turn, half a gigabyte a second together, is
/// back within that time.
const PATIENCE: Duration = Duration::from_millis(3);

/// Of one direction: whether its sender is waited for.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    state: State,
    /// Bytes since the sender last had nothing.
    came: u32,
    /// How often what must be earned was doubled.
    doublings: u8,
    /// Batches since the last pause.
    batches: u8,
}

#[derive(Debug)]
enum State {
    /// It is not; this many bytes have come before the last pause, since it last was.
    Earning(u32),
    /// It is, until there is a batch, or the time is over.
    Waiting(Pin<Box<Sleep>>),
}

impl Default for State {
    fn default() -> Self {
        Self::Earning(0)
    }
}

impl Gather {
    /// Notes bytes of a transfer.
    pub(crate) fn earn(&mut self, bytes: usize) {
        self.came = self.came.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// The sender has nothing for now. Whatever comes of it, the task is woken in time.
    pub(crate) fn pause(&mut self, cx: &mut Context<'_>, sender: &TcpStream) {
        let came = std::mem::take(&mut self.came);
        match &mut self.state {
            State::Earning(earned) => {
                *earned = earned.saturating_add(came);
                if *earned < EARNED << self.doublings {
                    return;
                }
                set_receive_low_water_mark(sender, BATCH);
                self.state = State::Waiting(Box::pin(sleep(PATIENCE)));
                self.batches = 0;
            }
            State::Waiting(timer) if came > 0 => {
                timer.as_mut().reset(Instant::now() + PATIENCE);
                self.batches = self.batches.saturating_add(1);
                if self.batches >= FORGIVEN {
                    self.doublings = 0;
                }
            }
            State::Waiting(_) => {}
        }
        if let State::Waiting(timer) = &mut self.state
            && timer.as_mut().poll(cx).is_ready()
        {
            self.doublings = MOST_DOUBLINGS.min(self.doublings + 1);
            self.stop(sender);
        }
    }

    /// Waits no longer. The socket reports at once what it held back.
    pub(crate) fn stop(&mut self, sender: &TcpStream) {
        if matches!(self.state, State::Waiting(_)) {
            set_receive_low_water_mark(sender, 1);
        }
        (self.state, self.came) = (State::default(), 0);
    }
}
