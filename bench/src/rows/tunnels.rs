//! The gateway's half of the tunnel: HTTP/2 CONNECT streams from the bench straight to the gateway.
//!
//! The design's tunnel bars are for both ends, agent and gateway together; these rows are the gateway's share of them
//! and so carry no bar. Only the last does: adding a cluster must not cut the streams of the others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::Bench;
use super::rounds::measure;
use crate::hello::Order;
use crate::load::tunnel::{self, Connection, Stream};
use crate::process;
use crate::proxy::envoy::DRAIN_SECONDS;
use crate::proxy::{Proxy, Running};
use crate::report::{Bar, Row};
use crate::site::{Cluster, Site};

/// HTTP/2 connections the streams are spread over, as if each came from one worker node.
const CONNECTIONS: usize = 10;
/// Streams with a message under way.
const STREAMS: usize = 50;
/// Streams that open and end at the same time.
const OPENING: usize = 32;
/// HTTP/2 connections with one bulk transfer each.
const TRANSFERS: usize = 4;
/// Streams at rest, over [`CONNECTIONS`].
const IDLE: usize = 2000;
/// Streams with a heartbeat while a cluster is added, each on a connection of its own.
const BEATING: usize = 50;
/// Between two heartbeats of a stream, and how long an answer may take before the stream counts as cut.
const BEAT: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_secs(2);

fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("cannot start the load's runtime")
}

/// CPU of the gateway for streams, messages and bytes.
pub(crate) fn steady(bench: &Bench, clusters: usize) -> Result<Vec<Row>> {
    let runtime = runtime()?;
    let participants = bench.start_tunnels(clusters, "tunnel")?;
    let mut rows = Vec::new();

    let mut connections = Vec::new();
    let mut streams = Vec::new();
    for one in &participants {
        let (some, open) = runtime.block_on(open(&one.running, CONNECTIONS, STREAMS))?;
        connections.push(some);
        streams.push(open);
    }
    let mut row = Row::new("tunnel, gateway's half: round trip", "CPU µs", Bar::Open);
    measure(bench, &mut row, &participants, 1e6, |number, _, slice| {
        runtime.block_on(tunnel::ping_pong(&mut streams[number], slice))
    })?;
    rows.push(row);

    let mut row = Row::new("tunnel, gateway's half: new stream", "CPU µs", Bar::Open);
    measure(bench, &mut row, &participants, 1e6, |number, one, slice| {
        runtime.block_on(tunnel::churn(&connections[number], &one.site.clusters, OPENING, slice))
    })?;
    rows.push(row);

    for (name, up) in [("download", false), ("upload", true)] {
        let mut row = Row::new(format!("tunnel, gateway's half: bulk {name}"), "CPU s per GB", Bar::Open);
        measure(bench, &mut row, &participants, 1e9, |number, one, slice| {
            let connections = &connections[number][..TRANSFERS];
            runtime.block_on(tunnel::bulk(connections, &one.site.clusters, up, slice))
        })?;
        rows.push(row);
    }
    Ok(rows)
}

async fn open(one: &Running, connections: usize, streams: usize) -> Result<(Vec<Connection>, Vec<Stream>)> {
    let mut open = Vec::with_capacity(connections);
    for _ in 0..connections {
        open.push(Connection::open(one.site.tunnel).await?);
    }
    let mut established = Vec::with_capacity(streams);
    for number in 0..streams {
        let cluster = &one.site.clusters[number % one.site.clusters.len()];
        established.push(open[number % connections].stream(cluster, Order::Echo).await?);
    }
    Ok((open, established))
}

/// Bytes of the gateway's memory a stream at rest costs.
pub(crate) fn idle(bench: &Bench, clusters: usize) -> Result<Row> {
    let runtime = runtime()?;
    let mut row = Row::new("tunnel, gateway's half: idle stream", "bytes of process memory", Bar::Open);
    for number in bench.tunnelling() {
        let one = bench.start(number, clusters, "tunnel-idle")?;
        drop(runtime.block_on(open(&one, CONNECTIONS, CONNECTIONS))?);
        let before = process::memory_bytes(one.pid())?;
        let resting = runtime.block_on(open(&one, CONNECTIONS, IDLE))?;
        let after = process::memory_bytes(one.pid())?;
        row.add(bench.proxies[number].name(), after.saturating_sub(before) as f64 / IDLE as f64);
        drop(resting);
    }
    Ok(row)
}

/// How many of [`BEATING`] streams end because a cluster they have nothing to do with is added.
pub(crate) fn cut(bench: &Bench, clusters: usize) -> Result<Row> {
    let runtime = runtime()?;
    let mut row = Row::new("tunnels cut when another cluster is added", "of 50", Bar::AtMost(0.0));
    for number in bench.tunnelling() {
        let proxy = bench.proxies[number].as_ref();
        let mut one = bench.start(number, clusters, "tunnel-cut")?;
        let outcome = runtime.block_on(beat_while_adding(bench, proxy, &mut one))?;
        for (cause, count) in &outcome {
            eprintln!("  {}: {count} tunnels ended: {cause}", proxy.name());
        }
        row.add(proxy.name(), outcome.values().sum::<usize>() as f64);
    }
    Ok(row)
}

async fn beat_while_adding(
    bench: &Bench,
    proxy: &dyn Proxy,
    one: &mut Running,
) -> Result<BTreeMap<String, usize>> {
    let (connections, streams) = open(one, BEATING, BEATING).await?;
    // Twice the drain time: whoever drains will have ended by then.
    let until = Instant::now() + 2 * Duration::from_secs(DRAIN_SECONDS) + SILENCE;
    let mut beating = JoinSet::new();
    for stream in streams {
        beating.spawn(tunnel::heartbeat(stream, BEAT, SILENCE, until));
    }
    tokio::time::sleep(3 * BEAT).await;
    one.site.clusters.push(Cluster::numbered(one.site.clusters.len(), bench.backend_port()));
    let site = one.site.clone();
    proxy.publish(&site, one)?;
    // Without this, a proxy that ignored the change would shine. A new connection each time: Envoy serves one that is
    // open from the routes of its beginning.
    let added = site.clusters.last().context("a cluster was added")?;
    while !serves(&site, added).await {
        tokio::time::sleep(BEAT).await;
        anyhow::ensure!(Instant::now() < until, "{} does not serve the added cluster's tunnel", proxy.name());
    }
    let mut causes = BTreeMap::new();
    while let Some(end) = beating.join_next().await {
        if let Err(error) = end.context("a heartbeat's task ended")? {
            *causes.entry(format!("{error:#}")).or_default() += 1;
        }
    }
    drop(connections);
    Ok(causes)
}

async fn serves(site: &Site, cluster: &Cluster) -> bool {
    let Ok(connection) = Connection::open(site.tunnel).await else { return false };
    connection.stream(cluster, Order::Answer).await.is_ok()
}
