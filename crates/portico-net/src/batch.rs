//! Receive batching for transfers that keep coming.
//!
//! A gateway that is quicker than its sender takes each segment alone. That is a wake-up, two system calls
//! and a wake-up of the receiver for 64 KiB. Once a transfer has moved a megabyte, its socket counts as
//! readable only with [`BATCH`] bytes (`SO_RCVLOWAT`, socket(7)). This saves a quarter of the CPU that a byte
//! costs. The kernel does not wait for the mark when the sender closes or resets, nor when the window is used
//! up. For a sender that pauses or is slower, the mark is taken back after [`PATIENCE`]. Then the transfer
//! must move twice as much before it is batched again.

use std::future::Future;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

use crate::sys::set_receive_low_water_mark;

/// Readable with this many bytes: half of a pipe, and a small part of the window that such a sender has by
/// then.
const BATCH: u32 = 512 * 1024;

/// The bytes that a transfer must have moved before it is batched for the first time. Most lists of objects
/// are smaller, and arrive without delay.
const ENTRY: u32 = 1024 * 1024;

/// How often that amount is doubled: to 8 MiB, for which a pause of [`PATIENCE`] is little.
const MOST_DOUBLINGS: u8 = 3;

/// Batches in a row, 16 MiB, after which earlier pauses are forgotten.
const FORGIVEN: u8 = 32;

/// How long bytes may wait for more of them. A sender with a few transfers in turn, half a gigabyte a second
/// together, is back within that time.
const PATIENCE: Duration = Duration::from_millis(3);

/// Receive batching of one direction.
#[derive(Debug, Default)]
pub(crate) struct Batching {
    state: State,
    /// Bytes since the sender last had nothing.
    came: u32,
    /// How often [`ENTRY`] was doubled.
    doublings: u8,
    /// Batches since the last pause.
    batches: u8,
}

#[derive(Debug)]
enum State {
    /// Off; this many bytes have come since it last was on.
    Off(u32),
    /// On, until there is a batch or the time is over.
    On(Pin<Box<Sleep>>),
}

impl Default for State {
    fn default() -> Self {
        Self::Off(0)
    }
}

impl Batching {
    /// Counts bytes of a transfer.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.came = self.came.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// The sender has nothing for now. The task is woken by a batch, or after [`PATIENCE`].
    pub(crate) fn pause(&mut self, cx: &mut Context<'_>, sender: impl AsFd) {
        let came = std::mem::take(&mut self.came);
        match &mut self.state {
            State::Off(moved) => {
                *moved = moved.saturating_add(came);
                if *moved < ENTRY << self.doublings {
                    return;
                }
                set_receive_low_water_mark(&sender, BATCH);
                self.state = State::On(Box::pin(sleep(PATIENCE)));
                self.batches = 0;
            }
            State::On(timer) if came > 0 => {
                timer.as_mut().reset(Instant::now() + PATIENCE);
                self.batches = self.batches.saturating_add(1);
                if self.batches >= FORGIVEN {
                    self.doublings = 0;
                }
            }
            State::On(_) => {}
        }
        if let State::On(timer) = &mut self.state
            && timer.as_mut().poll(cx).is_ready()
        {
            self.doublings = MOST_DOUBLINGS.min(self.doublings + 1);
            self.stop(sender);
        }
    }

    /// Ends batching. The socket reports at once what it held back.
    pub(crate) fn stop(&mut self, sender: impl AsFd) {
        if matches!(self.state, State::On(_)) {
            set_receive_low_water_mark(sender, 1);
        }
        (self.state, self.came) = (State::default(), 0);
    }
}
