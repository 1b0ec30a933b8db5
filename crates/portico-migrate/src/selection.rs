//! The Clusters with certain labels, and how they stand towards a strategy.

use std::collections::BTreeMap;

use anyhow::{Context, anyhow};
use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::{ExposedCluster, ExposedClusterSpec};
use portico_api::migration::SETTLED;
use portico_api::strategy::ExposeStrategy;
use portico_expose::migration::Now;
use portico_expose::migration::waves::{AllProgress, Progress};
use portico_kube::{Client, Selector, list};
use portico_reach::cluster::CLUSTERS;
use portico_reach::doors::is_of;
use serde_json::Value;
use tokio::time::timeout;

use crate::plans::LiveSeed;

/// A selected cluster.
pub struct Found {
    /// Its Cluster.
    pub cluster: Cluster,
    /// What is recorded of its doors.
    pub record: Option<ExposedClusterSpec>,
}

/// The clusters that are selected, by name.
pub type Selection = BTreeMap<String, Found>;

/// Lists the Clusters with these labels, and what is recorded of them.
///
/// # Errors
/// The seed cannot be read in time, or one of them cannot be used as it is.
pub async fn list_selected(seed: &LiveSeed, selector: &str) -> anyhow::Result<Selection> {
    let limit = seed.timeout;
    let looked = timeout(limit, list_all(&seed.client, selector)).await;
    looked.map_err(|_| anyhow!("listing Clusters with the labels {selector} took more than {limit:?}"))?
}

async fn list_all(client: &Client, selector: &str) -> anyhow::Result<Selection> {
    let mut selected = Ok(Selection::new());
    let what = format!("the Clusters with the labels {selector}");
    list(client, CLUSTERS, Selector::Labels(selector), &what, |object| {
        keep(&mut selected, |selected| {
            let name = name_of(&object);
            let cluster = serde_json::from_value(object).with_context(|| format!("Cluster {name}"))?;
            selected.insert(name, Found { cluster, record: None });
            Ok(())
        });
    })
    .await?;
    let path = "/apis/portico.k8c.io/v1alpha1/exposedclusters";
    list(client, path, Selector::All, "ExposedClusters", |object| {
        keep(&mut selected, |selected| {
            let name = name_of(&object);
            let Some(found) = selected.get_mut(&name) else { return Ok(()) };
            if is_of(&object, &found.cluster) {
                let exposed: ExposedCluster =
                    serde_json::from_value(object).with_context(|| format!("ExposedCluster {name}"))?;
                found.record = Some(exposed.spec);
            }
            Ok(())
        });
    })
    .await?;
    selected
}

/// Adds to a selection of which nothing went wrong yet.
fn keep(selected: &mut anyhow::Result<Selection>, add: impl FnOnce(&mut Selection) -> anyhow::Result<()>) {
    if let Ok(all) = selected
        && let Err(error) = add(all)
    {
        *selected = Err(error);
    }
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

impl Found {
    /// The doors that it has, where that is recorded.
    pub fn now(&self) -> Option<Now> {
        self.record.as_ref().map(Now::of)
    }

    /// What the Cluster asks for.
    pub fn wanted(&self, now: Now) -> ExposeStrategy {
        self.cluster.spec.expose_strategy.get().copied().unwrap_or(now.first)
    }

    /// How it stands towards a strategy. The record is written before the condition: both must say that it is
    /// over. A cluster that never migrated may have no condition.
    pub fn progress(&self, target: ExposeStrategy) -> Progress {
        let Some(now) = self.now() else { return Progress::Unknown };
        let wanted = self.wanted(now);
        let is_still = now == Now::settled(wanted);
        if wanted == target {
            let condition = self.cluster.status.conditions.get(MIGRATING);
            let is_reported = condition.is_none_or(|it| &*it.reason == SETTLED && &*it.status == "True");
            if is_still && is_reported { Progress::There } else { Progress::UnderWay }
        } else if is_still {
            Progress::Waits
        } else {
            Progress::Elsewhere
        }
    }

    /// Whether there is something to finish or to roll back.
    pub fn is_under_way(&self) -> bool {
        self.now().is_some_and(|now| now != Now::settled(self.wanted(now)))
    }
}

/// How all of them stand towards a strategy.
pub fn progress_of_all(selection: &Selection, target: ExposeStrategy) -> AllProgress {
    selection.iter().map(|(name, found)| (name.clone(), found.progress(target))).collect()
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::ExposeStrategy::Tunneling;
    use serde_json::json;

    use super::*;

    /// A cluster that wants this, with this in force, a second door, and the reason of its condition.
    fn found(wanted: &str, first: &str, second: Option<&str>, reason: Option<&str>) -> Found {
        let mut cluster = json!({"metadata": {"name": "a"}, "spec": {"exposeStrategy": wanted}});
        if let Some(reason) = reason {
            let status = if reason == SETTLED { "True" } else { "False" };
            cluster["status"]["conditions"] =
                json!({MIGRATING: {"status": status, "reason": reason, "message": "text"}});
        }
        let mut record = json!({"exposeStrategy": first, "seed": "north"});
        if let Some(second) = second {
            record["migration"] = json!({"state": "Opening", "since": "2026-01-02T03:04:05Z",
                "second": {"exposeStrategy": second}});
        }
        let record = Some(serde_json::from_value(record).unwrap());
        Found { cluster: serde_json::from_value(cluster).unwrap(), record }
    }

    #[test]
    fn a_cluster_stands_where_its_order_its_record_and_its_condition_say() {
        let node_port = "NodePort";
        for (found, progress) in [
            (found("Tunneling", "Tunneling", None, None), Progress::There),
            (found("Tunneling", "Tunneling", None, Some(SETTLED)), Progress::There),
            (found("Tunneling", "Tunneling", None, Some("Closing")), Progress::UnderWay),
            (found("Tunneling", "Tunneling", Some(node_port), Some("Closing")), Progress::UnderWay),
            // Ordered, and the operator has not seen it.
            (found("Tunneling", node_port, None, Some(SETTLED)), Progress::UnderWay),
            (found("Tunneling", "LoadBalancer", Some(node_port), Some("Closing")), Progress::UnderWay),
            (found(node_port, node_port, None, None), Progress::Waits),
            (found(node_port, node_port, Some("Tunneling"), Some("Closing")), Progress::Elsewhere),
            (found("LoadBalancer", node_port, None, Some(SETTLED)), Progress::Elsewhere),
            (Found { record: None, ..found("Tunneling", node_port, None, None) }, Progress::Unknown),
        ] {
            let found_as = (&found.cluster.spec.expose_strategy, &found.record);
            assert_eq!(found.progress(Tunneling), progress, "{found_as:?}");
        }
    }

    #[test]
    fn what_is_under_way_can_be_finished_or_rolled_back_and_nothing_else() {
        assert!(!found("NodePort", "NodePort", None, None).is_under_way());
        assert!(found("NodePort", "NodePort", Some("Tunneling"), None).is_under_way());
        assert!(found("Tunneling", "NodePort", None, None).is_under_way());
        assert!(!Found { record: None, ..found("Tunneling", "NodePort", None, None) }.is_under_way());
    }
}
