//! The wiring of an agent: address, data plane, tunnels, admin listener, and the order in which they begin and end.
//!
//! All of it is on the main thread; the data plane has the only other one. At the start: files, address, tunnels, listeners. A gateway
//! that is away is no reason not to start. A successor is different: as long as its predecessor serves, it waits until it could do as
//! well, so that a new version that does not work replaces nothing.
//!
//! At the end: whoever has a successor leaves address and listeners to it; whoever has none closes the listeners, lets connections
//! finish, and takes the address away last, for packets of open connections are sent to it.

use std::convert::Infallible;
use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use portico_agent::address::Held;
use portico_agent::{Agent, IdentityFiles, Inherited, Settings};
use portico_net::access::AccessLog;
use portico_net::takeover::{Offer, Predecessor, take_over};
use tokio::time::sleep;

use super::flags::{Flags, Plan};
use super::pages::AgentPages;
use super::status::Status;
use crate::allocator;
use crate::daemon::{Admin, Daemon};

/// Between two looks whether a tunnel is up, while a predecessor serves.
const LOOK_AT_TUNNELS: Duration = Duration::from_millis(100);
/// Between two series of attempts to put the address back.
const KEEP_AGAIN: Duration = Duration::from_secs(5);
/// Between two looks whether the start is over; the second tunnel comes that much later than the first, at most.
const SETTLES: Duration = Duration::from_secs(1);
/// Descriptors kept free of connections: tunnels, listeners, the admin listener, a proxy's files.
const OWN_DESCRIPTORS: u64 = 128;

/// How an agent stopped to listen.
enum Ending {
    /// A signal, by its name.
    Stop(&'static str),
    /// A successor listens.
    HandedOver,
}

/// Runs an agent until it is told to stop, or a successor has taken over. `started` is told once it listens.
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
    let take_over_path = flags.lifecycle.take_over.as_deref();
    let pages = Arc::new(AgentPages::new(Arc::clone(&status)));
    let admin = Admin::serve(flags.node.admin_listen, pages, take_over_path.is_some()).await?;
    let held = match address {
        None => None,
        Some(settings) => tokio::select! {
            held = Held::take(settings) => Some(held.context("--address")?),
            signal = daemon.asked_to_stop() => {
                tracing::info!(%signal, "told to stop before anything was served");
                return Ok(());
            }
        },
    };
    if let Some(held) = &held {
        status.set_held(held.status());
    }
    let mut address = KeptAddress { held, status: Arc::clone(&status) };
    let access = AccessLog::start(flags.records.access_log.into()).context("cannot start the access log")?;
    let settings = Settings {
        forwards,
        client,
        max_connections: max_connections(flags.limits.max_connections),
        max_waiting: flags.limits.max_waiting,
    };
    // From here on what was begun must be ended: an address without an agent behind it is a hole.
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
        never = address.keep() => match never {},
        never = follow(&mut files, &agent, &status) => match never {},
        signal = daemon.asked_to_stop() => {
            tracing::info!(%signal, "told to stop before anything was served");
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
    status.set_listening();
    for forward in &agent.shared().forwards {
        tracing::info!(forward = %forward.listen, name = %forward.authority, "listening");
    }
    started(&status);
    let ending = tokio::select! {
        never = address.keep() => match never {},
        never = settle(&status) => match never {},
        never = follow(&mut files, &agent, &status) => match never {},
        signal = daemon.asked_to_stop() => Ending::Stop(signal),
        () = hand_over(offer.as_ref(), Some(&agent)) => Ending::HandedOver,
    };
    status.set_stopping();
    let limit = flags.lifecycle.drain_timeout;
    let open = agent.shared().totals().open;
    match ending {
        Ending::HandedOver => {
            tracing::info!(open, ?limit, "a successor has taken over; open connections may finish");
            // It needs the address.
            admin.close();
            address.leave();
            // Whoever replaces us stops us as a matter of course, which is no reason to hurry.
            let mut signals = 0;
            let told_twice = async {
                while signals < 2 {
                    daemon.asked_to_stop().await;
                    signals += 1;
                }
            };
            tokio::select! {
                never = follow(&mut files, &agent, &status) => match never {},
                cut = agent.drain(limit) => tracing::info!(cut, "drained"),
                () = told_twice => tracing::warn!("told to stop again; ending at once"),
            }
            if flags.lifecycle.linger && signals == 0 {
                daemon.asked_to_stop().await;
            }
        }
        Ending::Stop(signal) => {
            // One that waits for its tunnels has the listening sockets, and listens as soon as it sees us stop.
            let mut succeeded = offer.as_ref().is_some_and(Offer::has_successor);
            tracing::info!(%signal, open, ?limit, succeeded, "told to stop; draining; a second signal ends it");
            if succeeded {
                admin.close();
            }
            tokio::select! {
                never = follow(&mut files, &agent, &status) => match never {},
                never = address.keep() => match never {},
                cut = agent.drain(limit) => tracing::info!(cut, "drained"),
                signal = daemon.asked_to_stop() => tracing::warn!(%signal, "told to stop again; ending at once"),
                never = succeed(offer.as_ref(), &mut succeeded, &admin) => match never {},
            }
            if succeeded {
                address.leave();
            } else {
                address.release().await;
            }
        }
    }
    Ok(())
}

/// As many as asked for, as far as descriptors allow.
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
        agent.listen(Inherited::new())?;
        return Ok(None);
    };
    let mut predecessor = take_over(path)?;
    let inherited = match &mut predecessor {
        None => Inherited::new(),
        Some(predecessor) => {
            let inherited = predecessor.sockets()?;
            // One that stops does not listen any more: nobody serves until we do.
            if !inherited.is_empty() {
                able(status, predecessor).await?;
            }
            inherited
        }
    };
    agent.listen(inherited)?;
    // Before the predecessor goes: whoever comes next is to ask us.
    let offer = Offer::new(path)?;
    if let Some(Err(error)) = predecessor.map(Predecessor::ready) {
        tracing::info!(%error, "the predecessor has ended meanwhile");
    }
    Ok(Some(offer))
}

