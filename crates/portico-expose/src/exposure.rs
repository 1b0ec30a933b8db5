//! Cluster → the objects that make it reachable, as Portico's operator applies them, and its status.
//!
//! The names are those of KKP. Three things differ. There is one pass: what depends on a NodePort is planned
//! again once the API server has allocated it. `front-loadbalancer` leads to the gateway of the seed, without
//! a proxy for each cluster. A control plane that runs elsewhere has EndpointSlices instead of pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use jiff::Timestamp;
use portico_api::annotations::{EXPOSE_NAMESPACED, ExposeTypes};
use portico_api::cluster::{Address, Cluster};
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_api::endpoints;
use portico_api::meta::{ObjectKey, Strings};
use portico_api::problem::Problem;
use portico_api::service::{Service, ServicePort, ServiceType};
use portico_api::strategy::ExposeStrategy;
use serde_json::{Value, json};

use crate::doors::{Door, Doors, both};
use crate::front::{ADMIN_PORT, FrontSettings, plan_front_ports};
use crate::inputs::{Ingress, Inputs, Known, LoadBalancers, Scope};
use crate::migration::Now;
use crate::plan::{Plan, node_ports_needed, plan};
use crate::resolve::Decision;
use crate::services::{APISERVER, APISERVER_PORT, children, runs_elsewhere};
use crate::strategy::{self, FRONT};
use crate::validate::strategy_change;

mod reachability;

pub use reachability::{Reachability, reachability, reachability_of_second};

/// The label of everything that Portico's operator writes, and its value.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "portico");

/// The label with the name of the Cluster, on everything that is written for it.
pub const CLUSTER_LABEL: &str = "portico.k8c.io/cluster";

/// The label of an EndpointSlice that says which controller keeps it.
pub const SLICE_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";

/// NodePorts by the names of Service and port.
pub type NodePorts = BTreeMap<(Box<str>, Box<str>), u16>;

/// The findings on the seed and outside, for one cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The record of its doors; `None` for a new cluster.
    pub doors: Option<Doors>,
    /// NodePorts that are allocated.
    pub node_ports: NodePorts,
    /// Load balancers, DNS and nodes.
    pub known: Known,
    /// Addresses that DNS returns for the name of the second door, where there is one.
    pub second_resolved: Vec<IpAddr>,
    /// Addresses of the gateway's ready pods.
    pub gateways: BTreeSet<IpAddr>,
    /// Addresses of the load balancer in front of the gateway.
    pub front: Vec<Ingress>,
    /// Ports of that load balancer; `None` while it does not exist.
    pub front_ports: Option<BTreeSet<u16>>,
    /// Why the name of the cluster could not be resolved.
    pub dns_error: Option<String>,
    /// Why the name of the second door could not be resolved.
    pub second_dns_error: Option<String>,
    /// Whether no API server is ready behind the cluster's Service.
    pub no_endpoints: bool,
}

/// One object as it is applied: all wanted fields, and no others.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// Its name; the namespace is that of the cluster.
    pub name: String,
    /// The object, without `apiVersion` and `kind`.
    pub fields: Value,
}

/// What should exist for a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Exposure {
    /// The plan of the first door, which is what users are shown.
    pub plan: Plan,
    /// The plan of the second door, while it is open.
    pub second: Option<Plan>,
    /// The strategy that is wanted.
    pub decision: Decision,
    /// The Services. Those with NodePorts that are not allocated yet look different in the next plan.
    pub services: Vec<Wanted>,
    /// The EndpointSlices of Services that select no pods.
    pub slices: Vec<Wanted>,
    /// NodePorts that are wanted and not allocated, as Service and port name.
    pub unallocated: Vec<(&'static str, &'static str)>,
}

