//! `/metrics` of `portico front`. Names, labels and units are a promise, listed in `docs/operations.md`.

use std::collections::BTreeMap;
use std::fmt;

use portico_admin::exposition::{Exposition, Families};
use portico_api::exposed_cluster::MigrationState;
use portico_operator::{
    ClusterPart, ClusterReport, ClustersStatus, ControllerStatus, PartsStatus, SeedsStatus, ServiceStatus,
    StatusHandle, WebhookStatus, WorkStatus,
};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

/// The metrics of the controllers.
pub(super) fn front_metrics(status: StatusHandle) -> Exposition {
    let clusters = status.clone();
    Exposition::with_names_of_another(
        FrontMetrics(move || status.get()),
        KkpMetrics(move || clusters.get().clusters.unwrap_or_default()),
    )
}

/// What KKP's dashboards list clusters by, under its name; on the leader alone, so that each is there once.
struct KkpMetrics<F>(F);

impl<F> fmt::Debug for KkpMetrics<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KkpMetrics")
    }
}

impl<F: Fn() -> ClustersStatus + Send + Sync + 'static> Collector for KkpMetrics<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let clusters = (self.0)();
        let labels = clusters.reports.iter().map(|(name, ClusterReport { info, .. })| {
            let labels = [
                ("name", &**name),
                ("display_name", &info.display_name),
                ("ip", &info.ip),
                ("spec_version", &info.spec_version),
                ("cloud_provider", &info.cloud_provider),
                ("datacenter", &info.datacenter),
                ("pause", if info.pause { "true" } else { "false" }),
                ("project", &info.project),
                ("phase", &info.phase),
            ];
            (labels, 1_u64)
        });
        let help = "1 for each cluster, with what is known of it.";
        Families(encoder).gauge("kubermatic_cluster_info", help, None, labels)
    }
}

/// What the status that this returns says.
struct FrontMetrics<F>(F);

impl<F> fmt::Debug for FrontMetrics<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FrontMetrics")
    }
}

impl<F: Fn() -> ControllerStatus + Send + Sync + 'static> Collector for FrontMetrics<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = (self.0)();
        let mut out = Families(encoder);
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        let ready = status.complete.into();
        out.one_gauge("front_ready", "1 once all Services are known.", None, ready)?;
        let leader = status.leader.into();
        out.one_gauge("front_leader", "1 if this replica is the one that writes.", None, leader)?;
        if let Some(operator) = &status.operator {
            let help = "1 while an operator of another installation leads this cluster.";
            let waits = operator.waits_for.is_some().into();
            out.one_gauge("operator_waits_for_another", help, None, waits)?;
        }
        write_watches(&status, &mut out)?;
        write_work(&status, &mut out)?;
        write_services(&status, &mut out)?;
        write_exposed_clusters(&status, &mut out)?;
        status.clusters.as_ref().map_or(Ok(()), |clusters| write_clusters(clusters, &mut out))?;
        for (part, clusters) in &status.parts {
            write_part(part, clusters, &mut out)?;
        }
        status.seeds.as_ref().map_or(Ok(()), |seeds| write_seeds(seeds, &mut out))?;
        status.webhook.as_ref().map_or(Ok(()), |webhook| write_webhook(webhook, &mut out))
    }
}

fn write_watches(status: &ControllerStatus, out: &mut Families<'_>) -> fmt::Result {
    let kinds = || status.watches.iter().map(|(kind, watch)| ([("kind", *kind)], watch));
    let failing = kinds().map(|(kind, watch)| (kind, u64::from(watch.error.is_some())));
    out.gauge("front_watch_failing", "1 while the watch of a kind fails.", None, failing)?;
    let ages = kinds().filter_map(|(kind, watch)| Some((kind, watch.age()?.as_secs_f64())));
    let help = "Time since the API server last said anything about a kind.";
    out.gauge("front_watch_age", help, Some(&Unit::Seconds), ages)?;
    let failures = kinds().map(|(kind, watch)| (kind, watch.failures));
    out.counter("front_watch_failures", "Errors of the watch of a kind.", None, failures)
}

/// What every controller of this process did.
fn write_work(status: &ControllerStatus, out: &mut Families<'_>) -> fmt::Result {
    let all = || status.controllers.iter().map(|(name, work)| ([("controller", *name)], work));
    let queued = all().map(|(name, work)| (name, work.queued as u64));
    let help = "Objects that something has changed for and that wait for their pass.";
    out.gauge("controller_queue", help, None, queued)?;
    let passes = all().map(|(name, work)| (name, work.passes));
    out.counter("controller_passes", "Passes over an object.", None, passes)?;
    let busy = all().map(|(name, work)| (name, work.busy.as_secs_f64()));
    let help = "Time of all passes, waiting for answers included.";
    out.counter("controller_passes_duration", help, Some(&Unit::Seconds), busy)?;
    let by = |label: &'static str, counts: fn(&WorkStatus) -> &BTreeMap<&'static str, u64>| {
        status.controllers.iter().flat_map(move |(name, work)| {
            let counts = counts(work).iter();
            counts.map(move |(key, count)| ([("controller", *name), (label, *key)], *count))
        })
    };
    let help = "Passes and writes that failed, by reason.";
    out.counter("controller_errors", help, None, by("reason", |work| &work.errors))?;
    let help = "Objects written, by kind.";
    out.counter("controller_writes", help, None, by("kind", |work| &work.writes))
}

