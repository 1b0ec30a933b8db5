//! The flags of `portico agent`, and what they mean together.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use portico_agent::IdentityFiles;
use portico_agent::address::{DEFAULT_ADDRESS, Settings as AddressSettings};
use portico_agent::forward::{Forward, ForwardError, ForwardSpec, resolve};
use portico_dial::{
    ClientTls, ClientTlsError, ClientTlsFiles, Dialer, ProxyError, ProxyFiles, ProxySetting, TokenFile,
    TokenFileError,
};
use portico_net::MemoryBudget;
use portico_tunnel::client::{ClientSettings, GatewayAddress, Security};
use thiserror::Error;

use crate::args::{Limit, Listen, duration, positive_duration, size};
use crate::verb::gateway::flags::AccessLogFormat;

/// The warning for a flag that has no effect any more.
pub(super) const NO_ARP_CHECK: &str =
    "--no-arp-check has no effect: the agent asks nothing on the links any more; leave it out";

// `portico agent`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(crate) gateways: GatewayFlags,
    #[command(flatten)]
    pub(crate) identity: IdentityFlags,
    #[command(flatten)]
    pub(crate) proxy: ProxyFlags,
    #[command(flatten)]
    pub(crate) node: NodeFlags,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) lifecycle: LifecycleFlags,
    #[command(flatten)]
    pub(crate) records: RecordFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Gateways")]
pub(crate) struct GatewayFlags {
    /// A gateway, by TLS unless h2c:// says without; any of several will do; may be repeated
    #[arg(long, value_name = "[tls://|h2c://]HOST:PORT", required = true, value_delimiter = ',')]
    pub(crate) gateway: Vec<GatewayAddress>,
    /// The name gateways must have in their certificate [default: the one they are reached by]
    #[arg(long, value_name = "NAME")]
    pub(crate) server_name: Option<Box<str>>,
    /// Connections to gateways kept up, to different addresses where there are several
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) tunnels: u8,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Identity")]
pub(crate) struct IdentityFlags {
    /// CA that gateways' certificates must come from, PEM [default: those of the system, or Mozilla's if it
    /// has none]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Client certificate chain, PEM, leaf first; read again when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Bearer token sent with each request; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Corporate proxy")]
pub(crate) struct ProxyFlags {
    /// HTTP proxy on the way there: http://... or https://..., off, or env for what HTTPS_PROXY,
    /// ALL_PROXY and NO_PROXY say. User and password belong into --proxy-credentials, because every user of
    /// the machine can read arguments
    #[arg(long, value_name = "URL|env|off", default_value = "env")]
    pub(crate) proxy: ProxySetting,
    /// CA of an https:// proxy, PEM [default: those of the system, or Mozilla's if it has none]
    #[arg(long, value_name = "FILE")]
    pub(crate) proxy_ca: Option<PathBuf>,
    /// File with USER:PASSWORD for the proxy, read at each attempt; the environment has PORTICO_PROXY_AUTH
    /// for the same
    #[arg(long, value_name = "FILE")]
    pub(crate) proxy_credentials: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "On this node")]
pub(crate) struct NodeFlags {
    /// What to listen on and what that leads to; without ADDR, on the address held; may be repeated
    #[arg(long, value_name = "[ADDR:]PORT=AUTHORITY", required = true, value_delimiter = ',')]
    pub(crate) forward: Vec<ForwardSpec>,
    #[command(flatten)]
    pub(crate) address: AddressFlags,
    /// Where /healthz, /readyz, /metrics, /connections and /tunnels are served; off for none
    #[arg(long, value_name = "ADDRESS", default_value = super::ready::ADMIN)]
    pub(crate) admin_listen: Listen,
}

