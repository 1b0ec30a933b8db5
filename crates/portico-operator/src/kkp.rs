//! Whether KKP's controllers are on this seed: then clusters are theirs, and controllers here only observe.
//!
//! [`portico_api::kkp`] says which Deployment is theirs. One of the same name somewhere else must not stop
//! this operator.

use std::sync::Arc;

use futures_util::{StreamExt, future, stream};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{Client, ResourceExt};
use portico_api::kkp::{DEPLOYMENT, selects_its_pods};
use portico_kube::cached::Cached;
use portico_kube::watch::progress;
use tokio::sync::watch as channel;

use crate::cache::{Cache, api};
use crate::installation::Installation;
use crate::status::StatusHandle;

/// Whether KKP's controllers keep the clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kkp {
    /// It could not be found out yet: nothing is written.
    Unknown,
    Absent,
    /// The Deployment that runs.
    Present(String),
}

/// The known state of KKP's Deployment, for all controllers.
#[derive(Clone)]
pub(crate) struct KkpWatch {
    deployments: Arc<Cache<Deployment>>,
    installation: Installation,
    changes: channel::Receiver<()>,
}

impl KkpWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        installation: &Installation,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (deployments, writer) = Cache::new();
        let deployments = Arc::new(deployments);
        let (changed, changes) = channel::channel(());
        let watched = progress(api(client, ""), Some(DEPLOYMENT));
        let followed = Arc::clone(&deployments);
        let (status, installation) = (status.clone(), installation.clone());
        let namespaces = stream::unfold(installation.changes(), async |mut changes| {
            changes.changed().await.ok()?;
            Some(((), changes))
        });
        let work = async move {
            let tell = |()| {
                changed.send_replace(());
                future::ready(())
            };
            let followed =
                followed.follow(watched, |seen| selects_its_pods(&seen.value()), writer, status).map(drop);
            stream::select(followed, namespaces).for_each(tell).await;
        };
        (Self { deployments, installation, changes }, work)
    }

    /// Whether they do now.
    pub(crate) fn now(&self) -> Kkp {
        if !self.deployments.is_known() {
            return Kkp::Unknown;
        }
        // One without replicas may have some again in a minute.
        let found = self.deployments.all();
        let (seeds, configurations) = (&self.installation.seeds, &self.installation.configurations);
        let here = |seen: &&Arc<Cached<Deployment>>| {
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
