//! The book of objects that routes are made of: told of every change, it keeps the route table in line.
//!
//! [`RouteBook::apply`] notes what an object says, settles at once who owns which key (`claims`) and marks the
//! Services concerned; [`RouteBook::commit`] recomputes those, and only those, and returns a new table with the list of what
//! changed. A burst of changes is many `apply` and one `commit`. The cost of a commit grows with what changed, not with
//! what is there.
//!
//! The order in which objects arrive makes no difference to the table. An object that is applied again unchanged costs a
//! comparison.
//!
//! Whole objects are not kept, only the facts in `facts`.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::Arc;

use hashbrown::HashTable;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::ObjectKey;
use portico_api::policy::ClusterPolicy;
use portico_api::service::Service;
use slab::Slab;
use smallvec::SmallVec;

use crate::claims::{Claim, Claims};
use crate::facts::{Age, Origin, ServiceFacts, SliceFacts};
use crate::route::{Backend, BackendId, RouteKey};
use crate::table::{RouteTable, Update};
use crate::{annotations, endpoints};
use portico_api::intern::Interner;

/// What a book looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The annotation that exposes a Service: [`portico_api::annotations::EXPOSE`], unless configured otherwise.
    pub expose_annotation: Box<str>,
    /// The one namespace to look at; `None` for all of them.
    pub namespace: Option<Box<str>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { expose_annotation: portico_api::annotations::EXPOSE.into(), namespace: None }
    }
}

/// An object that came, changed or went.
#[derive(Debug, Clone)]
pub enum Change {
    /// A Service that somebody wrote is there, as follows.
    Service(Service),
    /// A Service that is planned for the Cluster in its namespace is there, as follows. No written one can take a key from it.
    Planned(Service),
    /// A Service is gone.
    RemoveService(ObjectKey),
    /// An EndpointSlice is there, as follows.
    EndpointSlice(EndpointSlice),
    /// An EndpointSlice is gone.
    RemoveEndpointSlice(ObjectKey),
    /// The user cluster whose control plane lives in this namespace has this policy.
    Policy(Arc<str>, Arc<ClusterPolicy>),
    /// No policy is known for this namespace any more; the annotations of its Services count again.
    RemovePolicy(Arc<str>),
}

/// Every object that routes are made of, and the table that follows from them.
#[derive(Debug)]
pub struct RouteBook {
    settings: Settings,
    names: Interner,
    pub(crate) slots: Slab<Slot>,
    pub(crate) slices: Slab<SliceFacts>,
    /// Where a key stands in `slots` and in `slices`. Tables rather than maps: the keys are there already.
    slots_by_key: HashTable<u32>,
    slices_by_key: HashTable<u32>,
    hasher: RandomState,
    pub(crate) namespaces: HashMap<Arc<str>, Namespace>,
    pub(crate) claims: Claims,
    pub(crate) table: RouteTable,
    /// Slots to look at in the next commit.
    pub(crate) dirty: BTreeSet<u32>,
    /// Keys that lost their last claim since the last commit.
    pub(crate) vacated: BTreeSet<RouteKey>,
    problems_version: u64,
}

/// A Service and its slices: either may be there without the other.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The Service's key.
    pub(crate) key: ObjectKey,
    /// The Service, if it is there and carries the annotation.
    pub(crate) service: Option<Box<ServiceFacts>>,
    /// Its slices, in no particular order: indices into [`RouteBook::slices`].
    slices: SmallVec<[u32; 4]>,
    /// Backends in the table, each with at least one route that leads to it.
    pub(crate) announced: SmallVec<[Arc<Backend>; 1]>,
}

impl Slot {
    pub(crate) fn is_empty(&self) -> bool {
        self.service.is_none() && self.slices.is_empty() && self.announced.is_empty()
    }
}

/// What is known about a namespace. Kept while it has a slot or a policy.
#[derive(Debug)]
pub(crate) struct Namespace {
    /// The policy of its user cluster: what a source said, else one that is open.
    pub(crate) policy: Arc<ClusterPolicy>,
    /// Whether a source said so.
    pub(crate) known: bool,
    /// Its slots.
    pub(crate) members: SmallVec<[u32; 4]>,
}

impl Namespace {
    fn open(name: &str) -> Self {
        Self { policy: ClusterPolicy::open_for_namespace(name), known: false, members: SmallVec::new() }
    }

