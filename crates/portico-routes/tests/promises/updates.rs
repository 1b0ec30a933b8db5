//! What a commit says has changed, and what it leaves alone.

use std::sync::Arc;

use crate::objects::*;
use portico_routes::book::Change::{self, EndpointSlice, RemoveService, Service};
use portico_routes::book::{RouteBook, Settings};
use portico_routes::table::RouteChange;

fn two_clusters() -> [Change; 4] {
    [
        Service(sni("a/api", "a.example.com")),
        EndpointSlice(slice("a/s", "api", &["10.0.0.1"])),
        Service(sni("b/api", "b.example.com")),
        EndpointSlice(slice("b/s", "api", &["10.0.0.2"])),
    ]
}

/// The changes of one commit, as text.
fn changes(book: &mut RouteBook, changes: impl IntoIterator<Item = Change>) -> Vec<String> {
    changes.into_iter().for_each(|change| book.apply(change));
    let update = book.commit();
    update.into_iter().flat_map(|update| update.changes).map(|change| describe(&change)).collect()
}

fn describe(change: &RouteChange) -> String {
    match change {
        RouteChange::Backend(backend) => format!("{} has {:?}", backend.id, backend.endpoints),
        RouteChange::Route { key, to } => format!("{key} leads to {to}"),
        RouteChange::NoRoute(key) => format!("{key} leads nowhere"),
        RouteChange::NoBackend(id) => format!("{id} is gone"),
    }
}

#[test]
fn a_new_backend_comes_before_the_routes_that_lead_to_it() {
    let mut book = RouteBook::new(Settings::default());
    let said = changes(&mut book, two_clusters().into_iter().take(2));
    assert_eq!(said, ["a/api-secure has [10.0.0.1:6443]", "host a.example.com leads to a/api-secure"]);
}

#[test]
fn new_endpoints_change_the_backend_and_no_route() {
    let mut book = book(two_clusters());
    let said = changes(&mut book, [EndpointSlice(slice("a/s", "api", &["10.0.0.9"]))]);
    assert_eq!(said, ["a/api-secure has [10.0.0.9:6443]"]);
}

#[test]
fn a_service_that_goes_takes_its_routes_first_and_then_its_backend() {
    let mut book = book(two_clusters());
    let said = changes(&mut book, [RemoveService(key("a/api"))]);
    assert_eq!(said, ["host a.example.com leads nowhere", "a/api-secure is gone"]);
}

#[test]
fn a_host_that_changes_hands_never_leads_nowhere() {
    let mut book = book(two_clusters());
    let said = changes(
        &mut book,
        [
            Service(sni("b/api", "a.example.com")), // waits: the smaller name is the elder
            RemoveService(key("a/api")),
        ],
    );
    assert_eq!(
        said,
        [
            "host a.example.com leads to b/api-secure",
            "host b.example.com leads nowhere",
            "a/api-secure is gone"
        ]
    );
}

#[test]
fn a_backend_that_loses_its_last_route_to_an_elder_service_is_gone() {
    let mut book = book(two_clusters());
    let said = changes(&mut book, [Service(sni("c/elder", "b.example.com").created(1))]);
    assert_eq!(
        said,
        ["c/elder-secure has []", "host b.example.com leads to c/elder-secure", "b/api-secure is gone"]
    );
}

#[test]
fn an_object_that_says_nothing_new_changes_nothing() {
    let mut book = book(two_clusters());
    assert!(changes(&mut book, two_clusters()).is_empty());
}

#[test]
fn what_comes_and_goes_between_two_commits_changes_nothing() {
    let mut book = book(two_clusters());
    let said = changes(
        &mut book,
        [Service(sni("c/api", "c.example.com")), RemoveService(key("c/api")), RemoveService(key("a/api"))]
            .into_iter()
            .chain(two_clusters()),
    );
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn a_change_to_one_cluster_leaves_the_values_of_all_others_untouched() {
    let mut book = book(two_clusters());
    let before = book.lead(&host("b.example.com")).unwrap();
    book.told([EndpointSlice(slice("a/s", "api", &["10.0.0.9"])), RemoveService(key("a/api"))]);
    assert!(Arc::ptr_eq(&before, &book.lead(&host("b.example.com")).unwrap()));
}

#[test]
fn a_table_that_was_handed_out_never_changes() {
    let mut book = book(two_clusters());
    let handed_out = book.table().clone();
    book.told([RemoveService(key("a/api"))]);
    assert_eq!((handed_out.len(), book.table().len()), (2, 1));
}
