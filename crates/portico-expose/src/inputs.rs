//! The inputs of a plan: a Cluster with the objects above it, its NodePorts, and the findings outside.

use std::net::IpAddr;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::names::HostName;
use portico_api::seed::{Datacenter, Seed};
use portico_api::service::ServiceType;
use serde_json::Value;

use crate::hosts::HostSuffix;
use crate::resolve::Decision;
use crate::services::KONNECTIVITY_PREFIX;

/// A Cluster, the objects above it, and the strategy they decide on.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// The Cluster.
    pub cluster: &'a Cluster,
    /// Its strategy, and the level that decided on it.
    pub decision: Decision,
    /// The seed that hosts it.
    pub seed: &'a Seed,
    /// The configuration of the installation, if there is one.
    pub configuration: Option<&'a KubermaticConfiguration>,
}

/// Everything a plan follows from.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The Cluster and the objects above it; valid, as far as [`crate::validate`] can tell.
    pub scope: Scope<'a>,
    /// Returns the NodePort of a Service and port name, once allocated.
    pub node_ports: &'a dyn Fn(&str, &str) -> Option<u16>,
    /// What was found outside.
    pub known: &'a Known,
    /// The load balancer of a cluster.
    pub load_balancers: LoadBalancers,
    /// Port at which clients find the listener that routes by server name.
    pub sni_port: u16,
}

/// The kind of load balancer that clusters with the strategy LoadBalancer have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadBalancers {
    /// A cloud, with a proxy per cluster behind it, as in KKP. Services have the annotation
    /// `expose-namespaced`, which the seed-wide gateway ignores.
    Cloud,
    /// The gateway, because there is no cloud: objects come from a directory. Services have the annotation
    /// `expose`. The external name is the host name while no load balancer address is known.
    Gateway,
    /// A cloud, with the gateway of the seed behind it: Portico's operator is at work. Services have the
    /// annotation `expose-namespaced`, which the gateway is configured to follow and the seed's own load
    /// balancer does not publish.
    CloudAndGateway,
}

/// What was found outside the objects. An empty field is not known yet, and what depends on it stays open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// `status.loadBalancer.ingress` of `front-loadbalancer`.
    pub front: Vec<Ingress>,
    /// `spec.loadBalancerIP` of `front-loadbalancer`.
    pub front_ip: Option<IpAddr>,
    /// `status.loadBalancer.ingress` of `apiserver-external`, where a datacenter makes it a load balancer.
    pub apiserver: Vec<Ingress>,
    /// Addresses that DNS returns for the external name.
    pub resolved: Vec<IpAddr>,
    /// External addresses of the seed's nodes.
    pub node_ips: Vec<IpAddr>,
}

/// One address of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ingress {
    /// Its address.
    pub ip: Option<IpAddr>,
    /// Its host name; empty if it has none.
    pub hostname: Box<str>,
}

impl Ingress {
    /// The addresses that a load balancer gave to a Service.
    pub fn of_service(service: &Value) -> Vec<Self> {
        let list = service.pointer("/status/loadBalancer/ingress").and_then(Value::as_array);
        let ingress = |entry: &Value| Self {
            ip: entry["ip"].as_str().and_then(|ip| ip.parse().ok()),
            hostname: entry["hostname"].as_str().unwrap_or_default().into(),
        };
        list.into_iter().flatten().map(ingress).collect()
    }
}

impl<'a> Scope<'a> {
    /// The end of the cluster's host names; `None` while the installation has no domain.
    pub(crate) fn host_suffix(&self) -> Option<HostSuffix> {
        HostSuffix::of(&self.cluster.name(), self.seed, self.configuration)
    }

    /// `<cluster>.<seed>.<domain>`.
    pub fn host(&self) -> Option<HostName> {
        self.host_suffix()?.host("").ok()
    }

    /// The type that the cluster's datacenter gives to `apiserver-external`, if it does.
    pub(crate) fn api_server_type(&self) -> Option<ServiceType> {
        self.datacenter()?.spec.api_server_service_type.get().copied()
    }

    /// Whether the Cluster or its datacenter names the cloud provider `provider` (`aws`, `kubevirt`).
    pub fn is_on(&self, provider: &str) -> bool {
        let by_datacenter = self.datacenter().is_some_and(|datacenter| datacenter.spec.is_on(provider));
        by_datacenter || self.cluster.is_on(provider)
    }

    fn datacenter(&self) -> Option<&'a Datacenter> {
        self.seed.spec.datacenters.get(&self.cluster.spec.cloud.dc)?.as_ref()
    }
}

impl Inputs<'_> {
    /// `<cluster>.<seed>.<domain>`.
    pub fn host(&self) -> Option<HostName> {
        self.scope.host()
    }

    /// The host name of the cluster's Konnectivity server.
    pub(crate) fn host_of_konnectivity(&self) -> Option<HostName> {
        self.scope.host_suffix()?.host(KONNECTIVITY_PREFIX).ok()
    }

    /// The address of the external name, as DNS returns it.
    pub(crate) fn resolved_ip(&self) -> Option<IpAddr> {
        steady(&self.known.resolved, self.current_ip())
    }

    /// The address of one of the seed's nodes.
    pub(crate) fn node_ip(&self) -> Option<IpAddr> {
        steady(&self.known.node_ips, self.current_ip())
    }

    fn current_ip(&self) -> Option<IpAddr> {
        self.scope.cluster.status.address.ip
    }
}

/// The current address while it is among `found`, so that it does not flap; else the lowest. IPv6 addresses
/// count only where there is no IPv4 address.
fn steady(found: &[IpAddr], current: Option<IpAddr>) -> Option<IpAddr> {
    let any_v4 = found.iter().any(IpAddr::is_ipv4);
    let eligible = || found.iter().copied().filter(|ip| ip.is_ipv4() == any_v4);
    eligible().find(|&ip| Some(ip) == current).or_else(|| eligible().min())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn an_address_stays_while_dns_still_knows_it() {
        let found = ips(&["203.0.113.9", "203.0.113.7", "2001:db8::1"]);
        assert_eq!(steady(&found, None), Some(ips(&["203.0.113.7"])[0]));
        assert_eq!(steady(&found, Some(found[0])), Some(found[0]));
        assert_eq!(steady(&found, Some(ips(&["192.0.2.1"])[0])), Some(ips(&["203.0.113.7"])[0]));
        assert_eq!(steady(&found[2..], None), Some(found[2]));
        assert_eq!(steady(&[], Some(found[0])), None);
    }
}
