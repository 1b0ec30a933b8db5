//! Endpoints behind an allow list, and which other Services that list holds for.
//!
//! Whoever may write an EndpointSlice can name the API server of another tenant as an endpoint of a Service
//! of their own. So an allow list follows the endpoint: a Service whose endpoint is also one of another
//! tenant's Services admits only clients that both lists admit. The list of a cluster holds for everybody,
//! that of a namespace only for other namespaces: a namespace must not close a cluster.
//!
//! An endpoint is an address with its port: several control planes may share a machine.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::Tenant;
use portico_api::policy::ClusterPolicy;
use portico_api::problem::{Problem, Severity};
use smallvec::SmallVec;

use crate::endpoints;
use crate::facts::ServiceFacts;
use crate::index::{RouteIndex, ServiceEntry};

/// The endpoints of every Service with an allow list, as of the last commit. Few have one.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    by_endpoint: HashMap<SocketAddr, SmallVec<[ObjectKey; 1]>>,
    by_service: HashMap<ObjectKey, BTreeSet<SocketAddr>>,
}

impl Guards {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_service.is_empty()
    }

    /// Replaces the guarded endpoints of `service`. Returns those it had before.
    fn set(&mut self, service: &ObjectKey, now: BTreeSet<SocketAddr>) -> BTreeSet<SocketAddr> {
        let before = self.by_service.remove(service).unwrap_or_default();
        for endpoint in &before {
            if let Some(services) = self.by_endpoint.get_mut(endpoint) {
                services.retain(|other| other != service);
                if services.is_empty() {
                    self.by_endpoint.remove(endpoint);
                }
            }
        }
        for endpoint in &now {
            self.by_endpoint.entry(*endpoint).or_default().push(service.clone());
        }
        if !now.is_empty() {
            self.by_service.insert(service.clone(), now);
        }
        before
    }
}

impl RouteIndex {
    /// Takes over the allow lists and endpoints of the Services that changed, and marks the other Services
    /// with one of these endpoints.
    pub(crate) fn follow_guards(&mut self) {
        let mut concerned = BTreeSet::new();
        for key in &self.changed {
            let entry = self.services.get(key);
            let guarded = entry.and_then(|entry| {
                let service = entry.service.as_deref()?;
                let has_list = !self.policy_of(service).allow.networks().is_empty();
                has_list.then(|| endpoints_of(entry, service).collect())
            });
            if guarded.is_some() || self.guards.by_service.contains_key(key) {
                let guarded: BTreeSet<SocketAddr> = guarded.unwrap_or_default();
                concerned.extend(&guarded);
                concerned.append(&mut self.guards.set(key, guarded));
            }
        }
        if concerned.is_empty() {
            return;
        }
        let shares = |(_, entry): &(&ObjectKey, &ServiceEntry)| {
            let service = entry.service.as_deref();
            service.is_some_and(|service| {
                endpoints_of(entry, service).any(|endpoint| concerned.contains(&endpoint))
            })
        };
        let others: Vec<ObjectKey> =
            self.services.iter().filter(shares).map(|(key, _)| key.clone()).collect();
        self.changed.extend(others);
        self.problems_version += 1;
    }

    /// `policy` of `service`, with the allow lists of other tenants that hold for these endpoints as well.
    pub(crate) fn guarded(
        &self,
        policy: &Arc<ClusterPolicy>,
        service: &ObjectKey,
        endpoints: &[SocketAddr],
    ) -> Arc<ClusterPolicy> {
        let mut guarded = Arc::clone(policy);
        for (_, guard) in self.guards_of(service, endpoints) {
            let allow = guarded.allow.intersection(&self.policy_of(guard).allow);
            Arc::make_mut(&mut guarded).allow = allow;
        }
        guarded
    }

    /// Every Service whose endpoint is guarded by another tenant.
    pub(crate) fn shared_endpoints(&self) -> impl Iterator<Item = Problem> {
        let entries = self.services.iter().filter(|_| !self.guards.is_empty());
        entries.filter_map(|(key, entry)| {
            let endpoints: Vec<SocketAddr> = endpoints_of(entry, entry.service.as_deref()?).collect();
            let (endpoint, guard) = self.guards_of(key, &endpoints).next()?;
            Some(shared_endpoint(key, endpoint, &guard.key))
        })
    }

    /// The Services of other tenants that guard one of `endpoints` against `service`.
    fn guards_of<'a>(
        &'a self,
        service: &'a ObjectKey,
        endpoints: &'a [SocketAddr],
    ) -> impl Iterator<Item = (SocketAddr, &'a ServiceFacts)> {
        let tenant = (!self.guards.is_empty()).then(|| Tenant::of_namespace(&service.namespace));
        tenant.into_iter().flat_map(move |tenant| {
            let guards = endpoints.iter().flat_map(|endpoint| {
                let services = self.guards.by_endpoint.get(endpoint).into_iter().flatten();
                services.map(move |guard| (*endpoint, guard))
            });
            guards.filter_map(move |(endpoint, guard)| {
                let binds = guard.namespace != service.namespace
                    && (Tenant::of_namespace(&guard.namespace).is_cluster() || !tenant.is_cluster());
                let facts = self.services.get(guard).filter(|_| binds)?.service.as_deref()?;
                Some((endpoint, facts))
            })
        })
    }
}

/// The ready endpoints of every exposed port.
fn endpoints_of(entry: &ServiceEntry, service: &ServiceFacts) -> impl Iterator<Item = SocketAddr> {
    service.ports.iter().flat_map(|port| endpoints::ready(&entry.slices, &port.name))
}

fn shared_endpoint(service: &ObjectKey, endpoint: SocketAddr, guard: &ObjectKey) -> Problem {
    let guard = ObjectRef { kind: Kind::Service, key: guard.clone() };
    Problem {
        severity: Severity::Warning,
        reason: "shared-endpoint",
        object: ObjectRef { kind: Kind::Service, key: service.clone() },
        field: String::new(),
        message: format!(
            "its endpoint {endpoint} is one of {guard} too, whose allow list holds here as well"
        ),
        remedy: "remove the endpoint from the EndpointSlice where it does not belong".into(),
    }
}
