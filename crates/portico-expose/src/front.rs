//! The ports that a front LoadBalancer Service publishes, so that clients reach clusters by NodePort through
//! it. The Service is that of a seed, or that of one cluster with the strategy LoadBalancer.
//!
//! It follows KKP's updater, with these differences. A comma list that holds `NodePort` counts. A
//! name that is too long is shortened. The admin port is never published. At a cloud's listener limit, new
//! Services wait. A Service that would be left without ports keeps those it has.
//!
//! - The shared listeners come first, then the ports that are published already, then those of control
//!   planes, then the others by age.
//! - Of the others no more are published for a namespace that has [`MAX_PORTS_OF_NAMESPACE`]. Every port
//!   takes one of the seed's node ports and a listener: those of one namespace must not take all there are.
//! - A NodePort that is published for another Service, or is the SNI, tunnel or admin port, waits.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::sync::Arc;

use portico_api::annotations::ExposeTypes;
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_api::service::{Protocol, Service, ServicePort, ServiceSpec, TargetPort};
use portico_api::text::stable_hash;
use serde::Serialize;

use crate::services::EXPOSED;

/// Port of the gateway's listener that routes by server name.
pub const SNI_PORT: u16 = 6_443;

/// Port of the gateway's tunnel listener.
pub const TUNNEL_PORT: u16 = 8_088;

/// Port of the gateway's admin server. KKP publishes it; Portico never does.
pub const ADMIN_PORT: u16 = 8_002;

/// From so many ports of one namespace on, no more are published, beside those of a control plane. KKP's
/// clusters have none or one.
pub const MAX_PORTS_OF_NAMESPACE: usize = 50;

/// Longest name of a Service port: a DNS label.
const MAX_PORT_NAME: usize = 63;

/// Settings of the front Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontSettings {
    /// The front Service itself: its own ports are not published.
    pub front: ObjectKey,
    /// Port of the SNI listener, if it is to be published.
    pub sni_port: Option<u16>,
    /// Port of the tunnel listener, if it is to be published.
    pub tunnel_port: Option<u16>,
    /// Most ports that the load balancer can have; `None` for no limit.
    pub listener_limit: Option<usize>,
    /// The annotation that exposes a Service.
    pub expose_annotation: String,
    /// Publish the Services of this namespace only: the load balancer belongs to one cluster.
    pub namespace: Option<Arc<str>>,
}

/// The ports as they should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontPlan {
    /// All ports, sorted by name. Those of now, if there is nothing to publish.
    pub ports: Vec<ServicePort>,
    /// No port is wanted. The API server takes no Service without ports, and clients that are connected lose
    /// nothing by ports that stay.
    pub nothing_to_publish: bool,
    /// Ports that are not published, oldest first.
    pub waiting: Vec<Waiting>,
    /// How many listeners are in use.
    pub used: usize,
    /// How many there may be.
    pub limit: Option<usize>,
    /// Whether `ports` differs from what the Service has now.
    pub changed: bool,
}

/// A NodePort that is not published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// The Service of the port.
    pub service: ObjectKey,
    /// The NodePort number.
    pub node_port: u16,
    /// Why it is not published.
    pub why: WhyWaiting,
}

/// Why a NodePort is not published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhyWaiting {
    /// The load balancer has no listener left. The port is published as soon as one is free.
    ListenerLimit,
    /// The namespace has [`MAX_PORTS_OF_NAMESPACE`] others.
    NamespaceLimit,
    /// The number is published already, or is one of the gateway's own.
    NumberTaken,
}

/// A NodePort to publish.
struct Wanted<'a> {
    service: &'a Service,
    port: &'a ServicePort,
    node_port: u16,
    /// It is published now.
    is_published: bool,
    /// It is the way to a control plane.
    is_of_control_plane: bool,
}

