//! What is known of each open connection, and the one line that closes it.
//!
//! A [`Session`] is held by whoever moves the bytes of a connection. As long as it lives the connection is listed and counted;
//! when it is finished, or dropped because its task was cancelled, bytes are added up and the access line is written.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use serde::Serialize;
use thiserror::Error;

use crate::access::Line;
use crate::auth::Credential;
use crate::cluster::OpenGuard;
use crate::refusal::Side;
use crate::upstream::{Endpoint, EndpointUse, Upstream};
use crate::worker::Worker;

/// Names one connection or stream wherever it is seen: in access lines, in `/connections`, in PROXY headers. Written in hex, also
/// in JSON, whose numbers lose digits beyond 2^53 in most readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(crate) u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl Serialize for ConnectionId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Through which door a connection came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Routed by server name.
    Sni,
    /// A CONNECT stream.
    Tunnel,
    /// Routed by this port.
    NodePort(u16),
}

/// What is written names no listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("neither sni, nor tunnel, nor node_port:PORT")]
pub struct UnknownListener;

/// How a connection ended once bytes were flowing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both sides closed in order; this one began.
    Closed(Side),
    /// This side reset it, and the other was reset too.
    Reset(Side),
    /// No byte moved for the idle timeout.
    Idle,
    /// Its endpoint left the Service, and the time for such connections was over.
    Departed,
    /// The credential it rested on was revoked.
    Revoked,
    /// It held bytes that its receiver did not take, when tunnels held as many as they may.
    Memory,
    /// The gateway stopped, and the drain timeout was over.
    Drained,
    /// The task that served it was cancelled.
    Cancelled,
}

/// One open connection or tunnel stream.
#[derive(Debug)]
pub struct Record {
    /// Unique within this process, and unlikely to repeat across restarts. Sent upstream in the PROXY header on request.
    pub id: ConnectionId,
    /// Through which door it came.
    pub listener: Listener,
    /// The client: where a trusted hop sent a PROXY header, the address in it.
    pub client: SocketAddr,
    /// The server name or authority it asked for.
    pub name: Option<Arc<str>>,
    /// Where it goes.
    pub upstream: Arc<Upstream>,
    /// When it was accepted, as time since the gateway started.
    pub accepted: Duration,
    /// What it rests on, where clients must authenticate.
    pub(crate) credential: Option<Arc<Credential>>,
    endpoint: EndpointUse,
    _open: OpenGuard,
    up: AtomicU64,
    down: AtomicU64,
    cancel: AtomicU8,
    canceller: AtomicWaker,
}

impl Record {
    /// The endpoint it is connected to.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.endpoint.endpoint()
    }

    /// Bytes passed to the endpoint so far.
    pub fn bytes_up(&self) -> u64 {
        self.up.load(Relaxed)
    }

    /// Bytes passed to the client so far.
    pub fn bytes_down(&self) -> u64 {
        self.down.load(Relaxed)
    }

    pub(crate) fn count_up(&self, bytes: usize) {
        self.up.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn count_down(&self, bytes: usize) {
        self.down.fetch_add(bytes as u64, Relaxed);
    }

    /// Asks whoever moves the bytes to stop, for `reason`.
    pub(crate) fn cancel(&self, reason: End) {
        let reason = match reason {
            End::Departed => 1,
            End::Revoked => 3,
            _ => 2,
        };
        self.cancel.store(reason, Relaxed);
        self.canceller.wake();
    }

    /// Has `waker` woken by [`Self::cancel`]. Once a connection is enough: a task keeps its waker.
    pub(crate) fn wake_on_cancel(&self, waker: &Waker) {
        self.canceller.register(waker);
    }

    /// Why the connection is to end, if it is.
    pub(crate) fn cancelled(&self) -> Option<End> {
        match self.cancel.load(Relaxed) {
            0 => None,
            1 => Some(End::Departed),
            3 => Some(End::Revoked),
            _ => Some(End::Drained),
        }
    }
}

/// An open connection, listed and counted while this is held.
#[derive(Debug)]
pub(crate) struct Session {
    worker: Arc<Worker>,
    record: Arc<Record>,
    slot: usize,
    end: End,
}

/// What a session is opened with, once its upstream is connected.
pub(crate) struct Opening {
    pub(crate) id: ConnectionId,
    pub(crate) listener: Listener,
    pub(crate) client: SocketAddr,
    pub(crate) name: Option<Arc<str>>,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) accepted: Duration,
    pub(crate) endpoint: EndpointUse,
    pub(crate) open: OpenGuard,
    pub(crate) credential: Option<Arc<Credential>>,
}

impl Session {
    /// Lists the connection and counts it as established.
    pub(crate) fn open(worker: &Arc<Worker>, opening: Opening) -> Self {
        let handshake = worker.shared.now().saturating_sub(opening.accepted);
        opening.upstream.cluster.count_established(handshake);
        let record = Arc::new(Record {
            id: opening.id,
            listener: opening.listener,
            client: opening.client,
            name: opening.name,
            upstream: opening.upstream,
            accepted: opening.accepted,
            credential: opening.credential,
            endpoint: opening.endpoint,
            _open: opening.open,
            up: AtomicU64::default(),
            down: AtomicU64::default(),
            cancel: AtomicU8::default(),
            canceller: AtomicWaker::new(),
        });
        let slot = worker.list(Arc::clone(&record));
        Self { worker: Arc::clone(worker), record, slot, end: End::Cancelled }
    }

    pub(crate) fn record(&self) -> &Arc<Record> {
        &self.record
    }

    /// Ends the session in the way it really ended.
    pub(crate) fn finish(mut self, end: End) {
        self.end = end;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.worker.unlist(self.slot);
        let record = &self.record;
        record.upstream.cluster.count_bytes(record.bytes_up(), record.bytes_down());
        self.worker.shared.count_end(self.end);
        self.worker.shared.access.write(|| Line::ended(&self.worker.shared, record, self.end));
    }
}

impl End {
    /// The word for metrics and the access line. Stable.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Closed(_) => "closed",
            Self::Reset(_) => "reset",
            Self::Idle => "idle_timeout",
            Self::Departed => "endpoint_departed",
            Self::Revoked => "revoked",
            Self::Memory => "memory",
            Self::Drained => "drain_timeout",
            Self::Cancelled => "cancelled",
        }
    }

    /// Who ended it.
    pub fn side(self) -> Side {
        match self {
            Self::Closed(side) | Self::Reset(side) => side,
            _ => Side::Gateway,
        }
    }
}

impl Listener {
    /// The word for metrics and the access line, without the port. Stable.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Tunnel => "tunnel",
            Self::NodePort(_) => "node_port",
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NodePort(port) => write!(f, "node_port:{port}"),
            other => f.write_str(other.kind()),
        }
    }
}

/// The opposite of its `Display`.
impl FromStr for Listener {
    type Err = UnknownListener;

    fn from_str(name: &str) -> Result<Self, UnknownListener> {
        match name {
            "sni" => Ok(Self::Sni),
            "tunnel" => Ok(Self::Tunnel),
            _ => {
                let port = name.strip_prefix("node_port:").and_then(|port| port.parse().ok());
                port.map(Self::NodePort).ok_or(UnknownListener)
            }
        }
    }
}

impl Serialize for Listener {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_listeners_survive_the_way() {
        for listener in [Listener::Sni, Listener::Tunnel, Listener::NodePort(31000)] {
            assert_eq!(listener.to_string().parse(), Ok(listener));
        }
        for name in ["node_port:70000", "other"] {
            assert_eq!(name.parse::<Listener>(), Err(UnknownListener));
        }
    }
}
