//! The server: beside an API server, which asks it for connections that agents open in the user cluster.
//!
//! A frontend's request ([`frontend`](self), by gRPC or HTTP CONNECT) becomes a dial ([`shared`](self)), for
//! which a strategy picks an agent. The agent answers on its Connect stream, or with a stream of its own for
//! the connection if it is one of ours. Then `portico-tunnel`'s bridge carries the bytes between a Unix
//! socket and such a stream. Otherwise `relay` does, with an `inbox` where the agent sends packets.
//!
//! Everything runs on one thread. Elsewhere: flags, pages and signals (`portico`).

mod agents;
mod authentication;
mod backend;
mod claims;
mod connection_end;
mod connections;
pub mod counters;
mod established;
mod frontend;
mod http2;
mod inbox;
mod lease_counters;
mod leases;
mod listen;
mod native;
mod registry;
mod relay;
mod settings;
mod shared;
mod tls;
mod unauthenticated;

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use self::listen::FrontendListener;
use self::registry::Candidate;
use self::shared::{Shared, Stop};

pub use authentication::{Authentication, Expected};
pub use claims::{Binding, BindingError};
pub use connections::ConnectionRow;
pub use counters::Counters;
pub use frontend::Mode;
pub use lease_counters::{LeaseCounters, REQUEST_BUCKETS};
pub use leases::ServerLease;
pub use listen::{FrontendListen, ListenError};
pub use registry::Strategy;
pub use settings::Settings;
pub use tls::{ServerTls, TlsError, TlsFiles, TlsOptions};

/// Between two looks at whether all is over.
const DRAIN_LOOK: Duration = Duration::from_millis(100);

/// Between two looks at whether all is over, at the very end: it soon is.
const STOP_LOOK: Duration = Duration::from_millis(10);

/// How long connections have to end once they are cancelled, and their last bytes to leave.
const STOP: Duration = Duration::from_millis(500);

/// A server that serves.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    frontends: JoinHandle<()>,
    agents: JoinHandle<()>,
    /// To be removed when the server no longer listens, with its inode.
    socket: Option<(PathBuf, Option<u64>)>,
    agent_address: SocketAddr,
    frontend_address: Option<SocketAddr>,
}

/// What a server is doing.
#[derive(Debug, Clone)]
pub struct Status(Arc<Shared>);

/// One row of `/agents`.
#[derive(Debug, Clone)]
pub struct AgentRow {
    /// Its name for itself.
    pub agent: String,
    /// Where it connected from.
    pub peer: SocketAddr,
    /// Its program.
    pub version: String,
    /// Whether its connections have streams of their own.
    pub native: bool,
    /// Whether it asked for no more dials.
    pub draining: bool,
    /// How long it is connected.
    pub age: Duration,
    /// How long ago a look at its connection last found that it had sent something. There is one look in the
    /// silence after which it gets PING, and the response to that counts.
    pub last_seen: Duration,
    /// Dials that wait for it.
    pub dials: usize,
}

impl Server {
    /// Listens, and serves on this runtime, which must be of one thread.
    pub fn start(
        settings: Settings,
        mode: Mode,
        frontends: FrontendListen,
        (agents, tls): (SocketAddr, Arc<ServerTls>),
        authentication: Authentication,
    ) -> Result<Self, ListenError> {
        let agent_listener = listen::tcp("agents", agents, Some(settings::UNREAD))?;
        let frontend_listener = frontends.open()?;
        let shared = Shared::new(settings);
        let agent_address = agent_listener.local_addr().unwrap_or(agents);
        let (socket, frontend_address) = match &frontend_listener {
            FrontendListener::Unix(_, path) => (Some((path.clone(), inode(path))), None),
            FrontendListener::Tcp(listener, _) => (None, listener.local_addr().ok()),
        };
        let authentication = Arc::new(authentication);
        let agents = listen::agents(Arc::clone(&shared), agent_listener, tls, authentication);
        let frontends = listen::frontends(Arc::clone(&shared), frontend_listener, mode);
        let (frontends, agents) = (tokio::spawn(frontends), tokio::spawn(agents));
        Ok(Self { shared, frontends, agents, socket, agent_address, frontend_address })
    }

