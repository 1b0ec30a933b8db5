//! The manifests in `deploy/` and of hosted control planes, held against the model of network requirements,
//! and against what scrapes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use portico_ports::model::{self, Ports};
use portico_yaml::Documents;
use serde_json::{Value, json};

use crate::common::{directory, run, stderr, stdout};

const SITE: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec:
  ingress: {domain: kkp.example.com}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: north, namespace: kubermatic}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: hosted, annotations: {portico.k8c.io/prometheus: 'true'}}
spec: {exposeStrategy: Tunneling, version: 1.35.8}
";

/// Whether a row of Portico leads to this port of this role, from `source` if it is given.
fn leads_to(source: Option<&str>, destination: &str, port: u64) -> bool {
    let rows = model::product("portico").unwrap().rows.iter();
    let port = u16::try_from(port).unwrap();
    rows.filter(|row| row.destination.role == destination)
        .filter(|row| source.is_none_or(|role| row.source.role == role))
        .flat_map(|row| row.ports)
        .any(|ports| matches!(ports, Ports::Range(range) if range.contains(port)))
}

/// Every number that has this key, at whatever depth.
fn numbers(value: &Value, key: &str, found: &mut Vec<u64>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get(key).and_then(Value::as_u64));
            fields.values().for_each(|inner| numbers(inner, key, found));
        }
        Value::Array(items) => items.iter().for_each(|inner| numbers(inner, key, found)),
        _ => {}
    }
}

/// The objects of every manifest below a folder, by the name of its file.
fn manifests(folder: &Path) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(manifests(&path));
            continue;
        }
        let (name, text) =
            (path.file_name().unwrap().display().to_string(), std::fs::read_to_string(&path).unwrap());
        found.extend(Documents::new(&text).map(|document| (name.clone(), document.unwrap().to_value())));
    }
    found
}

fn deployed() -> Vec<(String, Value)> {
    manifests(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy"))
}

/// The role of the pods, or of the addresses, that a NetworkPolicy of ours names.
fn role_of(peer: &Value) -> &'static str {
    let text = peer.to_string();
    let roles = [
        ("ipBlock", "seed-api"),
        ("portico-operator", "seed"),
        ("prometheus", "probes"),
        ("apiserver", "control-plane"),
    ];
    let role = roles.iter().find(|(word, _)| text.contains(word));
    role.unwrap_or_else(|| panic!("{text}: whose pods are these?")).1
}

