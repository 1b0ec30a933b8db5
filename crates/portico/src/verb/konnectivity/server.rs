//! `portico konnectivity server`: its flags, and what they mean together.
//!
//! Names, meanings and defaults are those of the upstream proxy-server; what is Portico's own stands under a
//! heading of its own. `control` is the order at start and end, `pages` and `metrics` what it says of
//! itself.

mod control;
mod metrics;
mod pages;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use clap::{ArgAction, Args, ValueEnum};
use portico_konnectivity::server::{
    Authentication, Expected, FrontendListen, Mode, ServerTls, Settings, Strategy, TlsFiles, TlsOptions,
};
use rustls::version::{TLS12, TLS13};

use super::agent::{OptionalFile, buffer};
use super::klog::KlogFlags;
use super::{listen, switch, time, uuid};
use crate::args::size;
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::Outcome;

/// What upstream's server does without a limit, and the one default that differs: an agent that hangs would
/// keep the dial for ever.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);

/// `portico konnectivity server`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    frontend: FrontendFlags,
    #[command(flatten)]
    agents: AgentFlags,
    #[command(flatten)]
    tokens: TokenFlags,
    #[command(flatten)]
    health: HealthFlags,
    #[command(flatten)]
    own: OwnFlags,
    #[command(flatten)]
    ignored: IgnoredFlags,
    #[command(flatten)]
    klog: KlogFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "The API server's side")]
struct FrontendFlags {
    /// What the API server speaks: its egress selector's proxyProtocol
    #[arg(long, value_name = "MODE", default_value = "grpc")]
    mode: ModeFlag,
    /// Unix socket for the API server; then --server-port must be 0
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    uds_name: OptionalFile,
    /// Remove a socket that is there already
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "true", value_parser = switch, action = ArgAction::Set)]
    delete_existing_uds_file: bool,
    /// Port for the API server, over mutual TLS; 0 with --uds-name
    #[arg(long, value_name = "PORT", default_value_t = 8090)]
    server_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "IP", default_value = "", hide_default_value = true)]
    server_bind_address: String,
    /// Certificate for that port, PEM; read again when it changes, like all files here
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    server_cert: OptionalFile,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    server_key: OptionalFile,
    /// CA that the API server's client certificate must come from, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    server_ca_cert: OptionalFile,
    /// Silence after which an API server over TCP gets an HTTP/2 PING
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    frontend_keepalive_time: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeFlag {
    Grpc,
    HttpConnect,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "The agents' side")]
struct AgentFlags {
    /// Port for agents, over TLS
    #[arg(long, value_name = "PORT", default_value_t = 8091)]
    agent_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "IP", default_value = "", hide_default_value = true)]
    agent_bind_address: String,
    /// Certificate for that port, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    cluster_cert: OptionalFile,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    cluster_key: OptionalFile,
    /// CA that agents' certificates must come from, PEM; not together with tokens
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    cluster_ca_cert: OptionalFile,
    /// Silence after which an upstream agent gets an HTTP/2 PING, 30s at most; one of Portico's gets it after
    /// 5s
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    keepalive_time: Duration,
    /// Name of this server, different from all others of the cluster [default: a new UUID]
    #[arg(
        long,
        value_name = "NAME",
        env = "PROXY_SERVER_ID",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true
    )]
    server_id: String,
    /// How many servers there are, as agents are told
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    server_count: u32,
    /// How an agent is chosen: destHost, defaultRoute, default; the first that has one wins
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "default",
        value_parser = strategy)]
    proxy_strategies: Vec<Strategy>,
    /// How long an agent may take to answer a dial [default: 30s; upstream: no limit]
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time, hide_default_value = true)]
    backend_dial_timeout: Duration,
    /// Oldest version of TLS, on both ports: VersionTLS12 or VersionTLS13
    #[arg(long, value_name = "VERSION", default_value = "", hide_default_value = true)]
    tls_min_version: String,
    /// Cipher suites for TLS 1.2, on both ports, by their IANA names [default: all that are safe]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cipher_suites: Vec<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Tokens of agents")]
