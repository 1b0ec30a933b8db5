//! From the Services that changed in the index to what changes in a route table.
//!
//! One Service at a time: the keys it owns now and where they lead, compared with what the last commit
//! published. [`RouteIndex::apply`] has marked each Service that loses a key to another, or gains it. So no
//! Service depends on the result of another.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use portico_api::change::{Change, Keyed};
use portico_api::meta::ObjectKey;
use portico_api::policy::ClusterPolicy;

use crate::allow_lists::NarrowedPolicies;
use crate::claims::Claim;
use crate::index::{PublishedRoute, RouteIndex};
use crate::route::{Backend, BackendId, Route, RouteKey};
use crate::table::{RouteChange, Update};

/// The changes of one commit, by kind.
#[derive(Debug, Default)]
struct Difference {
    applied_backends: Vec<RouteChange>,
    applied_routes: Vec<RouteChange>,
    deleted_routes: Vec<RouteChange>,
    deleted_backends: Vec<RouteChange>,
    /// The policy of the Service before. Services of one namespace come one after another and share theirs:
    /// without a Cluster each would have a copy.
    last_policy: Option<Arc<ClusterPolicy>>,
}

impl RouteIndex {
    /// Returns how the routes change with everything applied since the last commit; `None` if they stay.
    pub fn commit(&mut self) -> Option<Update> {
        self.claimants.clear();
        self.follow_cluster_ips();
        self.follow_allow_lists();
        let mut difference = Difference::default();
        for service in mem::take(&mut self.changed) {
            publish(self, &service, &mut difference);
            if self.services.get(&service).is_some_and(|entry| entry.is_empty()) {
                self.services.remove(&service);
            }
        }
        self.claims.forget_holders();
        let mut changes = difference.in_order();
        // `RouteTable::host` looks up where a name leads before it asks whether that is kept. So a kept host
        // matters only while it has no owner.
        let kept = self.claims.take_kept_changes().into_iter().filter_map(|(key, is_kept)| match key {
            RouteKey::Host(host) if is_kept => Some(RouteChange::Kept(Change::Apply(host))),
            RouteKey::Host(host) => Some(RouteChange::Kept(Change::Delete(host))),
            RouteKey::Port(_) | RouteKey::Authority(_) => None,
        });
        changes.extend(kept);
        let front = self.find_front();
        if front != self.front {
            self.front.clone_from(&front);
            self.problems_version += 1;
            changes.push(RouteChange::Front(front));
        }
        (!changes.is_empty()).then_some(Update { changes })
    }
}

/// Recomputes the routes of one Service.
fn publish(index: &mut RouteIndex, service: &ObjectKey, difference: &mut Difference) {
    let Some(entry) = index.services.get_mut(service) else { return };
    let before = mem::take(&mut entry.published);
    let after = routes(index, service, &before, &mut difference.last_policy);
    difference.add(&before, &after, |key| index.claims.owner(key).is_some());
    if let Some(entry) = index.services.get_mut(service) {
        entry.published = after;
    }
}

/// The routes that lead to a Service. A backend that is the same as in `before` stays the same value.
fn routes(
    index: &RouteIndex,
    service: &ObjectKey,
    before: &[PublishedRoute],
    last_policy: &mut Option<Arc<ClusterPolicy>>,
) -> Box<[PublishedRoute]> {
    let Some(facts) = index.services.get(service).and_then(|entry| entry.service.as_ref()) else {
        return Box::default();
    };
    let policy = index.policy_of(service);
    let policy = match last_policy {
        Some(last) if *last == policy => last,
        last => last.insert(policy),
    };
    let mut owned = index.claims_of(facts);
    owned.retain(|(key, claim)| index.claims.owner(key) == Some(claim));
    let before = backends(before);
    let mut routes = Vec::with_capacity(owned.len());
    let mut narrowed = NarrowedPolicies::new();
    for same_port in owned.chunk_by(|(_, a), (_, b)| a.is_of_port_of(b)) {
        let backend = &backend(index, &same_port[0].1, policy, &before, &mut narrowed);
        let route =
            |(key, _): &(RouteKey, Claim)| PublishedRoute { key: key.clone(), backend: Arc::clone(backend) };
        routes.extend(same_port.iter().map(route));
    }
    routes.into()
}

/// The backend behind one port: the one in `before`, if nothing about it changed.
fn backend<'a>(
    index: &'a RouteIndex,
    claim: &Claim,
    policy: &Arc<ClusterPolicy>,
    before: &BTreeMap<&BackendId, &Arc<Backend>>,
    narrowed: &mut NarrowedPolicies<'a>,
) -> Arc<Backend> {
    let (service, port) = (&claim.service, claim.port());
    let slices = index.services.get(&service.key).map(|entry| &*entry.slices).unwrap_or_default();
    let id = port.backend_id(&service.key);
    let old = before.get(&id).copied();
    let endpoints = index.ready(slices, &port.name);
    let new = Backend {
        id: old.map_or_else(|| Arc::new(id), |old| Arc::clone(&old.id)),
        policy: index.with_allow_lists(policy, &service.key, &endpoints, narrowed),
        endpoints,
        send_proxy: service.send_proxy,
        api_server_ca: service.api_server_ca().cloned(),
    };
    match old {
        Some(old) if **old == new => Arc::clone(old),
        _ => Arc::new(new),
    }
}

fn backends(routes: &[PublishedRoute]) -> BTreeMap<&BackendId, &Arc<Backend>> {
    routes.iter().map(|route| (&*route.backend.id, &route.backend)).collect()
}

impl Difference {
    /// Adds what changed about one Service. `is_owned` says whether a key leads to any Service now.
    fn add(
        &mut self,
        before: &[PublishedRoute],
        after: &[PublishedRoute],
        is_owned: impl Fn(&RouteKey) -> bool,
    ) {
        let (backends_before, backends_after) = (backends(before), backends(after));
        for (id, backend) in &backends_after {
            if !backends_before.get(id).is_some_and(|old| Arc::ptr_eq(old, backend)) {
                self.applied_backends.push(RouteChange::Backend(Change::Apply(Arc::clone(backend))));
            }
        }
        for (id, backend) in &backends_before {
            if !backends_after.contains_key(id) {
                self.deleted_backends.push(RouteChange::Backend(Change::Delete(backend.key())));
            }
        }
        let [led_before, leads_now] = [before, after].map(|routes| {
            let targets = routes.iter().map(|route| (&route.key, &route.backend.id));
            targets.collect::<BTreeMap<_, _>>()
        });
        for (key, to) in &leads_now {
            if led_before.get(key) != Some(to) {
                let route = Route { key: (*key).clone(), to: Arc::clone(to) };
                self.applied_routes.push(RouteChange::Route(Change::Apply(route)));
            }
        }
        // A key that another Service owns now is applied there: it never leads nowhere in between.
        for key in led_before.into_keys().filter(|key| !leads_now.contains_key(key) && !is_owned(key)) {
            self.deleted_routes.push(RouteChange::Route(Change::Delete(key.clone())));
        }
    }

    /// The changes in the order in which a table can apply them: a route always leads to a known backend.
    fn in_order(self) -> Vec<RouteChange> {
        let mut changes = self.applied_backends;
        for mut later in [self.applied_routes, self.deleted_routes, self.deleted_backends] {
            changes.append(&mut later);
        }
        changes
    }
}
