//! `portico konnectivity agent`: its flags, and what they mean together.
//!
//! Names, meanings and defaults are those of the upstream proxy-agent; what is Portico's own stands under
//! headings of its own. [`control`] is the order at start and end, [`pages`] and [`metrics`] what it says of
//! itself.

pub(super) mod control;
mod metrics;
mod pages;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::{ArgAction, Args, ValueEnum};
use http::HeaderValue;
use portico_dial::{
    ClientTls, ClientTlsFiles, Dialer, ProxyFiles, ProxySetting, Target, TcpKeepAlive, TokenFile,
};
use portico_konnectivity::agent::{CountSource, Destination, Leases, Policy, Settings};
use portico_net::MemoryBudget;
use portico_wire::konnectivity::Identifiers;

use super::flag_values::{OptionalFile, buffer, listen, switch, time};
use super::ignored_flags::CommonIgnoredFlags;
use super::klog::KlogFlags;
use super::uuid::uuid;
use crate::args::{duration, positive_duration, size};
use crate::daemon::{self, Daemon, Hangup};
use crate::memory_limit::MemoryLimit;
use crate::outcome::Outcome;
use crate::verb::agent::flags::ProxyFlags;

/// TCP keep-alive towards servers: an upstream one must not get frequent PINGs, and a server whose machine is
/// gone is found by this within twelve seconds. One of ours is found by PING sooner.
const KEEP_ALIVE: TcpKeepAlive =
    TcpKeepAlive { interval: Duration::from_secs(3), unacknowledged: Some(Duration::from_secs(9)) };

/// How long a server may take to answer: TCP, TLS, and the review of our token.
const HELLO: Duration = Duration::from_secs(10);

// `portico konnectivity agent`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    servers: ServerFlags,
    #[command(flatten)]
    identity: IdentityFlags,
    #[command(flatten)]
    proxy: ProxyFlags,
    #[command(flatten)]
    count: CountFlags,
    #[command(flatten)]
    limits: LimitFlags,
    #[command(flatten)]
    health: HealthFlags,
    #[command(flatten)]
    ignored: IgnoredFlags,
    #[command(flatten)]
    klog: KlogFlags,
}

/// The default of `--max-held-bytes`: manifests of upstream's agent give it 30Mi.
fn most_held() -> usize {
    const MOST: usize = 64 << 20;
    MOST.min(MemoryLimit::find(None).bytes / 3)
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Servers")]
struct ServerFlags {
    /// Host of the servers, or of what leads to them; several are all connected to
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", value_delimiter = ',')]
    proxy_server_host: Vec<String>,
    /// Port of the servers
    #[arg(long, value_name = "PORT", default_value_t = 8091, value_parser = a_port())]
    proxy_server_port: u16,
    /// CA that servers' certificates must come from, PEM [default: those of the system, or Mozilla's]; read
    /// again at each connection, like all files here
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    ca_cert: OptionalFile,
    /// Protocols that are offered by ALPN before h2, where servers share their address with others
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alpn_proto: Vec<String>,
    /// Silence after which an upstream server gets an HTTP/2 PING; not below 10s. A server of Portico gets
    /// one every 3 seconds
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    keepalive_time: Duration,
    /// Time between two attempts to connect to a further server, and the first one after a failure
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = positive_duration)]
    sync_interval: Duration,
    /// The most that time grows to while a server refuses the agent. One that is away is tried each
    /// --sync-interval
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = positive_duration)]
    sync_interval_cap: Duration,
    /// Look for further servers when all that are known are connected
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "false", value_parser = switch, action = ArgAction::Set)]
    sync_forever: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Identity")]
struct IdentityFlags {
    /// Client certificate chain, PEM, leaf first
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    agent_cert: OptionalFile,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    agent_key: OptionalFile,
    /// Token that is shown to servers
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    service_account_token_path: OptionalFile,
    /// Unique among the agents of a cluster [default: a new UUID]
    #[arg(
        long,
        value_name = "NAME",
        env = "PROXY_AGENT_ID",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true
    )]
    agent_id: String,
    /// What servers choose the agent by, as a URL query: ipv4=, ipv6=, host=, cidr=, default-route=true
    #[arg(long, value_name = "QUERY", default_value = "")]
    agent_identifiers: String,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Number of servers")]
