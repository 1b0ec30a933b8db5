//! Apply, Events and leader election beside a real API server.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::time::Duration;

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use portico_kube::apply::{Applied, apply};
use portico_kube::cached::Cached;
use portico_kube::client;
use portico_kube::events::{Events, Note, Severity};
use portico_kube::leader::{Leads, LeaseSettings, elect};
use portico_lab::ApiServer;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::timeout;

/// Longer than anything takes when all is well: a Lease expires after 15 s.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_has_what_it_needs_from_a_real_api_server() {
    let api = ApiServer::start("controller-parts").unwrap();
    let client = client(Some(&api.admin().unwrap())).await.unwrap();

    an_object_is_written_once_and_again_only_if_it_differs(&client).await;
    a_service_with_defaults_and_fields_of_others_is_at_rest(&client).await;
    repeated_events_are_one_series(&client).await;
    one_replica_leads_and_the_next_goes_on_at_once(&client).await;
    a_certificate_in_files_is_read_again_and_one_that_does_not_fit_its_key_is_not_used(&api).await;
}

async fn a_certificate_in_files_is_read_again_and_one_that_does_not_fit_its_key_is_not_used(api: &ApiServer) {
    let file = |user: &str| api.access().kubeconfig(user, None).unwrap();
    let kubeconfig = file("before");
    let client = client(Some(&kubeconfig)).await.unwrap();
    let who = async || {
        let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
        let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
        review.status.unwrap().user_info.unwrap().username.unwrap()
    };
    assert_eq!(who().await, "before");
    let after = file("after");
    for (end, user) in [("crt", "before"), ("key", "after")] {
        let (from, to) = (after.with_file_name("after"), kubeconfig.with_file_name("before"));
        std::fs::rename(from.with_extension(end), to.with_extension(end)).unwrap();
        assert_eq!(who().await, user, "after the change of .{end}");
    }
}

fn changed<K>(applied: Applied<K>) -> K {
    match applied {
        Applied::Changed(object) => object,
        Applied::Unchanged => panic!("nothing was written"),
    }
}

fn config_map(data: serde_json::Value) -> serde_json::Value {
    json!({"metadata": {"name": "applied"}, "data": data})
}

async fn an_object_is_written_once_and_again_only_if_it_differs(client: &Client) {
    let api: Api<Cached<ConfigMap>> = Api::namespaced_with(client.clone(), "default", &());
    let wanted = config_map(json!({"a": "1", "b": "2"}));
    let created = changed(apply(&api, &wanted, None).await.unwrap());
    assert!(created.is_ours());
    assert!(matches!(apply(&api, &wanted, Some(&created)).await.unwrap(), Applied::Unchanged));

    // Another client adds a field and changes one of ours.
    let patch = json!({"data": {"b": "3", "other": "4"}});
    let touched = api.patch("applied", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    let restored = changed(apply(&api, &wanted, Some(&touched)).await.unwrap());
    assert_eq!(restored.value()["data"], json!({"a": "1", "b": "2", "other": "4"}));
    assert!(matches!(apply(&api, &wanted, Some(&restored)).await.unwrap(), Applied::Unchanged));

    // A field that is no longer wanted goes, and that of the other client stays.
    let less = config_map(json!({"a": "1"}));
    let reduced = changed(apply(&api, &less, Some(&restored)).await.unwrap());
    assert_eq!(reduced.value()["data"], json!({"a": "1", "other": "4"}));

    // A write without a comparison counts as a change, and changes nothing.
    let version = reduced.resource_version();
    assert!(matches!(apply(&api, &less, None).await.unwrap(), Applied::Changed(_)));
    assert_eq!(api.get("applied").await.unwrap().resource_version(), version);
}

async fn a_service_with_defaults_and_fields_of_others_is_at_rest(client: &Client) {
    let api: Api<Cached<Service>> = Api::namespaced_with(client.clone(), "default", &());
    let wanted = json!({
        "metadata": {"name": "applied", "labels": {"app": "portico"}},
        "spec": {"type": "NodePort", "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]},
    });
    let created = changed(apply(&api, &wanted, None).await.unwrap());
    let patch = json!({"metadata": {"labels": {"other": "yes"}}});
    let touched = api.patch("applied", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    assert_ne!(created.resource_version(), touched.resource_version());
    assert!(matches!(apply(&api, &wanted, Some(&touched)).await.unwrap(), Applied::Unchanged));
}

async fn repeated_events_are_one_series(client: &Client) {
    let services: Api<Service> = Api::namespaced(client.clone(), "default");
    let object = services.get("applied").await.unwrap().object_ref(&());
    let events = Events::new(client.clone(), "portico-test", "one");
    let text = "ä".repeat(2_000);
    for _ in 0..3 {
        let note = Note { severity: Severity::Warning, reason: "Waiting", action: "Test", text: &text };
        events.publish(&object, note).await;
    }
    let api: Api<Event> = Api::namespaced(client.clone(), "default");
    let found: Vec<Event> = api.list(&ListParams::default()).await.unwrap().items;
    let ours: Vec<_> = found.iter().filter(|event| event.reason.as_deref() == Some("Waiting")).collect();
    assert_eq!(ours.len(), 1, "{found:?}");
    assert_eq!(ours[0].series.as_ref().map(|series| series.count), Some(3));
}

async fn one_replica_leads_and_the_next_goes_on_at_once(client: &Client) {
    let replica = |identity: &str| {
        let settings = LeaseSettings {
            namespace: "default".into(),
            name: "portico-test".into(),
            identity: identity.into(),
            says: None,
        };
        let (leading, leads) = watch::channel(Leads::default());
        (tokio::spawn(elect(client.clone(), settings, leading, watch::Sender::new(None))), leads)
    };
    let (first, mut first_leads) = replica("first");
    timeout(LIMIT, first_leads.wait_for(|leads| leads.now())).await.unwrap().unwrap();
    let (second, mut second_leads) = replica("second");
    let early = timeout(Duration::from_secs(5), second_leads.wait_for(|leads| leads.now())).await.is_ok();
    assert!(!early, "one replica leads");
    drop(first_leads);
    timeout(LIMIT, first).await.unwrap().unwrap();
    // Released, and not expired.
    timeout(Duration::from_secs(10), second_leads.wait_for(|leads| leads.now())).await.unwrap().unwrap();
    drop(second_leads);
    timeout(LIMIT, second).await.unwrap().unwrap();
}
