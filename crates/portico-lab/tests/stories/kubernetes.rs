//! Real Kubernetes: a seed that runs pods, and a user cluster in it with a worker.

use std::time::Duration;

use anyhow::ensure;
use portico_lab::control_plane::Options;
use portico_lab::{Image, Kubectl, Lab, Seed, UserCluster, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);

/// A pod that serves its own name over HTTP and logs what it is asked.
fn web_pod(name: &str) -> Value {
    let serve = format!("mkdir /www; echo {name} >/www/index.html; exec httpd -f -v -p 8080 -h /www");
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [{
                "name": "web",
                "image": "lab/busybox:1",
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", serve],
            }],
            "terminationGracePeriodSeconds": 0,
        },
    })
}

/// A Service of `kind` before the pod of the same name.
fn service(name: &str, kind: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"type": kind, "selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    })
}

/// Pods are refused until the controller manager has made the namespace's service account.
fn apply_soon(kubectl: &Kubectl, object: &Value) {
    wait::until("the object to be accepted", SOON, || kubectl.apply_json(object)).unwrap();
}

/// The node of a seed is a node like any other.
pub(crate) fn a_seed_runs_pods_with_logs_exec_and_services(lab: &Lab, seed: &Seed) {
    let client = lab.host("web-client").unwrap();
    let kubectl = seed.access().kubectl(&client).unwrap();

    apply_soon(&kubectl, &web_pod("web"));
    apply_soon(&kubectl, &web_pod("other"));
    kubectl.apply_json(&service("web", "LoadBalancer")).unwrap();
    kubectl.wait_pod_ready("default", "web", SOON).unwrap();
    kubectl.wait_pod_ready("default", "other", SOON).unwrap();

    let answer = kubectl.run(&["exec", "web", "--", "cat", "/www/index.html"]).unwrap();
    assert_eq!(answer, "web\n");

    let web = kubectl.get(&["service", "web"]).unwrap();
    let cluster_ip = web["spec"]["clusterIP"].as_str().unwrap().to_owned();
    let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {cluster_ip} 80");
    wait::until("a pod to reach another through its Service", SOON, || {
        let answer = kubectl.run(&["exec", "other", "--", "sh", "-c", &ask])?;
        ensure!(answer.ends_with("\r\nweb\n"), "it was answered {answer:?}");
        Ok(())
    })
    .unwrap();
    let node_port = web["spec"]["ports"][0]["nodePort"].as_u64().unwrap();
    let address = seed.give_address("default", "web").unwrap();
    for url in [format!("http://{}:{node_port}/", seed.host().address()), format!("http://{address}/")] {
        let answer = wait::until(&format!("a host to be answered on {url}"), SOON, || {
            client.run(&["curl", "-sS", "--max-time", "2", &url])
        });
        assert_eq!(answer.unwrap(), "web\n");
    }
    let log = kubectl.run(&["logs", "web"]).unwrap();
    assert_eq!(log.matches("response:200").count(), 3, "the three requests above are in the log: {log}");
}

/// A control plane of pods, and a machine beside the seed that becomes its node.
pub(crate) fn a_worker_joins_a_user_cluster_hosted_in_the_seed(_: &Lab, seed: &Seed) {
    let cluster = UserCluster::start(seed, &Options::new("demo")).unwrap();
    let external = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "apiserver-external", "namespace": cluster.namespace()},
        "spec": {
            "type": "NodePort",
            "selector": {"app": "apiserver"},
            "ports": [{"port": 443, "targetPort": cluster.port(), "nodePort": 30043}],
        },
    });
    seed.kubectl().apply_json(&external).unwrap();
    let access = cluster.access(seed, &format!("https://{}:30043", seed.host().address()));

    let worker = cluster.join_worker(seed, "demo-worker", &access).unwrap();
    worker.import(&Image::busybox().unwrap()).unwrap();
    let kubectl = access.kubectl(worker.host()).unwrap();
    apply_soon(&kubectl, &web_pod("web"));
    kubectl.wait_pod_ready("default", "web", SOON).unwrap();
    let answer = kubectl.run(&["exec", "web", "--", "cat", "/www/index.html"]).unwrap();
    assert_eq!(answer, "web\n");
    let pod = kubectl.get(&["pod", "web"]).unwrap();
    assert_eq!(pod["spec"]["nodeName"], "demo-worker");
}
