//! `portico join move`: the kubelet of this machine reaches its API server by another address.
//!
//! What is done is in `portico_join::moving`. This module has the words for a person or the log of a pod, and
//! the meaning of a signal.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use portico_hosting::join::options::Label;
use portico_join::checks::Findings;
use portico_join::cluster::Server;
use portico_join::moving::{Attempt, Machine, Moved, Tried};
use tokio::time::sleep;

use crate::args::positive_duration;
use crate::daemon::{Daemon, Hangup};
use crate::outcome::{Outcome, print};

/// In a pod, between an attempt that failed and the next.
const AGAIN: Duration = Duration::from_mins(10);

// `portico join move`.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// URL of the cluster's API server from now on
    #[arg(long, value_name = "URL")]
    server: Server,
    /// Time limit for the kubelet to restart, and to renew its lease by it; then all is put back
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = positive_duration)]
    wait: Duration,
    /// Folder below which the files are, as when the machine joined
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Empty the node before its kubelet restarts, as `kubectl drain --delete-emptydir-data
    /// --ignore-daemonsets` does, and open it again at the end. Exit code 1, and the kubelet stays where it
    /// is, if emptying takes longer [default without TIME: 10m]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "10m", value_parser = positive_duration)]
    drain: Option<Duration>,
    /// In a pod that sees the machine's processes and files: a kubelet of systemd is ended, and systemd
    /// starts it again. A machine that `portico join` did not make a node is left alone, exit code 0
    #[arg(long)]
    in_pod: bool,
    /// Begin once the Node has this label
    #[arg(long, value_name = "KEY=VALUE")]
    turn: Option<Label>,
}

/// Moves the kubelet, or leaves everything as it is.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let Some(machine) = Machine::find(&flags.root, flags.in_pod, flags.wait)? else {
        print("`portico join` did not make this machine a node: it is moved by hand\n")?;
        return Ok(Outcome::Done);
    };
    let server = &flags.server.url;
    if let Some(turn) = &flags.turn {
        print(&format!("Node {} waits for its turn: the label {turn}\n", machine.node()))?;
        machine.wait_for_turn(turn, server).await?;
    }
    let outcome = moves(&machine, server, flags.drain).await?;
    if flags.in_pod && outcome == Outcome::No {
        // A kubelet is not to restart again and again for something that a person has to see to.
        let mut daemon = Daemon::start(Hangup::Stops)?;
        print(&format!("The next attempt begins in {AGAIN:?}\n"))?;
        tokio::select! {
            () = sleep(AGAIN) => {}
            _ = daemon.asked_to_stop() => {}
        }
    }
    Ok(outcome)
}

/// Moves the kubelet, after the node was emptied if that is asked for, or leaves everything as it is.
async fn moves(machine: &Machine, server: &str, drain: Option<Duration>) -> anyhow::Result<Outcome> {
    let _lock = machine.lock()?;
    let node = machine.node();
    let attempt = match machine.try_server(server).await? {
        Tried::Yes(attempt) => attempt,
        Tried::IsThere => {
            uncordon(machine, drain).await?;
            print(&format!(
                "Node {node} is at {server} already: nothing was changed, no kubelet restarted\n"
            ))?;
            return Ok(Outcome::Done);
        }
        Tried::No(error) => {
            uncordon(machine, drain).await?;
            return no(&format!("{server} is no way for node {node}: {error:#}. Nothing was changed"));
        }
    };
    // From here on a request to stop is a reason to put back, and not an end in between.
    let mut daemon = Daemon::start(Hangup::Stops)?;
    if let Some(limit) = drain {
        print(&format!("Node {node} is emptied before its kubelet restarts, within {limit:?}\n"))?;
        let emptied = tokio::select! {
            emptied = machine.drain(&attempt, limit) => emptied,
            signal = daemon.asked_to_stop() => Err(anyhow!("{signal} asked to stop")),
        };
        if let Err(error) = emptied {
            uncordon(machine, drain).await?;
            return no(&format!("node {node} is not empty: {error:#}. Its kubelet is where it was"));
        }
    }
    let moved = restart(machine, &attempt, &mut daemon).await;
    uncordon(machine, drain).await?;
    moved
}

/// Has the kubelet start anew with other files, or puts all back.
async fn restart(machine: &Machine, attempt: &Attempt, daemon: &mut Daemon) -> anyhow::Result<Outcome> {
    let (node, server) = (machine.node(), attempt.server());
    print(&format!("{}\n", attempt.announcement(node)))?;
    match machine.restart_with(attempt, daemon.asked_to_stop()).await? {
        Moved::Done => {}
        Moved::PutBack(why) => {
            let from = attempt.from_server();
            return no(&format!("{why:#}. Everything was put back: the node is at {from} as before"));
        }
        Moved::HalfPutBack(why, error) => {
            return no(&format!(
                "{why:#}. And not everything could be put back: {error:#}. Once that is seen to, `portico \
                 join move --server {}` goes on",
                attempt.from_server()
            ));
        }
    }
    print(&format!("Node {node} is at {server}, where its kubelet renews its lease\n"))?;
    if attempt.is_new() {
        print(&format!("Back again: portico join move --server {}\n", attempt.from_server()))?;
    }
    Ok(Outcome::Done)
}

/// Lets pods onto the node again, if this program has closed it.
async fn uncordon(machine: &Machine, drain: Option<Duration>) -> anyhow::Result<()> {
    let node = machine.node();
    match machine.uncordon().await {
        Err(error) if drain.is_some() => print(&format!(
            "WARN node {node} may be closed for new pods still: {error:#}; kubectl uncordon {node}\n"
        )),
        // Nobody asked for a node to be closed.
        _ => Ok(()),
    }
}

/// Says what keeps the machine where it is.
fn no(why: &str) -> anyhow::Result<Outcome> {
    let mut findings = Findings::default();
    findings.fail(why.to_owned());
    print(&findings.lines())?;
    Ok(Outcome::No)
}