/// The objects of a cluster that can be used as it is written ([`usable`](crate::validate::usable)).
/// `sni_port` is the port at which clients find the listener that routes by server name. If the cluster has
/// two doors, both are open.
///
/// # Errors
/// Another strategy is wanted than the one in force, without the label that allows it. What exists must stay
/// then. A door that is open already is not judged again: it was allowed, and the way out of it must not be
/// barred.
pub fn exposure(scope: Scope<'_>, found: &Found, sni_port: u16) -> Result<Exposure, Box<Problem>> {
    let cluster = scope.cluster;
    let doors = found.doors.clone().unwrap_or_else(|| Doors::new(cluster, scope.decision.strategy));
    if doors.now.second.is_none() && doors.now.first != scope.decision.strategy && !cluster.may_migrate() {
        return Err(Box::new(strategy_change(cluster, doors.now.first, scope.decision)));
    }
    let node_port = |service: &str, port: &str| found.node_ports.get(&(service.into(), port.into())).copied();
    let planned = |strategy: ExposeStrategy| {
        let alone = doors.alone(cluster, strategy);
        let scope = Scope { cluster: &alone, decision: Decision { strategy, ..scope.decision }, ..scope };
        let second = strategy != doors.now.first;
        let known = if second { known_by_second(found) } else { found.known.clone() };
        let load_balancers = LoadBalancers::CloudAndGateway;
        let inputs = Inputs { scope, node_ports: &node_port, known: &known, load_balancers, sni_port };
        (plan(&inputs), node_ports_needed(scope).collect::<Vec<_>>())
    };
    let (first, mut needed) = planned(doors.now.first);
    let second = doors.now.open().nth(1).map(planned).map(|(plan, also)| {
        needed.extend(also);
        plan
    });
    needed.sort_unstable();
    needed.dedup();
    let unallocated: Vec<_> =
        needed.into_iter().filter(|(service, port)| node_port(service, port).is_none()).collect();
    let planned = match &second {
        Some(second) => both(&first, second).services,
        None => first.services.clone(),
    };
    let front_ports = front_ports(cluster, &planned);
    let mut slices = own_slices(scope);
    let mut services = Vec::new();
    for service in &planned {
        if *service.metadata.name == *FRONT {
            // Its ports are NodePorts of the others: it waits for them.
            if unallocated.is_empty() {
                services.push(front_service(cluster, service, &front_ports));
                slices.extend(gateway_slices(cluster, &front_ports, &found.gateways));
            }
        } else {
            services.push(wanted(cluster, service, &service.spec));
        }
    }
    Ok(Exposure { plan: first, second, decision: scope.decision, services, slices, unallocated })
}

/// The doors of a cluster without a record, as its Services tell. `expose` is the annotation of the API
/// server's Service. `has_front` says whether the cluster has a load balancer of its own.
pub fn doors_of_services(
    scope: Scope<'_>,
    (expose, has_front): (Option<&str>, bool),
    found: &Found,
    sni_port: u16,
    clock: Timestamp,
) -> Option<Doors> {
    let types = expose.and_then(|expose| ExposeTypes::parse(expose).ok());
    let open = ExposeStrategy::ALL.into_iter().filter(|&door| strategy::of(door).is_open(types, has_front));
    let node_port = |service: &str, port: &str| found.node_ports.get(&(service.into(), port.into())).copied();
    let address = |strategy: ExposeStrategy| {
        let alone = Door::of(scope.cluster, strategy).alone(scope.cluster);
        let scope = Scope { cluster: &alone, decision: Decision { strategy, ..scope.decision }, ..scope };
        let (known, load_balancers) = (&found.known, LoadBalancers::CloudAndGateway);
        plan(&Inputs { scope, node_ports: &node_port, known, load_balancers, sni_port }).address
    };
    let open: Vec<(ExposeStrategy, Address)> = open.map(|strategy| (strategy, address(strategy))).collect();
    let by_url: Vec<_> = open.iter().map(|(strategy, address)| (*strategy, &*address.url)).collect();
    let published = &*scope.cluster.status.address.url;
    let now = Now::rebuilt(&by_url, published, scope.decision.strategy, clock)?;
    let of = |door: ExposeStrategy| open.iter().find(|(strategy, _)| *strategy == door);
    let address = |door| of(door).map(|(_, address)| address.clone()).unwrap_or_default();
    Some(Doors {
        now,
        first: address(now.first),
        second: now.second.map(|second| address(second.strategy)).unwrap_or_default(),
        agent_ip: None,
    })
}

