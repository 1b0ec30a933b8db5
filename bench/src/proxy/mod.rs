//! The proxies side by side: how each is configured, started, given a new cluster, and stopped.
//!
//! [`nginx`], [`haproxy`], [`envoy`] and [`portico`] each turn a [`Site`] into their own configuration.
//! [`Running`] is a process of any of them, [`agent`] what goes with some of them on worker nodes. All are
//! [`spawned`] on the proxies' core. [`konnectivity`] has pairs of its own.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;

use self::agent::Agent;
use self::spawned::Spawned;
use crate::pki::Pki;
use crate::site::{Cluster, Site};

pub(crate) mod agent;
pub(crate) mod envoy;
pub(crate) mod haproxy;
pub(crate) mod konnectivity;
pub(crate) mod nginx;
pub(crate) mod portico;
pub(crate) mod spawned;

/// Envoy takes longest to read 10,000 clusters, on a busy machine.
const START: Duration = Duration::from_secs(180);
/// Between two looks at a proxy that starts.
const LOOK: Duration = Duration::from_millis(20);

/// A proxy program under test.
pub(crate) trait Proxy {
    /// The name in the tables.
    fn name(&self) -> &'static str;

    /// The program that goes with it on worker nodes, if it serves HTTP/2 CONNECT by authority.
    fn agent(&self) -> Option<&dyn Agent> {
        None
    }

    /// This proxy with TLS and client certificates on the tunnel, if it can do that.
    fn with_tls(&self, _pki: &Pki) -> Option<Box<dyn Proxy>> {
        None
    }

    /// This proxy as one on the internet: TLS on the tunnel, no client certificate required, and all of its
    /// protection against overload. `None` if it has no tunnel.
    fn open_to_strangers(&self, _pki: &Pki) -> Option<Box<dyn Proxy>> {
        None
    }

    /// Writes the whole configuration for `site` into its directory.
    fn configure(&self, site: &Site) -> Result<()>;

    /// The command that serves the configuration in the foreground.
    fn command(&self, site: &Site) -> Command;

    /// Makes the last cluster of `site`, which has just been added, known to the running proxy. Everything is
    /// written beside its place first; the answer is when the proxy could first learn of it.
    fn publish(&self, site: &Site, running: &mut Running) -> Result<Instant>;

    /// How [`publish`](Self::publish) does it, as a short text for the table.
    fn publishes_by(&self) -> &'static str;
}

/// A proxy process with what it serves.
pub(crate) struct Running {
    /// Addresses, directory and clusters.
    pub(crate) site: Site,
    process: Spawned,
}

impl Running {
    /// Configures and starts `proxy`, and waits until it serves its first and its last cluster.
    pub(crate) fn start(proxy: &dyn Proxy, site: Site) -> Result<Self> {
        fs::create_dir_all(&site.dir).with_context(|| format!("cannot create {}", site.dir.display()))?;
        proxy.configure(&site).with_context(|| format!("cannot configure {}", proxy.name()))?;
        let mut running = Self { process: spawn(proxy, &site)?, site };
        running.wait_until_ready(proxy)?;
        Ok(running)
    }

    /// The first process of the proxy.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a signal to the first process.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// An error with the end of its log if the first process has ended.
    pub(crate) fn check(&mut self, proxy: &dyn Proxy) -> Result<()> {
        self.process.check(proxy.name(), self.site.tunnel, Instant::now() + START)
    }

    /// Waits for the end of the first process.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.process.wait()
    }

    /// Starts a successor with the present configuration and answers the old process, which is to end by
    /// itself.
    pub(crate) fn succeed(&mut self, proxy: &dyn Proxy) -> Result<Spawned> {
        Ok(std::mem::replace(&mut self.process, spawn(proxy, &self.site)?))
    }

    /// Waits until the first and the last cluster are served.
    pub(crate) fn wait_until_ready(&mut self, proxy: &dyn Proxy) -> Result<()> {
        let deadline = Instant::now() + START;
        let clusters = &self.site.clusters;
        for cluster in [clusters.first(), clusters.last()].into_iter().flatten() {
            self.process.wait_until_it_serves(proxy.name(), self.site.sni, &cluster.host, deadline)?;
        }
        while proxy.agent().is_some() && TcpStream::connect(self.site.tunnel).is_err() {
            self.process.check(proxy.name(), self.site.tunnel, deadline)?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

fn spawn(proxy: &dyn Proxy, site: &Site) -> Result<Spawned> {
    Spawned::start(&proxy.command(site), &site.dir).with_context(|| format!("cannot start {}", proxy.name()))
}

/// A file written beside its place; [`Staged::publish`] moves it there, so that no reader ever sees half of
/// it.
pub(crate) struct Staged {
    beside: PathBuf,
    place: PathBuf,
}

/// Writes the file that is to become `place`.
pub(crate) fn stage(place: PathBuf, content: impl AsRef<[u8]>) -> Result<Staged> {
    let beside = place.with_extension("new");
    fs::write(&beside, content).with_context(|| format!("cannot write {}", beside.display()))?;
    Ok(Staged { beside, place })
}

impl Staged {
    /// Moves the file to its place.
    pub(crate) fn publish(self) -> Result<()> {
        fs::rename(&self.beside, &self.place)
            .with_context(|| format!("cannot replace {}", self.place.display()))
    }
}

/// The two server names of a cluster, each with a name for its upstream.
pub(crate) fn passthrough_routes(cluster: &Cluster) -> [(String, &str); 2] {
    [
        (format!("cluster-{}.apiserver-external", cluster.id), &cluster.host),
        (format!("cluster-{}.konnectivity-server", cluster.id), &cluster.konnectivity_host),
    ]
}
