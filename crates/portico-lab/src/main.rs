//! `portico-lab`: a seed, user clusters and workers to play with, on this machine.
//!
//! For contributors; tests use the library. See `docs/lab.md`.

use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use portico_lab::control_plane::Options;
use portico_lab::{Demo, Lab, Seed, UserCluster, lab, programs, say};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Real Kubernetes on one machine: a seed cluster, a user cluster in it, and worker nodes.
#[derive(Parser)]
#[command(name = "portico-lab")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Start a seed cluster, and a user cluster with workers if asked for; stays until Ctrl-C
    #[command(after_help = "Example:\n  cargo run -p portico-lab -- up --workers 1")]
    Up {
        /// Worker nodes of the user cluster `demo`, which is started if there is at least one
        #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=8))]
        workers: u8,
    },
    /// What `portico demo --kubernetes` runs: a seed with the operator and three user clusters; until Ctrl-C
    #[command(after_help = "Example:\n  cargo run -p portico-lab -- demo --no-workers")]
    Demo {
        /// Without worker nodes: less memory, and no pods
        #[arg(long)]
        no_workers: bool,
    },
    /// Take down what labs left behind whose process was killed
    Down,
    /// Install the Debian packages that labs need (as root), without starting their services
    Install,
    /// Build what tests run, where it is not there yet
    Build {
        /// Only these; all of them without any
        #[arg(default_values = ["kubernetes", "konnectivity", "coredns", "metrics-server", "portico"])]
        programs: Vec<Built>,
    },
}

/// What [`Verb::Build`] builds: Kubernetes, upstream's Konnectivity, CoreDNS, metrics-server, a static
/// portico.
#[derive(Clone, Copy, ValueEnum)]
enum Built {
    Kubernetes,
    Konnectivity,
    Coredns,
    MetricsServer,
    Portico,
}

/// Exit codes are those of `portico`: 2 for what could not run.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse().verb).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("{error:#}"));
            ExitCode::from(2)
        }
    }
}

async fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Up { workers } => {
            let greet = |_: &Running| say("running until Ctrl-C");
            let stop = |running| {
                drop(running);
                Ok(())
            };
            stay(move || start(workers), greet, stop).await
        }
        Verb::Demo { no_workers } => stay(move || Demo::start(!no_workers), greet, Demo::stop).await,
        Verb::Down => {
            // Catches them: half a take-down helps nobody, and a second Ctrl-C is soon pressed.
            let _end = End::listen()?;
            let cleaned = lab::clean_up_dead()?;
            say(format_args!("{} lab(s) taken down; labs in use were left alone", cleaned.len()));
            Ok(())
        }
        Verb::Install => programs::install(),
        Verb::Build { programs } => programs.into_iter().try_for_each(build),
    }
}

/// Starts something in a thread of its own, so that Ctrl-C works at any time, has it greet, and ends it by
/// Ctrl-C.
async fn stay<T: Send + 'static>(
    start: impl FnOnce() -> Result<T> + Send + 'static,
    greet: impl FnOnce(&T),
    stop: impl FnOnce(T) -> Result<()>,
) -> Result<()> {
    let mut end = End::listen()?;
    let mut starting = tokio::task::spawn_blocking(start);
    let running = tokio::select! {
        // First: programs that a terminal interrupts too make the start fail.
        biased;
        () = end.asked_for() => return leave_while_starting(),
        running = &mut starting => running.context("starting")??,
    };
    greet(&running);
    end.asked_for().await;
    say("taking everything down");
    stop(running)
}

/// Ctrl-C, `kill`, or a terminal that is closed.
struct End {
    signals: [Signal; 3],
}

impl End {
    fn listen() -> Result<End> {
        let listen = |kind| signal(kind).context("listening for signals");
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(listen);
        Ok(End { signals: [interrupt?, terminate?, hangup?] })
    }

