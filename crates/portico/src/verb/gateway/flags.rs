//! The flags of `portico gateway`, and what they mean for the data plane.
//!
//! Each group stands under a heading of its own in `--help`. Clap checks each flag alone; [`Flags::config`]
//! checks them against each other, because most mistakes are two flags that do not go together.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use portico_api::annotations::EXPOSE;
use portico_api::policy::{Budget, Percent};
use portico_api::seed::Timeouts;
use portico_gateway::{
    AccessFormat, Config, IdleTimeouts, Keepalive, ProxyMode, ProxyProtocol, StaticTokens, TokenSettings,
    TokensError,
};
use portico_net::MemoryBudget;
use portico_routes::endpoint_rules::EndpointRules;
use portico_source::kubernetes::ClustersFrom;
use portico_sync::SourceSettings;
use portico_tunnel::{ClientCaFile, Settings as TunnelSettings, Tls, TlsError, TlsFiles};
use rustix::process::{Resource, getrlimit};
use thiserror::Error;

use super::capacity::Capacity;
use crate::args::{
    Limit, Listen, ListenerKind, ProxySetting, annotation_key, duration, network, positive_duration, size,
};
use crate::memory_limit::MemoryLimit;

// `portico gateway`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(crate) source: SourceFlags,
    #[command(flatten)]
    pub(crate) listeners: ListenerFlags,
    #[command(flatten)]
    pub(crate) tunnel: TunnelFlags,
    #[command(flatten)]
    pub(crate) client: ClientAddressFlags,
    #[command(flatten)]
    pub(crate) budgets: BudgetFlags,
    #[command(flatten)]
    pub(crate) timeouts: TimeoutFlags,
    #[command(flatten)]
    pub(crate) lifecycle: LifecycleFlags,
    #[command(flatten)]
    pub(crate) records: RecordFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Where objects come from")]
pub(crate) struct SourceFlags {
    /// Directory of manifests to read and watch; without it, the Kubernetes API
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    pub(crate) manifests: Option<PathBuf>,
    /// Where NodePorts that were drawn and the strategies of clusters are remembered; one gateway a folder
    /// [default: DIR/.portico]
    #[arg(long, value_name = "FOLDER", requires = "manifests")]
    pub(crate) state_dir: Option<PathBuf>,
    /// How to reach the Kubernetes API, also by its proxy-url or HTTPS_PROXY; without it, as a pod of that
    /// cluster
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Serve only the Services of this namespace
    #[arg(long, value_name = "NS")]
    pub(crate) namespace: Option<String>,
    /// Where it comes from what a cluster allows: exposed-clusters (written by portico front), clusters
    /// (KKP's own, with their secrets), services (there are no clusters). With auto, the first that is served
    #[arg(long, value_name = "SOURCE", default_value = "auto", conflicts_with = "manifests")]
    pub(crate) clusters_from: ClustersFrom,
    /// The annotation by which a Service asks to be exposed; may be repeated: a Service is exposed in every
    /// way that those it has ask for
    #[arg(long, value_name = "KEY", default_value = EXPOSE, value_parser = annotation_key)]
    pub(crate) expose_annotation: Vec<String>,
    /// External address of a seed node, where clusters are reached if the Seed disables its nodeport-proxy;
    /// may be repeated
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    pub(crate) node_address: Vec<IpAddr>,
    /// The Seed that counts, where there are several; without it, each Cluster belongs to the one that lists
    /// its datacenter
    #[arg(long, value_name = "NAME")]
    pub(crate) seed: Option<String>,
    /// Networks that endpoints of Services must be in, such as the seed's pod network; without it, any but
    /// those that no endpoint has (link-local, multicast, loopback unless from --manifests)
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = network)]
    pub(crate) endpoint_networks: Vec<IpNet>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Listeners")]
