//! Strategy LoadBalancer: a gateway in a cluster's own namespace, with rights for that namespace only, behind
//! a load balancer of its own. Made from the Deployment of `deploy/gateway.yaml`.

use std::net::Ipv4Addr;
use std::time::Duration;

use portico_lab::Seed;
use serde_json::json;

/// The key by which Services ask the gateway of their own cluster, and not that of the seed.
pub(crate) const EXPOSE_NAMESPACED: &str = "nodeport-proxy.k8s.io/expose-namespaced";

/// Images imported, probes passed twice, seconds of `minReadySeconds`: half a minute on an idle machine.
const ROLLING_OUT: Duration = Duration::from_secs(240);

/// Deploys it like the gateway of this Deployment and ClusterRole in namespace portico, for one port.
pub(crate) fn deploy(seed: &Seed, namespace: &str, like: &str, clusters_from: &str, port: u16) {
    let kubectl = seed.kubectl();
    let mut spec = kubectl.get(&["deployment", "-n", "portico", like]).unwrap()["spec"].take();
    spec["replicas"] = json!(1);
    spec["template"]["spec"]["containers"][0]["args"] = json!([
        "gateway",
        format!("--namespace={namespace}"),
        format!("--clusters-from={clusters_from}"),
        format!("--expose-annotation={EXPOSE_NAMESPACED}"),
        "--sni-listen=off",
        "--tunnel-listen=off",
        "--admin-listen=$(POD_IP):8002",
    ]);
    let account = spec["template"]["spec"]["serviceAccountName"].clone();
    let metadata = json!({"name": "portico-gateway", "namespace": namespace});
    let port = json!({"name": "secure", "port": port, "targetPort": port});
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": like});
    let objects = [
        json!({
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": account, "namespace": namespace},
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }),
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}),
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "front-loadbalancer", "namespace": namespace},
            "spec": {
                "type": "LoadBalancer",
                "externalTrafficPolicy": "Local",
                "selector": spec["selector"]["matchLabels"],
                "ports": [port],
            },
        }),
    ];
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": objects})).unwrap();
}

/// The address of its load balancer, once it serves.
pub(crate) fn address(seed: &Seed, namespace: &str) -> Ipv4Addr {
    seed.kubectl().wait_rolled_out(namespace, "portico-gateway", ROLLING_OUT).unwrap();
    seed.give_address(namespace, "front-loadbalancer").unwrap()
}
