//! What an author of EndpointSlices cannot reach through a Service of their own. That is another tenant's API
//! server past its allow list, whatever the address; and the gateway itself, which knows how clients come to
//! it.

use portico_api::change::Change;
use portico_api::names::Tenant;
use portico_api::policy::{AllowList, ClusterPolicy};
use portico_api::service::{ExternalTrafficPolicy, Service, ServiceType};
use portico_routes::index::{IndexChange, Settings};
use portico_routes::route::OwnAddresses;
use portico_routes::rows::{NoEndpoints, RouteState};

use crate::follower::Follower;
use crate::objects::*;

const GATEWAY: &str = "10.1.0.1";

/// An index in a Kubernetes cluster, of a gateway whose address is known.
fn index() -> Follower {
    let own = OwnAddresses { addresses: [GATEWAY.parse().unwrap()].into(), ports: [6_443].into() };
    Follower::new(Settings { in_kubernetes: true, own, ..Settings::default() })
}

/// The victim, whose list admits one network.
fn closed(cluster: &str) -> IndexChange {
    let allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]);
    policy(ClusterPolicy { allow, ..ClusterPolicy::open(Tenant::of_text(cluster)) })
}

/// The thief's Service, with this endpoint.
fn thief(address: &str, port: u16) -> [IndexChange; 2] {
    let mut slice = slice("cluster-thief/s", "api", &[address]);
    slice.ports = vec![endpoint_port("secure", port)];
    [written(sni("cluster-thief/api", "thief.example.com")), sliced(slice)]
}

fn thief_admits(index: &Follower, client: &str) -> bool {
    index.lead(&host("thief.example.com")).unwrap().policy.allow.admits(client.parse().unwrap())
}

fn unexposed(name: &str) -> Service {
    let mut service = service(name, "");
    service.metadata.annotations.clear();
    service
}

fn cluster_ip(exists: bool) -> IndexChange {
    let address = "10.96.0.7".parse().unwrap();
    IndexChange::ClusterIp(if exists { Change::Apply(address) } else { Change::Delete(address) })
}

#[test]
fn a_cluster_ip_is_no_endpoint_whether_it_comes_before_the_slice_or_after() {
    for ip_is_first in [true, false] {
        let mut index = index();
        let mut steps = vec![Vec::from(thief("10.96.0.7", 443)), vec![cluster_ip(true)]];
        if ip_is_first {
            steps.reverse();
        }
        steps.into_iter().for_each(|step| drop(index.apply(step)));
        assert!(index.endpoints(&host("thief.example.com")).is_empty());
        let row = index.rows().next().unwrap();
        assert_eq!((row.state, row.no_endpoints), (RouteState::NotReady, Some(NoEndpoints::Refused)));
        assert_eq!(index.reasons(), ["endpoint-refused"]);
        let problem = index.problem_lines().remove(0);
        assert!(problem.starts_with("EndpointSlice cluster-thief/s: endpoints: 10.96.0.7"), "{problem}");
        index.apply([cluster_ip(false)]);
        assert_eq!(index.endpoints(&host("thief.example.com")), ["10.96.0.7:443"]);
        assert!(index.reasons().is_empty());
    }
}

#[test]
fn behind_a_node_port_the_allow_list_of_its_cluster_holds() {
    // The victim is a Service that this gateway exposes, or one that another gateway does.
    for victim in [service("cluster-a/api", "NodePort"), unexposed("cluster-a/api")] {
        for thief_is_first in [true, false] {
            let mut index = index();
            let victim = vec![written(victim.clone().node_port(30_001)), closed("a")];
            let mut steps = vec![Vec::from(thief("172.16.0.1", 30_001)), victim];
            if !thief_is_first {
                steps.reverse();
            }
            steps.into_iter().for_each(|step| drop(index.apply(step)));
            assert!(thief_admits(&index, "192.0.2.7") && !thief_admits(&index, "198.51.100.1"));
            assert_eq!(index.reasons(), ["shared-endpoint"]);
            index.apply([no_policy("a")]);
            assert!(thief_admits(&index, "198.51.100.1"), "the cluster has no list any more");
            index.apply([closed("a")]);
            assert!(!thief_admits(&index, "198.51.100.1"));
            index.apply([no_service("cluster-a/api")]);
            assert!(thief_admits(&index, "198.51.100.1"), "the number leads nowhere any more");
        }
    }
}

