//! The status of a Cluster: address and condition.

use std::time::Duration;

use kube::Api;
use kube::api::Patch;
use portico_api::cluster::{Address, Cluster, EXPOSED};
use portico_expose::exposure::Reachability;
use portico_kube::apply::{applying, merging};
use portico_source::served::Served;
use serde_json::json;
use tokio::time::Instant;

use super::context::Context;
use super::reports::report;
use super::write::{reachability_after, unless_another_leads};
use crate::condition::condition_after;
use crate::write::{DEFINITION_OUTDATED, RequestError, WriteError, has_condition};

/// While the CustomResourceDefinition of Clusters drops conditions, one write is tried at this interval, to
/// see whether the definition was updated.
const PROBE: Duration = Duration::from_secs(10);

impl Context {
    /// Reports the status of a cluster: as a condition, in the log, as an Event. `failed` counts a failed
    /// pass, and so does a condition that cannot be written.
    pub(super) async fn mark(
        &self,
        cluster: &Cluster,
        reachability: &Reachability,
        address: Option<&Address>,
        failed: bool,
    ) -> Result<(), WriteError> {
        let outdated = *self.outdated_until();
        let written = if outdated.is_some_and(|until| Instant::now() < until) {
            Err(RequestError::Dropped { kind: "Clusters", field: "status.conditions" }.into())
        } else {
            let written = self.write_status(cluster, reachability, address, failed).await;
            let dropped =
                matches!(&written, Err(error) if reachability_after(error).reason == DEFINITION_OUTDATED);
            *self.outdated_until() = dropped.then(|| Instant::now() + PROBE);
            written
        };
        let (mut reported, mut again, mut failed) = (reachability.clone(), Ok(()), failed);
        if let Err(error) = written.or_else(unless_another_leads) {
            let why = reachability_after(&error);
            self.counters.failed(why.reason);
            if why.reason == DEFINITION_OUTDATED {
                // Until there are newer ones, which nothing tells: only Event, log and status can say it.
                failed = true;
                let Reachability { exposed, reason, message } = reachability;
                let message = format!("{reason}: {message}; the condition does not say so: {}", why.message);
                reported = Reachability { exposed: *exposed, reason: why.reason, message };
            } else {
                again = Err(error);
            }
        }
        report(cluster, &reported, failed || again.is_err(), &self.status, &self.events).await;
        again
    }

    /// Writes address and condition, if they say something else than before. Without an address that of
    /// before stays.
    async fn write_status(
        &self,
        cluster: &Cluster,
        reachability: &Reachability,
        address: Option<&Address>,
        failed: bool,
    ) -> Result<(), WriteError> {
        let Reachability { exposed, reason, message } = reachability;
        let (name, own) = (&*cluster.metadata.name, cluster.name().namespace());
        let before = cluster.status.conditions.get(EXPOSED);
        let (condition, changed) = condition_after(before, (*exposed, reason, message), failed);
        let moved =
            |address: &Address| cluster.status.address != *address || *cluster.status.namespace_name != *own;
        if !changed && !address.is_some_and(moved) {
            return Ok(());
        }
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let Some(address) = address else {
            // The one that was read may be older than the one that was written last.
            let patch = json!({"status": {"conditions": {EXPOSED: condition}}});
            let (params, patch) = (merging(), Patch::Merge(&patch));
            let written = clusters.patch_status(name, &params, &patch);
            let written = self.request("status of the Cluster", written).await?;
            return self.wrote_status(&written);
        };
        let status = json!({"namespaceName": own, "address": address, "conditions": {EXPOSED: condition}});
        let object = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
            "metadata": {"name": name}, "status": status});
        let (params, patch) = (applying(), Patch::Apply(&object));
        let written = clusters.patch_status(name, &params, &patch);
        let written = self.request("status of the Cluster", written).await?;
        self.wrote_status(&written)
    }

    /// The Cluster as it was written, with the condition.
    fn wrote_status(&self, written: &Served<Cluster>) -> Result<(), WriteError> {
        has_condition(written, EXPOSED)?;
        self.wrote_cluster(written);
        Ok(())
    }
}