struct CountFlags {
    /// Count servers by their Leases, not by what they answer
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "false", value_parser = switch, action = ArgAction::Set)]
    count_server_leases: bool,
    /// default: by Leases if they are counted, else by answers; max: the larger of both
    #[arg(long, value_name = "SOURCE", default_value = "default")]
    server_count_source: Source,
    /// Namespace of the Leases
    #[arg(long, value_name = "NS", default_value = "kube-system")]
    lease_namespace: String,
    /// Labels of the Leases
    #[arg(
        long,
        value_name = "SELECTOR",
        alias = "lease-label",
        default_value = "k8s-app=konnectivity-server"
    )]
    lease_label_selector: String,
    /// Kubeconfig for the Leases [default: the service account of the pod]
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    kubeconfig: OptionalFile,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Source {
    #[value(alias = "")]
    Default,
    Max,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Portico's own")]
struct LimitFlags {
    /// Dial only these: a network or address, with a port or range of ports or without; names count by what
    /// they resolve to; may be repeated [default: everything]
    #[arg(long, value_name = "CIDR[:PORT[-PORT]]", value_delimiter = ',')]
    allow_destination: Vec<Destination>,
    /// Bytes that may wait for one endpoint that does not read; beyond it an upstream server's connection is
    /// closed, and one of Portico's waits
    #[arg(long, value_name = "SIZE", default_value = "1Mi", value_parser = buffer)]
    connection_buffer: usize,
    /// Bytes that all connections hold for peers that do not read. Over it the longest stopped is reset
    /// [default: 64Mi, or a third of the memory limit of its control group if that is less]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_held_bytes: Option<usize>,
    /// Connections to endpoints at once; over it dials are refused
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one())]
    max_connections: u32,
    /// Dials under way at once; over it they are refused. One ends after 5s
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = at_least_one())]
    max_dials: u32,
    /// After the first SIGTERM: how long no connection must have been open before the agent ends
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    drain_idle: Duration,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Health and admin")]
struct HealthFlags {
    /// Address for /healthz, /readyz and /metrics [default: all]
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    health_server_host: String,
    /// Port for these; 0 for none
    #[arg(long, value_name = "PORT", default_value_t = 8093)]
    health_server_port: u16,
    /// Address for /connections and /servers; empty for all
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    admin_bind_address: String,
    /// Port for these; 0 for none
    #[arg(long, value_name = "PORT", default_value_t = 8094)]
    admin_server_port: u16,
}

// Flags of the upstream agent that have no effect here.
#[derive(Debug, Args)]
struct IgnoredFlags {
    /// Without effect: the state of a connection is known without asking for it
    #[arg(long, hide = true, value_parser = time)]
    probe_interval: Option<Duration>,
    #[command(flatten)]
    both: CommonIgnoredFlags,
}

