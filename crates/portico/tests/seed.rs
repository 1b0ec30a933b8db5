//! `portico check --kubeconfig` against a real API server that holds what KKP's controllers would have made.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::path::Path;
use std::process::{Command, Output};

use portico_lab::{ApiServer, kkp};

const KKP: &str = "
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: north, namespace: kubermatic}
spec: {nodeportProxy: {envoy: {loadBalancerService: {sourceRanges: [203.0.113.0/24]}}}}
---
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec: {ingress: {domain: kkp.example.com}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: a}
spec: {exposeStrategy: NodePort}
status: {address: {url: 'https://a.north.kkp.example.com:31234', port: 31234}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: t}
spec: {exposeStrategy: Tunneling}
status: {address: {url: 'https://t.north.kkp.example.com:6443', port: 6443}}
";

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-a
  annotations: {nodeport-proxy.k8s.io/expose: NodePort}
spec: {type: NodePort, ports: [{name: secure, port: 443, targetPort: 31234, nodePort: 31234}]}
---
apiVersion: v1
kind: Service
metadata:
  name: apiserver-external
  namespace: cluster-t
  annotations:
    nodeport-proxy.k8s.io/expose: SNI,Tunneling
    nodeport-proxy.k8s.io/port-mapping: '{\"secure\": \"t.north.kkp.example.com\"}'
spec: {ports: [{name: secure, port: 443, targetPort: 6443}]}
---
apiVersion: v1
kind: Service
metadata: {name: nodeport-proxy, namespace: kubermatic}
spec:
  type: LoadBalancer
  ports:
  - {name: healthz, port: 8002, targetPort: 8002}
  - {name: sni-listener, port: 6443, targetPort: 6443}
  - {name: tunneling-listener, port: 8088, targetPort: 8088}
  - {name: cluster-a-apiserver-external-31234, port: 31234, targetPort: 31234}
";

fn endpoint(namespace: &str, address: &str, port: u16) -> String {
    format!(
        "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: apiserver-external-1
  namespace: {namespace}
  labels: {{kubernetes.io/service-name: apiserver-external}}
addressType: IPv4
endpoints: [{{addresses: [{address}], conditions: {{ready: true}}}}]
ports: [{{name: secure, port: {port}}}]
"
    )
}

fn check(kubeconfig: &Path, more: &[&str]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portico"));
    let output = command.args(["check", "--kubeconfig"]).arg(kubeconfig).args(more).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, said)
}

#[test]
fn a_dry_run_says_what_each_cluster_would_get_and_what_is_to_be_done() {
    let api = ApiServer::start("seed-check").unwrap();
    let (kubeconfig, kubectl) = (api.admin().unwrap(), api.kubectl());

    // A seed without KKP has nothing that KKP serves.
    let (output, said) = check(&kubeconfig, &[]);
    assert_eq!(output.status.code(), Some(0), "{said}{output:?}");

    kkp::install(kubectl).unwrap();
    for name in ["kubermatic", "cluster-a", "cluster-t"] {
        kubectl.apply(&format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")).unwrap();
    }
    kubectl.apply(KKP).unwrap();
    let slices = endpoint("cluster-a", "192.0.2.7", 31234) + &endpoint("cluster-t", "192.0.2.8", 6443);
    kubectl.apply(&(SERVICES.to_owned() + &slices)).unwrap();

    let (output, said) = check(&kubeconfig, &[]);
    assert_eq!(output.status.code(), Some(0), "{said}{output:?}");
    for expected in [
        "https://a.north.kkp.example.com:31234",
        "https://t.north.kkp.example.com:6443",
        "192.0.2.7:31234",
        "apiserver-external.cluster-t.svc.cluster.local:443",
        "Cluster t: the agents on its nodes are KKP's",
        "Service kubermatic/nodeport-proxy: port 8002",
        "gateways read ExposedClusters and admit nobody without: a, t have none",
        "0 errors",
    ] {
        assert!(said.contains(expected), "no {expected} in:\n{said}");
    }

    // What is served today and would not be: the answer is no, and a program can read why.
    let (output, said) = check(&kubeconfig, &["--endpoint-networks", "192.0.2.0/29", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "{said}{output:?}");
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    let broken = |problem: &&serde_json::Value| problem["reason"] == "would-break";
    let broken: Vec<_> = report["problems"].as_array().unwrap().iter().filter(broken).collect();
    assert_eq!(broken.len(), 2, "a host and an authority: {broken:?}");
    assert_eq!(report["clusters"][0]["url"], "https://a.north.kkp.example.com:31234");

    // Without the right to read a kind, what follows from it is not left out unseen.
    let nobody = api.access().kubeconfig("nobody", None).unwrap();
    let (output, _) = check(&nobody, &[]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("listing KubermaticConfigurations") && said.contains("forbidden"), "{said}");

    // The manifest for the admin ports is one that an API server takes, every field of it.
    kubectl.run(&["create", "namespace", "portico"]).unwrap();
    let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/network-policy.yaml");
    kubectl.run(&["apply", "--validate=strict", "-f", policy]).unwrap();
}
