//! A new cluster: how long from writing it down until a client reaches it.
//!
//! The clock starts when the change is handed over: the finished files are moved into place, the reload is
//! asked for. It stops when a client that tries again and again has its answer through the new name. Time the
//! proxy needs for reading its configuration counts; time this program needs for writing it does not.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::Bench;
use crate::hello::{Order, client_hello};
use crate::load::{Dialer, greet_once};
use crate::report::{Bar, Row};
use crate::site::Cluster;

/// Clusters that are there already.
const CLUSTERS: usize = 2000;
/// Clusters added, one after the other.
const ADDED: usize = 9;
/// Between two tries of the client: fine enough for a bar of 10 ms, rare enough to leave the proxy its core.
const TRY_EVERY: Duration = Duration::from_micros(500);
/// How long one try may wait for its answer.
const PATIENCE: Duration = Duration::from_millis(200);
/// After this the change has been lost.
const LOST: Duration = Duration::from_secs(30);
/// Between two additions, so that each finds a proxy at rest.
const REST: Duration = Duration::from_millis(700);

/// Milliseconds until a new cluster is routable.
pub(crate) fn add_cluster(bench: &Bench) -> Result<Row> {
    let mut row = Row::new(format!("add a cluster to {CLUSTERS}: until routable"), "ms", Bar::AtMost(10.0));
    for (number, proxy) in bench.proxies.iter().enumerate() {
        let mut one = bench.start(number, CLUSTERS, "add")?;
        row.notes.insert(proxy.name(), proxy.publishes_by().to_owned());
        for added in 0..ADDED {
            std::thread::sleep(REST);
            one.site.clusters.push(Cluster::numbered(CLUSTERS + added, bench.backend_port()));
            let site = one.site.clone();
            let hello = site.clusters.last().map(|cluster| client_hello(&cluster.host, Order::Answer));
            let start = proxy.publish(&site, &mut one)?;
            let mut dialer = Dialer::default();
            while greet_once(&mut dialer, site.sni, hello.as_deref().unwrap_or_default(), PATIENCE)?.is_none()
            {
                ensure!(
                    start.elapsed() < LOST,
                    "{} does not serve a new cluster after {LOST:?}",
                    proxy.name()
                );
                std::thread::sleep(TRY_EVERY);
            }
            row.add(proxy.name(), start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(row)
}
