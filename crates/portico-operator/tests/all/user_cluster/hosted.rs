//! What a hosted cluster has inside beside the agents, and the certificates of its kubelets.

use anyhow::{Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use portico_lab::Kubectl;
use portico_lab::pki::Certificate;
use serde_json::{Value, json};

use super::{
    Stage, nothing_is_written_at_rest, put_kubeconfig, put_secret, touch, user_clusters, wait_namespace,
    wait_reason, work,
};
use crate::support::{Running, cluster};
use crate::until;

/// The annotation of hosted clusters, and that of what they leave out.
const LAYOUT: &str = "portico.k8c.io/layout=compact";
const WITHOUT: &str = "portico.k8c.io/without";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hosted_cluster_has_what_nodes_need_and_their_kubelets_get_certificates() {
    let stage = Stage::start("hosted-inside").await;
    let operator = stage.operator("first");
    others_get_nothing_new(&stage, &operator);
    everything_is_made_and_named_as_people_know_it(&stage, &operator);
    operator.stop().await;
    let operator = stage.operator("second");
    nothing_is_written_at_rest(&stage, &operator);
    what_is_left_out_goes_away_and_what_is_somebody_elses_stays(&stage, &operator);
    kubelets_get_certificates_for_their_own_addresses_alone(&stage.inside, &operator);
    operator.stop().await;
    without_an_operator_nobody_watches(&stage.inside);
}

fn others_get_nothing_new(stage: &Stage, operator: &Running) {
    stage.kubectl.apply_json(&cluster("a", "Tunneling")).unwrap();
    wait_namespace(&stage.kubectl, "a");
    put_kubeconfig(&stage.kubectl, "a", &stage.kubeconfig().to_yaml());
    wait_reason(&stage.kubectl, "a", "Ready");
    let workloads = stage.inside.run(&["get", "deployments,daemonsets", "-A", "-o=name"]).unwrap();
    assert!(!workloads.contains("coredns") && !workloads.contains("kube-proxy"), "{workloads}");
    assert_eq!(user_clusters(operator).reports.len(), 1);
}

fn everything_is_made_and_named_as_people_know_it(stage: &Stage, operator: &Running) {
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    kubectl.run(&["annotate", "cluster", "a", LAYOUT]).unwrap();
    // As the controller does that hosts it.
    let begun = json!({"metadata": {"finalizers": ["portico.k8c.io/control-plane"]}}).to_string();
    kubectl.run(&["patch", "cluster", "a", "--type=merge", "--patch", &begun]).unwrap();
    touch(stage, operator, "a");
    let message = wait_reason(kubectl, "a", "Incomplete");
    assert!(message.contains("Secret client-ca is not there yet"), "{message}");
    inside.get(&["deployment", "coredns", "-n", "kube-system"]).unwrap();
    put_secret(kubectl, "a", "client-ca", &json!({"ca.crt": "-----CLIENTS-----\n"}));
    touch(stage, operator, "a");
    wait_reason(kubectl, "a", "Ready");
    let dns = inside.get(&["service", "kube-dns", "-n", "kube-system"]).unwrap();
    assert_eq!(dns["spec"]["clusterIP"], "10.240.16.10");
    let proxy = inside.get(&["configmap", "kube-proxy", "-n", "kube-system"]).unwrap();
    let reached = proxy["data"]["kubeconfig.conf"].as_str().unwrap();
    assert!(reached.contains("https://a.north.kkp.invalid:6443"), "{reached}");
    // As a machine that joins, by a bootstrap token.
    let joins = ["--as=system:bootstrap:abcdef", "--as-group=system:bootstrappers"];
    let read = ["get", "configmap", "kubelet-config", "-n", "kube-system", "-o=json"];
    let config = inside.run(&[&read[..], &joins].concat()).unwrap();
    assert!(config.contains("-----CLIENTS-----") && config.contains("10.240.16.10"), "{config}");
    assert!(config.contains("tunnel a.north.kkp.invalid:8088"), "{config}");
    for verb in ["create certificatesigningrequests", "get nodes"] {
        let (verb, kind) = verb.split_once(' ').unwrap();
        let may = inside.run(&[&["auth", "can-i", verb, kind][..], &joins].concat()).unwrap();
        assert!(may.starts_with("yes"), "{verb} {kind}: {may}");
    }
    inside.get(&["apiservice", "v1beta1.metrics.k8s.io"]).unwrap();
}

fn what_is_left_out_goes_away_and_what_is_somebody_elses_stays(stage: &Stage, operator: &Running) {
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    let without = |parts: &str| {
        kubectl.run(&["annotate", "cluster", "a", "--overwrite", &format!("{WITHOUT}={parts}")]).unwrap();
    };
    // Without waiting for the next look.
    without("coredns,metrics-server");
    until("what is left out to be gone", || {
        let left = inside.run(&["get", "deployments,services,configmaps,pdb", "-n", "kube-system"])?;
        ensure!(!left.contains("coredns") && !left.contains("metrics-server"), "{left}");
        Ok(())
    });
    wait_reason(kubectl, "a", "Ready");
    assert!(inside.is_gone(&["apiservice", "v1beta1.metrics.k8s.io"]));
    inside.get(&["daemonset", "kube-proxy", "-n", "kube-system"]).unwrap();
    // A mistake changes nothing.
    without("dns");
    let message = wait_reason(kubectl, "a", "Incomplete");
    assert!(message.contains("cannot be used as it is written"), "{message}");
    assert!(inside.is_gone(&["deployment", "coredns", "-n", "kube-system"]));
    // One by somebody's own choice is named, and stays.
    let coredns = ["deployment", "coredns", "-n", "kube-system"];
    inside.run(&[&["create"][..], &coredns, &["--image=own"]].concat()).unwrap();
    without("");
    let message = wait_reason(kubectl, "a", "ForeignObject");
    assert!(message.contains("Deployment kube-system/coredns"), "{message}");
    let own = inside.get(&coredns).unwrap();
    assert_eq!(own["spec"]["template"]["spec"]["containers"][0]["image"], "own");
    inside.run(&[&["delete"][..], &coredns].concat()).unwrap();
    touch(stage, operator, "a");
    wait_reason(kubectl, "a", "Ready");
}

fn kubelets_get_certificates_for_their_own_addresses_alone(inside: &Kubectl, operator: &Running) {
    ask(inside, "early", "worker-1", &["worker-1", "192.0.2.7"]);
    ask(inside, "api-server", "worker-1", &["worker-1", "kubernetes.default"]);
    ask(inside, "other", "worker-1", &["worker-2"]);
    let counted = |reason: &str| work(operator).errors.get(reason).copied().unwrap_or_default();
    until("what cannot be approved to be counted", || {
        let errors = work(operator).errors;
        ensure!(counted("ServingOtherAddress") == 2 && counted("ServingReservedName") == 1, "{errors:?}");
        Ok(())
    });
    node(inside, "worker-1", &[("InternalIP", "192.0.2.7"), ("Hostname", "worker-1")]);
    ask(inside, "right", "worker-1", &["worker-1", "192.0.2.7"]);
    until("a certificate", || is_approved(inside, "right"));
    until("a certificate that was asked for before the Node had its addresses", || {
        is_approved(inside, "early")
    });
    for name in ["api-server", "other"] {
        assert!(is_approved(inside, name).is_err(), "{name}");
        let request = inside.get(&["csr", name]).unwrap();
        assert_eq!(request.pointer("/status/conditions"), None, "it is not denied either");
    }
    assert_eq!(work(operator).writes["CertificateSigningRequest"], 2);
    assert_eq!(counted("ServingOtherAddress"), 2, "each is counted once");
    // The requests of others do not come first.
    for number in 0..40 {
        ask(inside, &format!("flood-{number}"), "worker-1", &["worker-3"]);
    }
    ask(inside, "late", "worker-1", &["worker-1"]);
    until("a certificate behind many that are not approved", || is_approved(inside, "late"));
}

/// Its watch ends with it: nothing is left that could approve.
fn without_an_operator_nobody_watches(inside: &Kubectl) {
    until("the end of the watch", || {
        let metrics = inside.run(&["get", "--raw", "/metrics"])?;
        let open = metrics.lines().find(|line| {
            line.starts_with("apiserver_longrunning_requests{")
                && line.contains("resource=\"certificatesigningrequests\"")
                && !line.ends_with(" 0")
        });
        ensure!(open.is_none(), "{open:?}");
        Ok(())
    });
}

fn is_approved(inside: &Kubectl, name: &str) -> Result<()> {
    let request = inside.get(&["csr", name])?;
    let kind = request.pointer("/status/conditions/0/type").and_then(Value::as_str);
    ensure!(kind == Some("Approved"), "{request}");
    Ok(())
}

/// A Node, as its kubelet writes it.
fn node(inside: &Kubectl, name: &str, addresses: &[(&str, &str)]) {
    inside.apply_json(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})).unwrap();
    let addresses: Vec<Value> =
        addresses.iter().map(|(kind, address)| json!({"type": kind, "address": address})).collect();
    let status = json!({"status": {"addresses": addresses}}).to_string();
    let patch = ["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status];
    inside.run(&patch).unwrap();
}

/// Asks as the kubelet of a node does, for these names and addresses.
fn ask(inside: &Kubectl, request: &str, node: &str, names: &[&str]) {
    let serving = Certificate::server(names).common_name(&format!("system:node:{node}"));
    // As kubelets ask: for what it may be used, the signer says.
    let serving = serving.organisation("system:nodes").with(|params| {
        params.key_usages.clear();
        params.extended_key_usages.clear();
    });
    let pem = serving.request().unwrap();
    let object = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": request},
        "spec": {"signerName": "kubernetes.io/kubelet-serving", "request": BASE64_STANDARD.encode(pem),
            "usages": ["digital signature", "server auth"]}});
    let user = format!("--as=system:node:{node}");
    let args = ["create", "-f", "-", &user, "--as-group=system:nodes", "--as-group=system:authenticated"];
    inside.run_with_input(&args, &object.to_string()).unwrap();
}
