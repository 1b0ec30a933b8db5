//! `portico-lab`: a seed, user clusters and workers to play with, on this machine.
//!
//! For contributors; tests use the library. See `docs/lab.md`.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use portico_lab::control_plane::Options;
use portico_lab::{Lab, Seed, UserCluster, lab, programs, say};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

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
    /// Take down what labs left behind whose process was killed
    Down,
    /// Install the Debian packages that labs need (as root), without starting their services
    Install,
    /// Build what tests run, where it is not there yet: Kubernetes, upstream's Konnectivity, a static portico
    Build,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    match Arguments::parse().verb {
        Verb::Up { workers } => up(workers).await,
        Verb::Down => {
            let cleaned = lab::clean_up_dead()?;
            say(format_args!("{} lab(s) taken down; labs in use were left alone", cleaned.len()));
            Ok(())
        }
        Verb::Install => programs::install(),
        Verb::Build => {
            let dir = programs::kube()?;
            say(format_args!("the Kubernetes programs are in {}", dir.display()));
            say(format_args!("upstream's Konnectivity is in {}", programs::konnectivity()?.display()));
            say(format_args!("a static portico is {}", programs::portico()?.display()));
            Ok(())
        }
    }
}

/// Starts in a thread of its own, so that Ctrl-C works at any time.
async fn up(workers: u8) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut starting = tokio::task::spawn_blocking(move || start(workers));
    let running = tokio::select! {
        running = &mut starting => running.context("starting the lab")??,
        _ = interrupt.recv() => return leave_while_starting(),
        _ = terminate.recv() => return leave_while_starting(),
    };
    say("running until Ctrl-C");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    say("taking the lab down");
    drop(running);
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
