//! `portico join`: machines become nodes of hosted clusters.
//!
//! An administrator has a [`token`] made, and gets the one command for the machines. There [`machine`] is the
//! order of things: the cluster is asked ([`cluster`]), the machine looked at ([`checks`]), what its agents
//! go to tried ([`ways`]), files written ([`files`]), the kubelet started ([`kubelet`]). [`remove`] undoes
//! that. What is written, and whom a machine trusts, is decided in `portico_hosting::join`.

mod checks;
mod cluster;
mod files;
mod kubelet;
mod machine;
mod remove;
mod token;
mod ways;

use anyhow::bail;
use clap::{Args, Subcommand};

use crate::daemon;
use crate::outcome::Outcome;

/// `portico join`, and what belongs to it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Command {
    #[command(flatten)]
    flags: Option<machine::Flags>,
    #[command(subcommand)]
    verb: Option<Verb>,
}

/// What belongs to it.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a bootstrap token, and print the command with which machines join
    ///
    /// On the machine of an administrator. The command works for any number of machines until the token ends.
    /// It pins the authority of the cluster, so that machines can tell the API server from another one.
    #[command(after_help = "\
Examples:
  portico join token a --kubeconfig seed.kubeconfig
  portico join token --cluster-kubeconfig a.kubeconfig --ttl 24h")]
    Token(token::Flags),
    /// Undo on this machine what `portico join` wrote
    ///
    /// Stops the kubelet that systemd runs, and removes the files and the certificates. Containers go on
    /// until the machine starts again, and the Node stays: kubectl delete node NODE.
    #[command(after_help = "\
Example:
  portico join remove")]
    Remove(remove::Flags),
    /// Become a kubelet that ends with the process that started this
    #[command(hide = true)]
    Kubelet(kubelet::Becoming),
}

/// Does what is asked for.
pub(crate) fn run(command: &Command) -> anyhow::Result<Outcome> {
    daemon::runtime()?.block_on(async {
        match &command.verb {
            Some(Verb::Token(flags)) => token::run(flags).await,
            Some(Verb::Remove(flags)) => remove::run(flags).await,
            Some(Verb::Kubelet(flags)) => kubelet::turn(flags),
            None => match &command.flags {
                Some(flags) => machine::run(flags).await,
                None => bail!("give --server, --token and --ca-hash, as `portico join token` prints them"),
            },
        }
    })
}
