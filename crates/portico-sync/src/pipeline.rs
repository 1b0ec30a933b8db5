//! From objects to routes: everything between a source and the data plane, without either.
//!
//! The planner (`portico-expose`) computes which Services and policies follow from KubermaticConfiguration,
//! Seed and Cluster. The route index (`portico-routes`) computes which routes follow from Services and
//! EndpointSlices. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::{ClusterName, Tenant};
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Timeouts;
use portico_expose::change::{Output, PlannerChange};
use portico_expose::persisted::PersistedState;
use portico_expose::plan::Plan;
use portico_expose::planner::{Planner, Settings as PlannerSettings};
use portico_routes::index::{IndexChange, RouteIndex, Settings as IndexSettings};
use portico_routes::route::Front;
use portico_routes::rows::RouteRow;
use portico_routes::table::Update;
use portico_source::Object;

/// All objects, and what follows from them.
#[derive(Debug)]
pub struct Pipeline {
    planner: Planner,
    index: RouteIndex,
    timeouts: Timeouts,
    exposed: BTreeMap<ClusterName, Box<ExposedCluster>>,
    /// The one Seed that counts; `None` for all of them.
    seed: Option<Box<str>>,
    /// The only namespace in use, if there is one.
    namespace: Option<Box<str>>,
    /// Whether clients may come without their addresses, unless the Service in front keeps them.
    masked_clients: bool,
    /// Grows whenever the problems of the planner, or of seeds, may have changed.
    other_problems: u64,
}

impl Pipeline {
    /// Knows no object yet. `persisted` is of an earlier run; `seed` determines which free NodePorts are
    /// allocated.
    pub fn new(index: IndexSettings, planner: PlannerSettings, persisted: PersistedState, seed: u64) -> Self {
        let namespace = index.namespace.clone();
        Self {
            namespace,
            seed: planner.seed.clone(),
            planner: Planner::new(planner, persisted, seed),
            index: RouteIndex::new(index),
            timeouts: Timeouts::default(),
            exposed: BTreeMap::new(),
            masked_clients: false,
            other_problems: 0,
        }
    }

    /// Says whether clients may come without their addresses, unless the Service in front keeps them.
    #[must_use]
    pub fn with_masked_clients(mut self, masked: bool) -> Self {
        self.masked_clients = masked;
        self
    }

    /// Applies changes of ClusterIPs.
    pub fn apply_cluster_ips(&mut self, changes: impl IntoIterator<Item = Change<IpAddr>>) {
        for change in changes {
            self.index.apply(IndexChange::ClusterIp(change));
        }
    }

