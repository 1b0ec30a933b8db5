//! The problems that a change of one object adds, in the words of `portico check`.
//!
//! Pure. The pipeline of `portico check` judges the objects of the caches twice: with the object as it was,
//! and as it is to be. The difference is the answer. A problem on both sides may stay, so that no other
//! change of an object is refused for it.
//!
//! A Cluster is judged with the Services that will be made for it. So a host name of another cluster is
//! reported before they exist. A Service may not claim a name that follows from a Cluster
//! ([`cluster_names`]). Only the Services that may claim the same names are judged, and only the Clusters
//! that the change concerns. One review must not cost as much as the whole seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use portico_api::annotations::{ExposeKeys, PORT_MAPPING};
use portico_api::change::Change;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::names::{ClusterName, HostName};
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_expose::exposure::{Found, exposure};
use portico_expose::front::SNI_PORT;
use portico_expose::inputs::Scope;
use portico_expose::persisted::PersistedState;
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_expose::resolve::{seed_of, strategy};
use portico_expose::validate::{self, Before};
use portico_routes::index::{IndexChange, RouteIndex, Settings as IndexSettings};
use portico_routes::route::RouteKey;
use portico_source::Object;
use portico_source::served::Served;
use portico_sync::Pipeline;

mod cluster_names;

/// Problems that the API server handles by itself. It allocates NodePorts, and refuses one that another
/// Service has. In a dry run it makes numbers up.
const OF_THE_API_SERVER: [&str; 2] = ["no-node-port", "node-port-conflict"];

/// Seed of the allocation of NodePorts, of which none are allocated here.
const RANDOM: u64 = 0;

/// The objects of a seed, as caches hold them.
#[derive(Default)]
pub(super) struct World {
    pub(super) seeds: Vec<Arc<Served<Seed>>>,
    pub(super) configurations: Vec<Arc<Served<KubermaticConfiguration>>>,
    pub(super) clusters: Vec<Arc<Served<Cluster>>>,
    /// The Services with one of the annotations `expose`.
    pub(super) services: Vec<Arc<Served<Service>>>,
    /// The annotations that expose a Service.
    pub(super) expose: ExposeKeys,
}

/// A change of one object, to be judged.
pub(super) struct ProposedChange {
    /// `None` for a new object, or if its former version cannot be read.
    pub(super) before: Option<Object>,
    pub(super) after: Object,
}

/// The problems after a change that were not there before.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) errors: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
}

type Objects = BTreeMap<ObjectRef, Object>;

/// Judges a change. An object that is being deleted may be anything.
pub(super) fn review(world: &World, change: &ProposedChange) -> Verdict {
    if change.after.metadata().deletion_timestamp.is_some() {
        return Verdict::default();
    }
    let own_before = change.before.as_ref().map(|object| world.with_planned(object)).unwrap_or_default();
    let own_after = world.with_planned(&change.after);
    let own: BTreeSet<ObjectRef> = own_before.keys().chain(own_after.keys()).cloned().collect();
    let beside = world.beside(&change.after, &own_before, &own_after);
    let mut before = world.problems(&beside, own_before);
    let mut after = world.problems(&beside, own_after);
    for (object, problems) in [(change.before.as_ref(), &mut before), (Some(&change.after), &mut after)] {
        match object {
            Some(object @ Object::Service(service)) => {
                problems.extend(world.foreign_names(service, &world.hosts([object].into_iter())));
            }
            Some(Object::Cluster(cluster)) => {
                let hosting = portico_hosting::judge(cluster, &world.seeds(), world.configuration());
                // A Cluster with a field that does not count is hosted without it.
                problems.extend(hosting.refused.then_some(hosting.problems).into_iter().flatten());
            }
            _ => {}
        }
    }
    if let (Some(Object::Cluster(old)), Object::Cluster(new)) = (&change.before, &change.after) {
        after.extend(world.between(old, new));
    }
    let fresh = fresh(&before, after, &own);
    // A Service that a new Cluster takes a host name from is a warning. If the Cluster were refused, everyone
    // with the right to make a Service could keep every name from the clusters to come.
    let loses = |problem: &Problem| {
        let of_cluster = change.after.kind() == Kind::Cluster;
        of_cluster && problem.object.kind == Kind::Service && !own.contains(&problem.object)
    };
    let (errors, warnings) =
        fresh.into_iter().partition(|problem| problem.severity == Severity::Error && !loses(problem));
    Verdict { errors, warnings }
}