    async fn asked_for(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

fn greet(demo: &Demo) {
    // A reader that left early is no reason to end.
    let _ = std::io::stdout().write_all(demo.guide().as_bytes());
}

fn build(program: Built) -> Result<()> {
    let (what, path) = match program {
        Built::Kubernetes => ("the Kubernetes programs are in", programs::kube()?),
        Built::Konnectivity => ("upstream's Konnectivity is in", programs::konnectivity()?),
        Built::Coredns => ("CoreDNS is in", programs::coredns()?),
        Built::MetricsServer => ("metrics-server is in", programs::metrics_server()?),
        Built::Portico => ("a static portico is", programs::portico()?),
    };
    say(format_args!("{what} {}", path.display()));
    Ok(())
}

/// What `up` keeps alive. Dropped in this order.
struct Running {
    _workers: Vec<portico_lab::Node>,
    _seed: Seed,
}

fn start(workers: u8) -> Result<Running> {
    programs::check_node_tools()?;
    programs::kube()?;
    let lab = Lab::start("up")?;
    say(format_args!("lab {}: state and logs in {}", lab.number(), lab.dir().display()));
    say("starting the seed cluster");
    let seed = Seed::start(&lab)?;
    let mut joined = Vec::new();
    let mut rows = vec![row("seed", seed.host().address(), "etcd, control plane, node", seed.kubectl())];
    if workers > 0 {
        say("starting user cluster demo in the seed");
        UserCluster::prepare(&seed)?;
        let cluster = UserCluster::start(&seed, &Options::new("demo"))?;
        let access = cluster.access(&seed, &expose(&seed, &cluster)?);
        rows.push(row(
            "demo",
            seed.host().address(),
            "control plane as pods in the seed",
            &access.kubectl(seed.host())?,
        ));
        for number in 1..=workers {
            let name = format!("worker-{number}");
            say(format_args!("joining {name} to demo"));
            let node = cluster.join_worker(&seed, &name, &access)?;
            node.import(&portico_lab::Image::busybox()?)?;
            rows.push(row(
                &name,
                node.host().address(),
                "worker node of demo",
                &access.kubectl(node.host())?,
            ));
            joined.push(node);
        }
    }
    seed.import(&portico_lab::Image::busybox()?)?;
    print_table(&rows);
    Ok(Running { _workers: joined, _seed: seed })
}

/// A NodePort Service for the user cluster, and the URL it makes.
fn expose(seed: &Seed, cluster: &UserCluster) -> Result<String> {
    seed.kubectl().apply_json(&json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "apiserver-external", "namespace": cluster.namespace()},
        "spec": {
            "type": "NodePort",
            "selector": {"app": "apiserver"},
            "ports": [{"port": 443, "targetPort": cluster.port()}],
        },
    }))?;
    let service = seed.kubectl().get(&["service", "-n", cluster.namespace(), "apiserver-external"])?;
    let port = service["spec"]["ports"][0]["nodePort"].as_u64().context("the Service got no node port")?;
    Ok(format!("https://{}:{port}", seed.host().address()))
}

fn row(name: &str, address: Ipv4Addr, what: &str, kubectl: &portico_lab::Kubectl) -> [String; 4] {
    [name.to_owned(), address.to_string(), what.to_owned(), kubectl.kubeconfig().display().to_string()]
}

#[allow(clippy::print_stdout, reason = "the answer of this program")]
fn print_table(rows: &[[String; 4]]) {
    println!("{:<10} {:<15} {:<34} KUBECONFIG", "NAME", "ADDRESS", "RUNS");
    for [name, address, what, kubeconfig] in rows {
        println!("{name:<10} {address:<15} {what:<34} {kubeconfig}");
    }
    if let Some([_, _, _, kubeconfig]) = rows.last() {
        let kubectl =
            programs::kube().map(|dir| dir.join("kubectl").display().to_string()).unwrap_or_default();
        println!("\nTry:\n  export KUBECONFIG={kubeconfig}\n  {kubectl} get nodes,pods -A -o wide");
        println!("  {kubectl} run shell --image lab/busybox:1 --restart Never -it --rm -- sh");
    }
}

/// Ctrl-C during the start: the starting thread is in the middle of something and cannot be asked
/// to stop. Becoming `portico-lab down` ends it, gives up the lock on the lab's number, and takes
/// down what was made so far.
fn leave_while_starting() -> Result<()> {
    say("interrupted while starting");
    let this = std::env::current_exe().context("finding this program")?;
    Err(Command::new(this).arg("down").exec()).context("becoming `portico-lab down`")
}
