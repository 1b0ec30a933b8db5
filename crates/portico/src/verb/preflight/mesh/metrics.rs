//! `/metrics` of `portico preflight --mesh`. Names, labels and units are a promise, listed in
//! `docs/operations.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use portico_admin::exposition::{Exposition, Families};
use portico_preflight::verdict::Status;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::MeshStatus;

pub(super) fn of(status: Arc<Mutex<MeshStatus>>) -> Exposition {
    Exposition::of(MeshMetrics(status))
}

#[derive(Debug)]
struct MeshMetrics(Arc<Mutex<MeshStatus>>);

impl Collector for MeshMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Families(encoder);
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        out.one_counter("mesh_rounds", "Rounds of checks that have ended.", status.rounds)?;
        let help = "Rounds that could not be done, or not be reported to Kubernetes.";
        out.one_counter("mesh_failed_rounds", help, status.failed_rounds)?;
        let help = "When the last round ended, since 1970.";
        let ended = status.ended.and_then(|second| u64::try_from(second).ok()).unwrap_or(0);
        out.one_gauge("mesh_last_round", help, Some(&Unit::Seconds), ended)?;
        out.one_gauge("mesh_peers", "Other nodes with a member.", None, status.peers as u64)?;
        let help = "Nodes that were checked in the last round.";
        out.one_gauge("mesh_checked_peers", help, None, status.checked as u64)?;
        let mut counts: BTreeMap<(&str, &str, &str), u64> = BTreeMap::new();
        for finding in &status.findings {
            let word = match finding.status {
                Status::Passed => "passed",
                Status::Failed => "failed",
                // These are reported to nobody, or are no flow.
                Status::Inconclusive | Status::Skipped | Status::Note => "unproven",
            };
            *counts.entry((finding.row.id, finding.check, word)).or_default() += 1;
        }
        let labelled = counts.into_iter().map(|((row, check, status), count)| {
            ([("row", row), ("check", check), ("status", status)], count)
        });
        let help = "Checks of the last round by row of the model, kind and result.";
        out.gauge("mesh_checks", help, None, labelled)
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::metrics::names;
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn every_metric_is_in_the_manual() {
        let mut registry = Registry::with_prefix("portico");
        registry.register_collector(Box::new(MeshMetrics(Arc::default())));
        let mut metrics = String::new();
        text::encode(&mut metrics, &registry).unwrap();
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md"));
        let names = names(&metrics);
        assert!(names.len() > 6, "{metrics}");
        for name in names {
            assert!(manual.contains(&format!("`{name}`")), "{name} is not in the manual");
        }
    }
}