pub(crate) struct ListenerFlags {
    /// Where clients are routed by the server name of their ClientHello; off for none. May be the address of
    /// --tunnel-listen: then one port serves both
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:6443")]
    pub(crate) sni_listen: Listen,
    /// Where CONNECT requests of node agents are served; off for none
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8088")]
    pub(crate) tunnel_listen: Listen,
    /// The address NodePort listeners bind; they open and close with the Services that need them
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub(crate) node_port_address: IpAddr,
    /// Where /healthz, /readyz, /metrics, /routes and /connections are served; off for none
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8002")]
    pub(crate) admin_listen: Listen,
    /// Threads that move bytes [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) workers: Option<u16>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Tunnel listener")]
pub(crate) struct TunnelFlags {
    /// Certificate chain of the tunnel listener, PEM, leaf first; read again when it changes
    #[arg(long, value_name = "FILE", requires = "tunnel_tls_key")]
    pub(crate) tunnel_tls_cert: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tunnel_tls_cert")]
    pub(crate) tunnel_tls_key: Option<PathBuf>,
    /// CA of client certificates, PEM; each certificate opens the authorities of the one cluster it names.
    /// CLUSTER=FILE binds the CA to clusters (abc, prod-*, namespace:mail); may be repeated. Like all that
    /// asks for an identity it binds only clients that come by TLS
    #[arg(long, value_name = "[CLUSTER=]FILE", requires = "tunnel_tls_cert")]
    pub(crate) tunnel_client_ca: Vec<ClientCaFile>,
    /// What these CAs have revoked: their revocation lists (CRL), PEM; takes effect on open tunnels at once
    #[arg(long, value_name = "FILE", requires = "tunnel_client_ca")]
    pub(crate) tunnel_client_crl: Option<PathBuf>,
    /// Bearer tokens of clients, a line TOKEN,CLUSTER each; read again when it changes
    #[arg(long, value_name = "FILE", requires = "tunnel_tls_cert")]
    pub(crate) tunnel_tokens: Option<PathBuf>,
    /// Have bearer tokens reviewed by the API server of the cluster they are for; needs the annotation
    /// portico.k8c.io/api-server-ca on the Cluster or the Service, and no rights for the gateway
    #[arg(long, requires = "tunnel_tls_cert")]
    pub(crate) tunnel_token_review: bool,
    /// How long such a review holds; a token in use is reviewed again when it is over
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_duration)]
    pub(crate) tunnel_token_review_interval: Duration,
    /// Serve CONNECT without TLS: every client of the port reaches every authority, whatever identity clients
    /// under TLS are asked for
    #[arg(long)]
    pub(crate) tunnel_plaintext: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Client address")]
