//! The kinds of KKP in an API server, with any content: enough for what reads and writes such objects.

use anyhow::Result;
use serde_json::{Value, json};

use crate::kubectl::Kubectl;

/// The kinds that Portico reads, with their scope.
const KINDS: [(&str, &str); 3] =
    [("KubermaticConfiguration", "Namespaced"), ("Seed", "Namespaced"), ("Cluster", "Cluster")];

/// The definition of Clusters.
pub fn clusters() -> Value {
    definition("Cluster", "Cluster")
}

/// Defines every kind and waits until the API server serves it.
pub fn install(kubectl: &Kubectl) -> Result<()> {
    let items = KINDS.map(|(kind, scope)| definition(kind, scope));
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items}))?;
    KINDS.iter().try_for_each(|(kind, _)| kubectl.wait_served(&crd(kind)))
}

fn definition(kind: &str, scope: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": crd(kind)},
        "spec": {
            "group": "kubermatic.k8c.io",
            "scope": scope,
            "names": {
                "plural": plural(kind),
                "singular": kind.to_lowercase(),
                "kind": kind,
                "listKind": format!("{kind}List"),
            },
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                },
            }],
        },
    })
}

fn plural(kind: &str) -> String {
    format!("{}s", kind.to_lowercase())
}

fn crd(kind: &str) -> String {
    format!("{}.kubermatic.k8c.io", plural(kind))
}
