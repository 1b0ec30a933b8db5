//! `portico nodes` beside a real API server with Nodes and pods that no kubelet made.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::process::Output;

use portico_lab::ApiServer;
use serde_json::{Value, json};

use crate::common::{stderr, stdout};

#[test]
fn each_node_is_listed_with_its_paths_and_one_that_lacks_them_makes_the_answer_no() {
    let api = ApiServer::start("nodes").unwrap();
    let kubectl = api.kubectl();
    let admin = api.host().dir().join("admin.kubeconfig");
    std::fs::write(&admin, api.admin_with_everything().unwrap()).unwrap();
    let nodes = |flags: &[&str]| -> Output {
        let mut command = api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(["nodes", "--cluster-kubeconfig"]).arg(&admin).args(flags).output().unwrap()
    };
    let output = nodes(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("has no node yet: portico join token"), "{}", stdout(&output));

    // More than one answer has.
    for number in 0..60 {
        join(&api, &format!("n{number:02}"), "True");
    }
    let output = nodes(&["-o", "json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = found["nodes"].as_array().unwrap();
    assert_eq!(rows.len(), 60);
    assert_eq!(
        rows[59],
        json!({"name": "n59", "status": "Ready", "version": "v1.34.4", "address": "192.0.2.9",
        "pods": "direct", "wayBack": "direct", "ok": true, "problems": []})
    );

    let labels = json!({"app.kubernetes.io/name": "portico-agent"});
    let agents = json!({"apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "portico-agent", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "agent", "image": "any"}]}}}});
    kubectl.apply_json(&agents).unwrap();
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "portico-agent-x", "namespace": "kube-system", "labels": labels},
        "spec": {"nodeName": "n00", "automountServiceAccountToken": false,
            "containers": [{"name": "agent", "image": "any"}]}});
    kubectl
        .apply_json(&json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": "kube-system"}}))
        .unwrap();
    kubectl.apply_json(&pod).unwrap();
    let ready = json!({"status": {"phase": "Running",
        "containerStatuses": [{"name": "agent", "ready": true, "restartCount": 0, "image": "any",
            "imageID": "any", "state": {"running": {}}}]}});
    patch_status(&api, &["-n", "kube-system", "pod", "portico-agent-x"], &ready);
    join(&api, "n01", "Unknown");
    let output = nodes(&[]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let printed = stdout(&output);
    let line = |name: &str| printed.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(line("n00").contains("  agent  ") && !line("n00").contains("reach"), "{printed}");
    assert!(line("n01").contains("NotReady") && line("n02").contains("it has no agent"), "{printed}");
    assert!(printed.contains("60 nodes, 59 of them with a problem"), "{printed}");
}

fn join(api: &ApiServer, name: &str, ready: &str) {
    api.kubectl()
        .apply_json(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))
        .unwrap();
    let status = json!({"status": {
        "conditions": [{"type": "Ready", "status": ready}],
        "addresses": [{"type": "InternalIP", "address": "192.0.2.9"}],
        "nodeInfo": {"kubeletVersion": "v1.34.4", "architecture": "amd64", "bootID": "", "machineID": "",
            "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "", "osImage": "",
            "operatingSystem": "linux", "systemUUID": ""}}});
    patch_status(api, &["node", name], &status);
}

fn patch_status(api: &ApiServer, what: &[&str], status: &Value) {
    let status = status.to_string();
    let words = [&["patch"], what, &["--subresource=status", "--type=merge", "-p", &status]].concat();
    api.kubectl().run(&words).unwrap();
}
