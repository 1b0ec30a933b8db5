//! `portico join --server`: the order of things on the machine. Look, decide, write, start, wait.

use std::fmt::Write as _;
use std::future;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use clap::{ArgGroup, Args};
use portico_hosting::join::machine::{Cluster, Machine, NewFile, Paths, arguments, files, settings, unit};
use portico_hosting::join::options::{Label, NodeName, Taint};
use portico_hosting::join::token::Token;
use portico_hosting::join::trust::CaHash;
use portico_join::checks::Findings;
use portico_join::cluster::{Answers, Server, ask};
use portico_join::files::{Before, Record, before, record, write};
use portico_join::kubelet_process::Staying;
use portico_join::{kubelet, reachability};
use serde_json::Value;

use crate::args::positive_duration;
use crate::daemon::{Daemon, Hangup};
use crate::outcome::{Outcome, print};

/// Where packages and people put the kubelet.
const PROGRAMS: [&str; 2] = ["/usr/bin/kubelet", "/usr/local/bin/kubelet"];

// `portico join`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("secret").required(true))]
pub(super) struct Flags {
    /// URL of the cluster's API server
    #[arg(long, value_name = "URL")]
    server: Server,
    /// The bootstrap token. Users of this machine can read it among the arguments while this command runs
    #[arg(long, value_name = "TOKEN", group = "secret")]
    token: Option<Token>,
    /// File with the bootstrap token, in place of --token
    #[arg(long, value_name = "FILE", group = "secret")]
    token_file: Option<PathBuf>,
    /// Hash of the cluster's authority; nothing else is trusted. Can be given several times
    #[arg(long, value_name = "HASH", required = true)]
    ca_hash: Vec<CaHash>,
    /// Name of the node [default: the machine's]
    #[arg(long, value_name = "NAME")]
    node_name: Option<NodeName>,
    /// Address that others reach the node at [default: the kubelet's choice]
    #[arg(long, value_name = "ADDRESS")]
    node_ip: Option<IpAddr>,
    /// Label of the node, KEY=VALUE. Can be given several times
    #[arg(long, value_name = "LABEL")]
    label: Vec<Label>,
    /// Taint of the node, KEY=VALUE:EFFECT. Can be given several times
    #[arg(long, value_name = "TAINT")]
    taint: Vec<Taint>,
    /// Start this kubelet and stay with it, instead of having systemd run the installed one
    #[arg(long, value_name = "FILE")]
    kubelet: Option<PathBuf>,
    /// Fields of a KubeletConfiguration for this machine, over those of the cluster
    #[arg(long, value_name = "FILE")]
    kubelet_config: Option<PathBuf>,
    /// Time limit for the node's certificate
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = positive_duration)]
    wait: Duration,
    /// Print what would be written and started, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Folder below which files are written, for machines that share their disk
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// What runs the kubelet.
enum Runner<'a> {
    Systemd { program: &'a Path, has_unit: bool },
    Here(&'a Path),
}

/// Makes this machine a node.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let paths = Paths::below(&std::path::absolute(&flags.root)?);
    let name = match &flags.node_name {
        Some(name) => name.clone(),
        None => host_name()?,
    };
    let own = flags.kubelet_config.as_deref().map(own_settings).transpose()?.unwrap_or_default();
    let machine = Machine {
        name: &name,
        address: flags.node_ip,
        labels: &flags.label,
        taints: &flags.taint,
        own: &own,
    };
    let arguments = arguments(&machine, &paths);
    let runner = runner(flags, &paths)?;
    let ours = match before(&paths, &flags.ca_hash)? {
        Before::Open { ours } => ours,
        Before::Joined(record) => return again(flags, &record, &runner, &paths, &name, &arguments).await,
    };

    // A kubelet that systemd starts knows nothing of the proxy that this environment names.
    let by_environment = matches!(runner, Runner::Here(_));
    let token = flags.token()?;
    let asked = ask(&flags.server, &token, &flags.ca_hash, &name, by_environment).await;
    let mut findings = Findings::default();
    findings.machine(asked.time);
    let answers = match asked.answers {
        Ok(answers) => Some(answers),
        Err(error) => {
            findings.fail(format!("{error:#}"));
            None
        }
    };
    let config = answers.as_ref().map(|answers| answers.kubelet.of(&machine, &paths));
    if let (Some(answers), Some(config)) = (&answers, &config) {
        if answers.name_is_taken {
            findings.fail(format!(
                "a Node {name} is there and ready: another machine has this name, and --node-name gives this \
                 one another. If this machine had it until now: kubectl delete node {name}"
            ));
        }
        findings.configuration(config);
        findings.kubelet(runner.program(), &answers.version);
        reachability::look(&answers.kubelet, &mut findings).await;
    }
    print(&findings.lines())?;
    let (Some(answers), Some(config), false) = (answers, config, findings.keep_out()) else {
        return Ok(Outcome::No);
    };

    let cluster = Cluster { server: &flags.server.url, authority: &answers.authority, token: &token };
    let files = all_files(&cluster, &answers, &config, &runner, &paths, &arguments);
    if flags.dry_run {
        print(&plan(&files, &runner, &arguments))?;
        return Ok(Outcome::Done);
    }
    let record = Record {
        server: flags.server.to_string(),
        authority: CaHash::all(&answers.authority).iter().map(ToString::to_string).collect(),
        node: name.to_string(),
        files: Vec::new(),
        systemd: matches!(runner, Runner::Systemd { .. }),
    };
    write(&paths, record, &files, &ours)?;
    start(flags, &runner, &paths, &name, &flags.server.url, &arguments).await
}

