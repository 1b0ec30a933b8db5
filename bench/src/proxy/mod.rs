//! The proxies side by side: how each is configured, started, told about a new cluster, and stopped.
//!
//! [`nginx`], [`haproxy`], [`envoy`] and [`portico`] each turn a [`Site`] into their own configuration; [`Running`] is
//! a process of any of them, on the proxies' core, that ends with its owner.

use std::fs::{self, File};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::hello::{Order, client_hello};
use crate::load::{Dialer, greet_once};
use crate::machine;
use crate::site::{Cluster, Site};

pub(crate) mod envoy;
pub(crate) mod haproxy;
pub(crate) mod nginx;
pub(crate) mod portico;

/// Envoy takes longest to read 10,000 clusters, on a busy machine.
const START: Duration = Duration::from_secs(180);
/// How long a proxy may take to end after SIGTERM before it is killed.
const STOP: Duration = Duration::from_secs(5);
/// Between two looks at a proxy that starts.
const LOOK: Duration = Duration::from_millis(20);

/// A proxy program under test.
pub(crate) trait Proxy {
    /// The name in the tables.
    fn name(&self) -> &'static str;

    /// Whether it serves HTTP/2 CONNECT by authority.
    fn tunnels(&self) -> bool {
        false
    }

    /// Writes the whole configuration for `site` into its directory.
    fn configure(&self, site: &Site) -> Result<()>;

    /// The command that serves the configuration in the foreground.
    fn command(&self, site: &Site) -> Command;

    /// Makes the last cluster of `site`, which has just been added, known to the running proxy. Everything is written
    /// beside its place first; the answer is when the proxy could first learn of it.
    fn publish(&self, site: &Site, running: &mut Running) -> Result<Instant>;

    /// How [`publish`](Self::publish) does it, in a word for the table.
    fn publishes_by(&self) -> &'static str;
}

/// A proxy process with what it serves.
pub(crate) struct Running {
    /// Addresses, directory and clusters.
    pub(crate) site: Site,
    child: Child,
}

impl Running {
    /// Configures and starts `proxy`, and waits until it serves its first and its last cluster.
    pub(crate) fn start(proxy: &dyn Proxy, site: Site) -> Result<Self> {
        fs::create_dir_all(&site.dir).with_context(|| format!("cannot create {}", site.dir.display()))?;
        proxy.configure(&site).with_context(|| format!("cannot configure {}", proxy.name()))?;
        let child = spawn(proxy, &site)?;
        let mut running = Self { site, child };
        running.wait_until_ready(proxy)?;
        Ok(running)
    }

    /// The first process of the proxy.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the first process.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid =
            i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("a process has a pid")?;
        kill_process(pid, signal).context("cannot signal the proxy")
    }

    /// Starts a successor with the present configuration; the old process is left to end by itself.
    pub(crate) fn succeed(&mut self, proxy: &dyn Proxy) -> Result<()> {
        let mut old = std::mem::replace(&mut self.child, spawn(proxy, &self.site)?);
        // Whoever waits here would measure the end of the old process instead of the start of the new one.
        std::thread::spawn(move || old.wait());
        Ok(())
    }

    fn wait_until_ready(&mut self, proxy: &dyn Proxy) -> Result<()> {
        let deadline = Instant::now() + START;
        let mut dialer = Dialer::default();
        let clusters = &self.site.clusters;
        for cluster in [clusters.first(), clusters.last()].into_iter().flatten() {
            let hello = client_hello(&cluster.host, Order::Answer);
            while greet_once(&mut dialer, self.site.sni, &hello, Duration::from_secs(1))?.is_none() {
                if let Some(status) = self.child.try_wait().context("cannot ask for the proxy's state")? {
                    bail!("{} ended with {status}:\n{}", proxy.name(), log_tail(&self.site.dir));
                }
                if Instant::now() > deadline {
                    bail!(
                        "{} does not serve {} after {START:?}:\n{}",
                        proxy.name(),
                        cluster.host,
                        log_tail(&self.site.dir)
                    );
                }
                std::thread::sleep(LOOK);
            }
        }
        while proxy.tunnels() && TcpStream::connect(self.site.tunnel).is_err() {
            if Instant::now() > deadline {
                bail!(
                    "{} does not listen on {}:\n{}",
                    proxy.name(),
                    self.site.tunnel,
                    log_tail(&self.site.dir)
                );
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A proxy that has ended already is what we want.
        let _ = self.signal(Signal::TERM);
        let deadline = Instant::now() + STOP;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(proxy: &dyn Proxy, site: &Site) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(site.dir.join("log"))
        .with_context(|| format!("cannot write a log in {}", site.dir.display()))?;
    let program = proxy.command(site);
    // setpriv (util-linux) lets the proxy end with the bench even if that is killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--"]).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.stdin(Stdio::null()).stdout(log.try_clone().context("cannot share the log")?).stderr(log);
    machine::on_proxy_core(|| {
        command
            .spawn()
            .with_context(|| format!("cannot start {}: is setpriv there (util-linux)?", proxy.name()))
    })
}

fn log_tail(dir: &Path) -> String {
    let log = fs::read(dir.join("log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

/// A file written beside its place; [`Staged::publish`] moves it there, so that no reader ever sees half of it.
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
