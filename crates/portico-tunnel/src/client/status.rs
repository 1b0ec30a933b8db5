//! What can be seen from outside: every tunnel, every attempt to have one, and counters.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::pool::Pool;
use super::tunnel::{IdentityState, TunnelState};

/// One tunnel, or the attempt to have one.
#[derive(Debug, Clone)]
pub struct TunnelStatus {
    /// The gateway as configured; `None` while none is chosen.
    pub gateway: Option<String>,
    /// The address connected to: the gateway's, or that of the proxy.
    pub address: Option<SocketAddr>,
    /// `None`: being connected.
    pub state: Option<TunnelState>,
    /// Streams open on it.
    pub streams: u32,
    /// For how long it has been up.
    pub age: Option<Duration>,
    /// What the gateway thinks of us.
    pub identity: IdentityState,
    /// Why the last attempt failed, while there is no tunnel.
    pub error: Option<String>,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tunnels that came up.
    pub tunnels_opened: u64,
    /// Attempts that failed.
    pub tunnel_failures: u64,
    /// Tunnels that became suspect.
    pub tunnels_suspect: u64,
    /// Streams opened.
    pub streams_opened: u64,
    /// Requests a gateway refused.
    pub streams_refused: u64,
    /// Requests that had to be sent again on another tunnel.
    pub streams_retried: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) tunnels_opened: AtomicU64,
    pub(super) tunnel_failures: AtomicU64,
    pub(super) tunnels_suspect: AtomicU64,
    pub(super) streams_opened: AtomicU64,
    pub(super) streams_refused: AtomicU64,
    pub(super) streams_retried: AtomicU64,
}

impl Counters {
    pub(super) fn totals(&self) -> Totals {
        Totals {
            tunnels_opened: self.tunnels_opened.load(Relaxed),
            tunnel_failures: self.tunnel_failures.load(Relaxed),
            tunnels_suspect: self.tunnels_suspect.load(Relaxed),
            streams_opened: self.streams_opened.load(Relaxed),
            streams_refused: self.streams_refused.load(Relaxed),
            streams_retried: self.streams_retried.load(Relaxed),
        }
    }
}

impl Pool {
    pub(super) fn status(&self) -> Vec<TunnelStatus> {
        let up = self
            .tunnels()
            .iter()
            .map(|tunnel| TunnelStatus {
                gateway: Some(self.name_of(tunnel)),
                address: Some(tunnel.place.address),
                state: Some(tunnel.state()),
                streams: tunnel.streams(),
                age: Some(tunnel.since.elapsed()),
                identity: tunnel.identity(),
                error: None,
            })
            .collect::<Vec<_>>();
        let attempts = self.attempts().clone();
        let connecting =
            attempts.into_iter().filter(|attempt| attempt.connecting).map(|attempt| TunnelStatus {
                gateway: attempt.place.map(|place| self.gateway_name(place.gateway)),
                address: attempt.place.map(|place| place.address),
                state: None,
                streams: 0,
                age: None,
                identity: IdentityState::Unknown,
                error: attempt.error,
            });
        up.into_iter().chain(connecting).collect()
    }
}
