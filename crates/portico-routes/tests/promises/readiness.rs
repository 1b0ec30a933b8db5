//! Which endpoints connections are sent to.

use portico_api::endpoint_slice::EndpointSlice;
use portico_api::service::Protocol;
use portico_routes::rows::{NoEndpoints, RouteState};

use crate::follower::{Follower, index};
use crate::objects::*;

/// One exposed Service, `a/api`, with these slices.
fn with(slices: impl IntoIterator<Item = EndpointSlice>) -> Follower {
    let mut index = index(slices.into_iter().map(sliced));
    index.apply([written(sni("a/api", "a.example.com"))]);
    index
}

fn endpoints(index: &Follower) -> Vec<String> {
    index.endpoints(&host("a.example.com"))
}

#[test]
fn the_listing_says_why_there_is_no_endpoint() {
    let why = |index: &Follower| index.rows().next().unwrap().no_endpoints;
    let mut index = index([written(sni("a/api", "a.example.com"))]);
    assert_eq!(why(&index), Some(NoEndpoints::NoSlice));
    let mut misnamed = slice("a/s1", "api", &["10.0.0.1"]);
    misnamed.ports = vec![endpoint_port("https", 6443)];
    index.apply([sliced(misnamed)]);
    assert_eq!(why(&index), Some(NoEndpoints::NoPort { found: vec!["https".into()] }));
    index.apply([sliced(slice("a/s1", "api", &[]))]);
    assert_eq!(why(&index), Some(NoEndpoints::Empty));
    index.apply([sliced(slice("a/s1", "api", &["10.0.0.1"]))]);
    assert_eq!(why(&index), None);
}

#[test]
fn of_thousands_of_ports_that_do_not_fit_a_row_names_sixteen() {
    let mut wide = slice("a/s1", "api", &["10.0.0.1"]);
    wide.ports = (1..=20_000).map(|port| endpoint_port(&format!("p{port:05}"), port)).collect();
    let Some(NoEndpoints::NoPort { found }) = with([wide]).rows().next().unwrap().no_endpoints else {
        panic!("it has another port")
    };
    assert_eq!((found.len(), &*found[0], &*found[15]), (16, "p00001", "p00016"));
}

#[test]
fn only_endpoints_that_say_ready_true_count() {
    let mut slice = slice("a/s", "api", &["10.0.0.1"]);
    slice.endpoints.push(endpoint("10.0.0.2", Some(false)));
    slice.endpoints.push(endpoint("10.0.0.3", None));
    let index = with([slice]);
    assert_eq!(endpoints(&index), ["10.0.0.1:6443"]);
    let row = index.rows().next().unwrap();
    assert_eq!((row.state, row.endpoints.len(), row.endpoints_total), (RouteState::Ready, 1, 3));
}

#[test]
fn several_slices_are_joined_sorted_and_without_repetition() {
    let index = with([
        slice("a/s1", "api", &["10.0.0.10", "10.0.0.2"]),
        slice("a/s2", "api", &["10.0.0.2", "10.0.0.1"]),
    ]);
    assert_eq!(endpoints(&index), ["10.0.0.1:6443", "10.0.0.2:6443", "10.0.0.10:6443"]);
}

#[test]
fn ipv6_endpoints_count() {
    let mut v6 = slice("a/s6", "api", &["2001:db8::1"]);
    v6.address_type = "IPv6".into();
    assert_eq!(endpoints(&with([v6])), ["[2001:db8::1]:6443"]);
}

#[test]
fn slices_of_names_lead_nowhere_and_are_reported() {
    let mut names = slice("a/s", "api", &["api.example.com", "10.0.0.1"]);
    names.address_type = "FQDN".into();
    let index = with([names.clone(), slice("a/t", "api", &["10.0.0.2"])]);
    assert_eq!(endpoints(&index), ["10.0.0.2:6443"]);
    assert_eq!(index.reasons(), ["fqdn-endpoints"]);
    let mut unexposed = crate::follower::index([sliced(names)]);
    assert!(unexposed.reasons().is_empty(), "nobody asks for it");
    let version = unexposed.problems_version();
    unexposed.apply([written(sni("a/api", "a.example.com"))]);
    assert_eq!(unexposed.reasons(), ["fqdn-endpoints"]);
    assert!(unexposed.problems_version() > version);
}

