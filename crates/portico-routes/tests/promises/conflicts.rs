//! When several Services claim one key, the eldest has it, and the others lose that key and nothing else.

use crate::objects::*;
use portico_routes::book::Change::{self, Planned, RemoveService, Service};
use portico_routes::book::RouteBook;
use portico_routes::route::RouteKey;
use portico_routes::rows::RouteState;

/// Claims `shared.example.com` and a host of its own.
fn claimant(name: &str, second: i64, uid: &str) -> Change {
    let own = name.replace('/', ".");
    let mapping = format!(r#"{{"secure":"shared.example.com","own":"{own}.example.com"}}"#);
    Service(service(name, "SNI").port("own", 444).mapping(&mapping).created(second).uid(uid))
}

fn shared() -> RouteKey {
    host("shared.example.com")
}

#[test]
fn the_elder_has_the_host_whoever_came_first() {
    let elder = claimant("a/elder", 1, "z");
    let younger = claimant("a/younger", 2, "a");
    for order in [[elder.clone(), younger.clone()], [younger, elder]] {
        assert_eq!(book(order).owner(&shared()).as_deref(), Some("a/elder"));
    }
}

#[test]
fn within_one_second_the_smaller_uid_is_the_elder() {
    let book = book([claimant("a/one", 1, "b"), claimant("a/two", 1, "a")]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/two"));
}

#[test]
fn without_an_age_the_smaller_name_is_the_elder() {
    let book =
        book([Service(sni("b/api", "shared.example.com")), Service(sni("a/api", "shared.example.com"))]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/api"));
}

#[test]
fn a_conflict_costs_the_younger_that_one_host() {
    let book = book([claimant("a/elder", 1, ""), claimant("a/younger", 2, "")]);
    assert_eq!(book.owner(&host("a.younger.example.com")).as_deref(), Some("a/younger"));
    assert_eq!(book.table().len(), 3);
}

#[test]
fn a_conflict_is_a_problem_of_the_younger_and_names_the_elder() {
    let book = book([claimant("a/elder", 1, ""), claimant("a/younger", 2, "")]);
    let problems: Vec<String> = book.problems().map(|problem| problem.to_string()).collect();
    assert_eq!(
        problems,
        [
            "Service a/younger: metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: host shared.example.com \
          belongs to the elder Service a/elder, created 1970-01-01T00:00:01Z; choose another host name, or remove \
          Service a/elder: this one then has it at once"
        ]
    );
    let waiting = book.rows().find(|row| row.backend.service == key("a/younger")).unwrap();
    let RouteState::Conflict { winner } = waiting.state else { panic!("{:?}", waiting.state) };
    assert_eq!(winner.to_string(), "a/elder-secure");
}

/// What is wrong in `book`, each in one line.
fn told(book: &RouteBook) -> Vec<String> {
    book.problems().map(|problem| problem.to_string()).collect()
}

#[test]
fn what_is_planned_for_a_cluster_keeps_its_host_whoever_claims_it() {
    let planned = || Planned(sni("cluster-z/apiserver-external", "shared.example.com"));
    for rival in [claimant("aaa/s1", 1, "a"), Service(sni("aaa/s1", "shared.example.com"))] {
        for order in [[planned(), rival.clone()], [rival, planned()]] {
            let book = book(order);
            assert_eq!(book.owner(&shared()).as_deref(), Some("cluster-z/apiserver-external"));
            assert_eq!(
                told(&book),
                [
                    "Service aaa/s1: metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: host shared.example.com \
                 belongs to Cluster z: what a Cluster asks for comes before any Service; choose another host name"
                ]
            );
        }
    }
}

#[test]
fn a_service_that_is_written_in_place_of_a_planned_one_is_judged_as_written() {
    let mut book = book([Planned(sni("cluster-z/api", "shared.example.com")), claimant("a/x", 1, "")]);
    book.told([Service(sni("cluster-z/api", "shared.example.com"))]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/x"));
}

#[test]
fn of_two_that_are_planned_the_elder_has_the_host_and_the_other_cluster_is_to_blame() {
    let planned = |name, second| Planned(sni(name, "shared.example.com").created(second));
    let book = book([planned("cluster-a/api", 2), planned("cluster-b/api", 1)]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("cluster-b/api"));
    let told = told(&book);
    assert!(
        told[0].starts_with("Cluster a: host shared.example.com belongs to the elder Cluster b"),
        "{told:?}"
    );
}

#[test]
fn what_decided_is_said_as_it_was() {
    let plain = |name| Service(sni(name, "shared.example.com"));
    for (rivals, expected) in [
        ([plain("a/x"), plain("b/y")], "which comes first by name: neither has a creationTimestamp"),
        ([plain("a/x"), claimant("b/y", 1, "")], "without a creationTimestamp this one counts as younger"),
        ([claimant("a/x", 1, "u"), claimant("b/y", 1, "v")], "created in the same second"),
        ([claimant("a/x", 2, ""), claimant("b/y", 1, "")], "the elder Service b/y"),
    ] {
        let told = told(&book(rivals));
        assert!(told[0].contains(expected), "{told:?}");
        assert_eq!(told[0].contains("elder"), expected.contains("elder"), "{told:?}");
    }
}

#[test]
fn when_the_elder_goes_the_younger_has_the_host_in_the_same_commit() {
    let mut book = book([claimant("a/elder", 1, ""), claimant("a/younger", 2, "")]);
    book.told([RemoveService(key("a/elder"))]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/younger"));
    assert!(book.reasons().is_empty());
}

#[test]
fn when_the_elder_takes_another_host_the_younger_has_it_at_once() {
    let mut book = book([claimant("a/elder", 1, ""), claimant("a/younger", 2, "")]);
    book.told([Service(sni("a/elder", "other.example.com").created(1))]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/younger"));
}

#[test]
fn an_elder_that_is_recreated_is_the_younger() {
    let mut book = book([claimant("a/elder", 1, ""), claimant("a/younger", 2, "")]);
    book.told([claimant("a/elder", 3, "")]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/younger"));
}

#[test]
fn an_elder_without_ready_endpoints_keeps_its_host() {
    let mut book = book([claimant("a/elder", 1, ""), claimant("b/younger", 2, "")]);
    book.told([Change::EndpointSlice(slice("b/s", "younger", &["10.0.0.1"]))]);
    assert_eq!(book.owner(&shared()).as_deref(), Some("a/elder"));
}

#[test]
fn node_port_numbers_and_authorities_go_to_the_elder_as_well() {
    let by_port = |name, second| Service(service(name, "NodePort").node_port(30_001).created(second));
    // Kubernetes allows no dot in a namespace; a directory of manifests might hold one.
    let by_authority = |name, second| Service(service(name, "Tunneling").created(second));
    let book =
        book([by_port("a/x", 2), by_port("a/y", 1), by_authority("c/a.b", 2), by_authority("b.c/a", 1)]);
    assert_eq!(book.owner(&RouteKey::Port(30_001)).as_deref(), Some("a/y"));
    assert_eq!(book.owner(&authority("a.b.c.svc.cluster.local:443")).as_deref(), Some("b.c/a"));
    assert_eq!(book.reasons(), ["authority-conflict", "node-port-conflict"]);
}

#[test]
fn the_version_of_the_problems_grows_when_a_conflict_comes_or_goes() {
    let mut book = book([claimant("a/elder", 1, "")]);
    let before = book.problems_version();
    book.told([claimant("a/younger", 2, "")]);
    let during = book.problems_version();
    book.told([RemoveService(key("a/elder"))]);
    assert!(before < during && during < book.problems_version());
}