impl Flags {
    /// Whichever way it is given, of which clap demands one.
    fn token(&self) -> anyhow::Result<Token> {
        let Some(path) = &self.token_file else {
            return self.token.clone().context("give --token or --token-file");
        };
        let cannot = || format!("--token-file {}", path.display());
        let text = std::fs::read_to_string(path).with_context(cannot)?;
        text.trim().parse().map_err(|error: String| anyhow!(error)).with_context(cannot)
    }
}

/// A machine that joined before: with systemd there is nothing to do, else its kubelet is started again.
async fn again(
    flags: &Flags,
    record: &Record,
    runner: &Runner<'_>,
    paths: &Paths,
    name: &NodeName,
    arguments: &[String],
) -> anyhow::Result<Outcome> {
    ensure!(
        record.node == name.as_str(),
        "this machine is node {} of this cluster, and cannot become {name} as well: `portico join remove` \
         takes it out first",
        record.node
    );
    let why = match runner {
        Runner::Here(_) if record.systemd => "systemd runs its kubelet: leave --kubelet out",
        Runner::Systemd { .. } if !record.systemd => {
            "`portico join --kubelet` runs its kubelet: give --kubelet"
        }
        Runner::Here(_) | Runner::Systemd { .. } => "",
    };
    ensure!(
        why.is_empty(),
        "this machine is node {name} already, and {why}, or take it out first (portico join remove)"
    );
    let without_effect = without_effect(flags, runner);
    if !without_effect.is_empty() {
        print(&format!(
            "{}: only when a machine joins. To change that: portico join remove, and join again\n",
            without_effect.join(", ")
        ))?;
    }
    if let (Runner::Here(_), false) = (runner, flags.dry_run) {
        return start(flags, runner, paths, name, &record.server, arguments).await;
    }
    print(&format!("This machine is node {name} of the cluster at {} already\n", record.server))?;
    if record.server != flags.server.url {
        print(&format!("To the other address: portico join move --server {}\n", flags.server))?;
    }
    Ok(Outcome::Done)
}

/// The flags given that have no effect on a machine that joined before: those that are in files.
fn without_effect(flags: &Flags, runner: &Runner<'_>) -> Vec<&'static str> {
    // Without systemd, the kubelet's arguments are those of this command.
    let has_unit = matches!(runner, Runner::Systemd { .. });
    let given = [
        ("--label", has_unit && !flags.label.is_empty()),
        ("--node-ip", has_unit && flags.node_ip.is_some()),
        ("--taint", !flags.taint.is_empty()),
        ("--kubelet-config", flags.kubelet_config.is_some()),
    ];
    given.into_iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| flag).collect()
}

