//! An address that this node holds, from taking it to releasing it.

use std::future::pending;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::error::is_right_missing;
use super::guard::{self, Guard};
use super::host::{self, Change, Host};
use super::netlink::{ROUTE, Watch};
use super::place::{self, Kind, Place};
use super::{AddressError, Settings, Warning, check};

/// The right that all of this needs.
const CAPABILITY: &str = "CAP_NET_ADMIN";

/// Failed tries to put something back before that is given up: interfaces are sometimes busy for a moment.
const TRIES: u32 = 5;

/// Who removes again within this time what was put back does so on purpose: repairs then come slower and slower, within these bounds.
const FIGHT: Duration = Duration::from_secs(2);
const SHORTEST_TRUCE: Duration = Duration::from_millis(20);
const LONGEST_TRUCE: Duration = Duration::from_secs(1);

/// How an address is held: for log, metrics and `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct How {
    /// The way.
    pub kind: Kind,
    /// The interface that has the address.
    pub interface: Box<str>,
    /// Whether it was there already, left by another agent or still in use by it.
    pub adopted: bool,
    /// Why it is none of the better ways; empty if it is the best, or adopted.
    pub why: Box<str>,
    /// Why this node cannot be kept from answering ARP for the address, if so.
    pub unguarded: Option<Box<str>>,
}

/// A view of a [`Held`] address for other tasks.
#[derive(Debug, Clone)]
pub struct Status(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: AtomicBool,
    repairs: AtomicU64,
    how: Mutex<Arc<How>>,
}

impl Status {
    /// Whether the address was there when the kernel last told of a change.
    pub fn is_held(&self) -> bool {
        self.0.held.load(Ordering::Relaxed)
    }

