//! Ten thousand agents, and a gateway that is killed and started, or replaced by a successor: do all come
//! back, when, at what cost?
//!
//! The agents are the tunnel client of `portico agent`, over TLS, each with the certificate of its cluster
//! (`load::fleet`). Each has one tunnel and not two, as a process may often not have more than 20,000
//! descriptors and the gateway needs one a tunnel and one a stream. There is one gateway, so that a restart
//! leaves no agent another way; it has one core, the agents and the backend have the other. Half of every
//! handshake's work is the agents', so "until all are back" is mostly their core's time, too.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::Bench;
use crate::load::fleet::{Fleet, Orders, Report};
use crate::pki::Pki;
use crate::process;
use crate::proxy::Proxy;
use crate::proxy::spawned::Spawned;
use crate::report::{Bar, Row};

/// Worker nodes.
const AGENTS: usize = 10_000;
/// Processes they are simulated in.
const PROCESSES: usize = 4;
/// User clusters they belong to.
const CLUSTERS: usize = 100;
/// One agent of so many has a pod that holds a stream.
const POD_EVERY: usize = 5;
const PODS: usize = AGENTS / POD_EVERY;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);
/// How long agents may take to come, or to come back.
const PATIENCE: Duration = Duration::from_secs(240);
/// How long the fleet is watched at rest, and how long it rests before.
const REST: Duration = Duration::from_secs(10);

/// The rows of one run; none without a Portico.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let clusters = bench.clusters(CLUSTERS);
    let pki = Pki::make(bench.dir.join("fleet-pki"), clusters.iter().map(|cluster| &*cluster.id))?;
    let ours = bench.tunnelling().find(|(_, proxy, _)| proxy.name() == "Portico");
    let secured = ours.and_then(|(number, proxy, _)| Some((number, proxy.with_tls(&pki)?)));
    let Some((number, proxy)) = secured else { return Ok(Vec::new()) };
    let gateway = bench.start_proxy(proxy.as_ref(), number, clusters, "fleet")?;
    let each = AGENTS / PROCESSES;
    let orders = |part: usize| Orders {
        pki: pki.dir().to_owned(),
        gateway: gateway.site.tunnel,
        backend_port: bench.backend_port(),
        clusters: CLUSTERS,
        first: part * each,
        agents: each,
        pod_every: POD_EVERY,
    };
    let fleet = Fleet::start(&bench.dir, &(0..PROCESSES).map(orders).collect::<Vec<_>>())?;
    let mut table = Table { name: proxy.name(), rows: Vec::new() };
    let mut scene = Scene { fleet, gateway, proxy, table: &mut table };

    let empty = process::memory_bytes(scene.gateway.pid())?;
    let arrival = scene.watch(Report::default(), None)?;
    ensure!(
        arrival.last.up == AGENTS,
        "only {} of {AGENTS} agents came: see the gateway's log",
        arrival.last.up
    );
    scene.rest(empty)?;
    scene.kill()?;
    scene.replace()?;
    Ok(table.rows)
}

struct Table {
    name: &'static str,
    rows: Vec<Row>,
}

impl Table {
    fn add(&mut self, name: &str, unit: &'static str, bar: Bar, figure: f64) {
        let mut row = Row::new(format!("10,000 agents, {name}"), unit, bar);
        row.add(self.name, figure);
        self.rows.push(row);
    }

    /// The rows about those that came back.
    fn come_back(&mut self, what: &str, found: &Found) {
        let Found { first, last, .. } = found;
        self.add(&format!("{what}: not back"), "agents", Bar::AtMost(0.0), (AGENTS - last.back) as f64);
        self.add(&format!("{what}: without stream"), "pods", Bar::AtMost(0.0), (PODS - last.beating) as f64);
        let times = [
            ("half are back", found.half),
            ("all are back", found.all),
            ("all streams carry bytes", found.streams),
        ];
        for (name, after) in times {
            let seconds = after.map_or(f64::NAN, |after| after.as_secs_f64());
            self.add(&format!("{what}: until {name}"), "s", Bar::Open, seconds);
        }
        let counts = [
            ("attempts at a tunnel that failed", last.attempts - first.attempts),
            ("tunnels silent for more than a PING", last.unresponsive - first.unresponsive),
            ("pods told that there is no gateway", last.unanswered - first.unanswered),
            ("pods refused by the gateway", last.refused - first.refused),
        ];
        for (name, count) in counts {
            self.add(&format!("{what}: {name}"), "times", Bar::Open, count as f64);
        }
        self.add(&format!("{what}: gateway until then"), "CPU s", Bar::Open, found.cpu);
        self.add(
            &format!("{what}: gateway's peak"),
            "MB of process memory",
            Bar::Open,
            found.peak as f64 / 1e6,
        );
    }
}