fn write_services(status: &ControllerStatus, out: &mut Families<'_>) -> fmt::Result {
    let names: Vec<String> = status.services.keys().map(ToString::to_string).collect();
    let states: Vec<&ServiceStatus> = status.services.values().collect();
    let of = |value: fn(&ServiceStatus) -> u64| {
        names.iter().zip(&states).map(move |(name, state)| ([("service", name.as_str())], value(state)))
    };
    let help = "1 if the front Service exists.";
    out.gauge("front_service_found", help, None, of(|service| service.found.into()))?;
    let help = "Ports that the front Service should have; those that wait are not among them.";
    out.gauge("front_listeners", help, None, of(|service| service.used as u64))?;
    let limits = names
        .iter()
        .zip(&states)
        .filter_map(|(name, state)| Some(([("service", name.as_str())], state.limit? as u64)));
    out.gauge("front_listener_limit", "Most ports it may have.", None, limits)?;
    let help = "NodePorts that are held back, because of the limit or for another reason that /status names.";
    out.gauge("front_waiting", help, None, of(|service| service.waiting.len() as u64))?;
    let help = "Ports that clients need and the front Service does not have, whatever the reason.";
    out.gauge("front_unpublished", help, None, of(|service| service.unpublished() as u64))?;
    let help = "1 while another client writes the same fields, so that this one has stopped.";
    out.gauge("front_yielded", help, None, of(|service| service.yielded_to.is_some().into()))?;
    let troubles = names.iter().zip(&states).flat_map(|(name, state)| {
        state.troubles.keys().map(|reason| ([("service", name.as_str()), ("reason", *reason)], 1_u64))
    });
    let help = "1 for each reason why the front Service is not as wanted.";
    out.gauge("front_trouble", help, None, troubles)?;
    let help = "Updates of the front Service.";
    out.counter("front_writes", help, None, of(|service| service.writes))?;
    let help = "Requests that were refused or not answered.";
    out.counter("front_failed_writes", help, None, of(|service| service.failed_writes))?;
    let help = "Updates that another client has reverted.";
    out.counter("front_reverts", help, None, of(|service| service.reverts))
}

fn write_exposed_clusters(status: &ControllerStatus, out: &mut Families<'_>) -> fmt::Result {
    let report = &status.exposed_clusters;
    let states = [("written", report.written), ("refused", report.refused), ("failed", report.failed)];
    let states = states.map(|(state, clusters)| ([("state", state)], clusters as u64));
    out.gauge("front_exposed_clusters", "Clusters by the state of their ExposedCluster.", None, states)
}

/// Those of an operator alone.
fn write_clusters(status: &ClustersStatus, out: &mut Families<'_>) -> fmt::Result {
    let mut reasons = BTreeMap::<&str, u64>::new();
    for report in status.reports.values() {
        *reasons.entry(report.reason).or_default() += 1;
    }
    let by_reason = reasons.iter().map(|(reason, clusters)| ([("reason", *reason)], *clusters));
    out.gauge("operator_clusters", "Clusters by the reason of their condition.", None, by_reason)?;
    let not_exposed = status.reports.values().filter(|report| !report.exposed).count() as u64;
    let help = "Clusters that clients do not find.";
    out.one_gauge("operator_clusters_not_exposed", help, None, not_exposed)?;
    let migrating = MigrationState::ALL.map(|state| {
        let clusters = status.migrating.values().filter(|&&is| is == state).count() as u64;
        ([("state", state.name())], clusters)
    });
    let help = "Clusters that migrate between strategies, by what is under way.";
    out.gauge("operator_clusters_migrating", help, None, migrating)?;
    let observing = status.observing.is_some().into();
    let help = "1 while nothing is written because KKP's controllers do this work.";
    out.one_gauge("operator_observing", help, None, observing)
}

/// A part of every cluster that an operator keeps.
fn write_part(part: &ClusterPart, status: &PartsStatus, out: &mut Families<'_>) -> fmt::Result {
    let mut reasons = BTreeMap::<&str, u64>::new();
    for report in status.reports.values() {
        *reasons.entry(report.reason).or_default() += 1;
    }
    let by_reason = reasons.iter().map(|(reason, clusters)| ([("reason", *reason)], *clusters));
    out.gauge(part.gauge, part.help, None, by_reason)?;
    let count = status.reports.values().filter(|report| !report.ready).count() as u64;
    out.one_gauge(&format!("{}_not_ready", part.gauge), part.help_not_ready, None, count)?;
    let Some(end) = status.authority_ends.values().min() else { return Ok(()) };
    let help = "When the first authority of a hosted cluster ends, in seconds since 1970.";
    out.gauge("operator_authority_end", help, Some(&Unit::Seconds), [([] as [(&str, &str); 0], *end as f64)])
}