// Which address is held, and how; also of `portico agent check`.
#[derive(Debug, Args)]
pub(crate) struct AddressFlags {
    /// The address to hold on this node; off for none
    #[arg(long, value_name = "IP|off", default_value_t = Address(Some(DEFAULT_ADDRESS)))]
    pub(crate) address: Address,
    /// The interface made for it
    #[arg(long, value_name = "NAME", default_value = "portico")]
    pub(crate) interface: Box<str>,
    /// Without effect since the agent asks nothing on the links. Accepted until the release after 0.1, hidden
    #[arg(long, hide = true)]
    pub(crate) no_arp_check: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitFlags {
    /// Connections at once; over it they are refused
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one())]
    pub(crate) max_connections: u32,
    /// Connections that wait for a gateway; over it they are refused
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = at_least_one())]
    pub(crate) max_waiting: u32,
    /// Bytes that all connections hold for receivers that do not take them; over it connections are reset,
    /// the longest stopped first
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = size)]
    pub(crate) max_held_bytes: usize,
    /// How long a connection may wait for a gateway before it is refused
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = positive_duration)]
    pub(crate) open_timeout: Duration,
    /// End a connection that moved no byte for so long; watches are silent for hours
    #[arg(long, value_name = "TIME", default_value = "off")]
    pub(crate) stream_idle_timeout: Limit,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Stop and upgrade")]
pub(crate) struct LifecycleFlags {
    /// After SIGTERM, or after a successor has taken over: how long connections may go on; an API server ends
    /// its watches within an hour
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub(crate) drain_timeout: Duration,
    /// Take address and listening sockets over from the agent that offers them at this path, then offer them
    /// there
    #[arg(long, value_name = "SOCKET")]
    pub(crate) take_over: Option<PathBuf>,
    /// After a successor has taken over: do not exit before SIGTERM, where an agent that exits would be
    /// started again
    #[arg(long)]
    pub(crate) linger: bool,
    /// Name of this agent, to tell it from the one it takes over from [default: POD_NAME]
    #[arg(long, value_name = "NAME", env = "POD_NAME", hide_env_values = true)]
    pub(crate) instance: Option<Box<str>>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Records")]
pub(crate) struct RecordFlags {
    /// One line a connection on standard output
    #[arg(long, value_name = "FORMAT", default_value = "off")]
    pub(crate) access_log: AccessLogFormat,
}

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// An address to hold, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) Option<IpAddr>);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let wrong = |_| format!("give an IP address such as {DEFAULT_ADDRESS}, or off");
        text.parse().map(|address| Self(Some(address))).map_err(wrong)
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("off"),
        }
    }
}

/// Flags that do not go together, or files that cannot be used.
#[derive(Debug, Error)]
pub(crate) enum FlagError {
    /// A flag of TLS, and no gateway with TLS.
    #[error(
        "{flag} is for gateways by TLS, but every --gateway is h2c://; write tls://, or leave {flag} out"
    )]
    NoTls { flag: &'static str },
    /// The forwards.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The admin listener and a forward.
    #[error("--admin-listen and --forward {forward} both want {address}; give one of them another port")]
    SameAddress { forward: SocketAddr, address: SocketAddr },
    /// CA, certificate or key.
    #[error("--tls-ca, --tls-cert, --tls-key: {0}")]
    Tls(#[from] ClientTlsError),
    /// The token.
    #[error("--token-file: {0}")]
    Token(#[from] TokenFileError),
    /// One token, and forwards to several clusters.
    #[error(
        "--token-file: the token would be shown for {first} and for {second}, which are in two namespaces, \
         so that the API server of one cluster would get a token of another; run an agent for each, with \
         its own --token-file"
    )]
    SharedToken { first: Box<str>, second: Box<str> },
    /// The proxy.
    #[error("--proxy: {0}")]
    Proxy(#[from] ProxyError),
}

/// TLS towards gateways, and what it was read from.
type TlsAndFiles = (Arc<ClientTls>, Vec<PathBuf>);

/// What the flags mean.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) forwards: Vec<Forward>,
    pub(crate) client: ClientSettings,
    pub(crate) files: IdentityFiles,
    /// The address to hold, if any.
    pub(crate) address: Option<AddressSettings>,
}

