//! How a control plane ends: a finalizer keeps the Cluster until its namespace is gone.
//!
//! Nothing inside the user cluster is asked for: a cluster whose API server never comes up is deleted as any
//! other. An object that does not go by itself is named after a stated time.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch};
use portico_api::annotations::CONTROL_PLANE_FINALIZER as FINALIZER;
use portico_api::cluster::Cluster;
use portico_api::meta::{ObjectKey, ObjectMeta};
use portico_kube::apply::merging;
use portico_kube::cached::Cached;
use portico_source::served::Served;
use serde_json::{Value, json};
use tracing::debug;

use super::context::Context;
use crate::cache::api;
use crate::clock::ahead;
use crate::condition::State;
use crate::controllers::exposure::belongs_to;
use crate::write::{WriteError, is_terminating, must_lead, only_this, request};

/// How long its pods may take to end before the namespace is deleted with them.
const PODS_PATIENCE: SignedDuration = SignedDuration::from_mins(1);

/// How long a pod of a cluster that is deleted may take to end, in seconds. Its data goes with it.
const LAST_GRACE: u32 = 2;

/// How often to look whether it is gone.
const PERIOD: Duration = Duration::from_secs(2);

/// How often to look once the deletion takes long.
const LATE_PERIOD: Duration = Duration::from_secs(30);

/// Whether this Cluster waits for its control plane to go.
pub(super) fn is_held(cluster: &Cluster) -> bool {
    has_finalizer(&cluster.metadata)
}

/// Whether the Cluster with this metadata waits for its control plane to go. Its spec may be unreadable.
pub(super) fn has_finalizer(metadata: &ObjectMeta) -> bool {
    metadata.has_finalizer(FINALIZER)
}

