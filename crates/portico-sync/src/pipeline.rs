//! From objects to routes: everything between a source and the data plane, without either.
//!
//! The planner (`portico-expose`) computes which Services and policies follow from KubermaticConfiguration,
//! Seed and Cluster. The route index (`portico-routes`) computes which routes follow from Services and
//! EndpointSlices. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_api::names::ClusterName;
use portico_api::problem::Problem;
use portico_api::seed::Timeouts;
use portico_expose::change::{ObjectChange as PlannerChange, Output};
use portico_expose::persisted::PersistedState;
use portico_expose::plan::Plan;
use portico_expose::planner::{Planner, Settings as PlannerSettings};
use portico_routes::index::{ObjectChange, RouteIndex, Settings as IndexSettings};
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
    /// Grows whenever the problems of the planner change.
    planner_problems: u64,
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
            planner_problems: 0,
        }
    }

    /// Applies changes; `complete` says that they end a burst. What follows is published by [`Self::commit`].
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change<Object>>, complete: bool) {
        let mut planned = Vec::new();
        for change in changes {
            match change {
                Change::Apply(Object::EndpointSlice(slice)) => {
                    self.index.apply(ObjectChange::EndpointSlice(Change::Apply(slice)));
                }
                Change::Delete(object) if object.kind == Kind::EndpointSlice => {
                    self.index.apply(ObjectChange::EndpointSlice(Change::Delete(object.key)));
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
        self.exposed.insert(cluster.name(), Box::new(cluster));
        self.index.apply(ObjectChange::Policy(Change::Apply(policy)));
    }

    fn remove_exposed(&mut self, cluster: &ClusterName) {
        if self.exposed.remove(cluster).is_some() {
            self.index.apply(ObjectChange::Policy(Change::Delete(cluster.clone().into())));
        }
    }

    /// From now on, an object tells of each cluster what it allows: a Service of one without admits nobody.
    pub fn require_policies(&mut self) {
        self.index.apply(ObjectChange::PoliciesRequired);
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
        let of_gateway =
            |cluster: &&ExposedCluster| self.seed.as_ref().is_none_or(|only| *only == cluster.spec.seed);
        let mut all = self.exposed().filter(of_gateway);
        let Some(first) = all.next() else { return self.timeouts };
        let settings = &first.spec.connection_settings;
        if let Some(other) = all.find(|other| other.spec.connection_settings != *settings) {
            tracing::warn!(
                seeds = ?[&first.spec.seed, &other.spec.seed],
                "connection settings of seeds differ, so those of none are used; name one with --seed, or \
                 give the settings as flags"
            );
            return Timeouts::default();
        }
        settings.effective()
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
        planned.chain(self.index.problems().map(std::borrow::Cow::into_owned)).collect()
    }

    /// Changes whenever [`Self::problems`] may have changed.
    pub fn problems_version(&self) -> (u64, u64) {
        (self.planner_problems, self.index.problems_version())
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Service(change) => self.index.apply(ObjectChange::Service(change)),
                Output::PlannedService(change) => self.index.apply(ObjectChange::PlannedService(change)),
                Output::Policy(change) => self.index.apply(ObjectChange::Policy(change)),
                Output::Note(object, text) => tracing::info!(%object, "{text}"),
                Output::Timeouts(timeouts) => self.timeouts = timeouts,
                // `problems` returns all of them.
                Output::Problems(..) => self.planner_problems += 1,
            }
        }
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
}
