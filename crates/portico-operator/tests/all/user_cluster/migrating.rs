//! What is inside a cluster that migrates from NodePort to Tunneling, state by state. The record of the
//! migration is written by hand: the controller that takes it on does not run.

use anyhow::{Result, ensure};
use portico_expose::exposure::CLUSTER_LABEL;
use portico_operator::UserClusterSettings;
use serde_json::{Value, json};

use super::{Stage, put_kubeconfig, wait_reason};
use crate::support::{Running, cluster, insides};
use crate::until;

/// The workloads that a migration adds, and those that a strategy has anyway.
const WORKLOADS: [&str; 4] = [
    "daemonset.apps/portico-agent",
    "daemonset.apps/portico-migration",
    "deployment.apps/konnectivity-agent",
    "deployment.apps/konnectivity-agent-next",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inside_a_cluster_that_migrates_is_what_each_state_needs_and_pods_are_led_to_the_first_door() {
    let stage = Stage::start("migrating").await;
    prepare(&stage);
    let insides = UserClusterSettings { hosted: None, ..insides(Some("registry.example.com/portico:1")) };
    let operator = Running::start_insides(&stage.client, "insides", insides);
    let [agent, probe, konnectivity, next] = WORKLOADS;

    record(&stage, "NodePort", "Opening");
    wait(&stage, &[agent, konnectivity], "203.0.113.9");

    record(&stage, "NodePort", "Proving");
    wait(&stage, &[agent, probe, konnectivity, next], "203.0.113.9");
    wait_reason(&stage.kubectl, "a", "Ready");
    let proven = proxy_server(&stage, "konnectivity-agent-next").unwrap();
    assert_eq!(proven, "--proxy-server-host=konnectivity-server.a.example.com");
    assert_eq!(proxy_server(&stage, "konnectivity-agent").unwrap(), "--proxy-server-host=a.example.com");
    let before = stage.inside.get(&["deployment", "konnectivity-agent-next", "-n", "kube-system"]).unwrap();

    // The doors change places.
    record(&stage, "Tunneling", "Moving");
    wait(&stage, &[agent, konnectivity, next], "100.64.30.10");
    until("Konnectivity by the first door", || {
        ensure!(proxy_server(&stage, "konnectivity-agent")? == proven);
        Ok(())
    });
    let after = stage.inside.get(&["deployment", "konnectivity-agent-next", "-n", "kube-system"]).unwrap();
    assert_eq!(after["metadata"]["generation"], before["metadata"]["generation"], "what was proven runs on");

    record(&stage, "Tunneling", "MovingNodes");
    wait(&stage, &[agent, probe, konnectivity], "100.64.30.10");
    nodes_are_moved_as_the_settings_say(&stage);

    // Nodes that come late are moved too.
    record(&stage, "Tunneling", "Quieting");
    wait_reason(&stage.kubectl, "a", "Ready");
    wait(&stage, &[agent, probe, konnectivity], "100.64.30.10");

    // Somebody went back: what is closed has nothing left inside.
    record(&stage, "NodePort", "Closing");
    wait(&stage, &[konnectivity], "203.0.113.9");
    wait_reason(&stage.kubectl, "a", "Ready");
    operator.stop().await;
}

/// From the door that closes to the one in force, in place or by hand.
fn nodes_are_moved_as_the_settings_say(stage: &Stage) {
    let migration = || stage.inside.get(&["daemonset", "portico-migration", "-n", "kube-system"]);
    let moves = |how: &[&str]| {
        until(&format!("nodes are moved by {how:?}"), || {
            let object = migration()?;
            let pods = &object["spec"]["template"]["spec"];
            let found = pods["initContainers"][0]["args"].as_array().into_iter().flatten();
            let found: Vec<&str> = found.filter_map(Value::as_str).collect();
            ensure!(found == how, "{found:?}");
            ensure!(pods.get("hostPID").is_some() != how.is_empty(), "{pods}");
            Ok(())
        });
    };
    let record = stage.kubectl.get(&["exposedcluster", "a"]).unwrap();
    let since: jiff::Timestamp =
        serde_json::from_value(record["spec"]["migration"]["since"].clone()).unwrap();
    let turn = format!("--turn=portico.k8c.io/moves={}", since.as_nanosecond());
    let in_place = ["join", "move", "--server=https://a.example.com:6443", "--in-pod", &turn];
    moves(&in_place);
    let left = migration().unwrap()["spec"]["template"]["spec"]["containers"].clone();
    assert_eq!(left[0]["args"][2], "https://a.example.com:31234");
    assert_eq!(left.as_array().unwrap().len(), 1, "no container of the probe is left: {left}");

    let annotate = |settings: &str| {
        let setting = format!("portico.k8c.io/migration={settings}");
        stage.kubectl.run(&["annotate", "--overwrite", "cluster", "a", &setting]).unwrap();
    };
    annotate("nodes=by-hand");
    moves(&[]);
    annotate("parallel=3,nodes=drained");
    moves(&[&in_place[..4], &["--drain", &turn]].concat());
    annotate("nodes=as-before");
    moves(&[]);
}

/// A cluster, and what controllers that do not run would make for it.
fn prepare(stage: &Stage) {
    let kubectl = &stage.kubectl;
    kubectl.apply_json(&cluster("a", "NodePort")).unwrap();
    let labels = json!({CLUSTER_LABEL: "a"});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "cluster-a", "labels": labels}});
    kubectl.apply_json(&namespace).unwrap();
    let ports = json!([{"port": 443, "nodePort": 31_999}]);
    let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "konnectivity-server", "namespace": "cluster-a"},
        "spec": {"type": "NodePort", "ports": ports}});
    kubectl.apply_json(&service).unwrap();
    put_kubeconfig(kubectl, "a", &stage.kubeconfig().to_yaml());
}

