//! The order in which an agent begins and ends.
//!
//! The first signal drains. Servers prefer other agents, and open connections go on. Further dials of servers
//! are made all the same, because all agents may be draining. The agent ends once nothing has been open for a
//! while. A second signal ends it at once.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use portico_admin::server::Name;
use portico_konnectivity::agent::Agent;
use tokio::time::sleep;

use super::Flags;
use super::pages::{AdminPages, HealthPages};
use crate::allocator;
use crate::daemon::{Admin, Daemon};

const HEALTH: Name = Name {
    listener: "health",
    remedy: "choose another one with --health-server-host and --health-server-port, or port 0 for none",
};

const ADMIN: Name = Name {
    listener: "admin",
    remedy: "choose another one with --admin-bind-address and --admin-server-port, or port 0 for none",
};

/// How often to look whether the start is over.
const START_POLL: Duration = Duration::from_secs(1);

/// Runs an agent until it is told to stop.
pub(in crate::verb::konnectivity) async fn run(flags: &Flags, mut daemon: Daemon) -> anyhow::Result<()> {
    flags.hint();
    let listens = flags.listens().await?;
    let settings = flags.settings().await?;
    let servers: Vec<String> = settings.servers.iter().map(ToString::to_string).collect();
    tracing::info!(id = ?settings.agent_id, servers = servers.join(", "), "starting");
    let agent = Arc::new(Agent::start(settings));
    let health = Arc::new(HealthPages::new(Arc::clone(&agent)));
    let _health = Admin::serve_at(HEALTH, listens.health, health).await?;
    let admin = Arc::new(AdminPages::new(Arc::clone(&agent), listens.health));
    let _admin = Admin::serve_at(ADMIN, listens.admin, admin).await?;
    let signal = tokio::select! {
        never = give_memory_back(&agent) => match never {},
        signal = daemon.asked_to_stop() => signal,
    };
    let open = agent.connections().len();
    let idle = flags.limits.drain_idle;
    tracing::info!(%signal, open, ?idle, "draining until idle for so long; a second signal ends it");
    agent.drain();
    tokio::select! {
        () = agent.idle(idle) => tracing::info!("drained"),
        signal = daemon.asked_to_stop() => {
            let cut = agent.connections().len();
            tracing::warn!(%signal, cut, "told to stop again; ending at once");
        }
    }
    Ok(())
}

/// Gives memory back to the system: what only the start needed, once servers are connected, and then what
/// bursts leave.
async fn give_memory_back(agent: &Agent) -> Infallible {
    allocator::give_back();
    while agent.servers().is_empty() {
        sleep(START_POLL).await;
    }
    sleep(START_POLL).await;
    allocator::give_back();
    allocator::give_back_after_bursts().await
}
