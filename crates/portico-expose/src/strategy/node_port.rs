//! Strategy `NodePort`: each Service has a port of its own on the seed's one gateway.
//!
//! - Services: type NodePort, `expose: NodePort`; the gateway listens on each NodePort number.
//! - Names: none. A connection is routed by its destination port.
//! - Address: `<cluster>.<seed>.<domain>` and the NodePort of `apiserver-external`. The name leads to the
//!   gateway, or, where the seed disables its nodeport-proxy, to the nodes of the seed.
//! - Checks: the API server keeps its NodePort; without a domain an address must be known.
//! - Migration: NodePorts are allocated, and given back unless the next strategy has them too.

use portico_api::annotations::{EXPOSE, ExposeTypes};
use portico_api::meta::{Kind, ObjectRef};
use portico_api::service::ServiceType;
use portico_api::strategy::AnsweredBy;

use super::by_port;
use super::rules::{Closing, Endpoint, Names, NoAddress, Opening, Strategy};
use crate::findings::Findings;
use crate::inputs::{Inputs, Known, Scope};
use crate::services::Exposed;

#[derive(Debug)]
pub(super) struct NodePort;

impl Strategy for NodePort {
    fn service_type(&self) -> ServiceType {
        ServiceType::NodePort
    }

    fn services(&self, inputs: &Inputs<'_>) -> Vec<Exposed> {
        by_port::services(inputs, (EXPOSE, "NodePort"))
    }

    fn endpoint(&self, inputs: &Inputs<'_>, node_port: Option<u16>) -> Endpoint {
        let gateway = by_port::behind_gateway(inputs, node_port);
        if on_seed_nodes(&inputs.scope) {
            Endpoint { answered_by: AnsweredBy::SeedNodes, ip: inputs.node_ip(), ..gateway }
        } else {
            gateway
        }
    }

    fn is_open(&self, types: Option<ExposeTypes>, _has_front: bool) -> bool {
        types.is_some_and(|types| types.node_port)
    }

    fn check(&self, scope: &Scope<'_>, names: Names, findings: &mut Findings) {
        by_port::check(scope, names, findings);
    }

    fn no_address(&self, scope: &Scope<'_>, known: &Known) -> Option<NoAddress> {
        if !on_seed_nodes(scope) {
            return by_port::no_gateway_address(scope);
        }
        known.node_ips.is_empty().then(|| NoAddress {
            why: format!(
                "{} disables its nodeport-proxy and no address of a seed node is known",
                ObjectRef::new(Kind::Seed, &scope.seed.metadata)
            ),
            remedy: "name the addresses of the seed's nodes with --node-address",
        })
    }

    fn opening(&self) -> Opening {
        Opening { does: "NodePorts on the gateway of the seed", proof: "NodePorts are allocated" }
    }

    fn closing(&self, next: &dyn Strategy) -> Closing {
        Closing {
            does: if next.has_node_ports() {
                "the load balancer of the seed no longer publishes its ports"
            } else {
                "its NodePorts go back to the seed"
            },
            again: "perhaps with other ports",
            kkp_leaves: None,
        }
    }
}

/// Whether clients come to the nodes of the seed, because no gateway opens the ports.
fn on_seed_nodes(scope: &Scope<'_>) -> bool {
    scope.seed.spec.nodeport_proxy.disable
}
