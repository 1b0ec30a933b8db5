//! The routes of KKP's nodeport-proxy from the objects of a seed, and the differences that Portico would
//! make.
//!
//! [`KkpProxy`] follows KKP's rules: only Services with a ready endpoint count, oldest first. If an older
//! Service has one of the hosts of a Service, that Service loses all of its hosts. [`KkpProxy::differences`]
//! compares that with the rows of the route index. An error breaks something that works now. A warning is
//! work for the administrator, or something that will be different.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use portico_api::annotations::{API_SERVER_CA, EXPOSE, EXPOSE_NAMESPACED, ExposeTypes, PORT_MAPPING};
use portico_api::cluster::Cluster;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::policy::AllowList;
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::service::{Protocol, Service, ServicePort, ServiceType};
use portico_expose::doors::Doors;
use portico_expose::front::{ADMIN_PORT, FrontSettings, SNI_PORT, TUNNEL_PORT, plan_front_ports};
use portico_expose::projection::exposed_cluster;
use portico_routes::rows::{RouteRow, RouteState};
use portico_source::Object;

/// KKP's front Service, which its updater keeps.
const FRONT: &str = "nodeport-proxy";

/// Clusters named in one message.
const MOST_NAMES: usize = 8;

/// A key of a route in words: `host a.example.com`, as [`portico_routes::route::RouteKey`] prints it.
type Key = String;

/// Where a key leads.
#[derive(Debug, PartialEq, Eq)]
struct Upstream {
    service: ObjectKey,
    endpoints: BTreeSet<SocketAddr>,
}

/// What KKP's proxies serve.
#[derive(Debug, Default)]
pub struct KkpProxy {
    routes: BTreeMap<Key, Upstream>,
    /// Services that the seed-wide proxy looks at, oldest first.
    exposed: Vec<Service>,
    /// Services of the proxies of single clusters.
    namespaced: Vec<ObjectKey>,
    clusters: BTreeMap<ClusterName, Cluster>,
    /// KKP's front Services, each with the source ranges that its Seed names.
    fronts: Vec<(Service, Vec<Box<str>>)>,
}

impl KkpProxy {
    /// What follows from `objects`. `expose` is the annotation by which a Service asks to be exposed.
    pub fn of(objects: &[Object], expose: &str) -> Self {
        let mut proxy = Self::default();
        let mut slices: HashMap<ObjectKey, Vec<&EndpointSlice>> = HashMap::new();
        let mut seeds: Vec<&Seed> = Vec::new();
        for object in objects {
            match object {
                Object::Service(service) => proxy.note(service, expose),
                Object::EndpointSlice(slice) => {
                    let service =
                        slice.service_name().map(|name| ObjectKey::new(&slice.metadata.namespace, name));
                    slices.entry(service.unwrap_or_else(|| ObjectKey::new("", ""))).or_default().push(slice);
                }
                Object::Seed(seed) => seeds.push(seed),
                Object::Cluster(cluster) => {
                    proxy.clusters.insert(cluster.name(), (**cluster).clone());
                }
                Object::KubermaticConfiguration(_) | Object::ExposedCluster(_) => {}
            }
        }
        for (front, ranges) in &mut proxy.fronts {
            let of_it = seeds.iter().filter(|seed| seed.metadata.namespace == front.metadata.namespace);
            let load_balancers = of_it.map(|seed| &seed.spec.nodeport_proxy.envoy.load_balancer_service);
            ranges.extend(
                load_balancers
                    .flat_map(|service| &service.source_ranges)
                    .filter_map(|range| Some(range.get()?.to_string().into())),
            );
        }
        proxy.exposed.sort_by(|a, b| age(a).cmp(&age(b)));
        let exposed = std::mem::take(&mut proxy.exposed);
        for service in &exposed {
            let types = service.metadata.annotation(expose).map(ExposeTypes::parse);
            if let Some(Ok(types)) = types {
                let slices = slices.get(&service.metadata.key()).map_or(&[][..], Vec::as_slice);
                proxy.serve(service, types, slices);
            }
        }
        proxy.exposed = exposed;
        proxy
    }

    fn note(&mut self, service: &Service, expose: &str) {
        let meta = &service.metadata;
        if *meta.name == *FRONT && service.spec.service_type == ServiceType::LoadBalancer {
            self.fronts.push((service.clone(), Vec::new()));
        } else if meta.annotation(expose).is_some() {
            self.exposed.push(service.clone());
        } else if meta.annotation(EXPOSE_NAMESPACED) == Some("true") {
            self.namespaced.push(meta.key());
        }
    }