    /// Applies changes; `complete` says that they end a burst. What follows is published by [`Self::commit`].
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change<Object>>, complete: bool) {
        let mut planned = Vec::new();
        for change in changes {
            match change {
                Change::Apply(Object::EndpointSlice(slice)) => {
                    self.index.apply(IndexChange::EndpointSlice(Change::Apply(slice)));
                }
                Change::Delete(object) if object.kind == Kind::EndpointSlice => {
                    self.index.apply(IndexChange::EndpointSlice(Change::Delete(object.key)));
                }
                Change::Apply(Object::ExposedCluster(cluster)) => self.set_exposed(*cluster),
                Change::Delete(object) if object.kind == Kind::ExposedCluster => {
                    self.remove_exposed(&ClusterName::new(&object.key.name));
                }
                change => planned.extend(planner_change(change)),
            }
        }
        let outputs = if complete { self.planner.apply(planned) } else { self.planner.note(planned) };
        self.take(outputs);
    }

    fn set_exposed(&mut self, mut cluster: ExposedCluster) {
        let policy = Arc::new(cluster.policy());
        // Parsed above; kept as text it would be the largest part of each object.
        cluster.spec.api_server_ca = Box::default();
        let of_seed =
            |cluster: &ExposedCluster| (cluster.spec.seed.clone(), cluster.spec.connection_settings.clone());
        let now = of_seed(&cluster);
        let before = self.exposed.insert(cluster.name(), Box::new(cluster));
        self.other_problems += u64::from(before.is_none_or(|before| of_seed(&before) != now));
        self.index.apply(IndexChange::Policy(Change::Apply(policy)));
    }

    fn remove_exposed(&mut self, cluster: &ClusterName) {
        if self.exposed.remove(cluster).is_some() {
            self.other_problems += 1;
            self.index.apply(IndexChange::Policy(Change::Delete(cluster.clone().into())));
        }
    }

    /// From now on, an object tells of each cluster what it allows: a Service of one without admits nobody.
    pub fn require_policies(&mut self) {
        self.index.apply(IndexChange::PoliciesRequired);
    }

    /// The initial sync is complete: what is remembered of objects that do not exist is forgotten. Not if
    /// some objects could not be read (`all_readable` is false): they may exist.
    pub fn initial_sync_complete(&mut self, all_readable: bool) {
        let outputs = self.planner.initial_sync_complete(all_readable);
        self.take(outputs);
    }

    /// Returns the changes of routes that follow from everything applied; `None` if no route changed.
    pub fn commit(&mut self) -> Option<Update> {
        self.index.commit()
    }

    /// The planner, whose state is to be persisted before a [`Self::commit`] takes effect.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    /// The connection settings of the seed. Where ExposedClusters tell of several seeds that differ, those of
    /// none: listeners are shared by the clusters of all of them.
    pub fn timeouts(&self) -> Timeouts {
        let mut all = self.exposed_here();
        match all.next() {
            None => self.timeouts,
            Some(_) if self.of_another_seed().is_some() => Timeouts::default(),
            Some(first) => first.spec.connection_settings.effective(),
        }
    }

    /// The ExposedClusters of the Seed that counts.
    fn exposed_here(&self) -> impl Iterator<Item = &ExposedCluster> {
        let counts = |seed: &str| self.seed.as_deref().is_none_or(|only| *only == *seed);
        self.exposed().filter(move |cluster| counts(&cluster.spec.seed))
    }

    /// Two ExposedClusters with different connection settings.
    fn of_another_seed(&self) -> Option<[&ExposedCluster; 2]> {
        let mut all = self.exposed_here();
        let first = all.next()?;
        let settings = &first.spec.connection_settings;
        Some([first, all.find(|other| other.spec.connection_settings != *settings)?])
    }

    /// Source ranges that hold for nobody, since clients come without their addresses.
    fn masked(&self) -> Option<Problem> {
        let front = self.index.front();
        if !self.masked_clients || front.is_some_and(|front| front.keeps_addresses) {
            return None;
        }
        Some(masked_clients(front, self.index.restricted_by_source()?))
    }

    /// All routes, in force or not.
    pub fn rows(&self) -> impl Iterator<Item = RouteRow> {
        self.index.rows()
    }

    /// The plan in force for each Cluster, by name.
    pub fn plans(&self) -> impl Iterator<Item = Plan> {
        let in_use = |plan: &Plan| match &self.namespace {
            Some(namespace) => plan.cluster.namespace() == **namespace,
            None => true,
        };
        self.planner.plans().filter(in_use)
    }

    /// The ExposedClusters, by name: a gateway that reads them plans nothing.
    pub fn exposed(&self) -> impl Iterator<Item = &ExposedCluster> {
        self.exposed.values().map(|cluster| &**cluster)
    }

    /// All problems of objects, errors first.
    pub fn problems(&self) -> BTreeSet<Problem> {
        let planned = self.planner.problems().cloned();
        let own = self.masked().into_iter().chain(self.of_another_seed().map(several_seeds));
        planned.chain(own).chain(self.index.problems().map(std::borrow::Cow::into_owned)).collect()
    }

    /// Changes whenever [`Self::problems`] may have changed.
    pub fn problems_version(&self) -> (u64, u64) {
        (self.other_problems, self.index.problems_version())
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Service(change) => self.index.apply(IndexChange::Service(change)),
                Output::PlannedService(change) => self.index.apply(IndexChange::PlannedService(change)),
                Output::Policy(change) => self.index.apply(IndexChange::Policy(change)),
                Output::Note(object, text) => tracing::info!(%object, "{text}"),
                Output::Timeouts(timeouts) => self.timeouts = timeouts,
                // `problems` returns all of them.
                Output::Problems(..) => self.other_problems += 1,
            }
        }
    }
}

