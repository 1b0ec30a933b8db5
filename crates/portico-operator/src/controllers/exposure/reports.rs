//! Status of every cluster's exposure: in the log and as an Event when it changes, and in `/status`.

use k8s_openapi::api::core::v1::ObjectReference;
use portico_api::cluster::{Cluster, EXPOSED};
use portico_expose::exposure::Reachability;
use portico_kube::events::{Events, Note, Severity};

use crate::condition::shown;
use crate::controllers::exposed::reference;
use crate::news::News;
use crate::status::{ClusterInfo, ClusterReport, StatusHandle};
use crate::write::PUT_BACK;

/// Records the status of `cluster`, and reports it if it changed. `failed` counts a failed pass.
pub(super) async fn report(
    cluster: &Cluster,
    reachability: &Reachability,
    failed: bool,
    status: &StatusHandle,
    events: &Events,
) {
    let name = &*cluster.metadata.name;
    let Reachability { exposed, reason, message } = reachability;
    let message = &shown(message);
    let news = status.clusters(|clusters| {
        let before = clusters.reports.get(name);
        let failures = before.map_or(0, |before| before.failures);
        let first = before.is_none();
        let news = before.is_none_or(|before| (before.exposed, before.reason) != (*exposed, *reason));
        let failures = if failed { failures.saturating_add(1) } else { 0 };
        let report = ClusterReport {
            exposed: *exposed,
            reason,
            message: message.clone(),
            failures,
            info: ClusterInfo::of(cluster),
        };
        clusters.reports.insert(name.to_owned(), report);
        let troubled = || clusters.reports.values().filter(|report| !report.exposed).count();
        news.then(|| News { troubled: troubled(), first })
    });
    let Some(news) = news else { return };
    let severity = if *exposed { Severity::Normal } else { Severity::Warning };
    let note = Note { severity, reason, action: "ExposeCluster", text: message };
    news.publish(cluster, (EXPOSED, *exposed), note, events).await;
}

/// Says by an Event that `object` of `cluster` is as it was before somebody had changed or deleted it.
pub(super) async fn tell_put_back(cluster: &Cluster, object: ObjectReference, text: &str, events: &Events) {
    let note = Note { severity: Severity::Normal, reason: PUT_BACK, action: "ExposeCluster", text };
    events.publish_about(&reference(cluster), object, note).await;
}
