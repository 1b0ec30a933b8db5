//! The tools and the state of a reconciliation of the inside of a cluster.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client};
use portico_api::annotations::WITHOUT;
use portico_api::cluster::{CONTROL_PLANE_READY, Cluster};
use portico_expose::user_cluster::AgentSettings;
use portico_kube::cached::Cached;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use tokio::sync::watch as channel;

use super::approver::Approvers;
use super::backoff::Backoffs;
use crate::controllers::exposed::Written;
use crate::installation::Installation;
use crate::kkp::KkpWatch;
use crate::observed::Observed;
use crate::status::{ClusterPart, StatusHandle};
use crate::work_counters::WorkCounters;
use crate::write::{RequestError, request};

/// The first pause after a failed pass; doubled with every further one.
pub(super) const FIRST_RETRY: Duration = Duration::from_secs(5);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
pub(super) const LAST_RETRY: Duration = Duration::from_secs(600);

/// The insides of clusters, as they are shown.
pub const USER_CLUSTERS: ClusterPart = ClusterPart {
    key: "userClusters",
    title: "user clusters",
    gauge: "operator_user_clusters",
    help: "Clusters by the reason of the condition about their inside.",
    help_not_ready: "Clusters whose inside is not as it should be.",
};

/// What the controller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserClusterSettings {
    /// How agents are made.
    pub agents: AgentSettings,
    /// The namespace of Portico, where the CA of the tunnel certificate is.
    pub namespace: String,
    /// Time limit of everything that is done inside one user cluster in one pass.
    pub pass_timeout: Duration,
    /// The name servers for the names of clusters, where one is to be reached as from outside. If there are
    /// none, those of the machine are asked.
    pub name_servers: Vec<SocketAddr>,
    /// What holds for all hosted clusters. Without it they get nothing that others do not get.
    pub hosted: Option<portico_hosting::Settings>,
}

/// Everything that a reconciliation needs.
pub(super) struct Context {
    pub(super) client: Client,
    pub(super) settings: UserClusterSettings,
    pub(super) installation: Installation,
    pub(super) clusters: Store<Cached<Written>>,
    pub(super) kkp: KkpWatch,
    pub(super) leads: channel::Receiver<Leads>,
    pub(super) events: Events,
    pub(super) status: StatusHandle,
    pub(super) counters: WorkCounters,
    pub(super) backoffs: Backoffs,
    pub(super) approvers: Approvers,
    /// What was seen of clusters that migrate, for the controller that takes them on.
    pub(super) observed: Observed,
    /// The [`Said`] of each Cluster at the last look.
    pub(super) seen: Mutex<HashMap<String, Said>>,
}

/// What counts of a Cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Said {
    /// Counts changes of its spec.
    generation: Option<i64>,
    /// The parts that it does not get inside.
    without: Option<String>,
    /// Whether its control plane is ready, where that is hosted here.
    serves: bool,
}

impl Said {
    pub(super) fn of(cluster: &Cluster, generation: Option<i64>) -> Self {
        let without = cluster.metadata.annotation(WITHOUT).map(str::to_owned);
        Self { generation, without, serves: cluster.is_true(CONTROL_PLANE_READY) }
    }
}

/// What there is to reconcile.
pub(super) type Work = Vec<ObjectRef<Cached<Written>>>;

impl Context {
    pub(super) fn all(&self) -> Work {
        self.clusters.state().iter().map(|cluster| ObjectRef::from_obj(&**cluster)).collect()
    }

    /// Drops what is recorded about clusters that are gone.
    pub(super) fn forget_gone(&self) {
        let exists = |name: &str| self.clusters.get(&ObjectRef::new(name)).is_some();
        self.status.part(USER_CLUSTERS, |clusters| clusters.reports.retain(|name, _| exists(name)));
        self.backoffs.retain(exists);
        self.approvers.retain(exists);
        self.observed.retain(exists);
        self.seen().retain(|name, _| exists(name));
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, HashMap<String, Said>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Secret>, RequestError> {
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        request(&format!("Secret {namespace}/{name}"), secrets.get_opt(name)).await
    }

    pub(super) async fn read<K>(
        &self,
        api: Api<Cached<K>>,
        kind: &str,
        name: &str,
    ) -> Result<Option<Cached<K>>, RequestError>
    where
        K: k8s_openapi::Resource + 'static,
    {
        request(&format!("{kind} {name}"), api.get_opt(name)).await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_control_plane_that_comes_up_is_news_and_what_else_a_status_has_is_not() {
        let said = |conditions| {
            let text = json!({"metadata": {"name": "a"}, "status": {"conditions": conditions}});
            Said::of(&serde_json::from_value(text).unwrap(), Some(1))
        };
        let ready = |status: &str| json!({"PorticoControlPlaneReady": {"status": status, "reason": "R"}});
        let other = json!({"PorticoExposed": {"status": "True"}});
        assert_eq!(said(json!({})), said(other));
        assert_eq!(said(json!({})), said(ready("False")));
        assert_ne!(said(ready("False")), said(ready("True")));
    }
}
