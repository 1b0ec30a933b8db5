//! Isolation: one cluster's endpoint is a black hole and 5,000 of its clients retry. Do clients of other
//! clusters wait longer?
//!
//! Three slices a round and proxy, in a random order:
//! * *alone*: new connections to the other clusters and round trips on established ones, at a fixed modest
//!   pace.
//! * *answered*: beside them, 5,000 clients of one cluster come, are answered and sent away at once.
//! * *black hole*: beside them, as many come as often for the cluster whose endpoint is silent.
//!
//! Load and backend share a core, so a crowd makes requests slower even where the proxy does nothing wrong.
//! That is what *answered* is for, and why the bar is about the ratio to it. Every proxy gives an attempt to
//! connect one second.

use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::set_current_timer_slack;

use super::steady::CLUSTERS;
use super::{Bench, Participant, hellos};
use crate::hello::{Order, client_hello};
use crate::hole::BlackHole;
use crate::load::beside::{Findings, Slice};
use crate::load::crowd::CLIENTS;
use crate::load::{greet_all, pingpong};
use crate::process;
use crate::random::Random;
use crate::report::{Bar, Row, quantile};

/// The cluster that has fallen silent and the one whose endpoint answers a crowd; a start waits for the first
/// and the last.
const SILENT: usize = 40;
const ANSWERING: usize = 60;
/// From here on, clients leave as quickly as others come: every proxy gives an attempt to connect one second.
const HEIGHT: Duration = Duration::from_secs(1);
/// After the first look at the memory, which takes milliseconds of the load's time.
const WARM_UP: Duration = Duration::from_millis(500);
/// Length of the part that is recorded, in slices of other rows: by default all 5,000 clients come once in
/// it.
const SLICES: u32 = 3;
/// "Unchanged within noise", by the median of the ratios within a round; single rounds spread wider than
/// that.
const NOISE: f64 = 1.1;
/// What as many connections at rest may take (the bar of that row, 2,048 bytes each).
const MOST_MEGABYTES: f64 = CLIENTS as f64 * 2048.0 / 1e6;

/// What the requests are made beside.
#[derive(Clone, Copy, Debug)]
enum Beside {
    Nobody,
    Answered,
    BlackHole,
}

const ALL: [Beside; 3] = [Beside::Nobody, Beside::Answered, Beside::BlackHole];

/// A proxy with its established connections.
struct Subject {
    one: Participant,
    hellos: Vec<Vec<u8>>,
    established: Vec<OwnedFd>,
    /// The hellos of the two crowds, as in [`ALL`].
    crowds: [Option<Vec<u8>>; 3],
    /// Process memory before the first crowd came.
    memory: u64,
    /// Requests to other clusters that failed.
    failures: u64,
    /// Clients of the answering cluster without their answer, clients of either held for more than a period.
    unserved: u64,
    /// Clients of the black hole held at the same time.
    most_waiting: usize,
}

/// Requests beside the clients of a black hole.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let hole = BlackHole::open(bench.backend_port())?;
    let mut subjects = (0..bench.proxies.len())
        .map(|number| Subject::start(bench, number, &hole))
        .collect::<Result<Vec<_>>>()?;
    // Otherwise the kernel lets every wait of this thread last up to 50 µs longer.
    set_current_timer_slack(NonZeroU64::new(1)).context("cannot make this thread's timers precise")?;
    let outcome = measure(bench, &mut subjects);
    set_current_timer_slack(None).context("cannot reset this thread's timers")?;
    outcome
}

fn measure(bench: &Bench, subjects: &mut [Subject]) -> Result<Vec<Row>> {
    let mut table = Table::new();
    let mut random = Random::default();
    let mut order: Vec<usize> = (0..subjects.len()).collect();
    for round in 1..=bench.rounds.count {
        random.shuffle(&mut order);
        for &number in &order {
            let subject = &mut subjects[number];
            let mut turns = [0, 1, 2];
            random.shuffle(&mut turns);
            let mut times = [[Percentiles::default(); 2]; 3];
            for turn in turns {
                times[turn] = subject.visit(ALL[turn], bench.rounds.slice * SLICES, &mut table)?;
            }
            table.add(subject.one.name, times);
        }
        eprintln!("  isolation: round {round} of {}", bench.rounds.count);
    }
    Ok(table.finish(subjects))
}

impl Subject {
    fn start(bench: &Bench, number: usize, hole: &BlackHole) -> Result<Self> {
        let mut clusters = bench.clusters(CLUSTERS);
        clusters[SILENT].backend = hole.address();
        let special = [SILENT, ANSWERING].map(|cluster| clusters[cluster].host.clone());
        let one = Participant {
            name: bench.proxies[number].name(),
            running: bench.start_with(number, clusters, "isolation")?,
        };
        let mut healthy = one.running.site.clone();
        healthy.clusters.retain(|cluster| !special.contains(&cluster.host));
        let greetings = hellos(&healthy, Order::Echo, pingpong::CONNECTIONS);
        let mut subject = Self {
            hellos: hellos(&healthy, Order::Answer, CLUSTERS),
            established: greet_all(healthy.sni, &greetings, pingpong::CONNECTIONS)?,
            crowds: [
                None,
                Some(client_hello(&special[1], Order::AnswerAndEnd)),
                Some(client_hello(&special[0], Order::Answer)),
            ],
            one,
            memory: 0,
            failures: 0,
            unserved: 0,
            most_waiting: 0,
        };
        let mut slice = subject.slice(Beside::Nobody)?;
        slice.run(bench.rounds.slice)?;
        slice.finish()?;
        subject.memory = process::memory_bytes(subject.one.running.pid())?;
        Ok(subject)
    }

