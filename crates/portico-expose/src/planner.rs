//! All objects together: each change in, what follows from it out.
//!
//! # Guarantees
//! - One changed Cluster is planned anew by itself; a changed Seed plans its own clusters anew; only what really differs
//!   comes out.
//! - What worked keeps working: an object that must not be used is reported, and its last usable version stays in force.
//! - A Cluster that never was usable gets no Services, and a policy all the same: Services that others made for it must not
//!   stand open because its allow list could not be read.
//! - A Service that somebody wrote takes the place of a planned one of the same name.
//! - A Cluster keeps strategy and NodePorts from one run to the next, also while its manifest cannot be read.
//!
//! # Assumptions
//! - Whoever calls stores the [`Memory`] when [`Planner::revision`] grew, before the outputs take effect, and calls
//!   [`Planner::first_picture_complete`] once, after the first complete set of objects.

mod explicit;
mod levels;

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::{CLUSTER_NAMESPACE_PREFIX, ClusterName};
use portico_api::policy::{AllowList, ClusterPolicy};
use portico_api::port_range::PortRange;
use portico_api::problem::{Problem, Severity};
use portico_api::seed::{Seed, Timeouts};
use portico_api::service::Service;
use portico_api::strategy::ExposeStrategy;

use self::explicit::{ExplicitServices, OUTSIDE_RANGE, node_ports_exhausted};
use self::levels::{Active, Level, LevelObject};
use crate::address::Known;
use crate::change::{Change, Output};
use crate::draw::Draw;
use crate::hosts::HostSuffix;
use crate::memory::Memory;
use crate::node_ports::PortKey;
use crate::plan::{Inputs, LoadBalancers, Plan, exposed, node_ports_needed, plan};
use crate::policy::policy;
use crate::resolve::{DecidedBy, Decision, seed_of, strategy};
use crate::services::APISERVER_PORT;
use crate::validate::{self, Before, ClusterContext};

/// What the planner is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Objects come from a directory: Services are planned, NodePorts drawn, the gateway plays every load balancer, and
    /// strategy changes are guarded.
    Plan,
    /// KKP is at work: Services exist, its webhook guards strategy changes. Only policies and problems come out; Services
    /// pass through as they are.
    Observe,
}

/// What the planner must be told besides the objects.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What it is for.
    pub mode: Mode,
    /// External addresses of the seed's nodes, if known.
    pub node_ips: Vec<IpAddr>,
    /// Ports the gateway itself listens on: they are never drawn as NodePorts.
    pub reserved_ports: Vec<u16>,
    /// Where clients find the gateway that routes by server name.
    pub sni_port: u16,
}

impl Settings {
    /// Settings for `mode` where nothing is known of nodes and listeners.
    pub fn new(mode: Mode) -> Self {
        Self { mode, node_ips: Vec::new(), reserved_ports: Vec::new(), sni_port: APISERVER_PORT }
    }
}

/// A Cluster as it is wanted, and as it is in force.
#[derive(Debug)]
struct Slot {
    wanted: Arc<Cluster>,
    good: Option<Good>,
    /// As it was handed out.
    policy: Option<Arc<ClusterPolicy>>,
}

/// What is in force for a Cluster.
#[derive(Debug)]
struct Good {
    cluster: Arc<Cluster>,
    decision: Decision,
    seed: Arc<Seed>,
    served: Box<[Served]>,
}

/// A planned Service that was handed out: its digest tells whether it changed, at an eightieth of its size. `None` where
/// somebody's own Service took its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Served {
    name: &'static str,
    digest: Option<u64>,
}

/// A Cluster that may be put into force.
struct Approved {
    decision: Decision,
    seed: Arc<Seed>,
    problems: Vec<Problem>,
}

