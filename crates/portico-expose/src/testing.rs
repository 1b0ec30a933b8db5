//! Objects for tests, from the JSON of their `spec`, and plans of them.

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::Seed;
use portico_api::service::Service;
use serde::de::DeserializeOwned;

use crate::inputs::{Ingress, Inputs, Known, LoadBalancers, Scope};
use crate::plan::{Plan, plan};
use crate::resolve;
use crate::services::EXPOSED;

pub(crate) fn read<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).expect("test documents are valid JSON")
}

pub(crate) fn cluster(name: &str, spec: &str) -> Cluster {
    read(&format!(r#"{{"metadata": {{"name": "{name}"}}, "spec": {spec}}}"#))
}

/// A Cluster whose expose strategy may be changed.
pub(crate) fn migrating(name: &str, spec: &str) -> Cluster {
    read(&format!(
        r#"{{"metadata": {{"name": "{name}", "labels": {{"unsafe-expose-strategy-migration": ""}}}},
            "spec": {spec}}}"#
    ))
}

pub(crate) fn seed(name: &str, spec: &str) -> Seed {
    read(&format!(r#"{{"metadata": {{"name": "{name}", "namespace": "kubermatic"}}, "spec": {spec}}}"#))
}

pub(crate) fn configuration(spec: &str) -> KubermaticConfiguration {
    read(&format!(r#"{{"metadata": {{"name": "kubermatic", "namespace": "kubermatic"}}, "spec": {spec}}}"#))
}

/// The plan of a cluster in an installation with a domain.
pub(crate) fn plan_of(cluster: &Cluster, seed: &Seed, known: &Known, load_balancers: LoadBalancers) -> Plan {
    let configuration = configuration(r#"{"ingress": {"domain": "kkp.example.com"}}"#);
    let configuration = Some(&configuration);
    let decision = resolve::strategy(cluster, seed, configuration);
    let node_ports = &node_port;
    let scope = Scope { cluster, decision, seed, configuration };
    plan(&Inputs { scope, node_ports, known, load_balancers, sni_port: 6_443 })
}

/// Ports as an allocator would give them: 31234, 31235, 31236.
fn node_port(service: &str, _: &str) -> Option<u16> {
    let index = EXPOSED.iter().position(|&name| name == service)?;
    Some(31_234 + u16::try_from(index).unwrap())
}

/// Behind a load balancer with these addresses and host names.
pub(crate) fn behind(ingress: &[(&str, &str)]) -> Known {
    let front = ingress
        .iter()
        .map(|&(ip, hostname)| Ingress { ip: ip.parse().ok(), hostname: hostname.into() })
        .collect();
    Known { front, ..Known::default() }
}

/// Each Service in a few lines, as `kubectl` would show what matters.
pub(crate) fn shown(services: &[Service]) -> String {
    let mut text = String::new();
    for service in services {
        let port = &service.spec.ports[0];
        let target = serde_json::to_string(&port.target_port).unwrap();
        let node_port = port.node_port.map_or(String::new(), |port| format!(" nodePort {port}"));
        let selector = serde_json::to_string(&service.spec.selector).unwrap();
        text += &format!(
            "{} {:?} {} {} -> {target}{node_port} {selector}\n",
            service.metadata.key(),
            service.spec.service_type,
            port.name,
            port.port,
        );
        for (key, value) in &service.metadata.annotations {
            text += &format!("  {key}: {value}\n");
        }
        if !service.spec.load_balancer_source_ranges.is_empty() {
            text += &format!("  ranges: {}\n", service.spec.load_balancer_source_ranges.join(" "));
        }
    }
    text
}
