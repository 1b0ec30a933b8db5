//! `portico routes`: what would be exposed, where, by which object, in which state.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use common::{directory, run, stdout};

const SITE: &str = r#"
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  ingress: {domain: kkp.example.com}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: kubermatic, namespace: kubermatic}
spec: {seedDNSOverwrite: north}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: tunnelled}
spec:
  exposeStrategy: Tunneling
  apiServerAllowedIPRanges: {cidrBlocks: [198.51.100.0/24]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: apiserver-external-1
  namespace: cluster-tunnelled
  labels: {kubernetes.io/service-name: apiserver-external}
addressType: IPv4
endpoints:
- {addresses: [192.0.2.1], conditions: {ready: true}}
- {addresses: [192.0.2.2], conditions: {ready: false}}
ports: [{name: secure, port: 6443}]
---
apiVersion: v1
kind: Service
metadata:
  name: by-hand
  namespace: cluster-old
  creationTimestamp: 2026-01-01T00:00:00Z
  annotations:
    nodeport-proxy.k8s.io/expose: NodePort,SNI
    nodeport-proxy.k8s.io/port-mapping: '{"secure": "old.example.com"}'
spec:
  type: NodePort
  ports: [{name: secure, port: 443, nodePort: 30443}]
---
apiVersion: v1
kind: Service
metadata:
  name: late
  namespace: cluster-new
  creationTimestamp: 2026-02-01T00:00:00Z
  annotations:
    nodeport-proxy.k8s.io/expose: SNI
    nodeport-proxy.k8s.io/port-mapping: '{"secure": "old.example.com"}'
spec:
  ports: [{name: secure, port: 443}]
"#;

#[test]
fn the_table_says_what_leads_where_and_what_stands_in_the_way() {
    let folder = directory(&[("site.yaml", SITE)]);
    let output = run(&["routes", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    insta::assert_snapshot!(stdout(&output));
}

#[test]
fn json_has_what_the_table_has() {
    let folder = directory(&[("site.yaml", SITE)]);
    let output = run(&["routes", "-o", "json", folder.path().to_str().unwrap()]);
    let listing: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    insta::assert_json_snapshot!(listing["clusters"]);
    insta::assert_json_snapshot!(listing["routes"][0]);
}

#[test]
fn clusters_without_a_proxy_are_shown_on_the_nodes_of_their_seed() {
    let site = SITE
        .replace("{seedDNSOverwrite: north}", "{nodeportProxy: {disable: true}}")
        .replace("exposeStrategy: Tunneling", "exposeStrategy: NodePort");
    let folder = directory(&[("site.yaml", &site)]);
    let folder = folder.path().to_str().unwrap();
    let nodes = ["--node-address", "192.0.2.1,192.0.2.2"];
    let table = run(&[&["routes", folder][..], &nodes].concat());
    assert!(stdout(&table).contains("seed nodes 192.0.2.1,192.0.2.2"), "{}", stdout(&table));
    let table = run(&["routes", folder]);
    assert!(stdout(&table).contains("--node-address is not given"), "{}", stdout(&table));
    let json = run(&[&["routes", folder, "-o", "json"][..], &nodes].concat());
    let listing: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let cluster = &listing["clusters"][0];
    assert_eq!(cluster["answeredBy"], "seedNodes");
    assert_eq!(cluster["nodeIps"], serde_json::json!(["192.0.2.1", "192.0.2.2"]));
    assert_eq!(cluster["address"]["ip"], "192.0.2.1");
    assert_eq!(cluster["address"]["externalName"], "tunnelled.kubermatic.kkp.example.com");
    assert_eq!(cluster["address"]["internalURL"], "apiserver-external.cluster-tunnelled.svc.cluster.local.");
}

#[test]
fn an_address_that_nobody_can_know_is_a_warning_of_check() {
    let site = SITE
        .replace("spec:\n  ingress: {domain: kkp.example.com}", "spec: {}")
        .replace("{seedDNSOverwrite: north}", "{nodeportProxy: {disable: true}}")
        .replace("exposeStrategy: Tunneling", "exposeStrategy: NodePort");
    let folder = directory(&[("site.yaml", &site)]);
    let folder = folder.path().to_str().unwrap();
    let told = stdout(&run(&["check", folder]));
    assert!(told.contains("warning: Cluster tunnelled: no address can be given to its users"), "{told}");
    let told = stdout(&run(&["check", folder, "--node-address", "192.0.2.1"]));
    assert!(!told.contains("no address"), "{told}");
}

#[test]
fn node_ports_are_not_remembered_by_a_question() {
    let folder =
        directory(&[("site.yaml", &SITE.replace("exposeStrategy: Tunneling", "exposeStrategy: NodePort"))]);
    let output = run(&["routes", folder.path().to_str().unwrap()]);
    assert!(stdout(&output).contains("port"), "{}", stdout(&output));
    assert!(!folder.path().join(".portico").exists());
}
