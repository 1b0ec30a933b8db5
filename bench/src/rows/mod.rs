//! The rows of the table: which proxies run, which load they get, what is read.
//!
//! [`rounds`] holds the method for everything that is measured as CPU per unit of work; [`steady`] applies it
//! to connections, messages and bytes. [`footprint`] reads memory. [`change`] adds clusters. [`isolation`] is
//! about clusters beside one that has fallen silent, [`hostile`] about clients that mean harm. [`pair`]
//! measures gateway and agent together, [`agent`] the agent at rest. [`tunnels`] is what becomes of streams
//! when a cluster is added, [`fleet`] ten thousand agents and a gateway that restarts. [`konnectivity`]
//! measures its server and agent, [`konnectivity_agents`] three servers with a thousand agents.

use std::path::PathBuf;

use anyhow::Result;

use crate::hello::{Order, client_hello};
use crate::proxy::agent::{Agent, Pair};
use crate::proxy::{Proxy, Running};
use crate::site::{Cluster, Site};

pub(crate) mod agent;
pub(crate) mod change;
pub(crate) mod fleet;
pub(crate) mod footprint;
pub(crate) mod hostile;
pub(crate) mod isolation;
pub(crate) mod konnectivity;
pub(crate) mod konnectivity_agents;
pub(crate) mod pair;
pub(crate) mod rounds;
pub(crate) mod steady;
pub(crate) mod tunnels;

/// What all rows share.
pub(crate) struct Bench {
    /// The proxies of this run, in the order of the table.
    pub(crate) proxies: Vec<Box<dyn Proxy>>,
    /// Everything the proxies write goes below here.
    pub(crate) dir: PathBuf,
    /// First of the ports the run uses.
    pub(crate) base_port: u16,
    /// How often the load visits each proxy, and for how long.
    pub(crate) rounds: rounds::Rounds,
}

impl Bench {
    /// Where the backend listens.
    pub(crate) fn backend_port(&self) -> u16 {
        self.base_port
    }

    /// This many clusters with healthy backends.
    pub(crate) fn clusters(&self, count: usize) -> Vec<Cluster> {
        (0..count).map(|cluster| Cluster::numbered(cluster, self.backend_port())).collect()
    }

    /// Starts one proxy with this many clusters, in a directory named for the row.
    pub(crate) fn start(&self, number: usize, clusters: usize, row: &str) -> Result<Running> {
        self.start_with(number, self.clusters(clusters), row)
    }

    /// Starts one proxy with these clusters, of which the first and the last must be served.
    pub(crate) fn start_with(&self, number: usize, clusters: Vec<Cluster>, row: &str) -> Result<Running> {
        self.start_proxy(self.proxies[number].as_ref(), number, clusters, row)
    }

    /// Starts a proxy that need not be one of [`proxies`](Self::proxies), with the ports of this number.
    pub(crate) fn start_proxy(
        &self,
        proxy: &dyn Proxy,
        number: usize,
        clusters: Vec<Cluster>,
        row: &str,
    ) -> Result<Running> {
        eprintln!("  starting {} with {} clusters", proxy.name(), clusters.len());
        let offset = 10 * u16::try_from(number + 1)?;
        let at = |port: u16| {
            std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, self.base_port + offset + port)
        };
        let site = Site {
            dir: self.dir.join(format!("{row}-{}-{}-{number}", clusters.len(), proxy.name())),
            sni: at(0),
            tunnel: at(1),
            admin: at(2),
            clusters,
        };
        Running::start(proxy, site)
    }

    /// Starts all proxies with this many clusters.
    pub(crate) fn start_all(&self, clusters: usize, row: &str) -> Result<Vec<Participant>> {
        let start = |number: usize| {
            let running = self.start(number, clusters, row)?;
            Ok(Participant { name: self.proxies[number].name(), running })
        };
        (0..self.proxies.len()).map(start).collect()
    }

    /// The proxies that serve CONNECT and have an agent, with their numbers.
    pub(crate) fn tunnelling(&self) -> impl Iterator<Item = (usize, &dyn Proxy, &dyn Agent)> {
        let proxies = self.proxies.iter().map(Box::as_ref).enumerate();
        proxies.filter_map(|(number, proxy)| Some((number, proxy, proxy.agent()?)))
    }
}

/// What takes part in rounds: a proxy, or a pair of them.
pub(crate) struct Participant<T = Running> {
    /// Its column.
    pub(crate) name: &'static str,
    /// Its processes.
    pub(crate) running: T,
}

/// Whose CPU counts.
pub(crate) trait Processes {
    /// The first process of each part.
    fn pids(&self) -> Vec<u32>;
}

impl Processes for Running {
    fn pids(&self) -> Vec<u32> {
        vec![self.pid()]
    }
}

impl Processes for Pair {
    fn pids(&self) -> Vec<u32> {
        vec![self.gateway(), self.agent()]
    }
}

/// Hellos for API servers of the site, spread evenly over its clusters; more than `most` would only cost the
/// load's cache. The order of names is mixed, as a map in memory order would flatter the proxies.
pub(crate) fn hellos(site: &Site, order: Order, most: usize) -> Vec<Vec<u8>> {
    let count = site.clusters.len();
    // A prime stride visits all clusters (no scale is a multiple of it) in no order a cache would like.
    (0..count.min(most)).map(|turn| client_hello(&site.clusters[turn * 7919 % count].host, order)).collect()
}
