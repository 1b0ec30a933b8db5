//! Leader election: of several replicas, the one that holds a Lease (coordination.k8s.io/v1) may write.
//!
//! The rules are those of client-go. The holder renews the Lease. Another replica takes it over once the
//! Lease has not changed for its whole duration. It measures that on its own clock, because clocks of two
//! machines cannot be compared. Every write carries the resourceVersion that was read, so that of two
//! replicas one fails. A holder that cannot renew stops in time, before another may begin.
//!
//! `Candidate::next_step` decides and is pure; [`elect`] acts on it. The published crates are bound to older
//! `kube`s.

use std::future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use crate::apply::writing;
use crate::error::describe;

/// How long a Lease is valid without renewal, and so how long no replica writes after a holder died. As in
/// client-go.
const DURATION: Duration = Duration::from_secs(15);

/// A holder that could not renew for so long stops. Leaves five seconds for a write in flight before another
/// begins.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// Pause between two reads of the Lease.
const RETRY: Duration = Duration::from_secs(2);

/// Time limit of one attempt. Below half the deadline, so that a holder tries twice before it stops.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Which Lease, and the identity of this replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseSettings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// Name of this replica, that of its pod. Must differ from all others.
    pub identity: String,
    /// An annotation of the Lease that says more about its holder.
    pub says: Option<(&'static str, String)>,
}

/// Whether this replica may write.
///
/// It says no by itself once the Lease was not renewed in time. So a process that was stopped does not write
/// with what it believed before. A machine that was suspended may, for up to ten seconds: its clock stood
/// still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Leads {
    until: Option<Instant>,
}

impl Leads {
    /// Whether it may write now.
    pub fn now(self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

/// Another replica that holds the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its name.
    pub identity: String,
    /// What [`LeaseSettings::says`] of its Lease says, if anything.
    pub says: Option<String>,
}

/// The next step, from the Lease as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NextStep {
    /// There is no Lease: create it.
    Create,
    /// The Lease is free, or its holder no longer renews it.
    Take,
    /// This replica holds it.
    Renew,
    /// Another replica holds it.
    Wait,
}

/// A replica that holds the Lease or waits for it.
#[derive(Debug)]
struct Candidate {
    identity: String,
    /// The version of the Lease that was read last, and when it was first read.
    seen: Option<(String, Instant)>,
    /// The Lease as this replica wrote it last. To renew that takes no read.
    own: Option<Lease>,
    /// The other replica that held the Lease when it was read last.
    other: Option<Holder>,
}

impl Candidate {
    /// Reads the Lease, unless this replica wrote it last, and does what follows. If this replica holds it,
    /// returns the start of the lease period. That is a time before the write, because other replicas count
    /// from when the API server has stored it.
    ///
    /// If it may not hold the Lease, it reads on, so that it notices a lost holder as soon as it may.
    async fn attempt(
        &mut self,
        api: &Api<Lease>,
        settings: &LeaseSettings,
        may: bool,
    ) -> kube::Result<Option<Instant>> {
        // Whatever the result, the known Lease is out of date then.
        let lease = match self.own.take() {
            Some(own) => Some(own),
            None => api.get_opt(&settings.name).await?,
        };
        let started = Instant::now();
        let next = self.next_step(lease.as_ref(), started);
        let waits = next == NextStep::Wait;
        self.other = lease.as_ref().filter(|_| waits).map(|lease| holder(lease, settings));
        if !may {
            if next == NextStep::Renew {
                release(api, settings).await?;
            }
            return Ok(None);
        }
        let claim = self.claim(lease, settings, Timestamp::now());
        let written = match next {
            NextStep::Wait => return Ok(None),
            NextStep::Create => api.create(&writing(), &claim).await?,
            NextStep::Take | NextStep::Renew => api.replace(&settings.name, &writing(), &claim).await?,
        };
        self.own = Some(written);
        Ok(Some(started))
    }

