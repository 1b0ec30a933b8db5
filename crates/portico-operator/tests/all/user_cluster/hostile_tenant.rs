//! A tenant that is the administrator of a real user cluster, and hostile: a webhook that never answers,
//! definitions by the hundred. It is reported by its condition, holds no other cluster up, and heals once it
//! stops.

use std::time::Duration;

use anyhow::ensure;
use portico_lab::{Kubectl, long_form};
use serde_json::{Value, json};

use super::{
    Stage, administrators, put_kubeconfig, reason, touch, user_clusters, wait_namespace, wait_reason,
};
use crate::support::cluster;
use crate::until;

/// Where the webhook is, on the host of the API servers.
const MUTE: u16 = 9_444;

/// Every write inside waits for an answer that never comes, as long as Kubernetes allows.
fn never_answers(inside: &Kubectl) {
    let url = format!("https://127.0.0.1:{MUTE}/");
    let rule = json!({"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*/*"]});
    let hook = json!({"name": "never.example.com", "clientConfig": {"url": url}, "rules": [rule],
        "failurePolicy": "Fail", "timeoutSeconds": 30, "sideEffects": "None",
        "admissionReviewVersions": ["v1"]});
    let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration", "metadata": {"name": "never"}, "webhooks": [hook]});
    inside.apply_json(&configuration).unwrap();
}

fn definitions(inside: &Kubectl, count: usize) {
    let definition = |number: usize| -> Value {
        let plural = format!("things{number}");
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.example.com")},
            "spec": {"group": "example.com", "scope": "Namespaced",
                "names": {"plural": plural, "kind": format!("Thing{number}")},
                "versions": [{"name": "v1", "served": true, "storage": true,
                    "schema": {"openAPIV3Schema": {"type": "object"}}}]}})
    };
    let items: Vec<Value> = (0..count).map(definition).collect();
    // No more at once than one kubectl gets done in its time.
    for items in items.chunks(100) {
        inside.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
    }
}

/// 100 definitions; 1,000 with `PORTICO_PROVE=1`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_with_a_mute_webhook_and_many_definitions_holds_up_its_own_cluster_alone() {
    let stage = Stage::start("user-tenant").await;
    let kubectl = &stage.kubectl;
    let listen = format!("TCP-LISTEN:{MUTE},bind=127.0.0.1,fork,reuseaddr");
    let mute = stage.host.spawn("mute", "socat", ["-d", "-d", "-u", &listen, "OPEN:/dev/null"]).unwrap();
    definitions(&stage.inside, long_form(100, 1_000));
    never_answers(&stage.inside);
    let operator = stage.operator("one");
    for (name, kubeconfig) in [("theirs", stage.kubeconfig()), ("good", administrators(stage.seed.access()))]
    {
        kubectl.apply_json(&cluster(name, "Tunneling")).unwrap();
        wait_namespace(kubectl, name);
        put_kubeconfig(kubectl, name, &kubeconfig.to_yaml());
    }
    wait_reason(kubectl, "good", "Ready");
    until("what the hostile one does to be reported", || {
        let (reason, message) = reason(kubectl, "theirs")?;
        ensure!(["TooSlow", "NoAnswer", "Refused"].contains(&&*reason), "{reason}: {message}");
        Ok(())
    });
    mute.wait_for_log("accepting connection", Duration::from_secs(1)).unwrap();
    // While it goes on. The inside of the good one is the seed's.
    let made = ["configmap", "cluster-info", "-n", "kube-public"];
    kubectl.run(&[&["delete"][..], &made].concat()).unwrap();
    touch(&stage, &operator, "good");
    until("what somebody deleted in the good one to be back", || kubectl.get(&made).map(drop));
    assert!(user_clusters(&operator).reports["good"].ready);
    stage.inside.run(&["delete", "validatingwebhookconfiguration", "never"]).unwrap();
    wait_reason(kubectl, "theirs", "Ready");
    operator.stop().await;
}
