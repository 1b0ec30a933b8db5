//! Counts servers by their Leases: each server renews one, so those that are valid are the servers there are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher::Event;
use kube::{Api, ResourceExt};
use portico_kube::watch::{Sign, labelled};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::settings::{CountSource, Leases};
use super::shared::Shared;

/// Between two looks at which Leases have expired: nothing reports that.
const LOOK: Duration = Duration::from_secs(10);

/// The number of servers, followed by a task of its own while this is held.
pub(super) struct Count {
    /// `None` until the first list.
    valid: watch::Receiver<Option<u32>>,
    task: Option<AbortHandle>,
}

impl Count {
    /// Servers with a valid Lease; `None` if nobody counts them, or none was listed yet.
    pub(super) fn servers(&self) -> Option<u32> {
        *self.valid.borrow()
    }

    /// Returns when the number changes.
    pub(super) async fn changed(&mut self) {
        if self.valid.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Counts as the settings say.
pub(super) fn count(shared: &Arc<Shared>) -> Count {
    let (sender, valid) = watch::channel(None);
    let task = match &shared.settings.count {
        CountSource::Responses => None,
        CountSource::Leases(leases) | CountSource::Max(leases) => {
            let task = tokio::spawn(follow(leases.clone(), Arc::clone(shared), sender));
            Some(task.abort_handle())
        }
    };
    Count { valid, task }
}

/// Follows the Leases. What fails is tried again, and the last count that succeeded stays.
async fn follow(leases: Leases, shared: Arc<Shared>, valid: watch::Sender<Option<u32>>) {
    let api: Api<Lease> = Api::namespaced(leases.client, &leases.namespace);
    let mut signs = std::pin::pin!(labelled(api, &leases.selector));
    let mut known = HashMap::new();
    let mut listing = HashMap::new();
    let mut is_listed = false;
    let mut look = Instant::now() + LOOK;
    loop {
        tokio::select! {
            () = sleep_until(look) => look = Instant::now() + LOOK,
            Some(sign) = signs.next() => match sign {
                Ok(Sign::Event(Event::Init)) => listing.clear(),
                Ok(Sign::Event(Event::InitApply(lease))) => {
                    listing.insert(lease.name_any(), expires(&lease));
                }
                Ok(Sign::Event(Event::InitDone)) => {
                    shared.counters.lease_lists[0].fetch_add(1, Relaxed);
                    known = std::mem::take(&mut listing);
                    is_listed = true;
                }
                Ok(Sign::Event(Event::Apply(lease))) => drop(known.insert(lease.name_any(), expires(&lease))),
                Ok(Sign::Event(Event::Delete(lease))) => drop(known.remove(&lease.name_any())),
                Ok(Sign::Alive) => continue,
                Err(error) => {
                    shared.counters.lease_lists[1].fetch_add(1, Relaxed);
                    tracing::warn!(
                        %error,
                        namespace = leases.namespace,
                        selector = leases.selector,
                        "cannot follow the Leases of servers; their last count stays. The agent needs list \
                         and watch on leases of coordination.k8s.io there"
                    );
                    continue;
                }
            }
        }
        if is_listed {
            let now = Timestamp::now();
            let servers =
                known.values().filter(|expires| expires.is_some_and(|expires| expires > now)).count();
            let servers = Some(u32::try_from(servers).unwrap_or(u32::MAX).max(1));
            valid.send_if_modified(|known| std::mem::replace(known, servers) != servers);
        }
    }
}

/// When a Lease expires that is not renewed. `None`: it is not valid.
fn expires(lease: &Lease) -> Option<Timestamp> {
    let spec = lease.spec.as_ref()?;
    let since = spec.renew_time.as_ref().or(spec.acquire_time.as_ref())?.0;
    let seconds = spec.lease_duration_seconds?;
    since.checked_add(k8s_openapi::jiff::SignedDuration::from_secs(i64::from(seconds))).ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    #[test]
    fn a_lease_is_valid_from_its_last_renewal_for_its_duration() {
        let time = |second| Some(MicroTime(Timestamp::from_second(second).unwrap()));
        let lease = |spec| Lease { spec: Some(spec), ..Lease::default() };
        let renewed = LeaseSpec {
            acquire_time: time(10),
            renew_time: time(100),
            lease_duration_seconds: Some(30),
            ..LeaseSpec::default()
        };
        assert_eq!(expires(&lease(renewed.clone())), Some(Timestamp::from_second(130).unwrap()));
        let never_renewed = LeaseSpec { renew_time: None, ..renewed.clone() };
        assert_eq!(expires(&lease(never_renewed)), Some(Timestamp::from_second(40).unwrap()));
        assert_eq!(expires(&lease(LeaseSpec { lease_duration_seconds: None, ..renewed })), None);
        assert_eq!(expires(&Lease::default()), None);
    }
}
