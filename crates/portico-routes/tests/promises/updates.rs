//! What a commit says has changed, and what it leaves alone.

use std::sync::Arc;

use portico_api::change::Change;
use portico_routes::index::{IndexChange, Settings};
use portico_routes::table::RouteChange;

use crate::follower::{Follower, index, seed_index};
use crate::objects::*;

fn two_clusters() -> [IndexChange; 4] {
    [
        written(sni("a/api", "a.example.com")),
        sliced(slice("a/s", "api", &["10.0.0.1"])),
        written(sni("b/api", "b.example.com")),
        sliced(slice("b/s", "api", &["10.0.0.2"])),
    ]
}

/// The changes of one commit, as text.
fn changes(index: &mut Follower, changes: impl IntoIterator<Item = IndexChange>) -> Vec<String> {
    index.apply(changes).iter().map(describe).collect()
}

fn describe(change: &RouteChange) -> String {
    match change {
        RouteChange::Front(front) => format!("clients come by {front:?}"),
        RouteChange::Kept(of) => format!("{} kept: {}", of.key(), matches!(of, Change::Apply(_))),
        RouteChange::Backend(Change::Apply(backend)) => format!("{} has {:?}", backend.id, backend.endpoints),
        RouteChange::Backend(Change::Delete(id)) => format!("{id} is gone"),
        RouteChange::Route(Change::Apply(route)) => format!("{} leads to {}", route.key, route.to),
        RouteChange::Route(Change::Delete(key)) => format!("{key} leads nowhere"),
    }
}

#[test]
fn a_new_backend_comes_before_the_routes_that_lead_to_it() {
    let mut index = Follower::new(Settings::default());
    let said = changes(&mut index, two_clusters().into_iter().take(2));
    assert_eq!(said, ["a/api-secure has [10.0.0.1:6443]", "host a.example.com leads to a/api-secure"]);
}

#[test]
fn new_endpoints_change_the_backend_and_no_route() {
    let mut index = index(two_clusters());
    let said = changes(&mut index, [sliced(slice("a/s", "api", &["10.0.0.9"]))]);
    assert_eq!(said, ["a/api-secure has [10.0.0.9:6443]"]);
}

#[test]
fn a_deleted_service_takes_its_routes_first_and_then_its_backend() {
    let mut index = index(two_clusters());
    let said = changes(&mut index, [no_service("a/api")]);
    assert_eq!(said, ["host a.example.com leads nowhere", "a/api-secure is gone"]);
}

#[test]
fn a_host_that_changes_its_owner_never_leads_nowhere() {
    let mut index = index(two_clusters());
    let said = changes(
        &mut index,
        [
            written(sni("b/api", "a.example.com")), // waits: the smaller name is the older
            no_service("a/api"),
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
fn a_backend_that_loses_its_last_route_to_an_older_service_is_gone() {
    let mut index = seed_index(two_clusters());
    let said = changes(&mut index, [written(sni("c/older", "b.example.com").created(1))]);
    assert_eq!(
        said,
        ["c/older-secure has []", "host b.example.com leads to c/older-secure", "b/api-secure is gone"]
    );
}

#[test]
fn an_object_that_says_nothing_new_changes_nothing() {
    let mut index = index(two_clusters());
    assert!(changes(&mut index, two_clusters()).is_empty());
}

#[test]
fn what_is_applied_and_deleted_between_two_commits_changes_nothing() {
    let mut index = index(two_clusters());
    let said = changes(
        &mut index,
        [written(sni("c/api", "c.example.com")), no_service("c/api"), no_service("a/api")]
            .into_iter()
            .chain(two_clusters()),
    );
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn a_change_to_one_cluster_leaves_the_values_of_all_others_untouched() {
    let mut index = index(two_clusters());
    let before = Arc::clone(index.lead(&host("b.example.com")).unwrap());
    index.apply([sliced(slice("a/s", "api", &["10.0.0.9"])), no_service("a/api")]);
    assert!(Arc::ptr_eq(&before, index.lead(&host("b.example.com")).unwrap()));
}
