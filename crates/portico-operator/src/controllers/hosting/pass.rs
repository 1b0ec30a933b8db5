//! One pass over the control plane of a cluster: Secrets first, then objects in the order of their plan.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use portico_api::annotations::LAYOUT;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::hosting::Layout;
use portico_api::meta::ObjectKey;
use portico_api::seed::Seed;
use portico_expose::doors::Doors;
use portico_expose::inputs::{Inputs, Known, LoadBalancers, Scope};
use portico_expose::validate::usable;
use portico_hosting::{ControlPlane, pki, plan};
use portico_kube::events::{Note, Severity};
use serde_json::Value;
use tokio::time::Instant;
use tracing::warn;

use super::alarms::Alarm;
use super::context::{ACTION, AUTHORITIES_END, Context, INVALID};
use super::health::{self, Component, Health};
use super::kinds::{Kind, Shared};
use super::secrets::Reviewed;
use crate::cache::api;
use crate::clock::{CLOCK_OFF, CLOCK_PERIOD, waits};
use crate::condition::{State, one_text};
use crate::contention::RepairBackoffs;
use crate::controllers::exposed::reference;
use crate::controllers::exposure::belongs_to;
use crate::installation::SeveralConfigurations;
use crate::managed::Put;
use crate::write::{PUT_BACK, WriteError, is_terminating, must_lead, part, request};

/// Kinds of which something may belong to no plan any more. Nothing that holds data is among them.
const PRUNED: [&str; 4] = [ConfigMap::KIND, NetworkPolicy::KIND, PodDisruptionBudget::KIND, Deployment::KIND];

/// Kinds of which pods are made.
const WORKLOADS: [&str; 2] = [StatefulSet::KIND, Deployment::KIND];

/// How often to look whether the volumes of etcd are restored: no watch tells of claims without labels.
const RESTORE_PERIOD: Duration = Duration::from_secs(30);

/// A cluster, with what it stands in.
pub(super) struct Subject<'a> {
    pub(super) scope: Scope<'a>,
    pub(super) namespace: String,
    layout: Layout,
}

/// What a pass found.
pub(super) struct Outcome {
    pub(super) state: State,
    /// The programs, where that is known.
    pub(super) health: Option<Health>,
    /// When to look again without any change.
    pub(super) due: Option<Duration>,
}

impl Subject<'_> {
    /// Whether its etcd has held data.
    pub(super) fn is_initialized(&self) -> bool {
        self.scope.cluster.has_held_data()
    }

    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::new(&self.namespace, name)
    }
}

