//! `portico agent`: holds the address of the `kubernetes` service on a worker node and carries its
//! connections to a gateway.
//!
//! [`flags`] has the settings, and [`control`] the order at start and end. [`status`] is what the process
//! knows of itself, shown by [`pages`] and [`metrics`]. [`check`] only looks whether the address is free.
//! [`ready`] asks a running agent whether it is ready. [`reach`] tries an API server as kubelets do. What
//! moves bytes is in `portico-agent` and `portico-tunnel`.

mod check;
pub(super) mod control;
pub(super) mod flags;
mod left;
mod metrics;
mod observe;
mod pages;
mod proxy_password;
mod reach;
mod ready;
mod status;

use clap::{Args, Subcommand};

use self::flags::Flags;
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::Outcome;

// `portico agent`, and what else there is to an agent.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Command {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    verb: Option<Verb>,
}

// What else there is to an agent.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Only look whether the address could be held here: exit code 1 with the evidence, if not
    ///
    /// Changes nothing, and needs no rights. Looks at this host's interfaces, addresses and routes, and says
    /// so.
    #[command(after_help = "\
Examples:
  portico agent check
  portico agent check --address 10.255.255.10 -o json | jq -r '.collisions[].message'")]
    Check(check::Flags),
    /// Ask the agent of this node whether it is ready: exit code 1, if not
    ///
    /// For readiness probes of pods on the host's network. While one agent takes over from another on a node,
    /// both can be reached at one address, and only one answers. With --instance the answer of the other does
    /// not count.
    #[command(after_help = "\
Example:
  portico agent ready --instance \"$POD_NAME\"")]
    Ready(ready::Flags),
    /// Try whether this machine reaches an API server as its kubelet does: exit code 1, if not
    ///
    /// Connects without a proxy, by TLS with the CA of the cluster and the host in the URL as the name. Asks
    /// for /readyz without any credential, within 10 s. That it answers is enough, also with 401 or 403.
    /// While a cluster migrates between expose strategies, this runs on every node (deploy/migration.yaml).
    #[command(after_help = "\
Examples:
  portico agent reach https://a.example.com:6443 --ca-file /etc/kubernetes/pki/ca.crt

  For as long as it runs, a line for each change:
    portico agent reach https://a.example.com:6443 --ca-file ca.crt --every 5s")]
    Reach(reach::Flags),
    /// Look whether this machine has left an address of the API server: exit code 1, if not
    ///
    /// Looks at the TCP connections of this machine: kubelet, kube-proxy, network plugins and all that shares
    /// the machine's network. Pods with a network of their own do not count, nor does what comes by a proxy.
    /// While the nodes of a cluster are moved to another address, this runs on every node
    /// (deploy/migration-nodes.yaml).
    #[command(after_help = "\
Examples:
  portico agent left https://a.example.com:31234

  For as long as it runs, a line for each change:
    portico agent left https://a.example.com:31234 --every 5s")]
    Left(left::Flags),
}

/// Does what is asked for.
pub(crate) fn run(command: &Command) -> anyhow::Result<Outcome> {
    match &command.verb {
        Some(Verb::Check(flags)) => check::run(flags),
        Some(Verb::Ready(flags)) => ready::run(flags),
        Some(Verb::Reach(flags)) => reach::run(flags),
        Some(Verb::Left(flags)) => left::run(flags),
        None => {
            proxy_password::hide();
            daemon::run(async {
                control::run(&command.flags, Daemon::start(Hangup::of_terminal())?, |_| ()).await
            })
            .map(|()| Outcome::Done)
        }
    }
}
