//! A process under test: on the proxies' core, with a log of its own, and never longer there than its owner.

use std::fs::{self, File};
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::LOOK;
use crate::hello::{Order, client_hello};
use crate::load::{Dialer, greet_once};
use crate::machine;

/// How long a process may take to end after SIGTERM before it is killed. That is longer than a Konnectivity
/// agent drains, and than a build that counts then takes to write what it has counted.
const STOP: Duration = Duration::from_secs(15);

/// A process that ends when this is dropped.
pub(crate) struct Spawned {
    child: Child,
    dir: PathBuf,
}

impl Spawned {
    /// Starts `program`; what it says goes to the file `log` in `dir`.
    pub(crate) fn start(program: &Command, dir: &Path) -> Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(dir.join("log"))
            .with_context(|| format!("cannot write a log in {}", dir.display()))?;
        // setpriv (util-linux) lets the proxy end with the bench even if that is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().context("cannot share the log")?).stderr(log);
        let child = machine::on_proxy_core(|| {
            command.spawn().context("cannot run a program: is setpriv there (util-linux)?")
        })?;
        Ok(Self { child, dir: dir.to_owned() })
    }

    /// The process itself; it may have children.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context("cannot signal the proxy")
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.child.wait().map(drop).context("cannot wait for the proxy")
    }

    /// Waits until a client of `host` is answered at `address`.
    pub(crate) fn wait_until_it_serves(
        &mut self,
        name: &str,
        address: SocketAddrV4,
        host: &str,
        deadline: Instant,
    ) -> Result<()> {
        let mut dialer = Dialer::default();
        let hello = client_hello(host, Order::Answer);
        while greet_once(&mut dialer, address, &hello, Duration::from_secs(1))?.is_none() {
            self.check(name, address, deadline)?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// An error if the process has ended, or the time for `address` to serve is over.
    pub(crate) fn check(&mut self, name: &str, address: SocketAddrV4, deadline: Instant) -> Result<()> {
        if let Some(status) = self.child.try_wait().context("cannot ask for the proxy's state")? {
            bail!("{name} ended with {status}:\n{}", self.log_tail());
        }
        if Instant::now() > deadline {
            bail!("{name} does not serve {address} in time:\n{}", self.log_tail());
        }
        Ok(())
    }

    fn log_tail(&self) -> String {
        let log = fs::read(self.dir.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // A proxy that has ended already is what we want.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
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
