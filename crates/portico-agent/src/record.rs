//! The facts about one connection of a pod while it is open: for `/connections` and for its access line.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use portico_net::ConnectionId;

use crate::forward::ForwardState;

/// The gateway that carries a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upstream {
    /// Its index among the gateways as configured.
    pub gateway: usize,
    /// Its address, or that of the proxy that leads there.
    pub address: SocketAddr,
}

/// One connection.
#[derive(Debug)]
pub struct Record {
    /// Unique within this process.
    pub id: ConnectionId,
    /// The pod's address.
    pub client: SocketAddr,
    /// When it was accepted, as time since the agent started.
    pub accepted: Duration,
    forward: Arc<ForwardState>,
    upstream: OnceLock<Upstream>,
    up: AtomicU64,
    down: AtomicU64,
    cut: AtomicBool,
    cutter: AtomicWaker,
}

impl Record {
    pub(crate) fn new(
        id: ConnectionId,
        client: SocketAddr,
        accepted: Duration,
        forward: Arc<ForwardState>,
    ) -> Self {
        Self {
            id,
            client,
            accepted,
            forward,
            upstream: OnceLock::new(),
            up: AtomicU64::default(),
            down: AtomicU64::default(),
            cut: AtomicBool::default(),
            cutter: AtomicWaker::new(),
        }
    }

    /// Where it was accepted, and what it leads to.
    pub fn forward(&self) -> &ForwardState {
        &self.forward
    }

    /// The gateway that carries it. `None` while it waits for one.
    pub fn upstream(&self) -> Option<Upstream> {
        self.upstream.get().copied()
    }

    /// Bytes passed to the gateway so far.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to the client so far.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }

    /// A gateway has opened it. Once in its life.
    pub(crate) fn set_upstream(&self, upstream: Upstream) {
        let _first_stays = self.upstream.set(upstream);
        self.forward.count_opened();
    }

    pub(crate) fn count_bytes(&self, up: usize, down: usize) {
        let (up, down) = (up as u64, down as u64);
        if up > 0 {
            self.up.fetch_add(up, Relaxed);
        }
        if down > 0 {
            self.down.fetch_add(down, Relaxed);
        }
        self.forward.count_bytes(up, down);
    }

    /// Ends the connection.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Relaxed);
        self.cutter.wake();
    }

    /// Ready once [`cut`](Self::cut) was called.
    pub(crate) fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.cut.load(Relaxed) {
            return Poll::Ready(());
        }
        self.cutter.register(cx.waker());
        // Once more, for a call between the look and the registration.
        if self.cut.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }
}
