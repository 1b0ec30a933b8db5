//! The targets of the Services that have an allow list.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

use portico_api::meta::ObjectKey;
use smallvec::SmallVec;

use crate::endpoints::{self, MAX_LISTED};
use crate::facts::{Reach, SliceFacts};

/// By what a Service behind an allow list is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Target {
    Endpoint(SocketAddr),
    /// On every node.
    NodePort(u16),
}

/// Every target of every Service with an allow list, as of the last commit. Few have one.
#[derive(Debug, Default)]
pub(crate) struct TargetIndex {
    /// Sorted, so that it says nothing of what changed last.
    by_target: HashMap<Target, SmallVec<[ObjectKey; 1]>>,
    by_service: HashMap<ObjectKey, BTreeSet<Target>>,
}

impl Target {
    /// The targets that a connection to `endpoint` may lead to.
    pub(crate) fn of(endpoint: SocketAddr) -> [Self; 2] {
        [Self::Endpoint(endpoint), Self::NodePort(endpoint.port())]
    }

    /// Every target of a Service with these slices, to which nodes lead as `reach` says.
    pub(crate) fn all(slices: &[SliceFacts], reach: Option<&Reach>) -> BTreeSet<Self> {
        let node_ports = reach.into_iter().flat_map(|reach| &*reach.node_ports).copied();
        let endpoints = endpoints::all(slices).take(MAX_LISTED);
        endpoints.map(Self::Endpoint).chain(node_ports.map(Self::NodePort)).collect()
    }
}

impl TargetIndex {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_service.is_empty()
    }

    /// Whether `service` has an allow list.
    pub(crate) fn has(&self, service: &ObjectKey) -> bool {
        self.by_service.contains_key(service)
    }

    /// The Services that `target` leads to, by name.
    pub(crate) fn services_at(&self, target: Target) -> &[ObjectKey] {
        self.by_target.get(&target).map(|services| &**services).unwrap_or_default()
    }

    /// Replaces the targets of `service`. Returns those it had before.
    pub(crate) fn set(&mut self, service: &ObjectKey, now: BTreeSet<Target>) -> BTreeSet<Target> {
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
            let services = self.by_target.entry(*target).or_default();
            let position = services.partition_point(|other| other < service);
            services.insert(position, service.clone());
        }
        if !now.is_empty() {
            self.by_service.insert(service.clone(), now);
        }
        before
    }
}