    /// Adds what the seed-wide proxy does for one Service.
    fn serve(&mut self, service: &Service, types: ExposeTypes, slices: &[&EndpointSlice]) {
        let ports: Vec<(&ServicePort, BTreeSet<SocketAddr>)> = service
            .spec
            .ports
            .iter()
            .filter(|port| port.protocol == Protocol::TCP)
            .map(|port| (port, ready(slices, &port.name)))
            .filter(|(_, endpoints)| !endpoints.is_empty())
            .collect();
        let key = service.metadata.key();
        let add = |proxy: &mut Self, route: Key, endpoints: &BTreeSet<SocketAddr>| {
            let upstream = Upstream { service: key.clone(), endpoints: endpoints.clone() };
            proxy.routes.entry(route).or_insert(upstream);
        };
        if types.node_port && service.spec.service_type == ServiceType::NodePort {
            for (port, endpoints) in &ports {
                if let Some(number) = port.node_port.filter(|&number| number != 0) {
                    add(self, format!("port {number}"), endpoints);
                }
            }
        }
        if types.tunneling {
            for (port, endpoints) in &ports {
                let ObjectKey { namespace, name } = &key;
                let authority = format!("{name}.{namespace}.svc.cluster.local:{}", port.port);
                add(self, format!("authority {authority}"), endpoints);
            }
        }
        let hosts = types.sni.then(|| hosts(service)).flatten().unwrap_or_default();
        let hosts: Vec<(String, String)> =
            hosts.into_iter().map(|(host, port)| (format!("host {host}"), port)).collect();
        // Not a name by itself: all of the Service's are lost.
        if hosts.iter().all(|(host, _)| !self.routes.contains_key(host)) {
            for (host, name) in hosts {
                if let Some((_, endpoints)) = ports.iter().find(|(port, _)| *port.name == *name) {
                    add(self, host, endpoints);
                }
            }
        }
    }

    /// Where Portico would differ, given the `rows` of its route index for the same objects.
    pub fn differences(&self, rows: impl Iterator<Item = RouteRow>) -> Vec<Problem> {
        let mut found = Vec::new();
        let mut reached = BTreeSet::new();
        for row in rows {
            let key = row.key.to_string();
            match (&row.state, self.routes.get(&key)) {
                (RouteState::Conflict { .. }, _) => continue,
                (RouteState::Ready, Some(upstream)) => compare(&key, &row, upstream, &mut found),
                (RouteState::Ready, None) => found.push(new_route(&key, &row)),
                // The nodes themselves answer, today and later.
                (RouteState::ListenersOff, _) => {}
                // Reported below.
                (_, Some(_)) => continue,
                (_, None) => {}
            }
            reached.insert(key);
        }
        let lost = self.routes.iter().filter(|(key, _)| !reached.contains(*key));
        found.extend(lost.map(|(key, upstream)| lost_route(key, upstream)));
        found.extend(self.clusters.values().flat_map(|cluster| self.of_cluster(cluster)));
        found.extend(self.fronts.iter().flat_map(|(front, ranges)| self.of_front(front, ranges)));
        found
    }

    /// The work to be done for a cluster as a whole.
    fn of_cluster(&self, cluster: &Cluster) -> Vec<Problem> {
        let namespace = cluster.name().namespace();
        let object = ObjectRef::new(Kind::Cluster, &cluster.metadata);
        let mut found = Vec::new();
        if self.namespaced.iter().any(|service| *service.namespace == *namespace) {
            found.push(warning(
                "own-proxy",
                object.clone(),
                format!("KKP's proxy in {namespace} serves it, and the gateway of the seed does not"),
                format!(
                    "keep that proxy; or, in its place, run a gateway with --namespace {namespace} \
                     --expose-annotation {EXPOSE_NAMESPACED}"
                ),
            ));
        }
        let is_tunnel = |(key, upstream): (&Key, &Upstream)| {
            key.starts_with("authority ") && *upstream.service.namespace == *namespace
        };
        let api_server_ca = |service: &Service| {
            *service.metadata.namespace == *namespace && service.metadata.annotation(API_SERVER_CA).is_some()
        };
        if self.routes.iter().any(is_tunnel)
            && cluster.api_server_ca().is_none()
            && !self.exposed.iter().any(api_server_ca)
        {
            found.push(warning(
                "agents-without-identity",
                object,
                "the agents on its nodes are KKP's: they speak CONNECT without TLS and show no identity"
                    .into(),
                format!(
                    "give the gateway --tunnel-plaintext, for as long as they run; for Portico's agent \
                     (deploy/agent.yaml) write the CA of its API server into the annotation {API_SERVER_CA}"
                ),
            ));
        }
        found
    }

