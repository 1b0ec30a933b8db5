//! The settings of a client, with the reasons for the defaults.

use std::sync::Arc;
use std::time::Duration;

use super::address::GatewayAddress;
use crate::settings::STREAM_WINDOW;
use portico_dial::{ClientTls, Dialer, TokenFile};
use portico_net::MemoryBudget;

/// The most bytes held for receivers that do not read: a fourth of the memory limit in `deploy/agent.yaml`.
const MEMORY: usize = 64 << 20;

/// How a client reaches its gateways.
#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// The gateways, of which any will do. At least one.
    pub gateways: Vec<GatewayAddress>,
    /// Connects to them.
    pub dialer: Arc<Dialer>,
    /// Our certificate and the CAs we trust. Needed for gateways with
    /// [`Security::Tls`](super::Security::Tls).
    pub tls: Option<Arc<ClientTls>>,
    /// The name that gateways must have in their certificate, if not the host of their address.
    pub server_name: Option<Box<str>>,
    /// The bearer token sent with each request.
    pub token: Option<Arc<TokenFile>>,
    /// An authority of our cluster. `OPTIONS *` on it tells whether the gateway accepts our identity.
    pub authority: Box<str>,
    /// HTTP/2 connections that are kept up.
    pub tunnels: usize,
    /// The most HTTP/2 connections, if those above are full.
    pub max_tunnels: usize,
    /// How long a gateway may be silent before it gets a PING.
    pub ping_interval: Duration,
    /// How long it may take to answer before the tunnel is unresponsive: new streams go elsewhere.
    pub ping_timeout: Duration,
    /// How long an unresponsive tunnel may take to come back before its streams are reset.
    pub give_up_after: Duration,
    /// How long TLS and the answer to the first PING may take, together.
    pub handshake_timeout: Duration,
    /// How long a new stream may wait for a tunnel and for the answer of the gateway.
    pub open_timeout: Duration,
    /// Bytes that a gateway may send on one stream before they are read.
    pub stream_window: u32,
    /// The most streams of one tunnel. The gateway may allow fewer.
    pub max_streams: u32,
    /// The memory budget of bytes that wait for receivers.
    pub memory: MemoryBudget,
    /// Ends a stream that has moved no byte for this long. Not set by default: watches are silent for hours.
    pub stream_idle: Option<Duration>,
}

impl ClientSettings {
    /// Returns the defaults.
    #[must_use]
    pub fn new(gateways: Vec<GatewayAddress>, dialer: Arc<Dialer>, authority: Box<str>) -> Self {
        Self {
            gateways,
            dialer,
            tls: None,
            server_name: None,
            token: None,
            authority,
            // One may fail, drain or freeze while the other serves.
            tunnels: 2,
            // With `max_streams` each there is room for the 10,000 connections of an agent, which is its
            // default.
            max_tunnels: 16,
            // A silent gateway gets a PING after one to two intervals, so it is unresponsive within three
            // seconds. At rest that is a PING every two seconds.
            ping_interval: Duration::from_secs(1),
            ping_timeout: Duration::from_millis(900),
            // A network that is gone for half a minute costs no stream. TCP delivers the bytes in flight once
            // it is back.
            give_up_after: Duration::from_secs(60),
            // Ten thousand agents that return at once keep one core of a gateway busy for seven seconds. An
            // agent that gives up earlier makes it do the work again.
            handshake_timeout: Duration::from_secs(15),
            // A gateway reviews a token in 6 s and tries three endpoints for a second each: two can be asked.
            open_timeout: Duration::from_secs(20),
            // As at the gateway: see `Settings`.
            stream_window: STREAM_WINDOW,
            max_streams: 1_000,
            memory: MemoryBudget::new(MEMORY),
            stream_idle: None,
        }
    }

    /// The tunnels that are kept up: at least one.
    pub(super) fn wanted(&self) -> usize {
        self.tunnels.max(1)
    }

    /// Enough for every stream to be stalled with a full window while one more still moves.
    pub(super) fn connection_window(&self) -> u32 {
        crate::settings::connection_window(self.max_streams, self.stream_window)
    }
}
