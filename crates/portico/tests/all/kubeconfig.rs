//! `portico kubeconfig` beside a real API server that is the seed and the user cluster in one: what the
//! stored credentials become, and what a person gets instead of them.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::fs;
use std::path::Path;

use portico_lab::{ApiServer, programs};
use serde_json::{Value, json};

use crate::common::{stderr, stdout};

const DEFINITIONS: &str = include_str!("../../../../deploy/crds-kubermatic.yaml");

#[test]
fn a_person_gets_a_certificate_that_the_cluster_signs_and_that_ends() {
    let api = ApiServer::start_with_controllers("kubeconfig", &[]).unwrap();
    let kubectl = api.kubectl();
    let folder = tempfile::tempdir().unwrap();
    let admin = folder.path().join("admin.kubeconfig");
    let text = api.admin_with_everything().unwrap();
    fs::write(&admin, &text).unwrap();
    kubectl.apply(DEFINITIONS).unwrap();
    kubectl.wait_served("clusters.kubermatic.k8c.io").unwrap();
    kubectl.run(&["create", "namespace", "cluster-a"]).unwrap();
    let kind = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster"});
    for object in [
        json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"kubeconfig": text},
            "metadata": {"name": "admin-kubeconfig", "namespace": "cluster-a"}}),
        json!({"apiVersion": kind["apiVersion"], "kind": kind["kind"], "metadata": {"name": "a"},
            "spec": {"cloud": {"dc": "lab"}}}),
    ] {
        kubectl.apply_json(&object).unwrap();
    }
    let status = json!({"status": {"address": {"url": api.access().server()}}}).to_string();
    kubectl.run(&["patch", "cluster", "a", "--subresource=status", "--type=merge", "-p", &status]).unwrap();

    let portico = |arguments: &[&str]| {
        let mut command = api.host().command(env!("CARGO_BIN_EXE_portico")).unwrap();
        command.args(["kubeconfig", "a", "--kubeconfig"]).arg(&admin).args(arguments).output().unwrap()
    };
    let who_is = |file: &Path| -> Value {
        let kubectl = programs::kube().unwrap().join("kubectl");
        let mut command = api.host().command(kubectl.to_str().unwrap()).unwrap();
        command.arg("--kubeconfig").arg(file).args(["auth", "whoami", "-o", "json"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["status"]["userInfo"].clone()
    };
    let (stored, alice) = (folder.path().join("stored"), folder.path().join("alice"));
    let output = portico(&["-o", stored.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(who_is(&stored)["groups"].as_array().unwrap().contains(&json!("system:masters")));

    let flags = ["--as", "alice@example.com", "--group", "dev", "--for", "2h", "-o", alice.to_str().unwrap()];
    let output = portico(&flags);
    assert!(output.status.success(), "{}", stderr(&output));
    let user = who_is(&alice);
    assert_eq!(user["username"], "alice@example.com");
    assert_eq!(user["groups"], json!(["dev", "system:authenticated"]));
    let text = fs::read_to_string(&alice).unwrap();
    let portico_pki::Credential::Certificate(pair) =
        portico_pki::Kubeconfig::parse(&text).unwrap().credential
    else {
        panic!("{text}")
    };
    let left = portico_pki::ends(&pair.certificate).unwrap().duration_since(jiff::Timestamp::now());
    assert!(left.as_mins() > 110 && left.as_mins() <= 120, "{left}");

    let output = portico(&["--as", "eve", "--group", "system:masters"]);
    let printed = stderr(&output);
    assert!(output.status.code() == Some(2) && printed.contains("clusterrolebinding"), "{printed}");
    assert_eq!(stdout(&output), "");
    let output = portico(&["--for", "2h"]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("--as"), "{}", stderr(&output));
}