struct Scene<'a> {
    // Dropped in this order: agents before the gateway.
    fleet: Fleet,
    gateway: crate::proxy::Running,
    proxy: Box<dyn Proxy>,
    table: &'a mut Table,
}

/// What was seen between a mark and the return of all.
struct Found {
    first: Report,
    last: Report,
    half: Option<Duration>,
    all: Option<Duration>,
    streams: Option<Duration>,
    /// Seconds of the gateway, of both if one replaced another.
    cpu: f64,
    /// Most process memory of the gateway, of both together if one replaced another.
    peak: u64,
}

impl Scene<'_> {
    /// Watches the agents until all have come back since the mark, when they were as in `first`.
    fn watch(&mut self, first: Report, old: Option<&Spawned>) -> Result<Found> {
        let begin = Instant::now();
        let pids: Vec<u32> = old.map(Spawned::pid).into_iter().chain([self.gateway.pid()]).collect();
        let cpu =
            |pids: &[u32]| -> Result<u64> { pids.iter().map(|&pid| process::cpu_nanoseconds(pid)).sum() };
        // What the new process did before is part of the price, what the old one did is not.
        let before = old.map_or(Ok(0), |old| process::cpu_nanoseconds(old.pid()))?;
        let mut found = Found { first, last: first, half: None, all: None, streams: None, cpu: 0.0, peak: 0 };
        let mut said = Instant::now();
        while begin.elapsed() < PATIENCE && (found.all.is_none() || found.streams.is_none()) {
            std::thread::sleep(LOOK);
            self.gateway.check(self.proxy.as_ref())?;
            found.last = self.fleet.report()?;
            let now = begin.elapsed();
            let memory: u64 = pids.iter().map(|&pid| process::memory_bytes(pid)).sum::<Result<u64>>()?;
            found.peak = found.peak.max(memory);
            let reached = |place: &mut Option<Duration>, is: bool| {
                if is && place.is_none() {
                    *place = Some(now);
                }
            };
            reached(&mut found.half, found.last.back >= AGENTS / 2);
            reached(&mut found.all, found.last.back == AGENTS);
            reached(&mut found.streams, found.last.beating == PODS);
            if said.elapsed() > Duration::from_secs(2) {
                said = Instant::now();
                eprintln!("  {now:.1?}: {:?}, {} MB", found.last, memory / 1_000_000);
            }
        }
        eprintln!("  {:.1?}: {:?}", begin.elapsed(), found.last);
        found.cpu = cpu(&pids)?.saturating_sub(before) as f64 / 1e9;
        Ok(found)
    }

    /// What the fleet costs a gateway while nothing happens but keep-alive and the pods' heartbeats.
    fn rest(&mut self, empty: u64) -> Result<()> {
        std::thread::sleep(REST);
        let pid = self.gateway.pid();
        let before = process::cpu_nanoseconds(pid)?;
        std::thread::sleep(REST);
        let used = (process::cpu_nanoseconds(pid)? - before) as f64 / 1e6 / REST.as_secs_f64();
        let memory = process::memory_bytes(pid)?;
        self.table.add("at rest: gateway", "CPU ms a second", Bar::Open, used);
        self.table.add("at rest: gateway", "MB of process memory", Bar::Open, memory as f64 / 1e6);
        let each = memory.saturating_sub(empty) as f64 / AGENTS as f64;
        self.table.add("at rest: each", "bytes of process memory", Bar::Open, each);
        Ok(())
    }

    /// SIGKILL, and a new process as soon as the old one is gone.
    fn kill(&mut self) -> Result<()> {
        let first = self.fleet.report()?;
        self.gateway.signal(Signal::KILL)?;
        self.gateway.wait()?;
        self.fleet.mark()?;
        self.gateway.succeed(self.proxy.as_ref())?;
        let found = self.watch(first, None)?;
        self.table.come_back("gateway killed and started", &found);
        std::thread::sleep(REST);
        let memory = process::memory_bytes(self.gateway.pid())? as f64 / 1e6;
        self.table.add("gateway killed and started: 10 s after", "MB of process memory", Bar::Open, memory);
        Ok(())
    }

    /// A successor takes the listeners over; the old process drains.
    fn replace(&mut self) -> Result<()> {
        let first = self.fleet.mark()?;
        let old = self.gateway.succeed(self.proxy.as_ref())?;
        let found = self.watch(first, Some(&old))?;
        let what = "gateway replaced";
        self.table.come_back(what, &found);
        let cut = (found.last.broken - first.broken) as f64;
        self.table.add(&format!("{what}: streams cut"), "streams", Bar::AtMost(0.0), cut);
        Ok(())
    }
}