/// Each port of a policy's incoming rules has a row, from each role that is admitted. Returns how many were
/// compared.
fn compare_policy(policy: &Value, role: &str) -> usize {
    let mut compared = 0;
    for rule in policy["spec"]["ingress"].as_array().into_iter().flatten() {
        let sources: Vec<_> = match rule["from"].as_array() {
            Some(peers) => peers.iter().map(|peer| Some(role_of(peer))).collect(),
            None => vec![None],
        };
        let mut ports = Vec::new();
        numbers(&rule["ports"], "port", &mut ports);
        for port in ports {
            for &source in &sources {
                let name = &policy["metadata"]["name"];
                assert!(leads_to(source, role, port), "{name}: no row leads from {source:?} to {port}");
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn every_port_of_the_pods_in_deploy_has_a_row() {
    let roles = BTreeMap::from([
        ("gateway.yaml", "front"),
        ("front.yaml", "seed"),
        ("operator.yaml", "seed"),
        ("monitoring.yaml", "seed"),
        ("agent.yaml", "worker-pods"),
        ("server-patch.yaml", "control-plane"),
    ]);
    let mut compared = Vec::new();
    for (file, object) in deployed() {
        let mut ports = Vec::new();
        numbers(&object, "containerPort", &mut ports);
        for port in ports {
            let role = roles.get(&*file).unwrap_or_else(|| panic!("{file} has pods: name their role"));
            assert!(leads_to(None, role, port), "{file}: no row leads to {port} of {role}");
            compared.push(port);
        }
        let scraped = &object["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"];
        if let Some(port) = scraped.as_str() {
            let port = port.parse().unwrap();
            assert!(leads_to(Some("probes"), roles[&*file], port), "{file}: Prometheus has no way to {port}");
        }
    }
    compared.sort_unstable();
    assert_eq!(compared, [6443, 8002, 8002, 8002, 8007, 8093, 8132, 8134, 9443]);
}

#[test]
fn what_the_network_policies_of_deploy_admit_is_in_the_rows() {
    let mut compared = 0;
    for (file, policy) in deployed() {
        if file == "network-policy.yaml" {
            let of_gateway = policy["metadata"]["name"] == "portico-gateway";
            compared += compare_policy(&policy, if of_gateway { "front" } else { "seed" });
        }
    }
    assert_eq!(compared, 13);
}

#[test]
fn every_port_of_a_hosted_control_plane_has_a_row_and_so_has_what_its_policies_admit() {
    let folder = directory(&[("site.yaml", SITE)]);
    // Under `compact` etcd listens on loopback for its clients, and has no other members.
    for (layout, expected, rules) in [
        ("compact", [2378, 6443, 8132, 8134, 9090, 10257, 10259].as_slice(), 6),
        ("dedicated", &[2378, 2379, 2380, 6443, 8132, 8134, 9090, 10257, 10259], 8),
    ] {
        let manifests = ["--manifests", folder.path().to_str().unwrap()];
        let output =
            run(&[&["control-plane", "hosted", "--layout", layout, "-o", "json"], &manifests[..]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let planes: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let objects = planes[0]["objects"].as_array().unwrap();
        let mut ports = Vec::new();
        objects.iter().for_each(|object| numbers(object, "containerPort", &mut ports));
        for port in &ports {
            assert!(leads_to(None, "control-plane", *port), "{layout}: no row leads to {port}");
        }
        ports.sort_unstable();
        assert_eq!(ports, expected, "{layout}");
        let policies = objects.iter().filter(|object| object["kind"] == "NetworkPolicy");
        let compared: usize = policies.map(|policy| compare_policy(policy, "control-plane")).sum();
        assert_eq!(compared, rules, "{layout}");
    }
}

/// The Prometheus Operator does not read the annotations `prometheus.io/*`.
#[test]
fn every_pod_with_metrics_is_scraped_by_the_pod_monitor_and_named_by_its_series() {
    let all = deployed();
    let monitor = &all.iter().find(|(file, _)| file == "pod-monitor.yaml").unwrap().1;
    let chosen = &monitor["spec"]["selector"]["matchExpressions"][0];
    assert_eq!((&chosen["key"], &chosen["operator"]), (&json!("app.kubernetes.io/name"), &json!("In")));
    let endpoints = monitor["spec"]["podMetricsEndpoints"].as_array().unwrap();
    let mut scraped = BTreeSet::new();
    for (file, object) in &all {
        let pod = &object["spec"]["template"];
        let annotations = &pod["metadata"]["annotations"];
        let annotation = |name: &str| annotations[format!("prometheus.io/{name}")].as_str();
        let Some(port) = annotation("port") else { continue };
        let port: u64 = port.parse().unwrap();
        let name = &pod["metadata"]["labels"]["app.kubernetes.io/name"];
        assert!(chosen["values"].as_array().unwrap().contains(name), "{file}: {name}");
        assert_eq!(object["metadata"]["namespace"], monitor["metadata"]["namespace"], "{file}");
        let ports = pod["spec"]["containers"][0]["ports"].as_array().unwrap();
        let named = ports.iter().find(|known| known["containerPort"] == port).unwrap();
        let of_port = endpoints.iter().filter(|endpoint| endpoint["port"] == named["name"]);
        let [scrape] = of_port.collect::<Vec<_>>()[..] else { panic!("{file}: {endpoints:?}") };
        assert_eq!(scrape["path"].as_str(), annotation("path"), "{file}");
        // Alerts name a pod by `instance`.
        let relabelings =
            json!([{"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}]);
        assert_eq!(scrape["relabelings"], relabelings, "{file}");
        scraped.insert(name.as_str().unwrap());
    }
    let chosen: BTreeSet<_> =
        chosen["values"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(scraped, chosen);
}

#[test]
fn a_pod_that_is_not_ready_keeps_no_node_from_being_drained() {
    let all = deployed();
    let budgets = all.iter().filter(|(_, object)| object["kind"] == "PodDisruptionBudget");
    let policies: Vec<_> = budgets
        .map(|(file, budget)| (file.as_str(), budget["spec"]["unhealthyPodEvictionPolicy"].as_str()))
        .collect();
    assert_eq!(policies.len(), 5, "{policies:?}");
    assert!(policies.iter().all(|(_, policy)| *policy == Some("AlwaysAllow")), "{policies:?}");
}
