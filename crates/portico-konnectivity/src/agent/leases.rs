//! Counts servers by their Leases: each server renews one, so those that are valid are the servers there are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::StreamExt;
use http::{Request, Response};
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use kube::core::Status;
use kube::runtime::watcher::Event;
use kube::{Api, Client, ResourceExt};
use portico_api::text::printable;
use portico_kube::client::limited;
use portico_kube::error::describe;
use portico_kube::watch::{Progress, labelled};
use portico_net::line_limit::{LineLimit, Pace};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tower::service_fn;

use super::settings::{CountSource, Leases};
use super::shared::{DIAL_BUCKETS, Shared};
use crate::lease::{LONGEST_ANSWER, Lease, expires};

/// Between two looks at which Leases have expired: nothing reports that. Longer than between two renewals, of
/// which one at least comes meanwhile if any server and the API server are there.
const LOOK: Duration = Duration::from_secs(20);

/// Between two changes that are reported, at least. Each begins an attempt, and the number may change without
/// end.
const LEAST_PAUSE: Duration = Duration::from_secs(1);

/// Leases that are counted: many times as many as an agent has connections to servers. A list may be endless.
const MOST: usize = 4_096;

/// The number of servers, followed by a task of its own while this is held.
pub(super) struct Count {
    /// `None` until the first list.
    valid: watch::Receiver<Option<u32>>,
    task: Option<AbortHandle>,
    /// When the next change may be reported.
    next: Instant,
}

impl Count {
    /// Servers with a valid Lease; `None` if nobody counts them, or none was listed yet.
    pub(super) fn servers(&self) -> Option<u32> {
        *self.valid.borrow()
    }

    /// Returns when the number has changed, once in [`LEAST_PAUSE`] at most.
    pub(super) async fn changed(&mut self) {
        sleep_until(self.next).await;
        if self.valid.changed().await.is_err() {
            std::future::pending().await
        }
        self.next = Instant::now() + LEAST_PAUSE;
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
    Count { valid, task, next: Instant::now() }
}

/// Follows the Leases. A failed request is tried again, and the last count that succeeded stays.
async fn follow(leases: Leases, shared: Arc<Shared>, valid: watch::Sender<Option<u32>>) {
    let client = limited(leases.client, LONGEST_ANSWER);
    let api: Api<Lease> = Api::namespaced(counted(client, &shared), &leases.namespace);
    let mut signs = std::pin::pin!(labelled(api, &leases.selector));
    let mut known = HashMap::new();
    let mut listing = HashMap::new();
    let mut is_listed = false;
    let (lines, begun) = (LineLimit::default(), Instant::now());
    let mut look = begun + LOOK;
    // Whether the API server has sent anything since the last look. Otherwise renewals may be missing, and
    // not servers.
    let mut has_responded = false;
    loop {
        tokio::select! {
            () = sleep_until(look) => {
                look = Instant::now() + LOOK;
                if !std::mem::take(&mut has_responded) {
                    continue;
                }
            }
            Some(sign) = signs.next() => {
                has_responded = sign.is_ok();
                match sign {
                    // The API server is about to be asked, and has sent nothing.
                    Ok(Progress::Event(Event::Init)) => {
                        has_responded = false;
                        listing.clear();
                        continue;
                    }
                    Ok(Progress::Event(Event::InitApply(lease))) => {
                        if listing.len() < MOST {
                            listing.insert(lease.name_any(), expires(&lease));
                        }
                        continue;
                    }
                    Ok(Progress::Event(Event::InitDone)) => {
                        known = std::mem::take(&mut listing);
                        is_listed = true;
                    }
                    Ok(Progress::Event(Event::Apply(lease))) => {
                        let name = lease.name_any();
                        if known.len() < MOST || known.contains_key(&name) {
                            known.insert(name, expires(&lease));
                        }
                    }
                    Ok(Progress::Event(Event::Delete(lease))) => drop(known.remove(&lease.name_any())),
                    Ok(Progress::Alive) => continue,
                    Err(error) => {
                        shared.counters.lease_failures.fetch_add(1, Relaxed);
                        if let Some(left_out) = lines.admit(Pace::WARNINGS, begun.elapsed()) {
                            tracing::warn!(
                                error = %printable(&describe(&error)),
                                namespace = leases.namespace,
                                selector = leases.selector,
                                left_out,
                                "cannot list or watch the Leases of servers; their last count stays"
                            );
                        }
                        continue;
                    }
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

/// The client, with what it lists and watches counted by the API server's answers.
fn counted(client: Client, shared: &Arc<Shared>) -> Client {
    let (namespace, shared) = (client.default_namespace().to_owned(), Arc::clone(shared));
    let service = service_fn(move |request: Request<Body>| {
        let (client, shared) = (client.clone(), Arc::clone(&shared));
        async move {
            let counters = &shared.counters;
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let requests = if is_watch { &counters.lease_watches } else { &counters.lease_lists };
            let begun = Instant::now();
            let (response, reason) = reason(client.send(request).await?).await?;
            requests.answered(&DIAL_BUCKETS, response.status().as_u16(), &reason, begun.elapsed());
            Ok::<_, kube::Error>(response)
        }
    });
    Client::new(service, namespace)
}

/// The API server's reason why a request failed; empty if it did not fail.
async fn reason(response: Response<Body>) -> kube::Result<(Response<Body>, String)> {
    if response.status().is_success() {
        return Ok((response, String::new()));
    }
    let (head, body) = response.into_parts();
    let body = body.collect_bytes().await?;
    let status = serde_json::from_slice::<Status>(&body).unwrap_or_default();
    Ok((Response::from_parts(head, Body::from(body)), status.reason))
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_number_of_servers_that_changes_all_the_time_is_reported_once_a_second() {
        let (sender, valid) = watch::channel(None);
        let begun = Instant::now();
        let mut count = Count { valid, task: None, next: begun };
        let changes = async {
            for servers in 0.. {
                sender.send_replace(Some(servers));
                sleep(Duration::from_millis(5)).await;
            }
        };
        let reports = async {
            for _ in 0..5 {
                count.changed().await;
            }
        };
        tokio::select! {
            () = changes => {}
            () = reports => {}
        }
        assert!(begun.elapsed() >= 4 * LEAST_PAUSE, "{:?}", begun.elapsed());
    }
}
