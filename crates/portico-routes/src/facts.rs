//! What the book keeps of an object: the few facts that routes depend on, and nothing else of it.
//!
//! Read from whole objects in [`crate::annotations`] and [`crate::endpoints`]. At 10,000 user clusters there are 20,000 and
//! more of each, so every field here is weighed.

use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use portico_api::annotations::ExposeTypes;
use portico_api::api_server_ca::ApiServerCa;
use portico_api::meta::ObjectKey;
use portico_api::names::{Authority, HostName};
use portico_api::policy::ClusterPolicy;
use portico_api::problem::Problem;
use smallvec::SmallVec;

use crate::route::{BackendId, KeyKind, RouteKey};

/// An annotated Service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ServiceFacts {
    /// Decides conflicts.
    pub(crate) origin: Origin,
    /// Decides conflicts between those of one origin.
    pub(crate) age: Age,
    /// How it asks to be exposed; `None` if the annotation is void.
    pub(crate) types: Option<ExposeTypes>,
    /// Its TCP ports, in the order written; none if the annotation is void.
    pub(crate) ports: Box<[ExposedPort]>,
    /// What its own annotations say about access and budget. Counts only where no policy is known for the namespace.
    pub(crate) own_policy: Option<Arc<ClusterPolicy>>,
    /// Whether upstream connections begin with a PROXY v2 header.
    pub(crate) send_proxy: bool,
    /// Whom the API server behind it is known by, where it says so itself.
    pub(crate) api_server_ca: Option<ApiServerCa>,
    /// What is wrong with it on its own, whatever other objects say.
    pub(crate) problems: Box<[Problem]>,
}

/// One TCP port of an annotated Service, and the keys it claims.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExposedPort {
    /// Name; empty if it has none.
    pub(crate) name: Arc<str>,
    /// Number.
    pub(crate) port: u16,
    /// The NodePort number, where exposed by port.
    pub(crate) node_port: Option<u16>,
    /// The server name, where exposed by SNI.
    pub(crate) host: Option<HostName>,
    /// The authority, where exposed by CONNECT.
    pub(crate) authority: Option<Authority>,
}

impl ExposedPort {
    /// This port of `service`.
    pub(crate) fn backend_id(&self, service: &ObjectKey) -> BackendId {
        BackendId { service: service.clone(), port_name: Arc::clone(&self.name), port: self.port }
    }

    /// What this port claims: at most one key of each kind.
    pub(crate) fn keys(&self, node_port_listeners: bool) -> impl Iterator<Item = (KeyKind, RouteKey)> {
        let kinds = [KeyKind::Port, KeyKind::Host, KeyKind::Authority].into_iter();
        let kinds = kinds.filter(move |&kind| node_port_listeners || kind != KeyKind::Port);
        kinds.filter_map(|kind| Some((kind, self.key(kind)?)))
    }

    /// The key of this kind, where this port has one.
    pub(crate) fn key(&self, kind: KeyKind) -> Option<RouteKey> {
        match kind {
            KeyKind::Port => self.node_port.map(RouteKey::Port),
            KeyKind::Host => self.host.clone().map(RouteKey::Host),
            KeyKind::Authority => self.authority.clone().map(RouteKey::Authority),
        }
    }
}

/// Why a Service is there. The smaller comes first in a conflict: a Service that somebody adds must not take the name of a
/// cluster that is in use, and a Cluster from a directory has no age by which it could prove that it was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// It follows from a Cluster object.
    Planned,
    /// Somebody wrote it.
    Written,
}

/// Age of an object, as far as it is known. The smaller is the elder.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Age {
    /// In seconds, as Kubernetes counts it; [`Self::UNKNOWN`] for objects from a directory.
    created: i64,
    /// Tells apart what was created in the same second; empty without a time.
    uid: Box<str>,
}

impl Age {
    /// Later than every time there is: what has no time counts as youngest.
    const UNKNOWN: i64 = i64::MAX;

    pub(crate) fn new(created: Option<Timestamp>, uid: &str) -> Self {
        // What has no time is told apart by name: whoever writes a file could write any uid.
        let uid = if created.is_some() { uid } else { "" };
        Self { created: created.map_or(Self::UNKNOWN, Timestamp::as_second), uid: uid.into() }
    }

    /// When it was created, to the second.
    pub(crate) fn created(&self) -> Option<Timestamp> {
        Timestamp::from_second(self.created).ok()
    }
}

/// One EndpointSlice. Nearly all have one port, and many one endpoint, for which there is room without another allocation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SliceFacts {
    /// Its own name, not that of the Service.
    pub(crate) name: Arc<str>,
    /// Slot of its Service.
    pub(crate) slot: u32,
    /// Number of addresses that are not ready.
    pub(crate) not_ready: u32,
    /// Ready addresses, as written.
    pub(crate) ready: SmallVec<[IpAddr; 1]>,
    /// TCP ports: name (empty if none) and number.
    pub(crate) ports: SmallVec<[(Arc<str>, u16); 1]>,
    /// What is wrong with it.
    pub(crate) problems: Box<[Problem]>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(created: Option<i64>, uid: &str) -> Age {
        Age::new(created.map(|second| Timestamp::from_second(second).unwrap()), uid)
    }

    #[test]
    fn the_earlier_created_is_the_elder() {
        assert!(age(Some(1), "b") < age(Some(2), "a"));
    }

    #[test]
    fn within_one_second_the_smaller_uid_is_the_elder() {
        assert!(age(Some(1), "a") < age(Some(1), "b"));
    }

    #[test]
    fn without_a_creation_time_it_is_the_youngest() {
        assert!(age(Some(i64::from(u32::MAX)), "b") < age(None, "a"));
        assert_eq!(age(None, "a").created(), None);
    }

    #[test]
    fn without_a_creation_time_the_uid_says_nothing() {
        assert_eq!(age(None, "a"), age(None, "b"));
    }
}
