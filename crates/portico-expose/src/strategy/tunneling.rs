//! Strategy `Tunneling`: all clusters share the ports of the seed's gateway.
//!
//! - Services: type ClusterIP, `expose: SNI,Tunneling`; the MLA gateway is reached by SNI only.
//! - Names: `<cluster>.<seed>.<domain>` with a prefix for each Service, for SNI; and
//!   `<service>.<namespace>.svc.cluster.local:<port>`, for CONNECT.
//! - Address: the first of these names and the port of the SNI listener.
//! - Certificate: the address of the agent on each worker node, instead of the external one.
//! - Migration: Services are annotated, agents are started and removed; nothing is allocated.

use portico_api::annotations::{EXPOSE, ExposeTypes, PORT_MAPPING};
use portico_api::cluster::Address;
use portico_api::meta::Strings;
use portico_api::names::HostName;
use portico_api::service::ServiceType;
use portico_api::strategy::AnsweredBy;

use super::rules::{Closing, Endpoint, NoAddress, Opening, Strategy};
use crate::certificate::SubjectNames;
use crate::hosts::authority;
use crate::inputs::{Inputs, Known, Scope};
use crate::networks;
use crate::services::{APISERVER_PORT, Child, Entry, Exposed, KONNECTIVITY_PREFIX, children, strings};

#[derive(Debug)]
pub(super) struct Tunneling;

impl Strategy for Tunneling {
    fn service_type(&self) -> ServiceType {
        ServiceType::ClusterIP
    }

    fn needs_domain(&self) -> bool {
        true
    }

    fn services(&self, inputs: &Inputs<'_>) -> Vec<Exposed> {
        let Scope { cluster, seed, .. } = inputs.scope;
        let suffix = inputs.scope.host_suffix();
        let namespace = cluster.name().namespace();
        let exposed = |child: &Child| {
            let host = suffix.as_ref().and_then(|suffix| suffix.host(child.host_prefix).ok());
            let annotations = annotations(child, host.as_ref());
            let published = child.published(ServiceType::ClusterIP, inputs);
            let authority = child.tunnel.then(|| authority(child.name, &namespace, child.port).ok());
            Exposed {
                entry: Entry {
                    service: child.name,
                    port: child.port,
                    node_port: None,
                    host,
                    authority: authority.flatten(),
                },
                service: child.service(cluster, published, APISERVER_PORT, annotations),
            }
        };
        children(cluster, seed).map(exposed).collect()
    }

    fn endpoint(&self, inputs: &Inputs<'_>, _node_port: Option<u16>) -> Endpoint {
        Endpoint {
            answered_by: AnsweredBy::Gateway,
            name: inputs.host().map(|host| host.to_string()),
            ip: inputs.resolved_ip(),
            port: Some(inputs.sni_port),
        }
    }

    fn konnectivity(&self, address: &Address, _node_port: Option<u16>) -> (&'static str, Option<u16>) {
        (KONNECTIVITY_PREFIX, address.port)
    }

    fn is_open(&self, types: Option<ExposeTypes>, _has_front: bool) -> bool {
        types.is_some_and(|types| types.tunneling)
    }

    fn has_agent(&self) -> bool {
        true
    }

    fn certificate(&self, inputs: &Inputs<'_>, address: &Address) -> SubjectNames {
        let mut names = SubjectNames::common(inputs, address);
        names.add_ip(Some(networks::agent_ip(inputs.scope.cluster)));
        names
    }

    fn no_address(&self, _scope: &Scope<'_>, _known: &Known) -> Option<NoAddress> {
        // A Cluster without a domain is refused.
        None
    }

    fn opening(&self) -> Opening {
        Opening { does: "routes by server name and by CONNECT authority", proof: "the Services ask for both" }
    }

    fn closing(&self, _next: &dyn Strategy) -> Closing {
        Closing {
            does: "its routes go, and the agents on nodes",
            again: "with the same name",
            kkp_leaves: Some(
                "DaemonSet and ConfigMap envoy-agent, its dummy interface and the annotation port-mapping",
            ),
        }
    }
}

fn annotations(child: &Child, host: Option<&HostName>) -> Strings {
    let mut annotations = strings([(EXPOSE, if child.tunnel { "SNI,Tunneling" } else { "SNI" })]);
    if let Some(host) = host {
        // Port and host names hold nothing that JSON would escape.
        let mapping = format!("{{\"{}\":\"{host}\"}}", child.port_name);
        annotations.insert(PORT_MAPPING.into(), mapping.into());
    }
    annotations
}
