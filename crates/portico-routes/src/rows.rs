//! The listing behind `portico routes` and `/routes`: the claims of every exposed port, and the result of
//! each.

use std::collections::BTreeSet;
use std::sync::Arc;

use portico_api::annotations::ExposeTypes;
use portico_api::names::Tenant;
use portico_api::policy::ClusterPolicy;
use serde::Serialize;

use crate::allow_lists::NarrowedPolicies;
use crate::claims::Claim;
use crate::endpoints;
use crate::facts::{ServiceFacts, SliceFacts};
use crate::index::{RouteIndex, ServiceEntry};
use crate::route::{BackendId, Endpoints, RouteKey};

/// Most names of ports that a row lists. A slice may have twenty thousand, and a Service many rows.
const MAX_NAMES: usize = 16;

/// One claimed key of one exposed port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteRow {
    /// The key.
    pub key: RouteKey,
    /// The Service port that claims it.
    pub backend: BackendId,
    /// The tenant it belongs to.
    #[serde(rename = "cluster")]
    pub tenant: Tenant,
    /// How the Service asks to be exposed; `key` is one part of that.
    pub expose: ExposeTypes,
    /// Whether a connection would get through, and if not, why.
    pub state: RouteState,
    /// The ready endpoints.
    pub endpoints: Endpoints,
    /// Number of endpoints, ready or not.
    pub endpoints_total: usize,
    /// Why there is no endpoint at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_endpoints: Option<NoEndpoints>,
    /// The clients it admits, and how much it may use.
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
        /// The names that they have instead, the first sixteen as written.
        found: Vec<Arc<str>>,
    },
    /// The slices that fit are empty.
    Empty,
    /// No endpoint of the slices that fit may be one: the problems say why.
    Refused,
}

/// What became of a claimed key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum RouteState {
    /// In force, with at least one endpoint.
    Ready,
    /// In force, but no endpoint is ready: connections are refused with that reason.
    NotReady,
    /// Another Service comes first and has the key.
    Conflict {
        /// The Service port that has it.
        winner: BackendId,
    },
    /// It is kept for another namespace, whose Service is gone and may be made anew.
    Kept {
        /// The tenant that has it.
        tenant: Tenant,
    },
    /// A NodePort whose listener may not be opened: the seed's nodeport-proxy is disabled.
    ListenersOff,
    /// A NodePort whose listener cannot be opened. Set by the gateway: an index knows no listeners.
    ListenerFailed {
        /// Why.
        error: Box<str>,
    },
}

impl RouteIndex {
    /// Every claimed key, sorted by Service, then in the order of its ports. As of the changes applied,
    /// committed or not.
    pub fn rows(&self) -> impl Iterator<Item = RouteRow> {
        self.services.values().flat_map(|entry| {
            let rows = entry.service.as_ref().map(|service| self.rows_of(entry, service));
            rows.unwrap_or_default()
        })
    }

    fn rows_of(&self, entry: &ServiceEntry, service: &Arc<ServiceFacts>) -> Vec<RouteRow> {
        let Some(expose) = service.types else { return Vec::new() };
        let own_policy = self.policy_of(&service.key);
        let mut narrowed = NarrowedPolicies::new();
        let mut rows = Vec::new();
        let cluster = self.policies.get(&service.key.namespace).map(|policy| &**policy);
        for claim in Claim::of_each_port(service, cluster.is_some()) {
            let port = claim.port();
            let endpoints = self.ready(&entry.slices, &port.name);
            let endpoints_total = endpoints.len() + endpoints::not_ready(&entry.slices, &port.name);
            let no_endpoints = (endpoints_total == 0).then(|| self.no_endpoints(&entry.slices, &port.name));
            let policy = self.with_allow_lists(&own_policy, &service.key, &endpoints, &mut narrowed);
            let backend = port.backend_id(&service.key);
            rows.extend(port.keys(true).map(|key| RouteRow {
                state: self.state(&key, &claim.to(&key, cluster), &policy, !endpoints.is_empty()),
                key,
                backend: backend.clone(),
                tenant: policy.tenant.clone(),
                expose,
                endpoints: endpoints.clone(),
                endpoints_total,
                no_endpoints: no_endpoints.clone(),
                policy: Arc::clone(&policy),
            }));
        }
        rows
    }

    fn state(&self, key: &RouteKey, claim: &Claim, policy: &ClusterPolicy, ready: bool) -> RouteState {
        let kept_for = || self.claims.kept_for(key).map(Tenant::of_namespace);
        match (key, self.claims.owner(key)) {
            (RouteKey::Port(_), _) if !policy.node_port_listeners => RouteState::ListenersOff,
            (_, Some(owner)) if owner != claim => {
                RouteState::Conflict { winner: owner.port().backend_id(&owner.service.key) }
            }
            (_, None) if let Some(tenant) = kept_for() => RouteState::Kept { tenant },
            _ if ready => RouteState::Ready,
            _ => RouteState::NotReady,
        }
    }

    fn no_endpoints(&self, slices: &[SliceFacts], port_name: &str) -> NoEndpoints {
        if slices.is_empty() {
            NoEndpoints::NoSlice
        } else if slices.iter().any(|slice| endpoints::serves(slice, port_name)) {
            let is_refused = |slice: &SliceFacts| {
                slice.refused() > 0 || slice.ready.iter().any(|address| self.cluster_ips.contains(address))
            };
            let refused = slices.iter().any(is_refused);
            if refused { NoEndpoints::Refused } else { NoEndpoints::Empty }
        } else {
            NoEndpoints::NoPort { found: some_port_names(slices) }
        }
    }
}

fn some_port_names(slices: &[SliceFacts]) -> Vec<Arc<str>> {
    let mut names = BTreeSet::new();
    for (name, _) in slices.iter().flat_map(|slice| &slice.ports) {
        names.insert(Arc::clone(name));
        if names.len() == MAX_NAMES {
            break;
        }
    }
    names.into_iter().collect()
}
