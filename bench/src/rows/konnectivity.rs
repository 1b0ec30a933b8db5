//! Konnectivity: server and agent together beside upstream's, and each beside upstream's other part.
//!
//! The pairs run at once on the proxies' core, under TLS between server and agent. CPU and memory are those
//! of both processes, as in [`super::pair`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use portico_lab::programs;

use super::rounds::measure;
use super::{Bench, Participant};
use crate::hello::Order;
use crate::load::bulk::{self, Direction};
use crate::load::konnectivity::round_trips;
use crate::load::pingpong::PingPong;
use crate::process;
use crate::proxy::konnectivity::{Konnectivity, Make, Mode};
use crate::report::{Bar, Row, quantile};
use crate::rows::Processes;

/// The column of upstream's pair.
const UPSTREAM: &str = "upstream";
/// Connections that exchange messages at the same time, and the size of a message.
const CONVERSATIONS: usize = 16;
const MESSAGE: usize = 128;
/// Transfers at the same time. With more, upstream's server stalls: the first transfer is not read while the
/// next one is opened.
const AT_ONCE: usize = 1;
/// Connections at rest, and those that came and went before.
const IDLE: usize = 900;
const WARM_UP: usize = 50;
/// From the last work until a process is taken to rest: it gives memory back.
const REST: Duration = Duration::from_secs(3);
/// Connections whose frontend has stopped reading, and how many bytes the backend has for each.
const STOPPED: usize = 4;
const ENDLESS: u64 = 1 << 40;
/// Ports of a pair.
const PORTS: u16 = 6;

/// The programs.
pub(crate) struct Makes {
    /// `None` if it is left out.
    upstream: Option<Make>,
    portico: Make,
}

impl Makes {
    /// Upstream's are built if need be.
    pub(crate) fn find(portico: PathBuf, with_upstream: bool) -> Result<Self> {
        let upstream = with_upstream.then(programs::konnectivity).transpose()?.map(Make::Upstream);
        Ok(Self { upstream, portico: Make::Portico(portico) })
    }

    /// The folder of upstream's programs.
    fn programs(&self) -> Option<&Path> {
        match &self.upstream {
            Some(Make::Upstream(programs)) => Some(programs),
            _ => None,
        }
    }

    /// Server and agent of one make.
    fn pure(&self) -> Vec<(&'static str, &Make, &Make)> {
        self.servers().into_iter().map(|(name, make)| (name, make, make)).collect()
    }

    /// The servers' makes.
    pub(crate) fn servers(&self) -> Vec<(&'static str, &Make)> {
        let upstream = self.upstream.iter().map(|make| (UPSTREAM, make));
        upstream.chain([("Portico", &self.portico)]).collect()
    }

    /// Every server with every agent.
    fn all(&self) -> Vec<(&'static str, &Make, &Make)> {
        let Some(theirs) = &self.upstream else { return self.pure() };
        let ours = &self.portico;
        vec![
            (UPSTREAM, theirs, theirs),
            ("Portico's server", ours, theirs),
            ("Portico's agent", theirs, ours),
            ("Portico", ours, ours),
        ]
    }
}

/// All rows.
pub(crate) fn rows(bench: &Bench, makes: &Makes) -> Result<Vec<Row>> {
    let mut rows = steady(bench, makes)?;
    rows.extend(at_rest(bench, makes)?);
    rows.extend(stopped(bench, makes, Mode::HttpConnect)?);
    if let Some(programs) = makes.programs() {
        rows.extend(stopped(bench, makes, Mode::Grpc(programs))?);
    }
    Ok(rows)
}

fn start(
    bench: &Bench,
    row: &str,
    number: usize,
    makes: (&Make, &Make),
    mode: Mode<'_>,
) -> Result<Konnectivity> {
    let dir = bench.dir.join(format!("konnectivity-{row}-{number}"));
    let port = bench.base_port + 100 + PORTS * u16::try_from(number)?;
    Konnectivity::start(&dir, port, bench.clusters(1)[0].backend, makes, mode)
}

