//! `portico join`: machines become nodes of hosted clusters.
//!
//! An administrator has a [`token`] made, and gets the one command for the machines. There [`machine`] is the
//! order of things, [`moving`] leads it to another address, and [`remove`] undoes all of it. Their work on
//! the machine is in `portico_join`.

mod machine;
mod moving;
mod remove;
mod token;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, Subcommand};
use portico_join::kubelet;

use crate::daemon;
use crate::outcome::Outcome;

// `portico join`, and what belongs to it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Command {
    #[command(flatten)]
    flags: Option<machine::Flags>,
    #[command(subcommand)]
    verb: Option<Verb>,
}

// What belongs to it.
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
    /// Have the kubelet of this machine reach its API server by another address
    ///
    /// For a cluster whose address changes, on each machine that joined by `portico join`. The address is
    /// tried first, as the kubelet would reach it: if no API server of this cluster answers there, nothing is
    /// changed. Then the server in the kubelet's files is replaced. The kubelet is restarted (one of `portico
    /// join --kubelet` within a second) and waited for: it has to be well, and to renew the lease of its
    /// Node. Else everything is put back. Containers run on, and the Node stays Ready; open exec, logs -f and
    /// port-forward of this node end. Whatever ends this command, running it again finishes, or with the
    /// former address undoes. Exit code 1 if the machine stays where it was.
    #[command(
        name = "move",
        after_help = "\
Examples:
  portico join move --server https://a.example.com:6443

  A machine that joined with --root, and joins more slowly than others:
    portico join move --server https://a.example.com:6443 --root /srv/node --wait 5m

  Nothing that runs here is to notice:
    portico join move --server https://a.example.com:6443 --drain"
    )]
    Move(moving::Flags),
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
    Kubelet {
        /// The process to end with
        parent: i32,
        /// The kubelet
        program: PathBuf,
        /// Its arguments
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
}

/// Does what is asked for.
pub(crate) fn run(command: &Command) -> anyhow::Result<Outcome> {
    daemon::run(async {
        match &command.verb {
            Some(Verb::Token(flags)) => token::run(flags).await,
            Some(Verb::Move(flags)) => moving::run(flags).await,
            Some(Verb::Remove(flags)) => remove::run(flags).await,
            Some(Verb::Kubelet { parent, program, arguments }) => {
                match kubelet::turn(*parent, program, arguments)? {}
            }
            None => match &command.flags {
                Some(flags) => machine::run(flags).await,
                None => bail!("give --server, --token and --ca-hash, as `portico join token` prints them"),
            },
        }
    })
}
