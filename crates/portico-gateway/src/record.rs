//! The facts about each open connection. `/connections`, the access line, and the parts that cancel
//! connections use them. A [`Session`](crate::session::Session) opens and closes it.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use portico_api::listener::ListenerKind;
use portico_net::ConnectionId;
use serde::Serialize;
use thiserror::Error;

use crate::auth::Credential;
use crate::cluster::OpenGuard;
use crate::outcome::End;
use crate::upstream::{Endpoint, EndpointUse, Upstream};

/// The listener a connection came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Routed by server name.
    Sni,
    /// A CONNECT stream.
    Tunnel,
    /// Routed by this port.
    NodePort(u16),
}

/// The text names no listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("neither sni, nor tunnel, nor node_port:PORT")]
pub struct UnknownListener;

/// One open connection or tunnel stream.
#[derive(Debug)]
pub struct Record {
    /// Unique within this process, and unlikely to repeat across restarts. Sent upstream in the PROXY header
    /// on request.
    pub id: ConnectionId,
    /// The listener it came by.
    pub listener: Listener,
    /// The client: where a trusted hop sent a PROXY header, the address in it.
    pub client: SocketAddr,
    /// The server name or authority it asked for.
    pub name: Option<Arc<str>>,
    /// Where it goes.
    pub upstream: Arc<Upstream>,
    /// When it was accepted, as time since the gateway started.
    pub accepted: Duration,
    /// The credential it was opened with, where one is asked for.
    pub(crate) credential: Option<Arc<Credential>>,
    pub(crate) endpoint: EndpointUse,
    pub(crate) _open: OpenGuard,
    pub(crate) state: State,
}

/// What changes about a record.
#[derive(Debug, Default)]
pub(crate) struct State {
    up: AtomicU64,
    down: AtomicU64,
    /// 0, or one more than the index of an [`End`].
    cancel: AtomicU8,
    lasts: AtomicBool,
    /// Wakes the task that moves the bytes.
    waker: AtomicWaker,
}

impl Record {
    /// The endpoint it is connected to.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.endpoint.endpoint()
    }

    /// Bytes passed to the endpoint so far.
    pub fn bytes_up(&self) -> u64 {
        self.state.up.load(Relaxed)
    }

    /// Bytes passed to the client so far.
    pub fn bytes_down(&self) -> u64 {
        self.state.down.load(Relaxed)
    }

    pub(crate) fn count_up(&self, bytes: usize) {
        self.state.up.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn count_down(&self, bytes: usize) {
        self.state.down.fetch_add(bytes as u64, Relaxed);
    }

    /// Has the task that moves the bytes stop, for `reason`.
    pub(crate) fn cancel(&self, reason: End) {
        self.state.cancel.store(1 + reason.index() as u8, Relaxed);
        self.state.waker.wake();
    }

    /// Why the connection is to end, if it is.
    pub(crate) fn cancelled(&self) -> Option<End> {
        let index = self.state.cancel.load(Relaxed).checked_sub(1)?;
        End::ALL.get(usize::from(index)).copied()
    }

    /// Notes that the connection has outlived its first second, and wakes its task, once: waking takes the
    /// waker.
    pub(crate) fn set_lasting(&self) {
        if !self.state.lasts.swap(true, Relaxed) {
            self.state.waker.wake();
        }
    }

    /// Whether the connection has outlived its first second.
    pub(crate) fn lasts(&self) -> bool {
        self.state.lasts.load(Relaxed)
    }

    /// Has `waker` woken by the next [`Self::cancel`] or [`Self::set_lasting`]. Once for each is enough: a
    /// task keeps its waker.
    pub(crate) fn set_waker(&self, waker: &Waker) {
        self.state.waker.register(waker);
    }
}

impl Listener {
    /// What it is, without the port. Its word is the one of the access line.
    pub fn kind(self) -> ListenerKind {
        match self {
            Self::Sni => ListenerKind::Sni,
            Self::Tunnel => ListenerKind::Tunnel,
            Self::NodePort(_) => ListenerKind::NodePort,
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NodePort(port) => write!(f, "{}:{port}", self.kind()),
            Self::Sni | Self::Tunnel => self.kind().fmt(f),
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
