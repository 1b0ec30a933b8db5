//! Konnectivity: a server and an agent, each of either make, with frontends on a Unix socket.
//!
//! Frontends speak HTTP CONNECT where CPU is measured: with gRPC, a client library stands between load and
//! server. What server and agent say to each other is the same in both modes.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use portico_lab::pki::{Authority, Certificate};

use super::spawned::Spawned;
use super::{LOOK, START};
use crate::load::konnectivity::{Front, Way};
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
    /// The agent's program in a file that no server runs from, as on a machine of its own. Processes of one
    /// file share its pages, and each would count half of them.
    pub(crate) fn apart(&self, dir: &Path) -> Result<Self> {
        Ok(match self {
            Self::Upstream(programs) => Self::Upstream(programs.clone()),
            Self::Portico(program) => {
                let copy = dir.join("portico-agent");
                std::fs::copy(program, &copy)
                    .with_context(|| format!("cannot copy {}", program.display()))?;
                Self::Portico(copy)
            }
        })
    }

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

/// How frontends speak with the server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode<'a> {
    HttpConnect,
    /// By a program in this folder, which uses upstream's client library.
    Grpc(&'a Path),
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

/// Starts a part of Konnectivity, whose log is in the folder `name` of `dir`.
fn spawn(dir: &Path, name: &str, command: &Command) -> Result<Spawned> {
    let log = dir.join(name);
    std::fs::create_dir_all(&log).with_context(|| format!("cannot create {}", log.display()))?;
    Spawned::start(command, &log).with_context(|| format!("cannot start the {name}"))
}

/// A server for agents at `port`, one of `count`, with the files in `dir`. It takes two ports more.
pub(crate) fn start_server(
    dir: &Path,
    port: u16,
    make: &Make,
    mode: Mode<'_>,
    count: usize,
) -> Result<Spawned> {
    let mode = if let Mode::Grpc(_) = mode { "grpc" } else { "http-connect" };
    let file = |name: &str| dir.join(name).display().to_string();
    let mut command = make.command("server");
    command
        .args([&format!("--mode={mode}"), "--server-port=0"])
        .arg(format!("--uds-name={}", socket(dir, port).display()))
        .arg(format!("--cluster-ca-cert={}", file("ca.crt")))
        .arg(format!("--cluster-cert={}", file("server.crt")))
        .arg(format!("--cluster-key={}", file("server.key")))
        .args(["--agent-bind-address=127.0.0.1", &format!("--agent-port={port}")])
        .args(["--health-bind-address=127.0.0.1", &format!("--health-port={}", port + 1)])
        .args([format!("--admin-port={}", port + 2), format!("--server-count={count}")])
        .args([format!("--server-id=server-{port}"), "--v=0".to_owned()]);
    spawn(dir, &format!("server-{port}"), &command)
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
    spawn(dir, "agent", &command)
}

/// What speaks gRPC with the server at `port` for clients of `address`.
fn start_frontend(dir: &Path, port: u16, programs: &Path, address: SocketAddrV4) -> Result<Spawned> {
    let mut command = Command::new(programs.join("frontend"));
    command.arg("--uds").arg(socket(dir, port)).args(["--listen", &address.to_string()]);
    spawn(dir, "frontend", &command)
}

/// A server and an agent, ready.
pub(crate) struct Konnectivity {
    /// The way of a frontend to the backend.
    pub(crate) front: Front,
    /// Ends before the server.
    agent: Spawned,
    server: Spawned,
    _frontend: Option<Spawned>,
}

impl Konnectivity {
    /// Starts both, with certificates of their own, on six ports from `base_port`. `backend` is dialled.
    pub(crate) fn start(
        dir: &Path,
        base_port: u16,
        backend: SocketAddrV4,
        (server, agent): (&Make, &Make),
        mode: Mode<'_>,
    ) -> Result<Self> {
        certificates(dir)?;
        let server = start_server(dir, base_port, server, mode, 1)?;
        let agent = start_agent(dir, base_port, agent)?;
        let (way, frontend) = match mode {
            Mode::HttpConnect => (Way::Connect(socket(dir, base_port)), None),
            Mode::Grpc(programs) => {
                let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, base_port + 5);
                (Way::Grpc(address), Some(start_frontend(dir, base_port, programs, address)?))
            }
        };
        let mut pair = Self { front: Front { way, target: backend }, agent, server, _frontend: frontend };
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
