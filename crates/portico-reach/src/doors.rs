//! Which door of a cluster is published, and what becomes of another one beside it, as its ExposedCluster
//! records it. The Cluster itself only has what is wanted.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::{ExposedCluster, ExposedClusterSpec, MigrationState};
use portico_api::meta::Kind;
use portico_api::strategy::ExposeStrategy;
use portico_api::text::one_line;
use portico_expose::migration::{Now, Second};
use portico_kube::read::ReadError;
use portico_kube::{Client, read};
use portico_source::{ManifestProblem, Object};
use serde::Serialize;
use serde_json::Value;

use crate::links::{LONGEST, Link};

/// The published door of each cluster, by the name of the cluster; or why its record cannot be used.
pub(crate) type Doors = BTreeMap<Arc<str>, Result<Now, String>>;

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
    /// The operator's words about it; empty while there are none.
    pub message: String,
}

/// What `clusters` have recorded. A record that differs from the wanted strategy, or holds a migration, is
/// read again. It is ignored if an older Cluster of that name left it. An unusable record is an error of its
/// own cluster alone. Unparsable records are in `problems`.
pub(crate) async fn recorded(
    client: &Client,
    objects: &[Object],
    problems: &[ManifestProblem],
    clusters: &BTreeMap<Arc<str>, Cluster>,
) -> anyhow::Result<Doors> {
    let mut doors = Doors::new();
    for problem in problems {
        let Some(object) = problem.object.as_ref().filter(|it| it.kind == Kind::ExposedCluster) else {
            continue;
        };
        let name = &object.key.name;
        doors.insert(Arc::clone(name), Err(format!("ExposedCluster {name}: {}", problem.message)));
    }
    for object in objects {
        let Object::ExposedCluster(exposed) = object else { continue };
        let Some(cluster) = clusters.get(&exposed.metadata.name) else { continue };
        let mut now = Some(Ok(Now::of(&exposed.spec)));
        let wanted = cluster.spec.expose_strategy.get();
        if exposed.spec.migration.is_some() || wanted.is_some_and(|&it| it != exposed.spec.expose_strategy) {
            let found = read_record(client, cluster).await?;
            now = found.map(|found| match spec_of(found, cluster) {
                Ok(spec) => Ok(Now::of(&spec)),
                Err(error) => Err(format!("{error:#}")),
            });
        }
        doors.extend(now.map(|now| (Arc::clone(&exposed.metadata.name), now)));
    }
    Ok(doors)
}

/// The record of a Cluster. `None` if there is none, or if an older Cluster of this name has left it.
pub async fn record(client: &Client, cluster: &Cluster) -> anyhow::Result<Option<ExposedClusterSpec>> {
    read_record(client, cluster).await?.map(|found| spec_of(found, cluster)).transpose()
}

async fn read_record(client: &Client, cluster: &Cluster) -> Result<Option<Value>, ReadError> {
    let name = &*cluster.metadata.name;
    let path = format!("/apis/portico.k8c.io/v1alpha1/exposedclusters/{name}");
    let found: Option<Value> = read(client, &path, &format!("ExposedCluster {name}")).await?;
    Ok(found.filter(|found| is_of(found, cluster)))
}

fn spec_of(found: Value, cluster: &Cluster) -> anyhow::Result<ExposedClusterSpec> {
    let exposed: ExposedCluster =
        serde_json::from_value(found).with_context(|| format!("ExposedCluster {}", cluster.metadata.name))?;
    Ok(exposed.spec)
}

/// That the record of a cluster cannot be used: which door is published is not known then.
pub(crate) fn unusable(why: &str) -> Link {
    Link::unknown("ExposedCluster", why, "correct it; meanwhile the strategy of the Cluster is taken for it")
}

/// Whether an ExposedCluster is of this Cluster, and not of an older one of its name.
pub fn is_of(exposed: &Value, cluster: &Cluster) -> bool {
    let owner = exposed.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
    owner == Some(&cluster.metadata.uid)
}

/// The migration of `cluster` that is under way. `now` is its record.
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
    use std::convert::Infallible;

    use portico_api::exposed_cluster::MigrationState::{MovingNodes, Opening};
    use portico_api::meta::{ObjectKey, ObjectRef};
    use portico_api::problem::Severity;
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
    fn a_migration_is_reported_from_the_door_that_is_left_to_the_other() {
        let waits = json!({"status": "False", "reason": "Opening", "message": "waits for its address"});
        let shown = |cluster: &Cluster, now| migration(cluster, now).map(|it| (it.doors(), it.describe()));
        let text = |doors: &str, shown: &str| Some((doors.to_owned(), shown.to_owned()));
        let there = cluster("Tunneling", &waits);
        assert_eq!(
            shown(&there, at(NodePort, Tunneling, Opening)),
            text("NodePort -> Tunneling", "Opening: waits for its address")
        );
        let settled = json!({"status": "True", "reason": "Settled", "message": "of before"});
        let there = cluster("Tunneling", &settled);
        assert_eq!(
            shown(&there, at(Tunneling, NodePort, MovingNodes)),
            text("NodePort -> Tunneling", "MovingNodes")
        );
        assert_eq!(shown(&there, Now::settled(NodePort)), text("NodePort -> Tunneling", "Wanted"));
        assert_eq!(shown(&there, Now::settled(Tunneling)), None);
    }

    #[test]
    fn a_record_that_a_cluster_of_this_name_has_left_says_nothing() {
        let cluster = cluster("NodePort", &json!({}));
        let owned = |uid: &str| json!({"metadata": {"ownerReferences": [{"uid": uid}]}});
        assert!(is_of(&owned("1"), &cluster));
        assert!(!is_of(&owned("2"), &cluster) && !is_of(&json!({"metadata": {}}), &cluster));
    }

    #[test]
    fn a_record_that_does_not_fit_its_kind_is_reported_by_name() {
        let cluster = cluster("NodePort", &json!({}));
        let error = spec_of(json!({"metadata": {"name": "a"}, "spec": 7}), &cluster).unwrap_err();
        assert_eq!(error.to_string(), "ExposedCluster a");
        assert!(!unusable(&format!("{error:#}")).is_broken());
    }

    #[tokio::test]
    async fn a_record_that_cannot_be_used_counts_against_its_own_cluster_alone() {
        let problem = ManifestProblem {
            file: None,
            line: 0,
            severity: Severity::Error,
            reason: "invalid",
            object: Some(ObjectRef { kind: Kind::ExposedCluster, key: ObjectKey::new("", "a") }),
            message: "spec: no object".into(),
            remedy: String::new(),
        };
        let exposed = |name: &str| {
            let object =
                json!({"metadata": {"name": name}, "spec": {"seed": "s", "exposeStrategy": "NodePort"}});
            Object::ExposedCluster(Box::new(serde_json::from_value(object).unwrap()))
        };
        let clusters = ["a", "b"].map(|name| (Arc::from(name), cluster("NodePort", &json!({}))));
        // Nothing is asked of the API: neither of them migrates.
        let client = Client::new(tower::service_fn(never), "default");
        let doors = recorded(&client, &[exposed("b")], &[problem], &clusters.into()).await.unwrap();
        assert_eq!(doors["a"], Err("ExposedCluster a: spec: no object".to_owned()));
        assert_eq!(doors["b"], Ok(Now::settled(NodePort)));
    }

    async fn never(
        request: http::Request<kube::client::Body>,
    ) -> Result<http::Response<kube::client::Body>, Infallible> {
        panic!("{}", request.uri())
    }
}