/// What was found outside, for the plan of the second door.
fn known_by_second(found: &Found) -> Known {
    Known { resolved: found.second_resolved.clone(), ..found.known.clone() }
}

/// The namespace of a cluster, as it is applied. It belongs to the Cluster, and goes with it.
pub fn namespace(cluster: &Cluster) -> Wanted {
    let name = cluster.name().namespace();
    let mut labels = labels(cluster, &[]);
    if cluster.is_hosted() {
        // Its pods are planned for that.
        for mode in ["enforce", "warn"] {
            labels.insert(format!("pod-security.kubernetes.io/{mode}").into(), "restricted".into());
        }
    }
    let fields = json!({"metadata": {"name": name, "labels": labels, "ownerReferences": [owner(cluster)]}});
    Wanted { name: name.to_string(), fields }
}

/// The Cluster as `metadata.ownerReferences` name it.
pub fn owner(cluster: &Cluster) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "name": cluster.metadata.name, "uid": cluster.metadata.uid})
}

/// The ports of the cluster's own load balancer: the NodePorts that the gateway listens on for it.
fn front_ports(cluster: &Cluster, services: &[Service]) -> Vec<ServicePort> {
    let namespace = cluster.name().namespace();
    let settings = FrontSettings {
        front: ObjectKey::new(&namespace, FRONT),
        sni_port: None,
        tunnel_port: None,
        listener_limit: None,
        expose_annotation: EXPOSE_NAMESPACED.to_owned(),
        namespace: Some((*namespace).into()),
    };
    // A planned Service has no ClusterIP yet, and will have one.
    let admitted: Vec<Service> = services
        .iter()
        .cloned()
        .map(|mut service| {
            service.spec.cluster_ip = Some("planned".into());
            service
        })
        .collect();
    plan_front_ports(&[], &admitted, &settings).ports
}

/// `front-loadbalancer`, which leads to the gateway by [`gateway_slices`].
fn front_service(cluster: &Cluster, planned: &Service, ports: &[ServicePort]) -> Wanted {
    let mut spec = planned.spec.clone();
    spec.ports = ports.to_vec();
    spec.selector = None;
    wanted(cluster, planned, &spec)
}

fn wanted(cluster: &Cluster, planned: &Service, spec: &portico_api::service::ServiceSpec) -> Wanted {
    let meta = &planned.metadata;
    let mut metadata = metadata(cluster, &meta.name, labels(cluster, &[]));
    if !meta.annotations.is_empty() {
        metadata["annotations"] = json!(meta.annotations);
    }
    Wanted { name: meta.name.to_string(), fields: json!({"metadata": metadata, "spec": spec}) }
}

fn metadata(cluster: &Cluster, name: &str, labels: Strings) -> Value {
    json!({"name": name, "namespace": cluster.name().namespace(), "labels": labels})
}

fn labels(cluster: &Cluster, further: &[(&str, &str)]) -> Strings {
    let own = [MANAGED_BY, (CLUSTER_LABEL, &*cluster.metadata.name)];
    own.iter().chain(further).map(|&(key, value)| (key.into(), value.into())).collect()
}

/// The EndpointSlices of a control plane that runs elsewhere.
fn own_slices(scope: Scope<'_>) -> Vec<Wanted> {
    let Scope { cluster, seed, .. } = scope;
    if !runs_elsewhere(cluster) {
        return Vec::new();
    }
    let mut slices = Vec::new();
    for child in children(cluster, seed) {
        let written = child.endpoints.and_then(|key| cluster.metadata.annotation(key));
        // Validated before.
        let addresses = written.and_then(|written| endpoints::parse(written).ok()).unwrap_or_default();
        let mut groups = BTreeMap::<(bool, u16), Vec<IpAddr>>::new();
        for address in addresses {
            groups.entry((address.is_ipv6(), address.port())).or_default().push(address.ip());
        }
        for ((_, number), ips) in groups {
            let ports = json!([{"name": child.port_name, "protocol": "TCP", "port": number}]);
            slices.push(slice(cluster, child.name, &number.to_string(), ips.iter().copied(), &ports));
        }
    }
    slices
}