/// Returns the ports that the front Service should have. `current` are the ports it has now, `services` all
/// Services of the seed in any order.
pub fn plan_front_ports<'a>(
    current: &[ServicePort],
    services: impl IntoIterator<Item = &'a Service>,
    settings: &FrontSettings,
) -> FrontPlan {
    let mut by_number = BTreeMap::new();
    for (name, number) in [("sni-listener", settings.sni_port), ("tunneling-listener", settings.tunnel_port)]
    {
        if let Some(number) = number.filter(|&number| number != ADMIN_PORT) {
            by_number.entry(number).or_insert_with(|| front_port(name.into(), number));
        }
    }
    let limit = settings.listener_limit.unwrap_or(usize::MAX);
    let mut waiting = Vec::new();
    let mut others: BTreeMap<&str, usize> = BTreeMap::new();
    for wanted in in_order(current, services, settings) {
        let Wanted { service, port, node_port, is_published, is_of_control_plane } = wanted;
        let of_namespace = others.entry(&service.metadata.namespace).or_default();
        let why = if by_number.contains_key(&node_port) || node_port == ADMIN_PORT {
            Some(WhyWaiting::NumberTaken)
        } else if !is_published && !is_of_control_plane && *of_namespace >= MAX_PORTS_OF_NAMESPACE {
            Some(WhyWaiting::NamespaceLimit)
        } else if by_number.len() >= limit {
            Some(WhyWaiting::ListenerLimit)
        } else {
            None
        };
        match why {
            Some(why) => waiting.push(Waiting { service: service.metadata.key(), node_port, why }),
            None => {
                *of_namespace += usize::from(!is_of_control_plane);
                by_number.insert(node_port, front_port(name_of(service, port, node_port), node_port));
            }
        }
    }
    let nothing_to_publish = by_number.is_empty();
    let used = by_number.len();
    let limit = settings.listener_limit;
    if nothing_to_publish {
        return FrontPlan {
            ports: current.to_vec(),
            nothing_to_publish,
            waiting,
            used,
            limit,
            changed: false,
        };
    }
    let mut ports: Vec<ServicePort> = by_number.into_values().collect();
    ports.sort_by(|a, b| a.name.cmp(&b.name));
    keep_node_ports(&mut ports, current);
    FrontPlan { changed: ports != current, ports, nothing_to_publish, waiting, used, limit }
}

fn front_port(name: Box<str>, number: u16) -> ServicePort {
    ServicePort {
        name,
        protocol: Protocol::TCP,
        port: number,
        target_port: Some(TargetPort::Number(number)),
        node_port: None,
    }
}

/// The NodePorts to publish: first those that are published now, then those of control planes, then the
/// others, each group by age. A Service without an age counts as youngest. Equals are ordered by UID and
/// name, as in the route table, so that the order of a watch makes no difference.
fn in_order<'a>(
    current: &[ServicePort],
    services: impl IntoIterator<Item = &'a Service>,
    settings: &FrontSettings,
) -> Vec<Wanted<'a>> {
    let mut services: Vec<&Service> =
        services.into_iter().filter(|service| is_published(service, settings)).collect();
    services.sort_by(|a, b| age(a).cmp(&age(b)));
    let published: BTreeSet<u16> = current.iter().map(|port| port.port).collect();
    let published = &published;
    let ports = |service: &'a Service| {
        let mut is_of_control_plane = is_of_control_plane(service);
        let numbered = move |port: &'a ServicePort| {
            let node_port = port.node_port?;
            let is_published = published.contains(&node_port);
            let is_of_control_plane = take(&mut is_of_control_plane);
            Some(Wanted { service, port, node_port, is_published, is_of_control_plane })
        };
        service.spec.ports.iter().filter(|port| port.protocol == Protocol::TCP).filter_map(numbered)
    };
    let mut wanted: Vec<Wanted<'a>> = services.into_iter().flat_map(ports).collect();
    // Stable: every group stays ordered by age.
    wanted.sort_by_key(|wanted| (!wanted.is_published, !wanted.is_of_control_plane));
    wanted
}

/// Whether it is a Service that Portico or KKP makes for a cluster. Each has one port: the first counts. In a
/// cluster's namespace somebody may write such a Service with any number of them.
fn is_of_control_plane(service: &Service) -> bool {
    let meta = &service.metadata;
    ClusterName::of_namespace(&meta.namespace).is_some() && EXPOSED.contains(&&*meta.name)
}

fn age(service: &Service) -> impl Ord + '_ {
    let meta = &service.metadata;
    let born = meta.creation_timestamp;
    (born.is_none(), born, &meta.uid, &meta.namespace, &meta.name)
}

/// Whether a Service is exposed by NodePort and has an address of its own. A Service without a ClusterIP is
/// headless, or not admitted yet.
fn is_published(service: &Service, settings: &FrontSettings) -> bool {
    if settings.namespace.as_ref().is_some_and(|namespace| *namespace != service.metadata.namespace) {
        return false;
    }
    let ServiceSpec { cluster_ip, .. } = &service.spec;
    let exposed = service.metadata.annotation(&settings.expose_annotation).map(ExposeTypes::parse);
    let has_address = cluster_ip.as_deref().is_some_and(|ip| !ip.is_empty() && ip != "None");
    matches!(exposed, Some(Ok(types)) if types.node_port)
        && has_address
        && service.metadata.key() != settings.front
}

