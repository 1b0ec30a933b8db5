//! The two levels above a Cluster: Seeds and the KubermaticConfiguration, each with its last usable version.
//!
//! An object is *active* if it counts. If several objects have the same name or the same datacenter, the
//! older one is active. If the operator names a Seed, no other Seed is active.

use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectKey, ObjectMeta, ObjectRef};
use portico_api::port_range::PortRange;
use portico_api::problem::{Problem, Severity};
use portico_api::seed::{Seed, Timeouts};

use crate::resolve::{no_such_seed, seed_of, which_seed};
use crate::validate::{self, Verdict};

/// Both levels.
#[derive(Debug, Default)]
pub(super) struct Levels {
    pub(super) configurations: Level<KubermaticConfiguration>,
    pub(super) seeds: Level<Seed>,
    /// The one Seed that counts; `None` for all of them.
    only_seed: Option<Box<str>>,
}

impl Levels {
    pub(super) fn new(only_seed: Option<Box<str>>) -> Self {
        Self { only_seed, ..Self::default() }
    }

    /// Computes anew which objects are active, and returns all problems of each object.
    pub(super) fn reconcile(&mut self) -> Vec<(ObjectRef, Vec<Problem>)> {
        let mut problems = self.configurations.reconcile(|_| true);
        let only = self.only_seed.as_deref();
        let mut of_seeds = self.seeds.reconcile(|seed| only.is_none_or(|name| *seed.metadata.name == *name));
        if self.timeouts().is_none() {
            for (seed, problems) in &mut of_seeds {
                problems.push(different_timeouts(seed));
            }
        }
        problems.extend(of_seeds);
        problems
    }

    /// The active Seed of a Cluster, or the problem to report on the Cluster.
    pub(super) fn seed_of(&self, cluster: &Cluster) -> Result<&Active<Seed>, Box<Problem>> {
        let active = self.seeds.active();
        match &self.only_seed {
            Some(named) if active.is_empty() && !self.seeds.objects.is_empty() => {
                let there: Vec<_> = self.seeds.objects.values().map(|seed| &*seed.wanted).collect();
                let message = no_such_seed(named, &there);
                Err(which_seed(cluster, message, "correct --seed, or leave it out"))
            }
            _ => seed_of(cluster, active),
        }
    }

    /// The configuration of the installation.
    pub(super) fn configuration(&self) -> Option<&Active<KubermaticConfiguration>> {
        self.configurations.active().first()
    }

    /// The range from which NodePorts are allocated.
    pub(super) fn node_port_range(&self) -> PortRange {
        let range =
            self.configuration().and_then(|found| found.object.spec.user_cluster.node_port_range.get());
        range.copied().unwrap_or(PortRange::NODE_PORTS)
    }

    /// The connection settings of the Seed; `None` if there are several that differ. Listeners are shared by
    /// the clusters of all of them, so one cannot be chosen for the others.
    pub(super) fn timeouts(&self) -> Option<Timeouts> {
        let usable = self.seeds.active().iter().filter(|seed| !seed.refused);
        let mut all =
            usable.map(|seed| seed.object.spec.nodeport_proxy.envoy.connection_settings.effective());
        let first = all.next().unwrap_or_default();
        all.all(|other| other == first).then_some(first)
    }
}

fn different_timeouts(seed: &ObjectRef) -> Problem {
    Problem {
        severity: Severity::Warning,
        reason: "several-seeds",
        object: seed.clone(),
        field: "spec.nodeportProxy.envoy.connectionSettings".into(),
        message: "another Seed has other settings, so those of none are used".into(),
        remedy: "name the Seed that this gateway is of with --seed, or give the settings as flags".into(),
    }
}

/// Every object of one kind, and which of them are active.
#[derive(Debug)]
pub(super) struct Level<T> {
    objects: BTreeMap<ObjectKey, Versions<T>>,
    /// Oldest first.
    active: Vec<Active<T>>,
}

/// An object as it is wanted, and its last usable version.
#[derive(Debug)]
struct Versions<T> {
    usable: Option<Arc<T>>,
    wanted: Arc<T>,
    problems: Vec<Problem>,
}

/// An object that counts, in its last usable version if there is one.
#[derive(Debug)]
pub(super) struct Active<T> {
    pub(super) object: Arc<T>,
    /// No version of it was ever usable; Clusters that depend on it must wait.
    pub(super) refused: bool,
}

impl<T> AsRef<T> for Active<T> {
    fn as_ref(&self) -> &T {
        &self.object
    }
}

