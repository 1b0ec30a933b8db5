//! A server, an agent and a frontend's way to them, of any make and in any mode, on loopback.
//!
//! Both makes get the same flags: what an existing manifest says works with ours when only the image and the
//! command change.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use portico_lab::cgroup::LimitedGroup;
use portico_lab::pki::{Certificate, Pki};
use portico_lab::programs;

use super::frontend::Frontend;
use super::program::{Program, get};
use crate::common::{free_port, portico};

/// Whose program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make {
    Upstream,
    Ours,
}

/// A process of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Server,
    Agent,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Agent => "agent",
        }
    }
}

/// A program of upstream's, built if need be.
pub(crate) fn upstream(name: &str) -> PathBuf {
    programs::konnectivity().unwrap_or_else(|error| panic!("no upstream Konnectivity: {error:#}")).join(name)
}

/// How a frontend speaks with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Grpc,
    HttpConnect,
}

/// What a frontend reaches the server by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Unix,
    Tls,
}

/// Certificates and files of one test, and how its frontends speak.
pub(crate) struct Site {
    pki: Pki,
    mode: Mode,
    transport: Transport,
    /// What one part joins, if it is ours.
    limited: Option<(Part, LimitedGroup)>,
}

/// A server with its ports, which it keeps when it is started anew.
pub(crate) struct Server {
    pub(crate) program: Program,
    make: Make,
    ports: Ports,
    more: Vec<String>,
}

#[derive(Clone, Copy)]
struct Ports {
    agents: u16,
    frontends: u16,
    health: u16,
    admin: u16,
}

impl Site {
    pub(crate) fn new(mode: Mode, transport: Transport) -> Self {
        let pki = Pki::new();
        pki.issue("server", Certificate::server(&["localhost", "127.0.0.1"]));
        pki.issue("agent", Certificate::client("agent"));
        pki.issue("frontend", Certificate::client("kube-apiserver"));
        Self { pki, mode, transport, limited: None }
    }

    /// Has the program of ours that plays `part` run with this memory limit, swap included.
    pub(crate) fn within(self, part: Part, memory: u64) -> Self {
        let path = format!("/portico-konnectivity-{}-{}", part.name(), free_port());
        let group = LimitedGroup::make(path, memory).expect("a control group has a memory limit");
        Self { limited: Some((part, group)), ..self }
    }

    /// The group of [`within`](Self::within).
    pub(crate) fn group(&self) -> &LimitedGroup {
        let (_, group) = self.limited.as_ref().expect("a part has a limit");
        group
    }

    /// The command without flags.
    fn command(&self, make: Make, part: Part) -> Command {
        if make == Make::Upstream {
            return Command::new(upstream(part.name()));
        }
        let mut command = match &self.limited {
            Some((limited, group)) if *limited == part => {
                group.command(env!("CARGO_BIN_EXE_portico")).expect("a command joins its group")
            }
            _ => portico(),
        };
        command.args(["konnectivity", part.name()]);
        command
    }

    /// A server that answers its health probe.
    pub(crate) async fn server(&self, make: Make, more: &[&str]) -> Server {
        let [agents, frontends, health, admin] = std::array::from_fn(|_| free_port());
        let ports = Ports { agents, frontends, health, admin };
        self.server_at(make, ports, more.iter().map(|&flag| flag.to_owned()).collect()).await
    }

    /// Kills this server and starts it once more.
    pub(crate) async fn server_again(&self, mut before: Server) -> Server {
        before.program.kill();
        self.server_at(before.make, before.ports, before.more).await
    }

    async fn server_at(&self, make: Make, ports: Ports, more: Vec<String>) -> Server {
        let mut command = self.command(make, Part::Server);
        let file = |name: &str| self.pki.path(name);
        let mode = if self.mode == Mode::Grpc { "grpc" } else { "http-connect" };
        command.arg(format!("--mode={mode}"));
        match self.transport {
            Transport::Unix => {
                command.arg(format!("--uds-name={}", self.socket(ports).display())).arg("--server-port=0");
            }
            Transport::Tls => {
                command
                    .arg(format!("--server-port={}", ports.frontends))
                    .arg("--server-bind-address=127.0.0.1")
                    .arg(format!("--server-ca-cert={}", file("ca.crt")))
                    .arg(format!("--server-cert={}", file("server.crt")))
                    .arg(format!("--server-key={}", file("server.key")));
            }
        }
        command
            .arg(format!("--cluster-ca-cert={}", file("ca.crt")))
            .arg(format!("--cluster-cert={}", file("server.crt")))
            .arg(format!("--cluster-key={}", file("server.key")))
            .args(["--agent-bind-address=127.0.0.1", &format!("--agent-port={}", ports.agents)])
            .args(["--health-bind-address=127.0.0.1", &format!("--health-port={}", ports.health)])
            .args(["--admin-bind-address=127.0.0.1", &format!("--admin-port={}", ports.admin)])
            .args(["--logtostderr=true", "--v=2"])
            .args(&more);
        let name = format!("server-{}", ports.agents);
        let mut program = Program::start(self.folder(), &name, command, ports.health);
        program.wait_for("/healthz", 200).await;
        Server { program, make, ports, more }
    }

