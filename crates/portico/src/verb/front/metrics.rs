//! `/metrics` of `portico front`. Names, labels and units are a promise, listed in `docs/operations.md`.

use std::fmt;

use portico_admin::exposition::{Exposition, Families};
use portico_operator::{FrontStatus, ServiceStatus, StatusHandle};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

/// The metrics of the controllers.
pub(super) fn front_metrics(status: StatusHandle) -> Exposition {
    Exposition::of(FrontMetrics(status))
}

#[derive(Debug)]
struct FrontMetrics(StatusHandle);

impl Collector for FrontMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = self.0.get();
        let mut out = Families(encoder);
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        let ready = status.complete.into();
        out.one_gauge("front_ready", "1 once all Services are known.", None, ready)?;
        let leader = status.leader.into();
        out.one_gauge("front_leader", "1 if this replica is the one that writes.", None, leader)?;
        write_watches(&status, &mut out)?;
        write_services(&status, &mut out)?;
        write_exposed_clusters(&status, &mut out)
    }
}

fn write_watches(status: &FrontStatus, out: &mut Families<'_>) -> fmt::Result {
    let kinds = || status.watches.iter().map(|(kind, watch)| ([("kind", *kind)], watch));
    let failing = kinds().map(|(kind, watch)| (kind, u64::from(watch.error.is_some())));
    out.gauge("front_watch_failing", "1 while the watch of a kind fails.", None, failing)?;
    let ages = kinds().filter_map(|(kind, watch)| Some((kind, watch.age()?.as_secs_f64())));
    let help = "Time since the API server last said anything about a kind.";
    out.gauge("front_watch_age", help, Some(&Unit::Seconds), ages)?;
    let failures = kinds().map(|(kind, watch)| (kind, watch.failures));
    out.counter("front_watch_failures", "Errors of the watch of a kind.", None, failures)
}

fn write_services(status: &FrontStatus, out: &mut Families<'_>) -> fmt::Result {
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

fn write_exposed_clusters(status: &FrontStatus, out: &mut Families<'_>) -> fmt::Result {
    let report = &status.exposed_clusters;
    let states = [("written", report.written), ("refused", report.refused), ("failed", report.failed)];
    let states = states.map(|(state, clusters)| ([("state", state)], clusters as u64));
    out.gauge("front_exposed_clusters", "Clusters by the state of their ExposedCluster.", None, states)?;
    let help = "Writes of ExposedClusters.";
    out.one_counter("front_exposed_cluster_writes", help, report.writes)?;
    let help = "Writes of ExposedClusters that were refused or not answered.";
    out.one_counter("front_failed_exposed_cluster_writes", help, report.failed_writes)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn every_metric_is_in_the_manual() {
        let mut registry = Registry::with_prefix("portico");
        registry.register_collector(Box::new(FrontMetrics(StatusHandle::default())));
        let mut metrics = String::new();
        text::encode(&mut metrics, &registry).unwrap();
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md"));
        let types: Vec<_> = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert!(types.len() > 10, "{metrics}");
        for line in types {
            let (name, kind) = line.split_once(' ').unwrap();
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert!(manual.contains(&format!("`{name}{suffix}`")), "{name}{suffix} is not in the manual");
        }
    }

    #[test]
    fn alerts_ask_for_metrics_that_are_in_the_manual() {
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md"));
        let alerts = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/alerts.yaml"));
        let words = alerts.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<_> = words.filter(|word| word.starts_with("portico_")).collect();
        assert!(metrics.len() > 7, "{metrics:?}");
        for metric in metrics {
            assert!(manual.contains(&format!("`{metric}`")), "{metric} is not in the manual");
        }
    }
}
