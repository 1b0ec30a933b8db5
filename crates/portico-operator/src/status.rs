//! The status of the controllers, for metrics, health and `/status`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::MigrationState;
use portico_api::meta::ObjectKey;
use portico_expose::front::Waiting;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use crate::news::News;
use crate::work_counters::WorkStatus;

/// The status of the controllers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ControllerStatus {
    /// Whether all Services are known. A replica that waits to lead is complete too.
    pub complete: bool,
    /// Whether this replica is the leader, which writes.
    pub leader: bool,
    /// The election among operators. `None` where this process is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<OperatorStatus>,
    /// The watches, by kind.
    pub watches: BTreeMap<&'static str, WatchStatus>,
    /// The work of each controller, by the name that it has on Events.
    pub controllers: BTreeMap<&'static str, WorkStatus>,
    /// The front Services, by namespace and name: the one of the seed, and those of clusters.
    pub services: BTreeMap<ObjectKey, ServiceStatus>,
    /// The ExposedClusters; on the leader alone.
    pub exposed_clusters: ExposedClustersStatus,
    /// The clusters that this process exposes; on the leader alone. `None` where it exposes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clusters: Option<ClustersStatus>,
    /// The parts of clusters that this process keeps; on the leader alone.
    #[serde(flatten)]
    pub parts: BTreeMap<ClusterPart, PartsStatus>,
    /// The Seeds whose gateway this process makes; on the leader alone. `None` where it makes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seeds: Option<SeedsStatus>,
    /// The admission webhook. `None` where this process serves none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<WebhookStatus>,
}

/// The election among the operators of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OperatorStatus {
    /// The operator of another installation that leads, and what to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// The admission webhook.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookStatus {
    /// Questions since this process started, by the kind of the object and what became of them.
    pub reviews: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    /// When the certificate ends that this process serves, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_ends: Option<i64>,
    /// Whether the API server is configured to ask; on the leader alone.
    pub registered: bool,
    /// Why it is not; on the leader alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Why it must not be: other controllers decide what is admitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observing: Option<String>,
}

/// The Seeds, and the gateway that an operator makes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SeedsStatus {
    /// The status of each Seed.
    pub reports: BTreeMap<ObjectKey, SeedReport>,
    /// When the certificate of the tunnel listener ends, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_ends: Option<i64>,
    /// Why nothing is written, though this replica leads: other controllers do this work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observing: Option<String>,
}

/// The status of one Seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SeedReport {
    /// Whether its gateway is as it asks for.
    pub ready: bool,
    /// One word, in CamelCase: that of its condition.
    pub reason: &'static str,
    /// A sentence with the finding and the remedy.
    pub message: String,
    /// Failed passes in a row.
    pub failures: u32,
    /// Whether the condition of the Seed says so.
    pub condition_written: bool,
}

/// A part of every cluster that one controller keeps, such as its inside, as it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterPart {
    /// Its key in `/status`.
    pub key: &'static str,
    /// What `/readyz` calls it.
    pub title: &'static str,
    /// The gauge of all clusters by the reason of their condition. With `_not_ready` behind it, that of those
    /// with trouble.
    pub gauge: &'static str,
    /// The help text of the first.
    pub help: &'static str,
    /// The help text of the second.
    pub help_not_ready: &'static str,
}

impl Serialize for ClusterPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.key)
    }
}

/// The status of one [`ClusterPart`] of every cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PartsStatus {
    /// The status of that part of each cluster, by the name of the cluster.
    pub reports: BTreeMap<String, PartReport>,
    /// When the first authority of each cluster ends, in seconds since 1970; of control planes alone.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub authority_ends: BTreeMap<String, i64>,
}

/// The status of one part of one cluster: its inside, or its control plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PartReport {
    /// Whether everything is as it should be.
    pub ready: bool,
    /// One word, in CamelCase: that of its condition.
    pub reason: &'static str,
    /// A sentence with the finding and the remedy.
    pub message: String,
    /// Failed passes in a row.
    pub failures: u32,
}