/// Source ranges hold where the addresses of clients are known.
fn masked_clients(front: Option<&Front>, tenant: &Tenant) -> Problem {
    let (object, field, because) = match front {
        Some(front) => (
            ObjectRef { kind: Kind::Service, key: front.service.clone() },
            "spec.externalTrafficPolicy",
            "with Cluster, clients come with the addresses of nodes",
        ),
        None => {
            let cluster = ObjectRef { kind: Kind::Cluster, key: ObjectKey::new("", &tenant.to_string()) };
            (cluster, "", "no Service of type LoadBalancer or NodePort is known that leads to this gateway")
        }
    };
    Problem {
        severity: Severity::Warning,
        reason: "masked-clients",
        object,
        field: field.into(),
        message: format!(
            "{because}, so this gateway cannot hold them against the Seed's sourceRanges: only the load \
             balancer in front does"
        ),
        remedy: "set externalTrafficPolicy: Local on the Service in front; or have the load balancer send \
                 PROXY headers (--proxy-protocol); or give --direct-clients if addresses are kept otherwise"
            .into(),
    }
}

fn several_seeds([one, other]: [&ExposedCluster; 2]) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "several-seeds",
        object: ObjectRef { kind: Kind::ExposedCluster, key: ObjectKey::new("", &other.metadata.name) },
        field: "spec.connectionSettings".into(),
        message: format!(
            "the Seed {:?} has other settings than the Seed {:?}, so those of none are used",
            other.spec.seed, one.spec.seed
        ),
        remedy: "name the Seed that this gateway is of with --seed, or give the settings as flags".into(),
    }
}

