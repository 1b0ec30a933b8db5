//! The migration of one cluster between strategies: what was seen of its doors, the next step, the record.
//!
//! [`portico_expose::migration::step`] decides, after a pass that left everything as the record asks for. The
//! record is written first; the pass after it opens or closes what it says. A process that is killed between
//! the two leaves a record that the next pass follows.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::Patch;
use portico_api::annotations::{MIGRATION_LABEL, MIGRATION_LABEL_OURS};
use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::MigrationState;
use portico_api::migration::{MIGRATION, ROLLBACK, SETTLED};
use portico_expose::doors::told_apart;
use portico_expose::exposure::{Exposure, reachability_of_second};
use portico_expose::migration::last_use::LastUse;
use portico_expose::migration::{Fact, Facts, Next, Now, Proof, Use, step};
use portico_expose::strategy::FRONT;
use portico_kube::apply::merging;
use portico_kube::cached::Cached;
use portico_kube::events::{Note, Severity};
use portico_source::served::Served;
use serde_json::{Value, json};
use tracing::info;

use super::context::Context;
use super::gateways::{counted, routed};
use super::pass::Done;
use crate::cache::api;
use crate::condition::{shown, write_condition};
use crate::controllers::exposed::reference;
use crate::write::{WriteError, must_lead};

/// When to look again while a migration waits. Nothing outside of the seed triggers a look by itself.
const PERIOD: Duration = Duration::from_secs(10);

/// Clients of this period are always among those to name, also where the setting `quiet` is shorter.
const RECENT: Duration = Duration::from_secs(600);

