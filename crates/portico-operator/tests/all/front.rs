//! The controllers of the front Service and of ExposedClusters: two replicas, a burst, the listener limit,
//! the end of the leader. Also settings of a Seed, a right that is missing, another writer, and a kill
//! between two writes.

use anyhow::ensure;
use kube::Client;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_kube::client;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::{ApiServer, Kubectl, kkp};
use portico_operator::{Operator, ServiceStatus, Settings, StatusHandle};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{manifest, until};

/// One running controller.
struct Replica {
    status: StatusHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Replica {
    fn start(client: &Client, identity: &str) -> Self {
        Self::with(client, Self::settings(identity))
    }

    fn settings(identity: &str) -> Settings {
        let plan = FrontSettings {
            front: ObjectKey::new("portico", "portico"),
            sni_port: Some(6_443),
            tunnel_port: None,
            listener_limit: Some(4),
            expose_annotation: portico_api::annotations::EXPOSE.into(),
            namespace: None,
        };
        Settings::new(plan, identity)
    }

    /// One that writes ExposedClusters too.
    fn writing(client: &Client, identity: &str) -> Self {
        let settings = Settings { exposed_clusters: true, ..Self::settings(identity) };
        Self::with(client, settings)
    }

    fn with(client: &Client, settings: Settings) -> Self {
        let front = Operator::front(client.clone(), settings);
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

/// A client with the rights of deploy/front.yaml and no others.
async fn client_of_front(api: &ApiServer) -> Client {
    let user = api.access().kubeconfig("system:serviceaccount:portico:portico-front", None).unwrap();
    client(Some(&user)).await.unwrap()
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_front_service_follows_the_exposed_services_whichever_replica_leads() {
    let api = ApiServer::start("front").unwrap();
    let kubectl = api.kubectl();
    // Replicas have the rights of deploy/front.yaml and no others.
    for file in ["gateway.yaml", "front.yaml"] {
        kubectl.apply(&manifest(file)).unwrap();
    }
    let client = client_of_front(&api).await;

    let first = Replica::start(&client, "first");
    until("the first replica to lead", || {
        ensure!(first.status.get().leader, "{:?}", first.status.get());
        Ok(())
    });
    let second = Replica::start(&client, "second");

    // Two clusters at once are one write.
    expose(kubectl, &["a", "b"]);
    until("two clusters to be published", || {
        ensure!(published(kubectl).len() == 2, "{:?}", first.status.get());
        Ok(())
    });
    let writes = first.front().writes;
    assert!(
        writes <= 3,
        "the placeholder ports go in one write, two clusters come in one or two, and not {writes}"
    );
    let before = published(kubectl);

    // The limit holds the newest back, says so, and takes nothing from the old ones.
    expose(kubectl, &["c"]);
    // One after the other: the age of an object has seconds, and two of the same second are equally new.
    until("the third cluster to be published", || {
        ensure!(published(kubectl).len() == 3, "{:?}", first.status.get());
        Ok(())
    });
    expose(kubectl, &["d"]);
    until("one cluster to wait", || {
        ensure!(first.front().waiting.len() == 1 && published(kubectl).len() == 3);
        Ok(())
    });
    assert_eq!(first.front().waiting[0].service.to_string(), "default/d");
    assert!(before.iter().all(|port| published(kubectl).contains(port)), "old ports keep their numbers");
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
        ensure!(second.front().writes == 1 && published(kubectl).len() == 3, "{:?}", second.status.get());
        Ok(())
    });
    assert!(second.front().waiting.is_empty());

    // Nothing changed, so nothing is written.
    kubectl.run(&["label", "service", "b", "touched=yes"]).unwrap();
    expose(kubectl, &["e"]);
    until("the newest to wait", || {
        ensure!(second.front().waiting.len() == 1, "{:?}", second.status.get());
        Ok(())
    });
    assert_eq!(second.front().writes, 1);
    assert_eq!(second.front().failed_writes, 0);
    second.stop.send(()).unwrap();
    second.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_fails_or_lies_takes_nothing_from_the_front_service() {
    // So many that losing them all at once is doubted.
    const CLUSTERS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let api = ApiServer::start("front-failing").unwrap();
    let kubectl = api.kubectl();
    for file in ["gateway.yaml", "front.yaml"] {
        kubectl.apply(&manifest(file)).unwrap();
    }
    expose(kubectl, &CLUSTERS);
    let proxy = FaultyApi::default();
    // The kinds of KKP are not served here, and an answer that they are not is no reason to take away either.
    let client = proxy.client(&client_of_front(&api).await);
    let mut settings = Replica::settings("only");
    settings.plan.listener_limit = None;
    let replica = Replica::with(&client, settings);
    until("all clusters to be published", || {
        ensure!(published(kubectl).len() == CLUSTERS.len(), "{:?}", replica.status.get());
        Ok(())
    });
    let before = published(kubectl);

    // Mute: the Lease runs out unseen, and nothing is written until the API server is back.
    proxy.rules(|rules| rules.mute = true);
    expose(kubectl, &["missed"]);
    until("the silence to show", || {
        let status = replica.status.get();
        let failing = status.watches.values().any(|watch| watch.error.is_some());
        ensure!(failing && !status.leader, "{status:?}");
        Ok(())
    });
    assert_eq!(published(kubectl), before);

    // Back, it has forgotten what the watch was at, and lists nothing at first.
    proxy.rules(|rules| {
        rules.mute = false;
        rules.answers = vec![
            ("/api/v1/services?&watch", Answer::Status(410), 1),
            ("/api/v1/services?&limit", Answer::Empty, 1),
        ];
    });
    until("what was missed", || {
        let now = published(kubectl);
        ensure!(before.iter().all(|port| now.contains(port)), "{before:?} {now:?}");
        ensure!(now.len() == before.len() + 1 && proxy.has_answered(), "{:?}", replica.status.get());
        Ok(())
    });
    replica.stop.send(()).unwrap();
    replica.task.await.unwrap();
}

fn seed(ranges: &[&str]) -> serde_json::Value {
    json!({
        "apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
        "metadata": {"name": "north", "namespace": "portico"},
        "spec": {
            "datacenters": {"lab-1": {}},
            "nodeportProxy": {"ipFamilyPolicy": "PreferDualStack", "envoy": {"loadBalancerService":
                {"annotations": {"example.com/of-seed": "1"}, "sourceRanges": ranges}}},
        },
    })
}

fn condition_of(kubectl: &Kubectl) -> String {
    let front = kubectl.get(&["service", "portico", "-n", "portico"]).unwrap();
    let conditions = front["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ours = conditions.iter().find(|condition| condition["type"] == "portico.k8c.io/Published");
    ours.map(|condition| condition["reason"].as_str().unwrap().to_owned()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_refusals_other_writers_and_exposed_clusters_at_a_real_api_server() {
    let api = ApiServer::start("front-life").unwrap();
    let kubectl = api.kubectl();
    for file in ["gateway.yaml", "front.yaml", "crds.yaml"] {
        kubectl.apply(&manifest(file)).unwrap();
    }
    kkp::install(kubectl).unwrap();
    let client = client_of_front(&api).await;

    a_seed_restricts_the_load_balancer(kubectl, &client).await;
    a_write_that_lacks_the_right_shows_as_not_published(kubectl, &client).await;
    a_writer_that_keeps_reverting_is_yielded_to(kubectl, &client).await;
    exposed_clusters_are_complete_after_a_kill(kubectl, &client).await;
}

async fn a_seed_restricts_the_load_balancer(kubectl: &Kubectl, client: &Client) {
    kubectl.apply_json(&seed(&["203.0.113.0/24"])).unwrap();
    let front = || kubectl.get(&["service", "portico", "-n", "portico"]).unwrap();
    let replica = Replica::start(client, "settings");
    until("the settings", || {
        let front = front();
        ensure!(front["spec"]["loadBalancerSourceRanges"] == json!(["203.0.113.0/24"]), "{front}");
        ensure!(front["metadata"]["annotations"]["example.com/of-seed"] == "1");
        ensure!(front["spec"]["ipFamilyPolicy"] == "PreferDualStack");
        Ok(())
    });
    // What a person wrote stays when the Seed takes back what it asked for.
    kubectl.run(&["annotate", "service", "portico", "-n", "portico", "example.com/of-person=1"]).unwrap();
    let mut less = seed(&[]);
    less["spec"]["nodeportProxy"]["envoy"]["loadBalancerService"]["annotations"] = json!({});
    kubectl.apply_json(&less).unwrap();
    until("the settings to go", || {
        let front = front();
        ensure!(front["spec"].get("loadBalancerSourceRanges").is_none(), "{front}");
        ensure!(front["metadata"]["annotations"].get("example.com/of-seed").is_none());
        Ok(())
    });
    assert_eq!(front()["metadata"]["annotations"]["example.com/of-person"], "1");
    replica.stop.send(()).unwrap();
    replica.task.await.unwrap();
}

async fn a_write_that_lacks_the_right_shows_as_not_published(kubectl: &Kubectl, client: &Client) {
    let replica = Replica::start(client, "refused");
    until("everything to be published", || {
        ensure!(condition_of(kubectl) == "AsWanted", "{:?}", replica.status.get());
        Ok(())
    });
    // Conditions may still be written.
    let right = "resources: [services, services/status]\n  resourceNames: [portico]";
    let rights = manifest("front.yaml");
    assert_eq!(rights.matches(right).count(), 1, "the rights in deploy/front.yaml are others now");
    let less = right.replace("services, ", "");
    kubectl.apply(&rights.replace(right, &less)).unwrap();
    expose(kubectl, &["a"]);
    until("the refusal to show", || {
        let front = replica.front();
        ensure!(front.unpublished() == 1 && front.error.is_some(), "{front:?}");
        ensure!(condition_of(kubectl) == "WriteRefused");
        Ok(())
    });
    assert!(replica.front().error.unwrap().contains("403"));
    kubectl.apply(&rights).unwrap();
    until("the write to be accepted", || {
        ensure!(replica.front().unpublished() == 0 && condition_of(kubectl) == "AsWanted");
        Ok(())
    });
    assert_eq!(published(kubectl).len(), 1);
    replica.stop.send(()).unwrap();
    replica.task.await.unwrap();
}

async fn a_writer_that_keeps_reverting_is_yielded_to(kubectl: &Kubectl, client: &Client) {
    let replica = Replica::start(client, "reverted");
    expose(kubectl, &["b"]);
    until("yielding", || {
        let theirs = r#"{"spec": {"ports": [{"name": "healthz", "port": 8002, "protocol": "TCP"}]}}"#;
        let patch = ["patch", "service", "portico", "-n", "portico", "--type=merge", "-p", theirs];
        kubectl.run(&[&patch[..], &["--field-manager=lb-updater"]].concat())?;
        let front = replica.front();
        ensure!(front.yielded_to.as_deref() == Some("\"lb-updater\""), "{front:?}");
        Ok(())
    });
    let front = replica.front();
    assert!(front.writes <= 3 && front.unpublished() == 3, "{front:?}");
    until("the condition", || {
        ensure!(condition_of(kubectl) == "ForeignWriter");
        Ok(())
    });
    replica.stop.send(()).unwrap();
    replica.task.await.unwrap();
}

async fn exposed_clusters_are_complete_after_a_kill(kubectl: &Kubectl, client: &Client) {
    const CLUSTERS: usize = 100;
    let objects = |allowed: &str| {
        let clusters = (0..CLUSTERS).map(|index| {
            json!({
                "apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
                "metadata": {"name": format!("c{index}")},
                "spec": {"exposeStrategy": "LoadBalancer", "cloud": {"dc": "lab-1"},
                    "apiServerAllowedIPRanges": {"cidrBlocks": [allowed]}},
                "status": {"address": {"adminToken": "s3cret"}},
            })
        });
        let configuration = json!({
            "apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kkp", "namespace": "portico"},
            "spec": {"ingress": {"domain": "example.com"}},
        });
        let items: Vec<_> = clusters.chain([configuration]).collect();
        json!({"apiVersion": "v1", "kind": "List", "items": items})
    };
    kubectl.apply_json(&objects("203.0.113.0/24")).unwrap();
    let written = |replica: &Replica| replica.status.get().exposed_clusters.written;
    let work = |replica: &Replica| replica.status.get().controllers["portico-exposed-clusters"].clone();
    let killed = Replica::writing(client, "killed");
    until("a first ExposedCluster", || {
        ensure!(written(&killed) > 0, "{:?}", killed.status.get());
        Ok(())
    });
    killed.task.abort();
    let next = Replica::writing(client, "next");
    until("all ExposedClusters", || {
        let report = next.status.get().exposed_clusters;
        ensure!(report.written == CLUSTERS && work(&next).errors.is_empty(), "{:?}", next.status.get());
        Ok(())
    });
    let versions = || {
        let all = kubectl.get(&["exposedclusters"]).unwrap();
        assert!(!all.to_string().contains("s3cret"));
        let items = all["items"].as_array().unwrap();
        items.iter().map(|item| item["metadata"]["resourceVersion"].to_string()).collect::<Vec<_>>()
    };
    let before = versions();
    assert_eq!(before.len(), CLUSTERS);
    let writes = work(&next).writes["ExposedCluster"];
    kubectl.run(&["label", "cluster", "c0", "touched=yes"]).unwrap();
    kubectl.run(&["delete", "exposedcluster", "c1"]).unwrap();
    until("the one that was deleted", || {
        ensure!(work(&next).writes["ExposedCluster"] > writes);
        Ok(())
    });
    let after = versions();
    let same = before.iter().filter(|version| after.contains(version)).count();
    assert_eq!((same, after.len()), (CLUSTERS - 1, CLUSTERS), "nothing is written at rest");
    next.stop.send(()).unwrap();
    next.task.await.unwrap();
}