#[test]
fn a_cluster_may_listen_on_its_own_node_port_and_a_directory_has_none_on_its_machines() {
    let own = [
        written(service("cluster-a/api", "NodePort").node_port(30_001)),
        sliced({
            let mut slice = slice("cluster-a/s", "api", &["10.0.0.1"]);
            slice.ports = vec![endpoint_port("secure", 30_001)];
            slice
        }),
        closed("a"),
    ];
    let mut cluster = index();
    cluster.apply(own.clone());
    assert!(cluster.reasons().is_empty());
    let mut directory = Follower::new(Settings::default());
    directory.apply(own.into_iter().chain(thief("172.16.0.1", 30_001)));
    assert!(thief_admits(&directory, "198.51.100.1"));
}

#[test]
fn an_address_that_is_not_ready_or_of_a_service_that_is_not_exposed_is_still_the_clusters_own() {
    let not_ready = |ready| {
        let mut slice = slice("cluster-a/s", "api", &[]);
        slice.endpoints = vec![endpoint("10.0.0.1", ready)];
        sliced(slice)
    };
    let exposed = written(sni("cluster-a/api", "a.example.com"));
    for (case, victim) in [
        ("not ready", vec![exposed.clone(), not_ready(Some(false))]),
        ("nobody knows", vec![exposed, not_ready(None)]),
        ("not exposed", vec![written(unexposed("cluster-a/api")), not_ready(Some(true))]),
        ("without a Service", vec![not_ready(Some(true))]),
    ] {
        let mut index = index();
        index.apply(thief("10.0.0.1", 6_443).into_iter().chain(victim));
        assert!(thief_admits(&index, "198.51.100.1"), "{case}: without a list");
        index.apply([closed("a")]);
        assert!(!thief_admits(&index, "198.51.100.1"), "{case}");
        index.apply([no_slice("cluster-a/s")]);
        assert!(thief_admits(&index, "198.51.100.1"), "{case}: it is no endpoint any more");
    }
}

/// A Service in front, with these addresses behind it.
fn front(policy: ExternalTrafficPolicy, port: u16) -> [IndexChange; 2] {
    let mut service = unexposed("portico/portico");
    service.spec.service_type = ServiceType::LoadBalancer;
    service.spec.external_traffic_policy = policy;
    let mut slice = slice("portico/s", "portico", &[GATEWAY, "10.1.0.2"]);
    slice.ports = vec![endpoint_port("sni-listener", port)];
    [written(service), sliced(slice)]
}

#[test]
fn the_service_in_front_says_whether_clients_keep_their_addresses_and_where_replicas_are() {
    use ExternalTrafficPolicy::{Cluster, Local};
    let mut index = index();
    index.apply(front(Local, 6_443));
    let found = index.front().unwrap();
    assert!(found.keeps_addresses && found.service.to_string() == "portico/portico");
    let replicas: Vec<String> = found.replicas.iter().map(ToString::to_string).collect();
    assert_eq!(replicas, ["10.1.0.1", "10.1.0.2"]);
    let changes = index.apply(front(Cluster, 6_443));
    assert_eq!(changes.len(), 1);
    assert!(!index.front().unwrap().keeps_addresses);
    assert!(index.apply(front(Cluster, 6_443)).is_empty(), "nothing changed");

    // One of two that masks is the one to know of.
    index.apply(front(Local, 6_443));
    let [IndexChange::Service(Change::Apply(second)), _] = front(Cluster, 6_443) else { panic!() };
    let mut second = Service::clone(&second);
    second.metadata.name = "second".into();
    index.apply([written(second), sliced(slice("portico/s2", "second", &[GATEWAY]))]);
    let found = index.front().unwrap();
    assert!(!found.keeps_addresses && found.service.to_string() == "portico/second");
    index.apply([no_service("portico/second")]);
    assert!(index.front().unwrap().keeps_addresses);
    index.apply([no_service("portico/portico")]);
    assert_eq!(index.front(), None);
}

#[test]
fn another_programs_service_on_the_same_machine_is_not_the_way_to_the_gateway() {
    let mut index = index();
    index.apply(front(ExternalTrafficPolicy::Cluster, 8_443));
    assert_eq!(index.front(), None);
    // Until that is the number of a NodePort listener.
    index.apply([written(service("cluster-a/api", "NodePort").node_port(8_443))]);
    assert!(index.front().is_some_and(|front| !front.keeps_addresses));
    index.apply([no_service("cluster-a/api")]);
    assert_eq!(index.front(), None);
}
