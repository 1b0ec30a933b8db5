//! What should exist for a cluster so that it is reachable: its Services, names, address, certificate names and policy.
//!
//! A plan is a plain value that follows from plain values, so that `portico routes`, the gateway and, later, an operator
//! agree on it.

use std::net::IpAddr;

use portico_api::cluster::{Address, Cluster};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::ObjectMeta;
use portico_api::names::{Authority, ClusterName, HostName};
use portico_api::policy::ClusterPolicy;
use portico_api::seed::{Datacenter, Seed};
use portico_api::service::{Service, ServiceType};
use portico_api::strategy::ExposeStrategy;
use serde::Serialize;

use crate::address::{AnsweredBy, Known, Reach, SubjectNames};
use crate::hosts::{HostSuffix, authority};
use crate::networks::{self, DEFAULT_AGENT_IP};
use crate::policy::policy;
use crate::resolve::Decision;
use crate::services::{self, APISERVER, Child, children};

/// What stands before a cluster's host name in that of its Konnectivity server. The longest of the prefixes.
pub(crate) const KONNECTIVITY_PREFIX: &str = "konnectivity-server.";

/// Who plays the load balancer of a cluster with the strategy LoadBalancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadBalancers {
    /// A cloud does, with a proxy per cluster behind it: Services carry `expose-namespaced`, which the seed-wide gateway
    /// leaves alone. As in KKP.
    Cloud,
    /// There is no cloud (objects come from a directory), so the gateway opens the NodePorts of these clusters too: Services
    /// carry `expose: NodePort`, and the external name is the host name, as long as no load balancer address is known.
    Gateway,
}

/// Everything a plan follows from.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The Cluster; valid, as far as [`crate::validate`] can tell.
    pub cluster: &'a Cluster,
    /// What exposes it.
    pub decision: Decision,
    /// The seed that hosts it.
    pub seed: &'a Seed,
    /// The configuration of the installation, if there is one.
    pub configuration: Option<&'a KubermaticConfiguration>,
    /// The NodePort of a Service and port name, once allocated.
    pub node_ports: &'a dyn Fn(&str, &str) -> Option<u16>,
    /// What only the world can tell.
    pub known: &'a Known,
    /// Who plays the load balancer.
    pub load_balancers: LoadBalancers,
    /// Where the gateway routes by server name, as clients see it.
    pub sni_port: u16,
}

/// What should exist for one cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// The cluster.
    pub cluster: ClusterName,
    /// What exposes it, and who said so.
    #[serde(flatten)]
    pub decision: Decision,
    /// The seed that hosts it.
    pub seed: Box<str>,
    /// Its Services, complete with type, ports and annotations.
    pub services: Vec<Service>,
    /// What its Services are reached by, in the same order; the load balancer's own Service is not among them.
    pub entries: Vec<Entry>,
    /// Who answers at its address.
    pub answered_by: AnsweredBy,
    /// `status.address`.
    pub address: Address,
    /// The seed's nodes, as far as known, where they answer: the name in `address` must lead to them.
    pub node_ips: Vec<IpAddr>,
    /// Where the agent on each worker listens; Tunneling only.
    pub agent_ip: Option<IpAddr>,
    /// Names on the API server's serving certificate.
    pub certificate: SubjectNames,
    /// What it allows and may use.
    pub policy: ClusterPolicy,
}

/// What one Service is reached by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The Service, in the cluster's namespace.
    pub service: &'static str,
    /// Its port.
    pub port: u16,
    /// The NodePort number, if it is exposed by port and the number is allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_port: Option<u16>,
    /// The server name; Tunneling only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostName>,
    /// The CONNECT authority; Tunneling only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authority: Option<Authority>,
}

/// The ports (Service and port name) of a cluster that need a NodePort number.
pub fn node_ports_needed(
    cluster: &Cluster,
    strategy: ExposeStrategy,
    seed: &Seed,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let overridden = service_type_override(cluster, seed);
    children(cluster, seed)
        .filter(move |child| child.service_type(strategy, overridden) != ServiceType::ClusterIP)
        .map(|child| (child.name, child.port_name))
}

/// The exposed Services of a cluster, and what each is reached by; the load balancer's own is not among them.
pub(crate) fn exposed(inputs: &Inputs<'_>) -> Vec<(Entry, Service)> {
    let Inputs { cluster, decision, seed, .. } = *inputs;
    let strategy = decision.strategy;
    let name = cluster.name();
    let namespace = name.namespace();
    let suffix = HostSuffix::of(&name, seed, inputs.configuration);
    let api_type = service_type_override(cluster, seed);
    let exposed = |child: &Child| {
        let kind = child.service_type(strategy, api_type);
        let node_port = match kind {
            ServiceType::ClusterIP | ServiceType::ExternalName => None,
            ServiceType::NodePort | ServiceType::LoadBalancer => {
                (inputs.node_ports)(child.name, child.port_name)
            }
        };
        let entry = entry(child, strategy, &namespace, suffix.as_ref(), node_port);
        let metadata = metadata(cluster, &namespace);
        let host = entry.host.as_ref();
        let service = child.service(metadata, kind, strategy, inputs.load_balancers, node_port, host);
        (entry, service)
    };
    children(cluster, seed).map(exposed).collect()
}