impl<T> Default for Level<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), active: Vec::new() }
    }
}

/// What Seeds and configurations have in common.
pub(super) trait LevelObject: Sized {
    const KIND: Kind;

    fn meta(&self) -> &ObjectMeta;

    fn validate(&self) -> Verdict;

    /// The problems of this object that the older ones cause, and whether it is active nevertheless.
    fn beside(&self, older_ones: &[Active<Self>]) -> (Vec<Problem>, bool);
}

impl<T: LevelObject> Level<T> {
    /// Adds a new version.
    pub(super) fn set(&mut self, object: T) {
        let key = object.meta().key();
        let Verdict { problems, refused } = object.validate();
        let wanted = Arc::new(object);
        let before = self.objects.remove(&key).and_then(|versions| versions.usable);
        let usable = if refused { before } else { Some(wanted.clone()) };
        self.objects.insert(key, Versions { usable, wanted, problems });
    }

    /// Removes an object.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.objects.remove(key);
    }

    /// Computes anew which objects are active of those that `count`, and returns all problems of each object.
    fn reconcile(&mut self, count: impl Fn(&T) -> bool) -> Vec<(ObjectRef, Vec<Problem>)> {
        let mut by_age: Vec<&Versions<T>> = self.objects.values().collect();
        // Stable: objects without an age stay in the order of their names.
        by_age.sort_by_key(|versions| {
            let born = versions.wanted.meta().creation_timestamp;
            (born.is_none(), born)
        });
        self.active.clear();
        let mut all = Vec::new();
        for versions in by_age {
            let object = versions.usable.as_ref().unwrap_or(&versions.wanted).clone();
            if !count(&object) {
                all.push((ObjectRef::new(T::KIND, versions.wanted.meta()), Vec::new()));
                continue;
            }
            let (beside, counts) = object.beside(&self.active);
            let problems = versions.problems.iter().cloned().chain(beside).collect();
            all.push((ObjectRef::new(T::KIND, versions.wanted.meta()), problems));
            if counts {
                self.active.push(Active { object, refused: versions.usable.is_none() });
            }
        }
        all
    }

    /// The active objects, oldest first.
    pub(super) fn active(&self) -> &[Active<T>] {
        &self.active
    }
}

fn error<T: LevelObject>(
    object: &T,
    reason: &'static str,
    field: String,
    message: String,
    remedy: &str,
) -> Problem {
    Problem {
        severity: Severity::Error,
        reason,
        object: ObjectRef::new(T::KIND, object.meta()),
        field,
        message,
        remedy: remedy.into(),
    }
}

impl LevelObject for Seed {
    const KIND: Kind = Kind::Seed;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn validate(&self) -> Verdict {
        validate::seed(self)
    }

    fn beside(&self, older_ones: &[Active<Self>]) -> (Vec<Problem>, bool) {
        let name = &self.metadata.name;
        if let Some(older) = older_ones.iter().find(|older| older.object.metadata.name == *name) {
            let older = ObjectRef::new(Kind::Seed, &older.object.metadata);
            let message =
                format!("{older} has the same name {name:?} and is the elder, or the first of equals");
            let problem = error(
                self,
                "duplicate-seed",
                "metadata.name".into(),
                message,
                "remove or rename one of the two",
            );
            return (vec![problem], false);
        }
        let taken = |datacenter: &str| {
            let older =
                older_ones.iter().find(|older| older.object.spec.datacenters.contains_key(datacenter))?;
            let field = format!("spec.datacenters.{datacenter}");
            let message = format!(
                "the datacenter {datacenter:?} belongs to {}, whose clusters keep it",
                ObjectRef::new(Kind::Seed, &older.object.metadata)
            );
            Some(error(
                self,
                "duplicate-datacenter",
                field,
                message,
                "rename it, or remove it from one of the two",
            ))
        };
        (self.spec.datacenters.keys().filter_map(|name| taken(name)).collect(), true)
    }
}

impl LevelObject for KubermaticConfiguration {
    const KIND: Kind = Kind::KubermaticConfiguration;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn validate(&self) -> Verdict {
        validate::configuration(self)
    }

    fn beside(&self, older_ones: &[Active<Self>]) -> (Vec<Problem>, bool) {
        let Some(older) = older_ones.first() else { return (Vec::new(), true) };
        let older = ObjectRef::new(Self::KIND, &older.object.metadata);
        let message =
            format!("an installation has one configuration, and {older} is it: this one is ignored");
        (vec![error(self, "duplicate-configuration", String::new(), message, "remove one of the two")], false)
    }
}
