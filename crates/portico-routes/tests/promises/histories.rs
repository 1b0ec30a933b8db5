//! Properties over random histories: what a commit says is complete, and only the objects matter, not the way
//! there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use portico_api::annotations::{ALLOW, EXPOSE, SEND_PROXY};
use portico_api::change::{Change, Keyed};
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::ObjectKey;
use portico_api::names::{HostName, Tenant};
use portico_api::policy::{AllowList, ClusterFacts, ClusterPolicy};
use portico_api::service::Service;
use portico_routes::index::{IndexChange, Settings};
use portico_routes::route::OwnAddresses;
use portico_routes::rows::{RouteRow, RouteState};
use proptest::prelude::*;
use proptest::sample::select;

use crate::follower::Follower;
use crate::objects::*;

/// Every object there is, after some history: the last change to each.
#[derive(Debug, Clone, Default)]
struct World {
    services: BTreeMap<ObjectKey, IndexChange>,
    slices: BTreeMap<ObjectKey, Box<EndpointSlice>>,
    policies: BTreeMap<Tenant, Arc<ClusterPolicy>>,
    policies_required: bool,
    cluster_ips: BTreeSet<IpAddr>,
}

impl World {
    fn follow(&mut self, change: IndexChange) {
        match &change {
            IndexChange::Service(of) | IndexChange::PlannedService(of) => match of {
                Change::Apply(_) => drop(self.services.insert(of.key(), change)),
                Change::Delete(key) => drop(self.services.remove(key)),
            },
            IndexChange::EndpointSlice(of) => match of {
                Change::Apply(slice) => drop(self.slices.insert(of.key(), slice.clone())),
                Change::Delete(key) => drop(self.slices.remove(key)),
            },
            IndexChange::Policy(of) => match of {
                Change::Apply(policy) => drop(self.policies.insert(of.key(), Arc::clone(policy))),
                Change::Delete(cluster) => drop(self.policies.remove(cluster)),
            },
            IndexChange::PoliciesRequired => self.policies_required = true,
            IndexChange::ClusterIp(of) => match of {
                Change::Apply(address) => drop(self.cluster_ips.insert(*address)),
                Change::Delete(address) => drop(self.cluster_ips.remove(address)),
            },
        }
    }

    fn objects(self) -> Vec<IndexChange> {
        let services = self.services.into_values();
        let slices = self.slices.into_values().map(|slice| IndexChange::EndpointSlice(Change::Apply(slice)));
        let policies = self.policies.into_values().map(|policy| IndexChange::Policy(Change::Apply(policy)));
        let required = self.policies_required.then_some(IndexChange::PoliciesRequired);
        let addresses =
            self.cluster_ips.into_iter().map(|address| IndexChange::ClusterIp(Change::Apply(address)));
        services.chain(slices).chain(policies).chain(required).chain(addresses).collect()
    }

    fn deletions(self) -> Vec<IndexChange> {
        let services = self.services.into_keys().map(|key| IndexChange::Service(Change::Delete(key)));
        let slices = self.slices.into_keys().map(|key| IndexChange::EndpointSlice(Change::Delete(key)));
        let policies = self.policies.into_keys().map(|cluster| IndexChange::Policy(Change::Delete(cluster)));
        let addresses =
            self.cluster_ips.into_iter().map(|address| IndexChange::ClusterIp(Change::Delete(address)));
        services.chain(slices).chain(policies).chain(addresses).collect()
    }
}

fn cluster_ip(address: IpAddr, exists: bool) -> IndexChange {
    IndexChange::ClusterIp(if exists { Change::Apply(address) } else { Change::Delete(address) })
}

/// In Kubernetes, as a gateway at the first of the addresses.
fn settings() -> Settings {
    let own = OwnAddresses { addresses: ["10.0.0.1".parse().unwrap()].into(), ports: [6_443].into() };
    Settings { in_kubernetes: true, own, ..Settings::default() }
}

// So few names that histories are full of conflicts, returns and changes of owner.
const SERVICES: [&str; 5] = ["cluster-a/x", "cluster-a/y", "cluster-b/x", "cluster-b/y", "c/x"];
const HOSTS: [&str; 3] = ["one.example.com", "TWO.example.com.", "bad..name"];
const SLICES: [&str; 4] = ["cluster-a/s1", "cluster-a/s2", "cluster-b/s1", "c/s1"];
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

