//! The other end of a tunnel: the agent of a worker node, in front of a gateway of the same make.
//!
//! An agent has one listener, which leads to the API server of one cluster, as on a worker node. Clients of a
//! [`Pair`] speak plain TCP to it and reach the backend through both processes.

use std::fs;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::spawned::Spawned;
use super::{Running, START};
use crate::site::Cluster;

/// A program that carries TCP connections to a gateway as CONNECT streams.
pub(crate) trait Agent {
    /// The name in messages.
    fn name(&self) -> &'static str;

    /// Writes the configuration into the way's directory, if it has one.
    fn configure(&self, way: &Way) -> Result<()>;

    /// The command that serves the way in the foreground.
    fn command(&self, way: &Way) -> Command;
}

/// Where an agent listens and where that leads.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    /// Configuration and log.
    pub(crate) dir: PathBuf,
    /// Clients connect here.
    pub(crate) listen: SocketAddrV4,
    /// Health and metrics, for programs that need the address.
    pub(crate) admin: SocketAddrV4,
    /// The tunnel listener of the gateway.
    pub(crate) gateway: SocketAddrV4,
    /// Whose API server it leads to.
    pub(crate) cluster: Cluster,
}

/// A gateway and an agent that goes through it.
pub(crate) struct Pair {
    /// Where the agent leads.
    pub(crate) way: Way,
    /// Ends first.
    agent: Spawned,
    gateway: Running,
}

impl Pair {
    /// Starts an agent for the first cluster of `gateway`, and waits until a client is answered through both.
    pub(crate) fn start(program: &dyn Agent, gateway: Running) -> Result<Self> {
        let site = &gateway.site;
        let at = |offset| SocketAddrV4::new(*site.admin.ip(), site.admin.port() + offset);
        let way = Way {
            dir: site.dir.join("agent"),
            listen: at(1),
            admin: at(2),
            gateway: site.tunnel,
            cluster: site.clusters.first().context("a gateway for an agent has a cluster")?.clone(),
        };
        fs::create_dir_all(&way.dir).with_context(|| format!("cannot create {}", way.dir.display()))?;
        program.configure(&way).with_context(|| format!("cannot configure {}", program.name()))?;
        let mut agent = Spawned::start(&program.command(&way), &way.dir)
            .with_context(|| format!("cannot start {}", program.name()))?;
        let deadline = Instant::now() + START;
        agent.wait_until_it_serves(program.name(), way.listen, &way.cluster.host, deadline)?;
        Ok(Self { way, agent, gateway })
    }

    /// The process on the worker node.
    pub(crate) fn agent(&self) -> u32 {
        self.agent.pid()
    }

    /// The process in the seed.
    pub(crate) fn gateway(&self) -> u32 {
        self.gateway.pid()
    }
}
