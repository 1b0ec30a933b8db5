//! Policies of Kubernetes and of Cilium. Cilium's can be for nodes, and need not deny what they do not name.

use serde_json::{Value, json};

use super::rules::{Direction, Rule, Ruleset};
use super::writing::{CannotWrite, Writing, Written};
use crate::model::Protocol;

/// The role whose machines are pods: the gateway or nodeport-proxy in the seed.
const POD_ROLE: &str = "front";

/// Pods, and the roles that are in one cluster with them.
const PODS: [(&str, &[&str]); 2] = [
    ("control-plane", &["front", "control-plane", "seed", "seed-api"]),
    ("worker-pods", &["worker", "worker-pods"]),
];

/// What Cilium does not match by address.
const IDENTITIES: &str = "Cilium's CIDR rules match no node of its own cluster without \
                          policyCIDRMatchMode: nodes, and no pod of it: allow pods by their labels";

pub(super) fn write_kubernetes(rules: &Ruleset, writing: &Writing<'_>) -> Written {
    let mut notes = vec![
        "a NetworkPolicy refuses what it does not name, in each direction that it has: Kubernetes cannot \
         only allow. Name resolution and probes must be allowed by a policy of their own"
            .to_owned(),
    ];
    let mut spec = json!({"podSelector": selector(writing), "policyTypes": []});
    for (direction, kind, key, side) in
        [(Direction::Ingress, "Ingress", "ingress", "from"), (Direction::Egress, "Egress", "egress", "to")]
    {
        let mut entries = Vec::new();
        for rule in rules.of(direction) {
            if rule.protocol == Protocol::IpInIp {
                notes.push(format!("{}: a NetworkPolicy knows no IP-in-IP", rule.ids()));
                continue;
            }
            let peers: Vec<Value> =
                rule.peers.iter().map(|peer| json!({"ipBlock": {"cidr": peer.to_string()}})).collect();
            entries.push(json!({side: peers, "ports": ports(rule, |first, last| {
                let mut port = json!({"protocol": rule.protocol.name(), "port": first});
                if last != first {
                    port["endPort"] = last.into();
                }
                port
            })}));
        }
        // A direction without rules stays as it is, unless everything else is to be refused.
        if !entries.is_empty() || writing.default_deny {
            if let Some(types) = spec["policyTypes"].as_array_mut() {
                types.push(kind.into());
            }
            spec[key] = entries.into();
        }
    }
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(rules, Some(writing.namespace)),
        "spec": spec,
    });
    Written { text: portico_yaml::write(&policy), notes }
}

pub(super) fn write_cilium(rules: &Ruleset, writing: &Writing<'_>) -> Result<Written, CannotWrite> {
    let of_pods = rules.roles.iter().all(|role| role.key == POD_ROLE);
    let mut cut_off = rows_with_pods(rules);
    if of_pods && cut_off.is_empty() {
        cut_off.push("API servers of user clusters");
    }
    if writing.default_deny && !cut_off.is_empty() {
        // A policy that cuts off what it is to allow is worse than none.
        return Err(CannotWrite(format!(
            "{}: the other end is pods of the same cluster. {IDENTITIES}. With --default-deny they would be \
             refused, so no policy is written: leave it out, or write the policy by hand",
            cut_off.join(" ")
        )));
    }
    let mut notes = vec![IDENTITIES.to_owned()];
    let mut spec = json!({
        (if of_pods { "endpointSelector" } else { "nodeSelector" }): selector(writing),
        "enableDefaultDeny": {"ingress": writing.default_deny, "egress": writing.default_deny},
    });
    for (direction, key, side) in
        [(Direction::Ingress, "ingress", "fromCIDR"), (Direction::Egress, "egress", "toCIDR")]
    {
        let mut entries = Vec::new();
        for rule in rules.of(direction) {
            if rule.protocol == Protocol::IpInIp {
                notes.push(format!("{}: Cilium's policies know no IP-in-IP", rule.ids()));
                continue;
            }
            let peers: Vec<String> = rule.peers.iter().map(ToString::to_string).collect();
            let ports = ports(rule, |first, last| {
                let mut port = json!({"port": first.to_string(), "protocol": rule.protocol.name()});
                if last != first {
                    port["endPort"] = last.into();
                }
                port
            });
            entries.push(json!({side: peers, "toPorts": [{"ports": ports}]}));
        }
        if !entries.is_empty() {
            spec[key] = entries.into();
        } else if writing.default_deny {
            // One empty rule allows nothing, and makes the direction count.
            spec[key] = json!([{}]);
        }
    }
    let kind = if of_pods { "CiliumNetworkPolicy" } else { "CiliumClusterwideNetworkPolicy" };
    if !of_pods {
        notes.push("it is for nodes: Cilium's host firewall must be on (hostFirewall.enabled)".to_owned());
    }
    let policy = json!({
        "apiVersion": "cilium.io/v2",
        "kind": kind,
        "metadata": metadata(rules, of_pods.then_some(writing.namespace)),
        "spec": spec,
    });
    Ok(Written { text: format!("# {IDENTITIES}.\n{}", portico_yaml::write(&policy)), notes })
}

/// The rows whose other end is pods in the cluster of these machines.
fn rows_with_pods(rules: &Ruleset) -> Vec<&'static str> {
    let is_in = |cluster: &[&str]| rules.roles.iter().any(|own| cluster.contains(&own.key));
    let is_own_pods = |role: &str| PODS.iter().any(|&(pods, cluster)| pods == role && is_in(cluster));
    let mut rows = Vec::new();
    for rule in &rules.rules {
        for row in &rule.rows {
            let other = if rule.direction == Direction::Ingress { row.source } else { row.destination };
            if is_own_pods(other.role) && !rows.contains(&row.id) {
                rows.push(row.id);
            }
        }
    }
    rows
}

fn metadata(rules: &Ruleset, namespace: Option<&str>) -> Value {
    let mut metadata = json!({
        "name": format!("portico-{}", rules.name()),
        "annotations": {"portico.io/rows": rules.rules.iter().map(Rule::ids).collect::<Vec<_>>().join(" ")},
    });
    if let Some(namespace) = namespace {
        metadata["namespace"] = namespace.into();
    }
    metadata
}

fn selector(writing: &Writing<'_>) -> Value {
    let labels: serde_json::Map<String, Value> =
        writing.selector.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect();
    if labels.is_empty() { json!({}) } else { json!({"matchLabels": labels}) }
}

fn ports(rule: &Rule, port: impl Fn(u16, u16) -> Value) -> Vec<Value> {
    rule.ports.ranges().iter().map(|range| port(range.first(), range.last())).collect()
}