impl ProxyFlags {
    /// What connects, through the proxy if there is one.
    pub(crate) fn dialer(&self) -> Result<Dialer, ProxyError> {
        let Self { proxy, proxy_ca, proxy_credentials } = self;
        let files = ProxyFiles { credentials: proxy_credentials.clone(), ca: proxy_ca.clone() };
        Dialer::new(proxy.clone(), files)
    }
}

impl AddressFlags {
    /// How to hold the address; `None` if none is.
    pub(crate) fn settings(&self) -> Option<AddressSettings> {
        Some(AddressSettings {
            address: self.address.0?,
            interface: self.interface.clone(),
            ..AddressSettings::default()
        })
    }
}

/// A token belongs to one cluster, and each request shows it to the API server behind its authority.
/// Authorities are `SERVICE.NAMESPACE.svc.cluster.local:PORT`, and a namespace is of one cluster.
fn one_namespace(forwards: &[Forward]) -> Result<(), FlagError> {
    fn domain(authority: &str) -> &str {
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_end_matches('.');
        host.split_once('.').map_or(host, |(_, domain)| domain)
    }
    let Some((first, others)) = forwards.split_first() else { return Ok(()) };
    let other = |other: &&Forward| !domain(&other.authority).eq_ignore_ascii_case(domain(&first.authority));
    match others.iter().find(other) {
        None => Ok(()),
        Some(second) => {
            let (first, second) = (first.authority.clone(), second.authority.clone());
            Err(FlagError::SharedToken { first, second })
        }
    }
}

impl Flags {
    /// Checks the flags against each other, and reads the files.
    pub(crate) fn plan(&self) -> Result<Plan, FlagError> {
        let forwards = resolve(&self.node.forward, self.node.address.address.0)?;
        if let Some(address) = self.node.admin_listen.0
            && let Some(forward) = forwards.iter().find(|forward| forward.listen == address)
        {
            return Err(FlagError::SameAddress { forward: forward.listen, address });
        }
        let tls = self.tls()?;
        let token = self.identity.token_file.clone();
        let token = token.map(|path| TokenFile::load(path.clone()).map(|token| (Arc::new(token), path)));
        let token = token.transpose()?;
        if token.is_some() {
            one_namespace(&forwards)?;
        }
        let authority = forwards.first().map(|forward| forward.authority.clone()).unwrap_or_default();
        let mut client =
            ClientSettings::new(self.gateways.gateway.clone(), Arc::new(self.proxy.dialer()?), authority);
        client.tls = tls.as_ref().map(|(tls, _)| Arc::clone(tls));
        client.server_name = self.gateways.server_name.clone();
        client.token = token.as_ref().map(|(token, _)| Arc::clone(token));
        client.tunnels = self.gateways.tunnels.into();
        client.open_timeout = self.limits.open_timeout;
        client.stream_idle = self.limits.stream_idle_timeout.0;
        client.memory = MemoryBudget::new(self.limits.max_held_bytes);
        let files = IdentityFiles::new(tls, token);
        let mut address = self.node.address.settings();
        if let (Some(address), Some(socket)) = (&mut address, &self.lifecycle.take_over) {
            address.users = Some(socket.with_added_extension("lock"));
        }
        Ok(Plan { forwards, client, files, address })
    }

    fn tls(&self) -> Result<Option<TlsAndFiles>, FlagError> {
        let IdentityFlags { tls_ca, tls_cert, tls_key, .. } = &self.identity;
        if !self.gateways.gateway.iter().any(|gateway| gateway.security == Security::Tls) {
            let given = [
                ("--tls-ca", tls_ca.is_some()),
                ("--tls-cert", tls_cert.is_some()),
                ("--server-name", self.gateways.server_name.is_some()),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((flag, _)) => Err(FlagError::NoTls { flag }),
                None => Ok(None),
            };
        }
        let files =
            ClientTlsFiles { ca: tls_ca.clone(), certificate: tls_cert.clone(), key: tls_key.clone() };
        let tls = Arc::new(ClientTls::load(files)?);
        Ok(Some((tls, [tls_ca, tls_cert, tls_key].into_iter().flatten().cloned().collect())))
    }