    /// The changes that `portico front` would make at KKP's front Service.
    fn of_front(&self, front: &Service, ranges: &[Box<str>]) -> Vec<Problem> {
        let object = ObjectRef::new(Kind::Service, &front.metadata);
        let settings = FrontSettings {
            front: front.metadata.key(),
            sni_port: Some(SNI_PORT),
            tunnel_port: Some(TUNNEL_PORT),
            listener_limit: None,
            expose_annotation: EXPOSE.to_owned(),
            namespace: None,
        };
        let current = &front.spec.ports;
        let planned = plan_front_ports(current, &self.exposed, &settings).ports;
        let numbers = |ports: &[ServicePort]| ports.iter().map(|port| port.port).collect::<BTreeSet<u16>>();
        let (now, then) = (numbers(current), numbers(&planned));
        let mut found = vec![warning(
            "front-has-another-writer",
            object.clone(),
            "KKP's nodeport-proxy-updater keeps its ports".into(),
            format!(
                "scale that to 0 before `portico front --service {}` runs, so that they do not revert \
                 each other; the load balancer's address and node ports stay",
                front.metadata.key()
            ),
        )];
        for port in now.difference(&then) {
            found.push(if *port == ADMIN_PORT {
                warning(
                    "front-without-admin-port",
                    object.clone(),
                    format!("port {ADMIN_PORT} (KKP's health and statistics) would not be published"),
                    "if the cloud's health check asks it, point that at a port that stays".into(),
                )
            } else {
                Problem {
                    severity: Severity::Error,
                    ..warning(
                        "front-port-lost",
                        object.clone(),
                        format!(
                            "port {port} is published, and would not be any more: no exposed Service has it"
                        ),
                        "see which clients use it, and expose its Service".into(),
                    )
                }
            });
        }
        for port in then.difference(&now) {
            found.push(warning(
                "front-port-new",
                object.clone(),
                format!("port {port} is not published today, and would be"),
                "see whether the network before the load balancer is to let it pass".into(),
            ));
        }
        let stale: Vec<&str> = front
            .spec
            .load_balancer_source_ranges
            .iter()
            .filter(|range| !ranges.contains(range))
            .map(|range| &**range)
            .collect();
        if !stale.is_empty() {
            found.push(warning(
                "front-source-ranges",
                object,
                format!(
                    "it admits {}, which the Seed does not name: KKP never takes any away",
                    stale.join(", ")
                ),
                "add them to nodeportProxy.envoy.loadBalancerService.sourceRanges of the Seed if they are \
                 meant, or take them away"
                    .into(),
            ));
        }
        found
    }
}

/// Clusters that a gateway would not know as they are now, because the objects that it reads in their place
/// are missing or differ.
pub fn unprojected(objects: &[Object]) -> Vec<Problem> {
    let seeds: Vec<Box<Seed>> = objects
        .iter()
        .filter_map(|object| match object {
            Object::Seed(seed) => Some(seed.clone()),
            _ => None,
        })
        .collect();
    let configuration = objects.iter().find_map(|object| match object {
        Object::KubermaticConfiguration(configuration) => Some(&**configuration),
        _ => None,
    });
    let exposed: BTreeMap<ClusterName, &ExposedCluster> = objects
        .iter()
        .filter_map(|object| match object {
            Object::ExposedCluster(exposed) => Some((exposed.name(), &**exposed)),
            _ => None,
        })
        .collect();
    let mut found = Vec::new();
    let mut missing: Vec<&Cluster> = Vec::new();
    for object in objects {
        let Object::Cluster(cluster) = object else { continue };
        let exposed = exposed.get(&cluster.name());
        // The Cluster only says where a migration leads.
        let migrates = exposed.filter(|exposed| exposed.spec.migration.is_some());
        let doors = migrates
            .map(|exposed| Doors { first: cluster.status.address.clone(), ..Doors::of(&exposed.spec) });
        let wanted = exposed_cluster(cluster, &seeds, configuration, doors.as_ref());
        match (exposed, wanted) {
            (None, _) => missing.push(cluster),
            (Some(exposed), Ok(wanted)) if exposed.spec != wanted.spec => found.push(warning(
                "projection-differs",
                ObjectRef::new(Kind::Cluster, &cluster.metadata),
                "its ExposedCluster, which gateways read, is not what follows from it now".into(),
                "see why `portico front` does not write it: its log, and portico_front_* metrics".into(),
            )),
            _ => {}
        }
    }
    if let Some(first) = missing.first() {
        let names: Vec<&str> =
            missing.iter().take(MOST_NAMES).map(|cluster| &*cluster.metadata.name).collect();
        let more = match missing.len() - names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        found.push(warning(
            "no-projection",
            ObjectRef::new(Kind::Cluster, &first.metadata),
            format!(
                "gateways read ExposedClusters and admit nobody without: {}{more} have none",
                names.join(", ")
            ),
            "apply deploy/crds.yaml and deploy/front.yaml before the gateway: `portico front` writes them"
                .into(),
        ));
    }
    found
}

