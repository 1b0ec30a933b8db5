//! The controller beside a real API server: two replicas, a burst, the listener limit, and the end of the
//! leader.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::time::Duration;

use anyhow::{Result, ensure};
use kube::Client;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_kube::client;
use portico_lab::control_plane::Options;
use portico_lab::{ControlPlane, Etcd, Kubectl, Lab, wait};
use portico_operator::{Front, ServiceStatus, Settings, StatusHandle};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longer than anything takes when all is well: a Lease runs out in 15 s.
const LIMIT: Duration = Duration::from_secs(90);

/// One running controller.
struct Replica {
    status: StatusHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Replica {
    fn start(client: &Client, identity: &str) -> Self {
        let plan = FrontSettings {
            front: ObjectKey::new("portico", "portico"),
            sni_port: Some(6_443),
            tunnel_port: None,
            listener_limit: Some(4),
            expose_annotation: portico_api::annotations::EXPOSE.into(),
            namespace: None,
        };
        let front = Front::new(client.clone(), Settings::new(plan, identity));
        let (stop, stopped) = oneshot::channel();
        let status = front.status();
        let task = tokio::spawn(async move {
            let stopped = async move { drop(stopped.await) };
            front.run(stopped).await.unwrap();
        });
        Self { status, stop, task }
    }

    /// The status of the front Service of the seed.
    fn front(&self) -> ServiceStatus {
        let front = ObjectKey::new("portico", "portico");
        self.status.get().services.get(&front).cloned().unwrap_or_default()
    }
}

fn expose(kubectl: &Kubectl, clusters: &[&str]) {
    let items: Vec<_> = clusters
        .iter()
        .map(|name| {
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {
                    "name": name, "namespace": "default",
                    "annotations": {"nodeport-proxy.k8s.io/expose": "NodePort"},
                },
                "spec": {"type": "NodePort", "ports": [{"name": "secure", "port": 443}]},
            })
        })
        .collect();
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
}

/// Number and node port of each port of the front Service, the SNI listener aside.
fn published(kubectl: &Kubectl) -> Vec<(u64, u64)> {
    let front = kubectl.get(&["service", "portico", "-n", "portico"]).unwrap();
    let ports = front["spec"]["ports"].as_array().unwrap();
    ports
        .iter()
        .filter(|port| port["name"] != "sni-listener")
        .map(|port| (port["port"].as_u64().unwrap(), port["nodePort"].as_u64().unwrap()))
        .collect()
}

fn until(what: &str, probe: impl FnMut() -> Result<()>) {
    wait::until(what, LIMIT, probe).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_front_service_follows_the_exposed_services_whoever_leads() {
    let lab = Lab::start("front").unwrap();
    let host = lab.host("seed").unwrap();
    let etcd = Etcd::start(&host).unwrap();
    let options = Options { controllers: false, ..Options::new("seed") };
    let control_plane = ControlPlane::start(&host, &etcd, &options).unwrap();
    let kubectl = control_plane.access().kubectl(&host).unwrap();
    // Replicas have the rights of deploy/front.yaml and no others.
    for file in ["gateway.yaml", "front.yaml"] {
        let path = format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"));
        kubectl.apply(&std::fs::read_to_string(path).unwrap()).unwrap();
    }
    let user =
        control_plane.access().kubeconfig("system:serviceaccount:portico:portico-front", None).unwrap();
    let client = client(Some(&user)).await.unwrap();

    let first = Replica::start(&client, "first");
    until("the first replica to lead", || {
        ensure!(first.status.get().leader, "{:?}", first.status.get());
        Ok(())
    });
    let second = Replica::start(&client, "second");

    // Two clusters at once are one write.
    expose(&kubectl, &["a", "b"]);
    until("two clusters to be published", || {
        ensure!(published(&kubectl).len() == 2, "{:?}", first.status.get());
        Ok(())
    });
    let writes = first.front().writes;
    assert!(
        writes <= 3,
        "the placeholder ports go in one write, two clusters come in one or two, and not {writes}"
    );
    let before = published(&kubectl);

    // The limit holds the newest back, says so, and takes nothing from the old ones.
    expose(&kubectl, &["c"]);
    // One after the other: the age of an object has seconds, and two of the same second are equally new.
    until("the third cluster to be published", || {
        ensure!(published(&kubectl).len() == 3, "{:?}", first.status.get());
        Ok(())
    });
    expose(&kubectl, &["d"]);
    until("one cluster to wait", || {
        ensure!(first.front().waiting.len() == 1 && published(&kubectl).len() == 3);
        Ok(())
    });
    assert_eq!(first.front().waiting[0].service.to_string(), "default/d");
    assert!(before.iter().all(|port| published(&kubectl).contains(port)), "old ports keep their numbers");
    until("the Event", || {
        let events = kubectl.get(&["events", "-n", "portico"])?;
        let found = events["items"].as_array().is_some_and(|events| {
            events.iter().any(|event| {
                event["reason"] == "ListenerLimitReached" && event["involvedObject"]["name"] == "portico"
            })
        });
        ensure!(found, "{events}");
        Ok(())
    });

    // The second replica knows as much and has written nothing; when the first ends, it goes on at once.
    let waiting = second.status.get();
    assert!(waiting.complete && !waiting.leader && second.front().writes == 0, "{waiting:?}");
    first.stop.send(()).unwrap();
    first.task.await.unwrap();
    kubectl.run(&["delete", "service", "a"]).unwrap();
    until("the second replica to go on", || {
        ensure!(second.front().writes == 1 && published(&kubectl).len() == 3, "{:?}", second.status.get());
        Ok(())
    });
    assert!(second.front().waiting.is_empty());

    // Nothing changed, so nothing is written.
    kubectl.run(&["label", "service", "b", "touched=yes"]).unwrap();
    expose(&kubectl, &["e"]);
    until("the newest to wait", || {
        ensure!(second.front().waiting.len() == 1, "{:?}", second.status.get());
        Ok(())
    });
    assert_eq!(second.front().writes, 1);
    assert_eq!(second.front().failed_writes, 0);
    second.stop.send(()).unwrap();
    second.task.await.unwrap();
}
