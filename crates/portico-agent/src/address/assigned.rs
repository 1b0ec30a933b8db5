//! An address that this node holds, from taking it to releasing it.
//!
//! [`AssignedAddress::take`] makes it. From then on a task of its own puts back a removed address, as soon as
//! the kernel reports the removal. Between repairs it backs off ([`RepairBackoff`]).
//! [`AssignedAddress::release`] ends it. A repair that has begun is finished before that, so that nothing
//! stays half made.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::backoff::RepairBackoff;
use super::check::check;
use super::error::AddressError;
use super::host::{ALIAS, Changes, Host, HostChange};
use super::interface::{self, Placement};
use super::settings::Settings;
use super::users::Users;

/// A view of an [`AssignedAddress`] for other tasks.
#[derive(Debug, Clone)]
pub struct Status(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: AtomicBool,
    repairs: AtomicU64,
    details: Mutex<Details>,
}

#[derive(Debug)]
struct Details {
    placement: Arc<Placement>,
    problem: Option<Box<str>>,
}

impl Status {
    fn new(placement: Placement) -> Self {
        let details = Details { placement: Arc::new(placement), problem: None };
        Self(Arc::new(Shared { held: true.into(), repairs: 0.into(), details: Mutex::new(details) }))
    }

    /// Whether the address was there when the kernel last reported a change.
    pub fn is_held(&self) -> bool {
        self.0.held.load(Relaxed)
    }

    /// How it is held. May change in a repair.
    pub fn placement(&self) -> Arc<Placement> {
        Arc::clone(&self.details().placement)
    }

    /// Why the address cannot be put back, while it cannot.
    pub fn problem(&self) -> Option<Box<str>> {
        self.details().problem.clone()
    }

    /// How often something had to be put back.
    pub fn repairs(&self) -> u64 {
        self.0.repairs.load(Relaxed)
    }

    fn set_held(&self, held: bool) {
        self.0.held.store(held, Relaxed);
    }

    fn set_repaired(&self, placement: Placement) {
        self.details().placement = Arc::new(placement);
        self.0.repairs.fetch_add(1, Relaxed);
    }

    /// Returns whether the problem is another one than before.
    fn set_problem(&self, problem: Option<&AddressError>) -> bool {
        let problem = problem.map(|error| error.to_string().into());
        let mut details = self.details();
        let new = details.problem != problem;
        details.problem = problem;
        new
    }

    fn details(&self) -> std::sync::MutexGuard<'_, Details> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.0.details.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An address that this node holds. Dropping it leaves everything in place, as a crash does.
#[derive(Debug)]
pub struct AssignedAddress {
    settings: Settings,
    /// Others that may have connections by it, or by another address of the interface.
    users: Users,
    /// Those of them that may have connections by it.
    holders: Users,
    status: Status,
    /// Dropped or used, it ends the supervisor.
    stop: oneshot::Sender<()>,
    supervisor: JoinHandle<()>,
}

impl AssignedAddress {
    /// Checks as [`check`] does, then makes interface and address. An address that a crashed agent left, or a
    /// running one has made, is adopted. Runs on a tokio runtime, and must not be dropped before it returns.
    pub async fn take(settings: Settings) -> Result<AssignedAddress, AddressError> {
        let report = check(&settings).await?;
        if !report.collisions.is_empty() {
            return Err(AddressError::Collisions(report.collisions));
        }
        let users = join(settings.users.clone()).await?;
        let of_address = |path: &PathBuf| path.with_added_extension(settings.address.to_string());
        let holders = join(settings.users.as_ref().map(of_address)).await?;
        let host = Host::open().map_err(supervising)?;
        let placement = interface::establish(&host, &settings, None).await?;
        let Placement { kind, interface, adopted, why, .. } = &placement;
        let address = settings.address;
        tracing::info!(
            %address, %interface, %kind, adopted, not_better_because = %why,
            "this node holds the address"
        );
        let status = Status::new(placement);
        let (stop, stopped) = oneshot::channel();
        let supervisor = Supervisor {
            settings: settings.clone(),
            status: status.clone(),
            changes: None,
            backoff: RepairBackoff::default(),
        };
        let supervisor = tokio::spawn(supervisor.run(stopped));
        Ok(Self { settings, users, holders, status, stop, supervisor })
    }

    /// A view of it for other tasks.
    pub fn status(&self) -> Status {
        self.status.clone()
    }

    /// Removes the addresses that agents with other settings have left on the interface, if none of them runs
    /// any more: the connections of its pods would need them. What cannot be removed is logged.
    pub async fn remove_others(&self) {
        let removed = async {
            if self.users.is_only() {
                interface::remove_others(&Host::open()?, &self.settings).await?;
            }
            Ok(())
        };
        let removed: io::Result<()> = removed.await;
        // Whatever came of it: successors wait for that.
        if let Err(error) = self.users.share().await.and(removed) {
            let interface = &self.settings.interface;
            tracing::warn!(%interface, %error, "cannot remove the addresses of earlier agents; they stay");
        }
    }

    /// Removes what agents made, nothing else, if no other agent runs; the address alone, if only others with
    /// another one do. What cannot be removed is logged.
    pub async fn release(self) {
        if self.users.is_only() {
            self.end(async |host, settings| interface::remove(host, settings).await).await;
        } else if self.holders.is_only() {
            self.end_address().await;
        } else {
            self.leave().await;
        }
    }