pub(crate) struct ClientAddressFlags {
    /// PROXY protocol by listener (sni, tunnel, node-port): off, optional or required; may be repeated
    #[arg(long, value_name = "LISTENER=MODE", requires = "trusted_proxy")]
    pub(crate) proxy_protocol: Vec<ProxySetting>,
    /// Network whose PROXY headers are believed, such as that of the load balancer; may be repeated
    #[arg(long, value_name = "CIDR", requires = "proxy_protocol", value_delimiter = ',')]
    pub(crate) trusted_proxy: Vec<IpNet>,
    /// What is in front keeps the addresses of clients, so the Seed's sourceRanges hold here too; not needed
    /// behind a Service with externalTrafficPolicy: Local
    #[arg(long)]
    pub(crate) direct_clients: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Budgets")]
pub(crate) struct BudgetFlags {
    /// Connections and tunnel streams a cluster may have open, unless it sets its own [default: no limit]
    #[arg(long, value_name = "N")]
    pub(crate) max_connections_per_cluster: Option<u32>,
    /// New connections and tunnel streams a second, unless a cluster sets its own [default: no limit]
    #[arg(long, value_name = "N")]
    pub(crate) max_connection_rate_per_cluster: Option<u32>,
    /// What one cluster may take of the memory and the descriptors that all others leave, in percent, unless
    /// it sets its own; 100 is no bound
    #[arg(long, value_name = "PERCENT", default_value_t = Percent::HALF)]
    pub(crate) fair_share: Percent,
    /// Memory of this process and of its sockets. Whatever it holds for clients is bounded by parts of it
    /// [default: the limit of its control group, else a fourth of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory_limit: Option<usize>,
    /// Connections, of all clusters, that have not yet said where they want to go; and as many tunnel
    /// connections that have shown no accepted identity. The oldest of more is closed [default: as many as
    /// --memory-limit and the limit of descriptors allow]
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    pub(crate) max_handshakes: Option<u32>,
    /// Connections of one cluster that wait for an endpoint to accept
    #[arg(long, value_name = "N", default_value_t = Config::default().max_connecting)]
    #[arg(value_parser = at_least_one())]
    pub(crate) max_connecting_per_cluster: u32,
    /// Bytes that all tunnel streams hold for receivers that do not take them; over it streams are reset,
    /// the longest stopped first [default: a fourth of --memory-limit]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_tunnel_held_bytes: Option<usize>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Timeouts and keep-alive")]
pub(crate) struct TimeoutFlags {
    /// How long a client may take to say where it wants to go
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = positive_duration)]
    pub(crate) hello_timeout: Duration,
    /// How long one attempt to connect to an endpoint may take; at most three are made
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = positive_duration)]
    pub(crate) connect_timeout: Duration,
    /// End a connection by server name that moved no byte for so long [default: the Seed's, else off]
    #[arg(long, value_name = "TIME")]
    pub(crate) sni_idle_timeout: Option<Limit>,
    /// The same for connections by port
    #[arg(long, value_name = "TIME", default_value = "off")]
    pub(crate) node_port_idle_timeout: Limit,
    /// The same for one CONNECT stream [default: the Seed's, else off]
    #[arg(long, value_name = "TIME")]
    pub(crate) tunnel_stream_idle_timeout: Option<Limit>,
    /// End a tunnel connection that had no stream for so long [default: the Seed's, else off]
    #[arg(long, value_name = "TIME")]
    pub(crate) tunnel_connection_idle_timeout: Option<Limit>,
    /// End connections to an endpoint this long after it left its Service
    #[arg(long, value_name = "TIME", default_value = "off")]
    pub(crate) departed_timeout: Limit,
    /// TCP keep-alive of clients: silence before the first probe [default: the Seed's, else 60s]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    pub(crate) downstream_keepalive_time: Option<Duration>,
    /// TCP keep-alive of clients: time between probes [default: the Seed's, else 15s]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    pub(crate) downstream_keepalive_interval: Option<Duration>,
    /// TCP keep-alive of clients: unanswered probes before giving up [default: the Seed's, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=127))]
    pub(crate) downstream_keepalive_probes: Option<u32>,
    /// TCP keep-alive of endpoints: silence before the first probe [default: the Seed's, else 60s]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    pub(crate) upstream_keepalive_time: Option<Duration>,
    /// TCP keep-alive of endpoints: time between probes [default: the Seed's, else 15s]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    pub(crate) upstream_keepalive_interval: Option<Duration>,
    /// TCP keep-alive of endpoints: unanswered probes before giving up [default: the Seed's, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=127))]
    pub(crate) upstream_keepalive_probes: Option<u32>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Stop and upgrade")]
pub(crate) struct LifecycleFlags {
    /// After SIGTERM: how long open connections may go on; an API server ends its watches within an hour
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub(crate) drain_timeout: Duration,
    /// After SIGTERM: how long to accept on while /readyz already says no, for load balancers to notice
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub(crate) drain_delay: Duration,
    /// Take the listening sockets over from the gateway that offers them at this path, then offer them there
    #[arg(long, value_name = "SOCKET")]
    pub(crate) take_over: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Records")]
pub(crate) struct RecordFlags {
    /// One line a connection on standard output
    #[arg(long, value_name = "FORMAT", default_value = "off")]
    pub(crate) access_log: AccessLogFormat,
}

/// How access lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccessLogFormat {
    /// None.
    Off,
    /// key=value pairs.
    Text,
    /// One JSON object a line.
    Json,
}

impl From<AccessLogFormat> for AccessFormat {
    fn from(format: AccessLogFormat) -> Self {
        match format {
            AccessLogFormat::Off => Self::Off,
            AccessLogFormat::Text => Self::Text,
            AccessLogFormat::Json => Self::Json,
        }
    }
}