/// The problems that a change adds. A problem of another object may be put in other words after the change.
/// So the number of its problems of that reason says whether there is one more.
fn fresh(before: &BTreeSet<Problem>, after: BTreeSet<Problem>, own: &BTreeSet<ObjectRef>) -> Vec<Problem> {
    fn counted(problems: &BTreeSet<Problem>) -> BTreeMap<(&ObjectRef, &str), usize> {
        let mut counts = BTreeMap::new();
        for problem in problems {
            *counts.entry((&problem.object, problem.reason)).or_default() += 1;
        }
        counts
    }
    let (was, is) = (counted(before), counted(&after));
    let grew = |problem: &Problem| {
        let key = (&problem.object, problem.reason);
        is.get(&key) > was.get(&key)
    };
    let is_new = |problem: &&Problem| {
        !OF_THE_API_SERVER.contains(&problem.reason)
            && !before.contains(problem)
            && (own.contains(&problem.object) || grew(problem))
    };
    after.iter().filter(is_new).cloned().collect()
}

impl World {
    /// The object, and the Services that are made for it.
    fn with_planned(&self, object: &Object) -> Objects {
        let mut own = Objects::from([(object.reference(), object.clone())]);
        if let Object::Cluster(cluster) = object {
            own.extend(self.planned(cluster).map(|service| (service.reference(), service)));
        }
        own
    }

    /// The Services of a Cluster as they will be, each as old as it is now, or else as its Cluster.
    fn planned(&self, cluster: &Cluster) -> impl Iterator<Item = Object> {
        let (seeds, configuration) = (self.seeds(), self.configuration());
        let scope = validate::usable(cluster, &seeds, configuration).ok();
        let wanted = scope.and_then(|scope| exposure(scope, &Found::default(), SNI_PORT).ok());
        let services = wanted.map(|wanted| wanted.plan.services).unwrap_or_default();
        services.into_iter().map(|mut service| {
            let key = service.metadata.key();
            let found = readable(&self.services).map(Object::metadata).find(|found| found.key() == key);
            let aged = found.unwrap_or(&cluster.metadata);
            service.metadata.creation_timestamp = aged.creation_timestamp;
            service.metadata.uid = aged.uid.clone();
            Object::from(service)
        })
    }

    /// All other objects by which either side is to be judged.
    fn beside(&self, subject: &Object, before: &Objects, after: &Objects) -> Objects {
        let mut beside: Vec<&Object> = readable(&self.seeds).chain(readable(&self.configurations)).collect();
        if matches!(subject, Object::Seed(_) | Object::KubermaticConfiguration(_)) {
            beside.extend(readable(&self.clusters));
        } else {
            let own = before.values().chain(after.values());
            let hosts = self.hosts(own.clone());
            let namespace = match subject {
                Object::Cluster(cluster) => Some(cluster.name().namespace()),
                _ => None,
            };
            let concerned = |service: &&Object| {
                namespace.as_deref() == Some(&*service.metadata().namespace) || may_claim(service, &hosts)
            };
            let services: Vec<&Object> = readable(&self.services).filter(concerned).collect();
            // The claims that a Service may make depend on whether its namespace is that of a Cluster.
            let named = own.chain(services.iter().copied());
            let named = named.filter_map(|object| ClusterName::of_namespace(&object.metadata().namespace));
            let names: BTreeSet<ClusterName> = named.collect();
            let is_named = |object: &&Object| names.contains(&ClusterName::new(&object.metadata().name));
            beside.extend(readable(&self.clusters).filter(is_named));
            beside.extend(services);
        }
        // The cache may still have one of this name that is gone.
        let others = beside.into_iter().filter(|object| object.reference() != subject.reference());
        others.map(|object| (object.reference(), object.clone())).collect()
    }

