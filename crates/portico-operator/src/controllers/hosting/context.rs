//! The tools and the state of a reconciliation of a control plane.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use portico_pki::KeyKind;
use tokio::sync::watch as channel;

use super::alarms::Alarms;
use super::kinds::{Kind, Shared};
use crate::cache::Cache;
use crate::clusters::{ClusterWatch, LastWritten};
use crate::controllers::exposed::Written;
use crate::installation::Installation;
use crate::kkp::KkpWatch;
use crate::status::{ClusterPart, StatusHandle};
use crate::work_counters::WorkCounters;

/// The reason of a Cluster that cannot be hosted as it is written.
pub(super) const INVALID: &str = "InvalidConfiguration";

/// The reason of one that serves, with authorities that end within a year.
pub(super) const AUTHORITIES_END: &str = "AuthoritiesEnd";

/// What the controller does, on Events.
pub(super) const ACTION: &str = "KeepControlPlane";

/// The control planes, as they are shown.
pub const CONTROL_PLANES: ClusterPart = ClusterPart {
    key: "controlPlanes",
    title: "control planes",
    gauge: "operator_control_planes",
    help: "Hosted control planes by the reason of their condition.",
    help_not_ready: "Hosted control planes that do not serve, and paused ones whose certificates end.",
};

/// What the controller is to do.
#[derive(Debug, Clone)]
pub struct HostingSettings {
    /// What holds for all control planes.
    pub plan: portico_hosting::Settings,
    /// The namespace of Portico, where credentials of registries are.
    pub namespace: String,
    /// The kind of keys that are made.
    pub keys: KeyKind,
    /// What time it is.
    pub clock: fn() -> Timestamp,
    /// Time between two questions of members of etcd whether they have an alarm.
    pub alarm_period: Duration,
    /// How long the namespace of a Cluster that is deleted may take to go before what is left is named.
    pub deletion_patience: SignedDuration,
}

/// Everything that a reconciliation needs.
pub(super) struct Context {
    pub(super) client: Client,
    pub(super) settings: HostingSettings,
    pub(super) clusters: ClusterWatch,
    pub(super) exposed: Arc<Cache<Written>>,
    pub(super) kinds: Vec<Box<dyn Kind>>,
    pub(super) pods: Arc<Cache<Pod>>,
    pub(super) alarms: Alarms,
    pub(super) kkp: KkpWatch,
    pub(super) installation: Installation,
    pub(super) leads: channel::Receiver<Leads>,
    pub(super) events: Events,
    pub(super) status: StatusHandle,
    pub(super) counters: WorkCounters,
    pub(super) backoffs: Mutex<BTreeMap<String, Shared>>,
    pub(super) written: LastWritten,
}

impl Context {
    /// Whether this replica writes, and everything is known that decides what.
    pub(super) fn is_ready(&self) -> bool {
        self.leads.borrow().now() && self.is_known()
    }

    pub(super) fn is_known(&self) -> bool {
        let known = [
            self.installation.seeds.is_known(),
            self.installation.configurations.is_known(),
            self.exposed.is_known(),
            self.pods.is_known(),
        ];
        known.into_iter().all(|known| known) && self.kinds.iter().all(|kind| kind.is_known())
    }

    pub(super) fn kind(&self, name: &str) -> Option<&dyn Kind> {
        self.kinds.iter().find(|kind| kind.name() == name).map(|kind| &**kind)
    }

    /// The names of Portico's objects of a kind in a namespace.
    pub(super) fn ours_in(&self, kind: &str, namespace: &str) -> Vec<String> {
        self.kind(kind).map(|kind| kind.ours_in(namespace)).unwrap_or_default()
    }

    /// Drops what is recorded about Clusters that are gone.
    pub(super) fn forget_gone(&self) {
        self.status.part(CONTROL_PLANES, |planes| {
            planes.reports.retain(|name, _| self.clusters.exists(name));
            planes.authority_ends.retain(|name, _| self.clusters.exists(name));
        });
        self.all_backoffs().retain(|name, _| self.clusters.exists(name));
        self.alarms.retain(|name| self.clusters.exists(name));
        self.written.forget();
    }

    pub(super) fn forget(&self, name: &str) {
        self.status.part(CONTROL_PLANES, |planes| {
            planes.reports.remove(name);
            planes.authority_ends.remove(name);
        });
        self.all_backoffs().remove(name);
    }

    pub(super) fn backoffs(&self, cluster: &str) -> Shared {
        Arc::clone(self.all_backoffs().entry(cluster.to_owned()).or_default())
    }

    pub(super) fn all_backoffs(&self) -> MutexGuard<'_, BTreeMap<String, Shared>> {
        self.backoffs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
