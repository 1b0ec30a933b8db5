//! The expose annotations of a Service: its claims, and the void ones among them.
//!
//! Values are those of KKP: an existing installation works as it is. One bad item voids the whole expose
//! annotation, as in KKP; another expose annotation of the Service still counts. Every other mistake costs
//! only the part it concerns, and is reported.

use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use portico_api::annotations::{
    ALLOW, API_SERVER_CA, ExposeKeys, ExposeTypes, FAIR_SHARE, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND,
    PORT_MAPPING, SEND_PROXY, SEND_PROXY_V2,
};
use portico_api::api_server_ca::ApiServerCa;
use portico_api::change::Keyed;
use portico_api::intern::Interner;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::{Authority, HostName, Tenant};
use portico_api::network::Network;
use portico_api::policy::{AllowList, Budget, ClusterPolicy, Percent};
use portico_api::service::{Protocol, Service, ServicePort, ServiceType};

use crate::facts::{Age, ExposedPort, Origin, RareServiceFacts, ServiceFacts, boxed};
use crate::findings::{Findings, annotation_field, clipped, shown};
use crate::port_mapping;

/// The network that an allow list without a valid entry admits: an address that no client has. An empty list
/// would admit every client, which its author did not want.
const NOBODY: IpNet = IpNet::V4(Ipv4Net::new_assert(std::net::Ipv4Addr::UNSPECIFIED, 32));

/// Most ports exposed of one Service. KKP's have one; a Service with thousands must not slow down all others.
const MAX_PORTS: usize = 256;

/// Reads what routes need from `service`; `None` if it carries none of the annotations
/// `expose`.
pub(crate) fn read(
    service: &Service,
    origin: Origin,
    expose: &ExposeKeys,
    names: &mut Interner,
) -> Option<ServiceFacts> {
    expose.all(&service.metadata).next()?;
    let mut findings = Findings::of(ObjectRef::new(Kind::Service, &service.metadata));
    let key = service.key();
    let types = expose_types(service, expose, &mut findings);
    let ports = types.map(|types| exposed_ports(service, types, names, &mut findings)).unwrap_or_default();
    Some(ServiceFacts {
        key: ObjectKey { namespace: names.share(&key.namespace), name: names.share(&key.name) },
        origin,
        age: Age::new(service.metadata.creation_timestamp, &service.metadata.uid),
        types,
        ports: ports.into(),
        send_proxy: send_proxy(service, &mut findings),
        rare: boxed(RareServiceFacts {
            own_policy: own_policy(service, &mut findings),
            api_server_ca: api_server_ca(service, &mut findings),
            problems: findings.into_problems(),
        }),
    })
}

/// The types that all annotations of `service` ask for, without void ones. `None` if each is void.
fn expose_types(service: &Service, expose: &ExposeKeys, findings: &mut Findings) -> Option<ExposeTypes> {
    if service.spec.service_type == ServiceType::ExternalName {
        let keys: Vec<&str> = expose.all(&service.metadata).map(|(key, _)| key).collect();
        findings.error(
            "external-name",
            "spec.type",
            "a Service of type ExternalName has no endpoints to expose",
            format!("use type ClusterIP or NodePort, or remove the annotation {}", keys.join(" and ")),
        );
        return None;
    }
    let mut void = Vec::new();
    let read = |(key, value)| ExposeTypes::parse(value).map_err(|error| void.push((key, value, error))).ok();
    let types = expose.all(&service.metadata).filter_map(read).reduce(ExposeTypes::and);
    for (key, value, error) in void {
        let costs = match types {
            None => "the Service is not exposed".to_owned(),
            Some(types) => format!("the Service is exposed only as another annotation says ({types})"),
        };
        findings.error(
            "void-annotation",
            annotation_field(key),
            format!("{} is void, {costs}: {}", shown(value), clipped(&error.to_string())),
            "use true, or a comma list of NodePort, SNI and Tunneling",
        );
    }
    types
}

fn exposed_ports(
    service: &Service,
    types: ExposeTypes,
    names: &mut Interner,
    findings: &mut Findings,
) -> Vec<ExposedPort> {
    let mut ports: Vec<ExposedPort> = Vec::new();
    let by_port = types.node_port && is_node_port(service, findings);
    for (index, port) in service.spec.ports.iter().enumerate() {
        if port.protocol != Protocol::TCP {
            continue;
        }
        if ports.len() == MAX_PORTS {
            let message = format!("only the first {MAX_PORTS} TCP ports are exposed");
            findings.error("too-many-ports", "spec.ports", message, "spread them over several Services");
            break;
        }
        if ports.iter().any(|other| *other.name == *port.name && other.port == port.port) {
            findings.error(
                "duplicate-port",
                format!("spec.ports[{index}]"),
                format!("port {} is there twice under the same name", port.port),
                "remove one of the two",
            );
            continue;
        }
        ports.push(ExposedPort {
            name: names.get(&port.name),
            port: port.port,
            node_port: by_port.then(|| node_port(index, port, findings)).flatten(),
            host: None,
            authority: types.tunneling.then(|| authority(service, port, findings)).flatten(),
        });
    }
    if ports.is_empty() {
        findings.error(
            "no-tcp-port",
            "spec.ports",
            "the Service has no TCP port",
            "add one: only TCP is exposed",
        );
    } else if types.sni {
        port_mapping::apply(service.metadata.annotation(PORT_MAPPING), &mut ports, findings);
    }
    ports
}

