//! Whether KKP's controllers are on this seed: then clusters are theirs, and controllers here only observe.
//!
//! They are told by their Deployment, as KKP's operator makes it: by name, by what it selects, and in a
//! namespace with a Seed or a KubermaticConfiguration. Whoever may make a Deployment somewhere else must not
//! stop this operator by its name.

use std::sync::Arc;

use futures_util::{StreamExt, future, stream};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{Client, ResourceExt};
use portico_kube::seen::Seen;
use portico_kube::watch::signs;
use serde_json::Value;
use tokio::sync::watch as channel;

use crate::above::Above;
use crate::cache::{Cache, api};
use crate::status::StatusHandle;

/// The Deployment of KKP whose presence says that its controllers keep the clusters of this seed.
const DEPLOYMENT: &str = "kubermatic-seed-controller-manager";

/// What its pods are selected by, in every release, beside the name of the Deployment.
const NAME_LABEL: &str = "app.kubernetes.io/name";

/// Whether KKP's controllers keep the clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kkp {
    /// It could not be found out yet: nothing is written.
    Unknown,
    Absent,
    /// The Deployment that runs.
    Present(String),
}

/// What is known of KKP's Deployment, for all controllers.
#[derive(Clone)]
pub(crate) struct KkpWatch {
    deployments: Arc<Cache<Deployment>>,
    above: Above,
    changes: channel::Receiver<()>,
}

impl KkpWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        above: &Above,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (deployments, writer) = Cache::new();
        let deployments = Arc::new(deployments);
        let (changed, changes) = channel::channel(());
        let signs = signs(api(client, ""), Some(DEPLOYMENT));
        let followed = Arc::clone(&deployments);
        let (status, above) = (status.clone(), above.clone());
        let places = stream::unfold(above.changes(), async |mut changes| {
            changes.changed().await.ok()?;
            Some(((), changes))
        });
        let work = async move {
            let tell = |()| {
                changed.send_replace(());
                future::ready(())
            };
            let followed = followed.follow(signs, selects_its_pods, writer, status).map(drop);
            stream::select(followed, places).for_each(tell).await;
        };
        (Self { deployments, above, changes }, work)
    }

    /// Whether they do now.
    pub(crate) fn now(&self) -> Kkp {
        if !self.deployments.is_known() {
            return Kkp::Unknown;
        }
        // One without replicas may have some again in a minute.
        let found = self.deployments.all();
        let (seeds, configurations) = (&self.above.seeds, &self.above.configurations);
        let here = |seen: &&Arc<Seen<Deployment>>| {
            let namespace = seen.namespace().unwrap_or_default();
            seeds.are_in(&namespace) || configurations.are_in(&namespace)
        };
        match found.iter().find(here) {
            Some(seen) => Kkp::Present(format!("{:?}", **seen)),
            None if found.is_empty() || (seeds.is_known() && configurations.is_known()) => Kkp::Absent,
            None => Kkp::Unknown,
        }
    }

    /// Tells of every change.
    pub(crate) fn changes(&self) -> channel::Receiver<()> {
        self.changes.clone()
    }
}

/// Whether a Deployment of that name is as KKP's operator makes it.
fn selects_its_pods(seen: &Seen<Deployment>) -> bool {
    let value = seen.value();
    let labels = value.pointer("/spec/selector/matchLabels");
    labels.and_then(|labels| labels.get(NAME_LABEL)).and_then(Value::as_str) == Some(DEPLOYMENT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deployment_of_that_name_that_selects_other_pods_is_not_kkps() {
        let selecting = |labels: Value| -> Seen<Deployment> {
            serde_json::from_value(json!({"metadata": {"name": DEPLOYMENT, "namespace": "kubermatic"},
                "spec": {"selector": {"matchLabels": labels}}}))
            .unwrap()
        };
        assert!(selects_its_pods(&selecting(json!({"app.kubernetes.io/name": DEPLOYMENT}))));
        for other in [json!({"app": DEPLOYMENT}), json!({"app.kubernetes.io/name": "web"}), json!(null)] {
            assert!(!selects_its_pods(&selecting(other)));
        }
    }
}
