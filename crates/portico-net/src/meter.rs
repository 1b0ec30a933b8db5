//! The reports of an engine that carries bytes, and how carrying ends. Shared by the copy engine, the
//! tunnel's bridge, the gateway and the node agent.

use std::os::fd::AsFd;
use std::task::{Context, Poll};

use socket2::SockRef;

use crate::memory::MemoryBudget;
use crate::socket::{Keepalive, set_keepalive};

/// Counts one connection or stream. Dropped without [`ended`](Self::ended) if the runtime itself stops.
pub trait Meter: Send + 'static {
    /// Bytes went from the client to the upstream (`up`) or back (`down`), since the last call.
    fn carried(&mut self, up: usize, down: usize);

    /// The peer has reset its HTTP/2 stream because the connection behind it broke (`CONNECT_ERROR`, RFC 9113
    /// section 8.5). Comes before the end. By default it makes no difference.
    fn broke_behind_peer(&mut self) {}

    /// The connection is over.
    fn ended(self, end: End);

    /// The budget for bytes that the streams of one cluster hold for upstreams that do not take them. By
    /// default only the budgets of the connection and of the process do.
    fn budget(&self) -> Option<&MemoryBudget> {
        None
    }

    /// The keep-alive that is due on the socket to the upstream now. An engine asks at each step, by
    /// [`set_due_keepalive`]. By default none ever is.
    fn take_due_keepalive(&mut self) -> Option<Keepalive> {
        None
    }

    /// Ready when the owner cuts the connection: its endpoint is gone for too long, say. Never, if not
    /// implemented.
    fn poll_cut(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

/// Sets keep-alive on the socket to the upstream if it is due. To be called at each step.
pub fn set_due_keepalive(meter: &mut impl Meter, upstream: &impl AsFd) {
    if let Some(keepalive) = meter.take_due_keepalive() {
        // Fails only for a socket that is gone.
        let _ = set_keepalive(&SockRef::from(upstream), keepalive);
    }
}

/// How carrying ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both sides closed in order.
    Closed {
        /// The side that closed first.
        first: Side,
    },
    /// One side aborted: TCP RST, RST_STREAM, or the connection of an HTTP/2 client lost.
    Reset {
        /// The side that did.
        by: Side,
    },
    /// No byte moved for the idle timeout.
    Idle,
    /// [`Meter::poll_cut`] reported it.
    Cut,
    /// It held bytes that its receiver did not take while the memory budget was used up.
    Memory,
}

/// Sides of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client.
    Downstream,
    /// The control plane.
    Upstream,
}