    fn next_step(&mut self, lease: Option<&Lease>, now: Instant) -> NextStep {
        let Some(lease) = lease else { return NextStep::Create };
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        if holder.is_empty() {
            return NextStep::Take;
        }
        if holder == self.identity {
            return NextStep::Renew;
        }
        let version = lease.metadata.resource_version.as_deref().unwrap_or_default();
        match &self.seen {
            Some((seen, since)) if seen == version => {
                let seconds =
                    spec.and_then(|spec| spec.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
                let duration = seconds.map_or(DURATION, Duration::from_secs);
                if now.duration_since(*since) >= duration { NextStep::Take } else { NextStep::Wait }
            }
            _ => {
                self.seen = Some((version.to_owned(), now));
                NextStep::Wait
            }
        }
    }

    /// The Lease as this replica would write it, made from the one that was read.
    fn claim(&self, lease: Option<Lease>, settings: &LeaseSettings, now: Timestamp) -> Lease {
        let mut lease = lease.unwrap_or_else(|| Lease {
            metadata: ObjectMeta { name: Some(settings.name.clone()), ..ObjectMeta::default() },
            ..Lease::default()
        });
        let old = lease.spec.take().unwrap_or_default();
        let ours = old.holder_identity.as_deref() == Some(&self.identity);
        let transitions = old.lease_transitions.unwrap_or_default();
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: if ours { old.acquire_time } else { Some(MicroTime(now)) },
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(if ours { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        });
        if let Some((key, text)) = &settings.says {
            let annotations = lease.metadata.annotations.get_or_insert_default();
            annotations.insert((*key).to_owned(), text.clone());
        }
        lease
    }
}

fn holder(lease: &Lease, settings: &LeaseSettings) -> Holder {
    let identity = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    let key = settings.says.as_ref().map(|(key, _)| *key).unwrap_or_default();
    let says = lease.metadata.annotations.as_ref().and_then(|annotations| annotations.get(key).cloned());
    Holder { identity: identity.unwrap_or_default(), says }
}

/// Tries for ever to get and keep the Lease. `leading` says whether this replica holds it, `other` which one
/// does instead. Once `leading` has no receiver left, the Lease is released and this returns.
pub async fn elect(
    client: Client,
    settings: LeaseSettings,
    leading: watch::Sender<Leads>,
    other: watch::Sender<Option<Holder>>,
) {
    elect_while(client, settings, None, leading, other).await;
}

/// As [`elect`], but with `may` this replica leads only while that does. Once it does not, this one stops at
/// once, and releases its Lease.
pub async fn elect_while(
    client: Client,
    settings: LeaseSettings,
    mut may: Option<watch::Receiver<Leads>>,
    leading: watch::Sender<Leads>,
    other: watch::Sender<Option<Holder>>,
) {
    let api: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let mut candidate = Candidate { identity: settings.identity.clone(), seen: None, own: None, other: None };
    let mut renewed: Option<Instant> = None;
    loop {
        // One that does not hold it has more time: it takes a read and a write, at a slow API server too.
        let limit = if renewed.is_some() { REQUEST_TIMEOUT } else { 2 * REQUEST_TIMEOUT };
        let now_may = may.as_mut().is_none_or(|may| may.borrow_and_update().now());
        let attempt = timeout(limit, candidate.attempt(&api, &settings, now_may));
        let attempted = tokio::select! {
            attempted = attempt => attempted,
            // The next read shows the result of a write in flight.
            () = becomes(&mut may, !now_may) => Ok(Ok(None)),
        };
        match attempted {
            Ok(Ok(held_since)) => renewed = held_since,
            // Another replica was quicker; the next read shows which.
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_already_exists() => {
                debug!(lease = settings.name, "another replica wrote the Lease");
            }
            Ok(Err(error)) => {
                let error = describe(&error);
                warn!(lease = settings.name, error, "cannot read or write the Lease; trying again");
            }
            Err(_) => warn!(lease = settings.name, "no answer about the Lease; trying again"),
        }
        renewed = renewed.filter(|at| at.elapsed() < RENEW_DEADLINE);
        let holds = renewed.is_some();
        let until = renewed.map(|at| at + RENEW_DEADLINE);
        let is_news = leading.send_if_modified(|leads| {
            // A pass that found it over has ended, and is begun again only by this news.
            let was_over = holds && !leads.now();
            std::mem::replace(&mut leads.until, until).is_some() != holds || was_over
        });
        if is_news {
            info!(lease = settings.name, identity = settings.identity, leads = holds, "leadership changed");
        }
        other.send_if_modified(|known| {
            let news = *known != candidate.other;
            known.clone_from(&candidate.other);
            news
        });
        // A request that hangs must not keep a holder holding beyond its deadline.
        let pause =
            renewed.map_or(RETRY, |at| RETRY.min((at + RENEW_DEADLINE).duration_since(Instant::now())));
        tokio::select! {
            () = sleep(pause) => {}
            () = becomes(&mut may, !now_may) => {}
            () = leading.closed() => break,
        }
    }
    if renewed.is_some()
        && let Err(error) = release(&api, &settings).await
    {
        let error = describe(&error);
        warn!(lease = settings.name, error, "cannot release the Lease; it expires by itself");
    }
}

/// Runs `pass` for as long as this replica leads. `None` if it does not any more; then nothing of the pass is
/// begun that was not begun before.
pub async fn while_leading<T>(mut leads: watch::Receiver<Leads>, pass: impl Future<Output = T>) -> Option<T> {
    let now = leads.clone();
    let mut pass = pin!(pass);
    // Checked at every poll: a suspended process resumes the pass before the election notices.
    let guarded = future::poll_fn(|cx| match now.borrow().now() {
        true => pass.as_mut().poll(cx).map(Some),
        false => Poll::Ready(None),
    });
    tokio::select! {
        outcome = guarded => outcome,
        _ = leads.wait_for(|leads| !leads.now()) => None,
    }
}

/// Waits until the Lease above this one is held, or is not.
async fn becomes(above: &mut Option<watch::Receiver<Leads>>, held: bool) {
    if let Some(above) = above
        && above.wait_for(|leads| leads.now() == held).await.is_ok()
    {
        return;
    }
    future::pending().await
}

/// Lets another replica begin at once.
async fn release(api: &Api<Lease>, settings: &LeaseSettings) -> kube::Result<()> {
    let Some(mut lease) = api.get_opt(&settings.name).await? else { return Ok(()) };
    let Some(spec) = &mut lease.spec else { return Ok(()) };
    if spec.holder_identity.as_deref() == Some(&settings.identity) {
        spec.holder_identity = None;
        api.replace(&settings.name, &writing(), &lease).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
