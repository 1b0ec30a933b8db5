//! The view from outside: every tunnel, every attempt to connect one, and counters.

use std::net::SocketAddr;
use std::time::Duration;

use super::endpoints::Endpoint;
use super::tunnel::{IdentityState, TunnelState};

/// One tunnel, or an attempt to connect one.
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
    /// How long it has been up.
    pub age: Option<Duration>,
    /// Whether the gateway accepts our identity.
    pub identity: IdentityState,
    /// Why the last attempt failed, while there is no tunnel, or none that is as it must be.
    pub error: Option<String>,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tunnels that came up.
    pub tunnels_opened: u64,
    /// Attempts that failed.
    pub tunnel_failures: u64,
    /// Times a tunnel became unresponsive.
    pub tunnels_unresponsive: u64,
    /// Streams opened.
    pub streams_opened: u64,
    /// Requests a gateway refused.
    pub streams_refused: u64,
    /// Requests that had to be sent again on another tunnel.
    pub streams_retried: u64,
}

/// An attempt to connect a tunnel.
#[derive(Debug, Clone)]
pub(super) struct AttemptStatus {
    /// Where it connects. A missing tunnel's attempt keeps it when it has failed.
    pub(super) endpoint: Option<Endpoint>,
    /// Why it failed.
    pub(super) error: Option<String>,
    /// Whether it is for the successor of a tunnel that is up. If not, a tunnel is missing.
    pub(super) replaces: bool,
}