impl Context {
    /// Takes the next step of the migration of `cluster`, of which `version` was read, if there is one to
    /// take. Returns when to look again; `None` if nothing is under way.
    pub(super) async fn migrate(
        &self,
        cluster: &Cluster,
        version: Option<&str>,
        done: &Done,
    ) -> Result<Option<Duration>, WriteError> {
        let name = &*cluster.metadata.name;
        let (now, wanted) = (done.doors.now, done.exposure.decision.strategy);
        if now.second.is_none_or(|second| second.state != MigrationState::Quieting) {
            self.watched().remove(name);
        }
        if now.second.is_none() && now.first == wanted {
            self.status.clusters(|clusters| clusters.migrating.remove(name));
            if cluster.status.conditions.contains_key(MIGRATING) {
                let next = Next { now, waits_for: Vec::new(), later: None, aside: None };
                self.write_migration(cluster, &next).await?;
            }
            self.tidy(cluster, version).await?;
            return Ok(None);
        }
        let facts = self.facts(cluster, done).await?;
        let settings = cluster.migration_settings();
        let next = step(now, wanted, &settings, &facts, Timestamp::now());
        let goes_on = next.now != now;
        // The order was for the door as it was before.
        let opens = next.now.second.filter(|second| goes_on && second.state == MigrationState::Opening);
        if opens.is_some_and(|door| settings.is_ok_and(|settings| settings.close == Some(door.strategy))) {
            self.drop_order(cluster, version, json!({})).await?;
        }
        if goes_on && self.write_exposed(cluster, Some(&done.doors.moved_to(next.now))).await?.is_some() {
            return Ok(Some(PERIOD));
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

    /// The observations that the present state waits for, from here and inside the cluster.
    async fn facts(&self, cluster: &Cluster, done: &Done) -> Result<Facts, WriteError> {
        let Done { doors, exposure, found, .. } = done;
        let mut facts = Facts::unknown(doors.now);
        let inside = self.observed.of(&cluster.metadata.name);
        if let Some(inside) = &inside {
            facts.add(&inside.facts);
        }
        let proofs = &mut facts.proofs;
        match doors.now.second.map(|second| second.state) {
            // Always holds here. Without the label the pass has stopped, and a cluster with only one possible
            // door changes at once.
            None => _ = proofs.insert(Proof::Permission, Fact::So),
            Some(MigrationState::Opening) => {
                let address = match reachability_of_second(exposure, found) {
                    Some(reachability) if reachability.exposed => Fact::So,
                    Some(reachability) => Fact::NotSo(reachability.message),
                    None => Fact::NotSo("it is not planned yet".to_owned()),
                };
                if let (Fact::So, Some(second)) = (&address, &exposure.second) {
                    let (name, by) = (&cluster.metadata.name, second.answered_by);
                    proofs.insert(Proof::Routes, routed(&found.gateways, name, &second.entries, by).await);
                }
                proofs.insert(Proof::Address, address);
            }
            Some(MigrationState::Proving) => {
                let tried = inside.filter(|inside| inside.facts.of == doors.now);
                proofs
                    .extend(tried.map(|it| (Proof::SameAddress, is_same(&doors.second.url, &it.second_url))));
            }
            Some(MigrationState::Moving) => {
                let is_published = cluster.status.address == exposure.plan.address;
                let waits = || Fact::NotSo("the Cluster has another one".to_owned());
                proofs.insert(Proof::Status, if is_published { Fact::So } else { waits() });
            }
            Some(MigrationState::Quieting) => facts.second_door = self.use_of_second(cluster, done).await,
            Some(MigrationState::Closing) => {
                proofs.insert(Proof::GoneOnSeed, self.gone_on_seed(cluster, exposure).await?);
            }
            Some(MigrationState::MovingNodes) => {}
        }
        Ok(facts)
    }

    /// Whether the door that is to close is still used, as every gateway says. Gateways that are not ready
    /// are asked too: they may have connections of before. `None` if the door is not planned yet.
    async fn use_of_second(&self, cluster: &Cluster, done: &Done) -> Option<Use> {
        let name = &*cluster.metadata.name;
        let Done { doors, exposure, .. } = done;
        let kinds = match told_apart(exposure.second.as_ref()?, &exposure.plan) {
            Ok(kinds) => kinds,
            Err(why) => return Some(Use::Used(format!("{why}; portico migrate {name} --finish closes it"))),
        };
        let answers = match counted(&self.all_gateway_addresses(), name, &kinds).await {
            Ok(answers) => answers,
            Err(why) => return Some(Use::Used(why)),
        };
        let quiet = cluster.migration_settings().unwrap_or_default().quiet;
        let clock = Timestamp::now();
        let mut watched = self.watched();
        let last_use = watched.entry(name.to_owned()).or_insert_with(|| LastUse::new(doors.now, clock));
        if last_use.of() != doors.now {
            *last_use = LastUse::new(doors.now, clock);
        }
        Some(last_use.update(&answers, quiet.max(RECENT), clock))
    }

    /// Whether the load balancer Service of a closed door is gone, which an earlier pass has deleted. The
    /// cloud's controller may hold it for minutes.
    async fn gone_on_seed(&self, cluster: &Cluster, exposure: &Exposure) -> Result<Fact, WriteError> {
        if exposure.services.iter().any(|service| service.name == FRONT) {
            return Ok(Fact::So);
        }
        let own = cluster.name().namespace();
        // Asked, for the watch may be behind.
        let services = api::<Service>(&self.client, &own);
        let what = format!("reading Service {own}/{FRONT}");
        let left = self.request(&what, services.get_opt(FRONT)).await?;
        Ok(match left.filter(Cached::is_ours) {
            None => Fact::So,
            Some(_) => Fact::NotSo(format!(
                "Service {FRONT} is being deleted, and something holds it: kubectl -n {own} get service \
                 {FRONT} -o yaml shows its finalizers"
            )),
        })
    }

    async fn write_migration(&self, cluster: &Cluster, next: &Next) -> Result<(), WriteError> {
        let state = next.now.second.map_or(SETTLED, |second| second.state.name());
        let settled = next.now.second.is_none() && next.waits_for.is_empty();
        must_lead(&self.leads)?;
        let says = (settled, state, &*next.to_string());
        if let Some(written) = write_condition(&self.client, cluster, MIGRATING, says).await? {
            self.wrote_cluster(&written);
        }
        Ok(())
    }

    /// Says in log and Event that a migration went on.
    async fn tell_state(&self, cluster: &Cluster, next: &Next) {
        let text = shown(&next.to_string());
        let reason = event_reason(next.now);
        info!(cluster = &*cluster.metadata.name, reason, "{text}");
        let note = Note { severity: Severity::Normal, reason, action: "MigrateCluster", text: &text };
        self.events.publish(&reference(cluster), note).await;
    }

    /// Takes off the Cluster the settings for one migration. These are the order to close a door, the mark of
    /// a rollback, and the label if it is that of `portico migrate`. Left behind, the order would close the
    /// same door at once the next time round.
    async fn tidy(&self, cluster: &Cluster, version: Option<&str>) -> Result<(), WriteError> {
        let metadata = &cluster.metadata;
        let mut more = json!({});
        if metadata.label(MIGRATION_LABEL) == Some(MIGRATION_LABEL_OURS) {
            more["labels"] = json!({MIGRATION_LABEL: null});
        }
        if metadata.annotation(ROLLBACK).is_some() {
            more["annotations"] = json!({ROLLBACK: null});
        }
        let ordered = cluster.migration_settings().is_ok_and(|settings| settings.close.is_some());
        if ordered || more != json!({}) { self.drop_order(cluster, version, more).await } else { Ok(()) }
    }

    /// Takes the order to close a door off the Cluster; `metadata` is what is changed with it.
    async fn drop_order(
        &self,
        cluster: &Cluster,
        version: Option<&str>,
        mut metadata: Value,
    ) -> Result<(), WriteError> {
        metadata["resourceVersion"] = json!(version);
        if let Some(settings) = cluster.metadata.annotation(MIGRATION) {
            metadata["annotations"][MIGRATION] = without_order(settings);
        }
        let patch = json!({"metadata": metadata});
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (merging(), Patch::Merge(&patch));
        let written = clusters.patch(&cluster.metadata.name, &params, &patch);
        let what = format!("label and annotations {MIGRATION} and {ROLLBACK} of the Cluster");
        let written = self.request(&what, written).await?;
        self.wrote_cluster(&written);
        Ok(())
    }
}

/// Whether `url`, the second door's present address, is `tried`, where the proofs were made.
fn is_same(url: &str, tried: &str) -> Fact {
    match (url, tried) {
        ("", _) => Fact::NotSo("it has none any more".to_owned()),
        (url, tried) if url == tried => Fact::So,
        (url, tried) => Fact::NotSo(format!("it is {url} by now, and {tried:?} was tried")),
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
    use std::sync::{Arc, Mutex};

    use http::StatusCode;
    use portico_api::cluster::EXPOSED;
    use portico_api::seed::Seed;
    use portico_api::strategy::ExposeStrategy;
    use portico_expose::doors::Doors;
    use portico_expose::exposure::{Found, exposure, reachability};
    use portico_expose::validate::usable;
    use portico_kube::events::Events;
    use portico_kube::leader::Leads;
    use portico_source::Object;
    use tokio::sync::watch as channel;

    use super::*;
    use crate::Settings;
    use crate::cache::Cache;
    use crate::clusters::{ClusterWatch, LastWritten};
    use crate::controllers::exposure::resolver::Resolver;
    use crate::controllers::exposure::{CONTROLLER, ExposureSettings};
    use crate::installation::Installation;
    use crate::kkp::KkpWatch;
    use crate::leadership::elect_front;
    use crate::observed::Observed;
    use crate::status::StatusHandle;
    use crate::testing::{FakeApi, plan};
    use crate::work_counters::WorkCounters;

    /// The context of a replica that leads and knows nothing.
    async fn context(api: &FakeApi) -> Context {
        let (client, status) = (api.client(), StatusHandle::default());
        let (leading, mut leads) = channel::channel(Leads::default());
        tokio::spawn(elect_front(client.clone(), Settings::new(plan(), "this"), leading));
        leads.wait_for(|leads| leads.now()).await.unwrap();
        let installation = Installation::new(&client, &status, true).0;
        Context {
            settings: ExposureSettings {
                front: plan().front,
                sni_port: 6_443,
                node_ips: Vec::new(),
                name_servers: Vec::new(),
            },
            clusters: ClusterWatch::new(&client, &status).0,
            namespaces: Arc::new(Cache::new().0),
            services: Arc::new(Cache::new().0),
            slices: Arc::new(Cache::new().0),
            exposed: Arc::new(Cache::new().0),
            gateways: Arc::new(Cache::new().0),
            api_servers: Arc::new(Cache::new().0),
            kkp: KkpWatch::new(&client, &installation, &status).0,
            resolver: Resolver::new(&[]).0,
            observed: Observed::new(),
            watched: Mutex::default(),
            installation,
            leads,
            events: Events::new(client.clone(), CONTROLLER, "this"),
            counters: WorkCounters::new(CONTROLLER, &status),
            status,
            backoffs: Mutex::default(),
            written: LastWritten::default(),
            outdated_until: Mutex::default(),
            client,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_pass_after_a_step_works_from_the_cluster_that_the_step_has_written() {
        let api = FakeApi::default();
        api.put_of("clusters", json!({"metadata": {"name": "a", "uid": "1"}, "spec": {}}));
        let read = |object| -> Served<Cluster> { serde_json::from_value(object).unwrap() };
        let now = || read(api.all_of("clusters").remove(0));
        let (context, before) = (context(&api).await, now());
        let Ok(Object::Cluster(cluster)) = &before.object else { panic!("{:?}", before.object) };
        let now_settled = Now::settled(ExposeStrategy::Tunneling);
        let next = Next { now: now_settled, waits_for: Vec::new(), later: None, aside: None };
        context.write_migration(cluster, &next).await.unwrap();
        assert!(context.written.is_ahead_of(&before) && !context.written.is_ahead_of(&now()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_mark_of_a_rollback_stays_until_one_door_is_left() {
        let api = FakeApi::default();
        let annotations = json!({MIGRATION: "quiet=1m,close=NodePort", ROLLBACK: "NodePort"});
        let labels = json!({MIGRATION_LABEL: "portico"});
        let metadata = json!({"name": "a", "uid": "1", "labels": labels, "annotations": annotations});
        api.put_of("clusters", json!({"metadata": metadata, "spec": {}}));
        let context = context(&api).await;
        let metadata = || api.all_of("clusters").remove(0)["metadata"].clone();
        let read = || -> Cluster { serde_json::from_value(api.all_of("clusters").remove(0)).unwrap() };
        context.drop_order(&read(), None, json!({})).await.unwrap();
        assert_eq!(metadata()["annotations"], json!({MIGRATION: "quiet=1m", ROLLBACK: "NodePort"}));
        context.tidy(&read(), None).await.unwrap();
        assert_eq!(metadata()["annotations"], json!({MIGRATION: "quiet=1m"}));
        assert!(metadata()["labels"][MIGRATION_LABEL].is_null());
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_that_is_refused_again_and_again_writes_one_condition() {
        let api = FakeApi::default();
        let metadata = json!({"name": "a", "uid": "1", "annotations": {ROLLBACK: "NodePort"}});
        let spec = json!({"exposeStrategy": "Tunneling", "cloud": {"dc": "lab-1"}});
        api.put_of("clusters", json!({"metadata": metadata, "spec": spec}));
        api.refuse_writes(Some(StatusCode::FORBIDDEN));
        let context = context(&api).await;
        let seed = json!({"metadata": {"name": "north"}, "spec": {"datacenters": {"lab-1": {}}}});
        let seeds: [Arc<Seed>; 1] = [serde_json::from_value(seed).map(Arc::new).unwrap()];
        let ingress = json!({"domain": "kkp.invalid"});
        let configuration =
            serde_json::from_value(json!({"metadata": {"name": "kkp"}, "spec": {"ingress": ingress}}))
                .unwrap();
        let mut written = Vec::new();
        for _ in 0..3 {
            let cluster: Cluster = serde_json::from_value(api.all_of("clusters").remove(0)).unwrap();
            let scope = usable(&cluster, &seeds, Some(&configuration)).unwrap();
            let found = Found::default();
            let exposure = exposure(scope, &found, 6_443).unwrap();
            let doors = Doors::new(&cluster, exposure.decision.strategy);
            let reachability = reachability(&exposure, &found);
            let done = Done { reachability, doors, exposure, found, whole: true };
            let error = context.conclude(&cluster, None, &done).await.unwrap_err();
            assert_eq!(error.reason(), "WriteRefused");
            written.push(api.all_of("clusters").remove(0));
        }
        assert_eq!(written[0]["status"]["conditions"][EXPOSED]["reason"], "WriteRefused");
        assert_eq!(written[0]["status"]["address"]["externalName"], "a.north.kkp.invalid");
        assert_eq!([&written[1], &written[2]], [&written[0]; 2]);
    }

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