/// Those of an operator that makes the gateway.
fn write_seeds(status: &SeedsStatus, out: &mut Families<'_>) -> fmt::Result {
    let names: Vec<String> = status.reports.keys().map(ToString::to_string).collect();
    let states = names.iter().zip(status.reports.values()).map(|(name, report)| {
        ([("seed", name.as_str()), ("reason", report.reason)], u64::from(report.ready))
    });
    let help = "1 if the gateway of a Seed is as the Seed asks for, by the reason of its condition.";
    out.gauge("operator_seed_ready", help, None, states)?;
    let end = status.certificate_ends.map(|end| ([] as [(&str, &str); 0], end as f64));
    let help = "When the certificate of the tunnel listener ends, in seconds since 1970.";
    out.gauge("operator_tunnel_certificate_end", help, Some(&Unit::Seconds), end)
}

/// Those of an operator with the admission webhook.
fn write_webhook(status: &WebhookStatus, out: &mut Families<'_>) -> fmt::Result {
    let reviews = status.reviews.iter().flat_map(|(kind, results)| {
        results.iter().map(|(result, reviews)| ([("kind", *kind), ("result", *result)], *reviews))
    });
    let help = "Questions of the API server, by the kind of the object and what became of them.";
    out.counter("operator_webhook_reviews", help, None, reviews)?;
    let help = "1 if the API server is told to ask; on the leader alone.";
    out.one_gauge("operator_webhook_registered", help, None, status.registered.into())?;
    let troubled = status.trouble.is_some().into();
    let help = "1 while the certificate or the configuration of the webhook is not as it should be.";
    out.one_gauge("operator_webhook_trouble", help, None, troubled)?;
    let end = status.certificate_ends.map(|end| ([] as [(&str, &str); 0], end as f64));
    let help = "When the certificate of the webhook ends, in seconds since 1970.";
    out.gauge("operator_webhook_certificate_end", help, Some(&Unit::Seconds), end)
}

#[cfg(test)]
mod tests {
    use portico_lab::metrics::names;
    use portico_operator::{
        CONTROL_PLANES, ClusterInfo, OperatorStatus, PartReport, SeedReport, USER_CLUSTERS,
    };
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    /// The pages that list metrics.
    const MANUAL: &str = concat!(
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md")),
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operator.md"))
    );

    #[test]
    fn every_metric_is_in_the_manual() {
        let mut registry = Registry::with_prefix("portico");
        let mut status = ControllerStatus::default();
        let mut clusters = ClustersStatus::default();
        let info = ClusterInfo { display_name: "my cluster".into(), ..ClusterInfo::default() };
        let report =
            ClusterReport { exposed: true, reason: "Exposed", message: String::new(), failures: 0, info };
        clusters.reports.insert("a".into(), report);
        status.clusters = Some(clusters);
        let mut inside = PartsStatus::default();
        let message = String::new();
        let report = PartReport { ready: true, reason: "Ready", message, failures: 0 };
        inside.reports.insert("a".into(), report);
        status.parts.insert(USER_CLUSTERS, inside.clone());
        inside.authority_ends.insert("a".into(), 1);
        status.parts.insert(CONTROL_PLANES, inside);
        let report = SeedReport {
            ready: true,
            reason: "GatewayReady",
            message: String::new(),
            failures: 0,
            condition_written: true,
        };
        let mut seeds = SeedsStatus { certificate_ends: Some(1), ..SeedsStatus::default() };
        seeds.reports.insert(portico_api::meta::ObjectKey::new("portico", "north"), report);
        status.seeds = Some(seeds);
        let mut work = WorkStatus::default();
        work.errors.insert("WriteRefused", 1);
        work.writes.insert("Deployment", 1);
        status.controllers.insert("portico-seed-components", work);
        let mut webhook = WebhookStatus { certificate_ends: Some(1), ..WebhookStatus::default() };
        webhook.reviews.insert("Cluster", [("refused", 1)].into());
        status.webhook = Some(webhook);
        status.operator = Some(OperatorStatus::default());
        let clusters = status.clusters.clone().unwrap();
        registry.register_collector(Box::new(FrontMetrics(move || status.clone())));
        let mut others = Registry::default();
        others.register_collector(Box::new(KkpMetrics(move || clusters.clone())));
        let mut metrics = String::new();
        text::encode(&mut metrics, &registry).unwrap();
        let mut kkp = String::new();
        text::encode(&mut kkp, &others).unwrap();
        assert!(kkp.contains("kubermatic_cluster_info{name=\"a\",display_name=\"my cluster\","), "{kkp}");
        let names = names(&metrics);
        assert!(names.len() > 10, "{metrics}");
        for name in names {
            assert!(MANUAL.contains(&format!("`{name}`")), "{name} is not in the manual");
        }
    }

    #[test]
    fn alerts_ask_for_metrics_that_are_in_the_manual() {
        let alerts = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/alerts.yaml"));
        let words = alerts.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<_> = words.filter(|word| word.starts_with("portico_")).collect();
        assert!(metrics.len() > 7, "{metrics:?}");
        for metric in metrics {
            assert!(MANUAL.contains(&format!("`{metric}`")), "{metric} is not in the manual");
        }
    }
}
