//! A cluster that leaves Tunneling has on the seed what one has that was never tunneled, and what others
//! made.

use anyhow::{Result, ensure};
use portico_lab::{ApiServer, Authority, Kubectl};
use portico_pki::{Credential, Kubeconfig};
use serde_json::{Value, json};

use crate::exposure::{KUBERNETES, slice, stable};
use crate::support::{Running, cluster, give_address, insides, install};
use crate::until;

/// The one that leaves, and the one that was never there: their names have the same length.
const LEFT: &str = "left";
const NEVER: &str = "none";

/// All objects about a cluster on the seed, less what differs from cluster to cluster.
fn objects(kubectl: &Kubectl, name: &str) -> Vec<String> {
    const KINDS: &str = "services,endpointslices,endpoints,secrets,configmaps";
    let mut all = kubectl.get(&[KINDS, "-n", &format!("cluster-{name}")]).unwrap()["items"].take();
    let all = all.as_array_mut().unwrap();
    for kind in ["exposedcluster", "cluster"] {
        all.push(kubectl.get(&[kind, name]).unwrap());
    }
    all.push(kubectl.get(&["namespace", &format!("cluster-{name}")]).unwrap());
    let text = |object: &mut Value| {
        let meta = &mut object["metadata"];
        if let Some(annotations) = meta["annotations"].as_object_mut() {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
            annotations.retain(|key, _| !key.starts_with("endpoints.kubernetes.io/"));
        }
        let meta = [&meta["name"], &meta["labels"], &meta["annotations"]].map(Value::clone);
        // What people write in a Cluster is theirs.
        let spec = if object["kind"] == "Cluster" { Value::Null } else { stable(object["spec"].take()) };
        let rest = [&object["kind"], &object["data"], &object["endpoints"]].map(Value::clone);
        json!([rest, meta, spec]).to_string().replace(name, "NAME")
    };
    let mut all: Vec<_> = all.iter_mut().map(text).collect();
    all.sort();
    all
}

/// What is there before, made by others: a Service with a name of their own, and the way into the cluster.
fn of_others(namespace: &str, authority: &Authority) -> Value {
    let kubeconfig = Kubeconfig {
        cluster: "x".into(),
        // Nobody listens there.
        server: "https://127.0.0.1:1".into(),
        authority: authority.cert(),
        credential: Credential::Token("x".into()),
    };
    let meta = |name: &str| json!({"name": name, "namespace": namespace});
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta("apiserver"),
            "spec": {"ports": [{"port": 443}], "selector": {"app": "apiserver"}}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("settings"), "data": {"a": "b"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta("internal-admin-kubeconfig"),
            "stringData": {"kubeconfig": kubeconfig.to_yaml()}}]})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_leaves_tunneling_has_what_one_has_that_was_never_tunneled() {
    let api = ApiServer::start("leaving").unwrap();
    let kubectl = api.kubectl();
    let client = install(kubectl, api.access()).await;
    let operator = Running::start_with(&client, "one", |it| it.with_user_clusters(insides(Some("x"))));
    kubectl.apply_json(&slice("portico", "portico", KUBERNETES, &["192.0.2.21"])).unwrap();
    let authority = Authority::new("cluster").unwrap();
    for (name, strategy) in [(LEFT, "Tunneling"), (NEVER, "LoadBalancer")] {
        let mut cluster = cluster(name, strategy);
        cluster["metadata"]["labels"] = json!({"unsafe-expose-strategy-migration": ""});
        kubectl.apply_json(&cluster).unwrap();
        let namespace = format!("cluster-{name}");
        until("the namespace", || kubectl.get(&["namespace", &namespace]).map(drop));
        kubectl.apply_json(&of_others(&namespace, &authority)).unwrap();
    }
    let annotated = || -> Result<bool> {
        let cluster = kubectl.get(&["cluster", LEFT])?;
        Ok(cluster["metadata"]["annotations"].get("portico.k8c.io/api-server-ca").is_some())
    };
    until("the authority of its API server", || {
        ensure!(annotated()?);
        Ok(())
    });
    let tunneled = objects(kubectl, LEFT);

    let other =
        r#"{"spec": {"exposeStrategy": "LoadBalancer", "clusterNetwork": {"tunnelingAgentIP": null}}}"#;
    kubectl.run(&["patch", "cluster", LEFT, "--type=merge", "-p", other]).unwrap();
    for name in [LEFT, NEVER] {
        let namespace = format!("cluster-{name}");
        until(name, || kubectl.get(&["service", "front-loadbalancer", "-n", &namespace]).map(drop));
        give_address(kubectl, name, "203.0.113.9");
    }
    until("the same objects as of the other", || {
        let (left, never) = (objects(kubectl, LEFT), objects(kubectl, NEVER));
        ensure!(left == never, "{left:#?}\ninstead of\n{never:#?}");
        Ok(())
    });
    assert!(!annotated().unwrap());
    assert!(tunneled.iter().filter(|object| !objects(kubectl, LEFT).contains(object)).count() > 3);
    operator.stop().await;
}