impl PartsStatus {
    /// Records the status of that part of a cluster. The status says whether it is ready, with the reason and
    /// a sentence. `failed` counts a failed pass. Returns what is new if one of the first two changed.
    pub(crate) fn record(
        &mut self,
        cluster: &str,
        (ready, reason, message): (bool, &'static str, &str),
        failed: bool,
    ) -> Option<News> {
        let before = self.reports.get(cluster);
        let news = before.is_none_or(|before| (before.ready, before.reason) != (ready, reason));
        let first = before.is_none();
        let failures = before.map_or(0, |before| before.failures);
        let failures = if failed { failures.saturating_add(1) } else { 0 };
        let report = PartReport { ready, reason, message: message.to_owned(), failures };
        self.reports.insert(cluster.to_owned(), report);
        news.then(|| News { troubled: self.reports.values().filter(|report| !report.ready).count(), first })
    }

    /// Earlier failures count no more: the next pause is the first, and short.
    pub(crate) fn begin_anew(&mut self, cluster: &str) {
        if let Some(report) = self.reports.get_mut(cluster) {
            report.failures = 0;
        }
    }
}

/// The clusters that an operator exposes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClustersStatus {
    /// The status of each cluster, by name.
    pub reports: BTreeMap<String, ClusterReport>,
    /// Those that migrate between strategies, and what is under way.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub migrating: BTreeMap<String, MigrationState>,
    /// Why nothing is written, though this replica leads: other controllers do this work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observing: Option<String>,
}

/// The status of one cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterReport {
    /// Whether clients find it.
    pub exposed: bool,
    /// One word, in CamelCase: that of its condition.
    pub reason: &'static str,
    /// A sentence with the finding and the remedy.
    pub message: String,
    /// Failed passes in a row.
    pub failures: u32,
    /// What dashboards list clusters by.
    #[serde(skip)]
    pub info: ClusterInfo,
}

/// The labels by which dashboards list clusters: those of KKP's `kubermatic_cluster_info`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterInfo {
    /// Its name for people.
    pub display_name: Box<str>,
    /// Its external address, or nothing.
    pub ip: String,
    /// The version of Kubernetes that it asks for.
    pub spec_version: String,
    /// The cloud provider.
    pub cloud_provider: Box<str>,
    /// The datacenter.
    pub datacenter: Box<str>,
    /// Whether it is paused.
    pub pause: bool,
    /// The project that it belongs to, at KKP.
    pub project: Box<str>,
    /// The phase in its status.
    pub phase: Box<str>,
}

impl ClusterInfo {
    pub(crate) fn of(cluster: &Cluster) -> Self {
        let (spec, status) = (&cluster.spec, &cluster.status);
        let version = spec.hosting.as_ref().and_then(|hosting| hosting.version.get());
        Self {
            display_name: spec.human_readable_name.clone(),
            ip: status.address.ip.map(|ip| ip.to_string()).unwrap_or_default(),
            spec_version: version.map(ToString::to_string).unwrap_or_default(),
            cloud_provider: spec.cloud.provider_name.clone(),
            datacenter: spec.cloud.dc.clone(),
            pause: spec.pause,
            project: cluster.metadata.labels.get("project-id").cloned().unwrap_or_default(),
            phase: status.phase.clone(),
        }
    }
}

/// The status of the ExposedClusters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExposedClustersStatus {
    /// Clusters whose ExposedCluster is as it should be.
    pub written: usize,
    /// Clusters that must not be used as written, or whose ExposedCluster records a migration. An
    /// ExposedCluster that was written before stays.
    pub refused: usize,
    /// Clusters whose ExposedCluster cannot be written.
    pub failed: usize,
    /// What is wrong, by Cluster.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub troubles: BTreeMap<String, String>,
}

/// The status of one front Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// Whether the Service exists.
    pub found: bool,
    /// Ports that are wanted, those of the gateway itself included, and not held back.
    pub used: usize,
    /// How many of the `used` ports the Service has.
    pub published: usize,
    /// Most ports that it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Ports that are held back, oldest first.
    pub waiting: Vec<Waiting>,
    /// Updates of the Service since this process started.
    pub writes: u64,
    /// Requests that the API server refused, or did not answer in time. They read the Service before an
    /// update, update it, or write the condition.
    pub failed_writes: u64,
    /// Writes of this process that another client has reverted.
    pub reverts: u64,
    /// Why the last update failed, until the next one succeeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Another client writes the same fields, and this one has stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yielded_to: Option<String>,
    /// The reasons why the Service is not as wanted.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub troubles: BTreeMap<&'static str, String>,
}

