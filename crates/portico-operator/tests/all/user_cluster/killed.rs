//! An operator that is killed between any two writes for a user cluster, inside of it and on the seed.

use anyhow::{Result, ensure};
use portico_kube::client;
use portico_lab::control_plane::ADMINS;
use portico_lab::faulty_api::FaultyApi;
use portico_lab::{ApiServer, Kubectl};
use portico_pki::Kubeconfig;
use serde_json::{Value, json};

use super::{Stage, administrators, put_kubeconfig, put_secret, user_clusters};
use crate::support::{Running, cluster, give_address, insides, install, release};
use crate::until;

/// What Portico has inside the user cluster, less what differs from run to run.
fn state(inside: &Kubectl) -> Vec<Value> {
    const KINDS: &str = "serviceaccounts,configmaps,endpoints,endpointslices,roles,rolebindings,daemonsets,\
                         deployments,poddisruptionbudgets,clusterroles,clusterrolebindings";
    let found = inside.get(&[KINDS, "-A", "--show-managed-fields"]).unwrap();
    let ours = |object: &&Value| {
        let managers = object.pointer("/metadata/managedFields").and_then(Value::as_array);
        managers.into_iter().flatten().any(|entry| entry["manager"] == "portico")
    };
    let stable = |object: &Value| {
        let mut object = object.clone();
        let own: Vec<_> = ["name", "namespace", "labels", "annotations"]
            .iter()
            .map(|field| object["metadata"][field].clone())
            .collect();
        object["metadata"] = json!(own);
        object.as_object_mut().unwrap().remove("status");
        object
    };
    found["items"].as_array().unwrap().iter().filter(ours).map(stable).collect()
}

/// Each operator makes one write inside the user cluster, and is killed as it makes the next one.
async fn killed_at_each_write(stage: &Stage, faulty: &FaultyApi, way: &str) -> usize {
    for kills in 0.. {
        faulty.rules(|rules| (rules.writes_left, rules.withheld) = (Some(1), false));
        let killed = stage.operator(&format!("{way}-{kills}"));
        let mut complete = false;
        until("a write that is withheld, or the end", || {
            complete = user_clusters(&killed).reports.get("a").is_some_and(|report| report.ready);
            ensure!(complete || faulty.rules(|rules| rules.withheld), "{:?}", killed.status.get());
            Ok(())
        });
        killed.kill().await;
        release(&stage.kubectl);
        if complete {
            return kills;
        }
    }
    unreachable!()
}