    /// How it is held. May change in a repair.
    pub fn how(&self) -> Arc<How> {
        Arc::clone(&self.0.how.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How often something had to be put back.
    pub fn repairs(&self) -> u64 {
        self.0.repairs.load(Ordering::Relaxed)
    }

    fn set_held(&self, held: bool) {
        self.0.held.store(held, Ordering::Relaxed);
    }

    fn count_repair(&self) {
        self.0.repairs.fetch_add(1, Ordering::Relaxed);
    }
}

/// An address that this node holds. Dropping it leaves everything in place, as a crash does and [`leave`](Self::leave) says;
/// [`release`](Self::release) does not.
#[derive(Debug)]
pub struct Held {
    settings: Settings,
    place: Place,
    /// Of IPv4, where the kernel can.
    guard: Option<Guard>,
    addresses: Watch,
    rules: Option<Watch>,
    fight: Fight,
    status: Status,
}

impl Held {
    /// Checks as [`check`] does, then makes interface and address. What an agent left that crashed, or what a running one
    /// has made, is adopted.
    pub async fn take(settings: Settings) -> Result<Held, AddressError> {
        let report = check(&settings).await?;
        for warning in &report.warnings {
            tracing::warn!(address = %settings.address, "{warning}");
        }
        if !report.collisions.is_empty() {
            return Err(AddressError::Collisions(report.collisions));
        }
        let missing = report.warnings.iter().find_map(|warning| match warning {
            Warning::Unchecked { what, capability: Some(capability), .. } => Some((what, *capability)),
            _ => None,
        });
        if let Some((what, capability)) = missing {
            let what = format!("check {what} (--no-arp-check goes without)").into();
            return Err(AddressError::Capability { what, capability });
        }
        Self::make(settings)
    }

    /// Guard first, for from its first moment on the address must not be answered for; and told before anything can be missed.
    fn make(settings: Settings) -> Result<Held, AddressError> {
        let watching = |source| AddressError::of("watch the interfaces of this host", CAPABILITY, source);
        let opened = |source| AddressError::of("ask for the interfaces of this host", CAPABILITY, source);
        let addresses = Watch::open(ROUTE, host::CHANGES).map_err(watching)?;
        let (guard, stood, unguarded) = match put_guard(&settings) {
            Ok((guard, stood)) => (guard, stood, None),
            Err(error) if is_right_missing(&error) => {
                let what =
                    format!("keep this node from answering ARP for {} (nftables)", settings.address).into();
                return Err(AddressError::Capability { what, capability: CAPABILITY });
            }
            Err(error) => (None, false, Some(error.to_string().into())),
        };
        let rules = guard.is_some().then(guard::watch).transpose().map_err(watching)?;
        let established =
            Host::open().map_err(opened).and_then(|mut host| place::establish(&mut host, &settings, None));
        let place = match established {
            Ok(place) => place,
            Err(error) => {
                // That of a predecessor belongs to an address that may still be there.
                let made = guard.as_ref().filter(|_| !stood);
                if let Some(Err(error)) = made.map(Guard::remove) {
                    tracing::warn!(%error, "cannot remove the nftables rule for an address that is not held");
                }
                return Err(error);
            }
        };
        let how = how(&place, unguarded);
        let shared = Shared { held: true.into(), repairs: 0.into(), how: Mutex::new(Arc::new(how.clone())) };
        tell(&settings, &how);
        let fight = Fight::default();
        Ok(Self { settings, place, guard, addresses, rules, fight, status: Status(Arc::new(shared)) })
    }

    /// Puts back what someone removes, the moment the kernel tells. Returns only when that is not possible any more. May be dropped
    /// at any await.
    pub async fn keep(&mut self) -> AddressError {
        loop {
            if let Err(error) = self.mend().await {
                self.status.set_held(false);
                return error;
            }
            let (settings, place) = (&self.settings, &self.place);
            let concerns = |kind, body: &[u8]| {
                Change::read(kind, body).is_some_and(|change| place::concerns(settings, place, &change))
            };
            let told = tokio::select! {
                told = self.addresses.changed(concerns) => told,
                told = rules_changed(self.rules.as_ref()) => told,
            };
            if let Err(source) = told {
                return AddressError::of("watch the interfaces of this host", CAPABILITY, source);
            }
        }
    }

    /// Puts back whatever is missing.
    async fn mend(&mut self) -> Result<(), AddressError> {
        let mut failures = 0;
        loop {
            let error = match self.missing().map_err(kernel) {
                Ok(missing) if missing.nothing() => return Ok(()),
                Ok(missing) => {
                    self.fight.truce().await;
                    match self.put_back(&missing) {
                        Ok(()) => continue,
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            failures += 1;
            if failures == TRIES || place::is_final(&error) {
                return Err(error);
            }
            tracing::warn!(address = %self.settings.address, %error, "cannot put the address back; trying again");
            sleep(LONGEST_TRUCE).await;
        }
    }

    fn missing(&self) -> io::Result<Missing> {
        let address = !place::is_complete(&mut Host::open()?, &self.settings)?;
        self.status.set_held(!address);
        let guard = match &self.guard {
            Some(guard) => !guard.stands()?,
            None => false,
        };
        Ok(Missing { address, guard })
    }

    fn put_back(&mut self, missing: &Missing) -> Result<(), AddressError> {
        let address = self.settings.address;
        if let Some(guard) = self.guard.as_ref().filter(|_| missing.guard) {
            guard.put().map_err(kernel)?;
            self.status.count_repair();
            tracing::warn!(%address, "someone removed the nftables rule against ARP for the address; it is back");
        }
        if missing.address {
            let mut host = Host::open().map_err(kernel)?;
            self.place = place::establish(&mut host, &self.settings, Some(self.place.index))?;
            let how = how(&self.place, self.status.how().unguarded.clone());
            tracing::warn!(
                %address, interface = %how.interface, kind = %how.kind,
                "someone removed the address or its interface; it is back"
            );
            *self.status.0.how.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(how);
            self.status.count_repair();
            self.status.set_held(true);
        }
        Ok(())
    }

    /// Whether the address is there.
    pub fn is_held(&self) -> bool {
        self.status.is_held()
    }

    /// How it is held.
    pub fn how(&self) -> Arc<How> {
        self.status.how()
    }

    /// How often something had to be put back.
    pub fn repairs(&self) -> u64 {
        self.status.repairs()
    }

    /// A view of it for other tasks, kept up to date while [`keep`](Self::keep) runs.
    pub fn status(&self) -> Status {
        self.status.clone()
    }

    /// Removes what agents made, nothing else. What cannot be removed is logged.
    pub async fn release(self) {
        let (address, interface) = (self.settings.address, &self.settings.interface);
        self.status.set_held(false);
        match Host::open().and_then(|mut host| place::remove(&mut host, &self.settings)) {
            Ok(()) => tracing::info!(%address, "the address is released"),
            Err(error) => {
                // Without the address the rule is of no use; with it, it is.
                tracing::error!(%address, %interface, %error, "cannot remove the address; it stays");
                return;
            }
        }
        if let Some(Err(error)) = self.guard.as_ref().map(Guard::remove) {
            tracing::error!(%address, %error, "cannot remove the nftables rule against ARP for the address");
        }
    }

    /// Leaves everything in place: a successor has taken over.
    pub fn leave(self) {
        tracing::info!(address = %self.settings.address, "the address is left to a successor");
    }
}

/// What someone has removed.
struct Missing {
    address: bool,
    guard: bool,
}

impl Missing {
    fn nothing(&self) -> bool {
        !self.address && !self.guard
    }
}

/// Keeps two who disagree about the address from using up a processor over it.
#[derive(Debug, Default)]
struct Fight {
    last: Option<Instant>,
    truce: Duration,
}

impl Fight {
    /// Waits if the last repair was a moment ago, longer each time.
    async fn truce(&mut self) {
        let now = Instant::now();
        let again = self.last.is_some_and(|last| now.duration_since(last) < FIGHT);
        if again {
            self.truce = (self.truce * 2).clamp(SHORTEST_TRUCE, LONGEST_TRUCE);
            sleep(self.truce).await;
        } else {
            self.truce = Duration::ZERO;
        }
        self.last = Some(Instant::now());
    }
}

/// Puts the rule against ARP up, if the address is of a kind that needs it, and tells whether it was there before.
fn put_guard(settings: &Settings) -> io::Result<(Option<Guard>, bool)> {
    let IpAddr::V4(address) = settings.address else { return Ok((None, false)) };
    let guard = Guard::new(&settings.interface, address);
    let stood = guard.stands()?;
    guard.put()?;
    Ok((Some(guard), stood))
}

async fn rules_changed(rules: Option<&Watch>) -> io::Result<()> {
    match rules {
        Some(rules) => rules.changed(guard::matters).await,
        None => pending().await,
    }
}

fn how(place: &Place, unguarded: Option<Box<str>>) -> How {
    let Place { kind, interface, adopted, why, .. } = place.clone();
    How { kind, interface, adopted, why, unguarded }
}

fn kernel(source: io::Error) -> AddressError {
    AddressError::of("look after the address", CAPABILITY, source)
}

fn tell(settings: &Settings, how: &How) {
    let How { kind, interface, adopted, why, unguarded } = how;
    let address = settings.address;
    tracing::info!(%address, %interface, %kind, adopted, not_better_because = %why, "this node holds the address");
    if let Some(why) = unguarded {
        tracing::warn!(
            %address, %why,
            "this node answers ARP for the address, since the kernel cannot filter ARP (nftables); where nodes share a link, start \
             their agents with --no-arp-check"
        );
    }
}