impl Context {
    /// Makes the control plane of `cluster` as it should be. Returns its status then.
    pub(super) async fn pass(&self, cluster: &Cluster) -> Result<Outcome, WriteError> {
        let seeds = self.installation.seeds.seeds();
        let configuration = self.installation.configurations.one();
        let (scope, layout) = match self.usable(cluster, &seeds, &configuration) {
            Ok(usable) => usable,
            Err(message) => return self.stopped(cluster, INVALID, message).await,
        };
        let subject = Subject { scope, namespace: cluster.name().namespace().to_string(), layout };
        let Some(exposed) = self.exposed(&subject).await? else {
            let message = "waits until the cluster is exposed: the condition PorticoExposed says how that \
                           stands";
            return self.stopped(cluster, "NotExposed", message.to_owned()).await;
        };
        let backoffs = self.backoffs(&cluster.metadata.name);
        let yielded = lock(&backoffs).yielded(Instant::now());
        if let Some(message) = yielded {
            let message = format!("{message}; stop that writer, this one waits");
            let stopped = self.stopped(cluster, "ForeignWriter", message).await?;
            let due = stopped.due.into_iter().chain(self.backoff_due(&backoffs)).min();
            return Ok(Outcome { due, ..stopped });
        }
        let mut held = self.secrets(&subject.namespace).await?;
        let used =
            subject.is_initialized() || !self.ours_in(StatefulSet::KIND, &subject.namespace).is_empty();
        let doors = Doors::of(&exposed.spec);
        let pki = {
            // Load balancers and NodePorts need not be known: certificates take addresses from `doors`.
            let (known, node_ports) = (Known::default(), |_: &str, _: &str| None);
            let load_balancers = LoadBalancers::CloudAndGateway;
            let inputs =
                Inputs { scope, node_ports: &node_ports, known: &known, load_balancers, sni_port: 0 };
            pki(&inputs, &doors, layout, self.settings.keys)
        };
        let reviewed = self.reconcile_secrets(cluster, &pki, &mut held, used).await?;
        let due = self.next(&reviewed, &backoffs);
        if let Some(state) = secrets_state(&reviewed) {
            return Ok(Outcome { state, health: None, due });
        }
        let plane = match plan(&scope, &self.settings.plan, &held.digests()) {
            Ok(plane) => plane,
            Err(problems) => {
                let state = State::bad(INVALID, one_text(&problems));
                return Ok(Outcome { state, health: None, due });
            }
        };
        if let Some(state) = self.another_shape(&subject, &plane) {
            return Ok(Outcome { state, health: None, due });
        }
        if let Some(state) = self.data_lost(&subject).await? {
            let due = due.into_iter().chain([RESTORE_PERIOD]).min();
            return Ok(Outcome { state, health: None, due });
        }
        if let Err(error) = self.copy_pull_secrets(cluster).await {
            // Most images need none of them, and pods say what they lack.
            must_lead(&self.leads)?;
            self.counters.failed(error.reason());
            warn!(cluster = &*cluster.metadata.name, %error, "credentials of a registry are not copied");
        }
        self.apply(&subject, &plane, &backoffs).await?;
        self.prune(&subject, &plane, &backoffs).await?;
        let workloads = plane.objects.iter().filter(|object| WORKLOADS.contains(&names(object).0));
        let components = self.components(&subject.namespace, workloads);
        let state = state(&subject, &plane, &components, self.alarms.of(cluster));
        let state = with_endings(state, reviewed.review.ending_authorities((self.settings.clock)()));
        let rolled_out = Some(self.is_rolled_out(&subject, &plane));
        Ok(Outcome { state, health: Some(Health { layout, components, rolled_out }), due })
    }

    /// Why `cluster` cannot be hosted as it is written.
    pub(super) fn refusal(&self, cluster: &Cluster) -> Option<String> {
        let (seeds, configuration) =
            (self.installation.seeds.seeds(), self.installation.configurations.one());
        self.usable(cluster, &seeds, &configuration).err()
    }