/// Waits until connections would be carried, or nobody else does it.
async fn able(status: &Status, predecessor: &Predecessor) -> anyhow::Result<()> {
    tracing::info!("a predecessor listens; it goes on until a tunnel is up here");
    let tunnel = async {
        while !status.can_carry() {
            sleep(LOOK_AT_TUNNELS).await;
        }
    };
    tokio::select! {
        () = tunnel => {}
        gone = predecessor.gone() => {
            gone.context("--take-over: waiting for the predecessor")?;
            tracing::info!("the predecessor is gone; listening in its place");
        }
    }
    Ok(())
}

/// Offers what `agent` listens on to successors; returns once one listens. Without an agent, all there is to hand over is the address.
async fn hand_over(offer: Option<&Offer>, agent: Option<&Agent>) {
    let Some(offer) = offer else { return pending().await };
    let sockets = || agent.map_or_else(|| Ok(Vec::new()), Agent::sockets);
    offer.serve(None, sockets).await;
}

/// Notes that a successor came while we drain.
async fn succeed(offer: Option<&Offer>, succeeded: &mut bool, admin: &Admin) -> Infallible {
    if !*succeeded {
        hand_over(offer, None).await;
        tracing::info!("a successor is there; the address stays");
        *succeeded = true;
        admin.close();
    }
    pending().await
}

/// Gives back memory that only the start needed: now, and once more when the first tunnels are up.
async fn settle(status: &Status) -> Infallible {
    allocator::give_back();
    while !status.can_carry() {
        sleep(SETTLES).await;
    }
    sleep(SETTLES).await;
    allocator::give_back();
    pending().await
}

/// Shows gateways the certificate and the token that are in the files now.
async fn follow(files: &mut IdentityFiles, agent: &Agent, status: &Status) -> Infallible {
    if files.is_empty() {
        return pending().await;
    }
    loop {
        files.due().await;
        let renewed = files.look();
        status.set_file_problems(files.problems());
        if renewed.certificate {
            agent.certificate_changed();
        }
        if renewed.token {
            agent.token_changed();
        }
    }
}

/// The address, if one is held.
struct KeptAddress {
    held: Option<Held>,
    status: Arc<Status>,
}

impl KeptAddress {
    /// Puts it back whenever someone removes it. May be dropped at any await.
    async fn keep(&mut self) -> Infallible {
        let Some(held) = &mut self.held else { return pending().await };
        loop {
            let error = held.keep().await;
            tracing::error!(%error, "the address is lost; trying again");
            self.status.set_address_problem(error.to_string());
            sleep(KEEP_AGAIN).await;
        }
    }

    /// Leaves it to a successor.
    fn leave(self) {
        if let Some(held) = self.held {
            held.leave();
        }
    }

    /// Takes it away.
    async fn release(self) {
        if let Some(held) = self.held {
            held.release().await;
        }
    }

    /// Undoes what was done, before anything was served: what another agent has made, and may still use, stays.
    async fn give_up(self) {
        match &self.held {
            Some(held) if held.how().adopted => self.leave(),
            _ => self.release().await,
        }
    }
}
