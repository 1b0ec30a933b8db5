//! Betters the tunnels that are up.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::backoff::random;
use super::keep::REPLACE_WITHIN;
use super::pool::{Attempt, Pool};
use super::tunnel::Tunnel;

/// Between two attempts to better what works: to move one of two tunnels that go to one address, or to replace one that shows an old
/// certificate.
const TEND_AGAIN: Duration = Duration::from_secs(30);

impl Pool {
    /// Betters the tunnels that are up, until the client stops: after a renewal of the certificate each gets a successor, and where two
    /// go to one address while another has none, one of them moves.
    pub(super) async fn tend(self: Arc<Self>) {
        let mut renewals = self.renewals.subscribe();
        let mut stopping = self.stopping.subscribe();
        // Its attempts stand behind those of the keepers.
        let own = self.settings.tunnels.max(1);
        loop {
            tokio::select! {
                _ = stopping.wait_for(|stopping| *stopping) => return,
                _ = renewals.changed() => {}
                () = sleep(TEND_AGAIN.mul_f64(0.5 + random())), if self.could_be_better() => {}
            }
            // Not all nodes of a cluster at once, as their certificates may well change at once.
            sleep(REPLACE_WITHIN.mul_f64(random())).await;
            while let Some(old) = self.outdated() {
                if let Err(failure) = self.dial(own, false).await {
                    self.note(own, failure);
                    break;
                }
                old.retire();
            }
            if let Some(doubled) = self.doubled()
                && self.dial(own, true).await.is_ok()
            {
                doubled.retire();
            }
            self.attempt(own, |attempt| *attempt = Attempt::default());
        }
    }

    pub(super) fn could_be_better(&self) -> bool {
        self.outdated().is_some() || self.doubled().is_some()
    }

    /// A live tunnel from before the last renewal.
    pub(super) fn outdated(&self) -> Option<Arc<Tunnel>> {
        let renewals = *self.renewals.borrow();
        self.tunnels().iter().find(|tunnel| tunnel.is_live() && tunnel.renewal < renewals).cloned()
    }

    /// Of two live tunnels to one address, the one with fewer streams.
    pub(super) fn doubled(&self) -> Option<Arc<Tunnel>> {
        let tunnels = self.tunnels();
        let live = || tunnels.iter().filter(|tunnel| tunnel.is_live());
        let doubled = live()
            .filter(|tunnel| live().filter(|other| other.place.address == tunnel.place.address).count() > 1);
        doubled.min_by_key(|tunnel| tunnel.streams()).cloned()
    }
}
