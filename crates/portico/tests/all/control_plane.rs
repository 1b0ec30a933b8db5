//! `portico control-plane`: objects for kubectl, Secrets by name, and what keeps a cluster from being hosted.

use serde_json::Value;
use tempfile::TempDir;

use crate::common::{directory, run, stderr, stdout, without_path};

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
metadata: {name: exposed}
spec: {exposeStrategy: Tunneling, version: 1.35.8}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata:
  name: small
  annotations: {portico.k8c.io/layout: compact}
spec:
  exposeStrategy: Tunneling
  version: 1.35.8
";

fn site(more: &str) -> TempDir {
    directory(&[("site.yaml", &format!("{SITE}{more}"))])
}

fn control_plane(folder: &TempDir, more: &[&str]) -> std::process::Output {
    let mut arguments = vec!["control-plane", "--manifests", folder.path().to_str().unwrap()];
    arguments.extend(more);
    run(&arguments)
}

#[test]
fn a_cluster_with_a_layout_is_shown_with_its_secrets() {
    let folder = site("");
    let table = stdout(&control_plane(&folder, &[]));
    assert!(table.starts_with("CLUSTER small (Kubernetes 1.35.8, compact)\n"), "{table}");
    for line in [
        "StatefulSet            control-plane          1 × etcd, konnectivity-server, apiserver, \
         controller-manager, scheduler",
        "PersistentVolumeClaim  data-etcd-0            a volume of 5Gi",
        "authority of members and clients of etcd",
        "kubeconfig of system:kube-scheduler, signed by client-ca",
    ] {
        assert!(table.contains(line), "{line}\n{table}");
    }
    let planes: Value = serde_json::from_str(&stdout(&control_plane(&folder, &["-o", "json"]))).unwrap();
    assert_eq!(planes.as_array().unwrap().len(), 1);
    assert_eq!(planes[0]["objects"][0]["kind"], "Namespace");
    let secrets = planes[0]["secrets"].as_array().unwrap();
    assert!(secrets.iter().any(|secret| secret["name"] == "service-account-key"));
}

/// What is reviewed, and may be committed.
#[test]
fn the_yaml_is_for_kubectl_and_holds_no_secret() {
    let folder = site("");
    let yaml = stdout(&control_plane(&folder, &["small", "-o", "yaml"]));
    assert!(yaml.starts_with("# Cluster small: Kubernetes 1.35.8, compact. "), "{yaml}");
    assert!(yaml.contains("\n#   admin-kubeconfig (kubeconfig): kubeconfig of admin (system:masters)"));
    assert!(yaml.contains("\n---\napiVersion: apps/v1\nkind: StatefulSet\n"), "{yaml}");
    assert!(!yaml.contains("kind: Secret") && !yaml.contains("BEGIN"), "{yaml}");
    let mirrored = ["small", "-o", "yaml", "--registry-mirror", "mirror.example.com"];
    let mirrored = stdout(&control_plane(&folder, &mirrored));
    assert!(mirrored.contains("mirror.example.com/kube-apiserver:v1.35.8"), "{mirrored}");
}

#[test]
fn another_layout_can_be_tried_and_a_cluster_without_one_is_not_hosted() {
    let folder = site("");
    let tried = control_plane(&folder, &["exposed", "--layout", "dedicated"]);
    assert!(stdout(&tried).starts_with("CLUSTER exposed (Kubernetes 1.35.8, dedicated)\n"));
    let not_hosted = control_plane(&folder, &["exposed"]);
    assert_eq!(not_hosted.status.code(), Some(1));
    assert!(stderr(&not_hosted).contains("Portico does not host this cluster"), "{}", stderr(&not_hosted));
    let unknown = control_plane(&folder, &["elsewhere"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("there is no Cluster elsewhere (there are: exposed, small)"));
    assert_eq!(run(&["control-plane"]).status.code(), Some(2));
}

#[test]
fn what_keeps_a_cluster_from_being_hosted_has_file_and_line() {
    let folder = site("  clusterNetwork:\n    services: {cidrBlocks: [172.25.0.0/20]}\n");
    let expected = "site.yaml:25: error: Cluster small: spec.clusterNetwork.services.cidrBlocks: \
                    172.25.0.0/20 overlaps the pod network 172.25.0.0/16; choose one that is not in use";
    let refused = control_plane(&folder, &[]);
    assert_eq!((refused.status.code(), &*stdout(&refused)), (Some(1), ""));
    assert!(stderr(&refused).contains(expected), "{}", stderr(&refused));
    let checked = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(1));
    assert!(without_path(&stdout(&checked), folder.path()).contains(expected), "{}", stdout(&checked));
}

/// The Konnectivity server of a plan is this program.
#[test]
fn the_konnectivity_server_takes_the_flags_of_a_plan() {
    let folder = site("");
    let planes: Value = serde_json::from_str(&stdout(&control_plane(&folder, &["-o", "json"]))).unwrap();
    let sets = planes[0]["objects"].as_array().unwrap();
    let set = sets.iter().find(|object| object["kind"] == "StatefulSet").unwrap();
    let sidecars = set["spec"]["template"]["spec"]["initContainers"].as_array().unwrap();
    let server = sidecars.iter().find(|container| container["name"] == "konnectivity-server").unwrap();
    let mut arguments: Vec<&str> =
        server["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap()).collect();
    arguments.push("--help");
    let output = run(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
}
