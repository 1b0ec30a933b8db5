//! Status of every control plane: as conditions and health of its Cluster, in the log and as an Event when it
//! changes, and in `/status`.

use kube::Api;
use kube::api::Patch;
use portico_api::cluster::{CONTROL_PLANE_READY, Cluster, ETCD_INITIALIZED, INITIALIZED, UP_TO_DATE};
use portico_kube::apply::merging;
use portico_kube::events::{Note, Severity};
use portico_source::served::Served;
use serde_json::{Map, Value, json};

use super::context::{ACTION, AUTHORITIES_END, CONTROL_PLANES, Context};
use super::health::{self, Health};
use crate::condition::{State, condition, condition_after, shown};
use crate::write::{WriteError, has_condition, must_lead, request};

/// States of every control plane that begins or ends. They cause neither a warning in the log nor one on the
/// Cluster.
const EXPECTED: [&str; 3] = ["NotExposed", "Starting", "Terminating"];

impl Context {
    /// Reports the status of a control plane. `failed` counts a failed pass, and so does a status that cannot
    /// be written.
    pub(super) async fn report(
        &self,
        cluster: &Cluster,
        state: &State,
        health: Option<&Health>,
        failed: bool,
    ) -> Result<(), WriteError> {
        let written = self.write_status(cluster, state, health, failed).await;
        let gone = written.as_ref().is_err_and(WriteError::is_not_found);
        let written = if gone { Ok(()) } else { written };
        self.record(cluster, state, failed || written.is_err()).await;
        written
    }

    /// Records the status of a control plane, and reports it if it changed.
    pub(super) async fn record(&self, cluster: &Cluster, state: &State, failed: bool) {
        let name = &*cluster.metadata.name;
        let State { ready, reason, message } = state;
        let message = &shown(message);
        let news =
            self.status.part(CONTROL_PLANES, |planes| planes.record(name, (*ready, reason, message), failed));
        let Some(news) = news else { return };
        let well = (*ready || EXPECTED.contains(reason)) && *reason != AUTHORITIES_END;
        let severity = if well { Severity::Normal } else { Severity::Warning };
        let note = Note { severity, reason, action: ACTION, text: message };
        news.publish(cluster, (CONTROL_PLANE_READY, *ready), note, &self.events).await;
    }

    /// Writes conditions, health and phase, if they say something else than before.
    async fn write_status(
        &self,
        cluster: &Cluster,
        state: &State,
        health: Option<&Health>,
        failed: bool,
    ) -> Result<(), WriteError> {
        let Some(status) = status(cluster, state, health, failed) else { return Ok(()) };
        must_lead(&self.leads)?;
        let patch = json!({ "status": status });
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (merging(), Patch::Merge(&patch));
        let written = clusters.patch_status(&cluster.metadata.name, &params, &patch);
        let written = request("status of the Cluster", written).await?;
        has_condition(&written, CONTROL_PLANE_READY)?;
        self.written.wrote(&written);
        self.counters.wrote("Cluster");
        Ok(())
    }
}

/// The conditions that KKP's tools wait for. They say whether all pods are as they should be, and whether
/// everything has run once.
fn kkp_conditions(cluster: &Cluster, whole: bool, ready: bool) -> impl Iterator<Item = (String, Value)> {
    let (reason, message) = if whole {
        ("ClusterUpdateSuccessful", "all programs of the control plane are as they should be")
    } else {
        ("ClusterUpdateInProgress", "PorticoControlPlaneReady says which programs are not there yet")
    };
    let (now, changed) = condition(cluster.status.conditions.get(UP_TO_DATE), whole, reason, message);
    let first = (ready && !cluster.is_true(INITIALIZED)).then(|| {
        let (first, _) = condition(None, true, "ClusterInitialized", "the control plane has been ready");
        (INITIALIZED.to_owned(), first)
    });
    changed.then(|| (UP_TO_DATE.to_owned(), now)).into_iter().chain(first)
}