impl Context {
    /// Sees to it that the Cluster stays until its control plane is gone.
    pub(super) async fn add_finalizer(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<(), WriteError> {
        if is_held(cluster) {
            return Ok(());
        }
        let finalizers = cluster.metadata.finalizers.iter().map(|name| &**name).chain([FINALIZER]);
        self.write_finalizers(served, finalizers.collect()).await
    }

    /// Lets the Cluster go.
    pub(super) async fn release(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<(), WriteError> {
        let others = cluster.metadata.finalizers.iter().map(|name| &**name).filter(|&name| name != FINALIZER);
        self.write_finalizers(served, others.collect()).await
    }

    /// Ends pods and volumes, deletes the namespace, and lets the Cluster go once it is gone. Returns when to
    /// look again.
    pub(super) async fn delete(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<Option<Duration>, WriteError> {
        if !is_held(cluster) {
            return Ok(None);
        }
        let name = cluster.name().namespace();
        let namespaces = api::<Namespace>(&self.client, "");
        let what = format!("reading Namespace {name}");
        let found = request(&what, namespaces.get_opt(&name)).await?;
        let Some(namespace) = found.filter(|found| belongs_to(found, cluster)) else {
            self.release(cluster, served).await?;
            self.forget(&cluster.metadata.name);
            return Ok(None);
        };
        let namespace = namespace.value();
        let since = cluster.metadata.deletion_timestamp.unwrap_or_default();
        // By the clock that has set that time: this machine's may be hours off. Without its answer nothing is
        // known to be late.
        let ahead = ahead(&self.client, self.settings.clock).await;
        let taken = ahead.map(|ahead| (self.settings.clock)().duration_since(since) - ahead);
        let ends = is_terminating(&namespace);
        let impatient = taken.is_some_and(|taken| taken > PODS_PATIENCE);
        let gone = ends || is_gone(self.end_workloads(cluster, &name).await, impatient)?;
        if !ends && (gone || impatient) {
            must_lead(&self.leads)?;
            let what = format!("deleting Namespace {name}");
            request(&what, namespaces.delete(&name, &only_this(&namespace))).await?;
            self.counters.wrote("Namespace");
        }
        let late = taken.is_some_and(|taken| taken > self.settings.deletion_patience);
        let state = if late {
            let left = left(&namespace);
            let message = format!("Namespace {name} does not go: {left}. It is waited for");
            State::bad("DeletionHangs", message)
        } else {
            State::bad("Terminating", format!("Namespace {name} is being deleted"))
        };
        if served.unread.is_some() {
            self.record(cluster, &state, false).await;
        } else {
            self.report(cluster, &state, None, false).await?;
        }
        Ok(Some(if late { LATE_PERIOD } else { PERIOD }))
    }

    /// Deletes pods, workloads and volume claims before the namespace, because that is faster. The namespace
    /// controller looks again only after half of the pods' grace period, or after eight seconds if something
    /// has a finalizer. A volume claim has one until Kubernetes has seen that no pod uses it. The claims are
    /// found by the labels that the StatefulSet gave them. Returns whether all of this is gone.
    async fn end_workloads(&self, cluster: &Cluster, namespace: &str) -> Result<bool, WriteError> {
        self.end_pods(namespace).await?;
        let (backoffs, mut gone) = (self.backoffs(&cluster.metadata.name), Ok(true));
        let kinds = [Deployment::KIND, StatefulSet::KIND, PersistentVolumeClaim::KIND];
        for kind in kinds.into_iter().filter_map(|kind| self.kind(kind)) {
            for name in kind.names_in(namespace) {
                let key = ObjectKey::new(namespace, &name);
                if kind.get(&key).is_none() {
                    continue;
                }
                gone = gone.map(|_| false);
                must_lead(&self.leads)?;
                match kind.remove(&self.client, &key, &backoffs).await {
                    Ok(true) => self.counters.wrote(kind.name()),
                    Ok(false) => {}
                    // What else there is ends all the same.
                    Err(error) if error.status().is_some() => gone = gone.and(Err(error)),
                    Err(error) => return Err(error),
                }
            }
        }
        gone.map(|gone| gone && self.pods.in_namespace(namespace).is_empty())
    }

    /// Ends pods before their workloads do. An API server would go on serving until its clients have found
    /// another one, and there is none. A kubelet keeps to the grace period that it gets first. Objects that a
    /// workload makes anew in between go with it.
    async fn end_pods(&self, namespace: &str) -> Result<(), WriteError> {
        let pods = api::<Pod>(&self.client, namespace);
        for pod in to_end(self.pods.in_namespace(namespace)) {
            must_lead(&self.leads)?;
            let name = pod.name_any();
            let params = DeleteParams { grace_period_seconds: Some(LAST_GRACE), ..only_this(&pod.value()) };
            match request(&format!("ending Pod {namespace}/{name}"), pods.delete(&name, &params)).await {
                Ok(_) => self.counters.wrote(Pod::KIND),
                Err(error) => debug!(%error, "a pod of a deleted cluster ends in its own time"),
            }
        }
        Ok(())
    }

    async fn write_finalizers(
        &self,
        served: &Served<Cluster>,
        finalizers: Vec<&str>,
    ) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let name = served.name_any();
        // The version keeps what others write into the list in this moment.
        let patch = json!({"metadata": {"resourceVersion": served.resource_version(),
            "finalizers": finalizers}});
        let clusters = Api::<Served<Cluster>>::all_with(self.client.clone(), &());
        let (params, patch) = (merging(), Patch::Merge(&patch));
        let what = format!("finalizers of Cluster {name}");
        let written = request(&what, clusters.patch(&name, &params, &patch)).await?;
        self.written.wrote(&written);
        self.counters.wrote("Cluster");
        Ok(())
    }
}

/// Whether all is gone that was to end before the namespace. The API server may refuse a deletion for ever.
/// Once that has taken too long, the object is left to the namespace.
fn is_gone(ended: Result<bool, WriteError>, impatient: bool) -> Result<bool, WriteError> {
    match ended {
        Err(error) if impatient && error.status().is_some() => Ok(false),
        ended => ended,
    }
}

/// The pods of `pods` that do not end within [`LAST_GRACE`] yet. A deletion by another client leaves a pod
/// the time that the pod asks for, and a second one shortens that.
fn to_end(mut pods: Vec<Arc<Cached<Pod>>>) -> Vec<Arc<Cached<Pod>>> {
    pods.retain(|pod| {
        let pod = pod.value();
        let grace = pod.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_u64);
        !is_terminating(&pod) || grace.is_none_or(|grace| grace > u64::from(LAST_GRACE))
    });
    pods
}

/// The remaining objects of a namespace that is being deleted, in Kubernetes' words.
fn left(namespace: &Value) -> String {
    let conditions = namespace.pointer("/status/conditions").and_then(Value::as_array);
    let holds = conditions.into_iter().flatten().filter(|condition| condition["status"] == "True");
    let texts: Vec<&str> = holds.filter_map(|condition| condition["message"].as_str()).collect();
    if texts.is_empty() { "Kubernetes does not say why".to_owned() } else { texts.join("; ") }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;
    use crate::write::RequestError;

    #[test]
    fn what_is_refused_for_ever_holds_the_namespace_up_for_a_while_alone() {
        let refused = || {
            let answer = Status::failure("no", "Forbidden").with_code(403).boxed();
            let source = Box::new(kube::Error::Api(answer));
            Err(WriteError::Request(RequestError::Failed { what: "deleting it".to_owned(), source }))
        };
        assert!(is_gone(refused(), false).is_err(), "it is reported");
        assert!(matches!(is_gone(refused(), true), Ok(false)));
        // Another replica does it, or nobody can.
        let silent = || Err(WriteError::Request(RequestError::NoAnswer("deleting it".to_owned())));
        assert!(is_gone(silent(), true).is_err() && is_gone(Err(WriteError::NotLeading), true).is_err());
        assert!(matches!(is_gone(Ok(true), false), Ok(true)));
    }

    #[test]
    fn a_pod_that_ends_soon_is_not_told_again_and_one_that_takes_its_time_is() {
        let pod = |metadata: Value| serde_json::from_value(json!({"metadata": metadata})).map(Arc::new);
        let ends = |name: &str, grace: u32| {
            pod(json!({"name": name, "deletionTimestamp": "2026-01-01T00:00:00Z",
                "deletionGracePeriodSeconds": grace}))
            .unwrap()
        };
        let pods = vec![ends("soon", LAST_GRACE), ends("late", 60), pod(json!({"name": "runs"})).unwrap()];
        let names: Vec<String> = to_end(pods).iter().map(|pod| pod.name_any()).collect();
        assert_eq!(names, ["late", "runs"]);
    }

    #[test]
    fn what_is_left_is_what_kubernetes_says() {
        let namespace = json!({"status": {"conditions": [
            {"type": "NamespaceDeletionContentFailure", "status": "False", "message": "All content deleted"},
            {"type": "NamespaceContentRemaining", "status": "True",
                "message": "Some resources are remaining: pods. has 1 resource instances"}]}});
        assert_eq!(left(&namespace), "Some resources are remaining: pods. has 1 resource instances");
        assert_eq!(left(&json!({})), "Kubernetes does not say why");
    }
}