impl ServiceStatus {
    /// Ports that clients need and the load balancer does not have. They are held back, or not written yet.
    pub fn unpublished(&self) -> usize {
        self.waiting.len() + self.used.saturating_sub(self.published)
    }
}

/// The state of the watch of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchStatus {
    /// Whether the kind has been listed once.
    pub listed: bool,
    /// The API server has no such kind: its definition is not installed. Not an error.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub not_served: bool,
    /// The last error, until the API server answers again. What is known stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The first object that cannot be read and has no earlier version, and why. Nothing is written that may
    /// follow from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    /// Errors since this process started.
    pub failures: u64,
    /// How many watches of the kind fail now.
    #[serde(skip)]
    failing: usize,
    /// When the API server answered last.
    #[serde(skip)]
    answered: Option<Instant>,
}

impl WatchStatus {
    /// Time since the API server answered last; `None` before its first answer.
    pub fn age(&self) -> Option<Duration> {
        self.answered.map(|at| at.elapsed())
    }

    /// Records an error of a watch of this kind, with which it `begins` to fail or goes on to.
    pub(crate) fn failed(&mut self, error: &str, begins: bool) {
        self.failures += 1;
        self.failing += usize::from(begins);
        self.error = Some(error.to_owned());
    }

    /// Records a sign of life, which may end a listing, or with which a watch of the kind may have `healed`.
    pub(crate) fn worked(&mut self, listed: bool, healed: bool, now: Instant) {
        self.listed |= listed;
        self.not_served = false;
        self.answered = Some(now);
        self.failing -= usize::from(healed);
        if self.failing == 0 {
            self.error = None;
        }
    }
}

/// The [`ControllerStatus`] for other tasks.
#[derive(Debug, Clone, Default)]
pub struct StatusHandle(Arc<Mutex<ControllerStatus>>);

impl StatusHandle {
    /// Returns the present status.
    pub fn get(&self) -> ControllerStatus {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut ControllerStatus) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the status of the election among operators.
    pub(crate) fn operator<T>(&self, change: impl FnOnce(&mut OperatorStatus) -> T) -> T {
        self.update(|status| change(status.operator.get_or_insert_default()))
    }

    /// Changes the status of the clusters that are exposed.
    pub(crate) fn clusters<T>(&self, change: impl FnOnce(&mut ClustersStatus) -> T) -> T {
        self.update(|status| change(status.clusters.get_or_insert_default()))
    }

    /// Changes the status of a part of all clusters.
    pub(crate) fn part<T>(&self, part: ClusterPart, change: impl FnOnce(&mut PartsStatus) -> T) -> T {
        self.update(|status| change(status.parts.entry(part).or_default()))
    }

    /// Changes the status of the Seeds.
    pub(crate) fn seeds<T>(&self, change: impl FnOnce(&mut SeedsStatus) -> T) -> T {
        self.update(|status| change(status.seeds.get_or_insert_default()))
    }

    /// Changes the status of the watches of a kind.
    pub(crate) fn watch<T>(&self, kind: &'static str, change: impl FnOnce(&mut WatchStatus) -> T) -> T {
        self.update(|status| change(status.watches.entry(kind).or_default()))
    }

    /// Changes the status of the admission webhook.
    pub(crate) fn webhook<T>(&self, change: impl FnOnce(&mut WebhookStatus) -> T) -> T {
        self.update(|status| change(status.webhook.get_or_insert_default()))
    }

    /// Changes the status of one Service.
    pub(crate) fn service<T>(&self, service: &ObjectKey, change: impl FnOnce(&mut ServiceStatus) -> T) -> T {
        self.update(|status| change(status.services.entry(service.clone()).or_default()))
    }
}