    /// The scope of a Cluster, and its layout; or why it cannot be hosted.
    fn usable<'a>(
        &self,
        cluster: &'a Cluster,
        seeds: &'a [Arc<Seed>],
        configuration: &'a Result<Option<KubermaticConfiguration>, SeveralConfigurations>,
    ) -> Result<(Scope<'a>, Layout), String> {
        let configuration = configuration.as_ref().map_err(ToString::to_string)?;
        let scope = usable(cluster, seeds, configuration.as_ref()).map_err(|all| one_text(&all))?;
        let verdict = portico_hosting::validate(&scope, &self.settings.plan);
        let layout = cluster.metadata.annotation(LAYOUT).and_then(|text| text.parse().ok());
        let layout = layout.filter(|_| !verdict.refused).ok_or_else(|| one_text(&verdict.problems))?;
        Ok((scope, layout))
    }

    /// Nothing is made before something changes; what exists lives on.
    async fn stopped(
        &self,
        cluster: &Cluster,
        reason: &'static str,
        message: String,
    ) -> Result<Outcome, WriteError> {
        let due = self.renew(cluster).await?;
        Ok(Outcome { state: State::bad(reason, message), health: None, due })
    }

    /// The ExposedCluster, once the cluster has its namespace.
    async fn exposed(&self, subject: &Subject<'_>) -> Result<Option<ExposedCluster>, WriteError> {
        let cluster = subject.scope.cluster;
        let Some(seen) = self.exposed.get("", &cluster.metadata.name) else { return Ok(None) };
        let value = seen.value();
        let owner = value.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
        if owner != Some(&cluster.metadata.uid) {
            // It is the record of an earlier Cluster of the same name.
            return Ok(None);
        }
        let namespaces = api::<Namespace>(&self.client, "");
        let what = format!("reading Namespace {}", subject.namespace);
        let namespace = request(&what, namespaces.get_opt(&subject.namespace)).await?;
        let is_there = namespace.is_some_and(|namespace| {
            let ends = is_terminating(&namespace.value());
            belongs_to(&namespace, cluster) && !ends
        });
        Ok(if is_there { serde_json::from_value(value).ok() } else { None })
    }

    /// The status of a Cluster whose change would move its data: that must not happen.
    fn another_shape(&self, subject: &Subject<'_>, plane: &ControlPlane) -> Option<State> {
        let wanted =
            |name: &str| plane.objects.iter().find(|object| names(object) == (StatefulSet::KIND, name));
        let kind = self.kind(StatefulSet::KIND)?;
        for name in self.ours_in(StatefulSet::KIND, &subject.namespace) {
            let Some(wanted) = wanted(&name) else {
                let message = format!(
                    "StatefulSet {name} holds the data of this cluster, which the layout {} has in \
                     another; Portico does not move it: set the annotation {LAYOUT} back",
                    subject.layout
                );
                return Some(State::bad("LayoutChanged", message));
            };
            let found = kind.get(&subject.key(&name))?;
            // Not by its replicas, which anybody may scale and which are put back.
            let (has, asked) = (members(&found), members(wanted));
            if has != asked {
                let message = format!(
                    "etcd was made with {} members, and spec.componentsOverride.etcd.clusterSize asks for \
                     {}; Portico does not change their number: set it back",
                    has.unwrap_or_default(),
                    asked.unwrap_or_default()
                );
                return Some(State::bad("EtcdSizeChanged", message));
            }
        }
        None
    }

    /// The status if the data of etcd is gone: an empty one in its place, under the same name, would look
    /// well.
    async fn data_lost(&self, subject: &Subject<'_>) -> Result<Option<State>, WriteError> {
        let members = 0..portico_hosting::MOST_MEMBERS;
        let names: Vec<String> = members.map(portico_hosting::claim_name).collect();
        let is_seen = |kind: &dyn Kind| names.iter().any(|name| kind.get(&subject.key(name)).is_some());
        if !subject.is_initialized() || self.kind(PersistentVolumeClaim::KIND).is_some_and(is_seen) {
            return Ok(None);
        }
        // A backup may bring one without the labels by which claims are watched.
        let claims = api::<PersistentVolumeClaim>(&self.client, &subject.namespace);
        for name in &names {
            let what = format!("reading {} {}", PersistentVolumeClaim::KIND, subject.key(name));
            if request(&what, claims.get_opt(name)).await?.is_some() {
                return Ok(None);
            }
        }
        let message = format!(
            "the volumes of etcd in {} are gone, and with them all that the cluster held; restore \
             PersistentVolumeClaim {}, or have an empty cluster as docs/hosting.md says",
            subject.namespace,
            portico_hosting::claim_name(0)
        );
        Ok(Some(State::bad("DataLost", message)))
    }

    /// Applies the objects of the plan. A workload is made once those before it serve, so that none begins
    /// with a crash. Existing objects are kept as they should be in any case.
    async fn apply(
        &self,
        subject: &Subject<'_>,
        plane: &ControlPlane,
        backoffs: &Shared,
    ) -> Result<(), WriteError> {
        let mut serving = true;
        for wanted in &plane.objects {
            let (kind, name) = names(wanted);
            // The exposure controller makes the namespace, which clusters without a control plane have too.
            let Some(kind) = self.kind(kind) else { continue };
            let (key, workload) = (subject.key(name), WORKLOADS.contains(&kind.name()));
            let before = kind.get(&key);
            if workload && before.is_none() && !serving {
                continue;
            }
            // Gone since `data_lost` looked, which the next pass tells.
            if kind.name() == PersistentVolumeClaim::KIND && before.is_none() && subject.is_initialized() {
                continue;
            }
            must_lead(&self.leads)?;
            let wanted = &kept_storage(wanted, before.as_ref());
            match kind.put(&self.client, &key, wanted, backoffs).await? {
                Put::Unchanged => {}
                Put::Changed => self.counters.wrote(kind.name()),
                Put::Back(done) => {
                    self.counters.wrote(kind.name());
                    let note =
                        Note { severity: Severity::Normal, reason: PUT_BACK, action: ACTION, text: &done };
                    let cluster = reference(subject.scope.cluster);
                    self.events.publish_about(&cluster, part(kind.name(), &key), note).await;
                }
            }
            if workload {
                let ready = kind.get(&key).and_then(|found| found["status"]["readyReplicas"].as_u64());
                let wanted = wanted["spec"]["replicas"].as_u64().unwrap_or(1);
                serving &= ready.unwrap_or_default() > wanted / 2;
            }
        }
        Ok(())
    }

    /// Deletes what an earlier plan had.
    async fn prune(
        &self,
        subject: &Subject<'_>,
        plane: &ControlPlane,
        backoffs: &Shared,
    ) -> Result<(), WriteError> {
        let of_kind = |kind| self.ours_in(kind, &subject.namespace).into_iter().map(move |name| (kind, name));
        // Other Services are of the exposure controller.
        let services = of_kind(Service::KIND).filter(|(_, name)| name == portico_hosting::PROMETHEUS);
        for (kind, name) in PRUNED.into_iter().flat_map(of_kind).chain(services) {
            let wanted = plane.objects.iter().any(|object| names(object) == (kind, &*name));
            if let Some(kind) = self.kind(kind).filter(|_| !wanted) {
                must_lead(&self.leads)?;
                if kind.remove(&self.client, &subject.key(&name), backoffs).await? {
                    self.counters.wrote(kind.name());
                }
            }
        }
        Ok(())
    }

    /// The programs that there are, where a pass ended before its plan.
    pub(super) fn health_now(&self, cluster: &Cluster) -> Option<Health> {
        let layout = cluster.metadata.annotation(LAYOUT)?.parse().ok()?;
        let namespace = &*cluster.name().namespace();
        let of = |kind| {
            let names = self.ours_in(kind, namespace).into_iter();
            names.filter_map(move |name| self.kind(kind)?.get(&ObjectKey::new(namespace, &name)))
        };
        let workloads: Vec<Value> = WORKLOADS.into_iter().flat_map(of).collect();
        let components = self.components(namespace, workloads.iter());
        (!components.is_empty()).then_some(Health { layout, components, rolled_out: None })
    }

    /// Whether every workload of the plan is there, and all its pods are those of its newest version.
    fn is_rolled_out(&self, subject: &Subject<'_>, plane: &ControlPlane) -> bool {
        let workloads = plane.objects.iter().map(names).filter(|(kind, _)| WORKLOADS.contains(kind));
        let mut found = workloads.map(|(kind, name)| self.kind(kind)?.get(&subject.key(name)));
        found.all(|workload| workload.is_some_and(|workload| health::is_rolled_out(&workload)))
    }

    /// The programs of these workloads.
    fn components<'a>(&self, namespace: &str, workloads: impl Iterator<Item = &'a Value>) -> Vec<Component> {
        let pods: Vec<Value> = self.pods.in_namespace(namespace).iter().map(|seen| seen.value()).collect();
        health::components(workloads, &pods)
    }

    /// When time alone changes something.
    fn next(&self, reviewed: &Reviewed, backoffs: &Shared) -> Option<Duration> {
        self.renewal(reviewed).into_iter().chain(self.backoff_due(backoffs)).min()
    }

    /// When the next certificate is due, or the clock may be right again.
    pub(super) fn renewal(&self, reviewed: &Reviewed) -> Option<Duration> {
        let renewal = reviewed.review.next.map(|next| until(next, (self.settings.clock)()));
        let clock = reviewed.clock.as_ref().map(|_| CLOCK_PERIOD);
        renewal.into_iter().chain(clock).min()
    }

    fn backoff_due(&self, backoffs: &Shared) -> Option<Duration> {
        lock(backoffs).due().map(|due| due.saturating_duration_since(Instant::now()))
    }
}

