//! Runs etcd in the pods of a control plane, and looks after it while it runs.
//!
//! `join` decides how a member starts, from the data folder and from the answers of other members.
//! `maintenance` decides what a running ring needs. Both are plain functions; `client` does the I/O. It
//! speaks etcd's JSON gateway, which every member serves: a dozen calls need no gRPC library.

mod arguments;
mod client;
mod join;
mod maintenance;

use std::convert::Infallible;
use std::os::unix::process::ExitStatusExt;
use std::pin::pin;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tracing::{info, warn};

use self::arguments::Arguments;
use self::client::Client;
use self::join::{Answer, Folder, Step};

/// Between two questions of a member that waits for others. Long enough for nobody to mind.
const AGAIN: Duration = Duration::from_secs(2);

/// A member that is to run.
#[derive(Debug)]
pub struct Launch {
    /// etcd with its flags, each written as `--FLAG=VALUE`.
    pub command: Vec<String>,
    /// The URLs for clients of all members. That of this one may be missing.
    pub endpoints: Vec<String>,
    /// Whether the ring has held data: then no empty one is made in its place.
    pub initialized: bool,
    /// Time between two looks at a running ring.
    pub look_every: Duration,
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to stop, and has; or etcd has by itself, without an error.
    Done,
    /// etcd must not start, and why.
    Refused(String),
    /// etcd ended with this exit code; by a signal with 128 and its number, as shells say it.
    Failed(i32),
}

/// Starts etcd as its data and the other members ask for, and looks after it until it ends. Each time that
/// `asked_to_stop` returns the name of a signal, etcd is asked to end.
///
/// # Errors
/// The command is none of etcd, or cannot be started.
pub async fn run(
    launch: &Launch,
    mut asked_to_stop: impl AsyncFnMut() -> &'static str,
) -> anyhow::Result<Ended> {
    let mut arguments = Arguments::of(&launch.command)?;
    let own = arguments.endpoint.clone();
    let mut endpoints = launch.endpoints.clone();
    if !endpoints.contains(&own) {
        endpoints.push(own.clone());
    }
    let client = Client::new(&endpoints, arguments.tls())?;
    let decided = tokio::select! {
        decided = decide(launch, &mut arguments, &client) => decided,
        signal = asked_to_stop() => {
            info!(%signal, "told to stop before etcd was started");
            return Ok(Ended::Done);
        }
    };
    match decided {
        Ok(()) => {
            let looks = maintenance::run(&client, &own, launch.look_every);
            supervise(&arguments.command, looks, asked_to_stop).await
        }
        Err(why) => Ok(Ended::Refused(why)),
    }
}

/// Goes on until there is nothing more to do before etcd can start.
/// What says why it must not is returned.
async fn decide(launch: &Launch, arguments: &mut Arguments, client: &Client) -> Result<(), String> {
    let mut before = None;
    loop {
        let folder = Folder::at(&arguments.data_dir);
        let asks = folder == Folder::Empty && arguments.own.ring.len() > 1;
        let answer = if asks { client.members().await } else { Answer::default() };
        let step = join::decide(&arguments.own, folder, launch.initialized, &answer);
        if before.as_ref() != Some(&step) {
            info!(?folder, "{step}");
        }
        let done = match &step {
            Step::AsItIs => return Ok(()),
            Step::New => {
                arguments.set("initial-cluster-state", "new");
                return Ok(());
            }
            Step::Existing { ring } => {
                arguments.set("initial-cluster-state", "existing");
                arguments.set("initial-cluster", ring);
                return Ok(());
            }
            Step::Remove { id } => client.remove(*id).await,
            Step::Add => client.add(&arguments.own.peer_url).await,
            Step::Wait => Ok(()),
            Step::Refuse(why) => return Err(why.clone()),
        };
        if let Err(error) = &done {
            warn!("{step}: {error:#}; tried again");
        }
        let rests = done.is_err() || step == Step::Wait;
        before = Some(step);
        if rests {
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// Runs etcd, with looks at it, until it ends.
async fn supervise(
    command: &[String],
    looks: impl Future<Output = Infallible>,
    mut asked_to_stop: impl AsyncFnMut() -> &'static str,
) -> anyhow::Result<Ended> {
    let (program, rest) = command.split_first().context("no command")?;
    let mut etcd = Command::new(program)
        .args(rest)
        .spawn()
        .with_context(|| format!("starting {program}; give etcd, or its path, after --"))?;
    let pid = etcd.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let mut looks = pin!(looks);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = etcd.wait() => return Ok(end(ended.context("waiting for etcd")?, stopping)),
            signal = asked_to_stop() => {
                info!(%signal, "passed on to etcd");
                stopping = true;
                if let Some(pid) = pid {
                    // An error means that it has ended by itself.
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            never = &mut looks => match never {},
        }
    }
}

/// Ends as etcd ended. While `stopping`, an end by the signal that was passed on is a good one.
fn end(status: ExitStatus, stopping: bool) -> Ended {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ended::Done,
        (None, Some(signal)) if stopping && signal == Signal::TERM.as_raw() => Ended::Done,
        (code, signal) => Ended::Failed(code.or(signal.map(|signal| 128 + signal)).unwrap_or(1)),
    }
}