/// Takes everything away that Portico made inside the user cluster.
fn wipe(inside: &Kubectl) {
    for object in state(inside) {
        let (kind, own) = (object["kind"].as_str().unwrap(), &object["metadata"]);
        let mut delete = vec!["delete", kind, own[0].as_str().unwrap()];
        delete.extend(own[1].as_str().map(|_| "-n").into_iter().chain(own[1].as_str()));
        inside.run(&delete).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_any_two_writes_inside_a_cluster_the_next_one_goes_on_to_the_same_objects() {
    let stage = Stage::start("user-cluster-kill").await;
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    let faulty = FaultyApi::default();
    let direct = stage.user.access().kubeconfig("kubermatic-controllers", Some(ADMINS)).unwrap();
    let port = faulty.serve(&client(Some(&direct)).await.unwrap()).await.unwrap();
    let kubeconfig =
        Kubeconfig { server: port.url().into(), authority: port.authority().cert(), ..stage.kubeconfig() };
    kubectl.run(&["create", "namespace", "cluster-a"]).unwrap();
    kubectl.run(&["label", "namespace", "cluster-a", "portico.k8c.io/cluster=a"]).unwrap();
    put_kubeconfig(kubectl, "a", &kubeconfig.to_yaml());
    kubectl.apply_json(&cluster("a", "Tunneling")).unwrap();

    let kills = killed_at_each_write(&stage, &faulty, "made").await;
    assert!(kills > 10, "only {kills} writes");
    let tunneling = state(inside);
    kubectl.run(&["label", "cluster", "a", "unsafe-expose-strategy-migration="]).unwrap();
    let other =
        r#"{"spec": {"exposeStrategy": "LoadBalancer", "clusterNetwork": {"tunnelingAgentIP": null}}}"#;
    kubectl.run(&["patch", "cluster", "a", "--type=merge", "-p", other]).unwrap();
    let operator = stage.operator("other-strategy");
    faulty.rules(|rules| rules.writes_left = Some(0));
    until("the load balancer", || {
        kubectl.get(&["service", "front-loadbalancer", "-n", "cluster-a"]).map(drop)
    });
    give_address(kubectl, "a", "203.0.113.9");
    until("the first write", || {
        ensure!(faulty.rules(|rules| rules.withheld));
        Ok(())
    });
    operator.kill().await;
    release(kubectl);
    let kills = killed_at_each_write(&stage, &faulty, "changed").await;
    assert!(kills > 3, "only {kills} writes");
    let load_balancer = state(inside);

    // In one go.
    faulty.rules(|rules| rules.writes_left = None);
    wipe(inside);
    let operator = stage.operator("in-one-go");
    until("all of it", || {
        let found = state(inside);
        ensure!(found == load_balancer, "{found:?}\ninstead of\n{load_balancer:?}");
        Ok(())
    });
    operator.stop().await;
    assert!(tunneling.len() > load_balancer.len() && !load_balancer.is_empty());
}

/// What the controller wrote on the seed, less what differs from run to run.
fn on_seed(kubectl: &Kubectl) -> Result<Value> {
    let cluster = kubectl.get(&["cluster", "a"])?;
    let secret = kubectl.get(&["secret", "admin-kubeconfig", "-n", "cluster-a"])?;
    let condition = &cluster["status"]["conditions"]["PorticoUserClusterReady"];
    let ca = cluster["metadata"]["annotations"].get("portico.k8c.io/api-server-ca");
    ensure!(ca.is_some() && condition["reason"] == "Unreachable", "{cluster}");
    Ok(json!([ca, condition["message"], secret["metadata"]["labels"], secret["type"]]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_any_two_writes_on_the_seed_the_next_one_goes_on_to_the_same_objects() {
    let api = ApiServer::start("user-cluster-seed-kill").unwrap();
    let kubectl = api.kubectl();
    let direct = install(kubectl, api.access()).await;
    // Nobody listens there: all writes are on the seed.
    let kubeconfig = Kubeconfig { server: "https://127.0.0.1:1".into(), ..administrators(api.access()) };
    kubectl.apply_json(&cluster("a", "Tunneling")).unwrap();
    // The objects of the exposure are there before.
    let exposing = Running::start(&direct, "exposing");
    until("the exposure", || {
        ensure!(exposing.clusters().reports.contains_key("a"));
        Ok(())
    });
    put_kubeconfig(kubectl, "a", &kubeconfig.to_yaml());
    let authority = api.access().authority().identity();
    put_secret(kubectl, "a", "ca", &json!({"ca.crt": authority.cert, "ca.key": authority.key}));
    exposing.stop().await;
    let mut expected: Option<Value> = None;
    for writes in 0.. {
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let start = |client: &kube::Client, way: &str| {
            Running::start_with(client, &format!("{way}-{writes}"), |it| it.with_user_clusters(insides(None)))
        };
        let killed = start(&faulty.client(&direct), "killed");
        until("a write that is withheld, or the end", || {
            ensure!(faulty.rules(|rules| rules.withheld) || on_seed(kubectl).is_ok());
            Ok(())
        });
        let complete = !faulty.rules(|rules| rules.withheld);
        killed.kill().await;
        release(kubectl);
        let next = start(&direct, "next");
        until("everything", || on_seed(kubectl).map(drop));
        next.stop().await;
        let found = on_seed(kubectl).unwrap();
        assert_eq!(*expected.get_or_insert_with(|| found.clone()), found, "killed after {writes} writes");
        if complete {
            assert!(writes > 2, "only {writes} writes were withheld");
            return;
        }
        kubectl.run(&["delete", "secret", "admin-kubeconfig", "-n", "cluster-a"]).unwrap();
        kubectl.run(&["annotate", "cluster", "a", "portico.k8c.io/api-server-ca-"]).unwrap();
        let gone = r#"{"status": {"conditions": {"PorticoUserClusterReady": null}}}"#;
        let status = ["patch", "cluster", "a", "--subresource=status", "--type=merge", "-p", gone];
        kubectl.run(&status).unwrap();
    }
}
