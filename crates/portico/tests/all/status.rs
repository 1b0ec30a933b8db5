//! `portico status` beside a real API server that is a seed without a gateway.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use portico_lab::ApiServer;
use serde_json::{Value, json};

use crate::common::{stderr, stdout};

#[test]
fn what_clusters_that_are_gone_have_left_is_listed() {
    let api = ApiServer::start("status").unwrap();
    let (kubectl, admin) = (api.kubectl(), api.admin().unwrap());
    for definitions in [
        include_str!("../../../../deploy/crds-kubermatic.yaml"),
        include_str!("../../../../deploy/crds.yaml"),
    ] {
        kubectl.apply(definitions).unwrap();
    }
    for kind in ["clusters", "seeds", "kubermaticconfigurations"] {
        kubectl.wait_served(&format!("{kind}.kubermatic.k8c.io")).unwrap();
    }
    let namespace = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": format!("cluster-{name}"),
            "labels": {"portico.k8c.io/cluster": name}}})
    };
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "volume-1"},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/x"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "Exists"}]}]}},
            "claimRef": {"namespace": "cluster-gone", "name": "data-etcd-0"}}});
    let cluster = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": {"name": "here"}, "spec": {"cloud": {"dc": "lab"}}});
    for object in [namespace("here"), namespace("gone"), volume, cluster] {
        kubectl.apply_json(&object).unwrap();
    }
    let status = r#"{"status": {"phase": "Released"}}"#;
    kubectl.run(&["patch", "pv", "volume-1", "--subresource=status", "--type=merge", "-p", status]).unwrap();
    let portico = |flags: &[&str]| {
        let mut command = api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(["status", "--kubeconfig"]).arg(&admin).args(flags).output().unwrap()
    };
    let output = portico(&[]);
    let printed = stdout(&output);
    assert!(printed.contains("Namespace cluster-gone, of Cluster gone\n"), "{printed}{}", stderr(&output));
    assert!(printed.contains("PersistentVolume volume-1, of Cluster gone\n"), "{printed}");
    assert!(!printed.contains("cluster-here,"), "{printed}");
    let output = portico(&["-o", "json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["orphans"].as_array().unwrap().len(), 2, "{found}");
}
