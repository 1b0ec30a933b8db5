//! Strategy `LoadBalancer`: each cluster has a load balancer of its own.
//!
//! - Services: type NodePort, opened by a proxy of the cluster's own (`expose-namespaced`).
//!   `front-loadbalancer` leads to that proxy. Without a cloud the seed's gateway takes the place of both
//!   (`expose: NodePort`).
//! - Names: none. A connection is routed by its destination port.
//! - Address: that of the load balancer, or its host name, and the NodePort of `apiserver-external`.
//! - Certificate: addresses and names of the load balancer, too.
//! - Policy: networks that every load balancer of the seed admits may connect.
//! - Checks: the API server keeps its NodePort; without a domain an address must be known.
//! - Migration: the load balancer is made, and given back with its NodePorts unless the next strategy has
//!   those too.

use std::net::IpAddr;

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED, ExposeTypes, LOAD_BALANCER_SOURCE_RANGES};
use portico_api::cluster::Address;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::meta::Strings;
use portico_api::policy::AllowList;
use portico_api::seed::Seed;
use portico_api::service::{Protocol, Service, ServicePort, ServiceSpec, ServiceType, TargetPort};
use portico_api::strategy::AnsweredBy;

use super::by_port;
use super::rules::{Closing, Endpoint, Names, NoAddress, Opening, Strategy};
use crate::certificate::SubjectNames;
use crate::findings::Findings;
use crate::inputs::{Inputs, Known, LoadBalancers, Scope};
use crate::load_balancer::{self, AWS_IDLE, AWS_TYPE};
use crate::services::{Exposed, metadata, strings};

/// The Service that is the cluster's own load balancer.
pub const FRONT: &str = "front-loadbalancer";

const AWS_CROSS_ZONE: (&str, &str) =
    ("service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled", "true");

#[derive(Debug)]
pub(super) struct LoadBalancer;

impl Strategy for LoadBalancer {
    fn service_type(&self) -> ServiceType {
        ServiceType::NodePort
    }

    fn services(&self, inputs: &Inputs<'_>) -> Vec<Exposed> {
        let expose = match inputs.load_balancers {
            LoadBalancers::Cloud | LoadBalancers::CloudAndGateway => (EXPOSE_NAMESPACED, "true"),
            LoadBalancers::Gateway => (EXPOSE, "NodePort"),
        };
        by_port::services(inputs, expose)
    }

    fn load_balancer(&self, inputs: &Inputs<'_>, ranges: &AllowList) -> Option<Service> {
        let ranges: Vec<String> = ranges.networks().iter().map(ToString::to_string).collect();
        Some(front(&inputs.scope, &ranges))
    }

    fn endpoint(&self, inputs: &Inputs<'_>, node_port: Option<u16>) -> Endpoint {
        let known = inputs.known;
        let unknown = known.front.is_empty() && known.front_ip.is_none();
        if unknown && inputs.load_balancers == LoadBalancers::Gateway {
            return by_port::behind_gateway(inputs, node_port);
        }
        let ip = front_ip(known);
        let hostname = known.front.iter().rev().find(|ingress| !ingress.hostname.is_empty());
        Endpoint {
            answered_by: AnsweredBy::LoadBalancer,
            name: ip.map(|ip| ip.to_string()).or(hostname.map(|found| found.hostname.to_string())),
            ip: ip.or_else(|| inputs.resolved_ip()),
            port: node_port,
        }
    }

    fn answered_by(&self, _exposed: &ExposedClusterSpec) -> AnsweredBy {
        AnsweredBy::LoadBalancer
    }

    fn is_open(&self, _types: Option<ExposeTypes>, has_front: bool) -> bool {
        has_front
    }

    fn certificate(&self, inputs: &Inputs<'_>, address: &Address) -> SubjectNames {
        let mut names = SubjectNames::common(inputs, address);
        names.add_ip(address.ip);
        names.add_ingress(&inputs.known.front);
        names
    }

    fn has_load_balancer(&self) -> bool {
        true
    }

