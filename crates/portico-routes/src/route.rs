//! The values a route table is made of.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use portico_api::api_server_ca::ApiServerCa;
use portico_api::change::Keyed;
use portico_api::meta::ObjectKey;
use portico_api::names::{Authority, HostName};
use portico_api::policy::ClusterPolicy;
use serde::Serialize;
use smallvec::SmallVec;

/// What a connection is routed by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RouteKey {
    /// The TCP port it arrived on: a NodePort number.
    Port(u16),
    /// The server name of its ClientHello.
    Host(HostName),
    /// The authority of its CONNECT request.
    Authority(Authority),
}

/// A key and the backend it leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The key.
    pub key: RouteKey,
    /// Where it leads.
    pub to: Arc<BackendId>,
}

/// Addresses of endpoints. Many Services have one, which needs no allocation of its own.
pub type Endpoints = SmallVec<[SocketAddr; 1]>;

/// One exposed port of one Service: where its connections go, and under which policy.
///
/// Without endpoints the route is *known, not ready*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    /// Which Service port this is. Shared: tables of backends have it as key.
    pub id: Arc<BackendId>,
    /// Ready endpoints only: sorted, without repetition.
    pub endpoints: Endpoints,
    /// The user cluster it belongs to, the clients it admits, how much it may use.
    pub policy: Arc<ClusterPolicy>,
    /// Whether each upstream connection begins with a PROXY v2 header.
    pub send_proxy: bool,
    /// The CA of the API server behind it, where the Service names one: it comes before the one in the
    /// policy.
    #[serde(skip)]
    pub api_server_ca: Option<ApiServerCa>,
}

/// Identity of a [`Backend`]: the Service and the port's name and number. Stable while endpoints come and go.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendId {
    /// The Service.
    pub service: ObjectKey,
    /// Name of the Service port; empty if it has none.
    pub port_name: Arc<str>,
    /// Number of the Service port.
    pub port: u16,
}

// === Route, Backend ===

impl Keyed for Route {
    type Key = RouteKey;

    fn key(&self) -> RouteKey {
        self.key.clone()
    }
}

impl Keyed for Backend {
    type Key = Arc<BackendId>;

    fn key(&self) -> Arc<BackendId> {
        Arc::clone(&self.id)
    }
}

// === BackendId ===

impl fmt::Display for BackendId {
    /// `namespace/service-portname`, or `namespace/service` for an unnamed port: what KKP calls the upstream.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.service)?;
        if self.port_name.is_empty() { Ok(()) } else { write!(f, "-{}", self.port_name) }
    }
}

impl fmt::Debug for BackendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for BackendId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

// === RouteKey ===

impl fmt::Display for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "port {port}"),
            Self::Host(host) => write!(f, "host {host}"),
            Self::Authority(authority) => write!(f, "authority {authority}"),
        }
    }
}

/// Where the gateway is, as far as it knows by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnAddresses {
    /// Its addresses.
    pub addresses: Box<[IpAddr]>,
    /// Ports of its listeners, but for NodePorts.
    pub ports: Box<[u16]>,
}

/// How clients from outside reach the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    /// The Service by which they come; one that masks their addresses, if any does.
    pub service: ObjectKey,
    /// Whether every such Service keeps the addresses of clients.
    pub keeps_addresses: bool,
    /// The addresses behind it: the gateway and its replicas.
    pub replicas: BTreeSet<IpAddr>,
}
