//! Under whose policy a route stands.

use std::sync::Arc;

use portico_api::annotations::{
    ALLOW, API_SERVER_CA, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND, SEND_PROXY,
};
use portico_api::names::Tenant;
use portico_api::policy::{AllowList, ClusterPolicy};
use portico_routes::index::IndexChange;
use portico_routes::route::RouteKey;
use portico_routes::rows::RouteState;

use crate::follower::{Follower, index};
use crate::objects::*;

/// The policy of the cluster whose Services the tests expose.
fn cluster(edit: impl FnOnce(&mut ClusterPolicy)) -> IndexChange {
    let mut policy_of_a = ClusterPolicy::open(Tenant::of_text("a"));
    edit(&mut policy_of_a);
    policy(policy_of_a)
}

fn annotated(key: &str, value: &str) -> IndexChange {
    written(sni("cluster-a/api", "a.example.com").annotated(key, value))
}

fn in_force(index: &Follower) -> Arc<ClusterPolicy> {
    Arc::clone(&index.lead(&host("a.example.com")).unwrap().policy)
}

fn admits(index: &Follower, client: &str) -> bool {
    in_force(index).allow.admits(client.parse().unwrap())
}

#[test]
fn without_a_policy_the_cluster_is_named_by_the_namespace_and_open() {
    let index = index([written(sni("cluster-a/api", "a.example.com"))]);
    assert_eq!(*in_force(&index), ClusterPolicy::open(Tenant::of_text("a")));
}

#[test]
fn a_namespace_shares_nothing_with_the_cluster_of_the_same_name() {
    let mut index = index([
        written(sni("cluster-a/api", "a.example.com")),
        written(sni("a/api", "b.example.com")),
        cluster(|policy| policy.budget.max_connections = Some(3)),
    ]);
    let other = || host("b.example.com");
    assert_eq!(*index.lead(&other()).unwrap().policy, ClusterPolicy::open(Tenant::of_namespace("a")));
    let tenants: Vec<String> = index.rows().map(|row| row.tenant.to_string()).collect();
    assert_eq!(tenants, ["namespace:a", "a"]);
    index.apply([no_policy("namespace:a")]);
    assert_eq!(in_force(&index).budget.max_connections, Some(3));
}