    /// The policy that holds for `service`.
    pub(crate) fn policy_for<'a>(&'a self, service: &'a ServiceFacts) -> &'a Arc<ClusterPolicy> {
        match &service.own_policy {
            Some(own) if !self.known => own,
            _ => &self.policy,
        }
    }
}

impl RouteBook {
    /// An empty book.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            names: Interner::default(),
            slots: Slab::new(),
            slices: Slab::new(),
            slots_by_key: HashTable::new(),
            slices_by_key: HashTable::new(),
            hasher: RandomState::new(),
            namespaces: HashMap::new(),
            claims: Claims::default(),
            table: RouteTable::default(),
            dirty: BTreeSet::new(),
            vacated: BTreeSet::new(),
            problems_version: 0,
        }
    }

    /// Notes one change. The table follows with the next [`Self::commit`].
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Service(service) => self.note_service(&service, Origin::Written),
            Change::Planned(service) => self.note_service(&service, Origin::Planned),
            Change::RemoveService(key) => self.forget_service(&key),
            Change::EndpointSlice(slice) => self.note_slice(&slice),
            Change::RemoveEndpointSlice(key) => self.forget_slice(&key),
            Change::Policy(namespace, policy) => self.note_policy(&namespace, Some(policy)),
            Change::RemovePolicy(namespace) => self.note_policy(&namespace, None),
        }
    }

    /// Brings the table in line with every change applied so far. `None` if no route changed.
    pub fn commit(&mut self) -> Option<Update> {
        crate::commit::commit(self)
    }

    /// The table as of the last commit.
    pub fn table(&self) -> &RouteTable {
        &self.table
    }

    /// Whether nothing is kept of any object: all that were applied are gone, and committed as gone.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
            && self.slices.is_empty()
            && self.slots_by_key.is_empty()
            && self.slices_by_key.is_empty()
            && self.namespaces.is_empty()
            && self.claims.is_empty()
            && self.dirty.is_empty()
            && self.vacated.is_empty()
    }

    /// Grows whenever [`Self::problems`] may have changed, so that nobody needs to look at all of them after each commit.
    pub fn problems_version(&self) -> u64 {
        self.problems_version
    }

    // === Services ===

    fn note_service(&mut self, service: &Service, origin: Origin) {
        let key = service.metadata.key();
        if !self.is_in_scope(&key.namespace) {
            return;
        }
        match annotations::read(service, origin, &self.settings.expose_annotation, &mut self.names) {
            Some(facts) => {
                let slot = self.slot(&key);
                self.set_service(slot, Some(Box::new(facts)));
            }
            None => self.forget_service(&key),
        }
    }

    fn forget_service(&mut self, key: &ObjectKey) {
        if let Some(slot) = self.find_slot(key) {
            self.set_service(slot, None);
        }
    }

    fn set_service(&mut self, slot: u32, facts: Option<Box<ServiceFacts>>) {
        let before = &self.slots[slot as usize].service;
        if *before == facts {
            return;
        }
        let any = |facts: &Option<Box<ServiceFacts>>| {
            facts.as_ref().is_some_and(|facts| !facts.problems.is_empty() || facts.own_policy.is_some())
        };
        if any(before) || any(&facts) {
            self.problems_version += 1;
        }
        self.withdraw(slot);
        self.slots[slot as usize].service = facts;
        self.claim(slot);
        self.dirty.insert(slot);
    }

    // === EndpointSlices ===

    fn note_slice(&mut self, slice: &EndpointSlice) {
        let key = slice.metadata.key();
        if !self.is_in_scope(&key.namespace) {
            return;
        }
        let Some(service) = endpoints::service_name(slice) else { return self.forget_slice(&key) };
        let service = ObjectKey { namespace: Arc::clone(&key.namespace), name: self.names.get(service) };
        let slot = self.slot(&service);
        let facts = endpoints::read(slice, slot, &mut self.names);
        let place = self.find_slice(&key);
        let before = place.map(|place| &self.slices[place as usize]);
        if before.is_some_and(|before| *before == facts) {
            return;
        }
        let has_problems = !facts.problems.is_empty();
        let had_problems = before.is_some_and(|before| !before.problems.is_empty());
        self.problems_version += u64::from(has_problems || had_problems);
        self.dirty.insert(slot);
        match place {
            Some(place) if self.slices[place as usize].slot == slot => self.slices[place as usize] = facts,
            _ => {
                self.forget_slice(&key);
                self.add_slice(facts);
            }
        }
    }

    fn add_slice(&mut self, facts: SliceFacts) {
        let slot = &mut self.slots[facts.slot as usize];
        let hash = self.hasher.hash_one((&slot.key.namespace, &facts.name));
        let place =
            u32::try_from(self.slices.insert(facts)).expect("memory ends long before 2^32 EndpointSlices");
        slot.slices.push(place);
        self.slices_by_key.insert_unique(hash, place, |&other| {
            let other = &self.slices[other as usize];
            self.hasher.hash_one((&self.slots[other.slot as usize].key.namespace, &other.name))
        });
    }

    fn forget_slice(&mut self, key: &ObjectKey) {
        let Some(place) = self.find_slice(key) else { return };
        let hash = self.hasher.hash_one((&key.namespace, &key.name));
        if let Ok(entry) = self.slices_by_key.find_entry(hash, |&other| other == place) {
            entry.remove();
        }
        let gone = self.slices.remove(place as usize);
        self.slots[gone.slot as usize].slices.retain(|&mut other| other != place);
        self.problems_version += u64::from(!gone.problems.is_empty());
        self.dirty.insert(gone.slot);
    }

    fn find_slice(&self, key: &ObjectKey) -> Option<u32> {
        let hash = self.hasher.hash_one((&key.namespace, &key.name));
        let is = |&place: &u32| {
            let slice = &self.slices[place as usize];
            slice.name == key.name && self.slots[slice.slot as usize].key.namespace == key.namespace
        };
        self.slices_by_key.find(hash, is).copied()
    }

    /// What the slices of the Service in `slot` say.
    pub(crate) fn slices_of<'a>(&'a self, slot: &'a Slot) -> impl Iterator<Item = &'a SliceFacts> {
        slot.slices.iter().map(|&place| &self.slices[place as usize])
    }

    // === Policies ===

    fn note_policy(&mut self, name: &Arc<str>, policy: Option<Arc<ClusterPolicy>>) {
        if !self.is_in_scope(name) {
            return;
        }
        let name = self.namespace_name(name);
        let known = policy.is_some();
        let policy = policy.unwrap_or_else(|| ClusterPolicy::open_for_namespace(&name));
        let namespace = self.namespaces.entry(Arc::clone(&name)).or_insert_with(|| Namespace::open(&name));
        if namespace.known != known || namespace.policy != policy {
            let members = mem::take(&mut namespace.members);
            // Claims depend on the policy: a NodePort number is claimed only where listeners are allowed.
            members.iter().for_each(|&slot| self.withdraw(slot));
            self.namespaces.insert(Arc::clone(&name), Namespace { policy, known, members: members.clone() });
            for slot in members {
                self.claim(slot);
                self.dirty.insert(slot);
            }
            self.problems_version += 1;
        }
        self.drop_idle_namespace(&name);
    }

    /// The copy of `name` that everything in the namespace shares.
    fn namespace_name(&self, name: &Arc<str>) -> Arc<str> {
        Arc::clone(self.namespaces.get_key_value(name).map_or(name, |(known, _)| known))
    }

    fn drop_idle_namespace(&mut self, name: &Arc<str>) {
        if self.namespaces.get(name).is_some_and(|namespace| !namespace.known && namespace.members.is_empty())
        {
            self.namespaces.remove(name);
        }
    }

    // === Slots ===

    fn is_in_scope(&self, namespace: &str) -> bool {
        self.settings.namespace.as_ref().is_none_or(|only| **only == *namespace)
    }

    fn find_slot(&self, key: &ObjectKey) -> Option<u32> {
        let is = |&slot: &u32| self.slots[slot as usize].key == *key;
        self.slots_by_key.find(self.hasher.hash_one(key), is).copied()
    }

    /// The slot of the Service named `key`; an empty one if nothing is known about it yet.
    fn slot(&mut self, key: &ObjectKey) -> u32 {
        if let Some(slot) = self.find_slot(key) {
            return slot;
        }
        let namespace = self.namespace_name(&key.namespace);
        let key = ObjectKey { namespace: Arc::clone(&namespace), name: self.names.share(&key.name) };
        let hash = self.hasher.hash_one(&key);
        let empty = Slot { key, service: None, slices: SmallVec::new(), announced: SmallVec::new() };
        let slot = u32::try_from(self.slots.insert(empty)).expect("memory ends long before 2^32 Services");
        let rehash = |&other: &u32| self.hasher.hash_one(&self.slots[other as usize].key);
        self.slots_by_key.insert_unique(hash, slot, rehash);
        let open = || Namespace::open(&namespace);
        self.namespaces.entry(Arc::clone(&namespace)).or_insert_with(open).members.push(slot);
        slot
    }

    /// Gives an empty slot back.
    pub(crate) fn free(&mut self, slot: u32) {
        let gone = self.slots.remove(slot as usize);
        let hash = self.hasher.hash_one(&gone.key);
        if let Ok(entry) = self.slots_by_key.find_entry(hash, |&other| other == slot) {
            entry.remove();
        }
        if let Some(namespace) = self.namespaces.get_mut(&gone.key.namespace) {
            namespace.members.retain(|&mut member| member != slot);
        }
        self.drop_idle_namespace(&gone.key.namespace);
    }

    // === Claims ===

    /// The slots that hold an annotated Service.
    pub(crate) fn exposed(&self) -> impl Iterator<Item = (u32, &Slot, &ServiceFacts)> {
        self.slots.iter().filter_map(|(index, slot)| Some((index as u32, slot, slot.service.as_deref()?)))
    }

    /// The keys that the Service in `slot` claims, each with the port that claims it.
    pub(crate) fn keys(&self, slot: u32) -> Vec<(RouteKey, Claim)> {
        let Slot { key, service: Some(service), .. } = &self.slots[slot as usize] else { return Vec::new() };
        let listeners =
            self.namespaces.get(&key.namespace).is_none_or(|known| known.policy.node_port_listeners);
        let ports = (0u16..).zip(&service.ports);
        ports
            .flat_map(|(port, facts)| {
                facts.keys(listeners).map(move |(kind, key)| (key, Claim { slot, port, kind }))
            })
            .collect()
    }

    /// The Service port behind a claim.
    pub(crate) fn backend_id(&self, claim: Claim) -> Option<BackendId> {
        let slot = self.slots.get(claim.slot as usize)?;
        let port = slot.service.as_ref()?.ports.get(usize::from(claim.port))?;
        Some(port.backend_id(&slot.key))
    }

    /// The claim that owns `key`.
    pub(crate) fn owner(&self, key: &RouteKey) -> Option<Claim> {
        self.claims.owner(key, |claim| key_of(&self.slots, claim))
    }

    fn claim(&mut self, slot: u32) {
        for (key, claim) in self.keys(slot) {
            let slots = &self.slots;
            let order = |a: Claim, b: Claim| rank(slots, a).cmp(&rank(slots, b));
            if let Some(owner) = self.claims.add(&key, claim, |claim| key_of(slots, claim), order) {
                self.dirty.insert(owner.slot);
                self.problems_version += 1;
            }
        }
    }

    fn withdraw(&mut self, slot: u32) {
        for (key, claim) in self.keys(slot) {
            match self.claims.withdraw(&key, claim, |claim| key_of(&self.slots, claim)) {
                Some(owner) => {
                    self.dirty.insert(owner.slot);
                    self.problems_version += 1;
                }
                None => {
                    self.vacated.insert(key);
                }
            }
        }
    }
}

/// The key that a claim is for.
fn key_of(slots: &Slab<Slot>, claim: Claim) -> RouteKey {
    let service = slots[claim.slot as usize].service.as_ref();
    let key = service.and_then(|service| service.ports.get(usize::from(claim.port))?.key(claim.kind));
    key.expect("a claim is withdrawn before the port changes that makes it")
}

/// What decides between two claims: why their Services are there, the Services' age, then their names, then the order of the
/// ports.
fn rank(slots: &Slab<Slot>, claim: Claim) -> (Option<(Origin, &Age)>, &ObjectKey, u16) {
    let slot = &slots[claim.slot as usize];
    (slot.service.as_ref().map(|service| (service.origin, &service.age)), &slot.key, claim.port)
}
