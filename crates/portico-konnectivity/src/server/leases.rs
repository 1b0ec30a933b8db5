//! The Lease by which agents count this server, and the removal of Leases of servers that are gone.
//!
//! A server renews its own every [`RENEW`]; one that is not renewed expires after [`DURATION`]. Names,
//! labels, times and verbs are upstream's: servers of both kinds are counted together, by the same Role.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::core::TypeMeta;
use kube::{Api, Client, ResourceExt};
use portico_api::text::printable;
use portico_kube::apply::writing;
use portico_kube::client::limited;
use portico_kube::error::describe;
use portico_net::line_limit::{LineLimit, Pace};
use tokio::time::{Instant, sleep_until, timeout};

use super::Status;
use super::lease_counters::{LeaseCounters, REQUEST_BUCKETS};
use crate::lease::{LONGEST_ANSWER, Lease, LeaseSpec, expires, micro_time};

/// How long a Lease is valid without renewal.
const DURATION: Duration = Duration::from_secs(30);

/// Between two renewals.
const RENEW: Duration = Duration::from_secs(15);

/// Between two attempts to renew, and the time limit of each step: two fit in before the Lease expires.
const RETRY: Duration = Duration::from_secs(5);

/// Leases in one page of a list: some hundred KiB.
const PAGE: u32 = 100;

/// What an operator gives to the user of `--kubeconfig`.
const RIGHTS: &str =
    "; it needs get, list, create, update and delete on leases of coordination.k8s.io in that namespace";

/// Whether the API server denies this user the request. Otherwise it is away, or not there yet: a sidecar
/// starts before its API server, and ends after it.
fn is_denied(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 401 | 403))
}

/// The Lease of one server.
pub struct ServerLease {
    api: Api<Lease>,
    name: String,
    labels: BTreeMap<String, String>,
    status: Status,
    /// Limits lines about Leases that are removed.
    lines: LineLimit,
    begun: Instant,
}

impl std::fmt::Debug for ServerLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerLease").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ServerLease {
    /// The Lease of the server with this status. Agents, and other servers, find it by its labels.
    #[must_use]
    pub fn new(client: Client, namespace: &str, labels: BTreeMap<String, String>, status: Status) -> Self {
        let name = format!("konnectivity-proxy-server-{}", status.0.settings.id);
        let api = Api::namespaced(limited(client, LONGEST_ANSWER), namespace);
        Self { api, name, labels, status, lines: LineLimit::default(), begun: Instant::now() }
    }

    /// Keeps the Lease, and removes those that expired, until it is dropped.
    pub async fn run(&self) -> Infallible {
        loop {
            let begun = Instant::now();
            let uncounted =
                "it tries again; a Lease that is not renewed runs out after 30 s, and no agent counts it";
            let is_renewed = self.does("renew its Lease", uncounted, self.renew()).await;
            if is_renewed {
                let harmless = "it tries again; no agent counts them";
                self.does("remove Leases of servers that are gone", harmless, self.cull()).await;
            }
            sleep_until(begun + if is_renewed { RENEW } else { RETRY }).await;
        }
    }

    /// Removes the Lease: agents need not look for this server any more.
    pub async fn release(&self) {
        let delete = async { self.api.delete(&self.name, &DeleteParams::default()).await.map(drop) };
        self.does("remove its Lease", "it runs out within 30 s", delete).await;
    }

    /// Returns whether a step succeeded. `effect` is what follows if it does not.
    async fn does(&self, what: &str, effect: &str, step: impl Future<Output = kube::Result<()>>) -> bool {
        let (problem, is_denied) = match timeout(RETRY, step).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => (printable(&describe(&error)), is_denied(&error)),
            Err(_) => (format!("it was not done within {RETRY:?}"), false),
        };
        self.counters().failed.fetch_add(1, Relaxed);
        let remedy = if is_denied { RIGHTS } else { "" };
        tracing::warn!(lease = %self.name, error = %problem, "the server cannot {what}; {effect}{remedy}");
        false
    }

    fn counters(&self) -> &LeaseCounters {
        &self.status.counters().leases
    }

    async fn renew(&self) -> kube::Result<()> {
        let (found, create) = match self.api.get_opt(&self.name).await? {
            Some(lease) => (lease, false),
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                (
                    Lease {
                        types: Some(TypeMeta::resource::<Lease>()),
                        metadata,
                        spec: LeaseSpec::default(),
                    },
                    true,
                )
            }
        };
        let (lease, params) = (self.renewed(found, Timestamp::now()), writing());
        if create {
            self.api.create(&params, &lease).await?;
        } else {
            self.api.replace(&self.name, &params, &lease).await?;
        }
        Ok(())
    }

    /// The Lease as this server wants it. What others wrote beside it stays.
    fn renewed(&self, mut lease: Lease, now: Timestamp) -> Lease {
        lease.metadata.labels.get_or_insert_default().extend(self.labels.clone());
        lease.spec.holder_identity = Some(self.status.0.settings.id.clone());
        lease.spec.lease_duration_seconds = i32::try_from(DURATION.as_secs()).ok();
        lease.spec.renew_time = Some(micro_time(now));
        lease
    }

    /// Removes expired Leases with the labels. One that is renewed meanwhile stays. The caller bounds the
    /// time.
    async fn cull(&self) -> kube::Result<()> {
        let labels: Vec<String> = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let mut page = ListParams::default().labels(&labels.join(",")).limit(PAGE);
        loop {
            let now = Timestamp::now();
            let leases = self.counters().lists.counted(&REQUEST_BUCKETS, self.api.list(&page)).await?;
            for lease in &leases.items {
                if expires(lease).is_none_or(|expires| expires <= now) && lease.name_any() != self.name {
                    self.remove(lease).await?;
                }
            }
            match leases.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => page = page.continue_token(&next),
                None => return Ok(()),
            }
        }
    }

    /// Removes an expired Lease, unless it changes meanwhile.
    async fn remove(&self, lease: &Lease) -> kube::Result<()> {
        let (name, counters) = (lease.name_any(), self.counters());
        let preconditions =
            Some(Preconditions { resource_version: lease.resource_version(), uid: lease.uid() });
        let delete = DeleteParams { preconditions, ..DeleteParams::default() };
        let deleted = self.api.delete(&name, &delete);
        match counters.deletes.counted(&REQUEST_BUCKETS, deleted).await {
            Ok(_) => {
                counters.culled.fetch_add(1, Relaxed);
                if let Some(left_out) = self.lines.admit(Pace::WARNINGS, self.begun.elapsed()) {
                    tracing::info!(
                        lease = %name, left_out,
                        "removed a Lease that had run out; if its server is there, compare the clocks"
                    );
                }
                Ok(())
            }
            // Renewed, or removed by another server, in this moment.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
