//! CoreDNS in a seed, as kubeadm installs it: one replica, the same configuration.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::image::Image;
use crate::seed::Seed;

/// Nothing but an API server has to be there for it.
const STARTING: Duration = Duration::from_secs(120);

/// kubeadm's, which forgets the names of the cluster at once: members of etcd ask for each other before they
/// are there.
const CONFIGURATION: &str = "\
.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    forward . /etc/resolv.conf {
        max_concurrent 1000
    }
    cache 30 {
        disable success cluster.local
        disable denial cluster.local
    }
    loadbalance
}
";

/// Starts it with this address, and waits until it serves.
pub(crate) fn start(seed: &Seed, address: Ipv4Addr) -> Result<()> {
    let image = Image::coredns()?;
    let items = [account(), rights(), binding(), configuration(), deployment(image.name()), service(address)];
    seed.kubectl().apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items}))?;
    seed.kubectl().wait_rolled_out("kube-system", "coredns", STARTING)
}

fn meta(name: &str) -> Value {
    json!({"name": name, "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}})
}

fn account() -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta("coredns")})
}

fn rights() -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
    "metadata": {"name": "system:coredns"},
    "rules": [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]})
}

fn binding() -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}]})
}

fn configuration() -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("coredns"),
        "data": {"Corefile": CONFIGURATION}})
}

fn deployment(image: &str) -> Value {
    let labels = json!({"k8s-app": "kube-dns"});
    let container = json!({
        "name": "coredns",
        "image": image,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "configuration", "mountPath": "/etc/coredns", "readOnly": true}],
    });
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("coredns"),
    "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {
        "metadata": {"labels": labels},
        "spec": {
            "serviceAccountName": "coredns",
            // It answers for the cluster, and asks the node's own name server for the rest.
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "configuration", "configMap": {"name": "coredns"}}],
        },
    }}})
}

fn service(address: Ipv4Addr) -> Value {
    let ports = [("UDP", "dns"), ("TCP", "dns-tcp")]
        .map(|(protocol, name)| json!({"name": name, "port": 53, "protocol": protocol}));
    json!({"apiVersion": "v1", "kind": "Service", "metadata": meta("kube-dns"),
        "spec": {"clusterIP": address, "selector": {"k8s-app": "kube-dns"}, "ports": ports}})
}