/// Starts the kubelet, and waits until it is a node's.
async fn start(
    flags: &Flags,
    runner: &Runner<'_>,
    paths: &Paths,
    name: &NodeName,
    server: &str,
    arguments: &[String],
) -> anyhow::Result<Outcome> {
    let welcome = format!("This machine is node {name} of the cluster at {server}\n");
    match runner {
        Runner::Systemd { .. } => {
            kubelet::start_unit().await?;
            kubelet::joined(paths, name, flags.wait).await?;
            print(&welcome)?;
        }
        Runner::Here(program) => {
            // Before the kubelet runs: it would outlive a process that a signal ends.
            let mut daemon = Daemon::start(Hangup::Stops)?;
            let mut kubelet = Staying::start(program, arguments, paths)?;
            let joined = async {
                kubelet::joined(paths, name, flags.wait).await?;
                print(&welcome)?;
                future::pending::<anyhow::Result<()>>().await
            };
            tokio::select! {
                ended = kubelet.stay() => ended?,
                failed = joined => failed?,
                _ = daemon.asked_to_stop() => kubelet.end().await?,
            }
        }
    }
    Ok(Outcome::Done)
}

impl Runner<'_> {
    fn program(&self) -> &Path {
        match self {
            Self::Systemd { program, .. } | Self::Here(program) => program,
        }
    }
}

fn runner<'a>(flags: &'a Flags, paths: &Paths) -> anyhow::Result<Runner<'a>> {
    if let Some(program) = &flags.kubelet {
        return Ok(Runner::Here(program));
    }
    ensure!(
        flags.dry_run || flags.root == Path::new("/"),
        "systemd runs the kubelet of this machine, whose files are below /: --root goes with --kubelet"
    );
    ensure!(
        Path::new("/run/systemd/system").exists(),
        "systemd does not run this machine: name a kubelet by --kubelet, which this command then stays with"
    );
    let program = PROGRAMS.map(Path::new).into_iter().find(|path| path.exists());
    let program = program.ok_or_else(|| {
        anyhow!("there is no kubelet at {}: install one, or name it by --kubelet", PROGRAMS.join(" or "))
    })?;
    // Not the one that joining wrote when it was run before.
    let written = paths.unit(false);
    let ours = record(paths)?.is_some_and(|record| record.files.contains(&written));
    let has_unit = paths.units().iter().any(|unit| unit.exists() && !(ours && *unit == written));
    Ok(Runner::Systemd { program, has_unit })
}

fn all_files(
    cluster: &Cluster<'_>,
    answers: &Answers,
    config: &Value,
    runner: &Runner<'_>,
    paths: &Paths,
    arguments: &[String],
) -> Vec<NewFile> {
    let mut files = Vec::from(files(cluster, &answers.kubelet, config, paths));
    if let Runner::Systemd { program, has_unit } = runner {
        files.push(unit(program, arguments, *has_unit, paths));
    }
    files
}

/// What would happen. The token is not repeated: what this prints is pasted into tickets.
fn plan(files: &[NewFile], runner: &Runner<'_>, arguments: &[String]) -> String {
    let mut plan = String::new();
    for file in files {
        let is_secret = file.mode & 0o077 == 0;
        let content = if is_secret { "(holds the token)\n" } else { &file.content };
        // Writing to a String cannot fail.
        let _ = writeln!(plan, "# {} ({:o})\n{content}", file.path.display(), file.mode);
    }
    let command = match runner {
        Runner::Systemd { .. } => "systemctl restart kubelet.service".to_owned(),
        Runner::Here(program) => format!("{} {}", program.display(), arguments.join(" ")),
    };
    let _ = writeln!(plan, "# then\n{command}");
    plan
}

fn own_settings(path: &Path) -> anyhow::Result<Value> {
    let cannot = || format!("cannot use {}", path.display());
    let text = std::fs::read_to_string(path).with_context(cannot)?;
    settings(&text).map_err(|error| anyhow!(error)).with_context(cannot)
}

/// As kubelets name their nodes: the host name in lower case.
fn host_name() -> anyhow::Result<NodeName> {
    let name = rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase();
    name.parse().map_err(|error| anyhow!("{error}; --node-name gives one"))
}
