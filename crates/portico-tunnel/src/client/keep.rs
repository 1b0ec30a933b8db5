//! As many live tunnels as asked for: who replaces one that is lost, and when.
//!
//! One task keeps each tunnel ([`Pool::keep`]): it dials, hands the connection to a task of its own, waits until there is a tunnel too few,
//! and dials again. So a tunnel that drains or is suspect has a successor while its streams go on.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::backoff::{Backoff, random};
use super::pool::{Attempt, Pool};
use super::reach::Failure;
use super::tunnel::Tunnel;

/// A tunnel that is lost is replaced within this time, and not by all nodes at once.
pub(super) const REPLACE_WITHIN: Duration = Duration::from_secs(2);

/// The same while somebody waits for it.
const RETURN_WITHIN: Duration = Duration::from_millis(200);

impl Pool {
    /// Fills one place among the live tunnels, again and again, until the client stops.
    pub(super) async fn keep(self: Arc<Self>, keeper: usize) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            _ = stopping.wait_for(|stopping| *stopping) => {}
            () = self.keep_on(keeper) => {}
        }
        self.attempt(keeper, |attempt| *attempt = Attempt::default());
    }

    async fn keep_on(self: &Arc<Self>, keeper: usize) {
        let mut backoff = Backoff::default();
        let mut renewals = self.renewals.subscribe();
        // The first time nobody has anything to wait for.
        let (mut unwanted, mut wanted) = (Duration::ZERO, Duration::ZERO);
        loop {
            self.needed(keeper).await;
            self.rest(unwanted, wanted).await;
            // Renewals from before the first failure set nothing right.
            renewals.mark_unchanged();
            while let Err(failure) = self.dial(keeper, false).await {
                let wait = backoff.failed(failure.how, random());
                self.note(keeper, failure);
                tokio::select! {
                    () = self.rest(wait.unwanted, wait.wanted) => {}
                    _ = renewals.changed() => {
                        // What was wrong may be right now. But the other nodes learn of it as well.
                        backoff.succeeded();
                        let spread = random();
                        self.rest(REPLACE_WITHIN.mul_f64(spread), RETURN_WITHIN.mul_f64(spread)).await;
                    }
                }
            }
            backoff.succeeded();
            self.attempt(keeper, |attempt| *attempt = Attempt::default());
            self.retire_surplus();
            let spread = random();
            (unwanted, wanted) = (REPLACE_WITHIN.mul_f64(spread), RETURN_WITHIN.mul_f64(spread));
        }
    }

    /// Returns when there is a tunnel too few, and this keeper is the one to replace it.
    async fn needed(&self, keeper: usize) {
        loop {
            let left = self.signals.left.notified();
            if self.claim(keeper) {
                return;
            }
            left.await;
        }
    }

    /// Takes it upon this keeper to connect, unless there are tunnels and attempts enough. A full tunnel is none to who wants a stream; but
    /// more than asked for there are at most `max_tunnels`, with those that drain.
    fn claim(&self, keeper: usize) -> bool {
        let asked_for = self.settings.asked_for();
        let (all, live, free) = {
            let tunnels = self.tunnels();
            let live = || tunnels.iter().filter(|tunnel| tunnel.is_live());
            (tunnels.len(), live().count(), live().filter(|tunnel| !tunnel.is_full()).count())
        };
        let mut attempts = self.attempts();
        let connecting = attempts.iter().filter(|attempt| attempt.connecting).count();
        let few = live + connecting < asked_for
            || (free + connecting < asked_for && all + connecting < self.settings.max_tunnels);
        if few && let Some(attempt) = attempts.get_mut(keeper) {
            attempt.connecting = true;
        }
        few
    }

    /// Rests: `wanted` while somebody waits for a tunnel, else `unwanted`.
    async fn rest(&self, unwanted: Duration, wanted: Duration) {
        let began = Instant::now();
        let _ = timeout(unwanted, async {
            loop {
                let asked = self.wanted.notified();
                if self.waiting.load(Relaxed) > 0 {
                    return;
                }
                asked.await;
            }
        })
        .await;
        let rest = (began + wanted.min(unwanted)).saturating_duration_since(Instant::now());
        if !rest.is_zero() {
            sleep(rest).await;
        }
    }

    pub(super) fn attempt(&self, keeper: usize, change: impl FnOnce(&mut Attempt)) {
        if let Some(attempt) = self.attempts().get_mut(keeper) {
            change(attempt);
        }
    }

    /// Takes note of a failed attempt, and writes it down unless it failed like that before.
    pub(super) fn note(&self, keeper: usize, failure: Failure) {
        self.counters.tunnel_failures.fetch_add(1, Relaxed);
        let message = failure.message;
        self.attempt(keeper, |attempt| {
            if attempt.error.as_ref() == Some(&message) {
                tracing::debug!(error = %message, "still no tunnel");
            } else {
                tracing::warn!(error = %message, "no tunnel; trying on");
                attempt.error = Some(message);
            }
        });
    }

    /// Retires tunnels that are more than asked for, where their streams leave them dispensable.
    pub(super) fn retire_surplus(&self) {
        while let Some(surplus) = self.surplus() {
            surplus.retire();
        }
    }

    /// Of more live tunnels than asked for (after a silence, or when some were full), one to an address that most go to, and of these the one
    /// with the spare streams; if all streams there are would fill the others by half at most, so that it is not missed soon, and if as many
    /// of the others as are asked for have room, or [`Pool::claim`] would have it replaced at once.
    pub(super) fn surplus(&self) -> Option<Arc<Tunnel>> {
        let live = self.live();
        let asked_for = self.settings.asked_for();
        if live.len() <= asked_for {
            return None;
        }
        let alike =
            |tunnel: &Tunnel| live.iter().filter(|other| other.place.address == tunnel.place.address).count();
        let rank = |tunnel: &Tunnel| (Reverse(alike(tunnel)), tunnel.streams(), Reverse(tunnel.since));
        let spare = live.iter().min_by_key(|tunnel| rank(tunnel))?;
        let streams: u64 = live.iter().map(|tunnel| u64::from(tunnel.streams())).sum();
        let others = || live.iter().filter(|tunnel| !Arc::ptr_eq(tunnel, spare));
        let room: u64 = others().map(|tunnel| u64::from(tunnel.most_streams())).sum();
        let free = others().filter(|tunnel| !tunnel.is_full()).count();
        (streams <= room / 2 && free >= asked_for).then(|| Arc::clone(spare))
    }
}
