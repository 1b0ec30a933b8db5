//! Streams of others while a cluster is added: HTTP/2 CONNECT from the bench straight to the gateway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use super::Bench;
use crate::hello::Order;
use crate::load::tunnel::{self, Connection, Stream};
use crate::proxy::envoy::DRAIN_SECONDS;
use crate::proxy::{Proxy, Running};
use crate::report::{Bar, Row};
use crate::site::{Cluster, Site};

/// Streams with a heartbeat while a cluster is added, each on a connection of its own, as if from one worker
/// node each.
const BEATING: usize = 50;
/// Between two heartbeats of a stream, and how long an answer may take before the stream counts as cut.
const BEAT: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_secs(2);

/// How many of [`BEATING`] streams end because a cluster they have nothing to do with is added.
pub(crate) fn cut(bench: &Bench, clusters: usize) -> Result<Row> {
    let runtime =
        Builder::new_current_thread().enable_all().build().context("cannot start the load's runtime")?;
    let mut row = Row::new("tunnels cut when another cluster is added", "of 50", Bar::AtMost(0.0));
    for (number, proxy, _) in bench.tunnelling() {
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
    let mut connections: Vec<Connection> = Vec::with_capacity(BEATING);
    let mut streams: Vec<Stream> = Vec::with_capacity(BEATING);
    for number in 0..BEATING {
        let connection = Connection::open(one.site.tunnel).await?;
        let cluster = &one.site.clusters[number % one.site.clusters.len()];
        streams.push(connection.stream(cluster, Order::Echo).await?);
        connections.push(connection);
    }
    // Twice the drain time: a proxy that drains has ended by then.
    let until = Instant::now() + 2 * Duration::from_secs(DRAIN_SECONDS) + SILENCE;
    let mut beating = JoinSet::new();
    for stream in streams {
        beating.spawn(tunnel::heartbeat(stream, BEAT, SILENCE, until));
    }
    tokio::time::sleep(3 * BEAT).await;
    one.site.clusters.push(Cluster::numbered(one.site.clusters.len(), bench.backend_port()));
    let site = one.site.clone();
    proxy.publish(&site, one)?;
    // Without this, a proxy that ignored the change would shine. A new connection each time: Envoy serves one
    // that is open from the routes of its beginning.
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