/// What of the status of `cluster` is to be another one.
fn status(cluster: &Cluster, state: &State, health: Option<&Health>, failed: bool) -> Option<Value> {
    let before = &cluster.status;
    let mut status = Map::new();
    let mut conditions = Map::new();
    let State { ready, reason, message } = state;
    let own = before.conditions.get(CONTROL_PLANE_READY);
    let (own, changed) = condition_after(own, (*ready, reason, message), failed);
    if changed {
        conditions.insert(CONTROL_PLANE_READY.to_owned(), own);
    }
    let served = health.is_some_and(|health| health::serves(&health.components));
    if served && !cluster.has_held_data() {
        let message = "the API server has served: etcd holds data, and authorities are in use";
        let (first, _) = condition(None, true, "Served", message);
        conditions.insert(ETCD_INITIALIZED.to_owned(), first);
    }
    if let Some(whole) = health.and_then(|health| health.rolled_out) {
        conditions.extend(kkp_conditions(cluster, whole, whole && *ready));
    }
    if !conditions.is_empty() {
        status.insert("conditions".to_owned(), Value::Object(conditions));
    }
    let was_up = cluster.has_held_data() || served;
    if let Some(Health { layout, components, .. }) = health {
        let health = health::extended(components, *layout, was_up);
        let differs = |(key, value): (&String, &Value)| {
            before.extended_health.get(&**key).unwrap_or(&Value::Null) != value
        };
        if health.iter().any(differs) {
            status.insert("extendedHealth".to_owned(), Value::Object(health));
        }
    }
    let phase = match (cluster.metadata.deletion_timestamp, was_up) {
        (Some(_), _) => "Terminating",
        (None, true) => "Running",
        (None, false) => "Creating",
    };
    if &*before.phase != phase {
        status.insert("phase".to_owned(), json!(phase));
    }
    (!status.is_empty()).then_some(Value::Object(status))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use jiff::{SignedDuration, Timestamp};
    use portico_kube::events::Events;
    use portico_kube::leader::Leads;
    use portico_lab::log_lines::LogLines;
    use portico_pki::KeyKind;
    use tokio::sync::watch as channel;
    use tracing::Level;

    use super::*;
    use crate::cache::Cache;
    use crate::clusters::{ClusterWatch, LastWritten};
    use crate::controllers::hosting::CONTROLLER;
    use crate::controllers::hosting::alarms::Alarms;
    use crate::controllers::hosting::context::HostingSettings;
    use crate::installation::Installation;
    use crate::kkp::KkpWatch;
    use crate::status::StatusHandle;
    use crate::testing::FakeApi;
    use crate::work_counters::WorkCounters;

    /// The context of a replica that knows nothing.
    fn context(api: &FakeApi) -> Context {
        let (client, status) = (api.client(), StatusHandle::default());
        let installation = Installation::new(&client, &status, true).0;
        Context {
            settings: HostingSettings {
                plan: portico_hosting::Settings::default(),
                namespace: "portico".to_owned(),
                keys: KeyKind::EcdsaP256,
                clock: Timestamp::now,
                alarm_period: Duration::MAX,
                deletion_patience: SignedDuration::MAX,
            },
            clusters: ClusterWatch::new(&client, &status).0,
            exposed: Arc::new(Cache::new().0),
            kinds: Vec::new(),
            pods: Arc::new(Cache::new().0),
            alarms: Alarms::default(),
            kkp: KkpWatch::new(&client, &installation, &status).0,
            installation,
            leads: channel::channel(Leads::default()).1,
            events: Events::new(client.clone(), CONTROLLER, "this"),
            counters: WorkCounters::new(CONTROLLER, &status),
            status,
            backoffs: Mutex::default(),
            written: LastWritten::default(),
            client,
        }
    }

    fn cluster(conditions: Value) -> Cluster {
        let status = json!({"phase": "Creating", "conditions": conditions});
        serde_json::from_value(json!({"metadata": {"name": "a"}, "status": status})).unwrap_or_default()
    }

    #[tokio::test]
    async fn the_log_has_no_more_of_what_somebody_wrote_than_the_condition() {
        let (lines, _collects) = LogLines::collect(|line| *line.level() == Level::WARN);
        let state = State::bad("InvalidConfiguration", "x".repeat(50_000));
        context(&FakeApi::default()).record(&cluster(json!({})), &state, false).await;
        assert_eq!(lines.messages().iter().map(|line| line.chars().count()).collect::<Vec<_>>(), [2_001]);
    }

    #[test]
    fn a_pass_that_fails_again_writes_nothing_for_another_text() {
        let (before, _) = condition(None, false, "WriteRefused", "from port 53422");
        let conditions = json!({CONTROL_PLANE_READY: before});
        let cluster = cluster(conditions);
        let state = State::bad("WriteRefused", "from port 53423".to_owned());
        assert_eq!(status(&cluster, &state, None, true), None);
        assert!(status(&cluster, &state, None, false).is_some());
    }
}
