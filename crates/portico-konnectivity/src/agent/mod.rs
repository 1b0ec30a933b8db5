//! The agent: dials in the user cluster what servers ask for.
//!
//! `supervisor` keeps a connection to each server, as `pool` and `leases` say; `server` makes one; `session`
//! is its Connect stream. A dial (`dial`, within `policy`) becomes a connection. It has an HTTP/2 stream of
//! its own (`native`), or its bytes share the Connect stream (`endpoint`, `outbound`). All of it is bounded
//! by [`Settings`]; `shared` holds what is counted and listed.

mod dial;
mod endpoint;
mod leases;
mod native;
mod outbound;
mod policy;
mod pool;
mod record;
mod server;
mod session;
mod sessions;
mod settings;
mod shared;
mod supervisor;

pub use dial::DialFailure;
pub use policy::{Destination, DestinationError, Policy};
pub use record::{EndpointEnd, Record};
pub use session::Session;
pub use settings::{CountSource, Leases, Settings};
pub use shared::{Counters, DIAL_BUCKETS};

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use self::sessions::Sessions;
use self::shared::Shared;

/// A running agent. Dropped, it closes all connections.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    sessions: Arc<Sessions>,
    supervisor: JoinHandle<()>,
}

impl Agent {
    /// Begins to connect to servers.
    #[must_use]
    pub fn start(settings: Settings) -> Self {
        let shared = Arc::new(Shared::new(settings));
        let sessions = Arc::new(Sessions::default());
        let supervisor = tokio::spawn(supervisor::supervise(Arc::clone(&shared), Arc::clone(&sessions)));
        Self { shared, sessions, supervisor }
    }

    /// Asks all servers to prefer other agents, and connects to no more. Their dials are made all the same:
    /// all agents may be draining.
    pub fn drain(&self) {
        self.shared.drain();
        self.sessions.drain();
    }

    /// Returns once there has been no connection to an endpoint for so long. No dial is under way then, and
    /// no bytes wait for a server that reads slowly.
    pub async fn idle(&self, limit: Duration) {
        // Dials and bytes under way are looked at so often.
        let limit = limit.max(Duration::from_millis(10));
        let mut open = self.shared.open();
        loop {
            // The sender lives as long as the agent.
            let _ = open.wait_for(|open| *open == 0).await;
            let stays_idle = timeout(limit, open.wait_for(|open| *open > 0)).await.is_err();
            if stays_idle && self.shared.dialling() == 0 && self.settings().memory.held() == 0 {
                return;
            }
        }
    }

    /// Servers that are connected.
    #[must_use]
    pub fn servers(&self) -> Vec<Arc<Session>> {
        self.sessions.all()
    }

    /// How many of them will stay: those that have sent GOAWAY take no dials.
    #[must_use]
    pub fn staying_servers(&self) -> usize {
        self.sessions.staying()
    }

    /// How many servers there are, as far as is known.
    #[must_use]
    pub fn known_servers(&self) -> u32 {
        self.shared.known_servers.load(Relaxed)
    }

    /// Connections to endpoints that are open.
    #[must_use]
    pub fn connections(&self) -> Vec<Arc<Record>> {
        self.shared.connections()
    }

    /// Dials under way.
    #[must_use]
    pub fn dialling(&self) -> u32 {
        self.shared.dialling()
    }

    /// Whether [`drain`](Self::drain) was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.is_draining()
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// What it was started with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}
