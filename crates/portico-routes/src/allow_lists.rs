//! Endpoints behind an allow list, and which other Services that list holds for.
//!
//! An EndpointSlice can name the API server of another tenant as an endpoint of its own Service. So an allow
//! list follows the endpoint. If the endpoint of a Service is also one of another tenant's Services, only
//! clients that both lists admit are admitted. That other Service may be exposed or not, ready or not. The
//! same holds for an endpoint that has the NodePort of another tenant's Service, on whatever address: every
//! node leads there. The list of a cluster holds for everybody, that of a namespace only for other
//! namespaces: a namespace must not close a cluster.
//!
//! An endpoint is an address with its port: several control planes may share a machine.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::Tenant;
use portico_api::policy::ClusterPolicy;
use portico_api::problem::{Problem, Severity};

use crate::facts::ServiceFacts;
use crate::index::{RouteIndex, ServiceEntry};
use crate::targets::Target;

/// The policies of the ports of one Service, by the Services whose allow lists hold for them as well. So
/// ports with the same endpoints share one: a list may have thousands of networks.
pub(crate) type NarrowedPolicies<'a> = BTreeMap<BTreeSet<&'a ObjectKey>, Arc<ClusterPolicy>>;

impl RouteIndex {
    /// Takes over the allow lists and targets of the Services that changed, and marks the other Services with
    /// an endpoint at one of these targets.
    pub(crate) fn follow_allow_lists(&mut self) {
        let mut concerned = BTreeSet::new();
        for key in &self.changed {
            let has_list = || !self.policy_of(key).allow.networks().is_empty();
            let entry = self.services.get(key).filter(|_| has_list());
            let targets = entry.map(|entry| Target::all(&entry.slices, entry.reach.as_deref()));
            if targets.is_some() || self.targets.has(key) {
                let targets = targets.unwrap_or_default();
                concerned.extend(&targets);
                concerned.append(&mut self.targets.set(key, targets));
            }
        }
        if !concerned.is_empty() {
            self.mark_sharers(&concerned);
        }
        self.follow_shared_endpoints();
    }

    /// Marks the Services with an endpoint at one of these targets.
    fn mark_sharers(&mut self, concerned: &BTreeSet<Target>) {
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

    /// Notes which of the Services that changed have a problem with a shared endpoint, or had one.
    fn follow_shared_endpoints(&mut self) {
        let changed = mem::take(&mut self.changed);
        for key in &changed {
            let shares =
                self.services.get(key).is_some_and(|entry| self.shared_endpoint(key, entry).is_some());
            if let Some(entry) = self.services.get_mut(key) {
                self.problems_version += u64::from(shares || entry.shares_endpoint);
                entry.shares_endpoint = shares;
            }
        }
        self.changed = changed;
    }

    /// `policy` of `service`, with the allow lists of other tenants that hold for these endpoints as well.
    /// `narrowed` has those of its other ports.
    pub(crate) fn with_allow_lists<'a>(
        &'a self,
        policy: &Arc<ClusterPolicy>,
        service: &ObjectKey,
        endpoints: &[SocketAddr],
        narrowed: &mut NarrowedPolicies<'a>,
    ) -> Arc<ClusterPolicy> {
        let owners: BTreeSet<&'a ObjectKey> =
            self.owners_of(service, endpoints).map(|(_, _, owner)| owner).collect();
        if owners.is_empty() {
            return Arc::clone(policy);
        }
        let narrow = |owners: &BTreeSet<&'a ObjectKey>| {
            let lists = owners.iter().map(|owner| self.policy_of(owner));
            let allow = lists.fold(policy.allow.clone(), |allow, list| allow.intersection(&list.allow));
            Arc::new(ClusterPolicy { allow, ..ClusterPolicy::clone(policy) })
        };
        Arc::clone(narrowed.entry(owners).or_insert_with_key(narrow))
    }

    /// Every Service whose endpoint is behind the allow list of another tenant.
    pub(crate) fn shared_endpoints(&self) -> impl Iterator<Item = Problem> {
        self.services.iter().filter_map(|(key, entry)| {
            let (endpoint, target, owner) = self.shared_endpoint(key, entry)?;
            Some(shared_endpoint(key, endpoint, target, owner))
        })
    }

    /// The first endpoint of a Service that is behind the allow list of another tenant's, and why it is.
    fn shared_endpoint(
        &self,
        service: &ObjectKey,
        entry: &ServiceEntry,
    ) -> Option<(SocketAddr, Target, &ObjectKey)> {
        if self.targets.is_empty() {
            return None;
        }
        let endpoints: Vec<SocketAddr> = self.endpoints_of(entry, entry.service.as_deref()?).collect();
        self.owners_of(service, &endpoints).next()
    }

    /// The Services of other tenants whose allow lists hold for `endpoints` of `service`.
    fn owners_of<'a>(
        &'a self,
        service: &ObjectKey,
        endpoints: &[SocketAddr],
    ) -> impl Iterator<Item = (SocketAddr, Target, &'a ObjectKey)> {
        let tenant = (!self.targets.is_empty()).then(|| Tenant::of_namespace(&service.namespace));
        tenant.into_iter().flat_map(move |tenant| {
            let targets =
                endpoints.iter().flat_map(|&endpoint| Target::of(endpoint).map(|target| (endpoint, target)));
            let owners = targets.flat_map(|(endpoint, target)| {
                let services = self.targets.services_at(target);
                services.iter().map(move |owner| (endpoint, target, owner))
            });
            owners.filter(move |(_, _, owner)| {
                owner.namespace != service.namespace
                    && (Tenant::of_namespace(&owner.namespace).is_cluster() || !tenant.is_cluster())
            })
        })
    }

    /// The ready endpoints of every exposed port.
    fn endpoints_of(&self, entry: &ServiceEntry, service: &ServiceFacts) -> impl Iterator<Item = SocketAddr> {
        service.ports.iter().flat_map(|port| self.ready(&entry.slices, &port.name))
    }
}

fn shared_endpoint(service: &ObjectKey, endpoint: SocketAddr, target: Target, owner: &ObjectKey) -> Problem {
    let owner = ObjectRef { kind: Kind::Service, key: owner.clone() };
    let whose = match target {
        Target::Endpoint(_) => format!("is one of {owner} too"),
        Target::NodePort(_) => format!("has the NodePort of {owner}"),
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
