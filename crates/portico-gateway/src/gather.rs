//! Larger batches for transfers that keep coming.
//!
//! A gateway that is quicker than its sender takes each segment alone: a wake-up, two system calls and a wake-up of the
//! receiver for 64 KiB. Once a transfer has shown that it keeps coming, its socket counts as readable only with [`BATCH`] bytes
//! (`SO_RCVLOWAT`, socket(7)), which saves a quarter of the CPU a byte costs.
//!
//! The kernel does not wait for the mark when the sender closes or resets, nor when it has used up its window. For one that
//! pauses or is slower than that, the mark is taken back after [`PATIENCE`], until as much as [`EARNED`] has come again.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::sys::set_receive_low_water_mark;

/// Readable with this many bytes: half of a pipe, and a small part of the window that such a sender has by then.
const BATCH: u32 = 512 * 1024;

/// What a transfer must have moved before it is made to wait. Lists of objects are smaller, and answered without delay.
const EARNED: u32 = 4 * 1024 * 1024;

/// How long bytes may wait for more of them: the shortest time that tokio's clock knows.
const PATIENCE: Duration = Duration::from_millis(1);

/// Of one direction: whether its sender is waited for.
#[derive(Debug)]
pub(crate) enum Gather {
    /// Not now; this many bytes have come since it last was.
    Earning(u32),
    /// Until there is a batch, or the time is over.
    Waiting(Pin<Box<Sleep>>),
}

impl Default for Gather {
    fn default() -> Self {
        Self::Earning(0)
    }
}

impl Gather {
    /// Notes bytes of a transfer.
    pub(crate) fn earn(&mut self, bytes: usize) {
        if let Self::Earning(earned) = self {
            *earned = earned.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        }
    }

    /// The sender has nothing for now, and `moved` says whether it had something just before. Whatever comes of it, the
    /// task is woken in time.
    pub(crate) fn pause(&mut self, cx: &mut Context<'_>, sender: &TcpStream, moved: bool) {
        match self {
            Self::Earning(earned) if *earned < EARNED => return,
            Self::Earning(_) => {
                set_receive_low_water_mark(sender, BATCH);
                *self = Self::Waiting(Box::pin(sleep(PATIENCE)));
            }
            Self::Waiting(timer) if moved => timer.as_mut().reset(Instant::now() + PATIENCE),
            Self::Waiting(_) => {}
        }
        if let Self::Waiting(timer) = self
            && timer.as_mut().poll(cx).is_ready()
        {
            self.stop(sender);
        }
    }

    /// Waits no longer. The socket reports at once what it held back.
    pub(crate) fn stop(&mut self, sender: &TcpStream) {
        if matches!(self, Self::Waiting(_)) {
            set_receive_low_water_mark(sender, 1);
        }
        *self = Self::default();
    }
}
