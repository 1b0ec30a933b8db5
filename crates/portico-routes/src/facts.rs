//! The facts that the index stores of an object: those that routes depend on, and no others.
//!
//! Read from whole objects in [`crate::annotations`] and [`crate::endpoints`]. At 10,000 user clusters there
//! are 20,000 of each or more, so every field counts.

use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use portico_api::annotations::ExposeTypes;
use portico_api::api_server_ca::ApiServerCa;
use portico_api::meta::ObjectKey;
use portico_api::names::{Authority, HostName};
use portico_api::policy::ClusterPolicy;
use portico_api::problem::Problem;
use portico_api::service::{ExternalTrafficPolicy, Service, ServiceType};
use smallvec::SmallVec;

use crate::route::{BackendId, RouteKey};

/// An annotated Service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ServiceFacts {
    /// Namespace and name.
    pub(crate) key: ObjectKey,
    /// Decides conflicts.
    pub(crate) origin: Origin,
    /// Decides conflicts between Services of one origin.
    pub(crate) age: Age,
    /// How it asks to be exposed, by all of its annotations; `None` if each is void.
    pub(crate) types: Option<ExposeTypes>,
    /// Its TCP ports, in the order written; none if it is not exposed.
    pub(crate) ports: Box<[ExposedPort]>,
    /// Whether upstream connections begin with a PROXY v2 header.
    pub(crate) send_proxy: bool,
    /// What few Services have; `None` for nothing of it.
    pub(crate) rare: Option<Box<RareServiceFacts>>,
}

/// What few Services have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RareServiceFacts {
    /// The access and budget of its own annotations; `None` without any. Counts only where no policy is known
    /// for the namespace.
    pub(crate) own_policy: Option<Arc<ClusterPolicy>>,
    /// The CA of the API server behind it, where an annotation names one.
    pub(crate) api_server_ca: Option<ApiServerCa>,
    /// Its own problems, independent of other objects.
    pub(crate) problems: Box<[Problem]>,
}

impl ServiceFacts {
    /// See [`RareServiceFacts::own_policy`].
    pub(crate) fn own_policy(&self) -> Option<&Arc<ClusterPolicy>> {
        self.rare.as_ref()?.own_policy.as_ref()
    }

    /// See [`RareServiceFacts::api_server_ca`].
    pub(crate) fn api_server_ca(&self) -> Option<&ApiServerCa> {
        self.rare.as_ref()?.api_server_ca.as_ref()
    }

    /// See [`RareServiceFacts::problems`].
    pub(crate) fn problems(&self) -> &[Problem] {
        self.rare.as_ref().map_or(&[], |rare| &rare.problems)
    }
}

/// `rare` in a place of its own, if it is more than nothing.
pub(crate) fn boxed<T: Default + PartialEq>(rare: T) -> Option<Box<T>> {
    (rare != T::default()).then(|| Box::new(rare))
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

    /// The claims of this port: at most one key of each kind, a NodePort number only where listeners are
    /// allowed.
    pub(crate) fn keys(&self, node_port_listeners: bool) -> impl Iterator<Item = RouteKey> {
        let port = self.node_port.filter(|_| node_port_listeners).map(RouteKey::Port);
        let host = self.host.clone().map(RouteKey::Host);
        let authority = self.authority.clone().map(RouteKey::Authority);
        [port, host, authority].into_iter().flatten()
    }
}

/// Why a Service exists. The smaller comes first in a conflict. A Service that a user adds must not take the
/// name of a cluster in use. A Cluster from a directory has no age to show that it is older.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// It follows from a Cluster object.
    Planned,
    /// A user wrote it.
    Written,
}

/// Age of an object, as far as it is known. The smaller is the older.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Age {
    /// Seconds since 1970, as precise as Kubernetes; [`Self::UNKNOWN`] for objects from a directory.
    created: i64,
    /// Decides between objects created in the same second; empty without a time.
    uid: Box<str>,
}

impl Age {
    /// Later than every time: an object without one counts as youngest.
    const UNKNOWN: i64 = i64::MAX;

    pub(crate) fn new(created: Option<Timestamp>, uid: &str) -> Self {
        // Without a time the name decides: a uid in a file proves nothing.
        let uid = if created.is_some() { uid } else { "" };
        Self { created: created.map_or(Self::UNKNOWN, Timestamp::as_second), uid: uid.into() }
    }

    /// When it was created, to the second.
    pub(crate) fn created(&self) -> Option<Timestamp> {
        Timestamp::from_second(self.created).ok()
    }
}

/// How a Service of type NodePort or LoadBalancer is reached from outside, exposed here or not.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    /// The numbers by which every node leads to it.
    pub(crate) node_ports: Box<[u16]>,
    /// Whether its pods see the addresses of clients.
    pub(crate) keeps_addresses: bool,
}

impl Reach {
    /// `None` for a Service that nodes do not lead to.
    pub(crate) fn of(service: &Service) -> Option<Box<Self>> {
        match service.spec.service_type {
            ServiceType::NodePort | ServiceType::LoadBalancer => Some(Box::new(Self {
                node_ports: service.node_ports().collect(),
                keeps_addresses: service.spec.external_traffic_policy == ExternalTrafficPolicy::Local,
            })),
            ServiceType::ClusterIP | ServiceType::ExternalName => None,
        }
    }
}

/// One EndpointSlice. Nearly all have one port and many have one endpoint, which need no allocation of their
/// own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SliceFacts {
    /// Its own name, not that of the Service.
    pub(crate) name: Arc<str>,
    /// Ready addresses, as written.
    pub(crate) ready: SmallVec<[IpAddr; 1]>,
    /// TCP ports: name (empty if none) and number.
    pub(crate) ports: SmallVec<[(Arc<str>, u16); 1]>,
    /// What few EndpointSlices have; `None` for nothing of it.
    pub(crate) rare: Option<Box<RareSliceFacts>>,
}

/// What few EndpointSlices have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RareSliceFacts {
    /// Addresses that are not ready, as written.
    pub(crate) not_ready: Box<[IpAddr]>,
    /// Number of addresses that may not be endpoints, ready or not.
    pub(crate) refused: u32,
    /// What is wrong with it.
    pub(crate) problems: Box<[Problem]>,
}

impl SliceFacts {
    /// Its addresses, ready or not.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ready.iter().chain(self.not_ready()).copied()
    }

    /// See [`RareSliceFacts::not_ready`].
    pub(crate) fn not_ready(&self) -> &[IpAddr] {
        self.rare.as_ref().map_or(&[], |rare| &rare.not_ready)
    }

    /// See [`RareSliceFacts::refused`].
    pub(crate) fn refused(&self) -> u32 {
        self.rare.as_ref().map_or(0, |rare| rare.refused)
    }

    /// See [`RareSliceFacts::problems`].
    pub(crate) fn problems(&self) -> &[Problem] {
        self.rare.as_ref().map_or(&[], |rare| &rare.problems)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(created: Option<i64>, uid: &str) -> Age {
        Age::new(created.map(|second| Timestamp::from_second(second).unwrap()), uid)
    }

    #[test]
    fn the_earlier_created_is_the_older() {
        assert!(age(Some(1), "b") < age(Some(2), "a"));
    }

    #[test]
    fn within_one_second_the_smaller_uid_is_the_older() {
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
