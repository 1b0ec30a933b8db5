//! What the seed's objects say about one cluster, for planning.

use std::net::IpAddr;

use portico_api::cluster::Cluster;
use portico_api::strategy::ExposeStrategy;
use portico_expose::exposure::{Found, NodePorts};
use portico_expose::inputs::Ingress;
use portico_expose::services::{APISERVER, EXPOSED};
use portico_expose::strategy::FRONT;
use serde_json::Value;

use super::Context;

impl Context {
    /// What is known of `cluster`, without its name in DNS.
    pub(super) fn found(&self, cluster: &Cluster) -> Found {
        let namespace = cluster.name().namespace();
        let service = |name: &str| self.services.get(&namespace, name).map(|seen| seen.value());
        let gateways = self.gateway_addresses();
        let slices = self.api_servers.in_namespace(&namespace);
        let no_endpoints = slices.iter().all(|slice| addresses_of(&slice.value()).is_empty());
        let strategy = self.strategy_in_force(cluster);
        let mut found = Found { gateways, strategy, no_endpoints, ..Found::default() };
        found.known.node_ips.clone_from(&self.settings.node_ips);
        let front = &self.settings.front;
        if let Some(front) = self.services.get(&front.namespace, &front.name) {
            found.front = ingress_of(&front.value());
        }
        for name in EXPOSED {
            let Some(service) = service(name) else { continue };
            found.node_ports.extend(node_ports_of(name, &service));
            if name == APISERVER {
                found.known.apiserver = ingress_of(&service);
            }
        }
        if let Some(service) = service(FRONT) {
            found.known.front = ingress_of(&service);
            let ip = service.pointer("/spec/loadBalancerIP").and_then(Value::as_str);
            found.known.front_ip = ip.and_then(|ip| ip.parse().ok());
        }
        found
    }

    /// The strategy that the cluster's ExposedCluster has: what users and nodes know.
    fn strategy_in_force(&self, cluster: &Cluster) -> Option<ExposeStrategy> {
        let exposed = self.exposed.get("", &cluster.metadata.name)?.value();
        // One of a Cluster of the same name before says nothing.
        let owner = exposed.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
        let strategy = exposed.pointer("/spec/exposeStrategy").and_then(Value::as_str);
        strategy.filter(|_| owner == Some(&cluster.metadata.uid))?.parse().ok()
    }
}

/// The NodePorts of a Service, by its name and those of its ports.
pub(super) fn node_ports_of(name: &str, service: &Value) -> NodePorts {
    let ports = service.pointer("/spec/ports").and_then(Value::as_array).into_iter().flatten();
    ports
        .filter_map(|port| {
            let number = u16::try_from(port["nodePort"].as_u64()?).ok().filter(|&number| number != 0)?;
            Some(((name.into(), port["name"].as_str().unwrap_or_default().into()), number))
        })
        .collect()
}

/// The addresses that a load balancer gave to a Service.
pub(crate) fn ingress_of(service: &Value) -> Vec<Ingress> {
    let list = service.pointer("/status/loadBalancer/ingress").and_then(Value::as_array);
    let ingress = |entry: &Value| Ingress {
        ip: entry["ip"].as_str().and_then(|ip| ip.parse().ok()),
        hostname: entry["hostname"].as_str().unwrap_or_default().into(),
    };
    list.into_iter().flatten().map(ingress).collect()
}

/// The addresses of an EndpointSlice that are ready.
pub(super) fn addresses_of(slice: &Value) -> Vec<IpAddr> {
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    let ready =
        endpoints.filter(|endpoint| endpoint.pointer("/conditions/ready") != Some(&Value::Bool(false)));
    ready
        .flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten())
        .filter_map(|address| address.as_str()?.parse().ok())
        .collect()
}
