//! Strategy `Tunneling`: all clusters share the ports of the seed's gateway.
//!
//! - Services: type ClusterIP, `expose: SNI,Tunneling`; the MLA gateway is reached by SNI only.
//! - Names: `<cluster>.<seed>.<domain>` with a prefix for each Service, for SNI; and
//!   `<service>.<namespace>.svc.cluster.local:<port>`, for CONNECT.
//! - Address: the first of these names and the port of the SNI listener.
//! - Certificate: the address of the agent on each worker node, instead of the external one.
//! - Checks: the seed has a gateway, and host names are possible. The agent's address can be listened on and
//!   is in no network of the cluster.
//! - Migration: Services are annotated, agents are started and removed; nothing is allocated.

use std::net::IpAddr;

use ipnet::IpNet;
use portico_api::annotations::{EXPOSE, ExposeTypes, PORT_MAPPING};
use portico_api::cluster::Address;
use portico_api::meta::{Kind, ObjectRef, Strings};
use portico_api::names::HostName;
use portico_api::network::Special;
use portico_api::service::ServiceType;
use portico_api::setting::Setting;
use portico_api::strategy::AnsweredBy;

use super::rules::{Closing, Endpoint, Names, NoAddress, Opening, Strategy};
use crate::certificate::SubjectNames;
use crate::findings::Findings;
use crate::hosts::authority;
use crate::inputs::{Inputs, Known, Scope};
use crate::networks::{self, DEFAULT_AGENT_IP};
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

    fn check(&self, scope: &Scope<'_>, names: Names, findings: &mut Findings) {
        gateway(scope, names, findings);
        host_names(scope, names, findings);
        agent_ip(scope, findings);
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

/// Only the seed-wide gateway routes by name.
fn gateway(scope: &Scope<'_>, names: Names, findings: &mut Findings) {
    if scope.seed.spec.nodeport_proxy.disable {
        let message = format!(
            "Tunneling (decided by: {}) needs the gateway of the seed, and {} has \
             spec.nodeportProxy.disable: true",
            scope.decision.decided_by,
            ObjectRef::new(Kind::Seed, &scope.seed.metadata)
        );
        let others = names(|strategy| strategy.has_node_ports());
        let remedy = format!("enable the nodeport-proxy of the Seed, or choose {others}");
        findings.refuse("tunneling-without-proxy", "spec.exposeStrategy", message, &remedy);
    }
}

fn host_names(scope: &Scope<'_>, names: Names, findings: &mut Findings) {
    let field = "spec.exposeStrategy";
    let Some(suffix) = scope.host_suffix() else {
        let by = scope.decision.decided_by;
        let message = format!("Tunneling (decided by: {by}) needs host names, and there is no domain");
        let others = names(|strategy| !strategy.needs_domain());
        let remedy = format!("set spec.ingress.domain of the KubermaticConfiguration, or choose {others}");
        return findings.refuse("domain-missing", field, message, &remedy);
    };
    // The longest of the names; the others are valid if it is.
    if let Err(error) = suffix.host(KONNECTIVITY_PREFIX) {
        let message = format!("its host names are not valid: {error}");
        findings.refuse("host-name", field, message, "use a shorter name, seed label or domain");
    }
}

fn agent_ip(scope: &Scope<'_>, findings: &mut Findings) {
    let field = "spec.clusterNetwork.tunnelingAgentIP";
    let written = &scope.cluster.spec.cluster_network.tunneling_agent_ip;
    let remedy = format!("choose an address that no other network uses, such as {DEFAULT_AGENT_IP}");
    if let Setting::Bad(bad) = written {
        let message = format!("{:?} is no IP address: {}", bad.value, bad.why);
        return findings.refuse("agent-ip", field, message, &remedy);
    }
    let address = networks::agent_ip(scope.cluster);
    if let Some(why) = unusable(address) {
        let message = format!("{address} cannot be used: {why}");
        return findings.refuse("agent-ip", field, message, &remedy);
    }
    if let Some((what, network)) = network_around(scope, address) {
        let default = if written.is_unset() { " (the default)" } else { "" };
        let message = format!("{address}{default} lies in the {what} network {network}");
        let remedy = "choose an address outside pod, service and machine networks";
        findings.refuse("agent-ip-in-network", field, message, remedy);
    }
}

/// Why no agent can listen on `address`, or why Kubernetes refuses it as an endpoint.
fn unusable(address: IpAddr) -> Option<&'static str> {
    Some(match Special::of(address)? {
        Special::Unspecified => "it stands for any address",
        Special::Loopback => "it is a loopback address, which pods cannot reach on their node",
        Special::LinkLocal => "it is a link-local address, which Kubernetes refuses as an endpoint",
        Special::Multicast => "it is a multicast address",
    })
}

/// The network of the cluster that holds `address`.
fn network_around(scope: &Scope<'_>, address: IpAddr) -> Option<(&'static str, IpNet)> {
    let (cluster, kubevirt) = (scope.cluster, scope.is_on("kubevirt"));
    [
        ("pod", networks::pods(cluster, kubevirt)),
        ("service", networks::services(cluster, kubevirt)),
        ("machine", networks::machines(cluster)),
    ]
    .into_iter()
    .find_map(|(what, networks)| {
        networks.into_iter().find(|network| network.contains(&address)).map(|network| (what, network))
    })
}
