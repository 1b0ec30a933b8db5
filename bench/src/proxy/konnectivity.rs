//! Konnectivity: a server and an agent, each of either make, with frontends on a Unix socket.
//!
//! Frontends speak HTTP CONNECT: with gRPC, a client library would stand between load and server, and its own
//! CPU beside what is measured. What server and agent say to each other is the same in both modes.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use portico_lab::pki::{Authority, Certificate};

use super::spawned::Spawned;
use super::{LOOK, START};
use crate::load::konnectivity::Front;
use crate::rows::Processes;

/// Whose program it is.
#[derive(Debug)]
pub(crate) enum Make {
    /// Upstream's, as `portico-lab` has built them: the folder with `server` and `agent`.
    Upstream(PathBuf),
    /// The `portico` binary.
    Portico(PathBuf),
}

impl Make {
    fn command(&self, part: &str) -> Command {
        match self {
            Self::Upstream(programs) => Command::new(programs.join(part)),
            Self::Portico(program) => {
                let mut command = Command::new(program);
                command.args(["konnectivity", part]);
                command
            }
        }
    }
}

/// Writes what server and agents show each other.
pub(crate) fn certificates(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let authority = Authority::new("portico-bench")?;
    std::fs::write(dir.join("ca.crt"), authority.cert()).context("cannot write the CA")?;
    authority.issue(Certificate::server(&["127.0.0.1"]))?.write(dir, "server")?;
    authority.issue(Certificate::client("agent"))?.write(dir, "agent")
}

/// Where the frontends of the server at this port are.
fn socket(dir: &Path, port: u16) -> PathBuf {
    dir.join(format!("frontend-{port}.sock"))
}

/// A server for agents at `port`, one of `count`, with the files in `dir`. It takes two ports more.
pub(crate) fn start_server(dir: &Path, port: u16, make: &Make, count: usize) -> Result<Spawned> {
    let file = |name: &str| dir.join(name).display().to_string();
    let mut command = make.command("server");
    command
        .args(["--mode=http-connect", "--server-port=0"])
        .arg(format!("--uds-name={}", socket(dir, port).display()))
        .arg(format!("--cluster-ca-cert={}", file("ca.crt")))
        .arg(format!("--cluster-cert={}", file("server.crt")))
        .arg(format!("--cluster-key={}", file("server.key")))
        .args(["--agent-bind-address=127.0.0.1", &format!("--agent-port={port}")])
        .args(["--health-bind-address=127.0.0.1", &format!("--health-port={}", port + 1)])
        .args([format!("--admin-port={}", port + 2), format!("--server-count={count}")])
        .args([format!("--server-id=server-{port}"), "--v=0".to_owned()]);
    let log = dir.join(format!("server-{port}"));
    std::fs::create_dir_all(&log).with_context(|| format!("cannot create {}", log.display()))?;
    Spawned::start(&command, &log).context("cannot start the server")
}

/// An agent of the server at `port`, which takes the two ports behind the server's.
fn start_agent(dir: &Path, port: u16, make: &Make) -> Result<Spawned> {
    let file = |name: &str| dir.join(name).display().to_string();
    let mut command = make.command("agent");
    command
        .args([format!("--ca-cert={}", file("ca.crt")), format!("--agent-cert={}", file("agent.crt"))])
        .arg(format!("--agent-key={}", file("agent.key")))
        .args(["--proxy-server-host=127.0.0.1", &format!("--proxy-server-port={port}")])
        .args(["--health-server-host=127.0.0.1", &format!("--health-server-port={}", port + 3)])
        .args([format!("--admin-server-port={}", port + 4), "--v=0".to_owned()]);
    let log = dir.join("agent");
    std::fs::create_dir_all(&log).with_context(|| format!("cannot create {}", log.display()))?;
    Spawned::start(&command, &log).context("cannot start the agent")
}

/// A server and an agent, ready.
pub(crate) struct Konnectivity {
    /// The way of a frontend to the backend.
    pub(crate) front: Front,
    /// Ends before the server.
    agent: Spawned,
    server: Spawned,
}

impl Konnectivity {
    /// Starts both, with certificates of their own, on ports from `base_port`. `backend` is what is dialled.
    pub(crate) fn start(
        dir: &Path,
        base_port: u16,
        backend: SocketAddrV4,
        server: &Make,
        agent: &Make,
    ) -> Result<Self> {
        certificates(dir)?;
        let server = start_server(dir, base_port, server, 1)?;
        let agent = start_agent(dir, base_port, agent)?;
        let mut pair =
            Self { front: Front { socket: socket(dir, base_port), target: backend }, agent, server };
        let deadline = Instant::now() + START;
        while !pair.front.is_open() {
            let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, base_port);
            pair.server.check("the Konnectivity server", address, deadline)?;
            pair.agent.check("the Konnectivity agent", address, deadline)?;
            std::thread::sleep(LOOK);
        }
        Ok(pair)
    }
}

impl Processes for Konnectivity {
    fn pids(&self) -> Vec<u32> {
        vec![self.server.pid(), self.agent.pid()]
    }
}
