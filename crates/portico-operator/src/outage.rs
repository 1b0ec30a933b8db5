//! Outages of the seed's API server. An Event tells of one once the server is back, because nothing can be
//! written before.
//!
//! The watch of Seeds shows it: the API server sends something on it every minute at least.

use std::time::Duration;

use futures_util::future;
use k8s_openapi::api::core::v1::ObjectReference;
use portico_kube::events::{Events, Note, Severity};
use portico_kube::leader::Leads;
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::kkp::{Kkp, KkpWatch};

/// A shorter outage is a restart of the API server, which concerns nobody.
const LONG: Duration = Duration::from_secs(30);

/// How long a replica waits to lead again, which takes a while where the API server is slow. If another
/// replica leads by then, that one reports the outage.
const PATIENCE: Duration = Duration::from_mins(5);

/// The name of this watcher on Events.
pub(crate) const CONTROLLER: &str = "portico-operator";

/// Since when the API server fails.
pub(crate) struct Outage {
    /// Time of the first failure. The outage may have begun earlier.
    since: Option<Instant>,
    over: channel::Sender<Duration>,
}

impl Outage {
    /// Begins with an API server that answers, and returns how long each outage was that is over.
    pub(crate) fn new() -> (Self, channel::Receiver<Duration>) {
        let (over, outages) = channel::channel(Duration::ZERO);
        (Self { since: None, over }, outages)
    }

    /// The API server has answered, or has failed to. The silence before the first failure does not count: a
    /// quiet seed has nothing to say for a minute.
    pub(crate) fn sign(&mut self, answers: bool, now: Instant) {
        if !answers {
            self.since.get_or_insert(now);
            return;
        }
        let away = self.since.take().map(|since| now.duration_since(since));
        if let Some(away) = away.filter(|away| *away >= LONG) {
            self.over.send_replace(away);
        }
    }
}

/// Tells of each outage on all of `seeds`, for ever.
pub(crate) async fn run(
    mut outages: channel::Receiver<Duration>,
    seeds: impl Fn() -> Vec<ObjectReference>,
    kkp: KkpWatch,
    events: Events,
    mut leads: channel::Receiver<Leads>,
) {
    while outages.changed().await.is_ok() {
        let away = outages.borrow_and_update().as_secs();
        let text = format!(
            "the API server of this seed gave no usable answer for {away} s or more; changes of that time \
             are made up for now"
        );
        warn!(away, "{text}");
        let leads =
            timeout(PATIENCE, leads.wait_for(|leads| leads.now())).await.is_ok_and(|leads| leads.is_ok());
        // Beside KKP nothing is written, no Event either.
        if !leads || kkp.now() != Kkp::Absent {
            continue;
        }
        for seed in seeds() {
            let severity = Severity::Warning;
            let note = Note { severity, reason: "SeedApiAway", action: "WatchSeed", text: &text };
            events.publish(&seed, note).await;
        }
    }
    // The watch is gone, and with it the operator.
    future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_outage_is_reported_once_it_is_over_without_the_silence_before_it() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let (mut outage, mut outages) = Outage::new();
        for (second, answers) in [(60, true), (119, false), (120, true), (170, false), (180, false)] {
            outage.sign(answers, at(second));
            assert!(!outages.has_changed().unwrap(), "{second}");
        }
        outage.sign(true, at(210));
        assert_eq!(*outages.borrow_and_update(), Duration::from_secs(40));
        // A restart, and then silence without a failure.
        for (second, answers) in [(211, false), (220, true), (280, true)] {
            outage.sign(answers, at(second));
        }
        assert!(!outages.has_changed().unwrap());
    }
}
