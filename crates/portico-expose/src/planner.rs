//! All objects together: one change in, what follows from it out.
//!
//! - A changed Cluster is planned by itself. A changed Seed plans its own clusters. Only real differences
//!   come out.
//! - An object that must not be used is reported, and its last usable version stays in force.
//! - A Cluster that never was usable gets a policy but no Services. Services made by others must not be open
//!   because its allow list cannot be read.
//! - A Service that a user wrote replaces a planned one of the same name.
//! - A Cluster keeps strategy and NodePorts across restarts, also while its manifest cannot be read.
//!
//! The caller stores [`Planner::persisted`] when [`Planner::revision`] grew, before the outputs take effect,
//! and calls [`Planner::initial_sync_complete`] once, after the first complete set of objects.

mod approval;
mod entry;
mod explicit;
mod levels;
mod problems;
mod served;
mod settings;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::cluster::Cluster;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::policy::ClusterPolicy;
use portico_api::problem::Problem;
use portico_api::seed::{Seed, Timeouts};
use portico_api::service::Service;
use portico_api::strategy::ExposeStrategy;

use self::approval::{Approved, Judge, known, paused, unapproved_policy};
use self::entry::{ClusterEntry, InForce};
use self::explicit::{ExplicitServices, OUTSIDE_RANGE, node_ports_exhausted};
use self::levels::Levels;
use self::problems::ProblemIndex;
use self::served::{Served, serve};
pub use self::settings::{Mode, Settings};
use crate::change::{Output, PlannerChange};
use crate::inputs::{Inputs, Scope};
use crate::node_ports::PortKey;
use crate::persisted::PersistedState;
use crate::plan::{Plan, exposed, node_ports_needed, plan};
use crate::policy::policy;
use crate::random::Random;
use crate::resolve::Decision;

/// Every object, and what follows from them.
#[derive(Debug)]
pub struct Planner {
    settings: Settings,
    levels: Levels,
    clusters: HashMap<ClusterName, ClusterEntry>,
    explicit: ExplicitServices,
    persisted: PersistedState,
    /// Grows whenever a persisted strategy changed.
    strategies_revision: u64,
    random: Random,
    timeouts: Timeouts,
    problems: ProblemIndex,
    /// Clusters that wait for NodePorts.
    waiting: BTreeSet<ClusterName>,
    /// The rest of a step that is noted in part.
    work: Work,
}

/// What one step has still to do.
#[derive(Debug, Default)]
struct Work {
    outputs: Vec<Output>,
    /// Clusters to reconcile.
    dirty: BTreeSet<ClusterName>,
    /// Services that their author deleted.
    vacated: Vec<ObjectKey>,
    levels_changed: bool,
}

impl Planner {
    /// A planner without objects. `persisted` is of an earlier run, `seed` decides which NodePorts are
    /// allocated.
    pub fn new(settings: Settings, mut persisted: PersistedState, seed: u64) -> Self {
        for &port in &settings.reserved_ports {
            // A port that was allocated in an earlier run stays with its owner: moving it would break
            // kubeconfigs. The listener that wants it too reports that it cannot bind.
            let _ = persisted.node_ports.fix(&PortKey::new("", "gateway", ""), port);
        }
        Self {
            explicit: ExplicitServices::new(&settings.reserved_ports),
            levels: Levels::new(settings.seed.clone()),
            settings,
            clusters: HashMap::new(),
            persisted,
            strategies_revision: 0,
            random: Random::new(seed),
            timeouts: Timeouts::default(),
            problems: ProblemIndex::default(),
            waiting: BTreeSet::new(),
            work: Work::default(),
        }
    }

    /// Notes the first part of changes that belong together as one step; [`Self::apply`] brings the last
    /// part. Clusters are reconciled then: one judged before its Seed is read would get a strategy that no
    /// object names.
    pub fn note(&mut self, changes: impl IntoIterator<Item = PlannerChange>) -> Vec<Output> {
        let mut work = std::mem::take(&mut self.work);
        for change in last_of_each(changes) {
            self.note_change(change, &mut work);
        }
        let outputs = std::mem::take(&mut work.outputs);
        self.work = work;
        outputs
    }

