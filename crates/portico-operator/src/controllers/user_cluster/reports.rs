//! Status of the inside of every cluster: as a condition, in the log and as an Event when it changes, and in
//! `/status`.

use portico_api::cluster::{Cluster, USER_CLUSTER_READY};
use portico_expose::user_cluster::NO_KUBECONFIG;
use portico_kube::events::{Note, Severity};
use tracing::{debug, warn};

use super::context::{Context, USER_CLUSTERS};
use super::subject::{NOT_EXPOSED, Readiness};
use crate::condition::{says, shown, write_condition};
use crate::controllers::exposed::reference;
use crate::status::News;
use crate::write::RequestError;

/// Reasons that are no trouble, and stand neither in the log nor in an Event. A new cluster has them, and so
/// does one whose inside is somebody else's.
const EXPECTED: [&str; 2] = [NOT_EXPOSED, NO_KUBECONFIG];

/// Clusters whose trouble is written to the log one by one; `/status` has all of them.
const MAX_LOGGED: usize = 10;

impl Context {
    /// Reports the status of a cluster's inside: in its condition, the log, an Event. Returns whether
    /// something failed, the condition included.
    pub(super) async fn mark(&self, cluster: &Cluster, readiness: &Readiness) -> bool {
        let written = self.write_condition(cluster, readiness).await;
        if let Err(error) = &written {
            self.counters.failed(error.reason());
            debug!(cluster = &*cluster.metadata.name, %error, "cannot write the condition");
        }
        let failed = readiness.failed || written.is_err();
        let Readiness { ready, reason, message, .. } = readiness;
        let message = &shown(message);
        let Some(News { troubled, first }) = self.record(&cluster.metadata.name, readiness, failed) else {
            return failed;
        };
        if EXPECTED.contains(reason) {
            return failed;
        }
        match (ready, troubled) {
            (false, ..=MAX_LOGGED) => warn!(cluster = &*cluster.metadata.name, reason, "{message}"),
            _ => debug!(cluster = &*cluster.metadata.name, reason, "{message}"),
        }
        if first && says(cluster.status.conditions.get(USER_CLUSTER_READY), (*ready, reason, message)) {
            return failed;
        }
        let severity = if *ready { Severity::Normal } else { Severity::Warning };
        let note = Note { severity, reason, action: "KeepUserCluster", text: message };
        self.events.publish(&reference(cluster), note).await;
        failed
    }

    /// Records the status of a cluster's inside, and whether something `failed`, which is tried again.
    /// Returns what is new if it changed.
    pub(super) fn record(&self, name: &str, readiness: &Readiness, failed: bool) -> Option<News> {
        let Readiness { ready, reason, message, .. } = readiness;
        if readiness.failed {
            self.counters.failed(reason);
        }
        let says = (*ready, *reason, &*shown(message));
        self.status.part(USER_CLUSTERS, |clusters| clusters.record(name, says, failed))
    }

    async fn write_condition(&self, cluster: &Cluster, readiness: &Readiness) -> Result<(), RequestError> {
        let says = (readiness.ready, readiness.reason, &*readiness.message);
        if write_condition(&self.client, cluster, USER_CLUSTER_READY, says).await?.is_some() {
            self.counters.wrote("Cluster");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use kube::runtime::reflector;
    use portico_expose::user_cluster::AgentSettings;
    use portico_kube::events::Events;
    use portico_kube::leader::Leads;
    use serde_json::json;
    use tokio::sync::watch as channel;

    use super::*;
    use crate::condition::condition;
    use crate::controllers::user_cluster::CONTROLLER;
    use crate::controllers::user_cluster::approver::Approvers;
    use crate::controllers::user_cluster::backoff::Backoffs;
    use crate::controllers::user_cluster::context::UserClusterSettings;
    use crate::installation::Installation;
    use crate::kkp::KkpWatch;
    use crate::observed::Observed;
    use crate::status::StatusHandle;
    use crate::testing::FakeApi;
    use crate::work_counters::WorkCounters;

    /// The context of a replica that knows nothing.
    fn context(api: &FakeApi) -> Context {
        let (client, status) = (api.client(), StatusHandle::default());
        let installation = Installation::new(&client, &status, true).0;
        Context {
            settings: UserClusterSettings {
                agents: AgentSettings {
                    image: None,
                    gateways: Vec::new(),
                    server_name: None,
                    tunnel_port: 8_088,
                },
                namespace: "portico".to_owned(),
                pass_timeout: Duration::MAX,
                name_servers: Vec::new(),
                hosted: None,
            },
            clusters: reflector::store().0,
            kkp: KkpWatch::new(&client, &installation, &status).0,
            installation,
            leads: channel::channel(Leads::default()).1,
            events: Events::new(client.clone(), CONTROLLER, "this"),
            counters: WorkCounters::new(CONTROLLER, &status),
            status,
            backoffs: Backoffs::default(),
            approvers: Approvers::default(),
            observed: Observed::new(),
            seen: Mutex::default(),
            client,
        }
    }

    #[tokio::test]
    async fn a_new_leader_writes_no_event_of_what_the_condition_says() {
        let readiness = Readiness::ready("all of it".to_owned());
        let (before, _) = condition(None, true, readiness.reason, &readiness.message);
        let cluster = json!({"metadata": {"name": "a"},
            "status": {"conditions": {USER_CLUSTER_READY: before}}});
        let api = FakeApi::default();
        api.put_of("clusters", cluster.clone());
        let cluster: Cluster = serde_json::from_value(cluster).unwrap();
        context(&api).mark(&cluster, &readiness).await;
        assert_eq!(api.reasons(), [""; 0]);
        context(&api).mark(&cluster, &Readiness::ready("more".to_owned())).await;
        assert_eq!(api.reasons(), ["Ready"]);
    }
}
