//! What bounds a connection that has not shown who it is.

use std::sync::Arc;
use std::task::{Context, Poll};

use portico_net::ReadLimit;
use portico_net::slots::Slot;
use thiserror::Error;

use super::settings::TLS_HANDSHAKE;

/// What a connection has that has not shown who it is: a slot, which it loses to others if it takes its time,
/// and a limit to what is read.
#[derive(Debug)]
pub(crate) struct Unproven {
    slot: Slot,
    pub(crate) limit: Arc<ReadLimit>,
}

impl Unproven {
    pub(crate) fn new(slot: Slot) -> Self {
        Self { slot, limit: ReadLimit::new(TLS_HANDSHAKE) }
    }

    /// Ready when others need the slot.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.slot.poll_evicted(cx)
    }

    /// It has shown who it is.
    pub(crate) fn proven(self) {
        self.limit.lift();
    }
}

/// The slot of a connection that has not shown who it is was needed for another.
#[derive(Debug, Clone, Copy, Error)]
#[error("of more connections that have not shown who they are than may be, it was the oldest")]
pub(crate) struct Crowded;