    /// Applies changes that belong together as one step, in any order; of several for one object the last
    /// counts.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = PlannerChange>) -> Vec<Output> {
        let freed = self.persisted.node_ports.freed();
        let outputs = self.note(changes);
        let mut work = Work { outputs, ..std::mem::take(&mut self.work) };
        if work.levels_changed {
            self.reconcile_levels(&mut work);
        }
        self.reconcile_clusters(&mut work);
        if self.persisted.node_ports.freed() != freed {
            self.retry_waiting(&mut work);
        }
        work.outputs
    }

    /// The state to store when [`Self::revision`] grew.
    pub fn persisted(&self) -> &PersistedState {
        &self.persisted
    }

    /// Grows with every change of [`Self::persisted`] that must be stored.
    pub fn revision(&self) -> u64 {
        self.persisted.node_ports.revision() + self.strategies_revision
    }

    /// Everything wrong, by object.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.iter()
    }

    /// The plan in force for a cluster.
    pub fn plan(&self, cluster: &ClusterName) -> Option<Plan> {
        let in_force = self.clusters.get(cluster)?.in_force.as_ref()?;
        Some(self.with_inputs(&in_force.cluster, in_force.decision, &in_force.seed, plan))
    }

    /// The plans in force for all clusters, by name.
    pub fn plans(&self) -> impl Iterator<Item = Plan> {
        let names: BTreeSet<&ClusterName> = self.clusters.keys().collect();
        names.into_iter().filter_map(|name| self.plan(name))
    }

    /// Every object has been applied once. NodePorts of deleted objects may now be allocated to others if no
    /// other is left, and strategies of deleted Clusters are forgotten. Not so if some object could not be
    /// read, for which `whole` is false.
    pub fn initial_sync_complete(&mut self, whole: bool) -> Vec<Output> {
        let mut work = Work::default();
        if !whole {
            return work.outputs;
        }
        let freed = self.persisted.node_ports.freed();
        let (clusters, explicit) = (&self.clusters, &self.explicit);
        let exists = |key: &PortKey| {
            ClusterName::of_namespace(key.namespace()).is_some_and(|name| clusters.contains_key(&name))
        };
        self.persisted.node_ports.retain(|key, port| exists(key) || explicit.holds(key, port));
        let before = self.persisted.strategies.len();
        self.persisted.strategies.retain(|name, _| clusters.contains_key(name));
        self.strategies_revision += (before - self.persisted.strategies.len()) as u64;
        if self.persisted.node_ports.freed() != freed {
            self.retry_waiting(&mut work);
        }
        work.outputs
    }

    // === Changes of single objects ===

    fn note_change(&mut self, change: PlannerChange, work: &mut Work) {
        match change {
            PlannerChange::Service(Change::Apply(service)) => self.set_service(*service, work),
            PlannerChange::Service(Change::Delete(key)) => self.remove_service(key, work),
            PlannerChange::Configuration(change) => {
                work.levels_changed = true;
                match change {
                    Change::Apply(configuration) => self.levels.configurations.set(*configuration),
                    Change::Delete(key) => {
                        self.levels.configurations.remove(&key);
                        let object = ObjectRef { kind: Kind::KubermaticConfiguration, key };
                        self.report(object, Vec::new(), work);
                    }
                }
            }
            PlannerChange::Seed(change) => {
                work.levels_changed = true;
                match change {
                    Change::Apply(seed) => self.levels.seeds.set(*seed),
                    Change::Delete(key) => {
                        self.levels.seeds.remove(&key);
                        self.report(ObjectRef { kind: Kind::Seed, key }, Vec::new(), work);
                    }
                }
            }
            PlannerChange::Cluster(Change::Apply(cluster)) => self.set_cluster(*cluster, work),
            PlannerChange::Cluster(Change::Delete(name)) => self.remove_cluster(&name, work),
        }
    }

    fn set_service(&mut self, service: Service, work: &mut Work) {
        if self.settings.mode == Mode::Observe {
            work.outputs.push(Output::Service(Change::Apply(Arc::new(service))));
            return;
        }
        let object = ObjectRef::new(Kind::Service, &service.metadata);
        let range = self.levels.node_port_range();
        let (service, problems) =
            self.explicit.set(service, &mut self.persisted.node_ports, range, &mut self.random);
        self.explicit.release_unused(&object.key, &mut self.persisted.node_ports);
        self.report(object, problems, work);
        work.dirty.extend(self.cluster_in(&service.metadata.namespace));
        work.outputs.push(Output::Service(Change::Apply(Arc::new(service))));
    }

    fn remove_service(&mut self, key: ObjectKey, work: &mut Work) {
        if self.settings.mode == Mode::Observe {
            work.outputs.push(Output::Service(Change::Delete(key)));
            return;
        }
        if self.explicit.remove(&key, &mut self.persisted.node_ports) {
            self.report(ObjectRef { kind: Kind::Service, key: key.clone() }, Vec::new(), work);
            work.dirty.extend(self.cluster_in(&key.namespace));
            work.vacated.push(key);
        }
    }

    fn set_cluster(&mut self, mut cluster: Cluster, work: &mut Work) {
        // Clusters have no namespace, but a manifest may name one.
        cluster.metadata.namespace = "".into();
        let name = cluster.name();
        let address = cluster.status.address.clone();
        let mut cluster = cluster.trimmed();
        if self.settings.mode == Mode::Observe {
            // What users were given; here it is not planned.
            cluster.status.address = address;
        }
        let wanted = Arc::new(cluster);
        match self.clusters.get_mut(&name) {
            Some(slot) => slot.wanted = wanted,
            None => {
                self.clusters.insert(name.clone(), ClusterEntry::new(wanted));
            }
        }
        work.dirty.insert(name);
    }

    fn remove_cluster(&mut self, name: &ClusterName, work: &mut Work) {
        let Some(slot) = self.clusters.remove(name) else { return };
        self.waiting.remove(name);
        self.strategies_revision += u64::from(self.persisted.strategies.remove(name).is_some());
        let namespace = name.namespace();
        let served = slot.in_force.iter().flat_map(|in_force| &in_force.served);
        work.outputs.extend(served.filter_map(|served| served.withdrawal(&namespace)));
        self.release_all_but(&namespace, &[]);
        self.report(ObjectRef::new(Kind::Cluster, &slot.wanted.metadata), Vec::new(), work);
        work.outputs.push(Output::Policy(Change::Delete(name.clone().into())));
    }

    // === Reconciliation ===

    /// Computes which Seeds and configuration are active now, and which Clusters that concerns.
    fn reconcile_levels(&mut self, work: &mut Work) {
        let configuration = self.levels.configuration().map(|active| active.object.clone());
        let range = self.levels.node_port_range();
        for (object, problems) in self.levels.reconcile() {
            self.report(object, problems, work);
        }
        if self.levels.node_port_range() != range {
            self.report_fixed_ports(work);
        }
        let timeouts = self.levels.timeouts().unwrap_or_default();
        if timeouts != self.timeouts {
            self.timeouts = timeouts;
            work.outputs.push(Output::Timeouts(timeouts));
        }
        let same_configuration = match (&configuration, self.levels.configuration()) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, &now.object),
            (None, None) => true,
            _ => false,
        };
        let concerned = self
            .clusters
            .iter()
            .filter(|(_, slot)| !same_configuration || !slot.is_up_to_date(&self.levels))
            .map(|(name, _)| name.clone());
        work.dirty.extend(concerned);
    }

    /// Reports again which NodePorts of written Services lie outside the range: it is another one now.
    fn report_fixed_ports(&mut self, work: &mut Work) {
        for (object, outside) in self.explicit.outside(self.levels.node_port_range()) {
            let mut problems = self.problems.of(&object).to_vec();
            problems.retain(|problem| problem.reason != OUTSIDE_RANGE);
            problems.extend(outside);
            self.report(object, problems, work);
        }
    }

    fn reconcile_clusters(&mut self, work: &mut Work) {
        for name in std::mem::take(&mut work.dirty) {
            self.reconcile_cluster(&name, work);
        }
        for key in std::mem::take(&mut work.vacated) {
            if !self.is_served(&key) {
                // A planned Service in its place would have kept the number.
                self.explicit.release_unused(&key, &mut self.persisted.node_ports);
                work.outputs.push(Output::Service(Change::Delete(key)));
            }
        }
    }

    /// Puts a Cluster into force as it is wanted or, if that must not be, as it was before.
    fn reconcile_cluster(&mut self, name: &ClusterName, work: &mut Work) {
        let Some(mut slot) = self.clusters.remove(name) else { return };
        self.waiting.remove(name);
        let (next, problems) = self.next_in_force(name, &slot);
        let policy = Arc::new(self.policy(&slot.wanted, next.as_ref()));
        // Before the Services: none of them may be open for a moment to clients that are not admitted.
        if slot.policy.as_ref() != Some(&policy) {
            slot.policy = Some(policy.clone());
            work.outputs.push(Output::Policy(Change::Apply(policy)));
        }
        if let Some((cluster, Approved { decision, seed, .. })) = next {
            let before = slot.in_force.take().map(|in_force| in_force.served).unwrap_or_default();
            let served = match self.settings.mode {
                Mode::Observe => Box::default(),
                Mode::Plan => {
                    let exposed = self.with_inputs(&cluster, decision, &seed, exposed);
                    serve(&cluster, exposed, &before, &self.explicit, &mut work.outputs)
                }
            };
            self.persist_strategy(name, decision.strategy);
            slot.in_force = Some(InForce { cluster, decision, seed, served });
        }
        self.report(ObjectRef::new(Kind::Cluster, &slot.wanted.metadata), problems, work);
        self.clusters.insert(name.clone(), slot);
    }

    /// The version of a Cluster to put into force, with its NodePorts allocated, and the problems of the
    /// wanted one.
    fn next_in_force(
        &mut self,
        name: &ClusterName,
        slot: &ClusterEntry,
    ) -> (Option<(Arc<Cluster>, Approved)>, Vec<Problem>) {
        let in_force = slot.in_force.as_ref();
        let mut problems = match self.approve_wanted(name, &slot.wanted, in_force) {
            Ok(approved) => {
                let problems = approved.problems.clone();
                return (Some((slot.wanted.clone(), approved)), problems);
            }
            Err(problems) => problems,
        };
        let Some(in_force) = in_force else { return (None, problems) };
        // By the Seed as it is now if that may be, else by the Seed as it was.
        let approved = self.judge().approve(&in_force.cluster, Some(in_force)).unwrap_or_else(|_| Approved {
            decision: in_force.decision,
            seed: in_force.seed.clone(),
            problems: Vec::new(),
        });
        if let Err(problem) = self.allocate(&in_force.cluster, &approved) {
            // It stays in force all the same, with the ports it has.
            self.waiting.insert(name.clone());
            if !problems.contains(&problem) {
                problems.push(*problem);
            }
        }
        (Some((in_force.cluster.clone(), approved)), problems)
    }

    /// Approves the wanted version of a Cluster and allocates its NodePorts.
    fn approve_wanted(
        &mut self,
        name: &ClusterName,
        wanted: &Cluster,
        in_force: Option<&InForce>,
    ) -> Result<Approved, Vec<Problem>> {
        if let Some(in_force) = in_force
            && self.settings.mode == Mode::Plan
            && wanted.spec.pause
        {
            return Err(paused(wanted, &in_force.cluster));
        }
        let approved = self.judge().approve(wanted, in_force)?;
        match self.allocate(wanted, &approved) {
            Ok(()) => Ok(approved),
            Err(problem) => {
                self.waiting.insert(name.clone());
                Err(approved.problems.into_iter().chain([*problem]).collect())
            }
        }
    }

    fn judge(&self) -> Judge<'_> {
        Judge { settings: &self.settings, levels: &self.levels, persisted: &self.persisted }
    }

    fn policy(&self, wanted: &Cluster, next: Option<&(Arc<Cluster>, Approved)>) -> ClusterPolicy {
        match next {
            Some((cluster, Approved { decision, seed, .. })) => {
                let configuration = self.levels.configuration().map(|active| &*active.object);
                let scope = Scope { cluster, decision: *decision, seed, configuration };
                policy(&scope, self.settings.load_balancers())
            }
            None => unapproved_policy(wanted, &self.levels, self.settings.load_balancers()),
        }
    }

    fn persist_strategy(&mut self, name: &ClusterName, strategy: ExposeStrategy) {
        if self.settings.mode == Mode::Plan {
            let before = self.persisted.strategies.insert(name.clone(), strategy);
            self.strategies_revision += u64::from(before != Some(strategy));
        }
    }

    /// Computes what follows from a Cluster together with its NodePorts and settings.
    fn with_inputs<T>(
        &self,
        cluster: &Cluster,
        decision: Decision,
        seed: &Seed,
        follows: impl FnOnce(&Inputs<'_>) -> T,
    ) -> T {
        let namespace = cluster.name().namespace();
        let node_ports = |service: &str, port: &str| {
            self.explicit
                .node_port(&ObjectKey::new(&namespace, service), port)
                .or_else(|| self.persisted.node_ports.get(&PortKey::new(&namespace, service, port)))
        };
        follows(&Inputs {
            scope: self.scope(cluster, decision, seed),
            node_ports: &node_ports,
            known: &known(cluster, &self.settings),
            load_balancers: self.settings.load_balancers(),
            sni_port: self.settings.sni_port,
        })
    }

    fn scope<'a>(&'a self, cluster: &'a Cluster, decision: Decision, seed: &'a Seed) -> Scope<'a> {
        let configuration = self.levels.configuration().map(|active| &*active.object);
        Scope { cluster, decision, seed, configuration }
    }

    // === NodePorts ===

    /// Allocates the NodePorts that a Cluster needs, and frees those it no longer needs.
    fn allocate(&mut self, cluster: &Cluster, approved: &Approved) -> Result<(), Box<Problem>> {
        if self.settings.mode == Mode::Observe {
            return Ok(());
        }
        let namespace = cluster.name().namespace();
        let needed: Vec<PortKey> = node_ports_needed(self.scope(cluster, approved.decision, &approved.seed))
            .filter(|(service, _)| !self.explicit.contains(&ObjectKey::new(&namespace, service)))
            .map(|(service, port)| PortKey::new(&namespace, service, port))
            .collect();
        let range = self.levels.node_port_range();
        self.persisted.node_ports.allocate(&needed, range, &mut self.random).map_err(|exhausted| {
            Box::new(node_ports_exhausted(&ObjectRef::new(Kind::Cluster, &cluster.metadata), &exhausted))
        })?;
        self.release_all_but(&namespace, &needed);
        Ok(())
    }

    /// Frees the NodePorts of planned Services in `namespace` that are not among `needed`.
    fn release_all_but(&mut self, namespace: &str, needed: &[PortKey]) {
        let explicit = &self.explicit;
        let keep = |key: &PortKey, port| needed.contains(key) || explicit.holds(key, port);
        self.persisted.node_ports.retain_in(namespace, keep);
    }

    /// Tries again the Services and Clusters that found the NodePort range used up, or their port taken.
    fn retry_waiting(&mut self, work: &mut Work) {
        for service in self.explicit.take_waiting().into_values() {
            self.set_service(service, work);
        }
        for name in self.waiting.clone() {
            self.reconcile_cluster(&name, work);
            if self.waiting.contains(&name) {
                break;
            }
        }
        self.reconcile_clusters(work);
    }

    // === Look-ups and problems ===

    /// The Cluster whose Services are in `namespace`, if there is one.
    fn cluster_in(&self, namespace: &str) -> Option<ClusterName> {
        ClusterName::of_namespace(namespace).filter(|name| self.clusters.contains_key(name))
    }

    /// Whether a Service of this name is served, written or planned.
    fn is_served(&self, key: &ObjectKey) -> bool {
        let planned = || {
            let slot = self.clusters.get(&self.cluster_in(&key.namespace)?)?;
            slot.in_force.as_ref()?.served.iter().find(|served| *served.name == *key.name)
        };
        self.explicit.contains(key) || planned().is_some_and(Served::is_planned)
    }

    fn report(&mut self, object: ObjectRef, problems: Vec<Problem>, work: &mut Work) {
        work.outputs.extend(self.problems.set(object, problems));
    }
}

/// The last of several changes for one object, in the order of [`PlannerChange::rank`].
fn last_of_each(changes: impl IntoIterator<Item = PlannerChange>) -> Vec<PlannerChange> {
    let mut changes: Vec<PlannerChange> = changes.into_iter().collect();
    if changes.len() > 1 {
        let mut seen = HashSet::new();
        changes.reverse();
        changes.retain(|change| seen.insert(change.object()));
        changes.reverse();
        changes.sort_by_key(PlannerChange::rank);
    }
    changes
}

#[cfg(test)]
mod tests;
