//! User clusters whose API server hangs, is too slow or answers what no API server does. Each is reported by
//! condition, Event and metric, heals by itself, and holds no other cluster up.

use std::time::Duration;

use anyhow::ensure;
use portico_kube::client;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::hostile_api::HostileApi;
use portico_lab::{ApiServer, Authority, Kubectl};
use portico_pki::Kubeconfig;
use serde_json::{Value, json};

use super::{administrators, put_kubeconfig, put_secret, user_clusters, wait_reason, work};
use crate::support::{Running, cluster, insides, install};
use crate::until;

/// One less than there are slots.
const HANGING: usize = 31;

/// How long each answer of the slow one takes: many of them take longer than a pass may.
const SLOW: Duration = Duration::from_millis(1_500);

/// A cluster with its namespace and the way into it.
fn objects(name: &str, kubeconfig: &Kubeconfig) -> [Value; 3] {
    let namespace = format!("cluster-{name}");
    [
        json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"portico.k8c.io/cluster": name}}}),
        json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "internal-admin-kubeconfig", "namespace": namespace},
            "stringData": {"kubeconfig": kubeconfig.to_yaml()}}),
        cluster(name, "Tunneling"),
    ]
}

/// By its condition, an Event, and what metrics are made of.
fn is_reported(kubectl: &Kubectl, operator: &Running, name: &str, expected: &str) {
    wait_reason(kubectl, name, expected);
    until("the metrics", || {
        let (report, work) = (user_clusters(operator).reports.remove(name), work(operator));
        ensure!(report.as_ref().is_some_and(|report| report.reason == expected), "{report:?}");
        ensure!(work.errors.get(expected).is_some_and(|count| *count > 0), "{work:?}");
        Ok(())
    });
    until("the Event", || {
        let events = kubectl.run(&["events", &format!("--for=cluster/{name}")])?;
        ensure!(events.contains(expected), "{events}");
        Ok(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_servers_that_hang_hold_no_other_cluster_up_and_each_bad_answer_is_reported() {
    // What leads to the API server from inside is written by the operator, as in KKP.
    let api = ApiServer::start_with("user-answers", &["--endpoint-reconciler-type=none"]).unwrap();
    let kubectl = api.kubectl();
    let seed = install(kubectl, api.access()).await;
    let good = administrators(api.access());
    let admin = client(Some(&api.admin().unwrap())).await.unwrap();
    let at = |server: &str, authority: &Authority| Kubeconfig {
        server: server.to_owned(),
        authority: authority.cert(),
        ..good.clone()
    };

    let mute = FaultyApi::default();
    mute.rules(|rules| rules.mute = true);
    let port = mute.serve(&admin).await.unwrap();
    let slow = FaultyApi::default();
    slow.rules(|rules| rules.slow = Some(SLOW));
    slow.rules(|rules| rules.answers = vec![("", Answer::Status(404), usize::MAX)]);
    let slow_port = slow.serve(&admin).await.unwrap();
    let odd = HostileApi::start("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", false).unwrap();
    let mut items = Vec::new();
    for number in 0..HANGING {
        items.extend(objects(&format!("mute{number}"), &at(port.url(), port.authority())));
    }
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
    kubectl.apply_json(&cluster("good", "Tunneling")).unwrap();
    let operator =
        Running::start_with(&seed, "one", |operator| operator.with_user_clusters(insides(Some("x"))));
    wait_reason(kubectl, "good", "NoKubeconfig");
    one_slot_is_enough_for_the_others(kubectl, &operator, &mute, &good);
    is_reported(kubectl, &operator, "mute0", "NoAnswer");
    mute.rules(|rules| rules.mute = false);

    let items = [
        objects("slow", &at(slow_port.url(), slow_port.authority())),
        objects("odd", &at(&odd.url("127.0.0.1"), odd.authority())),
    ];
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items.concat()})).unwrap();
    is_reported(kubectl, &operator, "odd", "AnswerUnreadable");
    pauses_begin_anew_when_a_control_plane_comes_up(kubectl, &operator);
    no_kubeconfig_can_be_issued(kubectl, &operator);
    is_reported(kubectl, &operator, "slow", "TooSlow");

    slow.rules(|rules| (rules.slow, rules.answers) = (None, Vec::new()));
    // The causes have ended, and nothing else has changed.
    for name in ["mute0", "slow"] {
        wait_reason(kubectl, name, "Ready");
    }
    operator.stop().await;
}

/// It is ready before the first of those that hang is given up.
fn one_slot_is_enough_for_the_others(
    kubectl: &Kubectl,
    operator: &Running,
    mute: &FaultyApi,
    good: &Kubeconfig,
) {
    until("every other slot to be taken", || {
        let hanging = mute.rules(|rules| rules.unanswered);
        ensure!(hanging >= HANGING, "{hanging}");
        Ok(())
    });
    put_kubeconfig(kubectl, "good", &good.to_yaml());
    let mut given_up = 0;
    until("the inside of the good one", || {
        let reports = user_clusters(operator).reports;
        ensure!(reports["good"].ready, "{reports:?}");
        given_up = reports.values().filter(|report| report.reason == "NoAnswer").count();
        Ok(())
    });
    assert_eq!(given_up, 0, "they hang still");
}

/// What failed before it was there makes no pause longer.
fn pauses_begin_anew_when_a_control_plane_comes_up(kubectl: &Kubectl, operator: &Running) {
    let failures = || user_clusters(operator).reports["odd"].failures;
    for touch in 0..3 {
        let (before, touch) = (failures(), format!("touched={touch}"));
        let secret = ["label", "secret", "internal-admin-kubeconfig", "-n", "cluster-odd", &touch];
        kubectl.run(&[&secret[..], &["--overwrite"]].concat()).unwrap();
        until("another failed pass", || {
            ensure!(failures() > before, "{before}");
            Ok(())
        });
    }
    let ready = json!({"status": "True", "reason": "Ready"});
    let status = json!({"status": {"conditions": {"PorticoControlPlaneReady": ready}}}).to_string();
    kubectl.run(&["patch", "cluster", "odd", "--subresource=status", "--type=merge", "-p", &status]).unwrap();
    until("the first failed pass", || {
        let failures = failures();
        ensure!(failures == 1, "{failures}");
        Ok(())
    });
}

/// As after a restore of half a backup: reported, and healed by the right key alone.
fn no_kubeconfig_can_be_issued(kubectl: &Kubectl, operator: &Running) {
    let (authority, other) = (Authority::new("good").unwrap(), Authority::new("good").unwrap());
    let (right, wrong) = (authority.identity(), other.identity());
    put_secret(kubectl, "good", "ca", &json!({"ca.crt": right.cert, "ca.key": wrong.key}));
    let secret = ["label", "secret", "internal-admin-kubeconfig", "-n", "cluster-good", "touched=yes"];
    kubectl.run(&secret).unwrap();
    is_reported(kubectl, operator, "good", "NoAdminKubeconfig");
    put_secret(kubectl, "good", "ca", &json!({"ca.crt": right.cert, "ca.key": right.key}));
    wait_reason(kubectl, "good", "Ready");
    kubectl.get(&["secret", "admin-kubeconfig", "-n", "cluster-good"]).unwrap();
}
