//! The objects on the seed that the control plane of a removed Cluster has left. Its namespace is left if
//! something kept the Cluster's deletion from taking it along. Volumes of etcd are left if they are to be
//! kept.

use std::collections::BTreeSet;

use portico_api::names::ClusterName;
use portico_expose::exposure::CLUSTER_LABEL;
use portico_kube::{Client, Selector, list};
use serde::Serialize;
use serde_json::Value;

use crate::cluster::CLUSTERS;

/// One object without its Cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// `Namespace` or `PersistentVolume`.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// The Cluster that is gone.
    pub cluster: String,
}

/// Lists them. Clusters are asked for by name alone and last: one that cannot be read lives on, and one may
/// have been made a moment ago. Without a list of them nothing is known to be left.
pub(crate) async fn find(client: &Client) -> anyhow::Result<Vec<Orphan>> {
    let mut found = Vec::new();
    let labelled = Selector::Labels(CLUSTER_LABEL);
    list(client, "/api/v1/namespaces", labelled, "namespaces of clusters", |it| found.extend(namespace(&it)))
        .await?;
    let path = "/api/v1/persistentvolumes";
    list(client, path, Selector::All, "PersistentVolumes", |it| found.extend(volume(&it))).await?;
    let mut clusters = BTreeSet::new();
    list(client, CLUSTERS, Selector::All, "Clusters", |it| {
        clusters.insert(text(&it, "/metadata/name").to_owned());
    })
    .await?;
    found.retain(|orphan| !clusters.contains(&orphan.cluster));
    Ok(found)
}

fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

fn namespace(object: &Value) -> Option<Orphan> {
    let cluster = object["metadata"]["labels"][CLUSTER_LABEL].as_str()?.to_owned();
    // What ends by itself is none.
    let stays = object["metadata"].get("deletionTimestamp").is_none();
    let name = text(object, "/metadata/name").to_owned();
    stays.then_some(Orphan { kind: "Namespace", name, cluster })
}

fn volume(object: &Value) -> Option<Orphan> {
    let cluster = ClusterName::of_namespace(text(object, "/spec/claimRef/namespace"))?;
    let name = text(object, "/metadata/name").to_owned();
    let released = text(object, "/status/phase") == "Released";
    let claim = text(object, "/spec/claimRef/name");
    let of_etcd =
        (0..portico_hosting::MOST_MEMBERS).any(|member| portico_hosting::claim_name(member) == claim);
    (released && of_etcd).then(|| Orphan {
        kind: "PersistentVolume",
        name,
        cluster: cluster.as_str().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use http_body_util::Full;
    use hyper::body::Bytes;
    use kube::client::Body;
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    /// A seed with the namespace of a Cluster `a`, whose Clusters are answered with this.
    fn seed(status: u16, clusters: &'static str) -> Client {
        let service = service_fn(move |request: Request<Body>| async move {
            let namespaces = r#"{"items": [{"metadata": {"name": "cluster-a",
                "labels": {"portico.k8c.io/cluster": "a"}}}]}"#;
            let (status, text) = match request.uri().path() {
                "/api/v1/namespaces" => (200, namespaces),
                "/api/v1/persistentvolumes" => (200, r#"{"items": []}"#),
                _ => (status, clusters),
            };
            let answer = Response::builder().status(status);
            Ok::<_, Infallible>(answer.body(Full::new(Bytes::from(text))).unwrap())
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn nothing_is_left_over_where_clusters_cannot_be_listed() {
        let error = find(&seed(404, "404 page not found\n")).await.unwrap_err().to_string();
        assert!(error.starts_with("reading Clusters: "), "{error}");
        let there = find(&seed(200, r#"{"items": [{"metadata": {"name": "a"}}]}"#)).await.unwrap();
        assert_eq!(there, []);
        let gone = find(&seed(200, r#"{"items": [{"metadata": {"name": "b"}}]}"#)).await.unwrap();
        assert_eq!(gone.len(), 1, "{gone:?}");
    }

    #[test]
    fn a_namespace_that_portico_made_and_a_volume_that_nobody_claims_any_more_belong_to_a_cluster() {
        let made = json!({"metadata": {"name": "cluster-a", "labels": {"portico.k8c.io/cluster": "a"}}});
        let orphan = |kind, name: &str| Some(Orphan { kind, name: name.into(), cluster: "a".into() });
        assert_eq!(namespace(&made), orphan("Namespace", "cluster-a"));
        let mut ends = made;
        ends["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert_eq!(namespace(&ends), None);
        assert_eq!(namespace(&json!({"metadata": {"name": "cluster-a"}})), None);
        let claimed = |namespace: &str, claim: &str, phase: &str| {
            json!({"metadata": {"name": "v"}, "spec": {"claimRef": {"namespace": namespace, "name": claim}},
                "status": {"phase": phase}})
        };
        let etcd = "data-etcd-0";
        assert_eq!(volume(&claimed("cluster-a", etcd, "Released")), orphan("PersistentVolume", "v"));
        assert_eq!(volume(&claimed("cluster-a", etcd, "Bound")), None);
        assert_eq!(volume(&claimed("cluster-a", "dump", "Released")), None);
        assert_eq!(volume(&claimed("default", etcd, "Released")), None);
        assert_eq!(volume(&json!(7)), None);
    }
}