struct TokenFlags {
    /// Namespace of the agents' service account; with it, agents show tokens
    #[arg(long, value_name = "NS", default_value = "", hide_default_value = true)]
    agent_namespace: String,
    /// The agents' service account
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    agent_service_account: String,
    /// What the tokens must be for
    #[arg(long, value_name = "AUDIENCE", default_value = "", hide_default_value = true)]
    authentication_audience: String,
    /// Kubeconfig for the reviews of tokens [default: the service account of the pod]
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    kubeconfig: OptionalFile,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Health, admin, end")]
struct HealthFlags {
    /// Port for /healthz, /readyz and /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8092)]
    health_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "IP", default_value = "", hide_default_value = true)]
    health_bind_address: String,
    /// Port for /connections, /agents and /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8095)]
    admin_port: u16,
    /// Address for that port; empty for all
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    admin_bind_address: String,
    /// How long connections may go on after SIGTERM; 0 ends them at once
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time)]
    graceful_shutdown_timeout: Duration,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Portico's own")]
struct OwnFlags {
    /// Let destHost route addresses by agents' cidr= identifiers, the longest first, after exact matches
    #[arg(long)]
    route_cidr: bool,
    /// Bytes of one connection that may wait for an API server that does not read. Beyond it, one of an
    /// upstream agent that does not go on reading is closed, and one of Portico's waits
    #[arg(long, value_name = "SIZE", default_value = "1Mi", value_parser = buffer)]
    connection_buffer: usize,
    /// Bytes that all connections hold for peers that do not read; over it the longest stopped is reset
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = size)]
    max_held_bytes: usize,
}

/// Of the upstream server: without effect, or refused.
#[derive(Debug, Args)]
struct IgnoredFlags {
    /// Not there yet
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    enable_lease_controller: Option<bool>,
    /// Only for --enable-lease-controller
    #[arg(long, hide = true)]
    lease_namespace: Option<String>,
    /// Only for --enable-lease-controller
    #[arg(long, hide = true)]
    lease_label: Option<String>,
    /// Without effect: bytes are counted, not packets; see --connection-buffer
    #[arg(long, hide = true)]
    xfr_channel_size: Option<u32>,
    /// Without effect: see --connection-buffer
    #[arg(long, hide = true)]
    frontend_write_channel_size: Option<u32>,
    /// Without effect: see --connection-buffer
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    warn_on_channel_limit: Option<bool>,
    /// Without effect: reviews are bounded by themselves
    #[arg(long, hide = true)]
    kubeconfig_qps: Option<f32>,
    /// Without effect: reviews are bounded by themselves
    #[arg(long, hide = true)]
    kubeconfig_burst: Option<u32>,
    /// Without effect: JSON is spoken
    #[arg(long, hide = true)]
    kube_api_content_type: Option<String>,
    /// Without effect: there is no Go runtime to profile
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    enable_profiling: Option<bool>,
    /// Without effect
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    enable_contention_profiling: Option<bool>,
}

fn strategy(text: &str) -> Result<Strategy, String> {
    [Strategy::DestHost, Strategy::DefaultRoute, Strategy::Default]
        .into_iter()
        .find(|strategy| strategy.name() == text)
        .ok_or_else(|| "give destHost, defaultRoute or default".to_owned())
}

