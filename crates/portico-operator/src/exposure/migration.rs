//! The migration of one cluster between strategies: what was seen of its doors, the next step, the record.
//!
//! [`portico_expose::migration::step`] decides, after a pass that left everything as the record asks for. The
//! record is written first; the pass after it opens or closes what it says. A process that is killed between
//! the two leaves a record that the next pass follows.

use std::time::Duration;

use kube::Api;
use kube::api::Patch;
use portico_api::annotations::{MIGRATION_LABEL, MIGRATION_LABEL_OURS};
use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::MigrationState;
use portico_api::migration::MIGRATION;
use portico_expose::exposure::standing_of_second;
use portico_expose::migration::{Fact, Facts, Next, Now, Proof, Use, step};
use portico_kube::events::{Note, Severity};
use portico_source::served::Served;
use serde_json::{Value, json};
use tracing::info;

use super::Context;
use super::gateways::routed;
use super::pass::Done;
use super::write::PassError;
use crate::cache::api;
use crate::condition::condition;
use crate::exposed::{Written, reference};
use crate::write::{as_portico, has_condition};

/// When to look again while a migration waits: what is outside of the seed tells nothing by itself.
const PERIOD: Duration = Duration::from_secs(10);

/// The reason of the condition once one door is left.
const SETTLED: &str = "Settled";

impl Context {
    /// Takes the next step of the migration of `cluster`, of which `version` was read, if there is one to
    /// take. Returns when to look again; `None` if nothing is under way.
    pub(super) async fn migrate(
        &self,
        cluster: &Cluster,
        version: Option<&str>,
        done: &Done,
    ) -> Result<Option<Duration>, PassError> {
        let name = &*cluster.metadata.name;
        let (now, wanted) = (done.doors.now, done.exposure.decision.strategy);
        if now.second.is_none() && now.first == wanted {
            self.status.clusters(|clusters| clusters.migrating.remove(name));
            if cluster.status.conditions.contains_key(MIGRATING) {
                let next = Next { now, waits_for: Vec::new(), later: None };
                self.write_migration(cluster, &next).await?;
            }
            self.tidy(cluster, version).await?;
            return Ok(None);
        }
        let mut facts = self.facts(cluster, done).await;
        if let Some(inside) = self.observed.of(name) {
            facts.add(&inside);
        }
        let clock = jiff::Timestamp::now();
        let next = step(now, wanted, &cluster.migration_settings(), &facts, clock);
        let goes_on = next.now != now;
        if goes_on {
            self.write_exposed(cluster, Some(&done.doors.moved_to(next.now))).await?;
        }
        self.status.clusters(|clusters| match next.now.second {
            Some(second) => clusters.migrating.insert(name.to_owned(), second.state),
            None => clusters.migrating.remove(name),
        });
        self.write_migration(cluster, &next).await?;
        if goes_on {
            self.tell_state(cluster, &next).await;
        }
        Ok(Some(if goes_on { Duration::ZERO } else { PERIOD }))
    }

    /// What is seen from here of what the present state waits for.
    async fn facts(&self, cluster: &Cluster, done: &Done) -> Facts {
        let Done { doors, exposure, found, .. } = done;
        let mut facts = Facts::unknown(doors.now);
        let proofs = &mut facts.proofs;
        match doors.now.second.map(|second| second.state) {
            // The label was looked at, and a cluster that cannot have two doors never comes here.
            None => _ = proofs.insert(Proof::Permission, Fact::So),
            Some(MigrationState::Opening) => {
                let address = match standing_of_second(exposure, found) {
                    Some(standing) if standing.exposed => Fact::So,
                    Some(standing) => Fact::NotSo(standing.message),
                    None => Fact::NotSo("it is not planned yet".to_owned()),
                };
                if let (Fact::So, Some(second)) = (&address, &exposure.second) {
                    let name = &cluster.metadata.name;
                    proofs.insert(Proof::Routes, routed(&found.gateways, name, &second.entries).await);
                }
                proofs.insert(Proof::Address, address);
            }
            Some(MigrationState::Moving) => {
                let told = cluster.status.address == exposure.plan.address;
                let waits = || Fact::NotSo("the Cluster has another one".to_owned());
                proofs.insert(Proof::Status, if told { Fact::So } else { waits() });
            }
            Some(MigrationState::Quieting) => {
                let name = &cluster.metadata.name;
                let used =
                    format!("connections by it are not counted; portico migrate {name} --finish closes it");
                facts.second_door = Some(Use::Used(used));
            }
            // The pass before this has removed it.
            Some(MigrationState::Closing) => _ = proofs.insert(Proof::GoneOnSeed, Fact::So),
            Some(MigrationState::Proving | MigrationState::MovingNodes) => {}
        }
        facts
    }

