//! What the annotations of a Service promise: which keys lead to it, and which problems are reported about
//! those that do not.

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED, ExposeKeys};
use portico_api::service::{Protocol, ServiceType};
use portico_routes::index::{IndexChange, Settings};
use portico_routes::route::RouteKey;

use crate::follower::{Follower, index};
use crate::objects::*;

/// What KKP writes for an API server under `Tunneling`.
fn tunneling() -> IndexChange {
    let service = service("cluster-a/apiserver-external", "SNI,Tunneling");
    written(service.mapping(r#"{"secure":"a.north.example.com"}"#))
}

const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";

#[test]
fn a_server_name_leads_where_it_says_itself_then_where_its_longest_wildcard_says() {
    let mut index = index([
        written(sni("cluster-a/exact", "a.kkp.example.com")),
        written(sni("w/short", "*.example.com")),
        written(sni("w/long", "*.KKP.example.com.")),
    ]);
    for (name, owner) in [
        ("a.kkp.example.com", Some("cluster-a/exact")),
        ("b.kkp.example.com", Some("w/long")),
        ("deep.b.kkp.example.com", Some("w/long")),
        ("other.example.com", Some("w/short")),
        ("kkp.example.com", Some("w/short")),
        ("example.com", None),
        ("com", None),
        ("a.example.org", None),
    ] {
        assert_eq!(index.owner(&host(name)).as_deref(), owner, "{name}");
    }
    assert!(index.reasons().is_empty());
    let known = policy(portico_api::policy::ClusterPolicy::open(portico_api::names::Tenant::of_text("a")));
    index.apply([known, no_service("cluster-a/exact")]);
    assert_eq!(index.owner(&host("a.kkp.example.com")), None, "kept for the cluster, no wildcard has it");
    index.apply([written(sni("cluster-a/exact", "a.kkp.example.com"))]);
    assert_eq!(index.owner(&host("a.kkp.example.com")).as_deref(), Some("cluster-a/exact"));
    index.apply([no_service("cluster-a/exact"), no_policy("a")]);
    assert_eq!(index.owner(&host("a.kkp.example.com")).as_deref(), Some("w/long"));
    index.apply([no_service("w/long")]);
    assert_eq!(index.owner(&host("a.kkp.example.com")).as_deref(), Some("w/short"));
}

#[test]
fn a_wildcard_that_is_kept_has_no_shorter_one_in_its_place() {
    let known = policy(portico_api::policy::ClusterPolicy::open(portico_api::names::Tenant::of_text("a")));
    let long = || written(sni("cluster-a/api", "*.a.example.com"));
    let exact = written(sni("w/exact", "exact.b.a.example.com"));
    let mut index = index([known, long(), written(sni("w/short", "*.example.com")), exact]);
    let owner = |index: &Follower| index.owner(&host("b.a.example.com"));
    index.apply([no_service("cluster-a/api")]);
    assert_eq!(owner(&index), None, "kept for the cluster");
    assert_eq!(index.owner(&host("exact.b.a.example.com")).as_deref(), Some("w/exact"));
    assert_eq!(index.owner(&host("a.example.com")).as_deref(), Some("w/short"), "not below it");
    index.apply([long()]);
    assert_eq!(owner(&index).as_deref(), Some("cluster-a/api"));
    index.apply([no_service("cluster-a/api"), no_policy("a")]);
    assert_eq!(owner(&index).as_deref(), Some("w/short"));
}

#[test]
fn an_ip_address_is_no_server_name() {
    for address in ["10.0.0.1", "10.0.0.1.", "2001:db8::1"] {
        let index = index([written(sni("a/api", address))]);
        assert_eq!((index.routes().len(), index.reasons()), (0, vec!["bad-host"]), "{address}");
    }
}

#[test]
fn a_comma_list_exposes_in_every_way_it_names() {
    let list = service("cluster-a/api", " NodePort ,SNI, Tunneling").node_port(30_001);
    let index = index([written(list.mapping(r#"{"secure":"a.example.com"}"#))]);
    let keys =
        [RouteKey::Port(30_001), host("a.example.com"), authority("api.cluster-a.svc.cluster.local:443")];
    for key in keys {
        assert_eq!(index.owner(&key).as_deref(), Some("cluster-a/api"), "{key}");
    }
    assert_eq!(index.routes().len(), 3);
    assert!(index.reasons().is_empty());
}

#[test]
fn a_route_without_ready_endpoints_is_known_and_has_none() {
    let index = index([tunneling()]);
    assert!(index.endpoints(&host("a.north.example.com")).is_empty());
    assert!(index.endpoints(&authority(AUTHORITY)).is_empty());
}

#[test]
fn both_keys_of_one_port_share_one_backend() {
    let index = index([tunneling()]);
    let by_host = index.lead(&host("a.north.example.com")).unwrap();
    assert!(std::sync::Arc::ptr_eq(by_host, index.lead(&authority(AUTHORITY)).unwrap()));
    assert_eq!(by_host.id.to_string(), "cluster-a/apiserver-external-secure");
}

#[test]
fn a_name_written_with_upper_case_and_a_dot_is_the_same_name() {
    let index = index([written(sni("cluster-a/api", "A.North.Example.COM."))]);
    assert!(index.lead(&host("a.north.example.com")).is_some());
}

#[test]
fn a_service_that_does_not_ask_is_not_exposed() {
    let mut silent = service("cluster-a/api", "SNI");
    silent.metadata.annotations.clear();
    let index = index([written(silent)]);
    assert!(index.routes().is_empty() && index.reasons().is_empty());
}

#[test]
fn removing_the_annotation_removes_the_routes() {
    let mut index = index([tunneling()]);
    let mut silent = service("cluster-a/apiserver-external", "SNI");
    silent.metadata.annotations.clear();
    index.apply([written(silent)]);
    assert!(index.routes().is_empty());
}

#[test]
fn removing_the_service_removes_the_routes() {
    let mut index = index([tunneling(), sliced(slice("cluster-a/s", "apiserver-external", &["10.0.0.1"]))]);
    index.apply([no_service("cluster-a/apiserver-external")]);
    assert!(index.routes().is_empty());
}

#[test]
fn one_bad_item_voids_the_whole_annotation_and_says_so() {
    let index = index([written(sni("cluster-a/api", "a.example.com").annotated(EXPOSE, "SNI,tunneling"))]);
    assert!(index.routes().is_empty());
    assert_eq!(index.reasons(), ["void-annotation"]);
    let problem = index.problems().next().unwrap().into_owned();
    assert_eq!(
        problem.to_string(),
        "Service cluster-a/api: metadata.annotations[nodeport-proxy.k8s.io/expose]: \
         \"SNI,tunneling\" is void, the Service is not exposed: \"tunneling\" is none of \
         NodePort, SNI, Tunneling (upper and lower case matter); \
         use true, or a comma list of NodePort, SNI and Tunneling"
    );
}

#[test]
fn sni_without_a_mapping_costs_the_sni_route_only() {
    let index = index([written(service("cluster-a/api", "SNI,Tunneling"))]);
    assert_eq!(index.routes().len(), 1);
    assert_eq!(index.reasons(), ["mapping-missing"]);
}

#[test]
fn a_mapping_that_is_no_json_object_costs_the_sni_route_only() {
    for mapping in ["secure: a.example.com", "[]", "\"a\"", "", "null", "{\"secure\":"] {
        let index = index([written(service("cluster-a/api", "SNI,Tunneling").mapping(mapping))]);
        assert_eq!(index.routes().len(), 1, "{mapping}");
        assert_eq!(index.reasons(), ["bad-mapping"], "{mapping}");
    }
}

#[test]
fn a_bad_mapping_entry_costs_that_entry() {
    let bad = [
        (r#""nosuch":"b.example.com""#, "bad-mapping"),
        (r#""other":5"#, "bad-mapping"),
        (r#""other":"*example.com""#, "bad-host"),
        (r#""other":"A.example.com""#, "host-conflict"),
    ];
    for (entry, reason) in bad {
        let mapping = format!(r#"{{"secure":"a.example.com",{entry}}}"#);
        let index = index([written(service("cluster-a/api", "SNI").port("other", 444).mapping(&mapping))]);
        let backend = index.lead(&host("a.example.com")).unwrap();
        assert_eq!((&*backend.id.port_name, index.routes().len()), ("secure", 1), "{entry}");
        assert_eq!(index.reasons(), [reason], "{entry}");
    }
}

#[test]
fn a_stale_mapping_of_another_strategy_is_no_problem() {
    let index = index([written(service("cluster-a/api", "NodePort").node_port(30_001).mapping("nonsense"))]);
    assert!(index.reasons().is_empty());
}

#[test]
fn only_a_service_of_type_node_port_is_exposed_by_port() {
    for other in [ServiceType::ClusterIP, ServiceType::LoadBalancer] {
        let mut service = service("cluster-a/api", "NodePort,Tunneling").node_port(30_001);
        service.spec.service_type = other;
        let index = index([written(service)]);
        assert!(index.table.ports.is_empty() && !index.table.authorities.is_empty());
        assert_eq!(index.reasons(), ["not-node-port"]);
    }
}

#[test]
fn of_a_node_port_without_a_number_it_is_said_who_allocates_one() {
    let index = index([written(service("cluster-a/api", "NodePort").node_port(0))]);
    let expected = "Service cluster-a/api: spec.ports[0].nodePort: no number is allocated; write a free one, \
                    or wait: Kubernetes allocates one, and for a directory the gateway, as soon as its range \
                    has one left";
    assert_eq!(index.problem_lines(), [expected]);
}

#[test]
fn ports_that_are_not_tcp_are_skipped() {
    let mut mixed = service("cluster-a/api", "Tunneling").port("dns", 53).port("sctp", 54);
    mixed.spec.ports[1].protocol = Protocol::UDP;
    mixed.spec.ports[2].protocol = Protocol::SCTP;
    let index = index([written(mixed)]);
    assert_eq!(index.routes().len(), 1);
}

#[test]
fn a_service_without_a_tcp_port_says_so() {
    let mut udp = service("cluster-a/api", "Tunneling");
    udp.spec.ports[0].protocol = Protocol::UDP;
    assert_eq!(index([written(udp)]).reasons(), ["no-tcp-port"]);
}

#[test]
fn a_service_with_very_many_ports_is_exposed_in_part_and_says_so() {
    let many = (1..=5000).fold(service("cluster-a/api", "Tunneling"), |it, number| it.port("", number));
    let index = index([written(many)]);
    assert_eq!((index.routes().len(), index.reasons()), (256, vec!["too-many-ports"]));
}

#[test]
fn an_index_of_one_namespace_ignores_all_others() {
    let settings = Settings { namespace: Some("cluster-b".into()), ..Settings::default() };
    let mut index = Follower::new(settings);
    index.apply([tunneling(), written(sni("cluster-b/api", "b.example.com"))]);
    assert_eq!(index.routes().len(), 1);
}

/// An index for the annotations of KKP's seed-wide proxy and of its proxy of a single cluster.
fn of_both_proxies(changes: impl IntoIterator<Item = IndexChange>) -> Follower {
    let expose_annotations = ExposeKeys::from_iter([EXPOSE, EXPOSE_NAMESPACED]);
    let mut index = Follower::new(Settings { expose_annotations, ..Settings::default() });
    index.apply(changes);
    index
}

/// What a cluster of the strategy LoadBalancer has while the door by Tunneling is open too.
fn with_both(expose: &str) -> IndexChange {
    let both = service("cluster-a/apiserver-external", expose).annotated(EXPOSE_NAMESPACED, "true");
    written(both.node_port(30_001).mapping(r#"{"secure":"a.north.example.com"}"#))
}

#[test]
fn another_annotation_can_expose() {
    let mut index = Follower::new(Settings {
        expose_annotations: ExposeKeys::from_iter([EXPOSE_NAMESPACED]),
        ..Settings::default()
    });
    let own_proxy = service("cluster-a/api", "NodePort").node_port(30_001);
    index.apply([
        written(own_proxy.annotated(EXPOSE_NAMESPACED, "true")),
        written(service("cluster-b/api", "NodePort").node_port(30_002)),
    ]);
    assert_eq!(index.table.ports.keys().collect::<Vec<_>>(), [&30_001]);
}

#[test]
fn a_service_with_both_annotations_is_exposed_in_every_way_that_either_names() {
    let mut index = of_both_proxies([with_both("SNI,Tunneling")]);
    let by_name = [host("a.north.example.com"), authority(AUTHORITY)];
    for key in by_name.iter().chain(&[RouteKey::Port(30_001)]) {
        assert_eq!(index.owner(key).as_deref(), Some("cluster-a/apiserver-external"), "{key}");
    }
    assert_eq!(index.routes().len(), 3);
    assert!(index.reasons().is_empty());

    index.apply([with_both("true")]);
    assert_eq!(index.routes().len(), 1, "the other annotation asks for the same");
    let owner = index.owner(&RouteKey::Port(30_001));
    assert_eq!(owner.as_deref(), Some("cluster-a/apiserver-external"));
}

#[test]
fn a_void_annotation_leaves_the_other_one_in_force() {
    let index = of_both_proxies([with_both("SNI,tunneling")]);
    assert_eq!(index.routes().into_keys().collect::<Vec<_>>(), [RouteKey::Port(30_001)]);
    assert_eq!(index.reasons(), ["void-annotation"]);
    let problem = index.problems().next().unwrap().into_owned();
    assert_eq!(
        (&*problem.field, &*problem.message),
        (
            "metadata.annotations[nodeport-proxy.k8s.io/expose]",
            "\"SNI,tunneling\" is void, the Service is exposed only as another annotation says (NodePort): \
             \"tunneling\" is none of NodePort, SNI, Tunneling (upper and lower case matter)"
        )
    );
}

#[test]
fn of_two_void_annotations_each_is_a_problem() {
    let both = service("cluster-a/api", "sni").annotated(EXPOSE_NAMESPACED, "yes");
    let index = of_both_proxies([written(both)]);
    assert!(index.routes().is_empty());
    assert_eq!(index.reasons(), ["void-annotation", "void-annotation"]);
}
