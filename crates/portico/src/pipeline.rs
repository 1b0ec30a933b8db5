//! From objects to routes: everything between a source and the data plane, without either.
//!
//! The same for `portico gateway`, `portico check` and `portico routes`, so that they cannot disagree: the planner
//! (`portico-expose`) says which Services and policies follow from KubermaticConfiguration, Seed and Cluster, and the route
//! index (`portico-routes`) which routes follow from Services and EndpointSlices. No I/O, no clock.

use std::collections::BTreeSet;

use portico_api::change::Change as ObjectChanged;
use portico_api::meta::Kind;
use portico_api::names::ClusterName;
use portico_api::problem::Problem;
use portico_api::seed::Timeouts;
use portico_expose::change::{Change, Output};
use portico_expose::memory::Memory;
use portico_expose::plan::Plan;
use portico_expose::planner::{Planner, Settings as PlannerSettings};
use portico_routes::index::{ObjectChange, RouteIndex, Settings as IndexSettings};
use portico_routes::rows::RouteRow;
use portico_routes::table::Update;
use portico_source::{Event, Object};

/// All objects, and what follows from them.
#[derive(Debug)]
pub(crate) struct Pipeline {
    planner: Planner,
    index: RouteIndex,
    timeouts: Timeouts,
    /// The one namespace that is looked at.
    namespace: Option<Box<str>>,
    /// Grows whenever the planner's problems changed.
    planner_problems: u64,
}

impl Pipeline {
    /// A pipeline that knows no objects yet. `memory` is of an earlier run, `seed` decides which NodePorts are drawn.
    pub(crate) fn new(index: IndexSettings, planner: PlannerSettings, memory: Memory, seed: u64) -> Self {
        let namespace = index.namespace.clone();
        Self {
            namespace,
            planner: Planner::new(planner, memory, seed),
            index: RouteIndex::new(index),
            timeouts: Timeouts::default(),
            planner_problems: 0,
        }
    }

    /// Notes that objects came, changed or went; `complete` says that nothing is missing of what changed together. What
    /// follows is published by [`Self::commit`].
    pub(crate) fn apply(&mut self, events: impl IntoIterator<Item = Event>, complete: bool) {
        let mut changes = Vec::new();
        for event in events {
            match event {
                Event::Apply(Object::EndpointSlice(slice)) => {
                    self.index.apply(ObjectChange::EndpointSlice(ObjectChanged::Apply(slice)));
                }
                Event::Delete(object) if object.kind == Kind::EndpointSlice => {
                    self.index.apply(ObjectChange::EndpointSlice(ObjectChanged::Delete(object.key)));
                }
                event => changes.extend(planned(event)),
            }
        }
        let outputs = if complete { self.planner.apply(changes) } else { self.planner.note(changes) };
        self.take(outputs);
    }

    /// Every object there is has been applied for the first time: what is remembered of others can be forgotten, unless they
    /// are only unreadable, for which `whole` is false.
    pub(crate) fn first_picture_complete(&mut self, whole: bool) {
        let outputs = self.planner.first_picture_complete(whole);
        self.take(outputs);
    }

    /// The routes as they follow from everything applied; `None` if none changed.
    pub(crate) fn commit(&mut self) -> Option<Update> {
        self.index.commit()
    }

    /// Knows what is to be remembered, before a [`Self::commit`] takes effect.
    pub(crate) fn planner(&self) -> &Planner {
        &self.planner
    }

    /// The connection settings of the seed.
    pub(crate) fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Every route, in force or not.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RouteRow> {
        self.index.rows()
    }

    /// The plan in force for each Cluster, by name.
    pub(crate) fn plans(&self) -> impl Iterator<Item = Plan> {
        let is_looked_at = |plan: &Plan| match &self.namespace {
            Some(namespace) => plan.cluster.namespace() == **namespace,
            None => true,
        };
        self.planner.plans().filter(is_looked_at)
    }

    /// Everything wrong with the objects, errors first.
    pub(crate) fn problems(&self) -> BTreeSet<Problem> {
        let planned = self.planner.problems().cloned();
        planned.chain(self.index.problems().map(std::borrow::Cow::into_owned)).collect()
    }

    /// Differs whenever [`Self::problems`] may differ.
    pub(crate) fn problems_version(&self) -> (u64, u64) {
        (self.planner_problems, self.index.problems_version())
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Service(service) => {
                    self.index.apply(ObjectChange::Service(ObjectChanged::Apply(service)));
                }
                Output::Planned(service) => {
                    self.index.apply(ObjectChange::PlannedService(ObjectChanged::Apply(service)));
                }
                Output::NoService(key) => {
                    self.index.apply(ObjectChange::Service(ObjectChanged::Delete(key)));
                }
                Output::Policy(policy) => {
                    self.index.apply(ObjectChange::Policy(ObjectChanged::Apply(policy)));
                }
                Output::NoPolicy(cluster) => {
                    self.index.apply(ObjectChange::Policy(ObjectChanged::Delete(cluster)));
                }
                Output::Note(object, text) => tracing::info!(%object, "{text}"),
                Output::Timeouts(timeouts) => self.timeouts = timeouts,
                // Asked for as a whole, by `problems`.
                Output::Problems(..) => self.planner_problems += 1,
            }
        }
    }
}

/// What an event means to the planner; an EndpointSlice means nothing to it.
fn planned(event: Event) -> Option<Change> {
    Some(match event {
        Event::Apply(Object::Service(service)) => Change::Service(service),
        Event::Apply(Object::KubermaticConfiguration(object)) => Change::Configuration(object),
        Event::Apply(Object::Seed(seed)) => Change::Seed(seed),
        Event::Apply(Object::Cluster(cluster)) => Change::Cluster(cluster),
        Event::Apply(Object::EndpointSlice(_)) => return None,
        Event::Delete(object) => match object.kind {
            Kind::Service => Change::NoService(object.key),
            Kind::KubermaticConfiguration => Change::NoConfiguration(object.key),
            Kind::Seed => Change::NoSeed(object.key),
            Kind::Cluster => Change::NoCluster(ClusterName::new(&object.key.name)),
            Kind::EndpointSlice => return None,
        },
    })
}