/// Every object, and what follows from them.
#[derive(Debug)]
pub struct Planner {
    settings: Settings,
    configurations: Level<KubermaticConfiguration>,
    seeds: Level<Seed>,
    clusters: HashMap<ClusterName, Slot>,
    explicit: ExplicitServices,
    memory: Memory,
    /// Grows whenever a remembered strategy changed.
    strategies_revision: u64,
    draw: Draw,
    timeouts: Timeouts,
    problems: BTreeMap<ObjectRef, Vec<Problem>>,
    /// Clusters that wait for NodePorts.
    waiting: BTreeSet<ClusterName>,
    /// Of a step that is noted in part.
    work: Work,
}

/// What one step has still to do.
#[derive(Debug, Default)]
struct Work {
    outputs: Vec<Output>,
    /// Clusters to be planned anew.
    dirty: BTreeSet<ClusterName>,
    /// Services whose author took them away.
    vacated: Vec<ObjectKey>,
    levels_changed: bool,
}

impl Planner {
    /// A planner that knows no objects yet, and what an earlier one remembered. `seed` decides which NodePorts are drawn.
    pub fn new(settings: Settings, mut memory: Memory, seed: u64) -> Self {
        for &port in &settings.reserved_ports {
            // A port that the book gave away in an earlier life stays with its owner: moving it would break kubeconfigs.
            // The listener that wants it too says so when it cannot bind.
            let _ = memory.node_ports.fix(&PortKey::new("", "gateway", ""), port);
        }
        Self {
            explicit: ExplicitServices::new(&settings.reserved_ports),
            settings,
            configurations: Level::default(),
            seeds: Level::default(),
            clusters: HashMap::new(),
            memory,
            strategies_revision: 0,
            draw: Draw::new(seed),
            timeouts: Timeouts::default(),
            problems: BTreeMap::new(),
            waiting: BTreeSet::new(),
            work: Work::default(),
        }
    }

    /// Notes the first part of changes that belong together as one step; what follows for Clusters comes with the last part.
    /// A Cluster judged before its Seed is read would be put into force with a strategy that nobody chose.
    pub fn note(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<Output> {
        let mut work = std::mem::take(&mut self.work);
        for change in last_of_each(changes) {
            self.take_in(change, &mut work);
        }
        let outputs = std::mem::take(&mut work.outputs);
        self.work = work;
        outputs
    }

    /// Applies changes that belong together as one step, in whatever order they come; of several for one object the last
    /// counts.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<Output> {
        let freed = self.memory.node_ports.freed();
        let outputs = self.note(changes);
        let mut work = Work { outputs, ..std::mem::take(&mut self.work) };
        if work.levels_changed {
            self.settle_levels(&mut work);
        }
        self.settle_clusters(&mut work);
        if self.memory.node_ports.freed() != freed {
            self.retry_waiting(&mut work);
        }
        work.outputs
    }

    /// What is to be stored when [`Self::revision`] grew.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Grows with every change of [`Self::memory`] that must be stored.
    pub fn revision(&self) -> u64 {
        self.memory.node_ports.revision() + self.strategies_revision
    }

