//! The common part of `NodePort` and `LoadBalancer`: each Service has a NodePort number.

use portico_api::service::ServiceType;
use portico_api::strategy::AnsweredBy;

use super::rules::{Endpoint, Names, NoAddress};
use crate::findings::Findings;
use crate::inputs::{Inputs, Scope};
use crate::services::{APISERVER_PORT, Child, Entry, Exposed, children, strings};

/// The exposed Services of type NodePort, each with the annotation that makes a proxy open its port.
pub(super) fn services(inputs: &Inputs<'_>, expose: (&str, &str)) -> Vec<Exposed> {
    let Scope { cluster, seed, .. } = inputs.scope;
    let exposed = |child: &Child| {
        let published = child.published(ServiceType::NodePort, inputs);
        let node_port = published.node_port;
        // The API server listens on the number itself, so that it has the same port inside and outside.
        let api_server_port = node_port.unwrap_or(APISERVER_PORT);
        Exposed {
            entry: Entry { service: child.name, port: child.port, node_port, host: None, authority: None },
            service: child.service(cluster, published, api_server_port, strings([expose])),
        }
    };
    children(cluster, seed).map(exposed).collect()
}

/// The endpoint of a cluster whose NodePorts the gateway opens.
pub(super) fn behind_gateway(inputs: &Inputs<'_>, node_port: Option<u16>) -> Endpoint {
    Endpoint {
        answered_by: AnsweredBy::Gateway,
        name: inputs.host().map(|host| host.to_string()),
        ip: inputs.resolved_ip(),
        port: node_port,
    }
}

/// Without a domain the address of the gateway must be known.
pub(super) fn no_gateway_address(scope: &Scope<'_>) -> Option<NoAddress> {
    scope.cluster.status.address.ip.is_none().then(|| NoAddress {
        why: "no address of the gateway is known".to_owned(),
        remedy: "write the address of the gateway into status.address.ip of the Cluster",
    })
}

/// A datacenter may override the type of one Service, and thereby take its NodePort away.
pub(super) fn check(scope: &Scope<'_>, names: Names, findings: &mut Findings) {
    let Some(found) = scope.api_server_type().filter(|&found| found != ServiceType::NodePort) else { return };
    let dc = &scope.cluster.spec.cloud.dc;
    let message = format!(
        "the datacenter {dc:?} sets apiServerServiceType: {found:?}, but the strategy {} exposes NodePort \
         Services only: the API server is not reachable through the gateway",
        scope.decision.strategy
    );
    let others = names(|strategy| !strategy.has_node_ports());
    let remedy = format!("remove apiServerServiceType from the datacenter in the Seed, or choose {others}");
    findings.warn("service-type", "spec.cloud.dc", message, &remedy);
}
