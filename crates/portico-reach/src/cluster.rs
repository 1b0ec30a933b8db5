//! One Cluster, as it is on the seed.

use anyhow::anyhow;
use portico_api::cluster::Cluster;
use portico_api::meta::Kind;
use portico_kube::{Client, read};
use portico_source::ManifestProblem;
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
    let cluster = portico_yaml::typed(object.clone());
    let cluster = cluster.map_err(|invalid| anyhow!("Cluster {name} cannot be read: {invalid}"))?;
    Ok((object, cluster))
}

/// Why a Cluster is not among the objects of a seed: it cannot be read, or is a [`NoCluster`]. `problems` are
/// those of the objects.
pub fn missing(name: &str, problems: &[ManifestProblem]) -> anyhow::Error {
    match problems.iter().find(|problem| is_about(problem, name)) {
        Some(problem) => anyhow!("{problem}"),
        None => NoCluster(name.to_owned()).into(),
    }
}

/// Whether a problem is that a Cluster cannot be read.
fn is_about(problem: &ManifestProblem, name: &str) -> bool {
    problem.object.as_ref().is_some_and(|object| object.kind == Kind::Cluster && *object.key.name == *name)
}
