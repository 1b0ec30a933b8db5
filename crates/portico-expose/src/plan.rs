//! The objects that make a cluster reachable: its Services, names, address, certificate names and policy.
//!
//! A plan is a plain value that follows from plain values, so that `portico routes`, the gateway and
//! the operator agree on it. What depends on the strategy is in [`crate::strategy`].

use std::net::IpAddr;

use portico_api::cluster::Address;
use portico_api::names::ClusterName;
use portico_api::policy::ClusterPolicy;
use portico_api::service::{Service, ServiceType};
use serde::Serialize;

use crate::address::address;
use crate::certificate::SubjectNames;
use crate::inputs::{Inputs, LoadBalancers, Scope};
use crate::networks;
use crate::policy::policy;
use crate::resolve::Decision;
use crate::services::{Entry, Exposed, children};
use crate::strategy::{self, AnsweredBy};

/// What should exist for one cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// The cluster.
    pub cluster: ClusterName,
    /// Its strategy, and the level that decided on it.
    #[serde(flatten)]
    pub decision: Decision,
    /// The seed that hosts it.
    pub seed: Box<str>,
    /// Its Services, complete with type, ports and annotations.
    pub services: Vec<Service>,
    /// What its Services are reached by, in the same order; the load balancer's own Service is not among
    /// them.
    pub entries: Vec<Entry>,
    /// What accepts connections at its address.
    pub answered_by: AnsweredBy,
    /// `status.address`.
    pub address: Address,
    /// The seed's nodes, as far as known, if they accept its connections: the name in `address` must lead to
    /// them.
    pub node_ips: Vec<IpAddr>,
    /// Where the agent on each worker node listens, if there is one.
    pub agent_ip: Option<IpAddr>,
    /// Names on the API server's serving certificate.
    pub certificate: SubjectNames,
    /// What it allows and may use.
    pub policy: ClusterPolicy,
}

/// The ports (Service and port name) of a cluster that need a NodePort number.
pub fn node_ports_needed(scope: Scope<'_>) -> impl Iterator<Item = (&'static str, &'static str)> {
    let (by_strategy, of_api) =
        (strategy::of(scope.decision.strategy).service_type(), scope.api_server_type());
    children(scope.cluster, scope.seed)
        .filter(move |child| child.service_type(by_strategy, of_api) != ServiceType::ClusterIP)
        .map(|child| (child.name, child.port_name))
}

/// The exposed Services of a cluster, and what each is reached by; the load balancer's own is not among them.
pub(crate) fn exposed(inputs: &Inputs<'_>) -> Vec<Exposed> {
    strategy::of(inputs.scope.decision.strategy).services(inputs)
}

/// What should exist for a cluster.
pub fn plan(inputs: &Inputs<'_>) -> Plan {
    let Scope { cluster, decision, seed, .. } = inputs.scope;
    let strategy = strategy::of(decision.strategy);
    let policy = policy(&inputs.scope, inputs.load_balancers);
    let split = |exposed: Exposed| (exposed.entry, exposed.service);
    let (entries, mut services): (Vec<Entry>, Vec<Service>) = exposed(inputs).into_iter().map(split).unzip();
    let node_port = services.first().and_then(|service| service.spec.ports.first()?.node_port);
    services.extend(strategy.load_balancer(inputs, &policy.source_ranges));

    let endpoint = strategy.endpoint(inputs, node_port);
    let address = match inputs.load_balancers {
        // KKP is at work, and has given this to users.
        LoadBalancers::Cloud if !cluster.status.address.url.is_empty() => cluster.status.address.clone(),
        _ => address(inputs, &endpoint),
    };
    let node_ips = match endpoint.answered_by {
        AnsweredBy::SeedNodes => inputs.known.node_ips.clone(),
        _ => Vec::new(),
    };
    Plan {
        certificate: strategy.certificate(inputs, &address),
        answered_by: endpoint.answered_by,
        seed: (*seed.metadata.name).into(),
        cluster: cluster.name(),
        decision,
        services,
        entries,
        address,
        node_ips,
        agent_ip: strategy.has_agent().then(|| networks::agent_ip(cluster)),
        policy,
    }
}

#[cfg(test)]
mod tests;
