//! A seed's API server that is mute for one of two operators, and one that is slow. There is one leader at
//! any time, nothing is written twice, and everything goes on by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::{ApiServer, Kubectl};
use serde_json::json;

use crate::support::{Running, cluster, insides, install};
use crate::until;

/// How long each answer of the slow one takes. A read and a write take more than an attempt to renew a Lease.
const SLOW: Duration = Duration::from_millis(2_500);

fn leads(operator: &Running) -> bool {
    operator.status.get().leader
}

/// Waits until this operator has a report about each of so many clusters, as leader.
fn wait_reports(operator: &Running, clusters: usize) {
    until("a report about each", || {
        let reports = operator.clusters().reports;
        ensure!(leads(operator) && reports.len() == clusters, "{reports:?}");
        ensure!(reports.values().all(|report| report.reason == "NameNotResolved"), "{reports:?}");
        Ok(())
    });
}

fn exists(kubectl: &Kubectl, name: &str) -> Result<()> {
    kubectl.get(&["service", "apiserver-external", "-n", &format!("cluster-{name}")]).map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_to_which_the_seed_is_mute_or_slow_steps_down_comes_back_and_writes_nothing_twice() {
    let api = ApiServer::start("seed-api").unwrap();
    let kubectl = api.kubectl();
    let direct = install(kubectl, api.access()).await;
    let faulty = FaultyApi::default();
    let client = faulty.client(&direct);
    let first = Running::start_with(&client, "first", |operator| operator.with_user_clusters(insides(None)));
    for name in ["a", "b"] {
        kubectl.apply_json(&cluster(name, "Tunneling")).unwrap();
    }
    wait_reports(&first, 2);
    let written = first.work("portico-exposure").writes;
    let second = Running::start(&direct, "second");

    // Mute: the first one steps down before the other one begins, which finds nothing to do.
    faulty.rules(|rules| rules.mute = true);
    until("the other one to lead", || {
        ensure!(!(leads(&first) && leads(&second)), "both lead");
        ensure!(leads(&second));
        Ok(())
    });
    wait_reports(&second, 2);
    assert_eq!(second.work("portico-exposure").writes, BTreeMap::new());
    kubectl.apply_json(&cluster("c", "Tunneling")).unwrap();
    wait_reports(&second, 3);
    // Twice, so that it has been asked in vain for longer than a restart takes.
    for failures in [1, 2] {
        until("the silence to show", || {
            let watches = first.status.get().watches;
            ensure!(watches["Seed"].failures >= failures, "{watches:?}");
            Ok(())
        });
    }

    // Slow: it leads all the same, and finds what the other one wrote.
    faulty.rules(|rules| (rules.mute, rules.slow) = (false, Some(SLOW)));
    until("every watch to work again", || {
        let watches = first.status.get().watches;
        ensure!(watches.values().all(|watch| watch.error.is_none()), "{watches:?}");
        Ok(())
    });
    second.stop().await;
    wait_reports(&first, 3);
    assert_eq!(first.work("portico-exposure").writes, written);
    // An Event about that time can only be written now.
    until("how long it was away", || {
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(
            events.contains("SeedApiAway") && events.contains(" s or more; changes of that time"),
            "{events}"
        );
        Ok(())
    });
    kubectl.apply_json(&cluster("d", "Tunneling")).unwrap();
    until("a cluster more", || {
        ensure!(leads(&first), "it steps down");
        exists(kubectl, "d")
    });
    faulty.rules(|rules| rules.slow = None);
    wait_reports(&first, 4);

    let wait_condition = |name: &str, condition: &str, reason: &str| {
        until(condition, || {
            let cluster = kubectl.get(&["cluster", name])?;
            let found = &cluster["status"]["conditions"][condition]["reason"];
            ensure!(found == reason && faulty.has_answered(), "{cluster}");
            Ok(())
        });
    };
    // Nothing but the failure itself has it written again: the cluster has no name to be looked up.
    faulty.rules(|rules| rules.answers = vec![("/clusters/lb/status", Answer::Status(500), 2)]);
    kubectl.apply_json(&cluster("lb", "LoadBalancer")).unwrap();
    wait_condition("lb", "PorticoExposed", "LoadBalancerPending");
    assert!(first.work("portico-exposure").errors["WriteRefused"] >= 2);
    what_is_wrong_for_good_is_written_once(kubectl, &first);

    // The other condition is written again after a failure, too. Both controllers write to one path.
    faulty.rules(|rules| rules.answers = vec![("/clusters/e/status", Answer::Status(500), 6)]);
    kubectl.apply_json(&cluster("e", "Tunneling")).unwrap();
    wait_condition("e", "PorticoUserClusterReady", "NoKubeconfig");
    assert!(first.work("portico-user-cluster").errors["WriteRefused"] >= 1);
    first.stop().await;
}

/// A cluster that cannot be exposed has no address, and its condition is as it was after every further pass.
fn what_is_wrong_for_good_is_written_once(kubectl: &Kubectl, operator: &Running) {
    let mut wrong = cluster("wrong", "Tunneling");
    wrong["metadata"]["annotations"] = json!({"portico.k8c.io/endpoints": "localhost"});
    kubectl.apply_json(&wrong).unwrap();
    let condition = || {
        let cluster = kubectl.get(&["cluster", "wrong"])?;
        let condition = cluster["status"]["conditions"]["PorticoExposed"].clone();
        ensure!(condition["reason"] == "InvalidConfiguration", "{cluster}");
        Ok(condition)
    };
    until("the condition", || condition().map(drop));
    let before = condition().unwrap();
    until("another second, as conditions write it", || {
        let written: jiff::Timestamp = before["lastHeartbeatTime"].as_str().unwrap().parse()?;
        ensure!(jiff::Timestamp::now().as_second() > written.as_second());
        Ok(())
    });
    // The condition follows a pass: that of the first is there once the second has begun.
    for touched in ["touched=once", "touched=twice"] {
        let passes = operator.work("portico-exposure").passes;
        kubectl.run(&["label", "cluster", "wrong", touched, "--overwrite"]).unwrap();
        until("a pass", || {
            ensure!(operator.work("portico-exposure").passes > passes);
            Ok(())
        });
    }
    assert_eq!(condition().unwrap(), before);
}
