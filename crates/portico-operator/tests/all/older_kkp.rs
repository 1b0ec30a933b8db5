//! Definitions of an older KKP, which drop fields that are written: reported, without a loop, while clusters
//! are exposed all the same; healed by newer ones.

use anyhow::ensure;
use jiff::Timestamp;
use portico_lab::{ApiServer, Kubectl};
use serde_json::json;

use crate::components::settings;
use crate::support::{Running, cluster, install};
use crate::{manifest, until};

/// As before there were conditions, and before agents had an address.
fn make_older(kubectl: &Kubectl) {
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
    let keep = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let status = json!({"type": "object", "properties":
        {"namespaceName": {"type": "string"}, "address": keep, "phase": {"type": "string"}}});
    let status = json!({"op": "replace", "path": format!("{schema}/status"), "value": status});
    let without = json!({"type": "object", "properties": {"dnsDomain": {"type": "string"}}});
    let network = format!("{schema}/spec/properties/clusterNetwork");
    let older = [
        (
            "clusters",
            json!([status, {"op": "replace", "path": network, "value": without},
            {"op": "remove", "path": format!("{schema}/spec/x-kubernetes-validations")}]),
        ),
        ("seeds", json!([status])),
    ];
    for (kind, patch) in older {
        let definition = format!("{kind}.kubermatic.k8c.io");
        kubectl.run(&["patch", "crd", &definition, "--type=json", "-p", &patch.to_string()]).unwrap();
    }
}

fn wait_reason(operator: &Running, expected: &str) -> String {
    let mut message = String::new();
    until(expected, || {
        let reports = operator.clusters().reports;
        let report = reports.get("a").filter(|report| report.reason == expected);
        message = report.map(|report| report.message.clone()).unwrap_or_default();
        ensure!(report.is_some(), "{reports:?}");
        Ok(())
    });
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_that_drop_what_is_written_are_reported_and_the_cluster_is_exposed_all_the_same() {
    let api = ApiServer::start("older-kkp").unwrap();
    let kubectl = api.kubectl();
    let client = install(kubectl, api.access()).await;
    make_older(kubectl);
    until("the older definition", || {
        let mut probe = cluster("a", "Tunneling");
        probe["spec"]["clusterNetwork"] = json!({"tunnelingAgentIP": "100.64.30.10"});
        let probe = probe.to_string();
        let refused = kubectl.run_with_input(&["create", "--dry-run=server", "-f", "-"], &probe);
        ensure!(refused.is_err_and(|error| error.to_string().contains("unknown field")), "it is kept");
        Ok(())
    });
    let components = settings(Timestamp::now, None);
    let operator = Running::start_with(&client, "older", |operator| operator.with_components(components));
    kubectl.apply_json(&cluster("a", "Tunneling")).unwrap();
    kubectl.apply_json(&cluster("lb", "LoadBalancer")).unwrap();
    let message = wait_reason(&operator, "DefinitionOutdated");
    assert!(message.contains("status.conditions") && message.contains("portico crds"), "{message}");
    kubectl.get(&["service", "apiserver-external", "-n", "cluster-a"]).unwrap();
    let exposed = kubectl.get(&["exposedcluster", "a"]).unwrap();
    assert_eq!(exposed["spec"]["address"]["url"], "https://a.north.kkp.invalid:6443");
    until("the Event", || {
        let events = kubectl.run(&["events", "--for=cluster/a"])?;
        ensure!(events.contains("DefinitionOutdated"), "{events}");
        Ok(())
    });
    let work = || operator.work("portico-exposure");
    assert!(work().errors["DefinitionOutdated"] > 0);
    until("the Seed's condition to be missed", || {
        let work = operator.work("portico-seed-components");
        ensure!(work.errors.contains_key("DefinitionOutdated"), "{work:?}");
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(events.contains("DefinitionOutdated"), "{events}");
        Ok(())
    });
    // A condition alone is merged, and dropped silently.
    let endpoints = |value: &str| {
        kubectl.run(&["annotate", "cluster", "a", &format!("portico.k8c.io/endpoints{value}")]).unwrap();
    };
    endpoints("=localhost");
    until("what is wrong with the Cluster itself", || {
        let message = operator.clusters().reports["a"].message.clone();
        ensure!(message.contains("InvalidConfiguration") && message.contains("drops"), "{message}");
        Ok(())
    });
    endpoints("-");
    wait_reason(&operator, "DefinitionOutdated");
    // One change is one pass, and not one after the other.
    let at_rest = || {
        until("the passes to end", || {
            let before = work().passes;
            for _ in 0..10 {
                kubectl.run(&["get", "cluster", "a"])?;
            }
            ensure!(work().passes == before, "{:?}", work());
            Ok(())
        });
        work().passes
    };
    let before = at_rest();
    kubectl.run(&["label", "cluster", "a", "touched=yes"]).unwrap();
    until("another pass", || {
        ensure!(work().passes > before);
        Ok(())
    });
    let after = at_rest();
    assert!(after < before + 4, "{before}, then {:?}", work());

    let newer = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
    kubectl.run_with_input(&newer, &manifest("crds-kubermatic.yaml")).unwrap();
    // Nobody touches Cluster or Seed, and no name is looked up for a load balancer.
    for (object, condition, reason) in [
        ("cluster/a", "PorticoExposed", "NameNotResolved"),
        ("cluster/lb", "PorticoExposed", "LoadBalancerPending"),
        ("seed/north", "PorticoSeedReady", "NameTaken"),
    ] {
        until(object, || {
            let found = kubectl.get(&[object, "-n", "portico"])?;
            let found = &found["status"]["conditions"][condition]["reason"];
            ensure!(found == reason, "{found}");
            Ok(())
        });
    }
    operator.stop().await;
}
