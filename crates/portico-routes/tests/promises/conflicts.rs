//! When several Services claim one key, the oldest has it. The others lose that key and nothing else.

use std::ops::Range;

use portico_api::names::{HostName, Tenant};
use portico_api::policy::ClusterPolicy;
use portico_api::service::Service;
use portico_routes::index::IndexChange;
use portico_routes::route::RouteKey;
use portico_routes::rows::RouteState;

use crate::follower::{Follower, index, seed_index};
use crate::objects::*;

/// Claims `shared.example.com` and a host of its own.
fn claimant(name: &str, second: i64, uid: &str) -> IndexChange {
    let own = name.replace('/', ".");
    let mapping = format!(r#"{{"secure":"shared.example.com","own":"{own}.example.com"}}"#);
    written(service(name, "SNI").port("own", 444).mapping(&mapping).created(second).uid(uid))
}

fn shared() -> RouteKey {
    host("shared.example.com")
}

#[test]
fn the_older_has_the_host_in_whatever_order_they_arrive() {
    let older = claimant("a/older", 1, "z");
    let younger = claimant("a/younger", 2, "a");
    for order in [[older.clone(), younger.clone()], [younger, older]] {
        assert_eq!(index(order).owner(&shared()).as_deref(), Some("a/older"));
    }
}

#[test]
fn within_one_second_the_smaller_uid_is_the_older() {
    let index = index([claimant("a/one", 1, "b"), claimant("a/two", 1, "a")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/two"));
}

#[test]
fn without_an_age_the_smaller_name_is_the_older() {
    let index =
        index([written(sni("b/api", "shared.example.com")), written(sni("a/api", "shared.example.com"))]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/api"));
}

#[test]
fn a_conflict_costs_the_younger_that_one_host() {
    let index = index([claimant("a/older", 1, ""), claimant("a/younger", 2, "")]);
    assert_eq!(index.owner(&host("a.younger.example.com")).as_deref(), Some("a/younger"));
    assert_eq!(index.routes().len(), 3);
}

#[test]
fn a_conflict_is_a_problem_of_the_younger_and_names_the_older() {
    let index = index([claimant("a/older", 1, ""), claimant("a/younger", 2, "")]);
    assert_eq!(
        index.problem_lines(),
        ["Service a/younger: metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: \
             host shared.example.com belongs to the elder Service a/older, created 1970-01-01T00:00:01Z; \
             choose another host name, or remove Service a/older"]
    );
    let waiting = index.rows().find(|row| row.backend.service == key("a/younger")).unwrap();
    let RouteState::Conflict { winner } = waiting.state else { panic!("{:?}", waiting.state) };
    assert_eq!(winner.to_string(), "a/older-secure");
}

#[test]
fn what_is_planned_for_a_cluster_keeps_its_host_against_every_claim() {
    let planned = || planned(sni("cluster-z/apiserver-external", "shared.example.com"));
    for rival in [claimant("aaa/s1", 1, "a"), written(sni("aaa/s1", "shared.example.com"))] {
        for order in [[planned(), rival.clone()], [rival, planned()]] {
            let index = index(order);
            assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-z/apiserver-external"));
            assert_eq!(
                index.problem_lines(),
                ["Service aaa/s1: metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: \
                     host shared.example.com belongs to Cluster z: what a Cluster asks for comes before \
                     any Service; choose another host name"]
            );
        }
    }
}

#[test]
fn a_service_that_is_written_in_place_of_a_planned_one_is_judged_as_written() {
    let service = || sni("cluster-z/api", "shared.example.com");
    let index = index([planned(service()), claimant("a/x", 1, ""), written(service())]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/x"));
}

#[test]
fn of_two_that_are_planned_the_older_has_the_host_and_the_other_cluster_is_to_blame() {
    let planned = |name, second| planned(sni(name, "shared.example.com").created(second));
    let index = index([planned("cluster-a/api", 2), planned("cluster-b/api", 1)]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-b/api"));
    let lines = index.problem_lines();
    assert!(
        lines[0].starts_with("Cluster a: host shared.example.com belongs to the elder Cluster b"),
        "{lines:?}"
    );
}

#[test]
fn what_decided_is_said_as_it_was() {
    let plain = |name| written(sni(name, "shared.example.com"));
    for (rivals, expected) in [
        ([plain("a/x"), plain("b/y")], "which comes first by name: neither has a creationTimestamp"),
        ([plain("a/x"), claimant("b/y", 1, "")], "without a creationTimestamp this one counts as younger"),
        ([claimant("a/x", 1, "u"), claimant("b/y", 1, "v")], "created in the same second"),
        ([claimant("a/x", 2, ""), claimant("b/y", 1, "")], "the elder Service b/y"),
    ] {
        let lines = index(rivals).problem_lines();
        assert!(lines[0].contains(expected), "{lines:?}");
        assert_eq!(lines[0].contains("elder"), expected.contains("elder"), "{lines:?}");
    }
}

#[test]
fn when_the_older_goes_the_younger_has_the_host_in_the_same_commit() {
    let mut index = index([claimant("a/older", 1, ""), claimant("a/younger", 2, "")]);
    index.apply([no_service("a/older")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/younger"));
    assert!(index.reasons().is_empty());
}

#[test]
fn when_the_older_takes_another_host_the_younger_has_it_at_once() {
    let mut index = index([claimant("a/older", 1, ""), claimant("a/younger", 2, "")]);
    index.apply([written(sni("a/older", "other.example.com").created(1))]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/younger"));
}

#[test]
fn an_older_that_is_recreated_is_the_younger() {
    let mut index = seed_index([claimant("a/older", 1, ""), claimant("a/younger", 2, "")]);
    index.apply([claimant("a/older", 3, "")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/younger"));
}

#[test]
fn an_older_without_ready_endpoints_keeps_its_host_and_the_younger_is_reported() {
    let mut index = index([claimant("a/older", 1, ""), claimant("b/younger", 2, "")]);
    let says_so = |index: &Follower| index.problem_lines()[0].contains("KKP would serve this one");
    assert!(!says_so(&index));
    let before = index.problems_version();
    index.apply([sliced(slice("b/s", "younger", &["10.0.0.1"]))]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/older"));
    assert!(says_so(&index) && index.problems_version() > before);
    index.apply([sliced(slice("a/s", "older", &["10.0.0.2"]))]);
    assert!(!says_so(&index));
}

/// A Cluster is known, as which `tenant` reads.
fn known(tenant: &str) -> IndexChange {
    policy(ClusterPolicy::open(Tenant::of_text(tenant)))
}

fn kept_for(index: &Follower, waiting: &str) -> Option<String> {
    match index.rows().find(|row| row.backend.service == key(waiting) && row.key == shared())?.state {
        RouteState::Kept { tenant } => Some(tenant.to_string()),
        _ => None,
    }
}

#[test]
fn a_host_that_another_has_by_now_stays_with_it_when_the_cluster_of_the_one_before_becomes_known() {
    let service = |name| sni(name, "shared.example.com");
    let mut index = index([known("b"), planned(service("cluster-a/x")), written(service("cluster-b/x"))]);
    index.apply([written(sni("cluster-a/x", "other.example.com").created(1))]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-b/x"));
    index.apply([known("a")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-b/x"));
    assert_eq!(kept_for(&index, "cluster-b/x"), None, "the listing says the same");
}

#[test]
fn a_host_stays_with_its_namespace_while_its_service_is_made_anew() {
    for cluster in [None, Some(known("a"))] {
        let mut index = index(
            cluster.into_iter().chain([claimant("cluster-a/api", 1, "u"), claimant("thief/x", 2, "v")]),
        );
        index.apply([no_service("cluster-a/api")]);
        assert_eq!(index.owner(&shared()), None, "the one that waits does not inherit it");
        assert_eq!(kept_for(&index, "thief/x").as_deref(), Some("a"));
        assert_eq!(index.reasons(), ["host-conflict"]);
        index.apply([claimant("cluster-a/api", 3, "w")]);
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-a/api"), "though it is the younger now");
        index.apply([claimant("cluster-a/api", 4, "x")]);
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-a/api"), "made anew between two looks");
        index.apply([claimant("later/x", 5, "y"), no_service("later/x")]);
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-a/api"));
    }
}

#[test]
fn a_known_cluster_keeps_its_host_until_it_is_deleted() {
    let mut index = index([known("a"), claimant("cluster-a/api", 5, "")]);
    index.apply([no_service("cluster-a/api")]);
    index.apply([claimant("thief/x", 1, "")]);
    assert_eq!(kept_for(&index, "thief/x").as_deref(), Some("a"));
    index.apply([no_policy("a")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("thief/x"));
    assert!(index.reasons().is_empty());
}

#[test]
fn a_namespace_without_a_cluster_keeps_its_host_until_another_asks_for_it_anew() {
    let mut index = index([claimant("a/api", 1, ""), claimant("b/api", 2, "")]);
    index.apply([no_service("a/api")]);
    assert_eq!(index.owner(&shared()), None);
    index.apply([no_service("b/api")]);
    index.apply([claimant("b/api", 3, "")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("b/api"));
}

/// Services of a directory. `thief` comes first by name, or is the older.
fn victim_and_thief(thief_created: Option<i64>) -> [IndexChange; 2] {
    let thief = sni("cluster-0thief/api", "shared.example.com");
    let thief = thief_created.into_iter().fold(thief, Service::created);
    let victim = sni("cluster-s/api", "shared.example.com");
    [written(thief_created.into_iter().fold(victim, |it, second| it.created(second + 1))), written(thief)]
}

#[test]
fn in_a_directory_a_later_service_takes_no_name_from_the_one_that_has_it_and_leaves_nothing_behind() {
    for created in [None, Some(1)] {
        let [victim, thief] = victim_and_thief(created);
        let mut index = index([victim]);
        let has_it = |index: &Follower| assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-s/api"));
        assert_eq!(index.apply([thief]).len(), 0, "no byte of the other");
        has_it(&index);
        let lines = index.problem_lines();
        assert!(lines[0].starts_with("Service cluster-0thief/api: "), "{lines:?}");
        assert!(lines[0].contains("belongs to Service cluster-s/api, which had it before"), "{lines:?}");

        let mapping = r#"{"secure": "shared.example.com"}"#;
        let edited = service("cluster-s/api", "SNI,Tunneling").mapping(mapping);
        index.apply([written(created.into_iter().fold(edited, |it, second| it.created(second + 1)))]);
        has_it(&index);
        for change in [known("s"), known("0thief"), no_policy("0thief"), no_policy("s")] {
            index.apply([change]);
        }
        has_it(&index);

        index.apply([no_service("cluster-0thief/api")]);
        has_it(&index);
        assert!(index.reasons().is_empty());
        index.apply([no_service("cluster-s/api")]);
        assert!(index.is_empty());
    }
}

#[test]
fn what_came_with_a_cluster_and_took_a_name_gives_it_back_when_both_go() {
    for gone in [
        [no_policy("0thief"), no_service("cluster-0thief/api")],
        [no_service("cluster-0thief/api"), no_policy("0thief")],
    ] {
        let [victim, thief] = victim_and_thief(None);
        let mut index = index([victim]);
        index.apply([known("0thief"), thief]);
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-0thief/api"), "as a Cluster's");
        gone.into_iter().for_each(|change| drop(index.apply([change])));
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-s/api"));
    }
}

#[test]
fn in_a_directory_a_later_service_does_not_inherit_the_name_of_the_one_that_vanishes_for_a_moment() {
    let [victim, thief] = victim_and_thief(None);
    let mut index = index([victim.clone()]);
    index.apply([thief.clone()]);
    index.apply([no_service("cluster-s/api")]);
    assert_eq!(kept_for(&index, "cluster-0thief/api").as_deref(), Some("s"));
    index.apply([victim]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-s/api"));
    index.apply([no_service("cluster-0thief/api")]);
    index.apply([thief]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-s/api"));
    index.apply([written(sni("cluster-s/api", "other.example.com"))]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-0thief/api"), "given up");
}

#[test]
fn in_a_directory_numbers_and_authorities_stay_where_they_are_as_well() {
    let by_port = |name| written(service(name, "NodePort").node_port(30_001));
    let by_authority = |name| written(service(name, "Tunneling"));
    let mut index = index([by_port("b/x"), by_authority("c/a.b")]);
    index.apply([by_port("a/x"), by_authority("b.c/a")]);
    let owners = |index: &Follower| {
        [RouteKey::Port(30_001), authority("a.b.c.svc.cluster.local:443")].map(|key| index.owner(&key))
    };
    assert_eq!(owners(&index), ["b/x", "c/a.b"].map(|it| Some(it.to_owned())));
    index.apply([no_service("b/x"), no_service("c/a.b")]);
    assert_eq!(owners(&index), ["a/x", "b.c/a"].map(|it| Some(it.to_owned())), "nothing is kept of these");
}

#[test]
fn one_of_lower_rank_is_not_told_that_age_or_name_would_decide_otherwise() {
    let [victim, thief] = victim_and_thief(None);
    let mut index = index([known("s"), victim]);
    index.apply([known("0thief"), thief, written(sni("other/api", "shared.example.com"))]);
    let lines = index.problem_lines();
    let line_of =
        |name: &str| lines.iter().find(|line| line.starts_with(&format!("Service {name}: "))).unwrap();
    assert!(line_of("cluster-0thief/api").contains("age or name would decide otherwise"), "{lines:?}");
    assert!(!line_of("other/api").contains("age or name would decide otherwise"), "{lines:?}");
}

#[test]
fn when_a_gateway_starts_the_first_by_name_has_what_another_held() {
    let [victim, thief] = victim_and_thief(None);
    assert_eq!(index([victim, thief]).owner(&shared()).as_deref(), Some("cluster-0thief/api"));
}

#[test]
fn in_a_seed_cluster_the_older_takes_the_name_when_it_asks_for_it() {
    let mut index = seed_index([claimant("a/younger", 2, "")]);
    index.apply([claimant("a/older", 1, "")]);
    assert_eq!(index.owner(&shared()).as_deref(), Some("a/older"), "as with KKP's proxy");
}

#[test]
fn a_service_in_the_namespace_of_a_known_cluster_comes_before_every_other() {
    let thief = claimant("thief/x", 1, "");
    let service = claimant("cluster-a/api", 2, "");
    for order in [
        [known("a"), service.clone(), thief.clone()],
        [thief.clone(), service.clone(), known("a")],
        [service, known("a"), thief],
    ] {
        let mut index = index([]);
        order.into_iter().for_each(|change| drop(index.apply([change])));
        assert_eq!(index.owner(&shared()).as_deref(), Some("cluster-a/api"));
        assert!(index.problem_lines()[0].contains("the namespace of a Cluster comes before any other"));
    }
}

/// Every order of `changes`, each applied by itself.
fn in_every_order(changes: &[IndexChange], check: impl Fn(&Follower)) {
    let orders = |places: &[usize]| -> Vec<Vec<usize>> {
        places.iter().fold(vec![vec![]], |orders: Vec<Vec<usize>>, _| {
            let longer = |order: Vec<usize>| {
                let left = places.iter().filter(|place| !order.contains(place)).copied();
                left.map(|place| [order.clone(), vec![place]].concat()).collect::<Vec<_>>()
            };
            orders.into_iter().flat_map(longer).collect()
        })
    };
    for order in orders(&(0..changes.len()).collect::<Vec<_>>()) {
        let mut index = seed_index([]);
        order.into_iter().for_each(|place| drop(index.apply([changes[place].clone()])));
        check(&index);
    }
}

#[test]
fn the_name_that_follows_from_a_cluster_is_that_of_its_namespace_whoever_was_there_before() {
    for name in ["y1.north.example.com", "konnectivity-server.y1.north.example.com", "*.y1.north.example.com"]
    {
        // Another tenant may give its Service any name, in its own namespace.
        let squatter = written(sni("cluster-evil/apiserver-external", &name.to_uppercase()).created(1));
        let own = written(sni("cluster-y1/apiserver-external", name).created(9));
        let clusters = [named("evil", "evil.north.example.com"), named("y1", "y1.north.example.com")];
        let [evil, y1] = clusters;
        in_every_order(&[squatter, own, evil, y1], |index| {
            let key = RouteKey::Host(HostName::parse_pattern(name).unwrap());
            assert_eq!(index.owner(&key).as_deref(), Some("cluster-y1/apiserver-external"));
            assert_eq!(
                index.problem_lines(),
                [format!(
                    "Service cluster-evil/apiserver-external: \
                     metadata.annotations[nodeport-proxy.k8s.io/port-mapping]: host {name} belongs to \
                     Service cluster-y1/apiserver-external: it follows from the Cluster of that namespace; \
                     choose another host name"
                )]
            );
        });
    }
}

#[test]
fn of_two_clusters_a_name_follows_from_that_with_the_longer_host_name() {
    for name in ["a.s.example.com", "x.a.s.example.com", "*.a.s.example.com"] {
        let key = RouteKey::Host(HostName::parse_pattern(name).unwrap());
        let elder = written(sni("cluster-b/api", name).created(1));
        let own = written(sni("cluster-a/api", name).created(9));
        let changes = [named("b", "s.example.com"), named("a", "a.s.example.com"), elder, own];
        in_every_order(&changes, |index| {
            assert_eq!(index.owner(&key).as_deref(), Some("cluster-a/api"));
            let lines = index.problem_lines();
            let why = format!(
                "host {name} belongs to Service cluster-a/api: of the Clusters that it follows from, that of \
                 that namespace has the longest host name; choose another host name"
            );
            assert!(lines.len() == 1 && lines[0].ends_with(&why), "{lines:?}");
        });
    }
}

#[test]
fn a_name_kept_for_its_cluster_does_not_go_to_one_with_a_shorter_host_name() {
    let name = "a.s.example.com";
    let own = || written(sni("cluster-a/api", name).created(9));
    let elder = written(sni("cluster-b/api", name).created(1));
    let mut index = seed_index([named("a", name), own(), named("b", "s.example.com"), elder]);
    index.apply([no_service("cluster-a/api")]);
    assert_eq!(index.owner(&host(name)), None, "it is made anew");
    index.apply([named("a", "other.example.com")]);
    assert_eq!(index.owner(&host(name)).as_deref(), Some("cluster-b/api"), "it follows from b alone");
    index.apply([named("a", name), own()]);
    assert_eq!(index.owner(&host(name)).as_deref(), Some("cluster-a/api"));
}

#[test]
fn a_name_that_only_looks_like_one_of_a_cluster_goes_to_the_elder() {
    for name in ["xy1.north.example.com", "north.example.com", "y1.south.example.com", "*.north.example.com"]
    {
        let services = [("cluster-evil/x", 1), ("cluster-y1/x", 2)]
            .map(|(key, age)| written(sni(key, name).created(age)));
        let clusters = [named("evil", "evil.north.example.com"), named("y1", "y1.north.example.com")];
        let index = seed_index(services.into_iter().chain(clusters));
        let key = RouteKey::Host(HostName::parse_pattern(name).unwrap());
        assert_eq!(index.owner(&key).as_deref(), Some("cluster-evil/x"), "{name}");
    }
}

#[test]
fn a_name_that_was_kept_for_another_leads_to_the_cluster_that_it_follows_from() {
    let name = "y1.north.example.com";
    let squatter = || written(sni("cluster-evil/x", name).created(1));
    let mut index = seed_index([named("evil", "evil.north.example.com"), squatter()]);
    index.apply([no_service("cluster-evil/x")]);
    index.apply([named("y1", name)]);
    index.apply([written(sni("cluster-y1/apiserver-external", name).created(9))]);
    let owner = |index: &Follower| index.owner(&host(name));
    assert_eq!(owner(&index).as_deref(), Some("cluster-y1/apiserver-external"));
    index.apply([squatter()]);
    assert_eq!(owner(&index).as_deref(), Some("cluster-y1/apiserver-external"));
    index.apply([no_service("cluster-y1/apiserver-external")]);
    assert_eq!(owner(&index), None, "it is made anew");
    index.apply([written(sni("cluster-y1/apiserver-external", name).created(10))]);
    assert_eq!(owner(&index).as_deref(), Some("cluster-y1/apiserver-external"));
}

#[test]
fn one_port_may_have_keys_by_its_cluster_and_others() {
    let service = service("cluster-y1/x", "NodePort,SNI,Tunneling").node_port(30_001).created(1);
    let service = written(service.mapping(r#"{"secure": "y1.north.example.com"}"#));
    let index = seed_index([named("y1", "y1.north.example.com"), service]);
    assert_eq!((index.routes().len(), index.backends.len()), (3, 1));
    assert!(index.rows().all(|row| row.state == RouteState::NotReady));
}

#[test]
fn few_names_are_kept_for_one_namespace() {
    let name = |number| format!("s{number}.example.com");
    let mut index = index([known("a")]);
    for number in 0..40 {
        let service = format!("cluster-a/s{number}");
        index.apply([written(sni(&service, &name(number)))]);
        index.apply([no_service(&service)]);
    }
    index.apply((0..40).map(|number| written(sni(&format!("b/s{number}"), &name(number)))));
    let kept = index.rows().filter(|row| matches!(row.state, RouteState::Kept { .. })).count();
    assert_eq!(kept, 16, "the last ones");
    assert_eq!(index.owner(&host("s23.example.com")).as_deref(), Some("b/s23"));
    index.apply([no_policy("a")]);
    index.apply((0..40).map(|number| no_service(&format!("b/s{number}"))));
    assert!(index.is_empty());
}

/// Claims a name for each number: `p1.example.com` and so on.
fn with_names(key: &str, second: i64, numbers: Range<u16>) -> IndexChange {
    let mut service = service(key, "SNI").created(second);
    service.spec.ports.clear();
    let names: Vec<String> = numbers.map(|number| format!("p{number}")).collect();
    let service = names.iter().zip(1..).fold(service, |service, (name, port)| service.port(name, port));
    let mapping: Vec<String> =
        names.iter().map(|name| format!("\"{name}\": \"{name}.example.com\"")).collect();
    written(service.mapping(&format!("{{{}}}", mapping.join(", "))))
}

#[test]
fn a_name_that_makes_room_for_newer_ones_leads_to_the_one_that_waits_for_it() {
    let waiting = written(sni("b/waiting", "p1.example.com"));

    let mut at_once = index([known("a"), with_names("cluster-a/api", 1, 1..18), waiting.clone()]);
    at_once.apply([no_service("cluster-a/api")]);
    assert_eq!(at_once.owner(&host("p1.example.com")).as_deref(), Some("b/waiting"));

    let services = [with_names("cluster-a/api", 1, 1..17), with_names("cluster-a/last", 1, 17..18)];
    let mut later = index([known("a"), waiting].into_iter().chain(services));
    later.apply([no_service("cluster-a/api")]);
    assert_eq!(later.reasons(), ["host-conflict"]);
    let version = later.problems_version();
    later.apply([no_service("cluster-a/last")]);
    assert_eq!(later.owner(&host("p1.example.com")).as_deref(), Some("b/waiting"));
    assert!(later.reasons().is_empty() && later.problems_version() > version);
}

#[test]
fn a_service_that_had_its_name_back_loses_it_to_the_older_with_the_17th_that_is_kept() {
    let mut index = seed_index([with_names("a/api", 1, 1..2), with_names("b/waiting", 2, 1..18)]);
    index.apply([no_service("a/api"), with_names("a/back", 3, 1..2)]);
    assert_eq!(index.owner(&host("p1.example.com")).as_deref(), Some("a/back"));
    index.apply([with_names("a/more", 1, 2..18)]);
    index.apply([no_service("a/more")]);
    assert_eq!(index.owner(&host("p1.example.com")).as_deref(), Some("b/waiting"));
    assert!(!index.backends.keys().any(|id| id.service == key("a/back")), "nothing leads there");
}

#[test]
fn a_name_that_is_not_kept_takes_no_room() {
    let mut index = index([with_names("a/api", 1, 1..18), with_names("b/waiting", 2, 1..17)]);
    index.apply([no_service("a/api")]);
    let kept = index.rows().filter(|row| matches!(row.state, RouteState::Kept { .. })).count();
    assert_eq!(kept, 16);
}

#[test]
fn node_port_numbers_and_authorities_go_to_the_older_as_well() {
    let by_port = |name, second| written(service(name, "NodePort").node_port(30_001).created(second));
    // Kubernetes allows no dot in a namespace; a directory of manifests might hold one.
    let by_authority = |name, second| written(service(name, "Tunneling").created(second));
    let index =
        index([by_port("a/x", 2), by_port("a/y", 1), by_authority("c/a.b", 2), by_authority("b.c/a", 1)]);
    assert_eq!(index.owner(&RouteKey::Port(30_001)).as_deref(), Some("a/y"));
    assert_eq!(index.owner(&authority("a.b.c.svc.cluster.local:443")).as_deref(), Some("b.c/a"));
    assert_eq!(index.reasons(), ["authority-conflict", "node-port-conflict"]);
}

#[test]
fn the_version_of_the_problems_grows_when_a_conflict_comes_or_goes() {
    let mut index = index([claimant("a/older", 1, "")]);
    let before = index.problems_version();
    index.apply([claimant("a/younger", 2, "")]);
    let during = index.problems_version();
    index.apply([no_service("a/older")]);
    assert!(before < during && during < index.problems_version());
}

/// Every name of one Service, claimed by hundreds of others: the list of what is wrong must not grow with the
/// product.
#[test]
fn a_service_that_waits_for_many_names_has_as_many_problems_as_any_object() {
    let index = index((0..50).map(|number| with_names(&format!("n{number}/api"), number, 0..100)));
    assert_eq!(index.reasons().len(), 49 * 16);
    assert_eq!(index.owner(&host("p99.example.com")).as_deref(), Some("n0/api"));
}
