//! The ways into a cluster while there are two of them, and the objects that keep both open.
//!
//! A [`Door`] is the way in by one strategy. A cluster has one, or two while it migrates. Each is planned by
//! itself ([`crate::plan`]), and [`both`] merges the two plans: no strategy knows of another. A third door is
//! never open.
//!
//! This module does not decide whether a second door is opened, which of the two is published, or when one is
//! closed. Here both are simply open.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use portico_api::annotations::{EXPOSE, ExposeTypes};
use portico_api::cluster::{Address, Cluster};
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::listener::ListenerKind;
use portico_api::meta::Strings;
use portico_api::policy::ClusterPolicy;
use portico_api::service::{Service, ServiceType, TargetPort};
use portico_api::setting::Setting;
use portico_api::strategy::{AnsweredBy, ExposeStrategy};
use serde::Serialize;

use crate::certificate::SubjectNames;
use crate::migration::Now;
use crate::networks;
use crate::plan::Plan;
use crate::services::Entry;
use crate::strategy;

/// The way in by one strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Door {
    /// The strategy.
    pub strategy: ExposeStrategy,
    /// Where the agent on each worker node listens, if there is one.
    pub agent_ip: Option<IpAddr>,
}

/// What should exist while two doors are open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BothDoors {
    /// The Services of both, each once.
    pub services: Vec<Service>,
    /// What they are reached by, in the same order; the load balancer's own Service is not among them.
    pub entries: Vec<Entry>,
    /// Names on the API server's serving certificate.
    pub certificate: SubjectNames,
    /// What the cluster allows and may use.
    pub policy: ClusterPolicy,
    /// What stands in the way. An API server that KKP made listens on its NodePort. Before that is allocated,
    /// the plan has another port, and the conflict is not seen.
    pub conflicts: Vec<PortConflict>,
}

/// A Service whose pods would have to listen on two ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortConflict {
    /// The Service.
    pub service: &'static str,
    /// The port of its pods by the first door.
    pub first: Option<TargetPort>,
    /// The port of its pods by the second door.
    pub second: Option<TargetPort>,
}

/// The doors of a cluster as they are recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doors {
    /// Which there are, and how far a migration is.
    pub now: Now,
    /// The published address, which users and nodes have.
    pub first: Address,
    /// Where the cluster is reached by the second door, as far as known.
    pub second: Address,
    /// Where the agents on nodes listen, if one of the doors has agents.
    pub agent_ip: Option<IpAddr>,
}

impl Doors {
    /// One door, of which nothing is known but what the Cluster says.
    pub fn new(cluster: &Cluster, strategy: ExposeStrategy) -> Self {
        let first = cluster.status.address.clone();
        Self { now: Now::settled(strategy), first, second: Address::default(), agent_ip: None }
    }

    /// What is recorded of a cluster.
    pub fn of(exposed: &ExposedClusterSpec) -> Self {
        let second = exposed.migration.as_ref().map(|migration| &migration.second);
        let tunnel = exposed.tunnel.or(second.and_then(|second| second.tunnel));
        Self {
            now: Now::of(exposed),
            first: exposed.address.clone(),
            second: second.map(|second| second.address.clone()).unwrap_or_default(),
            agent_ip: tunnel.map(|tunnel| tunnel.agent_ip),
        }
    }

    /// The record to keep once `now` is in force. Addresses stay with their doors, also where these change
    /// places.
    #[must_use]
    pub fn moved_to(&self, now: Now) -> Self {
        let of = |strategy: ExposeStrategy| match self.now.second {
            _ if strategy == self.now.first => self.first.clone(),
            Some(second) if strategy == second.strategy => self.second.clone(),
            _ => Address::default(),
        };
        let second = now.second.map(|second| of(second.strategy)).unwrap_or_default();
        let doors = [Some(now.first), now.second.map(|second| second.strategy)];
        let has_agent = doors.into_iter().flatten().any(|door| strategy::of(door).has_agent());
        Self { now, first: of(now.first), second, agent_ip: self.agent_ip.filter(|_| has_agent) }
    }