/// What should exist for a cluster.
pub fn plan(inputs: &Inputs<'_>) -> Plan {
    let Inputs { cluster, decision, seed, known, .. } = *inputs;
    let strategy = decision.strategy;
    let name = cluster.name();
    let namespace = name.namespace();
    let policy = policy(cluster, strategy, seed, inputs.load_balancers);
    let (entries, mut services): (Vec<Entry>, Vec<Service>) = exposed(inputs).into_iter().unzip();
    if strategy == ExposeStrategy::LoadBalancer {
        let ranges: Vec<String> = policy.allow.networks().iter().map(ToString::to_string).collect();
        services.push(services::front(metadata(cluster, &namespace), cluster, seed, &ranges));
    }

    let suffix = HostSuffix::of(&name, seed, inputs.configuration);
    let host = suffix.and_then(|suffix| suffix.host("").ok());
    let reach = Reach {
        cluster,
        namespace: &namespace,
        strategy,
        answered_by: answered_by(inputs),
        node_port: services.first().and_then(|service| service.spec.ports.first()?.node_port),
        api_is_balancer: service_type_override(cluster, seed) == Some(ServiceType::LoadBalancer),
        sni_port: inputs.sni_port,
        host: host.as_ref(),
        known,
    };
    let address = reach.address();
    let agent_ip = (strategy == ExposeStrategy::Tunneling)
        .then(|| cluster.spec.cluster_network.tunneling_agent_ip.get().copied().unwrap_or(DEFAULT_AGENT_IP));
    let in_cluster = networks::in_cluster_api_address(cluster, is_on_kubevirt(cluster, seed));
    let node_ips =
        if reach.answered_by == AnsweredBy::SeedNodes { known.node_ips.clone() } else { Vec::new() };
    Plan {
        certificate: SubjectNames::of(&reach, &address, in_cluster, agent_ip),
        answered_by: reach.answered_by,
        seed: (*seed.metadata.name).into(),
        cluster: name,
        decision,
        services,
        entries,
        address,
        node_ips,
        agent_ip,
        policy,
    }
}

/// Age and identity decide conflicts between Services; a planned one is as old as its cluster.
fn metadata(cluster: &Cluster, namespace: &str) -> ObjectMeta {
    ObjectMeta {
        namespace: namespace.into(),
        uid: cluster.metadata.uid.clone(),
        creation_timestamp: cluster.metadata.creation_timestamp,
        ..ObjectMeta::default()
    }
}

fn entry(
    child: &Child,
    strategy: ExposeStrategy,
    namespace: &str,
    suffix: Option<&HostSuffix>,
    node_port: Option<u16>,
) -> Entry {
    let tunneling = strategy == ExposeStrategy::Tunneling;
    let suffix = suffix.filter(|_| tunneling);
    Entry {
        service: child.name,
        port: child.port,
        node_port: node_port.filter(|_| !tunneling),
        host: suffix.and_then(|suffix| suffix.host(child.host_prefix).ok()),
        authority: (tunneling && child.tunnel)
            .then(|| authority(child.name, namespace, child.port).ok())
            .flatten(),
    }
}

fn answered_by(inputs: &Inputs<'_>) -> AnsweredBy {
    let no_balancer = inputs.known.front.is_empty() && inputs.known.front_ip.is_none();
    match inputs.decision.strategy {
        ExposeStrategy::Tunneling => AnsweredBy::Gateway,
        ExposeStrategy::NodePort if inputs.seed.spec.nodeport_proxy.disable => AnsweredBy::SeedNodes,
        ExposeStrategy::NodePort => AnsweredBy::Gateway,
        ExposeStrategy::LoadBalancer if no_balancer && inputs.load_balancers == LoadBalancers::Gateway => {
            AnsweredBy::Gateway
        }
        ExposeStrategy::LoadBalancer => AnsweredBy::LoadBalancer,
    }
}

fn datacenter<'a>(cluster: &Cluster, seed: &'a Seed) -> Option<&'a Datacenter> {
    seed.spec.datacenters.get(&cluster.spec.cloud.dc)?.as_ref()
}

/// The type that the cluster's datacenter gives to [`APISERVER`], if it does.
pub(crate) fn service_type_override(cluster: &Cluster, seed: &Seed) -> Option<ServiceType> {
    datacenter(cluster, seed)?.spec.api_server_service_type.get().copied()
}

/// Whether a cluster runs on `provider` (`aws`, `kubevirt`), as it says itself or as its datacenter does.
pub(crate) fn is_on(cluster: &Cluster, seed: &Seed, provider: &str) -> bool {
    let of_datacenter = datacenter(cluster, seed).is_some_and(|datacenter| match provider {
        "aws" => datacenter.spec.aws.0,
        "kubevirt" => datacenter.spec.kubevirt.0,
        _ => false,
    });
    of_datacenter || cluster.is_on(provider)
}

/// Whether a cluster runs on KubeVirt.
pub(crate) fn is_on_kubevirt(cluster: &Cluster, seed: &Seed) -> bool {
    is_on(cluster, seed, "kubevirt")
}

impl Plan {
    /// The Service that leads to the API server.
    pub fn apiserver(&self) -> Option<&Service> {
        self.services.iter().find(|service| &*service.metadata.name == APISERVER)
    }
}

#[cfg(test)]
mod tests;