fn lock(backoffs: &Shared) -> MutexGuard<'_, RepairBackoffs> {
    backoffs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kind and name of a planned object.
fn names(object: &Value) -> (&str, &str) {
    let [kind, name] = [&object["kind"], &object["metadata"]["name"]].map(Value::as_str);
    (kind.unwrap_or_default(), name.unwrap_or_default())
}

/// How many members the etcd of a StatefulSet was made with.
fn members(set: &Value) -> Option<usize> {
    let pod = set.pointer("/spec/template/spec")?;
    let containers = ["initContainers", "containers"].map(|field| pod[field].as_array());
    let mut arguments =
        containers.into_iter().flatten().flatten().filter_map(|one| one["args"].as_array()).flatten();
    let list = arguments.find_map(|argument| argument.as_str()?.strip_prefix("--initial-cluster="))?;
    Some(list.split(',').count())
}

/// An object as it is wanted, with the class and size that its volumes have. Neither can be changed here for
/// a volume that exists. A request to change it would keep the rest from being written.
fn kept_storage(wanted: &Value, found: Option<&Value>) -> Value {
    let mut kept = wanted.clone();
    for claim in ["/spec", "/spec/volumeClaimTemplates/0/spec"] {
        for field in ["/storageClassName", "/resources/requests/storage"] {
            let path = format!("{claim}{field}");
            let before = found.and_then(|found| found.pointer(&path));
            if let (Some(value), Some(before)) = (kept.pointer_mut(&path), before) {
                *value = before.clone();
            }
        }
    }
    kept
}

