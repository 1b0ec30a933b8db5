//! The mesh of nodes in Kubernetes: its members, and a condition on a node.
//!
//! Members are the endpoints of a headless Service in front of the DaemonSet, some hundred bytes a node.
//! Nodes themselves are a hundred times that, and every member asks.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, Patch};
use kube::{Api, Client};
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_kube::apply::merging;
use serde_json::json;

/// Nodes with a member of the mesh.
pub type Members = BTreeMap<String, Member>;

/// A member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member {
    /// Addresses of its node, of both families.
    pub addresses: Vec<IpAddr>,
    /// Whether it answers.
    pub is_ready: bool,
}

/// A condition to be set on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVerdict {
    /// The condition, in CamelCase.
    pub kind: &'static str,
    /// Whether it holds; `None` if that is not known.
    pub holds: Option<bool>,
    /// One word for programs, in CamelCase.
    pub reason: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// Lists the members, from the API server's cache.
pub async fn members(client: &Client, namespace: &str, service: &str) -> kube::Result<Members> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
    let of_service = ListParams::default().labels(&format!("{SERVICE_NAME_LABEL}={service}")).match_any();
    Ok(members_of(&slices.list(&of_service).await?.items))
}

fn members_of(slices: &[EndpointSlice]) -> Members {
    let mut members = Members::new();
    for endpoint in slices.iter().flat_map(|slice| &slice.endpoints) {
        let Some(node) = &endpoint.node_name else { continue };
        let member = members.entry(node.clone()).or_default();
        member.addresses.extend(endpoint.addresses.iter().filter_map(|text| text.parse::<IpAddr>().ok()));
        // An endpoint without this condition is ready, as Kubernetes has it.
        let is_ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true);
        member.is_ready |= is_ready;
    }
    members
}

/// Sets the condition on a node. Its heartbeat moves each time, so that a member that is gone is seen.
pub async fn set_condition(client: &Client, node: &str, verdict: &NodeVerdict) -> kube::Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let found = nodes.get(node).await?;
    let now = Timestamp::now();
    let status = match verdict.holds {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
    let old = conditions.into_iter().find(|old| old.type_ == verdict.kind && old.status == status);
    let since = old.and_then(|old| old.last_transition_time).map_or(now, |time| time.0);
    let condition = json!({
        "type": verdict.kind,
        "status": status,
        "reason": verdict.reason,
        "message": verdict.message,
        "lastHeartbeatTime": now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    // By its type it is merged among those of others.
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    let parameters = merging();
    nodes.patch_status(node, &parameters, &patch).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_has_the_addresses_of_all_slices_and_is_ready_if_nobody_says_otherwise() {
        let slices: Vec<EndpointSlice> = serde_json::from_value(json!([
            {"addressType": "IPv4", "metadata": {}, "endpoints": [
                {"nodeName": "a", "addresses": ["10.0.0.1"], "conditions": {"ready": true}},
                {"nodeName": "b", "addresses": ["10.0.0.2"], "conditions": {"ready": false}},
                {"addresses": ["10.0.0.3"]},
            ]},
            {"addressType": "IPv6", "metadata": {}, "endpoints": [
                {"nodeName": "a", "addresses": ["fd00::1"]},
            ]},
        ]))
        .unwrap();
        let members = members_of(&slices);
        assert_eq!(members.keys().collect::<Vec<_>>(), ["a", "b"]);
        let addresses: Vec<IpAddr> = ["10.0.0.1", "fd00::1"].map(|text| text.parse().unwrap()).into();
        assert_eq!(members["a"], Member { addresses, is_ready: true });
        assert!(!members["b"].is_ready);
    }
}