/// Everything that a server is started with.
struct Plan {
    settings: Settings,
    mode: Mode,
    frontends: FrontendListen,
    agents: (SocketAddr, Arc<ServerTls>),
    /// TLS whose files are watched.
    tls: Vec<Arc<ServerTls>>,
    health: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Flags {
    /// Checks the flags against each other, and reads the certificates.
    fn plan(&self) -> anyhow::Result<Plan> {
        let options = self.tls_options()?;
        let agents_tls = Arc::new(self.agents_tls(options.clone())?);
        let frontends = self.frontends(options)?;
        let mut tls = vec![Arc::clone(&agents_tls)];
        if let FrontendListen::Tcp { tls: of_frontends, .. } = &frontends {
            tls.push(Arc::clone(of_frontends));
        }
        let at = |flag: &str, host: &str, port| listen(host, port).map_err(|why| anyhow!("{flag}: {why}"));
        let HealthFlags { health_port, health_bind_address, admin_port, admin_bind_address, .. } =
            &self.health;
        let health = at("--health-bind-address", health_bind_address, *health_port)?;
        let admin = at("--admin-bind-address", admin_bind_address, *admin_port)?;
        let agents = at("--agent-bind-address", &self.agents.agent_bind_address, self.agents.agent_port)?;
        ensure!(self.agents.agent_port != 0, "--agent-port: give a port that agents can know");
        Ok(Plan {
            settings: self.settings(),
            mode: match self.frontend.mode {
                ModeFlag::Grpc => Mode::Grpc,
                ModeFlag::HttpConnect => Mode::HttpConnect,
            },
            frontends,
            agents: (agents, agents_tls),
            tls,
            health: (*health_port != 0).then_some(health),
            admin: (*admin_port != 0).then_some(admin),
        })
    }

    fn settings(&self) -> Settings {
        let Self { agents, own, .. } = self;
        let is_limited = agents.backend_dial_timeout > Duration::ZERO;
        Settings {
            id: if agents.server_id.is_empty() { uuid() } else { agents.server_id.clone() },
            count: agents.server_count,
            strategies: agents.proxy_strategies.clone(),
            route_cidr: own.route_cidr,
            dial_timeout: if is_limited { agents.backend_dial_timeout } else { DIAL_TIMEOUT },
            connection_buffer: own.connection_buffer,
            memory: own.max_held_bytes,
            keepalive: agents.keepalive_time,
            frontend_keepalive: self.frontend.frontend_keepalive_time,
        }
    }

    fn frontends(&self, options: TlsOptions) -> anyhow::Result<FrontendListen> {
        let FrontendFlags { uds_name, server_cert, server_key, server_ca_cert, .. } = &self.frontend;
        let (cert, key, ca) = (server_cert.0.clone(), server_key.0.clone(), server_ca_cert.0.clone());
        if let Some(path) = uds_name.0.clone() {
            ensure!(self.frontend.server_port == 0, "--uds-name: give --server-port=0 with it");
            ensure!(
                cert.is_none() && key.is_none() && ca.is_none(),
                "--uds-name: there is no TLS on a Unix socket; leave out --server-cert, --server-key and \
                 --server-ca-cert"
            );
            return Ok(FrontendListen::Unix { path, replace: self.frontend.delete_existing_uds_file });
        }
        ensure!(self.frontend.server_port != 0, "give --uds-name, or a --server-port other than 0");
        let address = listen(&self.frontend.server_bind_address, self.frontend.server_port)
            .map_err(|why| anyhow!("--server-bind-address: {why}"))?;
        let files = TlsFiles {
            certificate: cert.context("--server-cert is missing: TCP needs TLS; or give --uds-name")?,
            key: key.context("--server-key is missing: TCP needs TLS; or give --uds-name")?,
            client_ca: Some(ca.context("--server-ca-cert is missing: who may connect? Or give --uds-name")?),
        };
        let alpn: &[u8] = if self.frontend.mode == ModeFlag::Grpc { b"h2" } else { b"http/1.1" };
        let tls = Arc::new(ServerTls::load(files, options, alpn)?);
        Ok(FrontendListen::Tcp { address, tls })
    }

    fn agents_tls(&self, options: TlsOptions) -> anyhow::Result<ServerTls> {
        let files = TlsFiles {
            certificate: self
                .agents
                .cluster_cert
                .0
                .clone()
                .context("--cluster-cert is missing: agents need TLS")?,
            key: self.agents.cluster_key.0.clone().context("--cluster-key is missing: agents need TLS")?,
            client_ca: self.agents.cluster_ca_cert.0.clone(),
        };
        if files.client_ca.is_none() && self.tokens.agent_namespace.is_empty() {
            tracing::warn!(
                "every agent is accepted: give --cluster-ca-cert, or --agent-namespace for tokens"
            );
        }
        Ok(ServerTls::load(files, options, b"h2")?)
    }

    fn tls_options(&self) -> anyhow::Result<TlsOptions> {
        let versions = match self.agents.tls_min_version.as_str() {
            "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" => vec![&TLS12, &TLS13],
            "VersionTLS13" => vec![&TLS13],
            other => bail!("--tls-min-version {other:?}: give VersionTLS12 or VersionTLS13"),
        };
        let mut options = TlsOptions { versions, ..TlsOptions::default() };
        let names: Vec<&str> = self
            .agents
            .cipher_suites
            .iter()
            .map(String::as_str)
            .filter(|name| !matches!(*name, "" | "[]"))
            .collect();
        if names.is_empty() {
            return Ok(options);
        }
        let mut provider = (*options.provider).clone();
        let known = |name: &str, suite: &rustls::SupportedCipherSuite| {
            suite.tls13().is_none() && suite.suite().as_str() == Some(name)
        };
        for name in &names {
            ensure!(
                provider.cipher_suites.iter().any(|suite| known(name, suite)),
                "--cipher-suites {name}: it is not known, not safe, or of TLS 1.3, which has no choice"
            );
        }
        // As in Go, the choice is that of TLS 1.2.
        provider
            .cipher_suites
            .retain(|suite| suite.tls13().is_some() || names.iter().any(|name| known(name, suite)));
        options.provider = Arc::new(provider);
        Ok(options)
    }

    /// How agents authenticate.
    async fn authentication(&self) -> anyhow::Result<Authentication> {
        let TokenFlags { agent_namespace, agent_service_account, authentication_audience, kubeconfig } =
            &self.tokens;
        let all = [agent_namespace, agent_service_account, authentication_audience];
        if all.iter().all(|text| text.is_empty()) {
            return Ok(Authentication::none());
        }
        ensure!(
            all.iter().all(|text| !text.is_empty()),
            "give all of --agent-namespace, --agent-service-account and --authentication-audience, or none"
        );
        ensure!(
            self.agents.cluster_ca_cert.0.clone().is_none(),
            "--cluster-ca-cert and --agent-namespace: agents show certificates or tokens; leave out one"
        );
        let client = portico_kube::client(kubeconfig.0.as_deref()).await.context("for reviews of tokens")?;
        let expected = Expected {
            namespace: agent_namespace.clone(),
            service_account: agent_service_account.clone(),
            audience: authentication_audience.clone(),
        };
        Ok(Authentication::by_token(client, expected))
    }

    /// Says which flags have no effect, and refuses what is not there.
    fn hint(&self) -> anyhow::Result<()> {
        self.klog.hint();
        let IgnoredFlags { enable_lease_controller, lease_namespace, lease_label, .. } = &self.ignored;
        ensure!(
            *enable_lease_controller != Some(true),
            "--enable-lease-controller is not there yet: agents count servers by --server-count"
        );
        let given = [
            ("--lease-namespace", lease_namespace.is_some()),
            ("--lease-label", lease_label.is_some()),
            ("--xfr-channel-size", self.ignored.xfr_channel_size.is_some()),
            ("--frontend-write-channel-size", self.ignored.frontend_write_channel_size.is_some()),
            ("--warn-on-channel-limit", self.ignored.warn_on_channel_limit.is_some()),
            ("--kubeconfig-qps", self.ignored.kubeconfig_qps.is_some()),
            ("--kubeconfig-burst", self.ignored.kubeconfig_burst.is_some()),
            ("--kube-api-content-type", self.ignored.kube_api_content_type.is_some()),
            ("--enable-profiling", self.ignored.enable_profiling == Some(true)),
            ("--enable-contention-profiling", self.ignored.enable_contention_profiling == Some(true)),
        ];
        let given: Vec<&str> =
            given.into_iter().filter_map(|(flag, is_given)| is_given.then_some(flag)).collect();
        if !given.is_empty() {
            let flags = given.join(" ");
            tracing::info!(%flags, "without effect here; --help of each flag says why");
        }
        Ok(())
    }
}

/// Runs a server.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::run(async { control::run(flags, Daemon::start(Hangup::of_terminal())?).await })
}

#[cfg(test)]
mod tests;