fn any_change() -> impl Strategy<Value = IndexChange> {
    let cluster = || select(&["a", "b"][..]);
    let networks = prop::option::of(select(&["10.0.0.0/8", "192.0.2.0/24"][..]));
    let host = prop::option::of(select(&["one.example.com", "two.example.com", "example.com"][..]));
    let any_policy = (cluster(), any::<bool>(), networks, host).prop_map(
        |(cluster, node_port_listeners, network, host)| {
            let open = ClusterPolicy::open(Tenant::of_text(cluster));
            let allow = AllowList::new(network.map(|network| network.parse().unwrap()));
            let facts = ClusterFacts::of(host.map(|host| HostName::parse(host).unwrap()), None);
            policy(ClusterPolicy { node_port_listeners, allow, cluster: facts, ..open })
        },
    );
    prop_oneof![
        5 => any_service().prop_map(written),
        1 => any_service().prop_map(planned),
        2 => select(&SERVICES[..]).prop_map(no_service),
        4 => any_slice().prop_map(sliced),
        1 => select(&SLICES[..]).prop_map(no_slice),
        1 => any_policy,
        1 => cluster().prop_map(no_policy),
        1 => Just(IndexChange::PoliciesRequired),
        1 => (select(&ADDRESSES[1..3]), any::<bool>())
            .prop_map(|(address, exists)| cluster_ip(address.parse().unwrap(), exists)),
    ]
}

/// A few commits of a few changes each.
fn any_history() -> impl Strategy<Value = Vec<Vec<IndexChange>>> {
    prop::collection::vec(prop::collection::vec(any_change(), 0..6), 0..16)
}

/// `history` without Services that are deleted or made anew: the age of each follows from its name.
fn without_new_services(mut history: Vec<Vec<IndexChange>>) -> Vec<Vec<IndexChange>> {
    for change in history.iter_mut().flatten() {
        if let IndexChange::Service(Change::Apply(service))
        | IndexChange::PlannedService(Change::Apply(service)) = change
        {
            let second = SERVICES.iter().rev().position(|name| key(name) == service.key()).unwrap() / 2;
            *service = Arc::new(Service::clone(service).created(i64::try_from(second).unwrap()).uid("u"));
        }
    }
    for burst in &mut history {
        burst.retain(|change| !matches!(change, IndexChange::Service(Change::Delete(_))));
    }
    history
}

/// An index that has gone through `history`.
fn after(history: Vec<Vec<IndexChange>>) -> Follower {
    lived(settings(), history)
}

fn lived(settings: Settings, history: Vec<Vec<IndexChange>>) -> Follower {
    let mut follower = Follower::new(settings);
    for burst in history {
        follower.apply(burst);
    }
    follower
}

fn is_routed(row: &RouteRow) -> bool {
    matches!(row.state, RouteState::Ready | RouteState::NotReady)
}

/// What the listing, which looks at the objects alone, says about the routes.
fn check_listing(follower: &Follower) -> Result<(), TestCaseError> {
    let mut listed = BTreeMap::new();
    for row in follower.rows().filter(is_routed) {
        let backend = &follower.backends[&row.backend];
        prop_assert_eq!(&backend.endpoints, &row.endpoints);
        prop_assert_eq!(&backend.policy, &row.policy);
        prop_assert_eq!(row.state == RouteState::Ready, !backend.endpoints.is_empty());
        listed.insert(row.key, row.backend);
    }
    prop_assert_eq!(&listed, &follower.routes());
    for id in follower.backends.keys() {
        prop_assert!(listed.values().any(|to| *to == **id), "no route leads to {}", id);
    }
    for row in follower.rows() {
        if let RouteState::Conflict { winner } = row.state {
            prop_assert_eq!(listed.get(&row.key), Some(&winner));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn following_the_changes_gives_exactly_the_routes_that_are_listed(
        (in_kubernetes, history) in (any::<bool>(), any_history())
    ) {
        let mut follower = Follower::new(Settings { in_kubernetes, ..settings() });
        for burst in history {
            follower.apply(burst);
            check_listing(&follower)?;
        }
    }

    // But for one thing: a name is kept while its Service is made anew, so nothing is here.
    #[test]
    fn the_routes_depend_on_the_objects_and_not_on_their_history(
        (history, objects) in any_history().prop_map(without_new_services).prop_flat_map(|history| {
            let mut world = World::default();
            history.iter().flatten().for_each(|change| world.follow(change.clone()));
            (Just(history), Just(world.objects()).prop_shuffle())
        })
    ) {
        let lived = after(history);
        let fresh = after(vec![objects]);
        prop_assert_eq!(lived.front(), fresh.front());
        prop_assert_eq!(&lived.table, &fresh.table);
        prop_assert_eq!(&lived.backends, &fresh.backends);
        prop_assert_eq!(lived.problem_lines(), fresh.problem_lines());
        prop_assert_eq!(lived.rows().collect::<Vec<_>>(), fresh.rows().collect::<Vec<_>>());
    }

    #[test]
    fn when_every_object_is_deleted_nothing_is_left(
        (in_kubernetes, history) in (any::<bool>(), any_history())
    ) {
        let mut world = World::default();
        history.iter().flatten().for_each(|change| world.follow(change.clone()));
        let mut follower = lived(Settings { in_kubernetes, ..settings() }, history);
        follower.apply(world.deletions());
        prop_assert!(follower.routes().is_empty() && follower.backends.is_empty());
        prop_assert_eq!((follower.problems().count(), follower.rows().count()), (0, 0));
        prop_assert!(follower.is_empty());
    }
}
