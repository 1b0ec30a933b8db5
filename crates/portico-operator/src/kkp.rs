//! Whether KKP's controllers are on this seed: then clusters are theirs, and controllers here only observe.

use std::sync::Arc;

use futures_util::{StreamExt, future};
use k8s_openapi::api::apps::v1::Deployment;
use kube::Client;
use portico_kube::watch::signs;
use tokio::sync::watch as channel;

use crate::cache::{Cache, api};
use crate::status::StatusHandle;

/// The Deployment of KKP whose presence says that its controllers keep the clusters of this seed.
const DEPLOYMENT: &str = "kubermatic-seed-controller-manager";

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
    changes: channel::Receiver<()>,
}

impl KkpWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (deployments, writer) = Cache::new();
        let deployments = Arc::new(deployments);
        let (changed, changes) = channel::channel(());
        let signs = signs(api(client, ""), Some(DEPLOYMENT));
        let followed = Arc::clone(&deployments);
        let status = status.clone();
        let work = async move {
            let tell = |_| {
                changed.send_replace(());
                future::ready(())
            };
            followed.follow(signs, |_| true, writer, status).for_each(tell).await;
        };
        (Self { deployments, changes }, work)
    }

    /// Whether they do now.
    pub(crate) fn now(&self) -> Kkp {
        if !self.deployments.is_known() {
            return Kkp::Unknown;
        }
        // One without replicas may have some again in a minute.
        let first = self.deployments.all().into_iter().next();
        first.map_or(Kkp::Absent, |seen| Kkp::Present(format!("{:?}", *seen)))
    }

    /// Tells of every change.
    pub(crate) fn changes(&self) -> channel::Receiver<()> {
        self.changes.clone()
    }
}