/// The EndpointSlices of `front-loadbalancer`: the pods of the gateway, for each family. Without a gateway
/// that is ready there are none, and load balancers see that.
fn gateway_slices(cluster: &Cluster, ports: &[ServicePort], gateways: &BTreeSet<IpAddr>) -> Vec<Wanted> {
    let ports: Vec<Value> = ports
        .iter()
        .map(|port| json!({"name": port.name, "protocol": port.protocol, "port": port.port}))
        .collect();
    let ports = Value::from(ports);
    [false, true]
        .into_iter()
        .filter_map(|v6| {
            let of_family = gateways.iter().copied().filter(move |ip| ip.is_ipv6() == v6);
            let any = of_family.clone().next().is_some();
            any.then(|| slice(cluster, FRONT, "gateway", of_family, &ports))
        })
        .collect()
}

/// The EndpointSlices of `front-loadbalancer` as it was found, for the current pods of the gateway. They are
/// kept in line even where nothing else of the cluster may change.
pub fn slices_to_gateways(cluster: &Cluster, front: &Value, found: &Found) -> Vec<Wanted> {
    let ports = serde_json::from_value::<Vec<ServicePort>>(front["spec"]["ports"].clone());
    let mut ports = ports.unwrap_or_default();
    // Others may have added ports. The gateway's pods listen on more than what is for users.
    let own = |number| found.node_ports.values().any(|&node_port| node_port == number);
    ports.retain(|port| own(port.port) && port.port != ADMIN_PORT);
    gateway_slices(cluster, &ports, &found.gateways)
}

/// One EndpointSlice; `addresses` are of one family.
fn slice(
    cluster: &Cluster,
    service: &str,
    suffix: &str,
    addresses: impl Iterator<Item = IpAddr>,
    ports: &Value,
) -> Wanted {
    let addresses: Vec<IpAddr> = addresses.collect();
    let (family, short) =
        if addresses.first().is_some_and(IpAddr::is_ipv6) { ("IPv6", "v6") } else { ("IPv4", "v4") };
    let name = format!("{service}-{short}-{suffix}");
    let further = [(SERVICE_NAME_LABEL, service), (SLICE_MANAGED_BY, "portico.k8c.io")];
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address], "conditions": {"ready": true}}))
        .collect();
    let fields = json!({
        "metadata": metadata(cluster, &name, labels(cluster, &further)),
        "addressType": family,
        "endpoints": endpoints,
        "ports": ports,
    });
    Wanted { name, fields }
}

/// The NodePort of the API server that users know. It is asked for again where its Service is gone. `None` if
/// that port is not known, or if the plan has no NodePort for the API server. Either door may be the one that
/// has it.
pub fn remembered_node_port(
    cluster: &Cluster,
    exposure: &Exposure,
    doors: Option<&Doors>,
) -> Option<(&'static str, u16)> {
    let plans = [Some(&exposure.plan), exposure.second.as_ref()];
    let by_port = plans.into_iter().flatten().any(|plan| {
        let of_api = plan.services.iter().find(|service| *service.metadata.name == *APISERVER);
        of_api.is_some_and(|service| service.spec.service_type == ServiceType::NodePort)
    });
    let recorded = doors.into_iter().flat_map(|doors| {
        let second = doors.now.second.map(|second| (second.strategy, doors.second.port));
        [Some((doors.now.first, doors.first.port)), second]
    });
    // What the status tells is of the first door.
    let first = doors.map_or(exposure.plan.decision.strategy, |doors| doors.now.first);
    let in_status = (first, cluster.status.address.port);
    let mut ports = [Some(in_status)].into_iter().chain(recorded).flatten().filter_map(|(strategy, port)| {
        // Without NodePorts it is a port of the gateway, which clusters share.
        port.filter(|&number| strategy::of(strategy).has_node_ports() && number != APISERVER_PORT)
    });
    let number = ports.next().filter(|_| by_port)?;
    Some((APISERVER, number))
}

/// The addresses that a client of this cluster may connect to, for messages.
fn text(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
