//! The facts about one connection to an endpoint while it is open, and how it ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use portico_net::{End, Meter, Side};
use tokio::time::Instant;

use super::shared::Shared;

/// One connection to an endpoint.
#[derive(Debug)]
pub struct Record {
    /// The server that asked for it.
    pub server: Arc<str>,
    /// The address that it asked for.
    pub address: Box<str>,
    /// When it was connected.
    pub since: Instant,
    /// Whether it has an HTTP/2 stream of its own.
    pub has_stream: bool,
    up: AtomicU64,
    down: AtomicU64,
}

impl Record {
    /// Bytes passed to the endpoint so far.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to the server so far.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }
}

/// How a connection to an endpoint ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointEnd {
    /// The server closed it first.
    ByServer,
    /// The endpoint closed it first.
    ByEndpoint,
    /// The server reset its stream.
    ResetByServer,
    /// The endpoint reset it.
    ResetByEndpoint,
    /// It did not read, and `--connection-buffer` was full.
    Buffer,
    /// It did not read, and the memory for all connections was used up.
    Memory,
    /// The connection to the server was lost.
    ServerLost,
    /// The agent ended, or the server abandoned the dial just when it had succeeded.
    Stopped,
}

impl EndpointEnd {
    /// All, with their names in metrics, in the order of the counters.
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::ByServer, "closed_by_server"),
        (Self::ByEndpoint, "closed_by_endpoint"),
        (Self::ResetByServer, "reset_by_server"),
        (Self::ResetByEndpoint, "reset_by_endpoint"),
        (Self::Buffer, "buffer_full"),
        (Self::Memory, "memory"),
        (Self::ServerLost, "server_lost"),
        (Self::Stopped, "stopped"),
    ];
}

impl From<End> for EndpointEnd {
    fn from(end: End) -> Self {
        match end {
            End::Closed { first: Side::Downstream } => Self::ByServer,
            End::Closed { first: Side::Upstream } => Self::ByEndpoint,
            End::Reset { by: Side::Downstream } => Self::ResetByServer,
            End::Reset { by: Side::Upstream } => Self::ResetByEndpoint,
            End::Memory => Self::Memory,
            End::Idle | End::Cut => Self::Stopped,
        }
    }
}

/// Lists and counts a connection while it is held.
#[derive(Debug)]
pub(super) struct Guard {
    shared: Arc<Shared>,
    /// Whether the connection to the server is over.
    server_lost: Arc<AtomicBool>,
    record: Arc<Record>,
    slot: usize,
    end: EndpointEnd,
}

impl Guard {
    /// `None` if the agent has as many connections as it takes.
    pub(super) fn list(
        shared: &Arc<Shared>,
        server: &Arc<str>,
        server_lost: &Arc<AtomicBool>,
        address: &str,
        has_stream: bool,
    ) -> Option<Self> {
        let record = Arc::new(Record {
            server: Arc::clone(server),
            address: address.into(),
            since: Instant::now(),
            has_stream,
            up: AtomicU64::default(),
            down: AtomicU64::default(),
        });
        let slot = shared.list(&record)?;
        let (shared, server_lost) = (Arc::clone(shared), Arc::clone(server_lost));
        Some(Self { shared, server_lost, record, slot, end: EndpointEnd::Stopped })
    }

    pub(super) fn carried_up(&self, bytes: usize) {
        self.record.up.fetch_add(bytes as u64, Relaxed);
        self.shared.counters.bytes_up.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn carried_down(&self, bytes: usize) {
        self.record.down.fetch_add(bytes as u64, Relaxed);
        self.shared.counters.bytes_down.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn ended(mut self, end: EndpointEnd) {
        self.end = end;
    }
}

impl Meter for Guard {
    fn carried(&mut self, up: usize, down: usize) {
        if up > 0 {
            self.carried_up(up);
        }
        if down > 0 {
            self.carried_down(down);
        }
    }

    fn ended(self, end: End) {
        let end = match end {
            // The stream has gone with the connection that it was on.
            End::Reset { by: Side::Downstream } if self.server_lost.load(Relaxed) => EndpointEnd::ServerLost,
            end => end.into(),
        };
        Self::ended(self, end);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.unlist(self.slot, self.end);
    }
}