    fn slice(&self, beside: Beside) -> Result<Slice<'_>> {
        let crowd = self.crowds[beside as usize].as_deref();
        Slice::begin(self.one.running.site.sni, &self.hellos, &self.established, crowd)
    }

    /// One slice, recorded for `length`; percentiles of new connections and round trips.
    fn visit(&mut self, beside: Beside, length: Duration, table: &mut Table) -> Result<[Percentiles; 2]> {
        let pid = self.one.running.pid();
        let mut slice = self.slice(beside)?;
        slice.run(HEIGHT)?;
        let rising = process::memory_bytes(pid)?;
        slice.run(WARM_UP)?;
        slice.record();
        slice.run(length)?;
        let most = rising.max(process::memory_bytes(pid)?);
        let findings = slice.finish()?;
        let crowd = findings.crowd;
        self.failures += findings.failures;
        self.unserved += crowd.skipped;
        match beside {
            Beside::Nobody => {}
            Beside::Answered => self.unserved += crowd.unanswered,
            Beside::BlackHole => {
                ensure!(crowd.answered == 0, "{} answered for a black hole: it is none", self.one.name);
                self.most_waiting = self.most_waiting.max(crowd.most_waiting);
                table.memory.add(self.one.name, most.saturating_sub(self.memory) as f64 / 1e6);
            }
        }
        percentiles(findings)
    }
}

/// Microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Percentiles {
    median: f64,
    p99: f64,
}

fn percentiles(findings: Findings) -> Result<[Percentiles; 2]> {
    let of = |times: Vec<Duration>| -> Result<Percentiles> {
        let micros: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
        let at =
            |place| quantile(&micros, place).context("a slice of isolation is long enough for a request");
        Ok(Percentiles { median: at(0.5)?, p99: at(0.99)? })
    };
    Ok([of(findings.connections)?, of(findings.round_trips)?])
}

/// The lines of the table for one kind of request.
struct Kind {
    p99: Row,
    to_alone: Row,
    to_answered: Row,
    /// Printed during the run: medians and p99 of all slices by proxy.
    all: Vec<(&'static str, [Percentiles; 3])>,
    name: &'static str,
}

impl Kind {
    fn new(name: &'static str) -> Self {
        let line = |unit, bar| Row::new(format!("{name} beside a black hole"), unit, bar);
        Self {
            p99: line("p99 in µs", Bar::Open),
            to_alone: line("p99 ÷ alone", Bar::Open),
            to_answered: line("p99 ÷ beside an answered crowd", Bar::AtMost(NOISE)),
            all: Vec::new(),
            name,
        }
    }

    fn add(&mut self, proxy: &'static str, times: [Percentiles; 3]) {
        let [alone, answered, hole] = times.map(|times| times.p99);
        self.p99.add(proxy, hole);
        self.to_alone.add(proxy, hole / alone);
        self.to_answered.add(proxy, hole / answered);
        self.all.push((proxy, times));
    }

    /// Quartiles of the ratios as notes, and all medians to standard error.
    fn finish(mut self, proxies: &[&'static str]) -> [Row; 3] {
        for &proxy in proxies {
            for row in [&mut self.to_alone, &mut self.to_answered] {
                let samples = row.samples.get(proxy).map_or(&[][..], Vec::as_slice);
                if let (Some(low), Some(high)) = (quantile(samples, 0.25), quantile(samples, 0.75)) {
                    row.note(proxy, &format!("{low:.2}–{high:.2}"));
                }
            }
            self.tell(proxy);
        }
        [self.p99, self.to_alone, self.to_answered]
    }

    fn tell(&self, proxy: &str) {
        let figures = ALL.map(|beside| {
            let of = |pick: fn(&Percentiles) -> f64| {
                let samples: Vec<_> = self
                    .all
                    .iter()
                    .filter(|(name, _)| *name == proxy)
                    .map(|(_, times)| pick(&times[beside as usize]))
                    .collect();
                quantile(&samples, 0.5).unwrap_or(f64::NAN)
            };
            format!("{beside:?} {:.0}/{:.0}", of(|times| times.median), of(|times| times.p99))
        });
        eprintln!("  {proxy}, {}, p50/p99 in µs: {}", self.name, figures.join(", "));
    }
}

/// All lines.
struct Table {
    connections: Kind,
    round_trips: Kind,
    memory: Row,
}

impl Table {
    fn new() -> Self {
        Self {
            connections: Kind::new("new connection"),
            round_trips: Kind::new("round trip"),
            memory: Row::new("memory for 5,000 clients of a black hole", "MB", Bar::AtMost(MOST_MEGABYTES)),
        }
    }

    fn add(&mut self, proxy: &'static str, times: [[Percentiles; 2]; 3]) {
        self.connections.add(proxy, times.map(|[connections, _]| connections));
        self.round_trips.add(proxy, times.map(|[_, round_trips]| round_trips));
    }

    fn finish(mut self, subjects: &[Subject]) -> Vec<Row> {
        let proxies: Vec<_> = subjects.iter().map(|subject| subject.one.name).collect();
        for subject in subjects {
            let name = subject.one.name;
            self.memory.note(name, &format!("{} held", subject.most_waiting));
            if subject.unserved > 0 {
                self.memory.note(name, &format!("{} of the crowd unserved", subject.unserved));
            }
            self.connections.to_answered.count_failures(name, subject.failures);
        }
        let mut rows = Vec::from(self.connections.finish(&proxies));
        rows.extend(self.round_trips.finish(&proxies));
        rows.push(self.memory);
        rows
    }
}
