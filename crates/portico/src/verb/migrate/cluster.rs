//! The Cluster that is to migrate, as it is on the seed.

use anyhow::{Context, anyhow};
use portico_api::cluster::Cluster;
use portico_kube::{Client, read};
use serde_json::Value;

pub(super) fn path(name: &str) -> String {
    format!("/apis/kubermatic.k8c.io/v1/clusters/{name}")
}

/// The Cluster as it is, and as far as it counts.
pub(super) async fn read_cluster(client: &Client, name: &str) -> anyhow::Result<(Value, Cluster)> {
    let object: Option<Value> = read(client, &path(name), &format!("Cluster {name}")).await?;
    let object = object.ok_or_else(|| anyhow!(no_cluster(name)))?;
    let cluster = serde_json::from_value(object.clone()).with_context(|| format!("Cluster {name}"))?;
    Ok((object, cluster))
}

pub(super) fn no_cluster(name: &str) -> String {
    format!("there is no Cluster {name}; `kubectl get clusters` lists them")
}