fn compare(key: &str, row: &RouteRow, upstream: &Upstream, found: &mut Vec<Problem>) {
    let object = ObjectRef { kind: Kind::Service, key: row.backend.service.clone() };
    if row.backend.service != upstream.service {
        found.push(Problem {
            severity: Severity::Error,
            ..warning(
                "leads-elsewhere",
                object,
                format!("{key} leads to {} today, and would lead here", upstream.service),
                "take the name out of one of the two Services".into(),
            )
        });
        return;
    }
    if row.policy.allow == AllowList::nobody() {
        found.push(lost_route(key, upstream));
        return;
    }
    let ours: BTreeSet<SocketAddr> = row.endpoints.iter().copied().collect();
    let missing: Vec<String> = upstream.endpoints.difference(&ours).map(ToString::to_string).collect();
    if !missing.is_empty() {
        found.push(warning(
            "fewer-endpoints",
            object.clone(),
            format!("{key} would not lead to {} any more", missing.join(", ")),
            "the problems of its EndpointSlices say why".into(),
        ));
    }
    if !row.policy.allow.networks().is_empty() {
        found.push(warning(
            "allow-list-enforced",
            object.clone(),
            format!("{key} admits every client today, and would admit {} only", row.policy.allow),
            "see that workers, users and the seed's own networks are on the list".into(),
        ));
    }
}

fn new_route(key: &str, row: &RouteRow) -> Problem {
    warning(
        "newly-reachable",
        ObjectRef { kind: Kind::Service, key: row.backend.service.clone() },
        format!("{key} is not served today, and would be"),
        "see whether that is meant; if not, take it out of the annotations".into(),
    )
}

fn lost_route(key: &str, upstream: &Upstream) -> Problem {
    Problem {
        severity: Severity::Error,
        ..warning(
            "would-break",
            ObjectRef { kind: Kind::Service, key: upstream.service.clone() },
            format!("{key} is served today, and would not be"),
            "the other problems of this Service say why".into(),
        )
    }
}

fn warning(reason: &'static str, object: ObjectRef, message: String, remedy: String) -> Problem {
    Problem { severity: Severity::Warning, reason, object, field: String::new(), message, remedy }
}

/// The order in which KKP looks at Services.
fn age(service: &Service) -> impl Ord + '_ {
    let meta = &service.metadata;
    (meta.creation_timestamp.is_none(), meta.creation_timestamp, &meta.uid, &meta.namespace, &meta.name)
}

/// The ready endpoints of a port, by its name; an unnamed port has those of every port.
fn ready(slices: &[&EndpointSlice], port_name: &str) -> BTreeSet<SocketAddr> {
    let mut found = BTreeSet::new();
    for slice in slices {
        let named = |name: &Option<Box<str>>| port_name.is_empty() || name.as_deref() == Some(port_name);
        let ports = slice.ports.iter().filter(|port| named(&port.name)).filter_map(|port| port.port);
        for port in ports {
            let ready = slice.endpoints.iter().filter(|endpoint| endpoint.conditions.ready == Some(true));
            let addresses = ready.filter_map(|endpoint| endpoint.addresses.first()?.parse::<IpAddr>().ok());
            found.extend(addresses.map(|address| SocketAddr::new(address.to_canonical(), port)));
        }
    }
    found
}

/// The hosts of the port mapping, each with the name of its port. `None` if KKP would take none of them.
fn hosts(service: &Service) -> Option<BTreeMap<String, String>> {
    let mapping: BTreeMap<String, String> =
        serde_json::from_str(service.metadata.annotation(PORT_MAPPING)?).ok()?;
    let is_tcp = |name: &str| {
        service.spec.ports.iter().any(|port| port.protocol == Protocol::TCP && *port.name == *name)
    };
    let mut hosts = BTreeMap::new();
    for (port, host) in mapping {
        if !is_tcp(&port) || hosts.insert(host.to_ascii_lowercase(), port).is_some() {
            return None;
        }
    }
    hosts.remove("");
    Some(hosts)
}

#[cfg(test)]
mod tests;
