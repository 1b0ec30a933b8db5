//! The objects that an API server has, and what follows from the next watch event.
//!
//! Pure: [`crate::kubernetes`] brings the events. Unlike kube's reflector it keeps names and not objects:
//! tens of thousands of Services would be expensive. It also turns a relist into changes: an object that
//! vanished while the watch was broken is deleted.
//!
//! Nothing is synced before every watched kind has been listed once. A kind that is watched later arrives all
//! at once. Silence and errors delete nothing.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use kube::runtime::watcher;
use portico_api::annotations::ExposeKeys;
use portico_api::change::Change;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::CLUSTER_NAMESPACE_PREFIX;
use portico_api::problem::Severity;
use portico_api::service::{Service, ServiceType};

use crate::object::{InvalidObject, Object};
use crate::served::Served;
use crate::step::ManifestProblem;

/// An object of any kind as it came from the API server.
#[derive(Debug)]
pub(crate) struct Received {
    /// Kind, namespace and name.
    pub(crate) reference: ObjectRef,
    /// The object, or why it cannot be read.
    pub(crate) object: Result<Object, InvalidObject>,
    /// Of a Service, readable or not.
    pub(crate) cluster_ips: Vec<IpAddr>,
}

impl<K> From<Served<K>> for Received {
    fn from(served: Served<K>) -> Self {
        let cluster_ips = match &served.object {
            Ok(Object::Service(service)) => service.cluster_ips().collect(),
            _ => served.unread.map(|unread| unread.cluster_ips).unwrap_or_default(),
        };
        Self { reference: served.reference, object: served.object, cluster_ips }
    }
}

/// The names of all objects of one API server, and the changes that were not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Reflector {
    kinds: BTreeMap<Kind, Watched>,
    /// Services without one of these annotations are ignored, unless nodes lead to them.
    annotations: Option<ExposeKeys>,
    /// The ClusterIPs of all Services, with the number of the last listing that had each.
    cluster_ips: HashMap<IpAddr, u32>,
    /// Changes of ClusterIPs that were not taken yet.
    cluster_ip_changes: Vec<Change<IpAddr>>,
    /// With the number of the last listing of its kind that had each.
    problems: BTreeMap<ObjectRef, (u32, ManifestProblem)>,
    /// Whether every kind watched from the start has been listed.
    synced: bool,
    changes: Vec<Change<Object>>,
    problems_changed: bool,
}

/// The objects of one kind.
#[derive(Debug, Default)]
struct Watched {
    /// By `namespace/name`, or `name`: the number of the last listing that had the object.
    objects: HashMap<Box<str>, u32>,
    listing: u32,
    listed: bool,
    /// Changes of a first listing that must arrive all at once.
    held: Vec<Change<Object>>,
}

impl Reflector {
    /// Knows no object. Ignores Services without one of `annotations`, unless nodes lead to them.
    pub(crate) fn new(annotations: Option<ExposeKeys>) -> Self {
        Self { annotations, ..Self::default() }
    }

    /// From now on `kind` is watched.
    pub(crate) fn watch(&mut self, kind: Kind) {
        self.kinds.entry(kind).or_default();
    }

    /// Whether `kind` is watched.
    pub(crate) fn watches(&self, kind: Kind) -> bool {
        self.kinds.contains_key(&kind)
    }

    /// Whether `kind` has been listed once.
    pub(crate) fn has_listed(&self, kind: Kind) -> bool {
        self.kinds.get(&kind).is_some_and(|watched| watched.listed)
    }

    /// Whether there is an object of `kind`.
    pub(crate) fn has_any(&self, kind: Kind) -> bool {
        self.kinds.get(&kind).is_some_and(|watched| !watched.objects.is_empty())
    }

    /// Whether there are Services in the namespace of a cluster.
    pub(crate) fn has_services_of_clusters(&self) -> bool {
        let mut names = self.kinds.get(&Kind::Service).into_iter().flat_map(|watched| watched.objects.keys());
        names.any(|name| name.starts_with(CLUSTER_NAMESPACE_PREFIX))
    }

    /// Whether every watched kind has been listed.
    pub(crate) fn is_listed(&self) -> bool {
        self.kinds.values().all(|watched| watched.listed)
    }

    /// Applies an event of the watch of `kind`.
    pub(crate) fn apply(&mut self, kind: Kind, event: watcher::Event<Received>) {
        let Some(watched) = self.kinds.get_mut(&kind) else { return };
        match event {
            watcher::Event::Init => {
                watched.listing += 1;
                if !watched.listed {
                    // A first listing that failed half way starts again, and so do its changes.
                    watched.held.clear();
                }
            }
            watcher::Event::InitApply(received) | watcher::Event::Apply(received) => {
                self.present(kind, received);
            }
            watcher::Event::Delete(received) => {
                let ips = received.cluster_ips.into_iter();
                let gone = ips.filter(|ip| self.cluster_ips.remove(ip).is_some());
                self.cluster_ip_changes.extend(gone.map(Change::Delete));
                self.forget_problem(&received.reference);
                self.gone(kind, received.reference);
            }
            watcher::Event::InitDone => {
                let listing = watched.listing;
                let vanished: Vec<_> =
                    watched.objects.extract_if(|_, seen| *seen != listing).map(|(name, _)| name).collect();
                watched.listed = true;
                let held = std::mem::take(&mut watched.held);
                self.changes.extend(held);
                if kind == Kind::Service {
                    let gone = self.cluster_ips.extract_if(|_, seen| *seen != listing);
                    self.cluster_ip_changes.extend(gone.map(|(ip, _)| Change::Delete(ip)));
                }
                let deleted = vanished.into_iter().map(|name| Change::Delete(reference(kind, &name)));
                self.changes.extend(deleted);
                // One that was never read is no object, and vanishes too.
                let known = self.problems.len();
                self.problems.retain(|object, (seen, _)| object.kind != kind || *seen == listing);
                self.problems_changed |= self.problems.len() < known;
            }
        }
    }

