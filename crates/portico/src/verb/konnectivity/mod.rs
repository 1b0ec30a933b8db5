//! `portico konnectivity`: the way back from an API server to the nodes, with the flags of the upstream
//! programs.
//!
//! Both halves share the forms of values ([`flag_values`]), flags without effect ([`klog`],
//! [`ignored_flags`]) and names made up ([`uuid`]). What moves bytes is in `portico-konnectivity`.

mod agent;
mod flag_values;
mod ignored_flags;
mod klog;
mod requests;
mod server;
#[cfg(test)]
mod upstream_flags;
mod uuid;

use clap::Subcommand;

use crate::daemon::Daemon;
use crate::outcome::Outcome;

// The two halves.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Dial in the user cluster what Konnectivity servers ask for, until told to stop
    ///
    /// Takes every flag of the upstream proxy-agent, with the same meaning and default: an existing manifest
    /// works when image and command change. With a server of Portico each connection has an HTTP/2 stream of
    /// its own, with flow control and half-close. Upstream has no limits of these kinds: --max-connections,
    /// --max-dials, --connection-buffer, --max-held-bytes.
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
    /// its own, with flow control and half-close.
    ///
    /// Two defaults differ: a dial ends after 30 seconds (--backend-dial-timeout), and a silent agent of
    /// upstream gets PING after 30 seconds (--keepalive-time). Upstream has no limits of these kinds:
    /// --max-agents, --connection-buffer, --max-held-bytes, 64 identifiers of an agent, 1024 Proxy streams of
    /// one connection.
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