    /// Everything wrong, by object.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().flatten()
    }

    /// The plan in force for a cluster.
    pub fn plan(&self, cluster: &ClusterName) -> Option<Plan> {
        let good = self.clusters.get(cluster)?.good.as_ref()?;
        Some(self.with_inputs(&good.cluster, good.decision, &good.seed, plan))
    }

    /// The plans in force for all clusters, by name.
    pub fn plans(&self) -> impl Iterator<Item = Plan> {
        let names: BTreeSet<&ClusterName> = self.clusters.keys().collect();
        names.into_iter().filter_map(|name| self.plan(name))
    }

    /// Every object there is has been applied for the first time: the NodePorts of those that are gone may be given to others
    /// if need be, and their strategies are forgotten. Not so if some object could not be read, for which `whole` is false.
    pub fn first_picture_complete(&mut self, whole: bool) -> Vec<Output> {
        let mut work = Work::default();
        if !whole {
            return work.outputs;
        }
        let freed = self.memory.node_ports.freed();
        let (clusters, explicit) = (&self.clusters, &self.explicit);
        let known = |key: &PortKey| clusters.contains_key(&ClusterName::of_namespace(key.namespace()));
        self.memory.node_ports.retain(|key, port| known(key) || explicit.holds(key, port));
        let remembered = self.memory.strategies.len();
        self.memory.strategies.retain(|name, _| clusters.contains_key(name));
        self.strategies_revision += (remembered - self.memory.strategies.len()) as u64;
        if self.memory.node_ports.freed() != freed {
            self.retry_waiting(&mut work);
        }
        work.outputs
    }

    fn take_in(&mut self, change: Change, work: &mut Work) {
        match change {
            Change::Service(service) => self.set_service(*service, work),
            Change::NoService(key) => self.remove_service(key, work),
            Change::Configuration(configuration) => {
                self.configurations.set(*configuration);
                work.levels_changed = true;
            }
            Change::NoConfiguration(key) => {
                self.configurations.remove(&key);
                self.report(ObjectRef { kind: Kind::KubermaticConfiguration, key }, Vec::new(), work);
                work.levels_changed = true;
            }
            Change::Seed(seed) => {
                self.seeds.set(*seed);
                work.levels_changed = true;
            }
            Change::NoSeed(key) => {
                self.seeds.remove(&key);
                self.report(ObjectRef { kind: Kind::Seed, key }, Vec::new(), work);
                work.levels_changed = true;
            }
            Change::Cluster(cluster) => self.set_cluster(*cluster, work),
            Change::NoCluster(name) => self.remove_cluster(&name, work),
        }
    }

    fn set_service(&mut self, service: Service, work: &mut Work) {
        if self.settings.mode == Mode::Observe {
            work.outputs.push(Output::Service(Arc::new(service)));
            return;
        }
        let object = ObjectRef::new(Kind::Service, &service.metadata);
        let range = self.node_port_range();
        let (service, problems) =
            self.explicit.set(service, &mut self.memory.node_ports, range, &mut self.draw);
        self.release_unused(&object.key);
        self.report(object, problems, work);
        work.dirty.extend(self.cluster_in(&service.metadata.namespace));
        work.outputs.push(Output::Service(Arc::new(service)));
    }

    fn remove_service(&mut self, key: ObjectKey, work: &mut Work) {
        if self.settings.mode == Mode::Observe {
            work.outputs.push(Output::NoService(key));
            return;
        }
        if self.explicit.remove(&key, &mut self.memory.node_ports) {
            self.report(ObjectRef { kind: Kind::Service, key: key.clone() }, Vec::new(), work);
            work.dirty.extend(self.cluster_in(&key.namespace));
            work.vacated.push(key);
        }
    }

    fn set_cluster(&mut self, mut cluster: Cluster, work: &mut Work) {
        // Clusters have none, but nothing keeps people from writing one.
        cluster.metadata.namespace = "".into();
        let name = cluster.name();
        let wanted = Arc::new(cluster.trimmed());
        match self.clusters.get_mut(&name) {
            Some(slot) => slot.wanted = wanted,
            None => {
                self.clusters.insert(name.clone(), Slot { wanted, good: None, policy: None });
            }
        }
        work.dirty.insert(name);
    }

    fn remove_cluster(&mut self, name: &ClusterName, work: &mut Work) {
        let Some(slot) = self.clusters.remove(name) else { return };
        self.waiting.remove(name);
        self.strategies_revision += u64::from(self.memory.strategies.remove(name).is_some());
        let namespace = name.namespace();
        for served in slot.good.iter().flat_map(|good| &good.served).filter(|served| served.digest.is_some())
        {
            work.outputs.push(Output::NoService(ObjectKey::new(&namespace, served.name)));
        }
        self.release_all_but(&namespace, &[]);
        self.report(ObjectRef::new(Kind::Cluster, &slot.wanted.metadata), Vec::new(), work);
        work.outputs.push(Output::NoPolicy(name.clone()));
    }

    /// Works out which Seeds and configuration count now, and which clusters that concerns.
    fn settle_levels(&mut self, work: &mut Work) {
        let configuration = self.configurations.active().first().map(|active| active.object.clone());
        let range = self.node_port_range();
        let problems: Vec<_> = self.configurations.settle().into_iter().chain(self.seeds.settle()).collect();
        for (object, problems) in problems {
            self.report(object, problems, work);
        }
        if self.node_port_range() != range {
            self.judge_fixed_ports(work);
        }
        let timeouts = self
            .seeds
            .active()
            .first()
            .filter(|active| !active.refused)
            .map_or_else(Timeouts::default, |active| {
                active.object.spec.nodeport_proxy.envoy.connection_settings.effective()
            });
        if timeouts != self.timeouts {
            self.timeouts = timeouts;
            work.outputs.push(Output::Timeouts(timeouts));
        }
        let now = self.configurations.active().first().map(|active| &active.object);
        let same_configuration = match (&configuration, now) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            (None, None) => true,
            _ => false,
        };
        let concerned = self
            .clusters
            .iter()
            .filter(|(_, slot)| !same_configuration || !self.is_settled(slot))
            .map(|(name, _)| name.clone());
        work.dirty.extend(concerned);
    }

    /// Says anew which NodePorts of written Services lie outside the range: it is another one.
    fn judge_fixed_ports(&mut self, work: &mut Work) {
        for (object, outside) in self.explicit.outside(self.node_port_range()) {
            let mut problems = self.problems.get(&object).cloned().unwrap_or_default();
            problems.retain(|problem| problem.reason != OUTSIDE_RANGE);
            problems.extend(outside);
            self.report(object, problems, work);
        }
    }

    /// Whether a cluster is in force as wanted, on the version of the seed that counts now.
    fn is_settled(&self, slot: &Slot) -> bool {
        let Some(good) = &slot.good else { return false };
        let seed = seed_of(&slot.wanted, self.seeds.active());
        Arc::ptr_eq(&slot.wanted, &good.cluster)
            && seed.is_ok_and(|active| !active.refused && Arc::ptr_eq(&active.object, &good.seed))
    }

    fn settle_clusters(&mut self, work: &mut Work) {
        for name in std::mem::take(&mut work.dirty) {
            self.settle_cluster(&name, work);
        }
        for key in std::mem::take(&mut work.vacated) {
            if !self.is_served(&key) {
                // Its number is free; a planned Service in its place would have kept it.
                self.release_unused(&key);
                work.outputs.push(Output::NoService(key));
            }
        }
    }

    /// Puts a Cluster into force as it is wanted, or, if that must not be, as it was.
    fn settle_cluster(&mut self, name: &ClusterName, work: &mut Work) {
        let Some(mut slot) = self.clusters.remove(name) else { return };
        self.waiting.remove(name);
        let wanted = slot.wanted.clone();
        let before = slot.good.as_ref().map(|good| (good.cluster.clone(), good.decision));
        let seed_before = slot.good.as_ref().map(|good| good.seed.clone());
        let (problems, in_force) = match self.approve_wanted(&wanted, before.as_ref(), name) {
            Ok(approved) => (approved.problems.clone(), Some((wanted.clone(), approved))),
            Err(mut problems) => {
                let as_before = before.as_ref().zip(seed_before).map(|((cluster, decision), seed)| {
                    // By the Seed as it is now if that may be, else by the Seed as it was.
                    let unchanged = Approved { decision: *decision, seed, problems: Vec::new() };
                    (cluster.clone(), self.approve(cluster, before.as_ref()).unwrap_or(unchanged))
                });
                if let Some((cluster, approved)) = &as_before
                    && let Err(problem) = self.allocate(cluster, approved)
                {
                    // It stays in force all the same, with the ports it has.
                    self.waiting.insert(name.clone());
                    if !problems.contains(&problem) {
                        problems.push(*problem);
                    }
                }
                (problems, as_before)
            }
        };
        let policy = match &in_force {
            Some((cluster, approved)) => {
                Arc::new(policy(cluster, approved.decision.strategy, &approved.seed, self.balancers()))
            }
            None => self.cautious_policy(&wanted),
        };
        // Before the Services: none of them may be open for a moment to those who are not admitted.
        if slot.policy.as_ref() != Some(&policy) {
            slot.policy = Some(policy.clone());
            work.outputs.push(Output::Policy(policy));
        }
        if let Some((cluster, approved)) = in_force {
            let before = slot.good.take().map(|good| good.served).unwrap_or_default();
            let served = self.serve(&cluster, &approved, &before, work);
            self.remember(name, approved.decision.strategy);
            slot.good = Some(Good { cluster, decision: approved.decision, seed: approved.seed, served });
        }
        self.report(ObjectRef::new(Kind::Cluster, &wanted.metadata), problems, work);
        self.clusters.insert(name.clone(), slot);
    }

    /// Whether the wanted version of a Cluster may be put into force, and its NodePorts if so.
    fn approve_wanted(
        &mut self,
        wanted: &Arc<Cluster>,
        before: Option<&(Arc<Cluster>, Decision)>,
        name: &ClusterName,
    ) -> Result<Approved, Vec<Problem>> {
        if let Some((in_force, _)) = before
            && self.settings.mode == Mode::Plan
            && wanted.spec.pause
        {
            return Err(paused(wanted, in_force));
        }
        let approved = self.approve(wanted, before)?;
        match self.allocate(wanted, &approved) {
            Ok(()) => Ok(approved),
            Err(problem) => {
                self.waiting.insert(name.clone());
                Err(approved.problems.into_iter().chain([*problem]).collect())
            }
        }
    }

    /// Judges one version of a Cluster by the Seeds and configuration that count now.
    fn approve(
        &self,
        cluster: &Arc<Cluster>,
        before: Option<&(Arc<Cluster>, Decision)>,
    ) -> Result<Approved, Vec<Problem>> {
        let active = seed_of(cluster, self.seeds.active()).map_err(|problem| vec![*problem])?;
        let configuration = self.configurations.active().first();
        if active.refused {
            return Err(vec![waits_for(cluster, &*active.object)]);
        }
        if let Some(configuration) = configuration.filter(|configuration| configuration.refused) {
            return Err(vec![waits_for(cluster, &*configuration.object)]);
        }
        let configuration = configuration.map(|active| &*active.object);
        let seed = active.object.clone();
        // KKP's own webhook guards the strategy, and a watch may skip the version that carried the label.
        let before = before.filter(|_| self.settings.mode == Mode::Plan);
        let mut decision = strategy(cluster, &seed, configuration);
        let mut kept = None;
        if let Some((old, in_force)) = before
            && decision.strategy != in_force.strategy
            && !cluster.may_migrate()
            && cluster.spec.expose_strategy == old.spec.expose_strategy
        {
            kept = Some(keeps_strategy(cluster, in_force.strategy, decision));
            decision = Decision { strategy: in_force.strategy, decided_by: DecidedBy::Before };
        }
        if before.is_none()
            && let Some(&strategy) = self.memory.strategies.get(&cluster.name())
            && decision.strategy != strategy
            && !cluster.may_migrate()
        {
            // Changed while no gateway ran. The rest of the object is used.
            kept = Some(match decision.decided_by {
                DecidedBy::Cluster => validate::strategy_change(cluster, strategy, decision),
                _ => keeps_strategy(cluster, strategy, decision),
            });
            decision = Decision { strategy, decided_by: DecidedBy::Before };
        }
        let before = before.map(|(cluster, decision)| Before { cluster, strategy: decision.strategy });
        let context = ClusterContext { cluster, decision, seed: &seed, configuration, before };
        let verdict = validate::cluster(&context);
        let nowhere = self.address_unknown(&context);
        let problems = kept.into_iter().chain(verdict.problems).chain(nowhere).collect();
        if verdict.refused { Err(problems) } else { Ok(Approved { decision, seed, problems }) }
    }

    /// That nobody can be told where a Cluster is reached, although it is. (Where KKP is at work, it finds the address.)
    fn address_unknown(&self, context: &ClusterContext<'_>) -> Option<Problem> {
        let ClusterContext { cluster, decision, seed, configuration, .. } = *context;
        let named = HostSuffix::of(&cluster.name(), seed, configuration).is_some();
        // Tunneling is refused without a domain.
        if self.settings.mode == Mode::Observe || named || decision.strategy == ExposeStrategy::Tunneling {
            return None;
        }
        let on_nodes = decision.strategy == ExposeStrategy::NodePort && seed.spec.nodeport_proxy.disable;
        let (why, or_else) = match on_nodes {
            true if self.settings.node_ips.is_empty() => (
                format!(
                    "{} disables its nodeport-proxy and no address of a seed node is known",
                    ObjectRef::new(Kind::Seed, &seed.metadata)
                ),
                "name the addresses of the seed's nodes with --node-address",
            ),
            false if cluster.status.address.ip.is_none() => (
                "no address of the gateway is known".to_owned(),
                "write the address of the gateway into status.address.ip of the Cluster",
            ),
            _ => return None,
        };
        Some(Problem {
            severity: Severity::Warning,
            reason: "address-unknown",
            object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
            field: String::new(),
            message: format!("no address can be given to its users: there is no domain, and {why}"),
            remedy: format!("set spec.ingress.domain of the KubermaticConfiguration, or {or_else}"),
        })
    }

    /// Sees to it that a Cluster has the NodePorts it needs, and no more.
    fn allocate(&mut self, cluster: &Cluster, approved: &Approved) -> Result<(), Box<Problem>> {
        if self.settings.mode == Mode::Observe {
            return Ok(());
        }
        let namespace = cluster.name().namespace();
        let needed: Vec<PortKey> = node_ports_needed(cluster, approved.decision.strategy, &approved.seed)
            .filter(|(service, _)| !self.explicit.contains(&ObjectKey::new(&namespace, service)))
            .map(|(service, port)| PortKey::new(&namespace, service, port))
            .collect();
        self.memory.node_ports.allocate(&needed, self.node_port_range(), &mut self.draw).map_err(
            |exhausted| {
                Box::new(node_ports_exhausted(&ObjectRef::new(Kind::Cluster, &cluster.metadata), &exhausted))
            },
        )?;
        self.release_all_but(&namespace, &needed);
        Ok(())
    }

    fn remember(&mut self, name: &ClusterName, strategy: ExposeStrategy) {
        if self.settings.mode == Mode::Plan {
            let before = self.memory.strategies.insert(name.clone(), strategy);
            self.strategies_revision += u64::from(before != Some(strategy));
        }
    }

    /// Hands out the Services of a Cluster that differ from those before.
    fn serve(
        &self,
        cluster: &Cluster,
        approved: &Approved,
        before: &[Served],
        work: &mut Work,
    ) -> Box<[Served]> {
        if self.settings.mode == Mode::Observe {
            return Box::default();
        }
        let exposed = self.with_inputs(cluster, approved.decision, &approved.seed, exposed);
        let mut served = Vec::with_capacity(exposed.len());
        for (entry, service) in exposed {
            let key = service.metadata.key();
            let overridden = self.explicit.contains(&key);
            let now = Served { name: entry.service, digest: (!overridden).then(|| digest(&service)) };
            let as_before = before.contains(&now);
            served.push(now);
            if as_before {
                continue;
            }
            if overridden {
                let text =
                    format!("takes the place of the Service planned for Cluster {}", cluster.metadata.name);
                work.outputs.push(Output::Note(ObjectRef { kind: Kind::Service, key }, text));
            } else {
                work.outputs.push(Output::Planned(Arc::new(service)));
            }
        }
        let namespace = cluster.name().namespace();
        for old in before.iter().filter(|old| !served.iter().any(|now| now.name == old.name)) {
            if old.digest.is_some() {
                work.outputs.push(Output::NoService(ObjectKey::new(&namespace, old.name)));
            }
        }
        served.into()
    }

    /// What follows from a Cluster together with all that is known here.
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
                .or_else(|| self.memory.node_ports.get(&PortKey::new(&namespace, service, port)))
        };
        // Somebody who copied a Cluster out of an installation brought along what was found there.
        let known = Known {
            resolved: cluster.status.address.ip.into_iter().collect(),
            node_ips: self.settings.node_ips.clone(),
            ..Known::default()
        };
        let load_balancers = self.balancers();
        let configuration = self.configurations.active().first().map(|active| &*active.object);
        follows(&Inputs {
            cluster,
            decision,
            seed,
            configuration,
            node_ports: &node_ports,
            known: &known,
            load_balancers,
            sni_port: self.settings.sni_port,
        })
    }

    /// The policy of a Cluster that cannot be put into force. Where its allow list cannot be known, nobody is admitted.
    fn cautious_policy(&self, cluster: &Cluster) -> Arc<ClusterPolicy> {
        let own = &cluster.spec.api_server_allowed_ip_ranges.cidr_blocks;
        let readable = |seed: &Seed| {
            let defaults = &seed.spec.default_api_server_allowed_ip_ranges;
            own.iter().chain(defaults).all(|network| network.get().is_some())
        };
        let (seed, known) = match seed_of(cluster, self.seeds.active()) {
            Ok(active) => (active.object.clone(), readable(&active.object)),
            Err(_) => {
                let seeds = self.seeds.active();
                let no_defaults = |active: &Active<Seed>| {
                    active.object.spec.default_api_server_allowed_ip_ranges.is_empty()
                };
                let none = Arc::<Seed>::default();
                let known = readable(&none) && (!own.is_empty() || seeds.iter().all(no_defaults));
                (none, known)
            }
        };
        let configuration = self.configurations.active().first().map(|active| &*active.object);
        let decision = strategy(cluster, &seed, configuration);
        let mut policy = policy(cluster, decision.strategy, &seed, self.balancers());
        if !known {
            policy.allow = AllowList::nobody();
        }
        Arc::new(policy)
    }

    /// Tries those again that found the NodePort range used up, or their port taken.
    fn retry_waiting(&mut self, work: &mut Work) {
        for service in self.explicit.take_waiting().into_values() {
            self.set_service(service, work);
        }
        for name in self.waiting.clone() {
            self.settle_cluster(&name, work);
            if self.waiting.contains(&name) {
                break;
            }
        }
        self.settle_clusters(work);
    }

    /// The Cluster whose Services live in `namespace`, if there is one.
    fn cluster_in(&self, namespace: &str) -> Option<ClusterName> {
        let name = ClusterName::new(namespace.strip_prefix(CLUSTER_NAMESPACE_PREFIX)?);
        self.clusters.contains_key(&name).then_some(name)
    }

    /// Whether a Service of this name is there, written or planned.
    fn is_served(&self, key: &ObjectKey) -> bool {
        let planned = || {
            let slot = self.clusters.get(&self.cluster_in(&key.namespace)?)?;
            let served = &slot.good.as_ref()?.served;
            served.iter().find(|served| *served.name == *key.name)?.digest
        };
        self.explicit.contains(key) || planned().is_some()
    }

    /// Frees the NodePorts of planned Services in `namespace` that are not among `needed`.
    fn release_all_but(&mut self, namespace: &str, needed: &[PortKey]) {
        let gone: Vec<PortKey> = self
            .memory
            .node_ports
            .of_namespace(namespace)
            .filter(|(key, port)| !needed.contains(key) && !self.explicit.holds(key, *port))
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            self.memory.node_ports.release(&key);
        }
    }

    /// Frees the NodePorts that were drawn for a written Service and that it does not use any more.
    fn release_unused(&mut self, service: &ObjectKey) {
        let prefix = format!("{service}/");
        let gone: Vec<PortKey> = self
            .memory
            .node_ports
            .of_namespace(&service.namespace)
            .filter(|(key, port)| key.as_str().starts_with(&prefix) && !self.explicit.holds(key, *port))
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            self.memory.node_ports.release(&key);
        }
    }

    fn balancers(&self) -> LoadBalancers {
        match self.settings.mode {
            Mode::Plan => LoadBalancers::Gateway,
            Mode::Observe => LoadBalancers::Cloud,
        }
    }

    fn node_port_range(&self) -> PortRange {
        let configuration = self.configurations.active().first().map(|active| &active.object);
        let range = configuration.and_then(|found| found.spec.user_cluster.node_port_range.get());
        range.copied().unwrap_or(PortRange::NODE_PORTS)
    }

    fn report(&mut self, object: ObjectRef, problems: Vec<Problem>, work: &mut Work) {
        let before = self.problems.get(&object).map_or(&[][..], Vec::as_slice);
        if *before == *problems {
            return;
        }
        if problems.is_empty() {
            self.problems.remove(&object);
        } else {
            self.problems.insert(object.clone(), problems.clone());
        }
        work.outputs.push(Output::Problems(object, problems));
    }
}

