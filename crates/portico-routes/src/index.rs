//! The index of all objects that routes are made of: takes every change and says what it means for the
//! routes.
//!
//! [`RouteIndex::apply`] records what an object says, decides which Service owns each key (`claims`) and
//! marks the Services concerned. [`RouteIndex::commit`] recomputes the marked Services and returns what
//! changed. A burst of changes is many `apply` and one `commit`. The cost of a commit grows with what
//! changed.
//!
//! The routes depend on the objects alone, not on the order of their arrival. An unchanged object that is
//! applied again changes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use portico_api::annotations::ExposeKeys;
use portico_api::change::{Change, Keyed};
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::intern::Interner;
use portico_api::meta::ObjectKey;
use portico_api::policy::ClusterPolicy;
use portico_api::service::Service;

use crate::allow_lists::AllowListIndex;
use crate::annotations;
use crate::claims::{Claim, Claims};
use crate::endpoint_rules::EndpointRules;
use crate::endpoints::{self, MAX_ENDPOINTS};
use crate::facts::{Origin, Reach, ServiceFacts, SliceFacts};
use crate::route::{Backend, Front, OwnAddresses, RouteKey};
use crate::table::Update;

/// Which objects the index takes into account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The annotations that expose a Service.
    pub expose_annotations: ExposeKeys,
    /// The one namespace to watch; `None` for all of them.
    pub namespace: Option<Box<str>>,
    /// Which addresses may be endpoints.
    pub endpoints: EndpointRules,
    /// Whether every node leads to Services by ClusterIP and NodePort: in a Kubernetes cluster.
    pub in_kubernetes: bool,
    /// Addresses of the gateway itself, and ports of its listeners that are not NodePorts.
    pub own: OwnAddresses,
}

/// A change to one of the objects that routes are made of.
#[derive(Debug, Clone)]
pub enum IndexChange {
    /// A Service that a user wrote.
    Service(Change<Arc<Service>>),
    /// A Service that is planned for the Cluster in its namespace. It wins every conflict with a written one.
    /// A deletion means the same here and in [`Self::Service`].
    PlannedService(Change<Arc<Service>>),
    /// An EndpointSlice.
    EndpointSlice(Change<Box<EndpointSlice>>),
    /// The policy of a user cluster. Without one, the annotations of the Services in its namespace count.
    Policy(Change<Arc<ClusterPolicy>>),
    /// From now on, every cluster has a policy: a Service in the namespace of one without admits nobody.
    PoliciesRequired,
    /// The address is a ClusterIP of some Service, exposed or not, or no longer.
    ClusterIp {
        /// The address.
        address: IpAddr,
        /// Whether a Service has it.
        exists: bool,
    },
}

/// Every object that routes are made of, as far as routes depend on it.
#[derive(Debug)]
pub struct RouteIndex {
    settings: Settings,
    pub(crate) names: Interner,
    pub(crate) services: BTreeMap<ObjectKey, ServiceEntry>,
    /// The name of the Service of each EndpointSlice, by the key of the slice.
    slice_services: BTreeMap<ObjectKey, Arc<str>>,
    /// The policies of user clusters, by namespace.
    pub(crate) policies: HashMap<Arc<str>, Arc<ClusterPolicy>>,
    /// Whether a cluster without a policy admits nobody.
    pub(crate) policies_required: bool,
    pub(crate) claims: Claims,
    pub(crate) allow_lists: AllowListIndex,
    /// The ClusterIPs of all Services: a connection to one passes the allow list of that cluster by.
    pub(crate) cluster_ips: HashSet<IpAddr>,
    /// Those that came or went since the last commit.
    pub(crate) changed_cluster_ips: HashSet<IpAddr>,
    /// Services that nodes lead to and that are not exposed here: one of them leads to the gateway.
    pub(crate) fronts: BTreeSet<ObjectKey>,
    /// What follows from them, as of the last commit.
    pub(crate) front: Option<Front>,
    /// The Services that claimed something since the last commit: they ask anew, also for what another gives
    /// up in the same burst.
    pub(crate) claimants: BTreeSet<ObjectKey>,
    /// The Services to recompute in the next commit.
    pub(crate) changed: BTreeSet<ObjectKey>,
    pub(crate) problems_version: u64,
}

/// A Service and its EndpointSlices. Either may exist without the other.
#[derive(Debug, Default)]
pub(crate) struct ServiceEntry {
    /// The Service, if it exists and carries the annotation.
    pub(crate) service: Option<Arc<ServiceFacts>>,
    /// How nodes lead to it, exposed or not.
    pub(crate) reach: Option<Box<Reach>>,
    /// Its EndpointSlices, by name: of too many endpoints, the same are used wherever they came from.
    pub(crate) slices: Vec<SliceFacts>,
    /// Its routes as of the last commit, in the order of its ports.
    pub(crate) published: Box<[PublishedRoute]>,
}

/// A key that leads to a Service since some earlier commit.
#[derive(Debug)]
pub(crate) struct PublishedRoute {
    pub(crate) key: RouteKey,
    /// The backend as it was last published.
    pub(crate) backend: Arc<Backend>,
}

