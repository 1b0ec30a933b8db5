//! Gateway and agent together: a client of the `kubernetes` service on a worker node, through both to its API
//! server.
//!
//! Envoy's pair is KKP's: nodeport-proxy and `envoy-agent`. Both pairs run without TLS, as KKP has it, and
//! with mutual TLS, as a tunnel over a foreign network should. Both processes of a pair share the proxies'
//! core; CPU and memory are those of both, and a note says what part of it was the agent's.

use anyhow::{Context, Result};

use super::rounds::measure;
use super::{Bench, Participant, Processes};
use crate::hello::{Order, client_hello};
use crate::load::bulk::{self, Direction};
use crate::load::churn::{self, Ending};
use crate::load::idle;
use crate::load::pingpong::PingPong;
use crate::pki::Pki;
use crate::process;
use crate::proxy::Proxy;
use crate::proxy::agent::Pair;
use crate::report::{Bar, Row, quantile};

/// Streams at rest. Envoy's agent carries at most 1,024, as KKP leaves its circuit breakers as they are.
const IDLE: usize = 900;
/// Streams opened and closed before the first look at the memory.
const WARM_UP: usize = 50;
/// Fresh pairs the memory is taken from.
const REPEATS: usize = 3;

/// Connections under way at a time: how many a turn finds decides what each of them costs.
const AT_ONCE: [usize; 3] = [1, 8, churn::AT_ONCE];
/// Connections that exchange messages through a pair at the same time: one figure hides what another shows.
const CONVERSATIONS: [usize; 3] = [4, 16, 64];
/// A message of the tunnel's round trips: a small request of the Kubernetes API with its header fields.
const MESSAGE: usize = 256;

/// Whether the tunnel is under TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tunnel {
    /// Without TLS.
    Plain,
    /// With a certificate on either side.
    Tls,
}

impl Tunnel {
    /// The name in the table.
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "tunnel",
            Self::Tls => "tunnel with mutual TLS",
        }
    }

    /// The proxy with TLS, if it is asked for and can be had.
    pub(crate) fn secure(self, bench: &Bench, plain: &dyn Proxy) -> Result<Option<Box<dyn Proxy>>> {
        if self == Self::Plain {
            return Ok(None);
        }
        let first = bench.clusters(1);
        let pki = Pki::make(bench.dir.join("pki"), first.iter().map(|cluster| &*cluster.id))?;
        Ok(plain.with_tls(&pki))
    }
}

/// CPU of both ends for connections, messages and bytes.
pub(crate) fn steady(bench: &Bench, clusters: usize, tunnel: Tunnel) -> Result<Vec<Row>> {
    let pairs = pairs(bench, clusters, tunnel)?;
    let row = |name: &str, unit: &'static str, factor: f64| {
        Row::new(format!("{}, both ends: {name}", tunnel.name()), unit, Bar::Times { peer: "Envoy", factor })
    };
    let mut rows = Vec::new();

    let hellos = pairs.iter().map(|one| hello(&one.running, Order::Answer)).collect::<Vec<_>>();
    for at_once in AT_ONCE {
        let mut connection = row(&format!("new connection, {at_once} at a time"), "CPU µs", 0.45);
        measure(bench, &mut connection, &pairs, 1e6, |number, pair, slice| {
            churn::run(pair.way.listen, &hellos[number..=number], Ending::Orderly, at_once, slice)
        })?;
        rows.push(connection);
    }

    for count in CONVERSATIONS {
        let mut established = pairs
            .iter()
            .map(|Participant { running, .. }| {
                let hellos = vec![hello(running, Order::Echo); count];
                PingPong::connect(running.way.listen, &hellos, MESSAGE)
            })
            .collect::<Result<Vec<_>>>()?;
        let name = format!("round trip, {count} connections of {MESSAGE} bytes");
        let mut round_trip = row(&name, "CPU µs", 0.8);
        measure(bench, &mut round_trip, &pairs, 1e6, |number, _, slice| established[number].run(slice))?;
        rows.push(round_trip);
    }

    let factor = if tunnel == Tunnel::Tls { 0.8 } else { 1.0 };
    for (name, direction) in [("bulk download", Direction::Download), ("bulk upload", Direction::Upload)] {
        let mut bytes = row(name, "CPU s per GB", factor);
        measure(bench, &mut bytes, &pairs, 1e9, |_, pair, slice| {
            let hosts = vec![pair.way.cluster.host.clone(); bulk::AT_ONCE];
            bulk::run(pair.way.listen, &hosts, direction, slice)
        })?;
        rows.push(bytes);
    }
    Ok(rows)
}

/// Bytes of both processes a stream at rest costs.
pub(crate) fn idle(bench: &Bench, clusters: usize, tunnel: Tunnel) -> Result<Row> {
    let name = format!("{}, both ends: idle stream", tunnel.name());
    let mut row = Row::new(name, "bytes of process memory", Bar::AtMost(6000.0));
    for (number, plain, _) in bench.tunnelling() {
        let secured = tunnel.secure(bench, plain)?;
        let proxy = secured.as_deref().unwrap_or(plain);
        let mut shares = Vec::new();
        for repeat in 0..REPEATS {
            let pair = start(bench, proxy, number, clusters, &format!("pair-idle{repeat}"))?;
            let hellos = [hello(&pair, Order::Answer)];
            drop(idle::open(pair.way.listen, &hellos, WARM_UP)?);
            let before = memory(&pair)?;
            let resting = idle::open(pair.way.listen, &hellos, IDLE)?;
            let after = memory(&pair)?;
            drop(resting);
            let grown: Vec<f64> = after
                .iter()
                .zip(before)
                .map(|(&after, before)| after.saturating_sub(before) as f64)
                .collect();
            let sum = grown.iter().sum::<f64>();
            row.add(proxy.name(), sum / IDLE as f64);
            shares.push(100.0 * grown[1] / sum);
        }
        let share = quantile(&shares, 0.5).context("there was a repeat")?;
        row.notes.insert(proxy.name(), format!("agent {share:.0} %"));
    }
    Ok(row)
}

fn memory(pair: &Pair) -> Result<Vec<u64>> {
    pair.pids().iter().map(|&pid| process::memory_bytes(pid)).collect()
}

fn pairs(bench: &Bench, clusters: usize, tunnel: Tunnel) -> Result<Vec<Participant<Pair>>> {
    let mut pairs = Vec::new();
    for (number, plain, _) in bench.tunnelling() {
        let secured = tunnel.secure(bench, plain)?;
        let proxy = secured.as_deref().unwrap_or(plain);
        let running =
            start(bench, proxy, number, clusters, if secured.is_some() { "pair-tls" } else { "pair" })?;
        pairs.push(Participant { name: proxy.name(), running });
    }
    Ok(pairs)
}

/// A pair whose gateway has this many clusters.
pub(crate) fn start(
    bench: &Bench,
    proxy: &dyn Proxy,
    number: usize,
    clusters: usize,
    row: &str,
) -> Result<Pair> {
    let gateway = bench.start_proxy(proxy, number, bench.clusters(clusters), row)?;
    let agent = proxy.agent().context("only those with an agent are asked for a pair")?;
    Pair::start(agent, gateway)
}

/// The hello of a client of the agent's cluster.
fn hello(pair: &Pair, order: Order) -> Vec<u8> {
    client_hello(&pair.way.cluster.host, order)
}
