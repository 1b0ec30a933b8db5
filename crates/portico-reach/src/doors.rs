//! Which door of a cluster users have been told of, and what becomes of another one beside it: as its
//! ExposedCluster records it. What the Cluster itself says is what is wanted.

use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::{ExposedCluster, ExposedClusterSpec, MigrationState};
use portico_api::strategy::ExposeStrategy;
use portico_expose::migration::{Now, Second};
use portico_kube::text::one_line;
use portico_kube::{Client, read};
use portico_source::Object;
use serde::Serialize;
use serde_json::Value;

use crate::links::{LONGEST, Link};

/// What users of a cluster have been told of, by the name of the cluster.
pub(crate) type Doors = BTreeMap<Arc<str>, Now>;

/// A migration that is under way, or wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// The state; `Wanted` before the first.
    pub state: &'static str,
    /// The door that is left.
    pub from: ExposeStrategy,
    /// The one that takes its place.
    pub to: ExposeStrategy,
    /// What the operator says of it; empty while it says nothing.
    pub message: String,
}

/// What `clusters` have recorded. Where that is another strategy than the wanted one, it is made sure that it
/// is of this Cluster, and not of one of the same name before it.
pub(crate) async fn recorded(
    client: &Client,
    objects: &[Object],
    clusters: &BTreeMap<Arc<str>, Cluster>,
) -> anyhow::Result<Doors> {
    let mut doors = Doors::new();
    for object in objects {
        let Object::ExposedCluster(exposed) = object else { continue };
        let Some(cluster) = clusters.get(&exposed.metadata.name) else { continue };
        let mut now = Some(Now::of(&exposed.spec));
        let wanted = cluster.spec.expose_strategy.get();
        if exposed.spec.migration.is_some() || wanted.is_some_and(|&it| it != exposed.spec.expose_strategy) {
            now = record(client, cluster).await?.as_ref().map(Now::of);
        }
        doors.extend(now.map(|now| (Arc::clone(&exposed.metadata.name), now)));
    }
    Ok(doors)
}

/// What is recorded of a Cluster; `None` if nothing is, or an older Cluster of this name has left it.
pub async fn record(client: &Client, cluster: &Cluster) -> anyhow::Result<Option<ExposedClusterSpec>> {
    let name = &*cluster.metadata.name;
    let path = format!("/apis/portico.k8c.io/v1alpha1/exposedclusters/{name}");
    let found: Option<Value> = read(client, &path, &format!("ExposedCluster {name}")).await?;
    let Some(found) = found.filter(|found| is_of(found, cluster)) else { return Ok(None) };
    Ok(Some(serde_json::from_value::<ExposedCluster>(found)?.spec))
}

/// Whether an ExposedCluster is of this Cluster, and not of an older one of its name.
pub fn is_of(exposed: &Value, cluster: &Cluster) -> bool {
    let owner = exposed.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
    owner == Some(&cluster.metadata.uid)
}

/// What is under way with `cluster`, of which `now` is recorded.
pub(crate) fn migration(cluster: &Cluster, now: Now) -> Option<Migration> {
    let (state, from, to) = match now.second {
        Some(Second {
            strategy, state: state @ (MigrationState::Opening | MigrationState::Proving), ..
        }) => (state.name(), now.first, strategy),
        Some(Second { strategy, state, .. }) => (state.name(), strategy, now.first),
        None => {
            let wanted = cluster.spec.expose_strategy.get().filter(|&&wanted| wanted != now.first)?;
            ("Wanted", now.first, *wanted)
        }
    };
    let condition = cluster.status.conditions.get(MIGRATING).filter(|found| &*found.status != "True");
    // It becomes a cell of a table, where a line break would pass for a row.
    let message = condition.map(|condition| one_line(&condition.message, LONGEST)).unwrap_or_default();
    Some(Migration { state, from, to, message })
}

impl Migration {
    /// The two doors, as a cell of a table.
    pub fn doors(&self) -> String {
        format!("{} -> {}", self.from, self.to)
    }

    /// How far it is, and what it waits for.
    pub fn describe(&self) -> String {
        let colon = if self.message.is_empty() { "" } else { ": " };
        format!("{}{colon}{}", self.state, self.message)
    }

    /// It as a link of the chain: nothing is broken by it.
    pub(crate) fn link(&self) -> Link {
        Link::holds("migration", format!("{}, {}", self.doors(), self.describe()))
    }
}

#[cfg(test)]
mod tests {
    use portico_api::exposed_cluster::MigrationState::{MovingNodes, Opening};
    use portico_api::strategy::ExposeStrategy::{NodePort, Tunneling};
    use serde_json::json;

    use super::*;

    fn cluster(wanted: &str, condition: &Value) -> Cluster {
        serde_json::from_value(json!({"metadata": {"name": "a", "uid": "1"},
            "spec": {"exposeStrategy": wanted}, "status": {"conditions": {MIGRATING: condition}}}))
        .unwrap()
    }

    fn at(first: ExposeStrategy, second: ExposeStrategy, state: MigrationState) -> Now {
        let since = "2026-01-02T03:04:05Z".parse().unwrap();
        Now { first, second: Some(Second { strategy: second, state, since }) }
    }

    #[test]
    fn a_migration_is_told_from_the_door_that_is_left_to_the_other() {
        let waits = json!({"status": "False", "reason": "Opening", "message": "waits for its address"});
        let told = |cluster: &Cluster, now| migration(cluster, now).map(|it| (it.doors(), it.describe()));
        let text = |doors: &str, told: &str| Some((doors.to_owned(), told.to_owned()));
        let there = cluster("Tunneling", &waits);
        assert_eq!(
            told(&there, at(NodePort, Tunneling, Opening)),
            text("NodePort -> Tunneling", "Opening: waits for its address")
        );
        let settled = json!({"status": "True", "reason": "Settled", "message": "of before"});
        let there = cluster("Tunneling", &settled);
        assert_eq!(
            told(&there, at(Tunneling, NodePort, MovingNodes)),
            text("NodePort -> Tunneling", "MovingNodes")
        );
        assert_eq!(told(&there, Now::settled(NodePort)), text("NodePort -> Tunneling", "Wanted"));
        assert_eq!(told(&there, Now::settled(Tunneling)), None);
    }

    #[test]
    fn a_record_that_a_cluster_of_this_name_has_left_says_nothing() {
        let cluster = cluster("NodePort", &json!({}));
        let owned = |uid: &str| json!({"metadata": {"ownerReferences": [{"uid": uid}]}});
        assert!(is_of(&owned("1"), &cluster));
        assert!(!is_of(&owned("2"), &cluster) && !is_of(&json!({"metadata": {}}), &cluster));
    }
}
