//! The policy of deploy/admission.yaml: what a request changes is checked, in the words of `portico check`.
//! And what the definition of deploy/crds.yaml keeps and refuses of a migration.

use portico_lab::{ApiServer, Kubectl};
use serde_json::{Value, json};

use crate::{manifest, until};

/// Applies a Cluster with one of Portico's annotations, or several.
fn apply(kubectl: &Kubectl, annotations: &[(&str, &str)]) -> Result<String, String> {
    let annotations: Value =
        annotations.iter().map(|(key, value)| (format!("portico.k8c.io/{key}"), json!(value))).collect();
    apply_object(kubectl, &json!({"name": "a", "annotations": annotations}), &json!({}))
}

fn apply_object(kubectl: &Kubectl, metadata: &Value, more: &Value) -> Result<String, String> {
    let mut spec = json!({"humanReadableName": "a", "version": "1.35.8",
        "cloud": {"dc": "lab-1", "bringyourown": {}}});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let cluster = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": metadata, "spec": spec});
    kubectl.apply_json(&cluster).map_err(|error| format!("{error:#}"))
}

#[test]
fn mistakes_on_a_cluster_are_refused_when_they_are_made_and_nothing_else_is() {
    let api = ApiServer::start("admission").unwrap();
    let kubectl = api.kubectl();
    kubectl.apply(&manifest("crds-kubermatic.yaml")).unwrap();
    kubectl.wait_served("clusters.kubermatic.k8c.io").unwrap();
    // An object of before the policy, with what it would refuse.
    apply(kubectl, &[("max-connections", "none"), ("endpoints", "localhost")]).unwrap();
    kubectl.apply(&manifest("admission.yaml")).unwrap();
    until("the policy to count", || {
        let attempt = ["annotate", "cluster", "a", "portico.k8c.io/fair-share=0", "--dry-run=server"];
        anyhow::ensure!(kubectl.run(&attempt).is_err(), "it admits what is no bound");
        Ok(())
    });
    what_was_there_may_stay(kubectl);
    good_values_pass(kubectl);
    bad_values_are_refused_with_their_text(kubectl);
    a_strategy_changes_with_the_label_alone(kubectl);
    the_record_of_a_migration_is_kept_whole_and_has_two_doors(kubectl);
}

fn what_was_there_may_stay(kubectl: &Kubectl) {
    kubectl.run(&["label", "cluster", "a", "touched=yes"]).unwrap();
    let one = [("max-connections", "none"), ("endpoints", "localhost"), ("fair-share", "50")];
    apply(kubectl, &one).unwrap();
    apply(kubectl, &[]).unwrap();
}

fn good_values_pass(kubectl: &Kubectl) {
    let pem = "# of a\n-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    for good in [
        &[("max-connections", "4294967295"), ("max-connections-per-second", " 1 ")][..],
        &[("fair-share", "1")],
        &[("fair-share", "100"), ("api-server-ca", pem)],
        &[("endpoints", "192.0.2.7:6443, [2001:db8::7]:443")],
        &[("endpoints", "192.0.2.7:6443"), ("konnectivity-endpoints", "192.0.2.7:8132")],
        &[("migration", "quiet=1h30m, close=LoadBalancer")],
        &[("migration", "close=NodePort,quiet=0")],
        &[("migration", "nodes=by-hand, parallel=9999")],
        &[("migration", "parallel=1,nodes=in-place")],
        &[("migration", "nodes=drained")],
        // Not one of those that are known here: a later version's, or somebody's own.
        &[("unknown", "anything")],
    ] {
        apply(kubectl, good).unwrap_or_else(|error| panic!("{good:?}: {error}"));
    }
}

