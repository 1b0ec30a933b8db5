//! `portico etcd`: what runs etcd in the pods of a control plane, and looks after it while it runs.
//!
//! [`join`] decides, from the folder of the data and from what other members say, how a member starts;
//! [`upkeep`] decides what a running ring needs. Both are plain functions; [`client`] asks and does. etcd's
//! JSON gateway is spoken, which every member serves: a dozen calls need no gRPC library, of which this
//! program has none.

mod arguments;
mod client;
mod join;
mod upkeep;

use std::convert::Infallible;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tracing::{error, info, warn};

use self::arguments::Arguments;
use self::client::Client;
use self::join::{Answer, Folder, Step};
use crate::args::positive_duration;
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::Outcome;

/// Between two questions of a member that waits for others. Long enough for nobody to mind.
const AGAIN: Duration = Duration::from_secs(2);

/// Where a kubelet reads the last words of a container. They get into the status of its pod.
const LAST_WORDS: &str = "/dev/termination-log";

/// The two steps: into the pod, and in it.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Copy this program to a file, for a container of another image
    ///
    /// An init container of Portico's image does this, so that etcd runs in upstream's.
    #[command(after_help = "\
Example:
  portico etcd install /launcher/portico")]
    Install {
        /// The file to write
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Start etcd as its data and the other members ask for, and look after it until it ends
    ///
    /// A folder with data is started as it is. An empty one begins a new ring, unless --initialized or
    /// another member says that there is one: then the member of before is removed, this one is added as a
    /// learner, gets all data from the others, and votes again. A single member without its data is not
    /// started, and neither is one whose ring has no majority left: restore a volume then.
    ///
    /// While etcd runs, the leader's launcher gives free space back to the file system, one member after the
    /// other and only while all are healthy. When the database is full (NOSPACE) it compacts, does the same,
    /// and ends the alarm once there is space again. The alarm CORRUPT it ends once the member that has it
    /// has left the ring, as one without its data does. Signals are passed on to etcd, and its exit code is
    /// this one's.
    #[command(after_help = "\
Examples:
  portico etcd run -- etcd --data-dir=/var/lib/etcd/data

  One of three, of a ring that has held data:
    portico etcd run --initialized=true \\
      --endpoints=http://a.example.com:2379,http://b.example.com:2379,http://c.example.com:2379 \\
      -- etcd --name=a --data-dir=/var/lib/etcd/data --advertise-client-urls=http://a.example.com:2379 \\
      --initial-advertise-peer-urls=http://a.example.com:2380 \\
      --initial-cluster=a=http://a.example.com:2380,b=http://b.example.com:2380,c=http://c.example.com:2380")]
    Run(Flags),
}

/// `portico etcd run`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Whether the ring has held data: then no empty one is made in its place
    #[arg(long, value_name = "BOOL", default_value = "false", action = clap::ArgAction::Set)]
    initialized: bool,
    /// The URLs for clients of all members [default: what etcd advertises to clients]
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    endpoints: Vec<String>,
    /// Time between two looks at a running ring
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = positive_duration)]
    look_every: Duration,
    /// etcd with its flags, written as --FLAG=VALUE. Certificates for asking other members are those of
    /// --cert-file, --key-file and --trusted-ca-file
    #[arg(last = true, required = true, value_name = "COMMAND")]
    etcd: Vec<String>,
}

/// Does it. The exit code of a program that ran is returned as it is.
pub(crate) fn run(verb: &Verb) -> anyhow::Result<Outcome> {
    match verb {
        Verb::Install { file } => install(file),
        Verb::Run(flags) => daemon::runtime()?.block_on(flags.launch()),
    }
}

/// By way of a second name: a container that starts anew meanwhile never finds half of it.
fn install(file: &Path) -> anyhow::Result<Outcome> {
    let own = std::env::current_exe().context("asking for the path of this program")?;
    let beside = file.with_extension("new");
    let what = || format!("copying {} to {}", own.display(), file.display());
    fs::copy(&own, &beside).with_context(what)?;
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o755)).with_context(what)?;
    fs::rename(&beside, file).with_context(what)?;
    Ok(Outcome::Done)
}

impl Flags {
    async fn launch(&self) -> anyhow::Result<Outcome> {
        let mut arguments = Arguments::of(&self.etcd)?;
        let own = arguments.endpoint.clone();
        let mut endpoints = self.endpoints.clone();
        if !endpoints.contains(&own) {
            endpoints.push(own.clone());
        }
        let client = Client::new(&endpoints, arguments.tls())?;
        // Process 1 of a container is sent no signal that it does not catch.
        let mut daemon = Daemon::start(Hangup::IsIgnored)?;
        let started = daemon.unless_stopped(self.decide(&mut arguments, &client)).await;
        let Some(started) = started else { return Ok(Outcome::Done) };
        if let Err(refusal) = started {
            error!("{refusal}");
            // Outside of a container there is no such file.
            let _ = fs::write(LAST_WORDS, refusal);
            return Ok(Outcome::No);
        }
        let looks = upkeep::run(&client, &own, self.look_every);
        supervise(&arguments.command, looks, daemon).await
    }

    /// Goes on until there is nothing more to do before etcd can start.
    /// What says why it must not is returned.
    async fn decide(&self, arguments: &mut Arguments, client: &Client) -> Result<(), String> {
        let mut before = None;
        loop {
            let folder = Folder::at(&arguments.data_dir);
            let asks = folder == Folder::Empty && arguments.own.ring.len() > 1;
            let answer = if asks { client.members().await } else { Answer::default() };
            let step = join::decide(&arguments.own, folder, self.initialized, &answer);
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
}

/// Runs etcd, with looks at it, until it ends.
async fn supervise(
    command: &[String],
    looks: impl Future<Output = Infallible>,
    mut daemon: Daemon,
) -> anyhow::Result<Outcome> {
    let (program, rest) = command.split_first().context("no command")?;
    let mut etcd = Command::new(program)
        .args(rest)
        .spawn()
        .with_context(|| format!("starting {program}; give etcd, or its path, after --"))?;
    let pid = etcd.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let mut looks = pin!(looks);
    let mut told = false;
    loop {
        tokio::select! {
            ended = etcd.wait() => return end(ended.context("waiting for etcd")?, told),
            signal = daemon.asked_to_stop() => {
                info!(%signal, "passed on to etcd");
                told = true;
                if let Some(pid) = pid {
                    // An error means that it has ended by itself.
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            never = &mut looks => match never {},
        }
    }
}

/// As etcd ended, so does this; by the signal that it was `told` to end by is a good end.
fn end(status: ExitStatus, told: bool) -> anyhow::Result<Outcome> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(Outcome::Done),
        (None, Some(signal)) if told && signal == Signal::TERM.as_raw() => Ok(Outcome::Done),
        // As shells say it.
        (code, signal) => {
            let code = code.or(signal.map(|signal| 128 + signal)).unwrap_or(1);
            warn!(code, "etcd has ended");
            std::process::exit(code)
        }
    }
}