    /// Undoes what [`take`](Self::take) has done. An interface or address that another agent has made, and
    /// may still use, stays.
    pub async fn give_up(self) {
        let Placement { adopted, added, .. } = *self.status.placement();
        let others_are_known = self.settings.users.is_some();
        let may_be_used = !others_are_known || !self.users.is_only();
        let is_its_own = if others_are_known { self.holders.is_only() } else { added };
        match (adopted && may_be_used, is_its_own) {
            (false, _) => self.end(async |host, settings| interface::remove(host, settings).await).await,
            (true, false) => self.leave().await,
            (true, true) => self.end_address().await,
        }
    }

    /// Stops, and removes the address alone.
    async fn end_address(self) {
        let status = self.status.clone();
        // The index is read once nobody makes the interface anew.
        let remove = async |host: &Host, settings: &Settings| {
            let index = status.placement().index;
            host.remove_address(index, settings.address).await
        };
        self.end(remove).await;
    }

    /// Stops, and then does `remove`. What cannot be removed is logged.
    async fn end(self, remove: impl AsyncFnOnce(&Host, &Settings) -> io::Result<()>) {
        let (settings, status) = (self.settings.clone(), self.status.clone());
        // Nobody may take an address meanwhile.
        let _locked = self.stop().await;
        status.set_held(false);
        let removed = async { remove(&Host::open()?, &settings).await };
        let (address, interface) = (settings.address, &settings.interface);
        match removed.await {
            Ok(()) => tracing::info!(%address, "the address is released"),
            Err(error) => {
                tracing::error!(%address, %interface, %error, "cannot remove the address; it stays")
            }
        }
    }

    /// Leaves everything in place.
    async fn leave(self) {
        let address = self.settings.address;
        self.stop().await;
        tracing::info!(%address, "the address is left to another agent of this node");
    }

    async fn stop(self) -> [Users; 2] {
        // Both fail only if the supervisor has ended already.
        let _ = self.stop.send(());
        let _ = self.supervisor.await;
        [self.users, self.holders]
    }
}

async fn join(path: Option<PathBuf>) -> Result<Users, AddressError> {
    let joined = Users::join(path.as_deref()).await;
    joined.map_err(|source| AddressError::Users { path: path.unwrap_or_default(), source })
}

/// Keeps the address in place.
struct Supervisor {
    settings: Settings,
    status: Status,
    /// `None` until subscribed, and after an error of the subscription.
    changes: Option<Changes>,
    backoff: RepairBackoff,
}

impl Supervisor {
    /// Repairs until `stop`, which is looked at only while nothing is half done.
    async fn run(mut self, mut stop: oneshot::Receiver<()>) {
        loop {
            let step = match self.is_complete().await {
                Ok(true) => tokio::select! {
                    _ = &mut stop => return,
                    changed = self.changed() => changed,
                },
                Ok(false) => {
                    self.status.set_held(false);
                    let wait = self.backoff.wait();
                    tokio::select! {
                        biased;
                        _ = &mut stop => return,
                        () = sleep(wait) => {}
                    }
                    self.put_back().await
                }
                Err(error) => Err(error),
            };
            let Err(error) = step else { continue };
            if self.status.set_problem(Some(&error)) {
                let address = self.settings.address;
                tracing::error!(%address, %error, "cannot hold the address; trying again");
            }
            let wait = self.backoff.wait();
            tokio::select! {
                _ = &mut stop => return,
                () = sleep(wait) => {}
            }
        }
    }

    /// Whether nothing is missing. Subscribes to changes before it looks, so that none is missed.
    async fn is_complete(&mut self) -> Result<bool, AddressError> {
        if self.changes.is_none() {
            self.changes = Some(Changes::subscribe().map_err(supervising)?);
        }
        let host = Host::open().map_err(supervising)?;
        let complete = interface::is_complete(&host, &self.settings).await.map_err(supervising)?;
        if complete {
            self.status.set_held(true);
            self.status.set_problem(None);
        }
        Ok(complete)
    }

    async fn put_back(&mut self) -> Result<(), AddressError> {
        let host = Host::open().map_err(supervising)?;
        let known = self.status.placement().index;
        let placement = interface::establish(&host, &self.settings, Some(known)).await?;
        tracing::warn!(
            address = %self.settings.address, interface = %placement.interface, kind = %placement.kind,
            "the address or its interface was removed; it is back"
        );
        self.status.set_repaired(placement);
        Ok(())
    }

    /// Returns when something has changed that may concern the address. Cancel-safe.
    async fn changed(&mut self) -> Result<(), AddressError> {
        let Some(changes) = &mut self.changes else { return Ok(()) };
        loop {
            match changes.next().await {
                Ok(change) if concerns(&self.settings, &change) => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    self.changes = None;
                    return Err(supervising(error));
                }
            }
        }
    }
}

/// Whether a change may be about the address. An interface that was renamed still has the agent's alias.
fn concerns(settings: &Settings, change: &HostChange) -> bool {
    match change {
        HostChange::Link(link) => link.name == settings.interface || &*link.alias == ALIAS,
        HostChange::Address(held) => held.address == settings.address,
        HostChange::Lost => true,
    }
}

fn supervising(source: io::Error) -> AddressError {
    AddressError::of("supervise the address", source)
}