impl ServiceEntry {
    pub(crate) fn is_empty(&self) -> bool {
        self.service.is_none() && self.reach.is_none() && self.slices.is_empty() && self.published.is_empty()
    }
}

impl RouteIndex {
    /// An index without objects.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            names: Interner::default(),
            services: BTreeMap::new(),
            slice_services: BTreeMap::new(),
            policies: HashMap::new(),
            policies_required: false,
            claims: Claims::default(),
            allow_lists: AllowListIndex::default(),
            cluster_ips: HashSet::new(),
            changed_cluster_ips: HashSet::new(),
            fronts: BTreeSet::new(),
            front: None,
            claimants: BTreeSet::new(),
            changed: BTreeSet::new(),
            problems_version: 0,
        }
    }

    /// Records one change. The routes follow with the next [`Self::commit`].
    pub fn apply(&mut self, change: IndexChange) {
        match change {
            IndexChange::Service(Change::Apply(service)) => self.apply_service(&service, Origin::Written),
            IndexChange::PlannedService(Change::Apply(service)) => {
                self.apply_service(&service, Origin::Planned);
            }
            IndexChange::Service(Change::Delete(key)) => {
                self.set_reach(&key, None, false);
                self.delete_service(&key, true);
            }
            // Nobody deletes a planned Service by mistake: it is not wanted any more.
            IndexChange::PlannedService(Change::Delete(key)) => {
                self.set_reach(&key, None, false);
                self.delete_service(&key, false);
            }
            IndexChange::EndpointSlice(Change::Apply(slice)) => self.apply_slice(&slice),
            IndexChange::EndpointSlice(Change::Delete(key)) => self.delete_slice(&key),
            IndexChange::Policy(Change::Apply(policy)) => self.set_policy(&policy.key(), Some(policy)),
            IndexChange::Policy(Change::Delete(tenant)) => self.set_policy(&tenant, None),
            IndexChange::PoliciesRequired => self.require_policies(),
            IndexChange::ClusterIp { address, exists } => self.set_cluster_ip(address, exists),
        }
    }

    /// Returns how the routes change with everything applied since the last commit; `None` if they stay.
    pub fn commit(&mut self) -> Option<Update> {
        crate::commit::commit(self)
    }

    /// Whether nothing is stored of any object: every applied object was deleted, and the deletions are
    /// committed.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
            && self.slice_services.is_empty()
            && self.policies.is_empty()
            && self.claims.is_empty()
            && self.allow_lists.is_empty()
            && self.cluster_ips.is_empty()
            && self.fronts.is_empty()
            && self.changed.is_empty()
    }

    /// Grows whenever [`Self::problems`] may have changed, so that a caller need not compare them after each
    /// commit.
    pub fn problems_version(&self) -> u64 {
        self.problems_version
    }

    pub(crate) fn own(&self) -> &OwnAddresses {
        &self.settings.own
    }

    pub(crate) fn is_in_scope(&self, namespace: &str) -> bool {
        self.settings.namespace.as_ref().is_none_or(|only| **only == *namespace)
    }

    // === Services ===

    fn apply_service(&mut self, service: &Service, origin: Origin) {
        let key = service.key();
        if !self.is_in_scope(&key.namespace) {
            return;
        }
        let facts = annotations::read(service, origin, &self.settings.expose_annotations, &mut self.names);
        let reach = Some(service).filter(|_| self.settings.in_kubernetes).and_then(Reach::of);
        self.set_reach(&key, reach, facts.is_none());
        match facts {
            Some(facts) => self.set_service(&key, Some(facts), true),
            None => self.delete_service(&key, false),
        }
    }

    /// `is_front` says whether it may be a Service that leads to the gateway.
    fn set_reach(&mut self, key: &ObjectKey, reach: Option<Box<Reach>>, is_front: bool) {
        if reach.is_some() && is_front {
            self.fronts.insert(key.clone());
        } else {
            self.fronts.remove(key);
        }
        let before = self.services.get(key).and_then(|entry| entry.reach.as_ref());
        if before != reach.as_ref() {
            self.entry(key).reach = reach;
            self.changed.insert(key.clone());
        }
    }

    fn delete_service(&mut self, key: &ObjectKey, keep_names: bool) {
        if self.services.contains_key(key) {
            self.set_service(key, None, keep_names);
        }
    }

    /// `keep_names` says whether the names of a Service that goes are kept for its namespace, since it may be
    /// made anew.
    fn set_service(&mut self, key: &ObjectKey, facts: Option<ServiceFacts>, keep_names: bool) {
        let before = self.entry(key).service.clone();
        if before.as_deref() == facts.as_ref() {
            return;
        }
        let facts = facts.map(Arc::new);
        let concerned = |facts: &Arc<ServiceFacts>| {
            !facts.problems.is_empty()
                || facts.own_policy.is_some()
                || self.lacks_policy(&facts.key.namespace)
        };
        let entry = self.services.get(key);
        if before.iter().chain(&facts).any(concerned) || entry.is_some_and(|it| have_problems(&it.slices)) {
            self.problems_version += 1;
        }
        if let Some(before) = &before {
            // A change of age says that it was deleted and made anew between two looks.
            self.claimants.remove(&before.key);
            let is_another = facts.as_ref().is_none_or(|facts| facts.age != before.age);
            self.withdraw_claims(before, keep_names && is_another);
        }
        if let Some(facts) = &facts {
            self.claimants.insert(facts.key.clone());
            self.add_claims(facts);
        }
        self.entry(key).service = facts;
        self.changed.insert(key.clone());
    }

    /// The entry of the Service named `key`; a new one if there is none.
    fn entry(&mut self, key: &ObjectKey) -> &mut ServiceEntry {
        let [namespace, name] = [&key.namespace, &key.name].map(|text| self.names.share(text));
        self.services.entry(ObjectKey { namespace, name }).or_default()
    }

    // === EndpointSlices ===

    fn apply_slice(&mut self, slice: &EndpointSlice) {
        if !self.is_in_scope(&slice.metadata.namespace) {
            return;
        }
        let namespace = self.names.share(&slice.metadata.namespace);
        let key = ObjectKey { namespace: Arc::clone(&namespace), name: Arc::clone(&slice.metadata.name) };
        let Some(service) = slice.service_name() else { return self.delete_slice(&key) };
        let service = ObjectKey { namespace, name: self.names.get(service) };
        if self.slice_services.get(&key).is_some_and(|before| *before != service.name) {
            self.delete_slice(&key);
        }
        let facts = endpoints::read(slice, &self.settings.endpoints, &mut self.names);
        let slices = &mut self.entry(&service).slices;
        let position = slices.binary_search_by(|other| other.name.cmp(&facts.name));
        if position.is_ok_and(|position| slices[position] == facts) {
            return;
        }
        let mut has_problems = have_problems(slices) || !facts.problems.is_empty();
        match position {
            Ok(position) => slices[position] = facts,
            Err(position) => {
                // Nearly every Service has one slice: a vector would make room for four.
                if slices.is_empty() {
                    slices.reserve_exact(1);
                }
                slices.insert(position, facts);
            }
        }
        has_problems |= have_problems(slices);
        if position.is_err() {
            self.slice_services.insert(key, Arc::clone(&service.name));
        }
        self.problems_version += u64::from(has_problems || self.is_waited_for(&service));
        self.changed.insert(service);
    }

    fn delete_slice(&mut self, key: &ObjectKey) {
        let Some(service) = self.slice_services.remove(key) else { return };
        let service = ObjectKey { namespace: Arc::clone(&key.namespace), name: service };
        let slices = &mut self.entry(&service).slices;
        let had_problems = have_problems(slices);
        if let Ok(position) = slices.binary_search_by(|other| other.name.cmp(&key.name)) {
            slices.remove(position);
        }
        self.problems_version += u64::from(had_problems || self.is_waited_for(&service));
        self.changed.insert(service);
    }

    // === Claims ===

    /// The keys that `service` claims, each with the port that claims it.
    pub(crate) fn claims_of(&self, service: &Arc<ServiceFacts>) -> Vec<(RouteKey, Claim)> {
        let policy = self.policies.get(&service.key.namespace);
        let listeners = policy.is_none_or(|policy| policy.node_port_listeners);
        let mut claims = Vec::new();
        for claim in Claim::of_each_port(service, policy.is_some()) {
            claims.extend(claim.port().keys(listeners).map(|key| (key, claim.clone())));
        }
        claims
    }

    pub(crate) fn add_claims(&mut self, service: &Arc<ServiceFacts>) {
        for (key, claim) in self.claims_of(service) {
            let owners = self.claims.add(key.clone(), claim);
            self.follow_claim(&key, owners);
        }
    }

    pub(crate) fn withdraw_claims(&mut self, service: &Arc<ServiceFacts>, keep: bool) {
        for (key, claim) in self.claims_of(service) {
            self.problems_version += u64::from(self.claims.is_contested(&key));
            let is_known = self.policies.contains_key(&service.key.namespace);
            let keep = keep && (is_known || !self.claims.is_claimed_by(&key, &self.claimants));
            let owners = self.claims.withdraw(&key, &claim, keep);
            self.follow_claim(&key, owners);
        }
    }

    fn follow_claim(&mut self, key: &RouteKey, owners: [Option<Claim>; 2]) {
        self.problems_version += u64::from(self.claims.is_contested(key));
        self.changed.extend(owners.into_iter().flatten().map(|owner| owner.service.key.clone()));
    }

    /// Whether another Service waits for a key of this one: then its readiness is part of a problem.
    fn is_waited_for(&self, service: &ObjectKey) -> bool {
        let facts = self.services.get(service).and_then(|entry| entry.service.as_ref());
        facts.is_some_and(|facts| self.claims_of(facts).iter().any(|(key, _)| self.claims.is_contested(key)))
    }
}

/// Whether the slices of a Service may be a reason for a problem of their own or of the Service.
fn have_problems(slices: &[SliceFacts]) -> bool {
    slices.iter().any(|slice| !slice.problems.is_empty()) || endpoints::count(slices) > MAX_ENDPOINTS
}