    /// Gateways that are reached without TLS.
    pub(crate) fn plaintext_gateways(&self) -> impl Iterator<Item = &GatewayAddress> {
        self.gateways.gateway.iter().filter(|gateway| gateway.security == Security::Plaintext)
    }

    /// Logs a warning for each flag that is allowed but unwise.
    pub(crate) fn warn(&self) {
        if self.node.address.no_arp_check {
            tracing::warn!("{NO_ARP_CHECK}");
        }
        for gateway in self.plaintext_gateways() {
            tracing::warn!(
                %gateway,
                "without TLS: neither side is authenticated, and a token can be read on the way; use it \
                 only for \
                 gateways that know nothing else, in a network you trust"
            );
        }
        let has_identity = self.identity.tls_cert.is_some() || self.identity.token_file.is_some();
        if !has_identity && self.plaintext_gateways().count() < self.gateways.gateway.len() {
            tracing::warn!(
                "no identity: neither --tls-cert with --tls-key nor --token-file is given; a gateway that \
                 asks for one \
                 answers 401"
            );
        }
    }
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

    fn plan(line: &str) -> Result<Plan, String> {
        let words = std::iter::once("agent").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        line.flags.plan().map_err(|error| error.to_string())
    }

    const ENOUGH: &str = "--gateway h2c://gw:8088 --forward 6443=api:443";

    #[test]
    fn gateways_and_forwards_are_repeated_or_listed() {
        let plan =
            plan("--gateway h2c://a:1,h2c://b:2 --gateway h2c://c:3 --forward 1=a:1,2=b:2 --forward 3=c:3");
        let plan = plan.unwrap();
        assert_eq!((plan.client.gateways.len(), plan.forwards.len()), (3, 3));
        assert_eq!(plan.forwards[0].listen, SocketAddr::new(DEFAULT_ADDRESS, 1));
        assert_eq!(&*plan.client.authority, "a:1");
    }

    #[test]
    fn flags_that_contradict_each_other_are_named() {
        for (more, expected) in [
            ("--tls-ca /nowhere", "--tls-ca"),
            ("--server-name gw", "--server-name"),
            ("--address off", "--forward 6443=api:443"),
            ("--forward 6443=other:443", "6443=other:443"),
            ("--token-file /nowhere", "--token-file"),
            ("--forward 127.0.0.1:8004=other:443", "--admin-listen"),
            ("--tls-cert /nowhere", "--tls-key"),
        ] {
            let error = plan(&format!("{ENOUGH} {more}")).unwrap_err();
            assert!(error.contains(expected), "{more}: {error}");
        }
    }

    #[test]
    fn a_token_is_shown_for_the_authorities_of_one_namespace_only() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "token").unwrap();
        let with = |second: &str, token: &str| {
            plan(&format!("--gateway h2c://gw:1 --forward 1=api.cluster-a.svc:443,2={second}:1 {token}"))
        };
        let token = format!("--token-file {}", file.path().display());
        for same in ["api.cluster-a.svc", "konnectivity-server.Cluster-A.svc"] {
            assert!(with(same, &token).is_ok(), "{same}");
        }
        for other in ["api.cluster-b.svc", "cluster-a.svc", "api"] {
            let error = with(other, &token).unwrap_err();
            assert!(error.contains("api.cluster-a.svc:443") && error.contains(other), "{error}");
            assert!(with(other, "").is_ok(), "without a token there is nothing to show");
        }
    }

    #[test]
    fn without_an_address_forwards_have_their_own() {
        let plan = plan("--gateway h2c://gw:8088 --address off --forward 127.0.0.1:6443=api:443").unwrap();
        assert!(plan.address.is_none());
    }
}
