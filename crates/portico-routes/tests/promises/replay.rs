//! Properties over random histories: what a book emits is the whole truth, and only the objects matter, not the way there.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use portico_api::annotations::{ALLOW, EXPOSE, SEND_PROXY};
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_api::policy::ClusterPolicy;
use portico_api::service::Service;
use portico_routes::book::{Change, RouteBook, Settings};
use portico_routes::route::{Backend, BackendId, RouteKey};
use portico_routes::rows::{RouteRow, RouteState};
use portico_routes::table::{RouteChange, RouteTable};
use proptest::prelude::*;
use proptest::sample::select;

use crate::objects::*;

/// A route table as a reader of changes knows it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Replay {
    backends: BTreeMap<BackendId, Backend>,
    routes: BTreeMap<RouteKey, BackendId>,
}

impl Replay {
    fn follow(&mut self, changes: &[RouteChange]) {
        let mut keys = HashSet::new();
        let mut backends = HashSet::new();
        for change in changes {
            match change {
                RouteChange::Backend(new) => {
                    assert!(backends.insert(new.id.clone()), "{} twice", new.id);
                    let before = self.backends.insert(new.id.clone(), (**new).clone());
                    assert_ne!(before.as_ref(), Some(&**new), "{} did not change", new.id);
                }
                RouteChange::Route { key, to } => {
                    assert!(keys.insert(key.clone()), "{key} twice");
                    assert!(self.backends.contains_key(to), "{key} leads to {to}, which nobody heard of");
                    assert_ne!(self.routes.insert(key.clone(), to.clone()).as_ref(), Some(to));
                }
                RouteChange::NoRoute(key) => {
                    assert!(keys.insert(key.clone()), "{key} twice");
                    assert!(self.routes.remove(key).is_some(), "{key} led nowhere already");
                }
                RouteChange::NoBackend(id) => {
                    assert!(backends.insert(id.clone()), "{id} twice");
                    assert!(self.backends.remove(id).is_some(), "{id} was not there");
                    assert!(!self.routes.values().any(|to| to == id), "a route still leads to {id}");
                }
            }
        }
    }
}

impl From<&RouteTable> for Replay {
    fn from(table: &RouteTable) -> Self {
        let ports = table.ports.iter().map(|(key, to)| (RouteKey::Port(*key), to));
        let hosts = table.hosts.iter().map(|(key, to)| (RouteKey::Host(key.clone()), to));
        let authorities = table.authorities.iter().map(|(key, to)| (RouteKey::Authority(key.clone()), to));
        let mut replay = Self::default();
        for (key, to) in ports.chain(hosts).chain(authorities) {
            replay.routes.insert(key, to.id.clone());
            let before = replay.backends.insert(to.id.clone(), (**to).clone());
            assert!(before.is_none_or(|before| before == **to), "two versions of {}", to.id);
        }
        replay
    }
}

/// Every object there is, after some history: the last word on each.
#[derive(Debug, Clone, Default)]
struct World {
    services: BTreeMap<ObjectKey, Change>,
    slices: BTreeMap<ObjectKey, EndpointSlice>,
    policies: BTreeMap<Arc<str>, Arc<ClusterPolicy>>,
}

impl World {
    fn follow(&mut self, change: Change) {
        match change {
            Change::Service(ref service) | Change::Planned(ref service) => {
                drop(self.services.insert(service.metadata.key(), change));
            }
            Change::RemoveService(key) => drop(self.services.remove(&key)),
            Change::EndpointSlice(slice) => drop(self.slices.insert(slice.metadata.key(), slice)),
            Change::RemoveEndpointSlice(key) => drop(self.slices.remove(&key)),
            Change::Policy(namespace, policy) => drop(self.policies.insert(namespace, policy)),
            Change::RemovePolicy(namespace) => drop(self.policies.remove(&namespace)),
        }
    }

    fn objects(self) -> Vec<Change> {
        let services = self.services.into_values();
        let slices = self.slices.into_values().map(Change::EndpointSlice);
        let policies = self.policies.into_iter().map(|(namespace, policy)| Change::Policy(namespace, policy));
        services.chain(slices).chain(policies).collect()
    }

    fn removals(self) -> Vec<Change> {
        let services = self.services.into_keys().map(Change::RemoveService);
        let slices = self.slices.into_keys().map(Change::RemoveEndpointSlice);
        services.chain(slices).chain(self.policies.into_keys().map(Change::RemovePolicy)).collect()
    }
}

// So few names that histories are full of conflicts, returns and changes of owner.
const SERVICES: [&str; 5] = ["a/x", "a/y", "b/x", "b/y", "c/x"];
const HOSTS: [&str; 3] = ["one.example.com", "TWO.example.com.", "bad..name"];
const SLICES: [&str; 4] = ["a/s1", "a/s2", "b/s1", "c/s1"];
const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "nonsense"];

