//! `portico routes`: what would be exposed, where, by which object, in which state.

use crate::common::{Process, directory, get, run, stdout, without_path};

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
    insta::assert_snapshot!(without_path(&stdout(&output), folder.path()));
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
    let printed = stdout(&run(&["check", folder]));
    assert!(
        printed.contains("warning: Cluster tunnelled: no address can be given to its users"),
        "{printed}"
    );
    let printed = stdout(&run(&["check", folder, "--node-address", "192.0.2.1"]));
    assert!(!printed.contains("no address"), "{printed}");
}

const VOID: &str = r#"
apiVersion: v1
kind: Service
metadata:
  name: void
  namespace: cluster-void
  annotations: {nodeport-proxy.k8s.io/expose: "yes, please"}
spec:
  ports: [{name: secure, port: 443}]
---
apiVersion: v1
kind: Service
metadata:
  name: unmapped
  namespace: cluster-void
  annotations: {nodeport-proxy.k8s.io/expose: SNI, nodeport-proxy.k8s.io/port-mapping: "{"}
spec:
  ports: [{name: secure, port: 443}]
"#;

#[test]
fn what_is_not_exposed_as_written_is_listed_as_check_lists_it() {
    let folder = directory(&[("void.yaml", VOID), ("broken.yaml", "kind: [\n")]);
    let folder = folder.path().to_str().unwrap();
    let checked = stdout(&run(&["check", folder]));
    let output = run(&["routes", folder]);
    assert_eq!(output.status.code(), Some(0));
    let table = stdout(&output);
    let listed = table.split_once("PROBLEMS\n").unwrap().1;
    assert_eq!(Some(listed), checked.rsplit_once("2 objects").map(|(lines, _)| lines));
    for reason in ["void", "no JSON object", "unclosed bracket"] {
        assert!(listed.contains(reason), "{listed}");
    }
    let json = |verb| -> serde_json::Value {
        serde_json::from_slice(&run(&[verb, "-o", "json", folder]).stdout).unwrap()
    };
    assert_eq!(json("routes")["problems"], json("check"));
}

#[test]
fn a_running_gateway_lists_the_same_problems() {
    let folder = directory(&[("void.yaml", VOID), ("broken.yaml", "kind: [\n")]);
    let folder = folder.path().to_str().unwrap();
    let off = ["--sni-listen", "off", "--tunnel-listen", "off", "--admin-listen", "127.0.0.1:0"];
    let mut gateway = Process::start(&[&["gateway", "--manifests", folder][..], &off].concat());
    let line = gateway.wait_for("listener=admin");
    let admin = line.rsplit(':').next().unwrap().trim().parse().unwrap();
    gateway.wait_for("routes in force");
    let reasons = |path| -> Vec<String> {
        let listing: serde_json::Value = serde_json::from_str(&get(admin, path).1).unwrap();
        let reason = |problem: &serde_json::Value| problem["reason"].as_str().unwrap().to_owned();
        listing["problems"].as_array().unwrap().iter().map(reason).collect()
    };
    let mut all = reasons("/routes");
    all.sort();
    assert_eq!(all, ["bad-mapping", "syntax", "void-annotation"]);
    assert_eq!(reasons("/routes?cluster=void").len(), 2);
    assert!(get(admin, "/routes?o=table").1.contains("PROBLEMS\n"));
}

#[test]
fn a_namespace_leaves_only_its_cluster_and_one_without_anything_is_reported() {
    let folder = directory(&[("site.yaml", SITE)]);
    let folder = folder.path().to_str().unwrap();
    let table = stdout(&run(&["routes", folder, "--namespace", "cluster-old"]));
    assert!(table.contains("cluster-old/by-hand") && !table.contains("tunnelled"), "{table}");
    let table = stdout(&run(&["routes", folder, "--namespace", "nope"]));
    assert!(
        table.contains("warning: no Service and no Cluster belongs to the namespace \"nope\""),
        "{table}"
    );
    let checked = stdout(&run(&["check", folder, "--namespace", "cluster-tunnelled"]));
    assert!(!checked.contains("namespace"), "{checked}");
}

#[test]
fn node_ports_that_no_gateway_has_remembered_are_said_to_be_drawn() {
    let site = SITE.replace("exposeStrategy: Tunneling", "exposeStrategy: NodePort");
    let folder = directory(&[("site.yaml", &site)]);
    let path = folder.path().to_str().unwrap();
    let json = || -> serde_json::Value {
        serde_json::from_slice(&run(&["routes", "-o", "json", path]).stdout).unwrap()
    };
    let drawn = json()["drawnNodePorts"].clone();
    assert_eq!(drawn.as_array().unwrap().len(), 2, "that of the written Service is not drawn: {drawn}");
    let note = format!("one may draw others: {}, {}\n", drawn[0], drawn[1]);
    let table = stdout(&run(&["routes", path]));
    assert!(table.contains(&note), "{table}");
    let remembered = serde_json::json!({"format": 1, "nodePorts": {
        "cluster-tunnelled/apiserver-external/secure": 30_001,
        "cluster-tunnelled/konnectivity-server/secure": 30_002,
    }});
    std::fs::create_dir(folder.path().join(".portico")).unwrap();
    std::fs::write(folder.path().join(".portico/remembered.json"), remembered.to_string()).unwrap();
    assert_eq!(json().get("drawnNodePorts"), None);
    assert!(!stdout(&run(&["routes", path])).contains("drawn"));
}

#[test]
fn node_ports_are_not_remembered_by_a_question() {
    let folder =
        directory(&[("site.yaml", &SITE.replace("exposeStrategy: Tunneling", "exposeStrategy: NodePort"))]);
    let output = run(&["routes", folder.path().to_str().unwrap()]);
    assert!(stdout(&output).contains("port"), "{}", stdout(&output));
    assert!(!folder.path().join(".portico").exists());
}
