//! KKP's rules for its proxy as tables: the expose annotation, the port mapping, which listeners and
//! upstreams follow. Where Portico differs on purpose, the row says so. What KKP writes is in
//! `portico-expose/src/kkp_rules.rs`.

use portico_api::endpoint_slice::EndpointSlice;
use portico_api::service::{Protocol, Service, ServicePort};

use crate::follower::index;
use crate::objects::*;

const PORT: &str = "port 30001";
const HOST: &str = "host a.example.com";
const AUTHORITY: &str = "authority api.cluster-a.svc.cluster.local:443";

/// The keys that lead to these objects, as text.
fn keys(service: Service, slices: Vec<EndpointSlice>) -> Vec<String> {
    let index = index(slices.into_iter().map(sliced).chain([written(service)]));
    index.routes().keys().map(ToString::to_string).collect()
}

#[test]
fn the_expose_annotation_is_true_or_a_list_of_types_spelled_exactly() {
    for (value, expected) in [
        ("true", &[PORT][..]),
        ("NodePort", &[PORT]),
        ("SNI", &[HOST]),
        ("Tunneling", &[AUTHORITY]),
        ("SNI,Tunneling", &[HOST, AUTHORITY]),
        ("Tunneling, SNI", &[HOST, AUTHORITY]),
        (" NodePort ,SNI,\tTunneling ", &[PORT, HOST, AUTHORITY]),
        ("SNI,SNI", &[HOST]),
        // One bad item voids all of them.
        ("", &[]),
        (" ", &[]),
        ("True", &[]),
        ("false", &[]),
        ("nodeport", &[]),
        ("NodePort,", &[]),
        ("SNI,,Tunneling", &[]),
        ("SNI,tunneling", &[]),
        ("NodePort,ClusterIP", &[]),
        ("true,SNI", &[]),
        ("NodePort;SNI", &[]),
    ] {
        let service = service("cluster-a/api", value).node_port(30_001);
        let mut found = keys(service.mapping(r#"{"secure":"a.example.com"}"#), Vec::new());
        let mut expected = expected.to_vec();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{value:?}");
    }
}

#[test]
fn a_bad_entry_of_the_port_mapping_costs_that_name_and_no_other_route() {
    let udp =
        || ServicePort { name: "udp".into(), port: 53, protocol: Protocol::UDP, ..ServicePort::default() };
    const OTHER: &str = "authority api.cluster-a.svc.cluster.local:444";
    for (mapping, hosts) in [
        (Some(r#"{"secure":"a.example.com"}"#), &[HOST][..]),
        (Some(r#"{"secure":"a.example.com","other":"b.example.com"}"#), &[HOST, "host b.example.com"]),
        (None, &[]),
        (Some("{}"), &[]),
        (Some("secure=a.example.com"), &[]),
        // The following cost the Service all of its names with KKP. The same host twice:
        (Some(r#"{"secure":"a.example.com","other":"a.example.com"}"#), &[HOST]),
        // no port of the Service, and one that is not TCP.
        (Some(r#"{"secure":"a.example.com","https":"b.example.com"}"#), &[HOST]),
        (Some(r#"{"secure":"a.example.com","udp":"b.example.com"}"#), &[HOST]),
        // What KKP writes in the first pass over a cluster, when its name is not known yet.
        (Some(r#"{"secure":""}"#), &[]),
    ] {
        let mut service = service("cluster-a/api", "SNI,Tunneling").port("other", 444);
        service.spec.ports.push(udp());
        let service = match mapping {
            Some(mapping) => service.mapping(mapping),
            None => service,
        };
        let mut expected = [hosts, &[AUTHORITY, OTHER]].concat();
        let mut found = keys(service, Vec::new());
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{mapping:?}");
    }
}

#[test]
fn listeners_and_authorities_follow_from_type_protocol_and_port_of_the_service() {
    let node_port = |service: Service| service.node_port(30_001);
    let as_is = |service: Service| service;
    let udp = |mut service: Service| {
        service.spec.ports[0].protocol = Protocol::UDP;
        service.node_port(30_001)
    };
    let unallocated = |service: Service| service.node_port(0);
    type Change = fn(Service) -> Service;
    for (case, types, change, expected) in [
        ("a listener for each port with a number", "NodePort", node_port as Change, &[PORT][..]),
        ("NodePort needs the type NodePort", "NodePort", as_is, &[]),
        ("no number is allocated", "NodePort", unallocated, &[]),
        ("only TCP is exposed", "NodePort,Tunneling", udp, &[]),
        ("the authority has the Service's port, not its targetPort", "Tunneling", as_is, &[AUTHORITY]),
        ("a tunnel needs no type", "Tunneling", node_port, &[AUTHORITY]),
    ] {
        assert_eq!(keys(change(service("cluster-a/api", types)), Vec::new()), expected, "{case}");
    }
}

#[test]
fn upstreams_are_the_ready_addresses_of_the_port_by_its_name_once_each_and_sorted() {
    let conditions = |conditions: &[(&str, Option<bool>)]| {
        let mut slice = slice("cluster-a/s", "api", &[]);
        slice.endpoints = conditions.iter().map(|(address, ready)| endpoint(address, *ready)).collect();
        slice
    };
    let port = |name: &str, number| {
        let mut slice = slice("cluster-a/s", "api", &["10.0.0.1"]);
        slice.ports = vec![endpoint_port(name, number)];
        slice
    };
    let [first, second] =
        [("cluster-a/s1", ["10.0.0.3", "10.0.0.1"]), ("cluster-a/s2", ["10.0.0.2", "10.0.0.1"])]
            .map(|(name, ready)| slice(name, "api", &ready));
    let of_another = slice("cluster-a/s", "another", &["10.0.0.1"]);
    let elsewhere = slice("cluster-b/s", "api", &["10.0.0.1"]);
    for (case, port_name, slices, expected) in [
        (
            "sorted, once each, from all slices",
            "secure",
            vec![first, second],
            &["10.0.0.1:6443", "10.0.0.2:6443", "10.0.0.3:6443"][..],
        ),
        (
            "ready is exactly true",
            "secure",
            vec![conditions(&[("10.0.0.1", Some(true)), ("10.0.0.2", Some(false)), ("10.0.0.3", None)])],
            &["10.0.0.1:6443"],
        ),
        ("matched by the name of the port", "secure", vec![port("secure", 7_443)], &["10.0.0.1:7443"]),
        ("another port's name", "secure", vec![port("metrics", 7_443)], &[]),
        ("any port, if the Service's has no name", "", vec![port("metrics", 7_443)], &["10.0.0.1:7443"]),
        ("by the label of the slice", "secure", vec![of_another], &[]),
        ("in the Service's namespace", "secure", vec![elsewhere], &[]),
        // KKP has no route at all then; Portico knows the name, and says why it refuses.
        ("none ready", "secure", vec![conditions(&[("10.0.0.1", Some(false))])], &[]),
    ] {
        let mut service = service("cluster-a/api", "Tunneling");
        service.spec.ports[0].name = port_name.into();
        let index = index(slices.into_iter().map(sliced).chain([written(service)]));
        assert_eq!(index.endpoints(&authority("api.cluster-a.svc.cluster.local:443")), expected, "{case}");
    }
}

#[test]
fn the_oldest_service_has_the_name_and_the_uid_decides_between_equals() {
    // Each Service has: created, UID, host names by port. Then the owners of a.example.com and b.example.com.
    const BOTH: &str = r#"{"secure":"a.example.com","other":"b.example.com"}"#;
    const FIRST: &str = r#"{"secure":"a.example.com"}"#;
    for (case, one, two, expected) in [
        ("the oldest", (1, "u2", FIRST), (2, "u1", FIRST), [Some("x/one"), None]),
        ("the oldest, whatever its name", (2, "u1", FIRST), (1, "u2", FIRST), [Some("y/two"), None]),
        ("the lower UID of one second", (1, "u2", FIRST), (1, "u1", FIRST), [Some("y/two"), None]),
        // With KKP the younger loses all of its names; with Portico, the contested one.
        ("the younger keeps its others", (1, "u1", FIRST), (2, "u2", BOTH), [Some("x/one"), Some("y/two")]),
    ] {
        let service = |name: &str, (created, uid, mapping): (i64, &str, &str)| {
            let service = service(name, "SNI").port("other", 444).mapping(mapping);
            written(service.created(created).uid(uid))
        };
        for objects in
            [[service("x/one", one), service("y/two", two)], [service("y/two", two), service("x/one", one)]]
        {
            let index = index(objects);
            let owners = ["a.example.com", "b.example.com"].map(|name| index.owner(&host(name)));
            assert_eq!(owners.each_ref().map(Option::as_deref), expected, "{case}");
        }
    }
}