/// Flags that do not go together.
#[derive(Debug, Error)]
pub(crate) enum FlagError {
    /// Two listeners want the same port of the same address.
    #[error("{first} and {second} both want {address}; give one of them another port, or off")]
    SameAddress { first: &'static str, second: &'static str, address: SocketAddr },
    /// Something was set for a listener that is off.
    #[error(
        "{flag} says how the tunnel listener serves, but --tunnel-listen is off; give it an address, or \
         leave {flag} out"
    )]
    TunnelIsOff { flag: &'static str },
    /// One listener got two modes.
    #[error("--proxy-protocol {0} is given twice; give each listener one mode")]
    ProxyProtocolTwice(ListenerKind),
    /// A network that trusts every address would let every client choose its own.
    #[error(
        "--trusted-proxy {0} lets every client choose its address; give the networks of your load balancers"
    )]
    EverybodyTrusted(IpNet),
    /// The certificate, key, CA or revocation list cannot be used.
    #[error("the tunnel's certificate cannot be used: {0}")]
    Tls(#[from] TlsError),
    /// The file of tokens cannot be used.
    #[error("the tunnel's tokens cannot be used: {0}")]
    Tokens(#[from] TokensError),
    /// One port cannot expect a PROXY header and not expect it.
    #[error(
        "--sni-listen and --tunnel-listen share {0}, but --proxy-protocol differs for sni and tunnel; give \
         both the same mode"
    )]
    ProxyProtocolDiffers(SocketAddr),
}

impl Flags {
    /// Whether the flags go together, before anything is started.
    pub(crate) fn check(&self) -> Result<(), FlagError> {
        self.config(&Timeouts::default()).map(drop)
    }

    /// What the flags mean for the source of objects.
    pub(crate) fn source_settings(&self) -> SourceSettings {
        let (from, listeners) = (&self.source, &self.listeners);
        let own = [listeners.sni_listen, listeners.tunnel_listen, listeners.admin_listen];
        SourceSettings {
            manifests: from.manifests.clone(),
            state_dir: from.state_dir.clone(),
            kubeconfig: from.kubeconfig.clone(),
            namespace: from.namespace.clone(),
            clusters_from: from.clusters_from,
            expose_annotations: from.expose_annotation.iter().map(String::as_str).collect(),
            endpoints: EndpointRules {
                loopback: from.manifests.is_some(),
                networks: from.endpoint_networks.clone().into(),
            },
            seed: from.seed.clone(),
            masked_clients: !self.client.direct_clients && self.client.trusted_proxy.is_empty(),
            own_addresses: own_addresses(own.iter().filter_map(|listen| listen.0)),
            node_addresses: from.node_address.clone(),
            reserved_ports: own.iter().filter_map(|listen| listen.0.as_ref().map(SocketAddr::port)).collect(),
            // Port 0 is chosen by the system, too late to be part of an address.
            sni_port: listeners.sni_listen.0.map(|address| address.port()).filter(|&port| port != 0),
        }
    }

