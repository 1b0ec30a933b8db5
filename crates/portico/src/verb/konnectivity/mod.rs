//! `portico konnectivity`: the way back from an API server to the nodes, with the flags of the upstream
//! programs.
//!
//! Here is what both halves share: the forms of Go's flags, flags without effect ([`klog`], [`needless`]),
//! addresses to listen on, names made up. What moves bytes is in `portico-konnectivity`.

mod agent;
mod klog;
mod needless;
mod requests;
mod server;
#[cfg(test)]
mod upstream_flags;

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Subcommand;

use crate::args::{bytes, duration};
use crate::daemon::Daemon;
use crate::outcome::Outcome;

/// The two halves.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Dial in the user cluster what Konnectivity servers ask for, until told to stop
    ///
    /// Takes every flag of the upstream proxy-agent, with the same meaning and default: an existing manifest
    /// works when image and command change. With a server of Portico each connection has an HTTP/2 stream of
    /// its own, with flow control and half-close.
    ///
    /// The first SIGTERM drains: servers prefer other agents, and the agent ends once no connection has been
    /// open for --drain-idle. A second one ends it.
    #[command(args_override_self = true)]
    #[command(after_help = "\
Examples:
  In a pod of the user cluster (deploy/konnectivity/):
    portico konnectivity agent --proxy-server-host=konnectivity-server.abc.example.com \\
      --proxy-server-port=6443 --ca-cert=ca.crt \\
      --service-account-token-path=/var/run/secrets/tokens/konnectivity-agent-token

  Only kubelets, and webhooks in one network:
    portico konnectivity agent --proxy-server-host=192.0.2.1 --ca-cert=ca.crt --agent-cert=agent.crt \\
      --agent-key=agent.key --allow-destination=0.0.0.0/0:10250 --allow-destination=10.0.0.0/8:443")]
    Agent(Box<agent::Flags>),
    /// Carry connections of an API server to the agents that dial in, until told to stop
    ///
    /// Takes every flag of the upstream proxy-server, with the same meaning and default: an existing manifest
    /// works when image and command change. With an agent of Portico each connection has an HTTP/2 stream of
    /// its own, with flow control and half-close. The one default that differs: a dial ends after 30 seconds.
    ///
    /// The first SIGTERM drains for --graceful-shutdown-timeout; a second one ends it.
    #[command(args_override_self = true)]
    #[command(after_help = "\
Examples:
  Beside an API server, on a Unix socket, with tokens of agents (deploy/konnectivity/):
    portico konnectivity server --mode=http-connect --uds-name=/run/konnectivity/server.socket \\
      --server-port=0 --cluster-cert=tls.crt --cluster-key=tls.key --agent-namespace=kube-system \\
      --agent-service-account=konnectivity-agent --authentication-audience=system:konnectivity-server

  Over TCP with mutual TLS, agents by certificate:
    portico konnectivity server --mode=http-connect --server-cert=s.crt --server-key=s.key \\
      --server-ca-cert=ca.crt --cluster-cert=c.crt --cluster-key=c.key --cluster-ca-cert=ca.crt")]
    Server(Box<server::Flags>),
}

/// Does what is asked for.
pub(crate) fn run(verb: &Verb) -> anyhow::Result<Outcome> {
    match verb {
        Verb::Agent(flags) => agent::run(flags),
        Verb::Server(flags) => server::run(flags),
    }
}

/// Runs a half on a daemon of the caller's, which runs other things as well.
pub(super) async fn serve(verb: &Verb, daemon: Daemon) -> anyhow::Result<()> {
    match verb {
        Verb::Agent(flags) => agent::control::run(flags, daemon).await,
        Verb::Server(flags) => server::control::run(flags, daemon).await,
    }
}

/// A switch in the forms of Go: `--flag`, `--flag=true`, `--flag=f`.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("give true or false".to_owned()),
    }
}

/// A duration in the forms of Go, in which zero needs no unit.
fn time(text: &str) -> Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { duration(text) }
}

/// A name for a process that was given none: a random UUID (RFC 9562 section 5.4).
fn uuid() -> String {
    // The standard library seeds each state anew by the system's random numbers.
    let random = || RandomState::new().hash_one("portico");
    let (high, low) = (random() & !0xf000 | 0x4000, random() & !(0b11 << 62) | (1 << 63));
    let text = format!("{high:016x}{low:016x}");
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

/// Where to listen for `host`, which may be empty for all addresses.
fn listen(host: &str, port: u16) -> Result<SocketAddr, String> {
    let ip = match host {
        // Both families, where the system has IPv6.
        "" if std::net::UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok() => Ipv6Addr::UNSPECIFIED.into(),
        "" => Ipv4Addr::UNSPECIFIED.into(),
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        host => host.parse::<IpAddr>().map_err(|_| format!("{host:?} is no IP address to listen on"))?,
    };
    Ok(SocketAddr::new(ip, port))
}

/// A file, or none where the text is empty: manifests pass such flags.
#[derive(Debug, Clone)]
struct OptionalFile(Option<PathBuf>);

impl FromStr for OptionalFile {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self((!text.is_empty()).then(|| text.into())))
    }
}

/// A size of one connection.
fn buffer(text: &str) -> Result<usize, String> {
    const LEAST: usize = 64 << 10;
    bytes(text)
        .filter(|bytes| (LEAST..=1 << 30).contains(bytes))
        .ok_or_else(|| "give a size such as 1Mi, 64Ki to 1024Mi".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_has_the_forms_of_go() {
        assert_eq!(switch("T"), Ok(true));
        assert_eq!(switch("false"), Ok(false));
        assert!(switch("yes").is_err());
    }

    #[test]
    fn a_made_up_name_is_a_uuid_and_another_one_each_time() {
        let one = uuid();
        let lengths: Vec<usize> = one.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert!(one.as_bytes()[14] == b'4' && b"89ab".contains(&one.as_bytes()[19]), "{one}");
        assert_ne!(one, uuid());
    }

    #[test]
    fn an_empty_host_is_every_address() {
        assert!(listen("", 8093).unwrap().ip().is_unspecified());
        assert_eq!(listen("127.0.0.1", 1).unwrap().to_string(), "127.0.0.1:1");
        assert_eq!(listen("::1", 1).unwrap().to_string(), "[::1]:1");
        assert!(listen("example.com", 1).is_err());
    }
}
