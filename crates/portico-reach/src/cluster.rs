//! One Cluster, as it is on the seed.

use anyhow::Context;
use portico_api::cluster::Cluster;
use portico_kube::{Client, read};
use serde_json::Value;
use thiserror::Error;

/// There is no Cluster of this name.
#[derive(Debug, Error)]
#[error("there is no Cluster {0}; `kubectl get clusters` lists them")]
pub struct NoCluster(pub String);

/// Where the Clusters of a seed are in its API.
pub const CLUSTERS: &str = "/apis/kubermatic.k8c.io/v1/clusters";

/// Where one of them is.
pub fn cluster_path(name: &str) -> String {
    format!("{CLUSTERS}/{name}")
}

/// The Cluster as it is, and as far as it counts. The name becomes part of a path: the caller has checked it,
/// or it is that of an object.
///
/// # Errors
/// It cannot be read; a [`NoCluster`] if it is not there.
pub async fn read_cluster(client: &Client, name: &str) -> anyhow::Result<(Value, Cluster)> {
    let object: Option<Value> = read(client, &cluster_path(name), &format!("Cluster {name}")).await?;
    let object = object.ok_or_else(|| NoCluster(name.to_owned()))?;
    let cluster =
        serde_json::from_value(object.clone()).with_context(|| format!("reading Cluster {name}"))?;
    Ok((object, cluster))
}