    /// What the flags mean for the data plane; where a flag is not given, `seed` decides, as its
    /// `connectionSettings` say. Reads the certificate files.
    pub(crate) fn config(&self, seed: &Timeouts) -> Result<Config, FlagError> {
        self.check_addresses()?;
        let flags = &self.timeouts;
        let admin = self.listeners.admin_listen.0;
        let memory = MemoryLimit::find(self.budgets.memory_limit);
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let capacity = Capacity::of(memory.bytes, descriptors);
        let tunnel = self.tunnel_settings(seed, capacity)?;
        let tunnel_is_on = tunnel.is_some();
        Ok(Config {
            workers: self.listeners.workers.map_or_else(cores, usize::from),
            sni_listen: self.listeners.sni_listen.0,
            tunnel_listen: tunnel.as_ref().and(self.listeners.tunnel_listen.0),
            tokens: if tunnel.is_some() { self.tunnel.tokens()? } else { TokenSettings::default() },
            shared_port: tunnel.is_some() && self.shared_address().is_some(),
            tunnel: tunnel.unwrap_or_default(),
            node_port_address: self.listeners.node_port_address,
            other_listeners: admin.map(|address| (address, "--admin-listen")).into_iter().collect(),
            proxy_protocol: self.client.proxy_protocol(self.shared_address().filter(|_| tunnel_is_on))?,
            hello_timeout: flags.hello_timeout,
            connect_timeout: flags.connect_timeout,
            downstream_keepalive: keepalive(
                flags.downstream_keepalive_time,
                flags.downstream_keepalive_interval,
                flags.downstream_keepalive_probes,
                seed.downstream_keepalive.unwrap_or_default(),
            ),
            upstream_keepalive: keepalive(
                flags.upstream_keepalive_time,
                flags.upstream_keepalive_interval,
                flags.upstream_keepalive_probes,
                seed.upstream_keepalive.unwrap_or_default(),
            ),
            idle: IdleTimeouts {
                sni: limit(flags.sni_idle_timeout, seed.sni_idle),
                node_port: flags.node_port_idle_timeout.0,
                tunnel_stream: limit(flags.tunnel_stream_idle_timeout, seed.tunnel_stream_idle),
            },
            removed_endpoint_timeout: flags.departed_timeout.0,
            budget: Budget {
                max_connections: self.budgets.max_connections_per_cluster,
                max_connections_per_second: self.budgets.max_connection_rate_per_cluster,
                fair_share: Some(self.budgets.fair_share),
            },
            max_handshakes: self.budgets.max_handshakes.unwrap_or(capacity.handshakes),
            max_unauthenticated: self.budgets.max_handshakes.unwrap_or(capacity.unauthenticated),
            max_reviews: capacity.reviews,
            review_memory: capacity.review_memory,
            connection_memory: capacity.connection_memory,
            connection_descriptors: capacity.connection_descriptors,
            memory_limit: memory.bytes,
            max_connecting: self.budgets.max_connecting_per_cluster,
        })
    }

    /// Whether the tunnel is off only because no flag says how to serve it.
    pub(crate) fn tunnel_is_silent(&self) -> bool {
        let said = self.tunnel.tunnel_plaintext || self.tunnel.tunnel_tls_cert.is_some();
        self.listeners.tunnel_listen.0.is_some() && !said
    }

    /// Whether clients may leave out the identity that others are asked for.
    pub(crate) fn plaintext_passes_identity(&self) -> bool {
        self.tunnel.tunnel_plaintext && self.tunnel.asks_for_identity()
    }

    /// The flag by which the tunnel serves every client that reaches it, if one does.
    pub(crate) fn tunnel_is_open_to_anyone(&self) -> Option<&'static str> {
        let on = self.listeners.tunnel_listen.0.is_some();
        match (self.tunnel.tunnel_plaintext, self.tunnel.tunnel_tls_cert.is_some()) {
            (true, _) if on => Some("--tunnel-plaintext"),
            (_, true) if on && !self.tunnel.asks_for_identity() => Some("--tunnel-tls-cert"),
            _ => None,
        }
    }

    /// The address that clients by server name and tunnels share, if they do.
    fn shared_address(&self) -> Option<SocketAddr> {
        let sni = self.listeners.sni_listen.0.filter(|address| address.port() != 0);
        sni.filter(|_| sni == self.listeners.tunnel_listen.0)
    }

    fn check_addresses(&self) -> Result<(), FlagError> {
        let listeners = [
            ("--sni-listen", self.listeners.sni_listen.0),
            ("--tunnel-listen", self.listeners.tunnel_listen.0),
            ("--admin-listen", self.listeners.admin_listen.0),
        ];
        for (index, &(first, address)) in listeners.iter().enumerate() {
            let Some(address) = address.filter(|address| address.port() != 0) else { continue };
            if let Some((second, _)) =
                listeners[index + 1..].iter().find(|(_, other)| *other == Some(address))
                && (first, *second) != ("--sni-listen", "--tunnel-listen")
            {
                return Err(FlagError::SameAddress { first, second, address });
            }
        }
        Ok(())
    }

    /// `None` if the tunnel is off, by its flag or because no flag says how to serve it.
    fn tunnel_settings(
        &self,
        seed: &Timeouts,
        capacity: Capacity,
    ) -> Result<Option<TunnelSettings>, FlagError> {
        let flags = &self.tunnel;
        if self.listeners.tunnel_listen.0.is_none() {
            return match (flags.tunnel_tls_cert.is_some(), flags.tunnel_plaintext) {
                (true, _) => Err(FlagError::TunnelIsOff { flag: "--tunnel-tls-cert" }),
                (_, true) => Err(FlagError::TunnelIsOff { flag: "--tunnel-plaintext" }),
                _ => Ok(None),
            };
        }
        let files =
            flags.tunnel_tls_cert.clone().zip(flags.tunnel_tls_key.clone()).map(|(certificate, key)| {
                TlsFiles {
                    certificate,
                    key,
                    client_ca: flags.tunnel_client_ca.clone(),
                    client_crl: flags.tunnel_client_crl.clone(),
                }
            });
        let tls = files.map(Tls::load).transpose()?.map(Arc::new);
        if tls.is_none() && !flags.tunnel_plaintext {
            return Ok(None);
        }
        Ok(Some(TunnelSettings {
            tls,
            plaintext: flags.tunnel_plaintext,
            connection_idle: limit(self.timeouts.tunnel_connection_idle_timeout, seed.tunnel_connection_idle),
            memory: MemoryBudget::new(self.budgets.max_tunnel_held_bytes.unwrap_or(capacity.tunnel_held)),
            ..TunnelSettings::default()
        }))
    }
}