    /// Where the agents of a door listen, if it has any. An address that the Cluster had to give up with the
    /// strategy is in the record alone.
    pub fn agent_ip(&self, cluster: &Cluster, strategy: ExposeStrategy) -> Option<IpAddr> {
        let written = !cluster.spec.cluster_network.tunneling_agent_ip.is_unset();
        let recorded = self.agent_ip.filter(|_| !written);
        Door::of(cluster, strategy).agent_ip.map(|ip| recorded.unwrap_or(ip))
    }

    /// The Cluster as it would be with the door by `strategy` alone, its address included.
    #[must_use]
    pub fn alone(&self, cluster: &Cluster, strategy: ExposeStrategy) -> Cluster {
        let door = Door { strategy, agent_ip: self.agent_ip(cluster, strategy) };
        let mut alone = door.alone(cluster);
        if let Some(second) = self.now.second {
            let address = if strategy == second.strategy { &self.second } else { &self.first };
            alone.status.address = address.clone();
        }
        alone
    }
}

impl Door {
    /// The door of `cluster` by `strategy`: its agents listen where the Cluster says, or by default.
    pub fn of(cluster: &Cluster, strategy: ExposeStrategy) -> Self {
        let has_agent = strategy::of(strategy).has_agent();
        Self { strategy, agent_ip: has_agent.then(|| networks::agent_ip(cluster)) }
    }

    /// The Cluster as it would be with this door alone. An address of agents stands where there are agents
    /// and nowhere else, as KKP's rules ask.
    #[must_use]
    pub fn alone(&self, cluster: &Cluster) -> Cluster {
        let mut alone = cluster.clone();
        alone.spec.expose_strategy = Setting::Good(self.strategy);
        let written = &mut alone.spec.cluster_network.tunneling_agent_ip;
        match self.agent_ip {
            // Left as it is: validation refuses a text that is no address, and recognises the default.
            Some(ip) if ip == networks::agent_ip(cluster) => {}
            Some(ip) => *written = Setting::Good(ip),
            None => *written = Setting::Unset,
        }
        alone
    }
}

/// The objects that keep the doors of both plans open. The plans are of one cluster. `first` is the published
/// door: where both cannot be had, it counts.
pub fn both(first: &Plan, second: &Plan) -> BothDoors {
    let conflict = |entry: &Entry| conflict(entry.service, &first.services, &second.services);
    BothDoors {
        services: union(&first.services, &second.services, |service| &service.metadata.name, add_service),
        entries: union(&first.entries, &second.entries, |entry| &entry.service, add_entry),
        certificate: SubjectNames {
            dns: &first.certificate.dns | &second.certificate.dns,
            ips: &first.certificate.ips | &second.certificate.ips,
        },
        policy: policy(first, second),
        conflicts: first.entries.iter().filter_map(conflict).collect(),
    }
}

/// All of `first` and `second`, each once. `add` brings into one of `first` what `second` has under its name.
fn union<T: Clone, N: PartialEq + ?Sized>(
    first: &[T],
    second: &[T],
    name: impl Fn(&T) -> &N,
    add: impl Fn(&mut T, &T),
) -> Vec<T> {
    let mut all = first.to_vec();
    for other in second {
        match all.iter_mut().find(|one| name(one) == name(other)) {
            Some(one) => add(one, other),
            None => all.push(other.clone()),
        }
    }
    all
}

fn add_service(service: &mut Service, other: &Service) {
    add_annotations(&mut service.metadata.annotations, &other.metadata.annotations);
    let spec = &mut service.spec;
    if reach(other.spec.service_type) > reach(spec.service_type) {
        spec.service_type = other.spec.service_type;
    }
    // A Service has the same ports under every strategy.
    for (port, other) in spec.ports.iter_mut().zip(&other.spec.ports) {
        port.node_port = port.node_port.or(other.node_port);
    }
}

/// Adds what is missing; a Service that both doors expose is exposed in every way of either.
fn add_annotations(annotations: &mut Strings, others: &Strings) {
    let exposed = [annotations.get(EXPOSE), others.get(EXPOSE)].into_iter().flatten();
    let types = exposed.filter_map(|value| ExposeTypes::parse(value).ok()).reduce(ExposeTypes::and);
    for (key, value) in others {
        annotations.entry(key.clone()).or_insert_with(|| value.clone());
    }
    if let Some(types) = types {
        annotations.insert(EXPOSE.into(), types.to_string().into());
    }
}