fn bad_values_are_refused_with_their_text(kubectl: &Kubectl) {
    let bound = "is no bound, so the gateway's own applies; write a whole number from 1 to ";
    let limit = format!("{bound}4294967295");
    let share = format!("{bound}100");
    let no_endpoint = "is no IP:PORT, such as 192.0.2.7:6443 or [2001:db8::7]:6443";
    let unusable = "cannot be an endpoint";
    let migration = "it cannot be read, so the former way in is not closed at the end of a migration";
    let many: Vec<String> = (1..=17).map(|number| format!("192.0.2.{number}:6443")).collect();
    let many = many.join(",");
    let digits = "9".repeat(30);
    for (key, value, expected) in [
        ("max-connections", "0", &*limit),
        ("max-connections", "", &limit),
        ("max-connections", "4294967296", &limit),
        ("max-connections", &digits, &limit),
        ("max-connections-per-second", "ten", &limit),
        ("fair-share", "0", &share),
        ("fair-share", "101", &share),
        ("endpoints", "", no_endpoint),
        ("endpoints", "localhost:6443", no_endpoint),
        ("endpoints", "192.0.2.7", no_endpoint),
        ("endpoints", "192.0.2.7:0", no_endpoint),
        ("endpoints", "192.0.2.7:65536", no_endpoint),
        ("endpoints", "192.0.2.256:6443", no_endpoint),
        ("endpoints", "192.0.2.7:6443,", no_endpoint),
        ("endpoints", "127.0.0.1:6443", unusable),
        ("endpoints", "0.0.0.0:6443", unusable),
        ("endpoints", "192.0.2.7:6443,169.254.169.254:80", unusable),
        ("endpoints", "[ff02::1]:6443", unusable),
        ("endpoints", &many, "there are 17 addresses; at most 16 can be used"),
        ("konnectivity-endpoints", "192.0.2.7:8132", "does not count without the annotation"),
        ("migration", "", migration),
        ("migration", "quiet=10", migration),
        ("migration", "quiet=-1m", migration),
        ("migration", "quiet=1m,quiet=2m", migration),
        ("migration", "close=nodeport", migration),
        ("migration", "close=NodePort,drain=true", migration),
        ("migration", "nodes=away", migration),
        ("migration", "nodes=by-hand,nodes=in-place", migration),
        ("migration", "parallel=0", migration),
        ("migration", "parallel=10000", migration),
        ("api-server-ca", "ca.crt", "it holds no certificate, so no token of this cluster can be reviewed"),
    ] {
        let error = apply(kubectl, &[(key, value)]).expect_err(&format!("{key}={value}"));
        let field = format!("metadata.annotations[portico.k8c.io/{key}]: ");
        assert!(error.contains(&field) && error.contains(expected), "{key}={value}: {error}");
    }
    // A text with a line break cannot be shown; the refusal has a text all the same.
    let error = apply(kubectl, &[("max-connections", "1\n2")]).unwrap_err();
    assert!(error.contains("a limit is no bound"), "{error}");
}

fn a_strategy_changes_with_the_label_alone(kubectl: &Kubectl) {
    let with = |strategy: &str, labels: &Value| {
        let metadata = json!({"name": "a", "labels": labels});
        apply_object(kubectl, &metadata, &json!({"exposeStrategy": strategy}))
    };
    // A Cluster that names none gets one.
    with("NodePort", &json!({})).unwrap();
    with("NodePort", &json!({"other": "yes"})).unwrap();
    let error = with("Tunneling", &json!({})).unwrap_err();
    assert!(
        error.contains(
            "spec.exposeStrategy: it cannot change from NodePort to Tunneling (decided by: Cluster): users \
             and nodes would lose the address they know; put NodePort back, or add the label \
             unsafe-expose-strategy-migration to the Cluster and migrate its nodes"
        ),
        "{error}"
    );
    with("Tunneling", &json!({"unsafe-expose-strategy-migration": ""})).unwrap();
    with("Tunneling", &json!({})).unwrap();
}

fn the_record_of_a_migration_is_kept_whole_and_has_two_doors(kubectl: &Kubectl) {
    kubectl.apply(&manifest("crds.yaml")).unwrap();
    kubectl.wait_served("exposedclusters.portico.k8c.io").unwrap();
    let migrating = |change: &dyn Fn(&mut Value)| {
        let mut spec = json!({"exposeStrategy": "NodePort", "seed": "north", "migration": {
            "state": "MovingNodes", "since": "2026-01-02T03:04:05.000000678Z", "second": {
                "exposeStrategy": "Tunneling", "tunnel": {"agentIP": "100.64.30.11"},
                "address": {"url": "https://a.example.com:6443", "port": 6443,
                    "externalName": "a.example.com", "ip": "192.0.2.1"}}}});
        change(&mut spec);
        let object = json!({"apiVersion": "portico.k8c.io/v1alpha1", "kind": "ExposedCluster",
            "metadata": {"name": "a"}, "spec": spec});
        (spec, kubectl.apply_json(&object).map_err(|error| format!("{error:#}")))
    };
    let (spec, applied) = migrating(&|_| ());
    applied.unwrap();
    assert_eq!(kubectl.get(&["exposedcluster", "a"]).unwrap()["spec"], spec);
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        let error = migrating(change).1.unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    let same = "the second way in is by another strategy than the first";
    refused(&|spec| spec["migration"]["second"] = json!({"exposeStrategy": "NodePort"}), same);
    let tunnel = "tunnel belongs to the strategy Tunneling, and to no other";
    refused(&|spec| spec["migration"]["second"]["exposeStrategy"] = json!("LoadBalancer"), tunnel);
    refused(&|spec| spec["migration"]["since"] = json!("today"), "since");
    refused(&|spec| spec["migration"]["state"] = json!("Settled"), "Unsupported value");
}
