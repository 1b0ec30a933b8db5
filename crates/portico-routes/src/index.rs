//! The index of all objects that routes are made of.
//!
//! [`RouteIndex::apply`] records what an object says, decides which Service owns each key (`claims`) and
//! marks the Services concerned. [`RouteIndex::commit`] recomputes the marked Services and returns what
//! changed. A burst of changes is many `apply` and one `commit`. The routes of a commit cost in proportion to
//! the change. Beside that it looks once through the Services by which the gateway may be reached.
//!
//! The routes depend on the objects, and not on the order of their arrival. The exceptions are in `claims`:
//! a name that is kept, and a key that a Service of a directory holds. An unchanged object that is applied
//! again changes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use portico_api::annotations::ExposeKeys;
use portico_api::change::Change;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::intern::Interner;
use portico_api::meta::ObjectKey;
use portico_api::policy::ClusterPolicy;
use portico_api::service::Service;

use crate::claims::{Claim, Claims};
use crate::endpoint_rules::EndpointRules;
use crate::facts::{Reach, ServiceFacts, SliceFacts};
use crate::route::{Backend, Front, OwnAddresses, RouteKey};
use crate::targets::TargetIndex;

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
    /// A ClusterIP of some Service, exposed or not.
    ClusterIp(Change<IpAddr>),
}

/// Every object that routes are made of, as far as routes depend on it.
#[derive(Debug)]
pub struct RouteIndex {
    pub(crate) settings: Settings,
    pub(crate) names: Interner,
    pub(crate) services: BTreeMap<ObjectKey, ServiceEntry>,
    /// The name of the Service of each EndpointSlice, by the key of the slice.
    pub(crate) slice_services: BTreeMap<ObjectKey, Arc<str>>,
    /// The policies of user clusters, by namespace.
    pub(crate) policies: HashMap<Arc<str>, Arc<ClusterPolicy>>,
    /// Whether a cluster without a policy admits nobody.
    pub(crate) policies_required: bool,
    pub(crate) claims: Claims,
    /// The targets of the Services with an allow list.
    pub(crate) targets: TargetIndex,
    /// The ClusterIPs of all Services: a connection to one passes the allow list of that cluster by.
    pub(crate) cluster_ips: HashSet<IpAddr>,
    /// The cluster IPs that came or went since the last commit.
    pub(crate) changed_cluster_ips: HashSet<IpAddr>,
    /// Services that nodes lead to and that are not exposed here: one of them leads to the gateway.
    pub(crate) fronts: BTreeSet<ObjectKey>,
    /// The front that follows from them, as of the last commit.
    pub(crate) front: Option<Front>,
    /// The Services that claimed something since the last commit. They ask anew, also for a key that another
    /// gives up in the same burst.
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
    /// Whether the allow list of another tenant holds for it, as of the last commit.
    pub(crate) shares_endpoint: bool,
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
            targets: TargetIndex::default(),
            cluster_ips: HashSet::new(),
            changed_cluster_ips: HashSet::new(),
            fronts: BTreeSet::new(),
            front: None,
            claimants: BTreeSet::new(),
            changed: BTreeSet::new(),
            problems_version: 0,
        }
    }

    /// Whether nothing is stored of any object: every applied object was deleted, and the deletions are
    /// committed.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
            && self.slice_services.is_empty()
            && self.policies.is_empty()
            && self.claims.is_empty()
            && self.targets.is_empty()
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

    /// The entry of the Service named `key`; a new one if there is none.
    pub(crate) fn entry(&mut self, key: &ObjectKey) -> &mut ServiceEntry {
        let [namespace, name] = [&key.namespace, &key.name].map(|text| self.names.share(text));
        self.services.entry(ObjectKey { namespace, name }).or_default()
    }

    /// The keys that `service` claims, each with the port that claims it.
    pub(crate) fn claims_of(&self, service: &Arc<ServiceFacts>) -> Vec<(RouteKey, Claim)> {
        let policy = self.policies.get(&service.key.namespace);
        let listeners = policy.is_none_or(|policy| policy.node_port_listeners);
        let mut claims = Vec::new();
        for port in Claim::of_each_port(service, policy.is_some()) {
            let keys = port.port().keys(listeners);
            claims.extend(keys.map(|key| {
                let claim = port.to(&key, policy.map(|policy| &**policy));
                (key, claim)
            }));
        }
        claims
    }

    pub(crate) fn add_claims(&mut self, service: &Arc<ServiceFacts>) {
        for (key, claim) in self.claims_of(service) {
            let holder = self.in_force(&key, &claim);
            let owners = self.claims.add(key.clone(), claim, holder);
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
            if let Some(owners) = self.claims.make_room(&service.key.namespace) {
                self.problems_version += 1;
                self.mark(owners);
            }
        }
    }

    /// The claim whose Service has `key` since the last commit: that of its owner, or `claim`, which asks for
    /// it. In a seed cluster age decides, as for KKP's proxy, and it need not be known.
    fn in_force(&self, key: &RouteKey, claim: &Claim) -> Option<Claim> {
        if self.settings.in_kubernetes {
            return None;
        }
        let owner = self.claims.owner(key).filter(|owner| owner.service.key != claim.service.key)?;
        let has_it = |claim: &&Claim| {
            let entry = self.services.get(&claim.service.key);
            entry.is_some_and(|entry| entry.published.iter().any(|route| route.key == *key))
        };
        [owner, claim].into_iter().find(has_it).cloned()
    }

    fn follow_claim(&mut self, key: &RouteKey, owners: [Option<Claim>; 2]) {
        self.problems_version += u64::from(self.claims.is_contested(key));
        self.mark(owners);
    }

    /// Notes that these Services may gain or lose a key.
    pub(crate) fn mark(&mut self, owners: [Option<Claim>; 2]) {
        self.changed.extend(owners.into_iter().flatten().map(|owner| owner.service.key.clone()));
    }
}
