//! The wiring of an agent: address, data plane, tunnels, admin listener, and the order in which they begin
//! and end.
//!
//! All of it is on the main thread. The data plane has the only other one.
//!
//! Start: files, address, tunnels, listeners. A gateway that is away is no reason not to start. A successor
//! is different. While its predecessor serves, it waits until it could do as well. So a new version that does
//! not work replaces nothing.
//!
//! End: an agent with a successor leaves the listeners to it. One without closes them. Both let connections
//! finish. The last agent of a node takes the address away at its very end, because packets of open
//! connections are sent to it.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use portico_agent::address::AssignedAddress;
use portico_agent::{Agent, IdentityFiles, Inherited, Settings};
use portico_net::access::AccessLog;
use portico_net::takeover::{Offer, Predecessor, take_over};
use tokio::time::sleep;

use super::flags::{Flags, Plan};
use super::pages::AgentPages;
use super::status::Status;
use crate::allocator;
use crate::daemon::{Admin, Daemon};

/// How often to look whether a tunnel is up, while a predecessor serves.
const TUNNEL_POLL: Duration = Duration::from_millis(100);
/// How often to look whether the start is over. The second tunnel comes that much later than the first, at
/// most.
const START_POLL: Duration = Duration::from_secs(1);
/// Descriptors kept free of connections: tunnels, listeners, the admin listener, a proxy's files.
const OWN_DESCRIPTORS: u64 = 128;

/// Why an agent stops listening.
enum Ending {
    /// A signal, by its name.
    Stop(&'static str),
    /// A successor listens.
    HandedOver,
}

/// Runs an agent until a signal stops it, or a successor has taken over. Calls `started` once it listens.
pub(crate) async fn run(
    flags: &Flags,
    mut daemon: Daemon,
    started: impl FnOnce(&Status),
) -> anyhow::Result<()> {
    let Plan { forwards, client, mut files, address } = flags.plan()?;
    flags.warn();
    let status = Arc::new(Status::new(
        flags.lifecycle.instance.clone(),
        address.as_ref().map(|settings| settings.address),
        flags.plaintext_gateways().count(),
    ));
    status.set_dialer(Arc::clone(&client.dialer));
    let take_over_path = flags.lifecycle.take_over.as_deref();
    let pages = Arc::new(AgentPages::new(Arc::clone(&status)));
    let admin = Admin::serve(flags.node.admin_listen, pages, take_over_path.is_some()).await?;
    let access = AccessLog::start(flags.records.access_log.into()).context("cannot start the access log")?;
    let held = match address {
        None => None,
        Some(settings) => Some(AssignedAddress::take(settings).await.context("--address")?),
    };
    if let Some(held) = &held {
        status.set_held(held.status());
    }
    // From here on the address must be given up on an error: pods that connect to it would find nothing.
    let address = HeldAddress(held);
    let settings = Settings {
        forwards,
        client,
        max_connections: max_connections(flags.limits.max_connections),
        max_waiting: flags.limits.max_waiting,
    };
    let agent = match Agent::start(settings, access) {
        Ok(agent) => Arc::new(agent),
        Err(error) => {
            address.give_up().await;
            return Err(error.into());
        }
    };
    status.set_agent(Arc::clone(&agent));
    let listening = tokio::select! {
        listening = listen(&agent, &status, take_over_path) => listening,
        never = follow(&mut files, &agent, &status) => match never {},
        signal = daemon.asked_to_stop() => {
            tracing::info!(%signal, "stopping before anything was served");
            address.give_up().await;
            return Ok(());
        }
    };
    let offer = match listening {
        Ok(offer) => offer,
        Err(error) => {
            address.give_up().await;
            return Err(error);
        }
    };
    address.remove_others().await;
    status.set_listening();
    for forward in &agent.shared().forwards {
        tracing::info!(forward = %forward.listen, name = %forward.authority, "listening");
    }
    started(&status);
    let ending = tokio::select! {
        never = give_memory_back(&status) => match never {},
        never = follow(&mut files, &agent, &status) => match never {},
        signal = daemon.asked_to_stop() => Ending::Stop(signal),
        () = hand_over(offer.as_ref(), Some(&agent)) => Ending::HandedOver,
    };
    status.set_stopping();
    let lifecycle = &flags.lifecycle;
    let drain = drain(&agent, &mut files, &status, lifecycle.drain_timeout);
    let open = agent.shared().totals().open;
    let lingers = match ending {
        Ending::HandedOver => {
            // Another that still asks here is to ask the successor.
            drop(offer);
            tracing::info!(open, "a successor has taken over; open connections may finish");
            // The successor needs the admin address.
            admin.close();
            daemon.drain_until(2, drain).await == 0 && lifecycle.linger
        }
        Ending::Stop(signal) => {
            tracing::info!(%signal, open, "stopping: draining; a second signal ends it");
            drain_after_signal(drain, &mut daemon, offer.as_ref(), &admin).await;
            false
        }
    };
    address.release().await;
    if lingers {
        daemon.asked_to_stop().await;
    }
    agent.shared().access.flush();
    Ok(())
}

/// Lets connections finish for `limit`. Their tunnels are shown new credentials meanwhile.
async fn drain(agent: &Agent, files: &mut IdentityFiles, status: &Status, limit: Duration) {
    tracing::info!(?limit, "draining");
    tokio::select! {
        never = follow(files, agent, status) => match never {},
        cut = agent.drain(limit) => tracing::info!(cut, "drained"),
    }
}

/// Drains until the next signal.
async fn drain_after_signal(
    drain: impl Future<Output = ()>,
    daemon: &mut Daemon,
    offer: Option<&Offer>,
    admin: &Admin,
) {
    tokio::select! {
        () = drain => {}
        signal = daemon.asked_to_stop() => tracing::warn!(%signal, "a second signal; ending at once"),
        never = succeed(offer, admin) => match never {},
    }
}

/// Returns as many connections as asked for, as far as descriptors allow.
fn max_connections(asked: u32) -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let possible = u32::try_from(limit.saturating_sub(OWN_DESCRIPTORS)).unwrap_or(u32::MAX).max(1);
    if possible < asked {
        tracing::warn!(
            asked,
            possible,
            "fewer file descriptors than --max-connections; raise the limit (ulimit -n), or lower the flag"
        );
    }
    asked.min(possible)
}