/// `<namespace>-<service>-<nodePort>`, as KKP names it. A name that is too long is cut, and gets a hash of
/// the whole in the middle. Namespaces and Services are DNS labels, so every other character is valid.
fn name_of(service: &Service, port: &ServicePort, node_port: u16) -> Box<str> {
    let ObjectKey { namespace, name } = service.metadata.key();
    let whole = format!("{namespace}-{name}-{node_port}");
    if whole.len() <= MAX_PORT_NAME {
        return whole.into();
    }
    // One that another has as well does no harm: the number at the end of each name differs.
    let hash = stable_hash(format!("{namespace}/{name}/{}", port.name).as_bytes());
    let end = format!("-{hash:08x}-{node_port}");
    let mut start = MAX_PORT_NAME - end.len();
    while !whole.is_char_boundary(start) {
        start -= 1;
    }
    format!("{}{end}", whole[..start].trim_end_matches('-')).into()
}

/// Keeps the front Service's own NodePorts, which the cloud load balancer points at. Ports are matched by
/// number, because KKP names them differently.
fn keep_node_ports(ports: &mut [ServicePort], current: &[ServicePort]) {
    let current: BTreeMap<u16, u16> = current
        .iter()
        .filter(|port| port.protocol == Protocol::TCP)
        .filter_map(|port| Some((port.port, port.node_port?)))
        .collect();
    for port in ports {
        port.node_port = current.get(&port.port).copied();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::read;

    fn settings(listener_limit: Option<usize>) -> FrontSettings {
        FrontSettings {
            front: ObjectKey::new("kubermatic", "nodeport-proxy"),
            sni_port: Some(6_443),
            tunnel_port: Some(8_088),
            listener_limit,
            expose_annotation: "nodeport-proxy.k8s.io/expose".into(),
            namespace: None,
        }
    }

    /// A Service created in the year `born`.
    fn service(namespace: &str, name: &str, born: u16, expose: &str, node_port: u16) -> Service {
        read(&format!(
            r#"{{"metadata": {{"namespace": "{namespace}", "name": "{name}", "uid": "{namespace}-{name}",
                    "creationTimestamp": "{born}-01-01T00:00:00Z",
                    "annotations": {{"nodeport-proxy.k8s.io/expose": "{expose}"}}}},
                "spec": {{"type": "NodePort", "clusterIP": "10.0.0.1",
                    "ports": [{{"name": "secure", "port": 443, "nodePort": {node_port}}}]}}}}"#
        ))
    }

    fn names(plan: &FrontPlan) -> Vec<&str> {
        plan.ports.iter().map(|port| &*port.name).collect()
    }

    #[test]
    fn every_exposed_node_port_is_published_beside_the_shared_listeners() {
        let services = [
            service("cluster-b", "apiserver-external", 2_001, "NodePort", 30_002),
            service("cluster-a", "apiserver-external", 2_002, "true", 30_001),
            service("cluster-c", "apiserver-external", 2_003, "SNI, NodePort", 30_003),
            service("cluster-d", "apiserver-external", 2_004, "SNI,Tunneling", 30_004),
            service("cluster-e", "apiserver-external", 2_005, "nodeport", 30_005),
        ];
        let plan = plan_front_ports(&[], &services, &settings(None));
        assert_eq!(
            names(&plan),
            [
                "cluster-a-apiserver-external-30001",
                "cluster-b-apiserver-external-30002",
                "cluster-c-apiserver-external-30003",
                "sni-listener",
                "tunneling-listener",
            ]
        );
        assert_eq!(plan.ports[0].target_port, Some(TargetPort::Number(30_001)));
        assert_eq!((plan.used, plan.changed), (5, true));
        assert!(!plan_front_ports(&plan.ports, &services, &settings(None)).changed);
    }

    #[test]
    fn headless_udp_and_unnumbered_ports_and_the_front_itself_are_not_published() {
        let mut headless = service("a", "b", 2_001, "NodePort", 30_001);
        headless.spec.cluster_ip = Some("None".into());
        let mut udp = service("a", "c", 2_001, "NodePort", 30_002);
        udp.spec.ports[0].protocol = Protocol::UDP;
        let mut unnumbered = service("a", "d", 2_001, "NodePort", 30_003);
        unnumbered.spec.ports[0].node_port = None;
        let front = service("kubermatic", "nodeport-proxy", 2_001, "NodePort", 30_004);
        let plan = plan_front_ports(&[], &[headless, udp, unnumbered, front], &settings(None));
        assert_eq!(names(&plan), ["sni-listener", "tunneling-listener"]);
    }

    #[test]
    fn the_admin_port_is_never_published_and_goes_if_it_was() {
        let health = front_port("healthz".into(), ADMIN_PORT);
        let service = service("a", "b", 2_001, "NodePort", ADMIN_PORT);
        let settings = FrontSettings { sni_port: Some(ADMIN_PORT), ..settings(None) };
        let plan = plan_front_ports(&[health], &[service], &settings);
        assert_eq!(names(&plan), ["tunneling-listener"]);
        assert!(plan.changed);
    }

    #[test]
    fn with_nothing_to_publish_the_ports_of_now_stay() {
        let none = FrontSettings { sni_port: None, tunnel_port: None, ..settings(None) };
        let placeholder = ServicePort { node_port: Some(31_999), ..front_port("secure".into(), 443) };
        let plan = plan_front_ports(std::slice::from_ref(&placeholder), [], &none);
        assert!(plan.nothing_to_publish && !plan.changed);
        assert_eq!((plan.ports, plan.used), (vec![placeholder], 0));
    }

    #[test]
    fn the_load_balancer_of_a_cluster_publishes_that_cluster_alone() {
        let own = service("cluster-a", "apiserver-external", 2_001, "true", 30_001);
        let other = service("cluster-b", "apiserver-external", 2_001, "true", 30_002);
        let settings = FrontSettings {
            front: ObjectKey::new("cluster-a", "front-loadbalancer"),
            sni_port: None,
            tunnel_port: None,
            namespace: Some("cluster-a".into()),
            ..settings(None)
        };
        let health = front_port("healthz".into(), ADMIN_PORT);
        let plan = plan_front_ports(&[health], [&own, &other], &settings);
        assert_eq!(names(&plan), ["cluster-a-apiserver-external-30001"]);
        assert!(plan.changed);
    }

    #[test]
    fn its_own_node_ports_stay_whatever_the_port_was_called() {
        let service = service("cluster-a", "apiserver-external", 2_001, "NodePort", 30_001);
        for name in
            ["cluster-a-apiserver-external-30001", "cluster-a-apiserver-external-443-30001", "somebody-else"]
        {
            let current = ServicePort { node_port: Some(31_999), ..front_port(name.into(), 30_001) };
            let plan = plan_front_ports(&[current], [&service], &settings(None));
            assert_eq!(plan.ports[0].node_port, Some(31_999), "{name}");
        }
    }

    #[test]
    fn at_the_listener_limit_the_newest_wait_and_the_old_ones_stay() {
        let old = service("cluster-z", "api", 2_001, "NodePort", 30_001);
        let young = service("cluster-a", "api", 2_002, "NodePort", 30_002);
        let mut ageless = service("cluster-0", "api", 2_000, "NodePort", 30_003);
        ageless.metadata.creation_timestamp = None;
        let plan = plan_front_ports(&[], [&ageless, &young, &old], &settings(Some(3)));
        assert_eq!(names(&plan), ["cluster-z-api-30001", "sni-listener", "tunneling-listener"]);
        let waiting: Vec<_> = plan.waiting.iter().map(|waiting| waiting.service.to_string()).collect();
        assert_eq!(waiting, ["cluster-a/api", "cluster-0/api"]);
        assert_eq!((plan.used, plan.limit), (3, Some(3)));
        // The oldest Service is deleted: the next in age is published.
        let plan = plan_front_ports(&plan.ports, [&ageless, &young], &settings(Some(3)));
        assert_eq!(names(&plan)[0], "cluster-a-api-30002");
    }

    #[test]
    fn what_is_published_is_not_displaced_by_an_old_service_that_is_exposed_later() {
        let young = service("cluster-a", "api", 2_002, "NodePort", 30_002);
        let plan = plan_front_ports(&[], [&young], &settings(Some(3)));
        let old = service("cluster-z", "api", 2_001, "NodePort", 30_001);
        let plan = plan_front_ports(&plan.ports, [&young, &old], &settings(Some(3)));
        assert_eq!(names(&plan)[0], "cluster-a-api-30002");
        assert_eq!(plan.waiting[0].why, WhyWaiting::ListenerLimit);
    }

    /// A Service of one tenant with as many NodePorts, from 31000.
    fn many(name: &str, count: u16) -> Service {
        let mut many = service("cluster-evil", name, 2_001, "NodePort", 31_000);
        let port = many.spec.ports[0].clone();
        let numbered = |number| ServicePort { node_port: Some(number), ..port.clone() };
        many.spec.ports = (31_000..31_000 + count).map(numbered).collect();
        many
    }

    #[test]
    fn one_namespace_has_so_many_ports_beside_those_of_its_control_plane() {
        let (api, other) = (
            service("cluster-evil", "apiserver-external", 2_003, "NodePort", 30_001),
            service("default", "web", 2_003, "NodePort", 30_002),
        );
        for (name, published) in [("web", 50), ("konnectivity-server", 51)] {
            let services = [many(name, 75), api.clone(), other.clone()];
            let plan = plan_front_ports(&[], &services, &settings(None));
            assert_eq!(plan.used, 2 + 2 + published, "{name}: one more is that of a control plane");
            assert_eq!(plan.waiting.len(), 75 - published);
            let of_evil = |waiting: &Waiting| &*waiting.service.namespace == "cluster-evil";
            assert!(plan.waiting.iter().all(|it| it.why == WhyWaiting::NamespaceLimit && of_evil(it)));
            assert!(!plan_front_ports(&plan.ports, &services, &settings(None)).changed);
        }
    }

    #[test]
    fn what_is_published_stays_and_a_new_control_plane_comes_before_what_else_is_new() {
        let published = plan_front_ports(&[], [&many("web", 50)], &settings(None));
        let new = [
            service("cluster-new", "apiserver-external", 2_009, "NodePort", 30_001),
            // Only the namespace of a cluster has a control plane.
            service("default", "apiserver-external", 2_000, "NodePort", 30_003),
        ];
        let services = || new.iter().chain([&many("web", 75)]).cloned().collect::<Vec<_>>();
        let plan = plan_front_ports(&published.ports, &services(), &settings(Some(53)));
        assert_eq!(plan.used, 53);
        assert!(names(&plan).contains(&"cluster-new-apiserver-external-30001"), "{:?}", plan.waiting);
        assert_eq!(plan.waiting.len(), 25 + 1);
        // More than a namespace would get today.
        let many_published = ServicePort { node_port: None, ..published.ports[0].clone() };
        let numbered = |port| ServicePort { port, ..many_published.clone() };
        let current: Vec<_> = (31_000..31_060).map(numbered).collect();
        let plan = plan_front_ports(&current, &services(), &settings(None));
        assert_eq!((plan.used, plan.waiting.len()), (2 + 60 + 2, 15));
    }

    #[test]
    fn a_number_that_is_published_already_waits() {
        let old = service("cluster-a", "api", 2_001, "NodePort", 30_001);
        let young = service("cluster-b", "api", 2_002, "NodePort", 30_001);
        let own = service("cluster-c", "api", 2_003, "NodePort", 6_443);
        let plan = plan_front_ports(&[], [&own, &young, &old], &settings(None));
        assert_eq!(names(&plan), ["cluster-a-api-30001", "sni-listener", "tunneling-listener"]);
        assert!(plan.waiting.iter().all(|waiting| waiting.why == WhyWaiting::NumberTaken));
        assert_eq!(plan.waiting.len(), 2);
    }

    #[test]
    fn a_name_that_would_be_too_long_is_shortened_the_same_way_every_time() {
        let namespace = format!("cluster-{}", "a".repeat(36));
        let service = service(&namespace, "apiserver-external", 2_001, "NodePort", 30_001);
        let plan = plan_front_ports(&[], [&service], &settings(None));
        assert_eq!(names(&plan)[0], "cluster-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-api-0da930ac-30001");
    }

    proptest! {
        #[test]
        fn port_names_are_legal_and_unique_and_the_order_of_services_makes_no_difference(
            wanted in prop::collection::btree_map(
                30_000..32_768_u16,
                ("[a-z][a-z0-9-]{0,61}[a-z0-9]", "[a-z][a-z0-9-]{0,61}[a-z0-9]", 2_000..2_005_u16),
                0..30,
            ),
            limit in prop::option::of(2..20_usize),
        ) {
            let services: Vec<Service> = wanted.iter()
                .map(|(&port, (namespace, name, born))| service(namespace, name, *born, "NodePort", port))
                .collect();
            let plan = plan_front_ports(&[], &services, &settings(limit));
            prop_assert_eq!(&plan, &plan_front_ports(&[], services.iter().rev(), &settings(limit)));
            let mut names = names(&plan);
            for name in &names {
                prop_assert!(name.len() <= 63 && !name.starts_with('-') && !name.ends_with('-'), "{name}");
                prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
            }
            prop_assert!(names.is_sorted());
            names.dedup();
            prop_assert_eq!(names.len(), plan.used);
            prop_assert_eq!(plan.used + plan.waiting.len(), services.len() + 2);
            prop_assert!(limit.is_none_or(|limit| plan.used <= limit));
        }
    }
}