    fn present(&mut self, kind: Kind, Received { reference, object, cluster_ips }: Received) {
        self.note_cluster_ips(cluster_ips);
        match object {
            Ok(object) => {
                let ignored = matches!(&object, Object::Service(service) if self.ignores(service));
                self.forget_problem(&reference);
                if ignored {
                    return self.gone(kind, reference);
                }
                self.mark(kind, &reference);
                self.push(kind, Change::Apply(object));
            }
            Err(error) => {
                // Its last good version stays, if there was one.
                if self.kinds.get(&kind).is_some_and(|kind| kind.objects.contains_key(&name_of(&reference))) {
                    self.mark(kind, &reference);
                }
                self.problems_changed = true;
                let problem = (self.listing(kind), invalid(reference.clone(), &error));
                self.problems.insert(reference, problem);
            }
        }
    }

    fn ignores(&self, service: &Service) -> bool {
        let by_nodes = matches!(service.spec.service_type, ServiceType::NodePort | ServiceType::LoadBalancer);
        !by_nodes
            && self.annotations.as_ref().is_some_and(|keys| keys.all(&service.metadata).next().is_none())
    }

    /// The number of the last listing of `kind`.
    fn listing(&self, kind: Kind) -> u32 {
        self.kinds.get(&kind).map_or(0, |watched| watched.listing)
    }

    fn note_cluster_ips(&mut self, ips: Vec<IpAddr>) {
        let listing = self.listing(Kind::Service);
        for ip in ips {
            if self.cluster_ips.insert(ip, listing).is_none() {
                self.cluster_ip_changes.push(Change::Apply(ip));
            }
        }
    }

    /// Takes the ClusterIPs that came or went.
    pub(crate) fn take_cluster_ips(&mut self) -> Vec<Change<IpAddr>> {
        std::mem::take(&mut self.cluster_ip_changes)
    }

    /// Takes the changes so far, and whether they complete the initial sync.
    pub(crate) fn take(&mut self) -> (Vec<Change<Object>>, bool) {
        self.synced |= self.is_listed();
        (std::mem::take(&mut self.changes), self.synced)
    }

    /// Takes the changes so far, which cannot complete the initial sync yet.
    pub(crate) fn take_part(&mut self) -> Vec<Change<Object>> {
        std::mem::take(&mut self.changes)
    }

    /// How many changes wait to be taken.
    pub(crate) fn waiting(&self) -> usize {
        self.changes.len() + self.cluster_ip_changes.len()
    }

    /// Whether [`Self::problems`] may have changed since the last call.
    pub(crate) fn problems_changed(&mut self) -> bool {
        std::mem::take(&mut self.problems_changed)
    }

    /// The objects that do not fit their kind.
    pub(crate) fn problems(&self) -> impl Iterator<Item = &ManifestProblem> {
        self.problems.values().map(|(_, problem)| problem)
    }

    fn mark(&mut self, kind: Kind, object: &ObjectRef) {
        if let Some(watched) = self.kinds.get_mut(&kind) {
            watched.objects.insert(name_of(object), watched.listing);
        }
    }

    fn gone(&mut self, kind: Kind, object: ObjectRef) {
        let known = self.kinds.get_mut(&kind).and_then(|kind| kind.objects.remove(&name_of(&object)));
        if known.is_some() {
            self.push(kind, Change::Delete(object));
        }
    }

    fn push(&mut self, kind: Kind, change: Change<Object>) {
        match self.kinds.get_mut(&kind) {
            Some(watched) if self.synced && !watched.listed => watched.held.push(change),
            _ => self.changes.push(change),
        }
    }

    fn forget_problem(&mut self, object: &ObjectRef) {
        if !self.problems.is_empty() {
            self.problems_changed |= self.problems.remove(object).is_some();
        }
    }
}

/// One allocation per object, where an [`ObjectRef`] has two.
fn name_of(object: &ObjectRef) -> Box<str> {
    object.key.to_string().into()
}

fn reference(kind: Kind, name: &str) -> ObjectRef {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    ObjectRef { kind, key: ObjectKey::new(namespace, name) }
}

/// The problem of an object that does not fit its kind.
pub fn invalid(object: ObjectRef, error: &InvalidObject) -> ManifestProblem {
    let field = &error.field;
    ManifestProblem {
        file: None,
        line: 0,
        severity: Severity::Error,
        reason: "invalid",
        object: Some(object),
        message: if field.is_empty() { error.message.clone() } else { format!("{field}: {}", error.message) },
        remedy: "correct it; meanwhile its last good version stays in force".to_owned(),
    }
}

#[cfg(test)]
#[path = "reflector/tests.rs"]
mod tests;
