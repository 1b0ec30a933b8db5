//! Under whose policy a route stands.

use std::sync::Arc;

use crate::objects::*;
use portico_api::annotations::{
    ALLOW, API_SERVER_CA, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, SEND_PROXY,
};
use portico_api::names::ClusterName;
use portico_api::policy::{AllowList, ClusterPolicy};
use portico_routes::book::Change::{self, Policy, RemovePolicy, Service};
use portico_routes::book::RouteBook;
use portico_routes::route::RouteKey;
use portico_routes::rows::RouteState;

const NAMESPACE: &str = "cluster-a";

fn policy(edit: impl FnOnce(&mut ClusterPolicy)) -> Change {
    let mut policy = ClusterPolicy::open(ClusterName::new("a"));
    edit(&mut policy);
    Policy(NAMESPACE.into(), Arc::new(policy))
}

fn annotated(key: &str, value: &str) -> Change {
    Service(sni("cluster-a/api", "a.example.com").annotated(key, value))
}

fn in_force(book: &RouteBook) -> Arc<ClusterPolicy> {
    Arc::clone(&book.lead(&host("a.example.com")).unwrap().policy)
}

fn admits(book: &RouteBook, client: &str) -> bool {
    in_force(book).allow.admits(client.parse().unwrap())
}

#[test]
fn without_a_policy_the_cluster_is_named_by_the_namespace_and_open() {
    let book = book([Service(sni("cluster-a/api", "a.example.com"))]);
    assert_eq!(*in_force(&book), ClusterPolicy::open(ClusterName::new("a")));
}

#[test]
fn a_policy_holds_whether_it_comes_before_or_after_the_service() {
    let service = Service(sni("cluster-a/api", "a.example.com"));
    let closed = policy(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
    for order in [[service.clone(), closed.clone()], [closed, service]] {
        assert!(!admits(&book(order), "198.51.100.1"));
    }
}

#[test]
fn a_policy_that_goes_leaves_the_cluster_open() {
    let service = Service(sni("cluster-a/api", "a.example.com"));
    let closed = policy(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
    let mut book = book([service, closed]);
    book.told([RemovePolicy(NAMESPACE.into())]);
    assert!(admits(&book, "198.51.100.1"));
}

#[test]
fn annotations_of_a_service_without_a_cluster_count() {
    let all = sni("cluster-a/api", "a.example.com")
        .annotated(ALLOW, "192.0.2.0/24, 2001:db8::1")
        .annotated(MAX_CONNECTIONS, "100")
        .annotated(MAX_CONNECTIONS_PER_SECOND, "10")
        .annotated(SEND_PROXY, "v2");
    let book = book([Service(all)]);
    assert!(admits(&book, "192.0.2.7") && admits(&book, "2001:db8::1") && !admits(&book, "2001:db8::2"));
    let budget = in_force(&book).budget;
    assert_eq!((budget.max_connections, budget.max_connections_per_second), (Some(100), Some(10)));
    assert!(book.lead(&host("a.example.com")).unwrap().send_proxy);
    assert!(book.reasons().is_empty());
}

#[test]
fn the_policy_of_a_cluster_overrides_annotations_and_says_so() {
    let mut book = book([annotated(ALLOW, "192.0.2.0/24"), policy(|_| {})]);
    assert!(admits(&book, "198.51.100.1"));
    assert_eq!(book.reasons(), ["overridden-annotation"]);
    book.told([RemovePolicy(NAMESPACE.into())]);
    assert!(!admits(&book, "198.51.100.1"));
}

#[test]
fn a_bad_entry_of_an_allow_list_admits_nobody() {
    let book = book([annotated(ALLOW, "192.0.2.0/33,198.51.100.0/24")]);
    assert!(admits(&book, "198.51.100.1") && !admits(&book, "192.0.2.1"));
    assert_eq!(book.reasons(), ["bad-allow-list"]);
}

#[test]
fn an_allow_list_without_a_good_entry_admits_nobody() {
    for value in ["", "everybody"] {
        let book = book([annotated(ALLOW, value)]);
        assert!(!admits(&book, "192.0.2.1") && !admits(&book, "::1"), "{value:?}");
    }
}

#[test]
fn a_bound_that_is_no_number_is_reported_and_left_to_the_gateway() {
    for value in ["0", "-1", "many", "5000000000"] {
        let book = book([annotated(MAX_CONNECTIONS, value)]);
        assert_eq!(in_force(&book).budget.max_connections, None);
        assert_eq!(book.reasons(), ["bad-budget"], "{value}");
    }
}

#[test]
fn an_unknown_proxy_version_is_reported_and_not_sent() {
    let book = book([annotated(SEND_PROXY, "v1")]);
    assert!(!book.lead(&host("a.example.com")).unwrap().send_proxy);
    assert_eq!(book.reasons(), ["bad-send-proxy"]);
}

#[test]
fn where_node_port_listeners_are_off_only_those_are_missing() {
    let all = service("cluster-a/api", "NodePort,Tunneling").node_port(30_001);
    let mut book = book([Service(all), policy(|policy| policy.node_port_listeners = false)]);
    assert!(book.lead(&RouteKey::Port(30_001)).is_none());
    assert!(book.lead(&authority("api.cluster-a.svc.cluster.local:443")).is_some());
    assert_eq!(book.rows().next().unwrap().state, RouteState::ListenersOff);
    book.told([policy(|_| {})]);
    assert!(book.lead(&RouteKey::Port(30_001)).is_some());
}

#[test]
fn a_number_whose_listener_is_off_is_free_for_others() {
    let elder = service("cluster-a/api", "NodePort").node_port(30_001).created(1);
    let younger = service("cluster-b/api", "NodePort").node_port(30_001).created(2);
    let off = policy(|policy| policy.node_port_listeners = false);
    let book = book([Service(elder), Service(younger), off]);
    assert_eq!(book.owner(&RouteKey::Port(30_001)).as_deref(), Some("cluster-b/api"));
}

#[test]
fn a_service_may_say_whom_its_api_server_is_known_by() {
    let pem = include_str!("../../../portico-api/src/testdata/ca.pem");
    let book = book([annotated(API_SERVER_CA, pem)]);
    let ca = book.lead(&host("a.example.com")).unwrap().api_server_ca.clone();
    assert_eq!(ca.unwrap().certificates().len(), 1);
    assert!(book.reasons().is_empty());
}

#[test]
fn a_ca_that_is_none_is_reported_and_not_trusted() {
    let book = book([annotated(API_SERVER_CA, "ca.crt")]);
    assert_eq!(book.lead(&host("a.example.com")).unwrap().api_server_ca, None);
    assert_eq!(book.reasons(), ["bad-api-server-ca"]);
}