    /// Where agents connect to.
    #[must_use]
    pub fn agent_address(&self) -> SocketAddr {
        self.agent_address
    }

    /// Where frontends connect to, over TCP.
    #[must_use]
    pub fn frontend_address(&self) -> Option<SocketAddr> {
        self.frontend_address
    }

    /// For pages.
    #[must_use]
    pub fn status(&self) -> Status {
        Status(Arc::clone(&self.shared))
    }

    /// Stops listening and takes no more dials. Open connections go on for `limit` at most, and the carried
    /// bytes leave. Agents keep their connections, because an upstream agent that gets GOAWAY drops all of
    /// its connections. Returns how many connections are left.
    pub async fn drain(&mut self, limit: Duration) -> usize {
        self.close();
        self.shared.drain();
        let deadline = Instant::now() + limit;
        while !self.is_idle() && Instant::now() < deadline {
            sleep(DRAIN_LOOK).await;
        }
        self.status().established()
    }

    /// Ends everything, and notifies the frontends.
    pub async fn stop(mut self) {
        self.close();
        self.shared.stop.send_replace(Stop::Agents);
        let deadline = Instant::now() + STOP;
        while !self.is_idle() && Instant::now() < deadline {
            sleep(STOP_LOOK).await;
        }
        self.shared.stop.send_replace(Stop::Everything);
        sleep(STOP_LOOK).await;
    }

    /// Whether nothing is open, and nothing is on its way to a peer that reads slowly.
    fn is_idle(&self) -> bool {
        let Shared { counters, memory, .. } = &*self.shared;
        // A dial that is under way becomes a connection.
        let open = counters.established.load(Relaxed) + counters.pending.load(Relaxed);
        open == 0 && memory.held() == 0
    }

    /// Stops listening.
    fn close(&mut self) {
        self.frontends.abort();
        self.agents.abort();
        // A successor may have put its own there.
        if let Some((path, own)) = self.socket.take()
            && inode(&path) == own
        {
            // One that cannot be removed is replaced by the next server.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

impl Default for Status {
    /// The status of a server that has done nothing.
    fn default() -> Self {
        Self(Shared::new(Settings::default()))
    }
}

impl Status {
    /// Everything that is counted.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Whether the first strategy has an agent, as upstream's server has it. Dials may go by another one.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.0.is_draining() && self.0.registry().is_ready()
    }

    /// Whether the server is about to stop.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.is_draining()
    }

    /// Agents of each strategy.
    #[must_use]
    pub fn agents_of(&self) -> Vec<(Strategy, usize)> {
        let registry = self.0.registry();
        registry.strategies().iter().map(|strategy| (*strategy, registry.count(*strategy))).collect()
    }

    /// Every stream of an agent.
    #[must_use]
    pub fn agents(&self) -> Vec<AgentRow> {
        let row = |backend: &Arc<backend::Backend>| AgentRow {
            agent: backend.agent.to_string(),
            peer: backend.peer,
            version: backend.version.to_string(),
            native: backend.is_native,
            draining: backend.is_draining(),
            age: backend.since.elapsed(),
            last_seen: backend.last_seen(),
            dials: backend.dials(),
        };
        self.0.registry().streams().map(row).collect()
    }

    /// Every connection that is open.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionRow> {
        self.0.connections.rows()
    }

    /// How many there are.
    #[must_use]
    pub fn established(&self) -> usize {
        usize::try_from(self.counters().established.load(Relaxed)).unwrap_or(usize::MAX)
    }

    /// Connections to the agent port whose peers have not authenticated.
    #[must_use]
    pub fn unauthenticated(&self) -> u32 {
        self.0.unauthenticated_agents.count()
    }

    /// Bytes that wait for receivers, and how many may.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        (self.0.memory.held(), self.0.memory.limit())
    }
}
