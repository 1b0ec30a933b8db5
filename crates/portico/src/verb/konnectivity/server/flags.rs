//! The flags of the upstream proxy-server, with its names, meanings and defaults, and those of Portico's own.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use portico_konnectivity::server::{Binding, Strategy};
use portico_konnectivity::streams::LONGEST_NAME;

use crate::args::size;
use crate::verb::konnectivity::flag_values::{OptionalFile, buffer, switch, time};
use crate::verb::konnectivity::ignored_flags::CommonIgnoredFlags;
use crate::verb::konnectivity::klog::KlogFlags;

// `portico konnectivity server`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(super) frontend: FrontendFlags,
    #[command(flatten)]
    pub(super) agents: AgentFlags,
    #[command(flatten)]
    pub(super) tokens: TokenFlags,
    #[command(flatten)]
    pub(super) leases: LeaseFlags,
    #[command(flatten)]
    pub(super) health: HealthFlags,
    #[command(flatten)]
    pub(super) own: OwnFlags,
    #[command(flatten)]
    pub(super) ignored: IgnoredFlags,
    #[command(flatten)]
    pub(super) klog: KlogFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "The API server's side")]
pub(super) struct FrontendFlags {
    /// What the API server speaks: its egress selector's proxyProtocol
    #[arg(long, value_name = "MODE", default_value = "grpc")]
    pub(super) mode: ModeFlag,
    /// Unix socket for the API server; then --server-port must be 0
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) uds_name: OptionalFile,
    /// Remove a socket that is there already
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "true", value_parser = switch, action = ArgAction::Set)]
    pub(super) delete_existing_uds_file: bool,
    /// Port for the API server, over mutual TLS; 0 with --uds-name
    #[arg(long, value_name = "PORT", default_value_t = 8090)]
    pub(super) server_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    pub(super) server_bind_address: String,
    /// Certificate for that port, PEM; read again when it changes, like all files here
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) server_cert: OptionalFile,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) server_key: OptionalFile,
    /// CA that the API server's client certificate must come from, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) server_ca_cert: OptionalFile,
    /// Silence after which an API server over TCP gets an HTTP/2 PING
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    pub(super) frontend_keepalive_time: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ModeFlag {
    Grpc,
    HttpConnect,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "The agents' side")]
pub(super) struct AgentFlags {
    /// Port for agents, over TLS
    #[arg(long, value_name = "PORT", default_value_t = 8091)]
    pub(super) agent_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    pub(super) agent_bind_address: String,
    /// Certificate for that port, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) cluster_cert: OptionalFile,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) cluster_key: OptionalFile,
    /// CA that agents' certificates must come from, PEM; not together with tokens
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) cluster_ca_cert: OptionalFile,
    /// Silence after which an upstream agent gets an HTTP/2 PING; one of Portico's gets it after 3s [default:
    /// 30s; upstream: 1h]
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time, hide_default_value = true)]
    pub(super) keepalive_time: Duration,
    /// Name of this server, different from all others of the cluster [default: a new UUID]
    #[arg(
        long,
        value_name = "NAME",
        env = "PROXY_SERVER_ID",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true,
        value_parser = id
    )]
    pub(super) server_id: String,
    /// How many servers there are, as agents are told
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) server_count: u32,
    /// How an agent is chosen: destHost, defaultRoute, default; the first that has one wins
    #[arg(long, value_name = "LIST", default_value = "default", value_parser = strategies)]
    pub(super) proxy_strategies: Strategies,
    /// How long a dial may take, by up to three agents [default: 30s; upstream: no limit]
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time, hide_default_value = true)]
    pub(super) backend_dial_timeout: Duration,
    /// Oldest version of TLS, on both ports: VersionTLS12 or VersionTLS13
    #[arg(long, value_name = "VERSION", default_value = "", hide_default_value = true)]
    pub(super) tls_min_version: String,
    /// Cipher suites for TLS 1.2, on both ports, by their IANA names [default: all that are safe]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) cipher_suites: Vec<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Tokens of agents")]
pub(super) struct TokenFlags {
    /// Namespace of the agents' service account; with it, agents show tokens
    #[arg(long, value_name = "NS", default_value = "", hide_default_value = true)]
    pub(super) agent_namespace: String,
    /// The agents' service account
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub(super) agent_service_account: String,
    /// What the tokens must be for
    #[arg(long, value_name = "AUDIENCE", default_value = "", hide_default_value = true)]
    pub(super) authentication_audience: String,
    /// Kubeconfig for reviews of tokens, and for Leases [default: the service account of the pod]
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub(super) kubeconfig: OptionalFile,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Leases of servers")]
pub(super) struct LeaseFlags {
    /// Keep a Lease, by which agents with --count-server-leases count this server, and remove those of
    /// servers that are gone
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "false", value_parser = switch, action = ArgAction::Set)]
    pub(super) enable_lease_controller: bool,
    /// Namespace of the Leases
    #[arg(long, value_name = "NS", default_value = "kube-system")]
    pub(super) lease_namespace: String,
    /// Labels of the Leases, as agents look for them: KEY=VALUE, joined by commas
    #[arg(long, value_name = "LABELS", default_value = "k8s-app=konnectivity-server")]
    pub(super) lease_label: String,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Health, admin, end")]
