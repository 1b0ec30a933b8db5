//! Empties a node before its kubelet restarts, if that is asked for. The node takes no new pods. Pods that a
//! controller starts elsewhere are evicted, as `kubectl drain` does. The kubelet's own credentials suffice:
//! they may do that to their own node alone.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use portico_api::text;
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

/// On a Node that this program has closed for new pods: it opens none that somebody else closed.
const CLOSED_BY_US: &str = "portico.k8c.io/closed-for-move";

/// What the kubelet calls the pods that it has from files: their copy in the API cannot be evicted.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Between two looks at the pods that are left.
const LOOK: Duration = Duration::from_secs(2);

/// Answers to one list of the pods of one node, which has some hundred at most.
const ANSWERS: usize = 250;

/// Pods that are named, and the longest name.
const NAMED: usize = 5;
const LONGEST: usize = 300;

/// A node, by its own credentials.
pub(crate) struct Draining<'a> {
    /// The API server, with the credentials of its kubelet.
    pub(crate) api: &'a UntrustedApi,
    /// Its name.
    pub(crate) node: &'a str,
}

/// The actions on the pods of a node.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pods {
    /// To be evicted: namespace, name and UID.
    evicted: Vec<[String; 3]>,
    /// On their way, by namespace and name.
    leaving: Vec<String>,
    /// Pods that nothing starts elsewhere, by namespace and name.
    alone: Vec<String>,
}

impl Draining<'_> {
    /// Closes the node for new pods, and waits until those that can live elsewhere are gone.
    pub(crate) async fn drain(&self, limit: Duration) -> anyhow::Result<()> {
        self.close().await?;
        let mut left = String::new();
        let emptied = async {
            loop {
                let pods = match self.pods().await {
                    Ok(pods) => pods,
                    Err(error) => {
                        left = format!("pods that cannot be listed: {error}");
                        sleep(LOOK).await;
                        continue;
                    }
                };
                if !pods.alone.is_empty() {
                    bail!(
                        "nothing starts these pods elsewhere: {}. Delete them, or move without --drain: \
                         containers run on",
                        few(&pods.alone)
                    );
                }
                if pods.evicted.is_empty() && pods.leaving.is_empty() {
                    return Ok(());
                }
                left = self.evict(&pods).await;
                sleep(LOOK).await;
            }
        };
        let in_time = timeout(limit, emptied).await;
        in_time.unwrap_or_else(|_| Err(anyhow!("after {limit:?} there still are {left}")))
    }

    /// Opens the node again for new pods, if this program has closed it.
    pub(crate) async fn open(&self) -> anyhow::Result<()> {
        let opened = async {
            let node = self.api.get(&self.path()).await?;
            let is_ours =
                node.is_some_and(|node| node["metadata"]["annotations"].get(CLOSED_BY_US).is_some());
            if is_ours {
                let open = json!({"metadata": {"annotations": {CLOSED_BY_US: null}},
                    "spec": {"unschedulable": null}});
                self.api.merge(&self.path(), &open).await?;
            }
            Ok::<_, UntrustedApiError>(())
        };
        Ok(opened.await?)
    }

    async fn close(&self) -> anyhow::Result<()> {
        let node = self.api.get(&self.path()).await?.context("the Node is not there")?;
        if node["spec"]["unschedulable"] == true {
            return Ok(());
        }
        let close =
            json!({"metadata": {"annotations": {CLOSED_BY_US: "yes"}}, "spec": {"unschedulable": true}});
        self.api.merge(&self.path(), &close).await?;
        Ok(())
    }

    async fn pods(&self) -> Result<Pods, UntrustedApiError> {
        let over = "status.phase!=Succeeded,status.phase!=Failed".replace('=', "%3D");
        let url = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{},{over}", self.node);
        Ok(Pods::of(&self.api.metadata(&url, ANSWERS).await?))
    }

    /// Asks all of them to leave, and tells which are there and why.
    async fn evict(&self, pods: &Pods) -> String {
        let mut left = pods.leaving.clone();
        for [namespace, name, uid] in &pods.evicted {
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
            let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
                "deleteOptions": {"preconditions": {"uid": uid}}});
            match self.api.create(&path, &eviction).await {
                // Gone, or another pod by this name.
                Ok(_) | Err(UntrustedApiError::Refused { code: 404 | 409, .. }) => {
                    left.push(format!("{namespace}/{name}"));
                }
                // A budget has no pod to spare now, or it cannot be asked for.
                Err(error) => left.push(format!("{namespace}/{name} ({error})")),
            }
        }
        few(&left)
    }

    fn path(&self) -> String {
        format!("/api/v1/nodes/{}", self.node)
    }
}

impl Pods {
    fn of(all: &[Value]) -> Self {
        let mut pods = Self::default();
        for metadata in all {
            let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
            let name = format!("{}/{}", text("namespace"), text("name"));
            let owners = metadata["ownerReferences"].as_array().into_iter().flatten();
            let owner = owners.into_iter().find(|owner| owner["controller"] == true);
            match owner.and_then(|owner| owner["kind"].as_str()) {
                _ if metadata["annotations"].get(MIRROR).is_some() => {}
                // Its controller would start it here again.
                Some("DaemonSet") => {}
                _ if metadata.get("deletionTimestamp").is_some() => pods.leaving.push(name),
                Some(_) => pods.evicted.push(["namespace", "name", "uid"].map(text)),
                None => pods.alone.push(name),
            }
        }
        pods
    }
}

fn few(names: &[String]) -> String {
    text::few(names.iter(), NAMED, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_controller_starts_elsewhere_is_evicted_and_what_belongs_to_the_node_stays() {
        let pod = |name: &str, kind: &str| {
            let owner = json!({"kind": kind, "name": "x", "controller": true});
            json!({"namespace": "shop", "name": name, "uid": "1", "ownerReferences": [owner]})
        };
        let (mut leaving, mut mirror) = (pod("leaving", "Job"), pod("static", "Node"));
        leaving["deletionTimestamp"] = "2026-01-02T03:04:05Z".into();
        mirror["annotations"] = json!({MIRROR: "1"});
        let alone = json!({"namespace": "shop", "name": "alone", "ownerReferences": [{"kind": "Cluster"}]});
        let pods =
            Pods::of(&[pod("a", "ReplicaSet"), pod("agent", "DaemonSet"), leaving, mirror, alone, json!(7)]);
        let expected = Pods {
            evicted: vec![["shop", "a", "1"].map(str::to_owned)],
            leaving: vec!["shop/leaving".to_owned()],
            alone: vec!["shop/alone".to_owned(), "/".to_owned()],
        };
        assert_eq!(pods, expected);
    }
}
