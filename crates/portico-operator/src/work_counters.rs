//! The work of each controller, in the same words for all: waiting objects, passes and their time, failures
//! and their reasons, and writes.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::runtime::reflector::{Lookup, ObjectRef};
use serde::Serialize;

use crate::status::StatusHandle;

/// The work of one controller since this process started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkStatus {
    /// Objects that something has changed for and that wait for their pass.
    pub queued: usize,
    /// Passes over an object; not those that leave everything to the leader.
    pub passes: u64,
    /// The time that they took together, waiting for answers included.
    pub busy: Duration,
    /// Passes and writes that failed, by reason.
    pub errors: BTreeMap<&'static str, u64>,
    /// Objects written, by kind.
    pub writes: BTreeMap<&'static str, u64>,
}

/// One controller's part of the status.
#[derive(Debug, Clone)]
pub(crate) struct WorkCounters {
    controller: &'static str,
    status: StatusHandle,
}

impl WorkCounters {
    /// Counters of the controller with this name, with nothing done yet.
    pub(crate) fn new(controller: &'static str, status: &StatusHandle) -> Self {
        let counters = Self { controller, status: status.clone() };
        counters.update(|_| ());
        counters
    }

    /// Counts a pass that took so long.
    pub(crate) fn passed(&self, took: Duration) {
        self.update(|work| {
            work.passes += 1;
            work.busy += took;
        });
    }

    /// Counts a pass, or a write, that failed for this reason.
    pub(crate) fn failed(&self, reason: &'static str) {
        self.update(|work| *work.errors.entry(reason).or_default() += 1);
    }

    /// Counts an object of this kind that was written.
    pub(crate) fn wrote(&self, kind: &'static str) {
        self.wrote_many([(kind, 1)]);
    }

    /// Counts objects that were written, by kind.
    pub(crate) fn wrote_many(&self, kinds: impl IntoIterator<Item = (&'static str, u64)>) {
        self.update(|work| {
            for (kind, objects) in kinds {
                *work.writes.entry(kind).or_default() += objects;
            }
        });
    }

    fn update(&self, change: impl FnOnce(&mut WorkStatus)) {
        self.status.update(|status| change(status.controllers.entry(self.controller).or_default()));
    }
}

/// Namespaces and names.
type Waiting = HashSet<(Option<String>, String)>;

/// The objects that wait for a pass. The queue of the `kube` crate does not say how long it is.
///
/// Retries are not counted, only objects that a trigger named.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    waiting: Arc<Mutex<Waiting>>,
    counters: WorkCounters,
}

impl Queue {
    pub(crate) fn new(counters: WorkCounters) -> Self {
        Self { waiting: Arc::default(), counters }
    }

    /// Something has changed for these objects.
    pub(crate) fn add<K: Lookup>(&self, objects: &[ObjectRef<K>]) {
        self.change(|waiting| waiting.extend(objects.iter().map(key)));
    }

    /// The pass over this object begins, or there is no such object.
    pub(crate) fn take<K: Lookup>(&self, object: &ObjectRef<K>) {
        self.change(|waiting| _ = waiting.remove(&key(object)));
    }

    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut waiting);
        self.counters.update(|work| work.queued = waiting.len());
    }
}

fn key<K: Lookup>(object: &ObjectRef<K>) -> (Option<String>, String) {
    (object.namespace.clone(), object.name.clone())
}