pub(super) struct HealthFlags {
    /// Port for /healthz, /readyz and /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8092)]
    pub(super) health_port: u16,
    /// Address for that port [default: all]
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    pub(super) health_bind_address: String,
    /// Port for /connections, /agents and /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8095)]
    pub(super) admin_port: u16,
    /// Address for that port; empty for all
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub(super) admin_bind_address: String,
    /// How long connections may go on after SIGTERM; 0 ends them at once
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time)]
    pub(super) graceful_shutdown_timeout: Duration,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Portico's own")]
pub(super) struct OwnFlags {
    /// Let destHost route addresses by agents' cidr= identifiers, the longest first, after exact matches
    #[arg(long)]
    pub(super) route_cidr: bool,
    /// What an identity may claim, and nothing else: the common name or a SAN of an agent's certificate, the
    /// service account of its token (system:serviceaccount:NS:NAME) or its node (node:NAME). One * stands for
    /// any text, which * in IDENTIFIERS repeats: node:*=host=*. May be repeated [default: any agent may claim
    /// anything]
    #[arg(long, value_name = "IDENTITY=IDENTIFIERS")]
    pub(super) bind_identifiers: Vec<Binding>,
    /// Agents at once; of more, each is refused until another has left
    #[arg(long, value_name = "N", default_value_t = 2048,
        value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(super) max_agents: u32,
    /// Bytes of one connection that may wait for an API server that does not read. Beyond it, one of an
    /// upstream agent is slowed down, and closed if it falls behind; one of Portico's waits
    #[arg(long, value_name = "SIZE", default_value = "1Mi", value_parser = buffer)]
    pub(super) connection_buffer: usize,
    /// Bytes that all connections hold for peers that do not read; over it the longest stopped is reset. Half
    /// of it is for what connections of upstream agents hold beyond --connection-buffer
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = size)]
    pub(super) max_held_bytes: usize,
}

// Flags of the upstream server that have no effect here.
#[derive(Debug, Args)]
pub(super) struct IgnoredFlags {
    /// Without effect: see --connection-buffer
    #[arg(long, hide = true)]
    pub(super) frontend_write_channel_size: Option<u32>,
    /// Without effect: reviews are bounded by themselves
    #[arg(long, hide = true, allow_negative_numbers = true)]
    pub(super) kubeconfig_qps: Option<f32>,
    /// Without effect: reviews are bounded by themselves
    #[arg(long, hide = true, allow_negative_numbers = true)]
    pub(super) kubeconfig_burst: Option<i64>,
    #[command(flatten)]
    pub(super) both: CommonIgnoredFlags,
}

/// A name that agents take; empty for one that is made up.
fn id(text: &str) -> Result<String, String> {
    if text.len() <= LONGEST_NAME && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(text.to_owned());
    }
    Err(format!("give up to {LONGEST_NAME} visible ASCII characters; agents get it in a header"))
}

/// In the order in which they are asked.
pub(super) type Strategies = Vec<Strategy>;

/// Empty items are left out, as upstream does. What is named twice counts once.
fn strategies(text: &str) -> Result<Strategies, String> {
    let mut named = Strategies::new();
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let strategy = strategy(item)?;
        if !named.contains(&strategy) {
            named.push(strategy);
        }
    }
    if named.is_empty() { Err(STRATEGIES.to_owned()) } else { Ok(named) }
}

const STRATEGIES: &str = "give destHost, defaultRoute or default";

fn strategy(text: &str) -> Result<Strategy, String> {
    [Strategy::DestHost, Strategy::DefaultRoute, Strategy::Default]
        .into_iter()
        .find(|strategy| strategy.name() == text)
        .ok_or_else(|| STRATEGIES.to_owned())
}

/// Labels of an object.
type Labels = BTreeMap<String, String>;

/// Those of `--lease-label`. Read where they count: upstream takes anything without
/// `--enable-lease-controller`.
pub(super) fn labels(text: &str) -> Result<Labels, String> {
    let label = |pair: &str| {
        let (key, value) =
            pair.split_once('=').filter(|(key, value)| !key.is_empty() && !value.contains('='))?;
        Some((key.trim().to_owned(), value.trim().to_owned()))
    };
    let labels: Option<Labels> = text.split(',').map(label).collect();
    labels.ok_or_else(|| "give labels such as k8s-app=konnectivity-server".to_owned())
}
