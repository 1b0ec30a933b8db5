//! Betters the tunnels that are up, one at a time and without haste: a successor comes up first, and what it succeeds finishes its streams.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::backoff::random;
use super::candidates::Place;
use super::keep::REPLACE_WITHIN;
use super::pool::{Attempt, Pool};
use super::tunnel::Tunnel;

/// Between two attempts to better the same.
const TEND_AGAIN: Duration = Duration::from_secs(30);

/// What may be better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Care {
    /// A tunnel shows a certificate that has been renewed since.
    Renew,
    /// A tunnel goes to an address that no name leads to any more.
    Follow,
    /// Two tunnels go to one address while another has none.
    Spread,
    /// There are more tunnels than asked for, which may have few streams by now.
    Shrink,
}

const CARES: [Care; 4] = [Care::Renew, Care::Follow, Care::Spread, Care::Shrink];

impl Care {
    /// How long after it became possible it is done: not by all nodes at once, as they may well have learnt of it together.
    fn first(self) -> Duration {
        match self {
            Self::Renew | Self::Follow => REPLACE_WITHIN.mul_f64(random()),
            // A gateway that has just come up has others to care for first; and what is surplus now may not be in a moment.
            Self::Spread | Self::Shrink => again(),
        }
    }

    /// Whether it is news when no tunnel comes up for it.
    fn needs_successor(self) -> bool {
        matches!(self, Self::Renew | Self::Follow)
    }
}

fn again() -> Duration {
    TEND_AGAIN.mul_f64(0.5 + random())
}

impl Pool {
    /// Sees to the tunnels until the client stops. Sleeps while nothing changes, nothing can be better and no name is to be asked for.
    pub(super) async fn tend(self: Arc<Self>) {
        let mut stopping = self.stopping.subscribe();
        // When each care is taken; `None` while there is no need.
        let mut times = [None; CARES.len()];
        // Its attempts stand behind those of the keepers.
        let own = self.settings.asked_for();
        loop {
            let changed = self.signals.changed.notified();
            for (care, time) in CARES.into_iter().zip(&mut times) {
                *time = self.calls_for(care).then(|| time.unwrap_or_else(|| Instant::now() + care.first()));
            }
            if !CARES.into_iter().zip(&times).any(|(care, time)| care.needs_successor() && time.is_some()) {
                self.attempt(own, |attempt| attempt.error = None);
            }
            let next = times.into_iter().flatten().chain(self.names().next_refresh()).min();
            let next = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = stopping.wait_for(|stopping| *stopping) => return,
                () = changed => continue,
                () = next => {}
            }
            let now = Instant::now();
            let expired = self.names().expired(now);
            self.ask(expired);
            for (care, time) in CARES.into_iter().zip(&mut times) {
                if time.is_some_and(|time| time <= now) {
                    self.take(care, own).await;
                    *time = Some(Instant::now() + again());
                }
            }
        }
    }

    fn calls_for(&self, care: Care) -> bool {
        match care {
            Care::Renew => self.outdated().is_some(),
            Care::Follow => self.gone().is_some(),
            Care::Spread => self.doubled().is_some(),
            Care::Shrink => self.live().len() > self.settings.asked_for(),
        }
    }

    async fn take(self: &Arc<Self>, care: Care, own: usize) {
        match care {
            Care::Renew => while self.succeed(own, self.outdated()).await {},
            Care::Follow => while self.succeed(own, self.gone()).await {},
            Care::Spread => {
                // It fails as a rule because there is none to go to yet, which is no news.
                if let Some(doubled) = self.doubled()
                    && self.dial(own, true).await.is_ok()
                {
                    doubled.retire();
                }
            }
            Care::Shrink => {
                if let Some(surplus) = self.surplus() {
                    surplus.retire();
                }
            }
        }
        // What failed stays known, lest it be written down each time.
        self.attempt(own, |attempt| attempt.place = None);
    }

    /// Brings up a successor, and retires `old`. False if there is none, or no successor.
    async fn succeed(self: &Arc<Self>, own: usize, old: Option<Arc<Tunnel>>) -> bool {
        let Some(old) = old else { return false };
        match self.dial(own, false).await {
            Ok(_) => {
                self.attempt(own, |attempt| *attempt = Attempt::default());
                old.retire();
            }
            Err(failure) => {
                self.note(own, failure);
                return false;
            }
        }
        true
    }

    /// A live tunnel from before the last renewal.
    fn outdated(&self) -> Option<Arc<Tunnel>> {
        let renewals = *self.renewals.borrow();
        self.tunnels().iter().find(|tunnel| tunnel.is_live() && tunnel.renewal < renewals).cloned()
    }

    /// A live tunnel to an address that no name leads to any more, while another does.
    fn gone(&self) -> Option<Arc<Tunnel>> {
        let names = self.names();
        let is_gone = |tunnel: &&Arc<Tunnel>| {
            tunnel.is_live()
                && !names.candidates.is_known(tunnel.place.address)
                && !names.candidates.is_empty()
        };
        self.tunnels().iter().find(is_gone).cloned()
    }

    /// Of live tunnels to one address, the one with fewest streams, if there is an address that none goes to.
    fn doubled(&self) -> Option<Arc<Tunnel>> {
        let live = self.live();
        let places: Vec<Place> = live.iter().map(|tunnel| tunnel.place).collect();
        if !self.names().candidates.has_unused(&places) {
            return None;
        }
        let is_doubled = |tunnel: &&Arc<Tunnel>| {
            places.iter().filter(|place| place.address == tunnel.place.address).count() > 1
        };
        live.iter().filter(is_doubled).min_by_key(|tunnel| tunnel.streams()).cloned()
    }
}