/// How far a Service is published: each type has what those before it have.
fn reach(service_type: ServiceType) -> u8 {
    match service_type {
        ServiceType::ExternalName => 0,
        ServiceType::ClusterIP => 1,
        ServiceType::NodePort => 2,
        ServiceType::LoadBalancer => 3,
    }
}

fn add_entry(entry: &mut Entry, other: &Entry) {
    entry.node_port = entry.node_port.or(other.node_port);
    entry.host = entry.host.take().or_else(|| other.host.clone());
    entry.authority = entry.authority.take().or_else(|| other.authority.clone());
}

/// Why gateways cannot tell whether a door is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotCounted {
    /// Clients of both doors come by the same listeners.
    SameListeners,
    /// Clients come by the seed's nodes, past all gateways.
    PastGateways,
}

impl fmt::Display for NotCounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameListeners => {
                "both doors end at the same ports of the gateway, which cannot tell their clients apart"
            }
            Self::PastGateways => "its clients come by the seed's nodes, past the gateway",
        })
    }
}

/// The kinds of listeners that clients of the door of `plan` come by, and those of `other` do not.
///
/// # Errors
/// The listeners do not tell clients of the two doors apart. The error says why.
pub fn told_apart(plan: &Plan, other: &Plan) -> Result<BTreeSet<ListenerKind>, NotCounted> {
    if plan.answered_by == AnsweredBy::SeedNodes {
        return Err(NotCounted::PastGateways);
    }
    let (kinds, others) = (listeners(plan), listeners(other));
    if kinds.is_disjoint(&others) { Ok(kinds) } else { Err(NotCounted::SameListeners) }
}

/// A Service that has neither name nor authority is exposed by port, also while that is not allocated.
fn listeners(plan: &Plan) -> BTreeSet<ListenerKind> {
    let of_entry = |entry: &Entry| {
        let by_host = entry.host.is_some().then_some(ListenerKind::Sni);
        let by_authority = entry.authority.is_some().then_some(ListenerKind::Tunnel);
        let by_port = by_host.or(by_authority).is_none().then_some(ListenerKind::NodePort);
        [by_host, by_authority, by_port].into_iter().flatten()
    };
    plan.entries.iter().flat_map(of_entry).collect()
}

fn policy(first: &Plan, second: &Plan) -> ClusterPolicy {
    let of = |plan: &Plan| (plan.decision.strategy, plan.policy.clone());
    policy_of(of(first), Some(of(second)))
}

/// What doors allow together. The list of a load balancer holds what any other door admits, since it has the
/// seed's ranges beside the cluster's own.
pub(crate) fn policy_of(
    first: (ExposeStrategy, ClusterPolicy),
    second: Option<(ExposeStrategy, ClusterPolicy)>,
) -> ClusterPolicy {
    let (strategy, policy) = first;
    let Some((other, others)) = second else { return policy };
    let node_port_listeners = policy.node_port_listeners || others.node_port_listeners;
    let has_load_balancer = |door| strategy::of(door).has_load_balancer();
    let wider = !has_load_balancer(strategy) && has_load_balancer(other);
    ClusterPolicy { node_port_listeners, ..if wider { others } else { policy } }
}

/// Where both doors lead to the same pods, these have one port. If a Service has no selector, its
/// EndpointSlices decide the port.
fn conflict(name: &'static str, first: &[Service], second: &[Service]) -> Option<PortConflict> {
    let service = |services: &[Service]| {
        let service = services.iter().find(|service| *service.metadata.name == *name)?;
        let has_pods = service.spec.selector.is_some();
        has_pods.then(|| service.spec.ports.first().and_then(|port| port.target_port.clone()))
    };
    let (first, second) = (service(first)?, service(second)?);
    (first != second).then_some(PortConflict { service: name, first, second })
}

#[cfg(test)]
mod tests;