    /// The host names that the Services among `objects` claim.
    fn hosts<'a>(&self, objects: impl Iterator<Item = &'a Object>) -> BTreeSet<HostName> {
        let mut hosts = BTreeSet::new();
        for object in objects {
            let Object::Service(service) = object else { continue };
            let mut index = RouteIndex::new(self.index_settings());
            index.apply(IndexChange::Service(Change::Apply(Arc::new((**service).clone()))));
            hosts.extend(index.rows().filter_map(|row| match row.key {
                RouteKey::Host(host) => Some(host),
                RouteKey::Port(_) | RouteKey::Authority(_) => None,
            }));
        }
        hosts
    }

    /// Everything wrong with `own` and the objects beside them.
    fn problems(&self, beside: &Objects, own: Objects) -> BTreeSet<Problem> {
        let planner = PlannerSettings::new(Mode::Observe);
        let state = PersistedState::default();
        let mut pipeline = Pipeline::new(self.index_settings(), planner, state, RANDOM);
        pipeline.require_policies();
        let others = beside.iter().filter(|(reference, _)| !own.contains_key(*reference));
        let all =
            others.map(|(_, object)| object.clone()).collect::<Vec<_>>().into_iter().chain(own.into_values());
        pipeline.apply(all.map(Change::Apply), true);
        // The update itself is not used; problems have what it says.
        let _update = pipeline.commit();
        pipeline.problems()
    }

    /// What of a Cluster must not change.
    fn between(&self, before: &Cluster, after: &Cluster) -> Vec<Problem> {
        let (seeds, configuration) = (self.seeds(), self.configuration());
        let (Ok(former), Ok(seed)) = (seed_of(before, &seeds), seed_of(after, &seeds)) else {
            return Vec::new();
        };
        let decision = strategy(after, seed, configuration);
        let before = Before { cluster: before, strategy: strategy(before, former, configuration).strategy };
        validate::cluster(&Scope { cluster: after, decision, seed, configuration }, Some(before)).problems
    }

    fn seeds(&self) -> Vec<Arc<Seed>> {
        let mut seeds: Vec<Arc<Seed>> = readable(&self.seeds)
            .filter_map(|object| match object {
                Object::Seed(seed) => Some(Arc::new((**seed).clone())),
                _ => None,
            })
            .collect();
        seeds.sort_by_key(|seed| seed.metadata.key());
        seeds
    }

    /// The configuration of the installation; `None` if there are several.
    fn configuration(&self) -> Option<&KubermaticConfiguration> {
        let mut all = readable(&self.configurations).filter_map(|object| match object {
            Object::KubermaticConfiguration(configuration) => Some(&**configuration),
            _ => None,
        });
        let first = all.next();
        if all.next().is_some() { None } else { first }
    }

    fn index_settings(&self) -> IndexSettings {
        IndexSettings {
            expose_annotations: self.expose.clone(),
            in_kubernetes: true,
            ..IndexSettings::default()
        }
    }
}

/// The objects of `served` that can be read.
fn readable<K>(served: &[Arc<Served<K>>]) -> impl Iterator<Item = &Object> {
    served.iter().filter_map(|served| served.object.as_ref().ok())
}

/// Whether a Service may claim one of `hosts`: a look at the text, which is cheap.
fn may_claim(service: &Object, hosts: &BTreeSet<HostName>) -> bool {
    let Some(mapping) = service.metadata().annotation(PORT_MAPPING) else { return false };
    let mapping = mapping.to_ascii_lowercase();
    // JSON may write any letter by its number.
    mapping.contains('\\') || hosts.iter().any(|host| mapping.contains(host.as_str()))
}

/// The kinds that are reviewed.
pub(super) const KINDS: [Kind; 4] = [Kind::Cluster, Kind::Seed, Kind::KubermaticConfiguration, Kind::Service];

#[cfg(test)]
mod tests;