#[test]
fn a_policy_holds_whether_it_comes_before_or_after_the_service() {
    let service = written(sni("cluster-a/api", "a.example.com"));
    let closed = cluster(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
    for order in [[service.clone(), closed.clone()], [closed, service]] {
        assert!(!admits(&index(order), "198.51.100.1"));
    }
}

#[test]
fn a_policy_that_is_deleted_leaves_the_cluster_open() {
    let service = written(sni("cluster-a/api", "a.example.com"));
    let closed = cluster(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
    let mut index = index([service, closed]);
    index.apply([no_policy("a")]);
    assert!(admits(&index, "198.51.100.1"));
}

#[test]
fn where_every_cluster_has_a_policy_one_without_admits_nobody() {
    let service = || written(sni("cluster-a/api", "a.example.com").annotated(ALLOW, "192.0.2.0/24"));
    let open = || cluster(|_| ());
    let other = written(sni("monitoring/api", "m.example.com"));
    for order in [[IndexChange::PoliciesRequired, service()], [service(), IndexChange::PoliciesRequired]] {
        let mut index = index(order);
        let version = index.problems_version();
        assert!(!admits(&index, "192.0.2.1"), "its own annotation does not count");
        assert_eq!(index.problems().map(|problem| problem.reason).collect::<Vec<_>>(), ["unknown-cluster"]);
        index.apply([open()]);
        assert!(admits(&index, "198.51.100.1"));
        assert!(index.problems_version() > version);
        index.apply([no_policy("a"), other.clone()]);
        assert!(!admits(&index, "198.51.100.1"), "its policy was deleted");
        let other = &index.lead(&host("m.example.com")).unwrap().policy;
        assert!(other.allow.admits("198.51.100.1".parse().unwrap()), "a namespace that is of no cluster");
    }
}

#[test]
fn annotations_of_a_service_without_a_cluster_count() {
    let all = sni("cluster-a/api", "a.example.com")
        .annotated(ALLOW, "192.0.2.0/24, 2001:db8::1")
        .annotated(MAX_CONNECTIONS, "100")
        .annotated(MAX_CONNECTIONS_PER_SECOND, "10")
        .annotated(SEND_PROXY, "v2");
    let index = index([written(all)]);
    assert!(admits(&index, "192.0.2.7") && admits(&index, "2001:db8::1") && !admits(&index, "2001:db8::2"));
    let budget = in_force(&index).budget;
    assert_eq!((budget.max_connections, budget.max_connections_per_second), (Some(100), Some(10)));
    assert!(index.lead(&host("a.example.com")).unwrap().send_proxy);
    assert!(index.reasons().is_empty());
}

#[test]
fn the_policy_of_a_cluster_overrides_annotations_and_says_so() {
    let mut index = index([annotated(ALLOW, "192.0.2.0/24"), cluster(|_| {})]);
    assert!(admits(&index, "198.51.100.1"));
    assert_eq!(index.reasons(), ["overridden-annotation"]);
    index.apply([no_policy("a")]);
    assert!(!admits(&index, "198.51.100.1"));
}

/// A Service in `namespace` with one endpoint, and the key that leads there.
fn with_endpoint(namespace: &str, address: &str) -> (RouteKey, [IndexChange; 2]) {
    let name = format!("{namespace}.example.com");
    let objects = [
        written(sni(&format!("{namespace}/api"), &name)),
        sliced(slice(&format!("{namespace}/s"), "api", &[address])),
    ];
    (host(&name), objects)
}

#[test]
fn an_endpoint_named_by_another_tenant_is_still_behind_the_allow_list_of_its_cluster() {
    for thief in ["cluster-thief", "thief"] {
        let (of_a, a) = with_endpoint("cluster-a", "10.0.0.1");
        let (stolen, slices) = with_endpoint(thief, "10.0.0.1");
        let (elsewhere, other) = with_endpoint("cluster-c", "10.0.0.2");
        let closed = cluster(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
        let admits = |index: &Follower, key: &RouteKey, client: &str| {
            index.lead(key).unwrap().policy.allow.admits(client.parse().unwrap())
        };
        for thief_is_first in [true, false] {
            let mut steps = vec![a.clone().into(), vec![closed.clone()]];
            steps.insert(if thief_is_first { 0 } else { 2 }, slices.clone().into());
            let mut index = index(other.clone());
            steps.into_iter().for_each(|step| drop(index.apply(step)));
            assert!(admits(&index, &stolen, "192.0.2.7") && !admits(&index, &stolen, "198.51.100.1"));
            assert!(admits(&index, &of_a, "192.0.2.7") && !admits(&index, &of_a, "198.51.100.1"));
            assert!(admits(&index, &elsewhere, "198.51.100.1"), "no endpoint is shared");
            assert_eq!(index.reasons(), ["shared-endpoint"]);
            assert!(!index.rows().find(|row| row.key == stolen).unwrap().policy.allow.networks().is_empty());
            index.apply([sliced(slice("cluster-a/s", "api", &["10.0.0.3"]))]);
            assert!(admits(&index, &stolen, "198.51.100.1"), "the endpoint is no longer of the cluster");
            assert!(index.reasons().is_empty());
            index.apply([sliced(slice("cluster-a/s", "api", &["10.0.0.1"])), no_policy("a")]);
            assert!(admits(&index, &stolen, "198.51.100.1"), "the cluster has no list any more");
        }
    }
}

#[test]
fn of_several_owners_of_an_endpoint_the_first_by_name_is_named_whichever_changed_last() {
    let [a, b, stolen] =
        ["cluster-a", "cluster-b", "thief"].map(|namespace| with_endpoint(namespace, "10.0.0.1").1);
    let closed = |name: &str| {
        let allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]);
        policy(ClusterPolicy { allow, ..ClusterPolicy::open(Tenant::of_text(name)) })
    };
    for owners in [["a", "b"], ["b", "a"]] {
        let mut index = index([&a[..], &b, &stolen].concat());
        owners.into_iter().for_each(|owner| drop(index.apply([closed(owner)])));
        let named = |line: &String| line.starts_with("Service thief/api") && line.contains("cluster-a/api");
        assert!(index.problem_lines().iter().any(named), "{:?}", index.problem_lines());
    }
}

#[test]
fn the_ports_of_a_service_with_one_shared_endpoint_have_one_policy() {
    let (_, owner) = with_endpoint("cluster-a", "10.0.0.1");
    let closed = cluster(|policy| policy.allow = AllowList::new(["192.0.2.0/24".parse().unwrap()]));
    let mapping = r#"{"secure":"one.example.com","second":"two.example.com"}"#;
    let two = written(service("thief/api", "SNI").port("second", 444).mapping(mapping));
    let mut slice = slice("thief/s", "api", &["10.0.0.1"]);
    slice.ports.push(endpoint_port("second", 6443));
    let index = index([&owner[..], &[closed, two, sliced(slice)]].concat());
    let policies =
        ["one", "two"].map(|name| &index.lead(&host(&format!("{name}.example.com"))).unwrap().policy);
    assert!(!policies[0].allow.networks().is_empty() && Arc::ptr_eq(policies[0], policies[1]));
}

#[test]
fn a_namespace_cannot_close_a_cluster_by_naming_its_endpoint() {
    let (of_a, a) = with_endpoint("cluster-a", "10.0.0.1");
    let (_, [_, thief]) = with_endpoint("thief", "10.0.0.1");
    let mut index = index(a);
    index.apply([thief, written(sni("thief/api", "thief.example.com").annotated(ALLOW, "192.0.2.0/24"))]);
    assert!(index.lead(&of_a).unwrap().policy.allow.admits("198.51.100.1".parse().unwrap()));
    assert!(index.reasons().is_empty());
}

#[test]
fn a_bad_entry_of_an_allow_list_admits_nobody() {
    let index = index([annotated(ALLOW, "192.0.2.0/33,198.51.100.0/24")]);
    assert!(admits(&index, "198.51.100.1") && !admits(&index, "192.0.2.1"));
    assert_eq!(index.reasons(), ["bad-allow-list"]);
}

#[test]
fn an_allow_list_without_a_good_entry_admits_nobody() {
    for value in ["", "everybody"] {
        let index = index([annotated(ALLOW, value)]);
        assert!(!admits(&index, "192.0.2.1") && !admits(&index, "::1"), "{value:?}");
    }
}

#[test]
fn a_bound_that_is_no_number_is_reported_and_left_to_the_gateway() {
    for value in ["0", "-1", "many", "5000000000"] {
        let index = index([annotated(MAX_CONNECTIONS, value)]);
        assert_eq!(in_force(&index).budget.max_connections, None);
        assert_eq!(index.reasons(), ["bad-budget"], "{value}");
    }
}

#[test]
fn an_unknown_proxy_version_is_reported_and_not_sent() {
    let index = index([annotated(SEND_PROXY, "v1")]);
    assert!(!index.lead(&host("a.example.com")).unwrap().send_proxy);
    assert_eq!(index.reasons(), ["bad-send-proxy"]);
}

#[test]
fn where_node_port_listeners_are_off_only_those_are_missing() {
    let all = service("cluster-a/api", "NodePort,Tunneling").node_port(30_001);
    let mut index = index([written(all), cluster(|policy| policy.node_port_listeners = false)]);
    assert!(index.lead(&RouteKey::Port(30_001)).is_none());
    assert!(index.lead(&authority("api.cluster-a.svc.cluster.local:443")).is_some());
    assert_eq!(index.rows().next().unwrap().state, RouteState::ListenersOff);
    index.apply([cluster(|_| {})]);
    assert!(index.lead(&RouteKey::Port(30_001)).is_some());
}

#[test]
fn a_number_whose_listener_is_off_is_free_for_others() {
    let older = service("cluster-a/api", "NodePort").node_port(30_001).created(1);
    let younger = service("cluster-b/api", "NodePort").node_port(30_001).created(2);
    let off = cluster(|policy| policy.node_port_listeners = false);
    let index = index([written(older), written(younger), off]);
    assert_eq!(index.owner(&RouteKey::Port(30_001)).as_deref(), Some("cluster-b/api"));
}

#[test]
fn a_service_may_name_the_ca_of_its_api_server() {
    let pem = include_str!("../../../portico-api/src/testdata/ca.pem");
    let index = index([annotated(API_SERVER_CA, pem)]);
    let ca = index.lead(&host("a.example.com")).unwrap().api_server_ca.clone();
    assert_eq!(ca.unwrap().certificates().len(), 1);
    assert!(index.reasons().is_empty());
}

#[test]
fn a_ca_that_cannot_be_read_is_reported_and_not_trusted() {
    let index = index([annotated(API_SERVER_CA, "ca.crt")]);
    assert_eq!(index.lead(&host("a.example.com")).unwrap().api_server_ca, None);
    assert_eq!(index.reasons(), ["bad-api-server-ca"]);
}
