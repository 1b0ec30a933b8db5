//! Endpoints behind an allow list, and which other Services that list holds for.
//!
//! Whoever may write an EndpointSlice can name the API server of another tenant as an endpoint of a Service
//! of their own. So an allow list follows the endpoint: a Service whose endpoint is also one of another
//! tenant's Services, exposed or not, ready or not, admits only clients that both lists admit. So does one
//! whose endpoint has the NodePort of another tenant's Service, on whatever address: every node leads there.
//! The list of a cluster holds for everybody, that of a namespace only for other namespaces: a namespace must
//! not close a cluster.
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

use crate::endpoints::{self, MAX_GUARDED};
use crate::facts::ServiceFacts;
use crate::index::{RouteIndex, ServiceEntry};

/// By what a Service behind an allow list is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Target {
    Endpoint(SocketAddr),
    /// On every node.
    NodePort(u16),
}

/// Every target of every Service with an allow list, as of the last commit. Few have one.
#[derive(Debug, Default)]
pub(crate) struct AllowListIndex {
    by_target: HashMap<Target, SmallVec<[ObjectKey; 1]>>,
    by_service: HashMap<ObjectKey, BTreeSet<Target>>,
}

impl Target {
    /// The targets that a connection to `endpoint` may lead to.
    fn of(endpoint: SocketAddr) -> [Self; 2] {
        [Self::Endpoint(endpoint), Self::NodePort(endpoint.port())]
    }

    /// Every target of a Service.
    fn all(entry: &ServiceEntry) -> BTreeSet<Self> {
        let node_ports = entry.reach.iter().flat_map(|reach| &*reach.node_ports).copied();
        let endpoints = endpoints::all(&entry.slices).take(MAX_GUARDED);
        endpoints.map(Self::Endpoint).chain(node_ports.map(Self::NodePort)).collect()
    }
}

impl AllowListIndex {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_service.is_empty()
    }

    /// Whether `service` is guarded.
    pub(crate) fn has(&self, service: &ObjectKey) -> bool {
        self.by_service.contains_key(service)
    }

    /// Replaces the guarded targets of `service`. Returns those it had before.
    fn set(&mut self, service: &ObjectKey, now: BTreeSet<Target>) -> BTreeSet<Target> {
        let before = self.by_service.remove(service).unwrap_or_default();
        for target in &before {
            if let Some(services) = self.by_target.get_mut(target) {
                services.retain(|other| other != service);
                if services.is_empty() {
                    self.by_target.remove(target);
                }
            }
        }
        for target in &now {
            self.by_target.entry(*target).or_default().push(service.clone());
        }
        if !now.is_empty() {
            self.by_service.insert(service.clone(), now);
        }
        before
    }
}

impl RouteIndex {
    /// Takes over the allow lists and targets of the Services that changed, and marks the other Services with
    /// an endpoint at one of these targets.
    pub(crate) fn follow_guards(&mut self) {
        let mut concerned = BTreeSet::new();
        for key in &self.changed {
            let has_list = || !self.policy_of(key).allow.networks().is_empty();
            let guarded = self.services.get(key).filter(|_| has_list()).map(Target::all);
            if guarded.is_some() || self.guards.has(key) {
                let guarded = guarded.unwrap_or_default();
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
                let mut targets = self.endpoints_of(entry, service).flat_map(Target::of);
                targets.any(|target| concerned.contains(&target))
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
        for (_, _, guard) in self.guards_of(service, endpoints) {
            let allow = guarded.allow.intersection(&self.policy_of(guard).allow);
            Arc::make_mut(&mut guarded).allow = allow;
        }
        guarded
    }

    /// Every Service whose endpoint is guarded by another tenant.
    pub(crate) fn shared_endpoints(&self) -> impl Iterator<Item = Problem> {
        let entries = self.services.iter().filter(|_| !self.guards.is_empty());
        entries.filter_map(|(key, entry)| {
            let endpoints: Vec<SocketAddr> = self.endpoints_of(entry, entry.service.as_deref()?).collect();
            let (endpoint, target, guard) = self.guards_of(key, &endpoints).next()?;
            Some(shared_endpoint(key, endpoint, target, guard))
        })
    }

    /// The Services of other tenants that guard one of `endpoints` against `service`.
    fn guards_of<'a>(
        &'a self,
        service: &'a ObjectKey,
        endpoints: &'a [SocketAddr],
    ) -> impl Iterator<Item = (SocketAddr, Target, &'a ObjectKey)> {
        let tenant = (!self.guards.is_empty()).then(|| Tenant::of_namespace(&service.namespace));
        tenant.into_iter().flat_map(move |tenant| {
            let targets =
                endpoints.iter().flat_map(|&endpoint| Target::of(endpoint).map(|target| (endpoint, target)));
            let guards = targets.flat_map(|(endpoint, target)| {
                let services = self.guards.by_target.get(&target).into_iter().flatten();
                services.map(move |guard| (endpoint, target, guard))
            });
            guards.filter(move |(_, _, guard)| {
                guard.namespace != service.namespace
                    && (Tenant::of_namespace(&guard.namespace).is_cluster() || !tenant.is_cluster())
            })
        })
    }

    /// The ready endpoints of every exposed port.
    fn endpoints_of(&self, entry: &ServiceEntry, service: &ServiceFacts) -> impl Iterator<Item = SocketAddr> {
        service.ports.iter().flat_map(|port| self.ready(&entry.slices, &port.name))
    }
}

fn shared_endpoint(service: &ObjectKey, endpoint: SocketAddr, target: Target, guard: &ObjectKey) -> Problem {
    let guard = ObjectRef { kind: Kind::Service, key: guard.clone() };
    let whose = match target {
        Target::Endpoint(_) => format!("is one of {guard} too"),
        Target::NodePort(_) => format!("has the NodePort of {guard}"),
    };
    Problem {
        severity: Severity::Warning,
        reason: "shared-endpoint",
        object: ObjectRef { kind: Kind::Service, key: service.clone() },
        field: String::new(),
        message: format!("its endpoint {endpoint} {whose}, whose allow list holds here as well"),
        remedy: "remove the endpoint from the EndpointSlice where it does not belong".into(),
    }
}
