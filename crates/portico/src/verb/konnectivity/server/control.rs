//! The order in which a server begins and ends.
//!
//! The first signal drains for `--graceful-shutdown-timeout`: listeners close, the Lease goes, and `/readyz`
//! shows it. Open connections go on, those of agents included: an upstream agent that gets GOAWAY drops all
//! its connections. Then, or at a second signal, everything ends, and frontends are notified.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use portico_admin::server::Name;
use portico_dial::{FileSet, FolderWatch};
use portico_konnectivity::server::{Server, ServerTls};
use tokio::time::timeout;

use super::Flags;
use super::pages::{AdminPages, HealthPages};
use crate::allocator;
use crate::daemon::{Admin, Daemon};

const HEALTH: Name = Name {
    listener: "health",
    remedy: "choose another one with --health-bind-address and --health-port, or port 0 for none",
};

const ADMIN: Name = Name {
    listener: "admin",
    remedy: "choose another one with --admin-bind-address and --admin-port, or port 0 for none",
};

/// How long the end of a server that has nothing to wait for may wait for an API server that takes its Lease.
const RELEASE: Duration = Duration::from_secs(1);

/// Runs a server until it is told to stop.
pub(in crate::verb::konnectivity) async fn run(flags: &Flags, mut daemon: Daemon) -> anyhow::Result<()> {
    flags.hint();
    let plan = flags.plan().await?;
    let authentication = flags.authentication().await?;
    tracing::info!(id = %plan.settings.id, mode = ?plan.mode, frontends = %plan.frontends, "starting");
    let mut server = Server::start(plan.settings, plan.mode, plan.frontends, plan.agents, authentication)?;
    let lease = flags.lease(server.status()).await?;
    tracing::info!(agents = %server.agent_address(), "listening");
    let metrics = Arc::new(super::metrics::metrics(server.status()));
    let health = Arc::new(HealthPages::new(server.status(), Arc::clone(&metrics)));
    let _health = Admin::serve_at(HEALTH, plan.health, health).await?;
    let _admin =
        Admin::serve_at(ADMIN, plan.admin, Arc::new(AdminPages::new(server.status(), metrics))).await?;
    let keep = async {
        match &lease {
            Some(lease) => lease.run().await,
            None => pending().await,
        }
    };
    let signal = tokio::select! {
        never = keep => match never {},
        never = follow(&plan.tls) => match never {},
        never = allocator::give_back_after_bursts() => match never {},
        signal = daemon.asked_to_stop() => signal,
    };
    let (open, limit) = (server.status().established(), flags.health.graceful_shutdown_timeout);
    tracing::info!(%signal, "told to stop");
    // At the same time: agents must not look for a server that no longer listens.
    let release = async {
        if let Some(lease) = &lease {
            lease.release().await;
        }
    };
    let release = timeout(limit.max(RELEASE), release);
    let (_, _released) = tokio::join!(daemon.drain(open, limit, 1, server.drain(limit)), release);
    server.stop().await;
    Ok(())
}

/// Reads certificates again when they change.
async fn follow(all: &[Arc<ServerTls>]) -> Infallible {
    let watch = FolderWatch::new(all.iter().flat_map(|tls| tls.paths()));
    let set = |tls: &Arc<ServerTls>| FileSet::new("certificate, key and CA", tls.paths());
    let mut sets: Vec<(FileSet, &Arc<ServerTls>)> = all.iter().map(|tls| (set(tls), tls)).collect();
    loop {
        watch.due(sets.iter().any(|(set, _)| set.problem().is_some())).await;
        for (set, tls) in &mut sets {
            set.reload_if_changed(|| tls.reload());
        }
    }
}