fn a_port() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..)
}

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Where to listen, if anywhere.
struct Listens {
    health: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Flags {
    /// Checks the flags against each other, and reads the files.
    async fn settings(&self) -> anyhow::Result<Settings> {
        let Self { servers, identity, limits, .. } = self;
        let target = |host: &String| {
            let bracketed = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            let target: Target = format!("{bracketed}:{}", servers.proxy_server_port).parse()?;
            anyhow::Ok(target)
        };
        let hosts = servers.proxy_server_host.iter();
        let hosts = hosts.map(|host| target(host).with_context(|| format!("--proxy-server-host {host:?}")));
        ensure!(
            servers.sync_interval <= servers.sync_interval_cap,
            "--sync-interval is longer than --sync-interval-cap; raise the cap"
        );
        let id = if identity.agent_id.is_empty() { uuid() } else { identity.agent_id.clone() };
        Ok(Settings {
            servers: hosts.collect::<anyhow::Result<_>>()?,
            to_servers: Arc::new(self.proxy.dialer()?.with_keep_alive(KEEP_ALIVE)),
            to_endpoints: Arc::new(Dialer::new(ProxySetting::Off, ProxyFiles::default())?),
            tls: Arc::new(self.tls()?),
            token: self.token()?,
            agent_id: HeaderValue::try_from(id).context("--agent-id cannot be sent in a header")?,
            identifiers: identifiers(&identity.agent_identifiers)?,
            user_agent: HeaderValue::from_static(concat!("portico/", env!("CARGO_PKG_VERSION"))),
            sync_interval: servers.sync_interval,
            sync_interval_cap: servers.sync_interval_cap,
            sync_forever: servers.sync_forever,
            count: self.count.source().await?,
            keepalive_time: servers.keepalive_time,
            policy: Policy::new(limits.allow_destination.iter().cloned()),
            connection_buffer: limits.connection_buffer,
            memory: MemoryBudget::new(limits.max_held_bytes.unwrap_or_else(most_held)),
            max_connections: limits.max_connections,
            max_dials: limits.max_dials,
            hello_timeout: HELLO,
        })
    }

    fn tls(&self) -> anyhow::Result<ClientTls> {
        let files = ClientTlsFiles {
            ca: self.servers.ca_cert.0.clone(),
            certificate: self.identity.agent_cert.0.clone(),
            key: self.identity.agent_key.0.clone(),
        };
        // kubectl prints an empty list as `[]`, and manifests hold that.
        let named = self.servers.alpn_proto.iter().filter(|name| !matches!(name.as_str(), "" | "[]"));
        let protocols = named.map(|name| name.clone().into_bytes()).chain([b"h2".to_vec()]).collect();
        ClientTls::konnectivity(files, protocols).context("--ca-cert, --agent-cert, --agent-key")
    }

    fn token(&self) -> anyhow::Result<Option<Arc<TokenFile>>> {
        let path = self.identity.service_account_token_path.0.clone();
        let token = path.map(TokenFile::load).transpose().context("--service-account-token-path")?;
        Ok(token.map(Arc::new))
    }

    async fn listens(&self) -> anyhow::Result<Listens> {
        let HealthFlags { health_server_host, health_server_port, admin_bind_address, admin_server_port } =
            &self.health;
        let at = async |flag: &str, host: &str, port: u16| match port {
            0 => Ok(None),
            port => listen(host, port).await.map(Some).map_err(|why| anyhow::anyhow!("{flag}: {why}")),
        };
        Ok(Listens {
            health: at("--health-server-host", health_server_host, *health_server_port).await?,
            admin: at("--admin-bind-address", admin_bind_address, *admin_server_port).await?,
        })
    }

    /// Says which flags have no effect.
    fn hint(&self) {
        self.klog.hint();
        let more = [("--probe-interval", self.ignored.probe_interval.is_some())];
        self.ignored.both.hint(&more);
    }
}

impl CountFlags {
    async fn source(&self) -> anyhow::Result<CountSource> {
        if !self.count_server_leases {
            return Ok(CountSource::Responses);
        }
        let client =
            portico_kube::client(self.kubeconfig.0.as_deref()).await.context("--count-server-leases")?;
        let leases = Leases {
            client,
            namespace: self.lease_namespace.clone(),
            selector: self.lease_label_selector.clone(),
        };
        Ok(match self.server_count_source {
            Source::Default => CountSource::Leases(leases),
            Source::Max => CountSource::Max(leases),
        })
    }
}

fn identifiers(query: &str) -> anyhow::Result<HeaderValue> {
    let parsed = Identifiers::parse(query).with_context(|| format!("--agent-identifiers {query:?}"))?;
    if let Some(unknown) = parsed.unknown.first() {
        bail!(
            "--agent-identifiers: {unknown:?} is no identifier; give ipv4, ipv6, host, cidr, uid or \
             default-route, joined by &"
        );
    }
    HeaderValue::try_from(query).context("--agent-identifiers cannot be sent in a header")
}

/// Runs an agent.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::run(async { control::run(flags, Daemon::start(Hangup::of_terminal())?).await })
        .map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests;