    async fn write_migration(&self, cluster: &Cluster, next: &Next) -> Result<(), PassError> {
        let before = cluster.status.conditions.get(MIGRATING);
        let state = next.now.second.map_or(SETTLED, |second| second.state.name());
        let settled = next.now.second.is_none() && next.waits_for.is_empty();
        let (condition, changed) = condition(before, settled, state, &next.to_string());
        if !changed {
            return Ok(());
        }
        // Merged: what is applied to the status names its own condition alone.
        let patch = json!({"metadata": {"uid": cluster.metadata.uid},
            "status": {"conditions": {MIGRATING: condition}}});
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (as_portico(), Patch::Merge(&patch));
        let written = clusters.patch_status(&cluster.metadata.name, &params, &patch);
        let written = self.request("status of the Cluster", written).await?;
        has_condition(&written, MIGRATING)?;
        self.tally.wrote("Cluster");
        Ok(())
    }

    /// Says in log and Event that a migration went on.
    async fn tell_state(&self, cluster: &Cluster, next: &Next) {
        let text = next.to_string();
        let reason = event_reason(next.now);
        info!(cluster = &*cluster.metadata.name, reason, "{text}");
        let note = Note { severity: Severity::Normal, reason, action: "MigrateCluster", text: &text };
        self.events.publish(&reference(cluster), note).await;
    }

    /// Takes off the Cluster what `portico migrate` wrote for one migration: the label, if it is that
    /// command's, and with it the order to close a door. Left behind, it would close the same door at once
    /// the next time round.
    async fn tidy(&self, cluster: &Cluster, version: Option<&str>) -> Result<(), PassError> {
        let metadata = &cluster.metadata;
        if metadata.labels.get(MIGRATION_LABEL).map(|value| &**value) != Some(MIGRATION_LABEL_OURS) {
            return Ok(());
        }
        let settings = metadata.annotation(MIGRATION).map(without_order);
        let annotations = settings.map(|left| json!({MIGRATION: left}));
        let patch = json!({"metadata": {"resourceVersion": version, "labels": {MIGRATION_LABEL: null},
            "annotations": annotations.unwrap_or_else(|| json!({}))}});
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (as_portico(), Patch::Merge(&patch));
        let written = clusters.patch(&metadata.name, &params, &patch);
        let written = self.request("label of the Cluster", written).await?;
        self.wrote_cluster(&written);
        Ok(())
    }

    /// Ends a record that applying could not: another manager has its fields too.
    pub(super) async fn end_record(&self, name: &str) -> Result<(), PassError> {
        let left = self.exposed.get("", name).map(|seen| seen.value());
        if left.is_none_or(|exposed| exposed.pointer("/spec/migration").is_none()) {
            return Ok(());
        }
        let patch = json!({"spec": {"migration": null}});
        let exposed = api::<Written>(&self.client, "");
        let (params, patch) = (as_portico(), Patch::Merge(&patch));
        let what = format!("spec.migration of ExposedCluster {name}");
        let written = self.request(&what, exposed.patch(name, &params, &patch)).await?;
        self.exposed.written(written);
        self.tally.wrote("ExposedCluster");
        Ok(())
    }
}

/// The settings in an annotation without an order to close; `null` if nothing is left.
fn without_order(annotation: &str) -> Value {
    let items = annotation.split(',').filter(|item| !item.trim().starts_with("close="));
    let left = items.collect::<Vec<_>>().join(",");
    if left.is_empty() { Value::Null } else { left.into() }
}

fn event_reason(now: Now) -> &'static str {
    match now.second.map(|second| second.state) {
        None => "MigrationSettled",
        Some(MigrationState::Opening) => "MigrationOpening",
        Some(MigrationState::Proving) => "MigrationProving",
        Some(MigrationState::Moving) => "MigrationMoving",
        Some(MigrationState::MovingNodes) => "MigrationMovingNodes",
        Some(MigrationState::Quieting) => "MigrationQuieting",
        Some(MigrationState::Closing) => "MigrationClosing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_to_close_goes_and_other_settings_stay() {
        for (written, left) in [
            ("close=NodePort", json!(null)),
            ("quiet=1m,close=NodePort", json!("quiet=1m")),
            ("quiet=1m", json!("quiet=1m")),
            ("close=NodePort, quiet=1m", json!(" quiet=1m")),
        ] {
            assert_eq!(without_order(written), left, "{written}");
        }
    }
}