/// One object of a megabyte: a thousand addresses times twenty thousand ports.
#[test]
fn of_more_endpoints_than_a_control_plane_can_have_the_first_are_used_and_it_is_reported() {
    let mut unnamed = service("a/api", "Tunneling");
    unnamed.spec.ports[0].name = "".into();
    let addresses: Vec<String> = (0..1_000).map(|n| format!("10.0.{}.{}", n / 250, n % 250)).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut huge = slice("a/s2", "api", &addresses);
    huge.ports = (1..=20_000).map(|n| endpoint_port(&format!("p{n}"), n)).collect();
    let small = slice("a/s1", "api", &["10.9.9.9"]);
    let key = authority("api.a.svc.cluster.local:443");
    let mut index = index([written(unnamed), sliced(huge), sliced(small)]);
    let used = index.endpoints(&key);
    assert_eq!(used.len(), 128);
    assert!(used.contains(&"10.9.9.9:6443".into()) && used.contains(&"10.0.0.0:1".into()));
    assert_eq!(index.reasons(), ["too-many-endpoints"]);
    let version = index.problems_version();
    index.apply([no_slice("a/s2")]);
    assert!(index.reasons().is_empty() && index.problems_version() > version);
}

#[test]
fn slices_of_another_service_or_namespace_do_not_count() {
    let mut unlabelled = slice("a/s3", "api", &["10.0.0.3"]);
    unlabelled.metadata.labels.clear();
    let index =
        with([slice("a/s1", "other", &["10.0.0.1"]), slice("b/s2", "api", &["10.0.0.2"]), unlabelled]);
    assert!(endpoints(&index).is_empty());
}

#[test]
fn ports_are_found_by_name_and_must_be_tcp() {
    let mut slice = slice("a/s", "api", &["10.0.0.1"]);
    slice.ports =
        vec![endpoint_port("metrics", 9090), endpoint_port("secure", 8443), endpoint_port("secure", 53)];
    slice.ports[2].protocol = Some(Protocol::UDP);
    assert_eq!(endpoints(&with([slice])), ["10.0.0.1:8443"]);
}

#[test]
fn an_unnamed_port_takes_any_port_of_its_slices() {
    let mut unnamed = service("a/api", "Tunneling");
    unnamed.spec.ports[0].name = "".into();
    let index = index([written(unnamed), sliced(slice("a/s", "api", &["10.0.0.1"]))]);
    let key = authority("api.a.svc.cluster.local:443");
    assert_eq!(index.endpoints(&key), ["10.0.0.1:6443"]);
    assert_eq!(index.lead(&key).unwrap().id.to_string(), "a/api");
}

#[test]
fn a_deleted_slice_takes_its_endpoints_along_and_leaves_the_route() {
    let mut index = with([slice("a/s1", "api", &["10.0.0.1"]), slice("a/s2", "api", &["10.0.0.2"])]);
    index.apply([no_slice("a/s1")]);
    assert_eq!(endpoints(&index), ["10.0.0.2:6443"]);
    index.apply([no_slice("a/s2")]);
    assert!(endpoints(&index).is_empty());
    assert_eq!(index.rows().next().unwrap().state, RouteState::NotReady);
}

#[test]
fn a_slice_that_changes_its_service_leaves_the_first_one() {
    let mut index = with([slice("a/s", "api", &["10.0.0.1"])]);
    index.apply([sliced(slice("a/s", "other", &["10.0.0.1"]))]);
    assert!(endpoints(&index).is_empty());
}

#[test]
fn a_service_that_is_applied_again_finds_its_slices() {
    let mut index = with([slice("a/s", "api", &["10.0.0.1"])]);
    index.apply([no_service("a/api")]);
    index.apply([written(sni("a/api", "a.example.com"))]);
    assert_eq!(endpoints(&index), ["10.0.0.1:6443"]);
}

#[test]
fn an_address_that_may_be_no_endpoint_is_reported_and_costs_that_endpoint() {
    let mut index = with([slice("a/s", "api", &["169.254.169.254", "10.0.0.1", "127.0.0.1"])]);
    assert_eq!(endpoints(&index), ["10.0.0.1:6443"]);
    assert_eq!(index.reasons(), ["endpoint-refused", "endpoint-refused"]);
    index.apply([sliced(slice("a/s", "api", &["127.0.0.1"]))]);
    assert_eq!(index.rows().next().unwrap().no_endpoints, Some(NoEndpoints::Refused));
    index.apply([sliced(slice("a/s", "api", &["10.0.0.1"]))]);
    assert!(index.reasons().is_empty());
}

#[test]
fn an_address_that_is_none_is_reported_and_costs_that_endpoint() {
    let index = with([slice("a/s", "api", &["10.0.0.1", "10.0.0.256"])]);
    assert_eq!(endpoints(&index), ["10.0.0.1:6443"]);
    assert_eq!(index.reasons(), ["bad-address"]);
}