fn any_service() -> impl Strategy<Value = Service> {
    let expose =
        select(&["NodePort", "SNI", "SNI,Tunneling", "NodePort,SNI,Tunneling", "true", "void", ""][..]);
    let hosts = (select(&HOSTS[..]), select(&HOSTS[..]));
    let extras = (any::<bool>(), any::<bool>(), any::<bool>());
    (
        select(&SERVICES[..]),
        expose,
        hosts,
        30_000u16..30_003,
        prop::option::of(0i64..3),
        select(&["", "u", "v"][..]),
        extras,
    )
        .prop_map(|(name, expose, (one, two), number, created, uid, (annotated, by_port, allow))| {
            let mapping = format!(r#"{{"secure":"{one}","second":"{two}"}}"#);
            let mut service = service(name, expose).port("second", 443).mapping(&mapping).uid(uid);
            if !annotated {
                service.metadata.annotations.remove(EXPOSE);
            }
            if by_port {
                service = service.node_port(number);
            }
            if allow {
                service = service.annotated(ALLOW, "192.0.2.0/24").annotated(SEND_PROXY, "v2");
            }
            match created {
                Some(second) => service.created(second),
                None => service,
            }
        })
}

fn any_slice() -> impl Strategy<Value = EndpointSlice> {
    let ready = prop::collection::vec((select(&ADDRESSES[..]), prop::option::of(any::<bool>())), 0..3);
    let kind = select(&["IPv4", "FQDN"][..]);
    (select(&SLICES[..]), select(&["x", "y"][..]), ready, kind, any::<bool>()).prop_map(
        |(name, of, endpoints, kind, second)| {
            let mut slice = slice(name, of, &[]);
            slice.address_type = kind.into();
            slice.endpoints =
                endpoints.into_iter().map(|(address, ready)| endpoint(address, ready)).collect();
            if second {
                slice.ports.push(endpoint_port("second", 6444));
            }
            slice
        },
    )
}

fn any_change() -> impl Strategy<Value = Change> {
    let namespace = || select(&["a", "b", "c"][..]).prop_map(Arc::<str>::from);
    let policy = (namespace(), any::<bool>()).prop_map(|(namespace, node_port_listeners)| {
        let open = ClusterPolicy::open(ClusterName::new("named"));
        Change::Policy(namespace, Arc::new(ClusterPolicy { node_port_listeners, ..open }))
    });
    prop_oneof![
        5 => any_service().prop_map(Change::Service),
        1 => any_service().prop_map(Change::Planned),
        2 => select(&SERVICES[..]).prop_map(|name| Change::RemoveService(key(name))),
        4 => any_slice().prop_map(Change::EndpointSlice),
        1 => select(&SLICES[..]).prop_map(|name| Change::RemoveEndpointSlice(key(name))),
        1 => policy,
        1 => namespace().prop_map(Change::RemovePolicy),
    ]
}

/// A few commits of a few changes each.
fn any_history() -> impl Strategy<Value = Vec<Vec<Change>>> {
    prop::collection::vec(prop::collection::vec(any_change(), 0..6), 0..16)
}

fn problems(book: &RouteBook) -> Vec<String> {
    let mut problems: Vec<String> = book.problems().map(|problem| problem.to_string()).collect();
    problems.sort_unstable();
    problems
}

fn is_routed(row: &RouteRow) -> bool {
    matches!(row.state, RouteState::Ready | RouteState::NotReady)
}

proptest! {
    #[test]
    fn replaying_the_changes_onto_nothing_gives_exactly_the_table(history in any_history()) {
        let mut book = RouteBook::new(Settings::default());
        let mut replay = Replay::default();
        for burst in history {
            burst.into_iter().for_each(|change| book.apply(change));
            if let Some(update) = book.commit() {
                prop_assert!(!update.changes.is_empty());
                replay.follow(&update.changes);
                prop_assert_eq!(&Replay::from(&update.table), &replay);
            }
            prop_assert_eq!(&Replay::from(book.table()), &replay);
        }
    }

    #[test]
    fn the_table_depends_on_the_objects_and_not_on_their_history(
        (history, objects) in any_history().prop_flat_map(|history| {
            let mut world = World::default();
            history.iter().flatten().for_each(|change| world.follow(change.clone()));
            (Just(history), Just(world.objects()).prop_shuffle())
        })
    ) {
        let mut lived = RouteBook::new(Settings::default());
        history.into_iter().for_each(|burst| lived.told(burst));
        let fresh = book(objects);
        prop_assert_eq!(Replay::from(lived.table()), Replay::from(fresh.table()));
        prop_assert_eq!(problems(&lived), problems(&fresh));
        prop_assert_eq!(lived.rows().collect::<Vec<_>>(), fresh.rows().collect::<Vec<_>>());
    }

    #[test]
    fn the_listing_agrees_with_the_table(history in any_history()) {
        let mut book = RouteBook::new(Settings::default());
        history.into_iter().for_each(|burst| book.told(burst));
        let routed: BTreeMap<RouteKey, BackendId> =
            book.rows().filter(is_routed).map(|row| (row.key, row.backend)).collect();
        prop_assert_eq!(&routed, &Replay::from(book.table()).routes);
        for row in book.rows() {
            if let RouteState::Conflict { winner } = row.state {
                prop_assert_eq!(routed.get(&row.key), Some(&winner));
            }
        }
    }

    #[test]
    fn when_every_object_is_gone_nothing_is_left(history in any_history()) {
        let mut world = World::default();
        history.iter().flatten().for_each(|change| world.follow(change.clone()));
        let mut book = RouteBook::new(Settings::default());
        history.into_iter().for_each(|burst| book.told(burst));
        book.told(world.removals());
        prop_assert!(book.table().is_empty());
        prop_assert_eq!((book.problems().count(), book.rows().count()), (0, 0));
        prop_assert!(book.is_empty());
    }
}