/// Listens, in place of the predecessor if there is one; then offers the same to a successor.
async fn listen(agent: &Agent, status: &Status, path: Option<&Path>) -> anyhow::Result<Option<Offer>> {
    let Some(path) = path else {
        agent.listen(Inherited::default())?;
        return Ok(None);
    };
    let mut predecessor = take_over(path).await?;
    let mut inherited = Inherited::default();
    if let Some(there) = &mut predecessor {
        inherited = there.sockets::<SocketAddr>()?;
        // A predecessor that stops has no sockets: then nothing serves until this agent listens.
        if !inherited.is_empty() && !wait_until_able(status, there).await? {
            predecessor = None;
        }
    }
    agent.listen(inherited)?;
    Ok(Some(Offer::in_place_of(predecessor, path)?))
}

/// Waits until connections would be carried, or the predecessor is gone. Returns whether it is still there.
async fn wait_until_able(status: &Status, predecessor: &Predecessor) -> anyhow::Result<bool> {
    tracing::info!("a predecessor listens; it goes on until a tunnel is up here");
    let tunnel = async {
        while !status.can_carry() {
            sleep(TUNNEL_POLL).await;
        }
    };
    tokio::select! {
        () = tunnel => Ok(true),
        gone = predecessor.gone() => {
            gone.context("--take-over: waiting for the predecessor")?;
            tracing::info!("the predecessor is gone; listening in its place");
            Ok(false)
        }
    }
}

/// Offers what `agent` listens on to successors, and returns once one listens. Without an agent, the address
/// is all there is to hand over.
async fn hand_over(offer: Option<&Offer>, agent: Option<&Agent>) {
    let Some(offer) = offer else { return pending().await };
    let sockets = || agent.map_or_else(|| Ok(Vec::new()), Agent::sockets);
    offer.serve(None, sockets).await;
}

/// Lets go of the admin address once a successor is there while this agent drains.
async fn succeed(offer: Option<&Offer>, admin: &Admin) -> Infallible {
    // One that waits for its tunnels has the listening sockets, and listens once this agent stops.
    if !offer.is_some_and(Offer::has_successor) {
        hand_over(offer, None).await;
        tracing::info!("a successor is there");
    }
    admin.close();
    pending().await
}

/// Gives memory back to the system: what only the start needed, now and once more when the first tunnels are
/// up, and then what bursts leave.
async fn give_memory_back(status: &Status) -> Infallible {
    allocator::give_back();
    while !status.can_carry() {
        sleep(START_POLL).await;
    }
    sleep(START_POLL).await;
    allocator::give_back();
    allocator::give_back_after_bursts().await
}

/// Shows gateways the certificate and the token that are in the files now.
async fn follow(files: &mut IdentityFiles, agent: &Agent, status: &Status) -> Infallible {
    if files.is_empty() {
        return pending().await;
    }
    loop {
        let renewed = files.reload_if_changed();
        status.set_file_problems(files.problems());
        if renewed.certificate {
            agent.certificate_changed();
        }
        if renewed.token {
            agent.token_changed();
        }
        files.due().await;
    }
}

/// The address, if one is held.
struct HeldAddress(Option<AssignedAddress>);

impl HeldAddress {
    /// Removes those of earlier agents, if none of them runs any more.
    async fn remove_others(&self) {
        if let Some(held) = &self.0 {
            held.remove_others().await;
        }
    }

    /// Takes it away, if no other agent of this node has it.
    async fn release(self) {
        if let Some(held) = self.0 {
            held.release().await;
        }
    }

    /// Undoes what was done before anything was served.
    async fn give_up(self) {
        if let Some(held) = self.0 {
            held.give_up().await;
        }
    }
}
