//! The settings of the data plane in one plain value. The command line parses it; nothing here reads flags.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use portico_api::policy::Budget;

use crate::auth::TokenSettings;
pub use portico_net::socket::Keepalive;

/// Settings of one gateway process.
#[derive(Debug, Clone)]
pub struct Config {
    /// Threads that move bytes, one a core: two on one core cost 10 %.
    pub workers: usize,
    /// Where ClientHellos are routed by server name; `None` is off.
    pub sni_listen: Option<SocketAddr>,
    /// Where CONNECT requests are served; `None` is off.
    pub tunnel_listen: Option<SocketAddr>,
    /// What is served there: certificates, plaintext, HTTP/2 limits. Its hello and stream idle timeouts are
    /// those of this struct.
    pub tunnel: portico_tunnel::Settings,
    /// Tokens of tunnel clients, beside or instead of certificates.
    pub tokens: TokenSettings,
    /// Whether CONNECT requests are served on the port of ClientHellos. Then
    /// [`tunnel_listen`](Self::tunnel_listen) is no listener of its own, and the PROXY protocol is that of
    /// `sni`.
    pub shared_port: bool,
    /// The address NodePort listeners bind.
    pub node_port_address: IpAddr,
    /// Other listeners of this process, each with its flag. A Service that asks for the port of one as
    /// NodePort gets an error that names the flag, and no endpoint leads there.
    pub other_listeners: Vec<(SocketAddr, &'static str)>,
    /// PROXY protocol on each kind of listener.
    pub proxy_protocol: ProxyProtocol,
    /// How long a client may take to say where it wants to go (PROXY header and ClientHello, or request
    /// head).
    pub hello_timeout: Duration,
    /// How long one attempt to connect to an endpoint may take.
    pub connect_timeout: Duration,
    /// Keep-alive of client connections.
    pub downstream_keepalive: Keepalive,
    /// Keep-alive of connections to endpoints.
    pub upstream_keepalive: Keepalive,
    /// When a connection that moves no byte is ended. `None` is never, because watches are silent for hours.
    pub idle: IdleTimeouts,
    /// How long connections to an endpoint that left its Service may stay; `None` is until they end by
    /// themselves.
    pub removed_endpoint_timeout: Option<Duration>,
    /// Bounds of a cluster that sets none itself; `None` fields are unbounded.
    pub budget: Budget,
    /// Connections, over all clusters, that have not yet sent where they want to go. If there are more, the
    /// oldest is closed.
    pub max_handshakes: u32,
    /// Tunnel connections that have shown no accepted identity. The oldest of more is closed.
    pub max_unauthenticated: u32,
    /// Token reviews under way at a time, over all clusters: each holds a socket and a TLS session.
    pub max_reviews: u32,
    /// Bytes that requests which wait for a token review may take together, those of one cluster a quarter.
    /// More are refused, unless the token has its grace.
    pub review_memory: usize,
    /// Memory of the process, of which the bounds here are parts. For people: nothing is held against it.
    pub memory_limit: usize,
    /// Bytes, of the process and of the kernel, that connections of all clusters may take together.
    pub connection_memory: usize,
    /// Descriptors that they may take.
    pub connection_descriptors: u32,
    /// Connections of one cluster that wait for an endpoint to accept: a black hole must not take all
    /// descriptors.
    pub max_connecting: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers: 1,
            sni_listen: None,
            tunnel_listen: None,
            tunnel: portico_tunnel::Settings::default(),
            tokens: TokenSettings::default(),
            shared_port: false,
            node_port_address: Ipv4Addr::UNSPECIFIED.into(),
            other_listeners: Vec::new(),
            proxy_protocol: ProxyProtocol::default(),
            hello_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(1),
            downstream_keepalive: Keepalive::default(),
            upstream_keepalive: Keepalive::default(),
            idle: IdleTimeouts::default(),
            removed_endpoint_timeout: None,
            budget: Budget::default(),
            max_handshakes: 8_192,
            max_unauthenticated: 8_192,
            max_reviews: 256,
            review_memory: 64 << 20,
            memory_limit: 16 << 30,
            connection_memory: 4 << 30,
            connection_descriptors: 1 << 20,
            max_connecting: 1_024,
        }
    }
}

/// Idle limits by path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IdleTimeouts {
    /// Connections routed by server name.
    pub sni: Option<Duration>,
    /// Connections routed by port.
    pub node_port: Option<Duration>,
    /// One CONNECT stream.
    pub tunnel_stream: Option<Duration>,
}

/// PROXY protocol of clients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProxyProtocol {
    /// On the SNI listener.
    pub sni: ProxyMode,
    /// On the tunnel listener.
    pub tunnel: ProxyMode,
    /// On every NodePort listener.
    pub node_port: ProxyMode,
    /// Hops whose headers are believed. A header from any other address is refused, never ignored: a client
    /// that may choose its own address passes every allow list.
    pub trusted: Vec<IpNet>,
    /// Whether connections without a header come from their clients themselves: whatever is in front keeps
    /// their addresses.
    pub direct: bool,
}

impl ProxyProtocol {
    /// Whether a header from `peer` is believed.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted.iter().any(|network| network.contains(&peer))
    }
}

/// Whether connections begin with a PROXY header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProxyMode {
    /// They do not; a header is taken for what it is, bytes of the client.
    #[default]
    Off,
    /// Trusted hops may send one; others must not.
    Optional,
    /// Every connection must, and only trusted hops may connect.
    Required,
}
