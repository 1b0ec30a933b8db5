//! A thousand Konnectivity agents at a group of three servers. Do all connect to each, what does it cost, and
//! do all come back when one server is killed and started?
//!
//! The agents are Portico's at either make of server (`load::konnectivity_agents`), over mutual TLS. The
//! servers share the proxies' core; half of every handshake's work is the agents', on the other core.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::Bench;
use super::konnectivity::Makes;
use crate::load::konnectivity_agents::Crowd;
use crate::process;
use crate::proxy::konnectivity::{Make, Mode, certificates, start_server};
use crate::proxy::spawned::Spawned;
use crate::report::{Bar, Row};

const AGENTS: usize = 1000;
const SERVERS: u16 = 3;
/// Ports of one server: agents, health, admin.
const PORTS: u16 = 3;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// How long agents may take to come, to notice that a server is gone, or to come back.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long they are watched at rest, and how long they rest before.
const REST: Duration = Duration::from_secs(10);

/// The rows of one run.
pub(crate) fn rows(bench: &Bench, makes: &Makes) -> Result<Vec<Row>> {
    let row = |what: &str, unit, bar| Row::new(format!("1,000 Konnectivity agents, {what}"), unit, bar);
    let mut rows = [
        row("until all are at all three servers", "s", Bar::Open),
        row("a server's memory for each", "KB", Bar::AtMost(25.0)),
        row("all servers at rest", "CPU ms a second", Bar::Open),
        row("a server killed and started: not back", "agents", Bar::AtMost(0.0)),
        row("a server killed and started: until all are back", "s", Bar::Open),
    ];
    for (number, (name, make)) in makes.servers().into_iter().enumerate() {
        let figures = run(bench, number, make)?;
        for (row, figure) in rows.iter_mut().zip(figures) {
            row.add(name, figure);
        }
    }
    Ok(rows.into())
}

/// Three servers of one make; the figures in the order of the rows.
fn run(bench: &Bench, number: usize, make: &Make) -> Result<[f64; 5]> {
    let dir = bench.dir.join(format!("konnectivity-agents-{number}"));
    certificates(&dir)?;
    let first = bench.base_port + 400 + PORTS * SERVERS * u16::try_from(number)?;
    let ports: Vec<u16> = (0..SERVERS).map(|server| first + PORTS * server).collect();
    let start = |port: u16| start_server(&dir, port, make, Mode::HttpConnect, ports.len());
    let mut servers = ports.iter().map(|&port| start(port)).collect::<Result<Vec<_>>>()?;
    std::thread::sleep(REST / 5);
    let empty = memory(&servers)?;
    let begun = Instant::now();
    let crowd = Crowd::start(&dir, &ports, AGENTS)?;
    let all = AGENTS * servers.len();
    let came = wait(&crowd, |now| now >= all);
    ensure!(came == all, "{came} of {all} connections of agents came about");
    let connected = begun.elapsed().as_secs_f64();
    std::thread::sleep(REST);
    let each = (memory(&servers)? - empty) / all as f64 / 1e3;
    let before = cpu(&servers)?;
    std::thread::sleep(REST);
    let rest = (cpu(&servers)? - before) / 1e6 / REST.as_secs_f64();

    servers[0].signal(Signal::KILL)?;
    servers[0].wait()?;
    // Otherwise agents that have not noticed yet would be taken for those that are back.
    let left = wait(&crowd, |now| now <= all - AGENTS);
    ensure!(
        left <= all - AGENTS,
        "{left} of {all} connections are there {PATIENCE:?} after a server was killed"
    );
    servers[0] = start(ports[0])?;
    let begun = Instant::now();
    let back = wait(&crowd, |now| now >= all);
    Ok([connected, each, rest, (all - back.min(all)) as f64, begun.elapsed().as_secs_f64()])
}

/// Waits for a number of connections; as many as there are then.
fn wait(crowd: &Crowd, is_wanted: impl Fn(usize) -> bool) -> usize {
    let end = Instant::now() + PATIENCE;
    while !is_wanted(crowd.connections()) && Instant::now() < end {
        std::thread::sleep(LOOK);
    }
    crowd.connections()
}

fn memory(servers: &[Spawned]) -> Result<f64> {
    let all = servers.iter().map(|server| process::memory_bytes(server.pid()));
    Ok(all.sum::<Result<u64>>()? as f64)
}

fn cpu(servers: &[Spawned]) -> Result<f64> {
    let all = servers.iter().map(|server| process::cpu_nanoseconds(server.pid()));
    Ok(all.sum::<Result<u64>>()? as f64)
}
