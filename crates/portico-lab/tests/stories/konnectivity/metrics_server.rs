//! metrics-server, an API server of its own behind the cluster's: what an APIService leads to goes through
//! the tunnel.

use anyhow::{Result, ensure};
use portico_lab::kubectl::condition;
use portico_lab::{Image, Kubectl, wait};
use serde_json::{Value, json};

use super::story::Story;
use crate::support::SOON;

const NAME: &str = "metrics-server";
const NAMESPACE: &str = "kube-system";
/// Where it serves.
const PORT: u16 = 4443;
/// What it serves.
const API: &str = "v1beta1.metrics.k8s.io";

/// What the API server needs to pass on which user asks.
pub(crate) fn api_server_flags() -> Vec<String> {
    [
        "--requestheader-client-ca-file=/pki/ca.crt",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--proxy-client-cert-file=/pki/kubelet-client.crt",
        "--proxy-client-key-file=/pki/kubelet-client.key",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Runs it as a pod of the worker.
pub(crate) fn deploy(story: &Story) {
    story.worker.import(&Image::metrics_server().unwrap()).unwrap();
    for object in rights().iter().chain(&[pod(), service(), api_service()]) {
        // Pods are refused until the controller manager has made what they need.
        wait::until("metrics-server's objects to be accepted", SOON, || story.kubectl().apply_json(object))
            .unwrap();
    }
}

/// Its API answers, through the cluster's.
pub(crate) fn answers(kubectl: &Kubectl, node: &str) {
    wait::until("the APIService to be available", SOON, || {
        let object = kubectl.get(&["apiservice", API])?;
        ensure!(condition(&object, "Available"), "{}", object["status"]);
        Ok(())
    })
    .unwrap();
    wait::until("metrics of the worker", SOON, || -> Result<()> {
        let said = kubectl.run(&["top", "nodes", "--no-headers"])?;
        ensure!(said.starts_with(node), "{said}");
        Ok(())
    })
    .unwrap();
}

fn rights() -> [Value; 5] {
    let metadata = json!({"name": NAME, "namespace": NAMESPACE});
    let subject = json!([{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]);
    let binding = |kind: &str, name: &str, role_kind: &str, role: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": role},
            "subjects": subject,
        })
    };
    let rules = json!([
        {"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]},
    ]);
    let mut cluster_bindings = [
        binding("ClusterRoleBinding", "metrics-server:reads", "ClusterRole", NAME),
        binding("ClusterRoleBinding", "metrics-server:asks", "ClusterRole", "system:auth-delegator"),
    ];
    for binding in &mut cluster_bindings {
        binding["metadata"] = json!({"name": binding["metadata"]["name"]});
    }
    let [reads, asks] = cluster_bindings;
    [
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": NAME},
            "rules": rules,
        }),
        reads,
        asks,
        binding("RoleBinding", NAME, "Role", "extension-apiserver-authentication-reader"),
    ]
}

fn pod() -> Value {
    let ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
    let args = [
        format!("--secure-port={PORT}"),
        "--cert-dir=/tmp".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        format!("--kubelet-certificate-authority={ca}"),
        "--metric-resolution=15s".to_owned(),
    ];
    let container = json!({
        "name": NAME,
        "image": "lab/metrics-server:1",
        "imagePullPolicy": "Never",
        "args": args,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {"app": NAME}},
        "spec": {
            "serviceAccountName": NAME,
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 0,
        },
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"selector": {"app": NAME}, "ports": [{"port": 443, "targetPort": PORT}]},
    })
}

fn api_service() -> Value {
    json!({
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API},
        "spec": {
            "service": {"name": NAME, "namespace": NAMESPACE},
            "group": "metrics.k8s.io",
            "version": "v1beta1",
            // It made its certificate itself.
            "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    })
}