fn steady(bench: &Bench, makes: &Makes) -> Result<Vec<Row>> {
    let mut pairs = Vec::new();
    for (number, (name, server, agent)) in makes.pure().into_iter().enumerate() {
        pairs.push(Participant {
            name,
            running: start(bench, "steady", number, (server, agent), Mode::HttpConnect)?,
        });
    }
    let row = |what: &str, unit, factor| {
        Row::new(format!("Konnectivity, both ends: {what}"), unit, Bar::Times { peer: UPSTREAM, factor })
    };
    let mut connection = row("new connection", "CPU µs", 0.45);
    measure(bench, &mut connection, &pairs, 1e6, |_, pair, slice| pair.front.churn(slice))?;

    let mut established = pairs
        .iter()
        .map(|pair| PingPong::over(pair.running.front.open_all(CONVERSATIONS, Order::Echo)?, MESSAGE))
        .collect::<Result<Vec<_>>>()?;
    let mut round_trip = row(&format!("round trip, {CONVERSATIONS} connections"), "CPU µs", 0.5);
    measure(bench, &mut round_trip, &pairs, 1e6, |number, _, slice| established[number].run(slice))?;

    let mut rows = vec![connection, round_trip];
    for (name, direction) in [("bulk download", Direction::Download), ("bulk upload", Direction::Upload)] {
        let mut cost = row(name, "CPU s per GB", 0.13);
        let mut time = row(&format!("{name}, time"), "s per GB", 1.0 / 7.0);
        measure(bench, &mut cost, &pairs, 1e9, |number, pair, slice| {
            let begun = std::time::Instant::now();
            let work = bulk::over(slice, direction, || pair.front.open_all(AT_ONCE, direction.order()))?;
            time.add(pairs[number].name, begun.elapsed().as_secs_f64() / work.units as f64 * 1e9);
            Ok(work)
        })?;
        // The visit that does not count.
        for samples in time.samples.values_mut() {
            samples.remove(0);
        }
        rows.extend([cost, time]);
    }
    Ok(rows)
}

/// Memory, one pair after the other, each part from a file of its own: pages that two share would count half.
fn at_rest(bench: &Bench, makes: &Makes) -> Result<Vec<Row>> {
    let row =
        |what: &str, unit, most| Row::new(format!("Konnectivity at rest: {what}"), unit, Bar::AtMost(most));
    let mut server_row = row("server with one agent", "MB", 12.0);
    let mut agent_row = row("agent", "MB", 12.0);
    let mut idle_row = row("idle connection, both ends", "bytes", 8000.0);
    for (number, (name, server, agent)) in makes.pure().into_iter().enumerate() {
        let agent = agent.apart(&bench.dir)?;
        let pair = start(bench, "rest", number, (server, &agent), Mode::HttpConnect)?;
        drop(pair.front.open_all(WARM_UP, Order::Answer)?);
        std::thread::sleep(REST);
        let [before_server, before_agent] = memory(&pair)?;
        server_row.add(name, before_server / 1e6);
        agent_row.add(name, before_agent / 1e6);
        let resting = pair.front.open_all(IDLE, Order::Answer)?;
        let [with_server, with_agent] = memory(&pair)?;
        idle_row.add(name, (with_server + with_agent - before_server - before_agent) / IDLE as f64);
        drop(resting);
    }
    Ok(vec![server_row, agent_row, idle_row])
}

fn memory(pair: &Konnectivity) -> Result<[f64; 2]> {
    let of = |pid| process::memory_bytes(pid).map(|bytes| bytes as f64);
    let pids = pair.pids();
    Ok([of(pids[0])?, of(pids[1])?])
}

/// Round trips of others while some frontends do not read what comes for them.
fn stopped(bench: &Bench, makes: &Makes, mode: Mode<'_>) -> Result<Vec<Row>> {
    let (protocol, dir) = match mode {
        Mode::HttpConnect => ("HTTP CONNECT", "stopped"),
        Mode::Grpc(_) => ("gRPC", "stopped-grpc"),
    };
    let name = format!("Konnectivity beside four stopped readers, {protocol}: round trip");
    let mut p99 = Row::new(&name, "p99 in µs", Bar::Open);
    let mut ratio = Row::new(&name, "p99 ÷ undisturbed", Bar::AtMost(2.0));
    for (number, (column, server, agent)) in makes.all().into_iter().enumerate() {
        let pair = start(bench, dir, number, (server, agent), mode)?;
        let socket = pair.front.open(Order::Echo)?;
        let length = bench.rounds.slice * 3;
        let message = [0x17; MESSAGE];
        let p99_of = |times: Vec<Duration>| {
            let micros: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
            quantile(&micros, 0.99).context("a slice is long enough for a round trip")
        };
        let Some(alone) = round_trips(&socket, &message, length)? else {
            for row in [&mut p99, &mut ratio] {
                row.fail(column, "stands still undisturbed");
            }
            continue;
        };
        let stopped = pair.front.stop_reading(STOPPED, Order::Send(ENDLESS))?;
        std::thread::sleep(REST);
        match round_trips(&socket, &message, length)? {
            Some(beside) => {
                let (alone, beside) = (p99_of(alone)?, p99_of(beside)?);
                p99.add(column, beside);
                ratio.add(column, beside / alone);
            }
            None => {
                for row in [&mut p99, &mut ratio] {
                    row.fail(column, "stands still");
                }
            }
        }
        drop(stopped);
    }
    Ok(vec![p99, ratio])
}
