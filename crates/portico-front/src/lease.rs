//! Who writes: the replica that holds a Lease (coordination.k8s.io/v1).
//!
//! The rules are those of Kubernetes' own components: whoever holds the Lease renews it; whoever waits takes it over when it has not
//! changed for its whole duration, measured by the clock of the one who waits, since clocks of two machines cannot be compared; every write carries
//! the resourceVersion that was read, so that of two takers one fails. A holder that cannot renew stops in time, before another may begin. The
//! published crates for this are bound to older versions of `kube`.
//!
//! `Candidate::judge` decides and is pure; [`hold`] does what it says.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

/// How long a Lease holds without being renewed: how long nobody writes after a holder died. As in Kubernetes.
const DURATION: Duration = Duration::from_secs(15);

/// A holder that could not renew for so long stops. Leaves five seconds for a write under way to end before another begins.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// Between two looks at the Lease.
const RETRY: Duration = Duration::from_secs(2);

/// An answer that takes longer is no answer. Below the deadline, so that a request is made twice before a holder stops.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Which Lease, and as whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseSettings {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Name of this replica: that of its pod. Must differ from all others.
    pub identity: String,
}

/// What to do about the Lease as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// There is none: make it.
    Create,
    /// Nobody holds it, or nobody renews it.
    Take,
    /// It is ours.
    Renew,
    /// Another holds it.
    Wait,
}

/// One who holds a Lease or would like to.
#[derive(Debug)]
struct Candidate {
    identity: String,
    /// The version of the Lease seen last, and when it was new.
    seen: Option<(String, Instant)>,
}