    /// An agent that reaches the servers behind `port`, and answers its health probe.
    pub(crate) async fn agent(&self, make: Make, port: u16, more: &[&str]) -> Program {
        let [health, admin] = std::array::from_fn(|_| free_port());
        let file = |name: &str| self.pki.path(name);
        let mut command = self.command(make, Part::Agent);
        command
            .args([format!("--ca-cert={}", file("ca.crt")), format!("--agent-cert={}", file("agent.crt"))])
            .arg(format!("--agent-key={}", file("agent.key")))
            .args(["--proxy-server-host=127.0.0.1", &format!("--proxy-server-port={port}")])
            .args(["--health-server-host=127.0.0.1", &format!("--health-server-port={health}")])
            .args(["--admin-bind-address=127.0.0.1", &format!("--admin-server-port={admin}")])
            .args(["--sync-interval=100ms", "--sync-interval-cap=1s", "--probe-interval=100ms"])
            .args(["--logtostderr=true", "--v=2"])
            .args(more);
        let mut program = Program::start(self.folder(), &format!("agent-{health}"), command, health);
        program.wait_for("/healthz", 200).await;
        program
    }

    /// How a frontend reaches the server. The process that it may need ends with the [`Program`].
    pub(crate) async fn frontend(&self, server: &Server) -> (Frontend, Option<Program>) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.ports.frontends));
        match (self.mode, self.transport) {
            (Mode::HttpConnect, Transport::Unix) => {
                (Frontend::Unix { socket: self.socket(server.ports) }, None)
            }
            (Mode::HttpConnect, Transport::Tls) => {
                let config = Arc::new(self.pki.client_config(Some("frontend"), &[]));
                (Frontend::Tls { address, config }, None)
            }
            (Mode::Grpc, transport) => {
                let mut command = Command::new(upstream("frontend"));
                match transport {
                    Transport::Unix => command.arg("--uds").arg(self.socket(server.ports)),
                    Transport::Tls => command
                        .args(["--server", &address.to_string(), "--ca", &self.pki.path("ca.crt")])
                        .args(["--cert", &self.pki.path("frontend.crt")])
                        .args(["--key", &self.pki.path("frontend.key")]),
                };
                let name = format!("frontend-{}", server.ports.agents);
                let program = Program::start(self.folder(), &name, command, 0);
                let line = program.wait_for_line("listener=frontend").await;
                let address = line.rsplit('=').next().and_then(|address| address.trim().parse().ok());
                (Frontend::Grpc { program: address.expect("it names its address") }, Some(program))
            }
        }
    }

    /// The flags by which upstream's test client reaches the server.
    pub(crate) fn test_client(&self, server: &Server) -> Command {
        let mut command = Command::new(upstream("test-client"));
        command.arg(if self.mode == Mode::Grpc { "--mode=grpc" } else { "--mode=http-connect" });
        match self.transport {
            Transport::Unix => command
                .arg(format!("--proxy-uds={}", self.socket(server.ports).display()))
                .args(["--proxy-host=", "--proxy-port=0"]),
            Transport::Tls => command
                .args(["--proxy-host=127.0.0.1", &format!("--proxy-port={}", server.ports.frontends)])
                .arg(format!("--ca-cert={}", self.pki.path("ca.crt")))
                .arg(format!("--client-cert={}", self.pki.path("frontend.crt")))
                .arg(format!("--client-key={}", self.pki.path("frontend.key"))),
        };
        command
    }

    /// Certificates, for peers that a test makes by itself.
    pub(crate) fn pki(&self) -> &Pki {
        &self.pki
    }

    /// The Unix socket of a server.
    pub(crate) fn socket_of(&self, server: &Server) -> PathBuf {
        self.socket(server.ports)
    }

    /// Where certificates, sockets and logs are.
    pub(crate) fn folder(&self) -> &Path {
        self.pki.folder()
    }

    fn socket(&self, ports: Ports) -> PathBuf {
        self.folder().join(format!("server-{}.sock", ports.agents))
    }
}

impl Server {
    /// The port of agents.
    pub(crate) fn port(&self) -> u16 {
        self.ports.agents
    }

    /// A page of the port for people.
    pub(crate) fn admin(&self, path: &str) -> String {
        get(self.ports.admin, path).expect("the admin port answers").1
    }
}

/// One server, one agent, one frontend, all connected.
pub(crate) struct Pair {
    pub(crate) frontend: Frontend,
    pub(crate) helper: Option<Program>,
    pub(crate) agent: Program,
    pub(crate) server: Server,
    pub(crate) site: Site,
}

impl Pair {
    pub(crate) async fn start(server: Make, agent: Make, mode: Mode, transport: Transport) -> Self {
        Self::start_with(server, agent, mode, transport, &[]).await
    }

    /// The same, with more flags for the server.
    pub(crate) async fn start_with(
        server: Make,
        agent: Make,
        mode: Mode,
        transport: Transport,
        flags: &[&str],
    ) -> Self {
        let site = Site::new(mode, transport);
        let mut server = site.server(server, flags).await;
        let mut agent = site.agent(agent, server.port(), &[]).await;
        agent.wait_for("/readyz", 200).await;
        server.program.wait_for("/readyz", 200).await;
        let (frontend, helper) = site.frontend(&server).await;
        Self { frontend, helper, agent, server, site }
    }
}