/// The change in the terms of the planner, which knows no EndpointSlice.
fn planner_change(change: Change<Object>) -> Option<PlannerChange> {
    Some(match change {
        Change::Apply(Object::Service(service)) => PlannerChange::Service(Change::Apply(service)),
        Change::Apply(Object::KubermaticConfiguration(object)) => {
            PlannerChange::Configuration(Change::Apply(object))
        }
        Change::Apply(Object::Seed(seed)) => PlannerChange::Seed(Change::Apply(seed)),
        Change::Apply(Object::Cluster(cluster)) => PlannerChange::Cluster(Change::Apply(cluster)),
        Change::Apply(Object::EndpointSlice(_) | Object::ExposedCluster(_)) => return None,
        Change::Delete(object) => match object.kind {
            Kind::Service => PlannerChange::Service(Change::Delete(object.key)),
            Kind::KubermaticConfiguration => PlannerChange::Configuration(Change::Delete(object.key)),
            Kind::Seed => PlannerChange::Seed(Change::Delete(object.key)),
            Kind::Cluster => PlannerChange::Cluster(Change::Delete(ClusterName::new(&object.key.name))),
            Kind::EndpointSlice | Kind::ExposedCluster => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use portico_expose::planner::Mode;
    use portico_routes::route::OwnAddresses;

    use super::*;

    fn pipeline(seed: Option<&str>) -> Pipeline {
        let planner = PlannerSettings { seed: seed.map(Into::into), ..PlannerSettings::new(Mode::Observe) };
        Pipeline::new(IndexSettings::default(), planner, PersistedState::default(), 0)
    }

    fn exposed(name: &str, seed: &str, idle: &str) -> Change<Object> {
        let text = format!(
            r#"{{"metadata": {{"name": "{name}"}}, "spec": {{"exposeStrategy": "NodePort", "seed": "{seed}",
                "connectionSettings": {{"sniListenerIdleTimeout": "{idle}"}}}}}}"#
        );
        Change::Apply(Object::ExposedCluster(serde_json::from_str(&text).unwrap()))
    }

    #[test]
    fn connection_settings_are_those_that_the_seed_gave_its_exposed_clusters() {
        let idle = |seed, clusters: &[Change<Object>]| {
            let mut pipeline = pipeline(seed);
            pipeline.apply(clusters.to_vec(), true);
            pipeline.timeouts().sni_idle.map(|idle| idle.as_secs())
        };
        let clusters = [exposed("a", "north", "60s"), exposed("b", "north", "60s")];
        assert_eq!(idle(None, &clusters), Some(60));
        let two = [exposed("a", "north", "60s"), exposed("b", "south", "90s")];
        assert_eq!(idle(None, &two), None, "of two seeds that differ, neither");
        assert_eq!(idle(Some("south"), &two), Some(90));
    }

    fn reasons(pipeline: &Pipeline) -> Vec<String> {
        pipeline.problems().iter().map(|problem| format!("{} {}", problem.reason, problem.object)).collect()
    }

    #[test]
    fn seeds_with_different_connection_settings_are_a_problem_until_one_is_named() {
        for (seed, expected) in [(None, &["several-seeds ExposedCluster b"][..]), (Some("north"), &[])] {
            let mut pipeline = pipeline(seed);
            let version = pipeline.problems_version();
            pipeline.apply([exposed("a", "north", "60s"), exposed("b", "south", "90s")], true);
            pipeline.commit();
            assert_eq!(reasons(&pipeline), expected);
            assert!(pipeline.problems_version() != version || seed.is_some());
            pipeline.apply([exposed("b", "south", "60s")], true);
            pipeline.commit();
            assert_eq!(reasons(&pipeline), [""; 0]);
        }
    }

    fn object(kind: Kind, text: &str) -> Change<Object> {
        Change::Apply(match kind {
            Kind::Service => Object::Service(serde_json::from_str(text).unwrap()),
            Kind::EndpointSlice => Object::EndpointSlice(serde_json::from_str(text).unwrap()),
            _ => Object::ExposedCluster(serde_json::from_str(text).unwrap()),
        })
    }

    #[test]
    fn source_ranges_that_clients_cannot_be_held_against_are_reported_for_the_service_in_front() {
        let own = OwnAddresses { addresses: [[10, 1, 0, 1].into()].into(), ports: [6_443].into() };
        let index = IndexSettings { in_kubernetes: true, own, ..IndexSettings::default() };
        let planner = PlannerSettings::new(Mode::Observe);
        let pipeline = Pipeline::new(index, planner, PersistedState::default(), 0);
        let mut pipeline = pipeline.with_masked_clients(true);
        let mut after = |changes: &[Change<Object>]| {
            pipeline.apply(changes.to_vec(), true);
            pipeline.commit();
            reasons(&pipeline)
        };
        let restricted = object(
            Kind::ExposedCluster,
            r#"{"metadata": {"name": "a"}, "spec": {"exposeStrategy": "NodePort", "seed": "north",
                "loadBalancerSourceRanges": ["192.0.2.0/24"]}}"#,
        );
        let slice = object(
            Kind::EndpointSlice,
            r#"{"metadata": {"name": "s", "namespace": "portico",
                    "labels": {"kubernetes.io/service-name": "front"}},
                "addressType": "IPv4", "endpoints": [{"addresses": ["10.1.0.1"]}],
                "ports": [{"name": "sni", "port": 6443}]}"#,
        );
        let front = |policy: &str| {
            object(
                Kind::Service,
                &format!(
                    r#"{{"metadata": {{"name": "front", "namespace": "portico"}},
                        "spec": {{"type": "LoadBalancer", "externalTrafficPolicy": "{policy}"}}}}"#
                ),
            )
        };
        assert_eq!(after(&[front("Cluster"), slice]), [""; 0], "no ranges");
        assert_eq!(after(&[restricted]), ["masked-clients Service portico/front"]);
        assert_eq!(after(&[front("Local")]), [""; 0]);
        let gone = ObjectRef { kind: Kind::Service, key: ObjectKey::new("portico", "front") };
        assert_eq!(after(&[Change::Delete(gone)]), ["masked-clients Cluster a"]);
    }
}
