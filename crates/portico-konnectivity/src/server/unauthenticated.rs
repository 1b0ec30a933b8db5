//! The bounds of a connection whose peer has not authenticated.

use std::sync::Arc;
use std::task::{Context, Poll};

use portico_net::ReadLimit;
use portico_net::slots::Slot;
use thiserror::Error;

use super::settings::TLS_HANDSHAKE;

/// The bounds of a connection until its peer has authenticated: a slot, and a limit to the bytes read. It
/// loses the slot to others if it takes its time.
#[derive(Debug)]
pub(crate) struct Unauthenticated {
    pub(crate) slot: Slot,
    pub(crate) limit: Arc<ReadLimit>,
}

impl Unauthenticated {
    pub(crate) fn new(slot: Slot) -> Self {
        Self { slot, limit: ReadLimit::new(TLS_HANDSHAKE) }
    }

    /// Ready when others need the slot.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.slot.poll_evicted(cx)
    }
}

/// The slot of a connection whose peer had not authenticated was needed for another.
#[derive(Debug, Clone, Copy, Error)]
#[error("it was the oldest of too many connections that show no identity, or ask for nothing")]
pub(crate) struct Crowded;
