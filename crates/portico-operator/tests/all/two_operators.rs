//! Two operators on one cluster that know nothing of each other: each with a front Service of its own.

use anyhow::ensure;
use portico_api::meta::ObjectKey;
use portico_lab::{ApiServer, Kubectl};
use serde_json::json;

use crate::support::{Running, cluster, install_operator};
use crate::until;

/// What the second one waits for.
fn waits_for(operator: &Running) -> Option<String> {
    operator.status.get().operator.unwrap_or_default().waits_for
}

/// As the manifest of another installation does.
fn let_it_lead(kubectl: &Kubectl, service: &str) {
    let name = format!("portico-front-{service}");
    let subject = "--serviceaccount=portico:portico-operator";
    let role = ["create", "role", &name, "-n", "portico", "--verb=get,update", "--resource=leases"];
    kubectl.run(&role).unwrap();
    let binding = ["create", "rolebinding", &name, "-n", "portico", &format!("--role={name}"), subject];
    kubectl.run(&binding).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_operators_with_services_of_their_own_one_writes_and_the_other_says_which_one_it_waits_for() {
    let api = ApiServer::start("two-operators").unwrap();
    let kubectl = api.kubectl();
    let client = install_operator(kubectl, api.access()).await;
    let_it_lead(kubectl, "other");
    let first = Running::start(&client, "first");
    until("the first one to lead", || {
        ensure!(first.status.get().leader);
        Ok(())
    });
    let service = ObjectKey::new("portico", "other");
    // In another namespace its pod may have the same name.
    let second = Running::start_for(&client, "first", service, Vec::new(), |operator| operator);
    until("the second one to wait", || {
        let text = waits_for(&second).unwrap_or_default();
        ensure!(text.contains("portico/portico (replica first"), "{text}");
        Ok(())
    });
    until("the Event", || {
        let events = kubectl.run(&["events", "-n", "kube-system", "--for=lease/portico-operator"])?;
        ensure!(events.contains("SecondOperator"), "{events}");
        Ok(())
    });
    kubectl.apply_json(&cluster("a", "NodePort")).unwrap();
    until("a cluster to be exposed", || kubectl.get(&["exposedcluster", "a"]).map(drop));
    let idle = second.status.get();
    assert!(!idle.leader && idle.controllers.values().all(|work| work.writes.is_empty()), "{idle:?}");
    assert_eq!(waits_for(&first), None);

    first.stop().await;
    until("the second one to lead", || {
        ensure!(second.status.get().leader && waits_for(&second).is_none());
        Ok(())
    });
    let lease = kubectl.get(&["lease", "portico-operator", "-n", "kube-system"]).unwrap();
    assert_eq!(lease["metadata"]["annotations"], json!({"portico.k8c.io/service": "portico/other"}));
    let other = Running::start(&client, "again");
    until("the first one to wait, now that it comes back", || {
        let text = waits_for(&other).unwrap_or_default();
        ensure!(text.contains("portico/other (replica first"), "{text}");
        Ok(())
    });
    second.stop().await;
    other.stop().await;
}