/// Of several changes for one object only the last, what others depend on first.
fn last_of_each(changes: impl IntoIterator<Item = Change>) -> Vec<Change> {
    let mut changes: Vec<Change> = changes.into_iter().collect();
    if changes.len() > 1 {
        let mut seen = HashSet::new();
        changes.reverse();
        changes.retain(|change| seen.insert(change.object()));
        changes.reverse();
        changes.sort_by_key(Change::rank);
    }
    changes
}

fn digest(service: &Service) -> u64 {
    let mut hasher = DefaultHasher::new();
    service.hash(&mut hasher);
    hasher.finish()
}

/// A paused cluster stays as it is, and that is no problem unless something was changed meanwhile.
fn paused(wanted: &Cluster, in_force: &Cluster) -> Vec<Problem> {
    let mut running = in_force.clone();
    running.spec.pause = true;
    running.status = wanted.status.clone();
    running.metadata = wanted.metadata.clone();
    if *wanted == running {
        return Vec::new();
    }
    vec![Problem {
        severity: Severity::Warning,
        reason: "paused",
        object: ObjectRef::new(Kind::Cluster, &wanted.metadata),
        field: "spec.pause".into(),
        message: "it is true, so later changes of this Cluster wait".into(),
        remedy: "set it to false to apply them".into(),
    }]
}

fn waits_for<T: LevelObject>(cluster: &Cluster, upper: &T) -> Problem {
    let upper = ObjectRef::new(T::KIND, upper.meta());
    Problem {
        severity: Severity::Error,
        reason: "waits-for-another",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: String::new(),
        message: format!("it cannot be exposed while {upper} has problems of its own"),
        remedy: format!("mend {upper}"),
    }
}

fn keeps_strategy(cluster: &Cluster, old: ExposeStrategy, decided: Decision) -> Problem {
    let new = decided.strategy;
    Problem {
        severity: Severity::Warning,
        reason: "keeps-strategy",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: "spec.exposeStrategy".into(),
        message: format!(
            "it stays at {old} although {} now says {new}: existing clusters are not moved",
            decided.decided_by
        ),
        remedy: format!(
            "write {old} to make it plain, or add the label {} to move it",
            portico_api::annotations::MIGRATION_LABEL
        ),
    }
}

#[cfg(test)]
mod tests;