/// Writes which door is the first, and how far the migration is.
fn record(stage: &Stage, first: &str, state: &str) {
    let door = |strategy: &str| match strategy {
        "Tunneling" => json!({"exposeStrategy": strategy, "tunnel": {"agentIP": "100.64.30.10"},
            "address": {"externalName": "a.example.com", "url": "https://a.example.com:6443",
                "port": 6_443, "ip": "203.0.113.9"}}),
        _ => json!({"exposeStrategy": strategy,
            "address": {"externalName": "a.example.com", "url": "https://a.example.com:31234",
                "port": 31_234, "ip": "203.0.113.9"}}),
    };
    let other = if first == "Tunneling" { "NodePort" } else { "Tunneling" };
    let mut spec = door(first);
    spec["seed"] = "north".into();
    spec["migration"] = json!({"state": state, "since": "2026-01-02T03:04:05Z", "second": door(other)});
    let object = json!({"apiVersion": "portico.k8c.io/v1alpha1", "kind": "ExposedCluster",
        "metadata": {"name": "a"}, "spec": spec});
    stage.kubectl.apply_json(&object).unwrap();
}

/// Waits until these workloads are inside, no others of [`WORKLOADS`], and pods are led to `address`.
fn wait(stage: &Stage, expected: &[&str], address: &str) {
    until(&format!("{expected:?}, and pods led to {address}"), || {
        let found = stage.inside.run(&["get", "daemonset,deployment", "-n", "kube-system", "-o=name"])?;
        let mut found: Vec<&str> = found.lines().collect();
        found.sort_unstable();
        ensure!(found == expected, "{found:?}");
        let slice = stage.inside.get(&["endpointslice", "kubernetes"])?;
        ensure!(slice["endpoints"][0]["addresses"] == json!([address]), "{slice}");
        Ok(())
    });
}

/// Where Konnectivity agents go.
fn proxy_server(stage: &Stage, deployment: &str) -> Result<String> {
    let found = stage.inside.get(&["deployment", deployment, "-n", "kube-system"])?;
    let args = found.pointer("/spec/template/spec/containers/0/args").and_then(Value::as_array);
    let mut args = args.into_iter().flatten().filter_map(Value::as_str);
    let host = args.find(|arg| arg.starts_with("--proxy-server-host="));
    Ok(host.unwrap_or_default().to_owned())
}
