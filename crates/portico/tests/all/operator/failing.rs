//! Clusters that fail, each in its own way and all at the same time, beside clusters that must not notice.

use portico_lab::{ApiServer, Kubectl, long_form};
use serde_json::{Value, json};

use super::{Operator, create, install};

/// NodePorts of the seed: a cluster with the strategy NodePort takes two.
const RANGE: &str = "--service-node-port-range=30000-30023";
const BY_PORT: usize = 8;
/// Clusters that want more NodePorts than there are.
const LATE: usize = 5;

/// Clusters that fail in one way.
const OF_EACH: usize = 4;

/// Where an admission webhook never answers.
const MUTE_PORT: u16 = 9_443;

/// The names of those that fail in this way.
fn names(way: &str) -> Vec<String> {
    (0..OF_EACH).map(|number| format!("{way}{number}")).collect()
}

fn cluster(name: &str, strategy: &str) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": name},
        "spec": {"humanReadableName": name, "version": "1.35.8", "exposeStrategy": strategy,
            "cloud": {"dc": "lab-1", "bringyourown": {}}}})
}

fn changed(name: &str, pointer: &str, value: Value) -> Value {
    let mut cluster = cluster(name, "Tunneling");
    cluster["metadata"]["annotations"] = json!({});
    *cluster.pointer_mut(pointer).unwrap() = value;
    cluster
}

/// Namespaces, by their names.
fn selector(way: &str) -> Value {
    let namespaces: Vec<_> = names(way).iter().map(|name| format!("cluster-{name}")).collect();
    json!({"matchExpressions": [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}]})
}

/// What refuses Services in some namespaces, and what never says whether it does in others.
fn admission() -> Value {
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["services"],
        "operations": ["CREATE", "UPDATE"]});
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": "refuses"},
            "spec": {"matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": "false", "message": "no Services here"}]}},
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": "refuses"},
            "spec": {"policyName": "refuses", "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": selector("refused")}}},
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "mute"},
            "webhooks": [{"name": "mute.example.com", "rules": [rule], "failurePolicy": "Fail",
                "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 30,
                "namespaceSelector": selector("mute"),
                "clientConfig": {"url": format!("https://127.0.0.1:{MUTE_PORT}/")}}]}]})
}

fn reason(clusters: &Value, name: &str) -> String {
    clusters["reports"][name]["reason"].as_str().unwrap_or_default().to_owned()
}

fn all_are(clusters: &Value, names: &[String], expected: &str) -> bool {
    names.iter().all(|name| reason(clusters, name) == expected)
}

/// As on a host where packets to a port are dropped.
fn nobody_answers(api: &ApiServer) {
    for rule in [
        "add table inet mute".to_owned(),
        "add chain inet mute input { type filter hook input priority 0; }".to_owned(),
        format!("add rule inet mute input tcp dport {MUTE_PORT} drop"),
    ] {
        api.host().run(&["nft", &rule]).unwrap();
    }
}

/// 60 clusters beside 20 that fail; 500 with `PORTICO_PROVE=1`.
#[test]
fn clusters_that_fail_in_every_way_harm_no_other_and_heal_once_the_cause_ends() {
    let count = long_form(60, 500);
    let api = ApiServer::start_with("failing", &[RANGE]).unwrap();
    let kubectl = api.kubectl();
    install(kubectl);
    nobody_answers(&api);
    kubectl.apply_json(&admission()).unwrap();
    for name in names("taken") {
        kubectl.run(&["create", "namespace", &format!("cluster-{name}")]).unwrap();
    }
    let healthy: Vec<String> = (0..count).map(|number| format!("c{number}")).collect();
    let strategy = |number: usize| if number < BY_PORT { "NodePort" } else { "Tunneling" };
    let mut all: Vec<Value> =
        healthy.iter().enumerate().map(|(number, name)| cluster(name, strategy(number))).collect();
    let elsewhere = |name: &String| changed(name, "/spec/cloud/dc", "nowhere".into());
    let endpoints = json!({"portico.k8c.io/endpoints": "localhost"});
    let unusable = |name: &String| changed(name, "/metadata/annotations", endpoints.clone());
    all.extend(names("elsewhere").iter().map(elsewhere));
    all.extend(names("unusable").iter().map(unusable));
    for way in ["taken", "refused", "mute"] {
        all.extend(names(way).iter().map(|name| cluster(name, "Tunneling")));
    }
    // Those that fail come first, and all of them at once.
    all.reverse();
    create(kubectl, &all);

    let operator = Operator::start(&api);
    operator.wait("every other cluster is exposed, but for its name", |clusters| {
        all_are(clusters, &healthy, "NameNotResolved")
    });
    for (way, expected) in [
        ("elsewhere", "InvalidConfiguration"),
        ("unusable", "InvalidConfiguration"),
        ("taken", "NamespaceTaken"),
        ("refused", "WriteRefused"),
        ("mute", "WriteRefused"),
    ] {
        operator.wait(way, |clusters| all_are(clusters, &names(way), expected));
    }
    let late: Vec<String> = (0..LATE).map(|number| format!("late{number}")).collect();
    create(kubectl, &late.iter().map(|name| cluster(name, "NodePort")).collect::<Vec<_>>());
    operator.wait("the last one finds no NodePort", |clusters| {
        late.iter().any(|name| reason(clusters, name) == "NodePortsExhausted")
    });
    a_change_of_another_cluster_is_written(kubectl);

    // Every cause ends.
    kubectl.run(&["delete", "validatingwebhookconfiguration", "mute"]).unwrap();
    kubectl.run(&["delete", "validatingadmissionpolicybinding", "refuses"]).unwrap();
    for name in names("elsewhere") {
        let patch = r#"{"spec": {"cloud": {"dc": "lab-1"}}}"#;
        kubectl.run(&["patch", "cluster", &name, "--type=merge", "-p", patch]).unwrap();
    }
    for name in names("unusable") {
        kubectl.run(&["annotate", "cluster", &name, "portico.k8c.io/endpoints-"]).unwrap();
    }
    for name in names("taken") {
        let label = format!("portico.k8c.io/cluster={name}");
        kubectl.run(&["label", "namespace", &format!("cluster-{name}"), &label]).unwrap();
    }
    // Nothing removes the content of namespaces here.
    let given_up = ["c0", "c1"];
    for name in given_up {
        kubectl.run(&["delete", "cluster", name]).unwrap();
        kubectl.run(&["delete", "services", "--all", "-n", &format!("cluster-{name}")]).unwrap();
    }
    let mut left: Vec<String> = healthy.into_iter().filter(|name| !given_up.contains(&&**name)).collect();
    left.extend(late);
    for way in ["elsewhere", "unusable", "taken", "refused", "mute"] {
        left.extend(names(way));
    }
    operator.wait("every cluster is exposed, but for its name", |clusters| {
        all_are(clusters, &left, "NameNotResolved")
    });
}

/// While requests of others hang.
fn a_change_of_another_cluster_is_written(kubectl: &Kubectl) {
    kubectl.run(&["annotate", "cluster", "c9", "portico.k8c.io/endpoints=192.0.2.7:6443"]).unwrap();
    portico_lab::wait::until("the change", super::PATIENCE, || {
        kubectl.get(&["endpointslice", "apiserver-external-v4-6443", "-n", "cluster-c9"]).map(drop)
    })
    .unwrap();
}
