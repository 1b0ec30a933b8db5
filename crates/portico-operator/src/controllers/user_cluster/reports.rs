//! Status of the inside of every cluster: as a condition, in the log and as an Event when it changes, and in
//! `/status`.

use portico_api::cluster::{Cluster, USER_CLUSTER_READY};
use portico_expose::user_cluster::NO_KUBECONFIG;
use portico_kube::events::{Note, Severity};
use tracing::debug;

use super::context::{Context, USER_CLUSTERS};
use super::subject::{NOT_EXPOSED, Readiness};
use crate::condition::{shown, write_condition};
use crate::news::News;
use crate::write::RequestError;

/// Reasons that are no trouble, and stand neither in the log nor in an Event. A new cluster has them, and so
/// does one whose inside is somebody else's.
const EXPECTED: [&str; 2] = [NOT_EXPOSED, NO_KUBECONFIG];

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
        let Some(news) = self.record(&cluster.metadata.name, readiness, failed) else {
            return failed;
        };
        if EXPECTED.contains(reason) {
            return failed;
        }
        let severity = if *ready { Severity::Normal } else { Severity::Warning };
        let note = Note { severity, reason, action: "KeepUserCluster", text: message };
        news.publish(cluster, (USER_CLUSTER_READY, *ready), note, &self.events).await;
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
