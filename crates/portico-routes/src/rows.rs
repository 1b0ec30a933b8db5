//! The listing behind `portico routes` and `/routes`: what every exposed port claims, and what became of it.

use std::sync::Arc;

use portico_api::annotations::ExposeTypes;
use portico_api::names::ClusterName;
use portico_api::policy::ClusterPolicy;
use serde::Serialize;

use crate::book::{RouteBook, Slot};
use crate::claims::Claim;
use crate::endpoints;
use crate::facts::ServiceFacts;
use crate::route::{BackendId, Endpoints, RouteKey};

/// One claimed key of one exposed port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteRow {
    /// The key.
    pub key: RouteKey,
    /// The Service port that claims it.
    pub backend: BackendId,
    /// The user cluster it belongs to.
    pub cluster: ClusterName,
    /// How the Service asks to be exposed, of which `key` is one part.
    pub expose: ExposeTypes,
    /// Whether a connection would get through, and if not, why.
    pub state: RouteState,
    /// The ready endpoints.
    pub endpoints: Endpoints,
    /// Endpoints in all, ready or not.
    pub endpoints_total: usize,
    /// Why there is no endpoint at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_endpoints: Option<NoEndpoints>,
    /// Who may connect, and how much.
    pub policy: Arc<ClusterPolicy>,
}

/// Why a Service port has no endpoint, ready or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum NoEndpoints {
    /// No EndpointSlice carries the Service's name in its label.
    NoSlice,
    /// There are slices, but none with a TCP port of this name.
    NoPort {
        /// The names that they have instead.
        found: Vec<Arc<str>>,
    },
    /// The slices that fit are empty.
    Empty,
}

/// What became of a claimed key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum RouteState {
    /// In the table, with at least one endpoint.
    Ready,
    /// In the table, but no endpoint is ready: known, and refused as such.
    NotReady,
    /// Another Service is older and has the key.
    Conflict {
        /// Who has it.
        winner: BackendId,
    },
    /// A NodePort whose listener may not be opened: the seed's nodeport-proxy is disabled.
    ListenersOff,
    /// A NodePort whose listener cannot be opened. A book knows no listeners: whoever opens them says so.
    ListenerFailed {
        /// Why.
        error: Box<str>,
    },
}

impl RouteBook {
    /// Every claimed key, sorted by Service, then in the order of its ports. As of the changes applied, committed or not.
    pub fn rows(&self) -> impl Iterator<Item = RouteRow> {
        let mut slots: Vec<(u32, &Slot, &ServiceFacts)> = self.exposed().collect();
        slots.sort_unstable_by_key(|(_, slot, _)| &slot.key);
        slots.into_iter().flat_map(|(id, slot, service)| self.rows_of(id, slot, service))
    }

    fn rows_of(&self, id: u32, slot: &Slot, service: &ServiceFacts) -> Vec<RouteRow> {
        let (Some(expose), Some(namespace)) = (service.types, self.namespaces.get(&slot.key.namespace))
        else {
            return Vec::new();
        };
        let policy = namespace.policy_for(service);
        let mut rows = Vec::new();
        for (index, port) in (0u16..).zip(&service.ports) {
            let endpoints = endpoints::ready(self.slices_of(slot), &port.name);
            let endpoints_total = endpoints.len() + endpoints::not_ready(self.slices_of(slot), &port.name);
            let no_endpoints = (endpoints_total == 0).then(|| self.no_endpoints(slot, &port.name));
            let backend = port.backend_id(&slot.key);
            rows.extend(port.keys(true).map(|(kind, key)| RouteRow {
                state: self.state(&key, Claim { slot: id, port: index, kind }, policy, !endpoints.is_empty()),
                key,
                backend: backend.clone(),
                cluster: policy.cluster.clone(),
                expose,
                endpoints: endpoints.clone(),
                endpoints_total,
                no_endpoints: no_endpoints.clone(),
                policy: Arc::clone(policy),
            }));
        }
        rows
    }

    fn no_endpoints(&self, slot: &Slot, port_name: &str) -> NoEndpoints {
        let mut found: Vec<Arc<str>> =
            self.slices_of(slot).flat_map(|slice| &slice.ports).map(|(name, _)| Arc::clone(name)).collect();
        found.sort_unstable();
        found.dedup();
        if self.slices_of(slot).next().is_none() {
            NoEndpoints::NoSlice
        } else if found.iter().any(|name| port_name.is_empty() || **name == *port_name) {
            NoEndpoints::Empty
        } else {
            NoEndpoints::NoPort { found }
        }
    }

    fn state(&self, key: &RouteKey, claim: Claim, policy: &ClusterPolicy, ready: bool) -> RouteState {
        match (key, self.owner(key)) {
            (RouteKey::Port(_), _) if !policy.node_port_listeners => RouteState::ListenersOff,
            (_, Some(owner)) if owner != claim => match self.backend_id(owner) {
                Some(winner) => RouteState::Conflict { winner },
                None => RouteState::NotReady,
            },
            _ if ready => RouteState::Ready,
            _ => RouteState::NotReady,
        }
    }
}