impl Candidate {
    fn judge(&mut self, lease: Option<&Lease>, now: Instant) -> Verdict {
        let Some(lease) = lease else { return Verdict::Create };
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        if holder.is_empty() {
            return Verdict::Take;
        }
        if holder == self.identity {
            return Verdict::Renew;
        }
        let version = lease.metadata.resource_version.as_deref().unwrap_or_default();
        match &self.seen {
            Some((seen, since)) if seen == version => {
                let seconds =
                    spec.and_then(|spec| spec.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
                let duration = seconds.map_or(DURATION, Duration::from_secs);
                if now.duration_since(*since) >= duration { Verdict::Take } else { Verdict::Wait }
            }
            _ => {
                self.seen = Some((version.to_owned(), now));
                Verdict::Wait
            }
        }
    }

    /// The Lease as it is to be written, from what was read.
    fn written(&self, lease: Option<Lease>, settings: &LeaseSettings, now: Timestamp) -> Lease {
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
        lease
    }
}

/// Tries for ever to get and keep the Lease. `leading` says whether this replica holds it. When `leading` has no reader left, the Lease is
/// given back and this returns.
pub async fn hold(client: Client, settings: LeaseSettings, leading: watch::Sender<bool>) {
    let api: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let mut candidate = Candidate { identity: settings.identity.clone(), seen: None };
    let mut renewed = None;
    loop {
        match timeout(REQUEST_TIMEOUT, attempt(&api, &settings, &mut candidate)).await {
            Ok(Ok(true)) => renewed = Some(Instant::now()),
            Ok(Ok(false)) => renewed = None,
            // Another was quicker; the next look shows who.
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_already_exists() => {
                debug!(lease = settings.name, "somebody else wrote the Lease");
            }
            Ok(Err(error)) => {
                warn!(lease = settings.name, %error, "cannot read or write the Lease; trying again")
            }
            Err(_) => warn!(lease = settings.name, "no answer about the Lease; trying again"),
        }
        let holds = renewed.is_some_and(|at: Instant| at.elapsed() < RENEW_DEADLINE);
        if leading.send_if_modified(|leads| std::mem::replace(leads, holds) != holds) {
            info!(lease = settings.name, identity = settings.identity, leads = holds, "leadership changed");
        }
        // A request that hangs must not keep a holder holding beyond its deadline.
        let pause =
            renewed.map_or(RETRY, |at| RETRY.min((at + RENEW_DEADLINE).duration_since(Instant::now())));
        tokio::select! {
            () = sleep(pause) => {}
            () = leading.closed() => break,
        }
    }
    if renewed.is_some()
        && let Err(error) = give_back(&api, &settings).await
    {
        warn!(lease = settings.name, %error, "cannot give the Lease back; it runs out by itself");
    }
}

/// One look at the Lease and what follows from it. Answers whether it is ours.
async fn attempt(
    api: &Api<Lease>,
    settings: &LeaseSettings,
    candidate: &mut Candidate,
) -> kube::Result<bool> {
    let lease = api.get_opt(&settings.name).await?;
    let verdict = candidate.judge(lease.as_ref(), Instant::now());
    let written = candidate.written(lease, settings, Timestamp::now());
    match verdict {
        Verdict::Wait => return Ok(false),
        Verdict::Create => api.create(&PostParams::default(), &written).await?,
        Verdict::Take | Verdict::Renew => {
            api.replace(&settings.name, &PostParams::default(), &written).await?
        }
    };
    Ok(true)
}

/// Lets another replica begin at once.
async fn give_back(api: &Api<Lease>, settings: &LeaseSettings) -> kube::Result<()> {
    let Some(mut lease) = api.get_opt(&settings.name).await? else { return Ok(()) };
    let Some(spec) = &mut lease.spec else { return Ok(()) };
    if spec.holder_identity.as_deref() == Some(&settings.identity) {
        spec.holder_identity = None;
        api.replace(&settings.name, &PostParams::default(), &lease).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(identity: &str) -> Candidate {
        Candidate { identity: identity.into(), seen: None }
    }

    fn lease(holder: &str, version: &str) -> Lease {
        Lease {
            metadata: ObjectMeta { resource_version: Some(version.into()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: (!holder.is_empty()).then(|| holder.into()),
                lease_duration_seconds: Some(15),
                lease_transitions: Some(3),
                // Long past by the clock of whoever wrote it, which proves nothing.
                renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
                ..LeaseSpec::default()
            }),
        }
    }

    #[test]
    fn a_lease_nobody_holds_is_taken_at_once() {
        let now = Instant::now();
        assert_eq!(candidate("a").judge(None, now), Verdict::Create);
        assert_eq!(candidate("a").judge(Some(&lease("", "1")), now), Verdict::Take);
        assert_eq!(candidate("a").judge(Some(&lease("a", "1")), now), Verdict::Renew);
    }

    #[test]
    fn a_lease_is_taken_over_only_after_it_was_seen_unchanged_for_its_whole_duration() {
        let (mut waiting, start) = (candidate("a"), Instant::now());
        assert_eq!(waiting.judge(Some(&lease("b", "1")), start), Verdict::Wait);
        assert_eq!(waiting.judge(Some(&lease("b", "1")), start + Duration::from_secs(14)), Verdict::Wait);
        assert_eq!(waiting.judge(Some(&lease("b", "2")), start + Duration::from_secs(14)), Verdict::Wait);
        assert_eq!(waiting.judge(Some(&lease("b", "2")), start + Duration::from_secs(28)), Verdict::Wait);
        assert_eq!(waiting.judge(Some(&lease("b", "2")), start + Duration::from_secs(29)), Verdict::Take);
    }

    #[test]
    fn what_is_written_carries_the_version_that_was_read_and_counts_transitions() {
        let settings = LeaseSettings { namespace: "n".into(), name: "l".into(), identity: "a".into() };
        let taken = candidate("a").written(Some(lease("b", "7")), &settings, Timestamp::UNIX_EPOCH);
        assert_eq!(taken.metadata.resource_version.as_deref(), Some("7"));
        let spec = taken.spec.unwrap();
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("a"), Some(4)));
        let renewed = candidate("b").written(Some(lease("b", "7")), &settings, Timestamp::UNIX_EPOCH);
        assert_eq!(renewed.spec.unwrap().lease_transitions, Some(3));
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        assert!(RENEW_DEADLINE + REQUEST_TIMEOUT < DURATION);
    }
}
