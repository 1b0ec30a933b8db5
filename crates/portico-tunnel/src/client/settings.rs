//! What the user of a client may set, with the reasons for the defaults.

use std::sync::Arc;
use std::time::Duration;

use super::address::GatewayAddress;
use crate::settings::STREAM_WINDOW;
use portico_dial::{ClientTls, Dialer, TokenFile};
use portico_net::MemoryBudget;

/// Most bytes held for receivers that do not take them: a fourth of what `deploy/agent.yaml` lets an agent have.
const MEMORY: usize = 64 << 20;

/// How a client reaches its gateways.
#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// The gateways, any of which will do. At least one.
    pub gateways: Vec<GatewayAddress>,
    /// The way there.
    pub dialer: Arc<Dialer>,
    /// Who we are and whom we trust; needed if a gateway is reached by TLS.
    pub tls: Option<Arc<ClientTls>>,
    /// The name gateways must have in their certificate, if not the one they are reached by.
    pub server_name: Option<Box<str>>,
    /// The bearer token sent with each request.
    pub token: Option<Arc<TokenFile>>,
    /// An authority of our cluster: what the gateway is asked about to learn whether it accepts our identity.
    pub authority: Box<str>,
    /// HTTP/2 connections kept up.
    pub tunnels: usize,
    /// The most HTTP/2 connections, where those above are full.
    pub max_tunnels: usize,
    /// Silence before a gateway is asked for a sign of life.
    pub ping_interval: Duration,
    /// Silence after that which makes a tunnel suspect: new streams go elsewhere.
    pub ping_timeout: Duration,
    /// How long a suspect tunnel may come back before its streams are reset.
    pub give_up_after: Duration,
    /// How long TLS and the first sign of life of a gateway may take.
    pub handshake_timeout: Duration,
    /// How long a new stream may wait for a tunnel and its answer.
    pub open_timeout: Duration,
    /// Bytes a gateway may send on one stream before they are taken.
    pub stream_window: u32,
    /// Most streams of one tunnel; the gateway may allow fewer.
    pub max_streams: u32,
    /// What all streams hold for receivers that do not take it.
    pub memory: MemoryBudget,
    /// End a stream that has moved no byte for so long. Not set: watches are silent for hours.
    pub stream_idle: Option<Duration>,
}

impl ClientSettings {
    /// Everything but the gateways and the way there as it should be.
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
            // With `max_streams` of each, room for the 10,000 connections that an agent carries by default, and then some.
            max_tunnels: 16,
            // A silent gateway is asked after one to two intervals, so it is suspect within three seconds. At rest that is a PING
            // every two seconds.
            ping_interval: Duration::from_secs(1),
            ping_timeout: Duration::from_millis(900),
            // A network that is gone for half a minute costs no stream: TCP delivers what was under way once it is back.
            give_up_after: Duration::from_secs(60),
            // Ten thousand agents that return at once keep one core of a gateway busy for seven seconds. Who gives up before has it do
            // the work again.
            handshake_timeout: Duration::from_secs(15),
            // A gateway tries three endpoints for a second each; the rest is for tunnels that are not up yet.
            open_timeout: Duration::from_secs(20),
            // As at the gateway: see `Settings`.
            stream_window: STREAM_WINDOW,
            max_streams: 1_000,
            memory: MemoryBudget::new(MEMORY),
            stream_idle: None,
        }
    }

    /// Tunnels kept up: at least one.
    pub(crate) fn asked_for(&self) -> usize {
        self.tunnels.max(1)
    }

    /// Enough for every stream to be stalled with a full window while one more still moves.
    pub(crate) fn connection_window(&self) -> u32 {
        crate::settings::connection_window(self.max_streams, self.stream_window)
    }
}
