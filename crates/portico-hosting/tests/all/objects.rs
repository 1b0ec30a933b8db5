//! The objects themselves: each layout as it is written, and accepted by a real API server.

use std::fmt::Write;

use portico_hosting::{ControlPlane, Digests, Settings};
use portico_lab::ApiServer;
use serde_json::{Value, json};

use crate::{cluster, everything, planned, planned_with, settings, templates};

fn written(plane: &ControlPlane) -> String {
    plane.objects.iter().fold(String::new(), |mut text, object| {
        let _ = write!(text, "---\n{}", portico_yaml::write(object));
        text
    })
}

#[test]
fn the_layout_compact_is_one_pod() {
    insta::assert_snapshot!(written(&planned("compact", &json!({}))));
}

#[test]
fn the_layout_dedicated_is_a_workload_for_each_program() {
    insta::assert_snapshot!(written(&planned("dedicated", &everything("dedicated"))));
}

#[test]
fn a_cluster_that_asks_for_it_gets_a_prometheus_and_nothing_else_of_it_changes() {
    let mut cluster = cluster("compact", &json!({}));
    let without = planned_with(&cluster, &settings(), &Digests::new());
    cluster.metadata.annotations.insert("portico.k8c.io/prometheus".into(), "true".into());
    let settings = Settings { metrics_url: "http://portico-metrics.portico.svc:8007".into(), ..settings() };
    let mut with = planned_with(&cluster, &settings, &Digests::new());
    with.objects.retain(|object| !without.objects.contains(object));
    // The rules are those of deploy/control-plane-rules.yaml.
    for object in &mut with.objects {
        if object["kind"] == "ConfigMap" {
            let rules = object["data"]["rules.yaml"].take();
            assert!(rules.as_str().unwrap().starts_with("groups:\n"), "{rules}");
        }
    }
    insta::assert_snapshot!(written(&with));
}

/// Dry runs, of what is planned and of its pods: Pod Security judges those.
#[test]
fn a_real_api_server_accepts_every_object() {
    let api = ApiServer::start("hosting").unwrap();
    let kubectl = api.kubectl();
    for (layout, spec) in [
        ("compact", json!({})),
        ("dedicated", json!({})),
        ("compact", everything("compact")),
        ("dedicated", everything("dedicated")),
    ] {
        let plane = planned(layout, &spec);
        kubectl.apply_json(&plane.objects[0]).unwrap();
        let accept = |what: &str, object: &Value| {
            let args = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"];
            let answer = kubectl.run_with_input(&args, &object.to_string());
            answer.unwrap_or_else(|error| panic!("{layout}: {what}: {error:#}"));
        };
        for object in &plane.objects {
            accept(&format!("{} {}", object["kind"], object["metadata"]["name"]), object);
        }
        // A pod names a service account that a controller would have made.
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": "cluster-a"}});
        kubectl.apply_json(&account).unwrap();
        for (name, template) in templates(&plane) {
            let mut pod = template.clone();
            pod["apiVersion"] = json!("v1");
            pod["kind"] = json!("Pod");
            pod["metadata"]["name"] = json!(name);
            pod["metadata"]["namespace"] = json!("cluster-a");
            if name == "etcd" {
                let volume = json!({"name": "data", "emptyDir": {}});
                pod["spec"]["volumes"].as_array_mut().unwrap().push(volume);
            }
            accept(&format!("pod of {name}"), &pod);
        }
    }
}
