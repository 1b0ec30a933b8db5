//! As many live tunnels as asked for: who replaces one that is lost, and when.
//!
//! One task keeps each tunnel ([`Pool::keep`]): it dials, hands the connection to a task of its own, waits until there is a tunnel too few,
//! and dials again. So a tunnel that drains or is suspect has a successor while its streams go on.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::backoff::{Backoff, random};
use super::pool::{Attempt, Pool};
use super::reach::Failure;

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

    pub(super) async fn keep_on(self: &Arc<Self>, keeper: usize) {
        let mut backoff = Backoff::default();
        let mut renewals = self.renewals.subscribe();
        // The first time nobody has anything to wait for.
        let (mut unwanted, mut wanted) = (Duration::ZERO, Duration::ZERO);
        loop {
            self.needed(keeper).await;
            self.rest(unwanted, wanted).await;
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
    pub(super) async fn needed(&self, keeper: usize) {
        loop {
            let left = self.left.notified();
            if self.claim(keeper) {
                return;
            }
            left.await;
        }
    }

    /// Takes it upon this keeper to connect, unless there are tunnels and attempts enough.
    pub(super) fn claim(&self, keeper: usize) -> bool {
        let live = self.tunnels().iter().filter(|tunnel| tunnel.is_live()).count();
        let mut attempts = self.attempts();
        let connecting = attempts.iter().filter(|attempt| attempt.connecting).count();
        let few = live + connecting < self.settings.tunnels.max(1);
        if few && let Some(attempt) = attempts.get_mut(keeper) {
            attempt.connecting = true;
        }
        few
    }

    /// Rests: `wanted` while somebody waits for a tunnel, else `unwanted`.
    pub(super) async fn rest(&self, unwanted: Duration, wanted: Duration) {
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
    /// After a silence there may be more live tunnels than asked for: those with the fewest streams go.
    pub(super) fn retire_surplus(&self) {
        let live: Vec<_> = self.tunnels().iter().filter(|tunnel| tunnel.is_live()).cloned().collect();
        let surplus = live.len().saturating_sub(self.settings.tunnels.max(1));
        let mut by_streams = live;
        by_streams.sort_by_key(|tunnel| (tunnel.streams(), std::cmp::Reverse(tunnel.since)));
        by_streams.iter().take(surplus).for_each(|tunnel| tunnel.retire());
    }
}