fn is_node_port(service: &Service, findings: &mut Findings) -> bool {
    let is = service.spec.service_type == ServiceType::NodePort;
    if !is {
        findings.error(
            "not-node-port",
            "spec.type",
            format!("NodePort is asked for, but the type is {:?}", service.spec.service_type),
            "set spec.type to NodePort, or take NodePort out of the expose annotation",
        );
    }
    is
}

fn node_port(index: usize, port: &ServicePort, findings: &mut Findings) -> Option<u16> {
    let number = port.node_port.filter(|&number| number != 0);
    if number.is_none() {
        findings.error(
            "no-node-port",
            format!("spec.ports[{index}].nodePort"),
            "no number is allocated",
            "write a free one, or wait: Kubernetes allocates one, and for a directory the gateway, as soon \
             as its range has one left",
        );
    }
    number
}

/// The name by which the node agent requests this port: the one that Kubernetes DNS gives it.
fn authority(service: &Service, port: &ServicePort, findings: &mut Findings) -> Option<Authority> {
    let host = format!("{}.{}.svc.cluster.local", service.metadata.name, service.metadata.namespace);
    match HostName::parse(&host) {
        Ok(host) => Some(Authority::new(&host, port.port)),
        Err(error) => {
            let message = format!("{} cannot be asked for by CONNECT: {error}", shown(&host));
            findings.error(
                "bad-host",
                "metadata.name",
                message,
                "give the Service a valid name and namespace",
            );
            None
        }
    }
}

/// The policy in the Service's own annotations; `None` without any of them.
fn own_policy(service: &Service, findings: &mut Findings) -> Option<Arc<ClusterPolicy>> {
    let annotation = |key| service.metadata.annotation(key);
    let keys = [ALLOW, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, FAIR_SHARE];
    if keys.into_iter().all(|key| annotation(key).is_none()) {
        return None;
    }
    let mut bound = |key| annotation(key).and_then(|value| positive(key, value, findings));
    let budget = Budget {
        max_connections: bound(MAX_CONNECTIONS),
        max_connections_per_second: bound(MAX_CONNECTIONS_PER_SECOND),
        fair_share: annotation(FAIR_SHARE).and_then(|value| fair_share(value, findings)),
    };
    let allow = annotation(ALLOW).map(|value| allow_list(value, findings)).unwrap_or_default();
    let open = ClusterPolicy::open(Tenant::of_namespace(&service.metadata.namespace));
    Some(Arc::new(ClusterPolicy { allow, budget, ..open }))
}

fn positive(key: &str, value: &str, findings: &mut Findings) -> Option<u32> {
    let number = value.trim().parse().ok().filter(|&number| number != 0);
    if number.is_none() {
        bad_budget(key, format!("{} is no number from 1 to {}", shown(value), u32::MAX), findings);
    }
    number
}

fn fair_share(value: &str, findings: &mut Findings) -> Option<Percent> {
    let percent = value.parse();
    if let Err(error) = &percent {
        bad_budget(FAIR_SHARE, format!("{} is {error}", shown(value)), findings);
    }
    percent.ok()
}

fn bad_budget(key: &str, message: String, findings: &mut Findings) {
    let remedy = "correct it; until then the gateway's default applies";
    findings.error("bad-budget", annotation_field(key), message, remedy);
}

/// Networks and single addresses between commas. A bad entry admits no client, and neither does a list
/// without a good one.
fn allow_list(value: &str, findings: &mut Findings) -> AllowList {
    let mut networks = Vec::new();
    for item in value.split(',').map(str::trim) {
        match item.parse::<Network>() {
            Ok(network) => networks.push(network.into()),
            Err(_) => findings.error(
                "bad-allow-list",
                annotation_field(ALLOW),
                format!("{} is no network; it admits nobody", shown(item)),
                "write networks as 192.0.2.0/24 or 2001:db8::/32, separated by commas; \
                 remove the annotation to admit everybody",
            ),
        }
    }
    if networks.is_empty() {
        networks.push(NOBODY);
    }
    AllowList::new(networks)
}

fn api_server_ca(service: &Service, findings: &mut Findings) -> Option<ApiServerCa> {
    let read = ApiServerCa::parse(service.metadata.annotation(API_SERVER_CA)?);
    if let Err(error) = &read {
        findings.error(
            "bad-api-server-ca",
            annotation_field(API_SERVER_CA),
            format!("{error}, so no token can be reviewed by it"),
            "write the CA certificates of the API server in PEM, or remove the annotation",
        );
    }
    read.ok()
}

fn send_proxy(service: &Service, findings: &mut Findings) -> bool {
    match service.metadata.annotation(SEND_PROXY) {
        None => false,
        Some(SEND_PROXY_V2) => true,
        Some(other) => {
            let message = format!("{} is not known; no header is sent", shown(other));
            findings.error(
                "bad-send-proxy",
                annotation_field(SEND_PROXY),
                message,
                "use v2, or remove the annotation",
            );
            false
        }
    }
}