/// The addresses of this machine by which others reach it: those that it would use itself, and those it is
/// told to listen on.
fn own_addresses(listeners: impl Iterator<Item = SocketAddr>) -> Vec<IpAddr> {
    let any: [(IpAddr, IpAddr); 2] = [
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()),
    ];
    // Connecting a UDP socket sends nothing: it chooses a route, and with it an address.
    let routed = any.into_iter().filter_map(|(from, to)| {
        let socket = UdpSocket::bind((from, 0)).ok()?;
        socket.connect((to, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    });
    let named = listeners.map(|listener| listener.ip()).filter(|ip| !ip.is_unspecified());
    let all: BTreeSet<IpAddr> = routed.chain(named).map(|ip| ip.to_canonical()).collect();
    all.into_iter().collect()
}

impl TunnelFlags {
    fn asks_for_identity(&self) -> bool {
        !self.tunnel_client_ca.is_empty() || self.tunnel_tokens.is_some() || self.tunnel_token_review
    }

    fn tokens(&self) -> Result<TokenSettings, TokensError> {
        let file = self.tunnel_tokens.clone().map(StaticTokens::load).transpose()?.map(Arc::new);
        Ok(TokenSettings {
            file,
            review: self.tunnel_token_review.then_some(self.tunnel_token_review_interval),
        })
    }
}

impl ClientAddressFlags {
    /// `shared` is the address that two listeners share.
    fn proxy_protocol(&self, shared: Option<SocketAddr>) -> Result<ProxyProtocol, FlagError> {
        if let Some(&everybody) = self.trusted_proxy.iter().find(|network| network.prefix_len() == 0) {
            return Err(FlagError::EverybodyTrusted(everybody));
        }
        let mut seen: Vec<ListenerKind> = Vec::new();
        let mut protocol = ProxyProtocol {
            trusted: self.trusted_proxy.clone(),
            direct: self.direct_clients,
            ..ProxyProtocol::default()
        };
        for &ProxySetting { listener, mode } in &self.proxy_protocol {
            if seen.contains(&listener) {
                return Err(FlagError::ProxyProtocolTwice(listener));
            }
            seen.push(listener);
            let field: &mut ProxyMode = match listener {
                ListenerKind::Sni => &mut protocol.sni,
                ListenerKind::Tunnel => &mut protocol.tunnel,
                ListenerKind::NodePort => &mut protocol.node_port,
            };
            *field = mode;
        }
        if let Some(address) = shared.filter(|_| protocol.sni != protocol.tunnel) {
            return Err(FlagError::ProxyProtocolDiffers(address));
        }
        Ok(protocol)
    }
}

/// An idle limit from its flag, else from the seed.
fn limit(flag: Option<Limit>, seed: Option<Duration>) -> Option<Duration> {
    flag.map_or(seed, |limit| limit.0)
}

/// A keep-alive whose values come from the flags, else from the seed, else from the gateway's defaults.
fn keepalive(
    time: Option<Duration>,
    interval: Option<Duration>,
    probes: Option<u32>,
    seed: portico_api::seed::Keepalive,
) -> Keepalive {
    let default = Keepalive::default();
    Keepalive {
        time: time.or(seed.time).unwrap_or(default.time),
        interval: interval.or(seed.interval).unwrap_or(default.interval),
        probes: probes.or(seed.probes).unwrap_or(default.probes),
    }
}

/// A bound of zero would refuse every client.
fn at_least_one() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// One worker a core: more would only take turns.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn flags(arguments: &[&str]) -> Flags {
        Line::try_parse_from([&["gateway"], arguments].concat()).unwrap().flags
    }

    fn error(arguments: &[&str]) -> String {
        flags(arguments).check().unwrap_err().to_string()
    }

    #[test]
    fn addresses_name_the_port_of_the_listener_if_it_is_known() {
        for (listen, port) in [("127.0.0.1:27402", Some(27_402)), ("off", None), ("127.0.0.1:0", None)] {
            assert_eq!(flags(&["--sni-listen", listen]).source_settings().sni_port, port, "{listen}");
        }
    }

    #[test]
    fn defaults_of_the_flags_are_those_of_the_gateway() {
        let config = flags(&[]).config(&Timeouts::default()).unwrap();
        let default = Config::default();
        assert_eq!(config.hello_timeout, default.hello_timeout);
        assert_eq!(config.connect_timeout, default.connect_timeout);
        assert_eq!(config.downstream_keepalive, default.downstream_keepalive);
        assert_eq!(config.upstream_keepalive, default.upstream_keepalive);
        assert_eq!(config.idle, default.idle);
        assert_eq!(config.sni_listen, Some("0.0.0.0:6443".parse().unwrap()));
    }

    #[test]
    fn bounds_follow_from_the_memory_limit_where_they_are_not_given() {
        let tunnel = ["--tunnel-plaintext", "--memory-limit", "256Mi"];
        let config = flags(&tunnel).config(&Timeouts::default()).unwrap();
        assert_eq!((config.memory_limit, config.tunnel.memory.limit()), (256 << 20, 64 << 20));
        assert_eq!(config.review_memory, 8 << 20);
        assert!(config.max_handshakes <= 1_024 && config.max_unauthenticated <= 256);
        let given = ["--max-handshakes", "7", "--max-tunnel-held-bytes", "8Mi"];
        let config = flags(&[&tunnel[..], &given].concat()).config(&Timeouts::default()).unwrap();
        assert_eq!((config.max_handshakes, config.max_unauthenticated), (7, 7));
        assert_eq!(config.tunnel.memory.limit(), 8 << 20);
    }

    #[test]
    fn what_the_seed_says_holds_where_no_flag_is_given() {
        let seed = Timeouts {
            sni_idle: Some(Duration::from_secs(600)),
            downstream_keepalive: Some(portico_api::seed::Keepalive {
                time: Some(Duration::from_secs(30)),
                ..Default::default()
            }),
            ..Timeouts::default()
        };
        let config = flags(&[]).config(&seed).unwrap();
        assert_eq!(config.idle.sni, seed.sni_idle);
        assert_eq!(config.downstream_keepalive.time, Duration::from_secs(30));
        assert_eq!(config.downstream_keepalive.interval, Keepalive::default().interval);
        let arguments = ["--sni-idle-timeout", "off", "--downstream-keepalive-time", "10s"];
        let config = flags(&arguments).config(&seed).unwrap();
        assert_eq!(config.idle.sni, None);
        assert_eq!(config.downstream_keepalive.time, Duration::from_secs(10));
    }

    #[test]
    fn a_tunnel_nobody_said_how_to_serve_is_off() {
        assert_eq!(flags(&[]).config(&Timeouts::default()).unwrap().tunnel_listen, None);
        let config = flags(&["--tunnel-plaintext"]).config(&Timeouts::default()).unwrap();
        assert_eq!(config.tunnel_listen, Some("0.0.0.0:8088".parse().unwrap()));
    }

    #[test]
    fn a_tunnel_that_is_open_to_anyone_is_noticed() {
        let tls = ["--tunnel-tls-cert", "c", "--tunnel-tls-key", "k"];
        let with = |more: &[&str]| flags(&[&tls[..], more].concat());
        for identity in
            [&["--tunnel-client-ca", "a"][..], &["--tunnel-tokens", "t"], &["--tunnel-token-review"]]
        {
            assert!(!with(identity).plaintext_passes_identity());
            assert_eq!(with(identity).tunnel_is_open_to_anyone(), None);
            let plain = with(&[identity, &["--tunnel-plaintext"]].concat());
            assert!(plain.plaintext_passes_identity());
            assert_eq!(plain.tunnel_is_open_to_anyone(), Some("--tunnel-plaintext"));
        }
        assert_eq!(with(&[]).tunnel_is_open_to_anyone(), Some("--tunnel-tls-cert"));
        assert!(!flags(&["--tunnel-plaintext"]).plaintext_passes_identity());
        assert_eq!(flags(&["--tunnel-plaintext"]).tunnel_is_open_to_anyone(), Some("--tunnel-plaintext"));
        assert_eq!(flags(&[]).tunnel_is_open_to_anyone(), None);
    }

    #[test]
    fn server_names_and_tunnels_may_share_an_address() {
        let one = ["--sni-listen", "127.0.0.1:443", "--tunnel-listen", "127.0.0.1:443"];
        let config = |more: &[&str]| flags(&[&one[..], more].concat()).config(&Timeouts::default());
        assert!(config(&["--tunnel-plaintext"]).unwrap().shared_port);
        assert!(!config(&[]).unwrap().shared_port, "the tunnel is off");
        assert!(!flags(&["--tunnel-plaintext"]).config(&Timeouts::default()).unwrap().shared_port);
        let differs =
            ["--tunnel-plaintext", "--proxy-protocol", "sni=required", "--trusted-proxy", "10.0.0.0/8"];
        let error = config(&differs).unwrap_err().to_string();
        assert!(
            error.contains("share 127.0.0.1:443, but --proxy-protocol differs for sni and tunnel"),
            "{error}"
        );
        let same = [&differs[..], &["--proxy-protocol", "tunnel=required"]].concat();
        assert!(config(&same).unwrap().shared_port);
    }

    #[test]
    fn flags_that_contradict_each_other_are_refused_with_their_names() {
        let same = error(&["--sni-listen", "127.0.0.1:8002"]);
        assert!(same.contains("--sni-listen and --admin-listen both want 127.0.0.1:8002"), "{same}");
        let off = error(&["--tunnel-listen", "off", "--tunnel-plaintext"]);
        assert!(off.contains("--tunnel-plaintext") && off.contains("--tunnel-listen is off"), "{off}");
        let twice = error(&[
            "--proxy-protocol",
            "sni=off",
            "--proxy-protocol",
            "sni=required",
            "--trusted-proxy",
            "10.0.0.0/8",
        ]);
        assert!(twice.contains("--proxy-protocol sni is given twice"), "{twice}");
        let everybody = error(&["--proxy-protocol", "sni=optional", "--trusted-proxy", "0.0.0.0/0"]);
        assert!(everybody.contains("--trusted-proxy 0.0.0.0/0"), "{everybody}");
    }

    #[test]
    fn a_flag_without_the_one_it_needs_is_wrong_usage() {
        for arguments in [
            &["--tunnel-tls-cert", "c"][..],
            &["--tunnel-client-ca", "c", "--tunnel-plaintext"],
            &["--tunnel-client-crl", "c", "--tunnel-tls-cert", "c", "--tunnel-tls-key", "k"],
            &["--tunnel-tokens", "t", "--tunnel-plaintext"],
            &["--tunnel-token-review", "--tunnel-plaintext"],
            &["--proxy-protocol", "sni=required"],
            &["--trusted-proxy", "10.0.0.0/8"],
            &["--manifests", "m", "--kubeconfig", "k"],
            &["--workers", "0"],
            &["--hello-timeout", "0s"],
            &["--max-handshakes", "0"],
            &["--max-connecting-per-cluster", "0"],
            &["--fair-share", "0"],
            &["--fair-share", "101"],
            &["--expose-annotation", ""],
        ] {
            let line = Line::try_parse_from([&["gateway"], arguments].concat());
            assert!(line.is_err(), "{arguments:?}");
        }
    }
}
