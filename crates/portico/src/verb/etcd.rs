//! `portico etcd`: this program as the launcher of etcd in the pods of a control plane.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use portico_etcd::{Ended, Launch};
use tracing::{error, warn};

use crate::args::positive_duration;
use crate::daemon::{self, Daemon, Hangup};
use crate::logging;
use crate::outcome::Outcome;

/// Where a kubelet reads the last words of a container. They get into the status of its pod.
const LAST_WORDS: &str = "/dev/termination-log";

// The two steps: into the pod, and in it.
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
    /// another member says that there is one. If there is, the member of before is removed. This one is added
    /// as a learner, gets all data from the others, and votes again. A single member without its data is not
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

// `portico etcd run`.
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
        Verb::Run(flags) => daemon::run(flags.launch()),
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
        // Process 1 of a container is sent no signal that it does not catch.
        let mut daemon = Daemon::start(Hangup::IsIgnored)?;
        let launch = Launch {
            command: self.etcd.clone(),
            endpoints: self.endpoints.clone(),
            initialized: self.initialized,
            look_every: self.look_every,
        };
        match portico_etcd::run(&launch, async || daemon.asked_to_stop().await).await? {
            Ended::Done => Ok(Outcome::Done),
            Ended::Refused(why) => {
                error!("{why}");
                // Outside of a container there is no such file.
                let _ = fs::write(LAST_WORDS, why);
                Ok(Outcome::No)
            }
            Ended::Failed(code) => {
                warn!(code, "etcd has ended");
                logging::flush();
                std::process::exit(code)
            }
        }
    }
}