    fn opens_node_ports(&self, seed: &Seed, load_balancers: LoadBalancers) -> bool {
        // With KKP the cluster has a proxy of its own, which the seed does not disable.
        load_balancers == LoadBalancers::Cloud || !seed.spec.nodeport_proxy.disable
    }

    fn check(&self, scope: &Scope<'_>, names: Names, findings: &mut Findings) {
        by_port::check(scope, names, findings);
    }

    fn no_address(&self, scope: &Scope<'_>, _known: &Known) -> Option<NoAddress> {
        by_port::no_gateway_address(scope)
    }

    fn opening(&self) -> Opening {
        Opening {
            does: "a load balancer of its own",
            proof: "the load balancer has an address, NodePorts are allocated",
        }
    }

    fn closing(&self, next: &dyn Strategy) -> Closing {
        Closing {
            does: if next.has_node_ports() {
                "its load balancer is given back"
            } else {
                "its load balancer and its NodePorts are given back"
            },
            again: "perhaps with another address",
            kkp_leaves: Some("front-loadbalancer and the proxy of the cluster"),
        }
    }
}

/// `front-loadbalancer`. Its one port is a placeholder: the ports follow the NodePorts of the other Services.
fn front(scope: &Scope<'_>, ranges: &[String]) -> Service {
    let mut annotations = front_annotations(scope);
    if !ranges.is_empty() {
        annotations.insert(LOAD_BALANCER_SOURCE_RANGES.into(), ranges.join(",").into());
    }
    let port = ServicePort {
        name: "secure".into(),
        protocol: Protocol::TCP,
        port: 443,
        target_port: Some(TargetPort::Number(443)),
        node_port: None,
    };
    Service {
        metadata: metadata(scope.cluster, FRONT, annotations),
        spec: ServiceSpec {
            service_type: ServiceType::LoadBalancer,
            ports: vec![port],
            selector: Some(strings([("app", "nodeport-proxy-envoy")])),
            load_balancer_source_ranges: ranges.iter().map(|range| range.as_str().into()).collect(),
            ..ServiceSpec::default()
        },
    }
}

fn front_annotations(scope: &Scope<'_>) -> Strings {
    let mut annotations = load_balancer::annotations(scope.seed);
    if scope.is_on("aws") {
        annotations.extend(strings([AWS_TYPE, AWS_IDLE, AWS_CROSS_ZONE]));
    }
    annotations
}

/// The first public IPv4 address, else private IPv4, else public IPv6, else private IPv6.
fn front_ip(known: &Known) -> Option<IpAddr> {
    let rank = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => u8::from(v4.is_private()),
        IpAddr::V6(v6) => 2 + u8::from(v6.is_unique_local()),
    };
    // `min_by_key` keeps the first of equals.
    let ingress = known.front.iter().filter_map(|ingress| ingress.ip).min_by_key(rank);
    if known.front.is_empty() { known.front_ip } else { ingress }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::Ingress;

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn a_public_ipv4_address_of_a_load_balancer_is_preferred() {
        let known = |list: &[&str]| Known {
            front: ips(list).into_iter().map(|ip| Ingress { ip: Some(ip), hostname: "".into() }).collect(),
            front_ip: Some(ips(&["192.0.2.1"])[0]),
            ..Known::default()
        };
        let chosen = |list: &[&str]| front_ip(&known(list)).unwrap().to_string();
        assert_eq!(
            chosen(&["fd00::1", "2001:db8::1", "10.0.0.1", "203.0.113.9", "203.0.113.1"]),
            "203.0.113.9"
        );
        assert_eq!(chosen(&["fd00::1", "2001:db8::1", "10.0.0.1"]), "10.0.0.1");
        assert_eq!(chosen(&["fd00::1", "2001:db8::1"]), "2001:db8::1");
        assert_eq!(chosen(&["fd00::1"]), "fd00::1");
        assert_eq!(chosen(&[]), "192.0.2.1");
    }
}