fn until(time: Timestamp, now: Timestamp) -> Duration {
    time.duration_since(now).try_into().unwrap_or_default()
}

/// Status of a control plane if Secrets keep the rest from being written.
fn secrets_state(reviewed: &Reviewed) -> Option<State> {
    if let Some(clock) = &reviewed.clock {
        return Some(State::bad(CLOCK_OFF, waits(clock)));
    }
    if let Some(lost) = reviewed.review.lost.first() {
        let more = match reviewed.review.lost.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        return Some(State::bad("KeysLost", format!("{lost}{more}")));
    }
    let first = reviewed.foreign.first()?;
    let message = format!(
        "Secret {first} is somebody else's and does not fit; delete it, and it is made here, or let it fit \
         what docs/pki.md says"
    );
    Some(State::bad("ForeignObject", message))
}

/// Adds to the status of a control plane without trouble that `authorities` end.
pub(super) fn with_endings(state: State, authorities: Option<String>) -> State {
    match authorities {
        Some(ends) if ["Ready", "Paused"].contains(&state.reason) => {
            State::good(AUTHORITIES_END, format!("{}; {ends}", state.message))
        }
        _ => state,
    }
}

/// Status of a control plane once everything is written.
fn state(
    subject: &Subject<'_>,
    plane: &ControlPlane,
    components: &[Component],
    alarm: Option<Alarm>,
) -> State {
    let what = format!("Kubernetes {}, {}", plane.version, plane.layout);
    // The alarm may be the cause of everything that is not ready.
    if let Some(alarm) = alarm {
        return alarm.state(&what, &health::text(components));
    }
    let serves = health::serves(components);
    match (serves, health::is_whole(components)) {
        (true, true) => State::good("Ready", what),
        (true, false) => {
            let message = format!("{what}; users are served, but: {}", health::text(components));
            State::good("Degraded", message)
        }
        (false, _) => {
            let reason = if subject.is_initialized() { "NotServing" } else { "Starting" };
            State::bad(reason, format!("{what}: {}", health::text(components)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_that_end_are_told_of_beside_no_other_trouble() {
        let ends = || Some("authorities end: Secret ca".to_owned());
        let ready = || State::good("Ready", "Kubernetes 1.35.8".to_owned());
        let expected =
            State::good("AuthoritiesEnd", "Kubernetes 1.35.8; authorities end: Secret ca".to_owned());
        assert_eq!(with_endings(ready(), ends()), expected);
        assert_eq!(with_endings(ready(), None), ready());
        for other in [State::good("Degraded", String::new()), State::bad("NotServing", String::new())] {
            assert_eq!(with_endings(other.clone(), ends()), other);
        }
    }
}
