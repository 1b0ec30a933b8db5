//! The controllers of one process, a file or a folder each. This module decides which of them run, which of
//! several processes writes, and how they end.
//!
//! `hosting` makes the control plane of each Cluster that asks for one, `exposure` makes each reachable,
//! `user_cluster` keeps what is inside, and `components` the gateway. [`front`] publishes the ports of
//! clusters on the LoadBalancer Services in front of them. These are that of the seed, and, beside KKP, those
//! of clusters with the strategy LoadBalancer. `exposed` writes the facts about Clusters that gateways must
//! know, where `exposure` does not. `webhook` refuses mistakes when they are made.

pub(crate) mod components;
pub(crate) mod exposed;
pub(crate) mod exposure;
pub mod front;
pub(crate) mod hosting;
pub(crate) mod user_cluster;
pub(crate) mod webhook;

use std::time::Duration;

use futures_util::future;
use kube::Client;
use kube::runtime::reflector::store::Writer;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::timeout;

use crate::clusters::ClusterWatch;
use crate::installation::{Installation, reference};
use crate::kkp::KkpWatch;
use crate::leadership;
use crate::manager::Manager;
use crate::observed::Observed;
use crate::outage;
use crate::status::StatusHandle;

use self::exposed::ExposedWatch;
use self::front::Origin;

pub use self::components::ComponentSettings;
pub use self::exposure::ExposureSettings;
pub use self::front::Settings;
pub use self::hosting::{CONTROL_PLANES, HostingSettings};
pub use self::user_cluster::{USER_CLUSTERS, UserClusterSettings};
pub use self::webhook::{Reached, WebhookSettings};

/// Time limit for releasing the Leases at the end. An operator has two.
pub(crate) const RELEASE_TIMEOUT: Duration = Duration::from_secs(8);

/// Why the controllers ended by themselves.
#[derive(Debug, Error)]
pub enum OperatorError {
    /// A part of it ended, which only a defect can cause.
    #[error("{0} has ended; restart this process and report what the log says")]
    Ended(&'static str),
}

/// The controllers of one process.
pub struct Operator {
    client: Client,
    front: Settings,
    exposure: Option<ExposureSettings>,
    user_clusters: Option<UserClusterSettings>,
    hosting: Option<HostingSettings>,
    components: Option<ComponentSettings>,
    webhook: Option<WebhookSettings>,
    status: StatusHandle,
}

impl Operator {
    /// The controller of front Services alone, that of ExposedClusters if it is asked for; not started yet.
    pub fn front(client: Client, front: Settings) -> Self {
        let status = StatusHandle::default();
        Self {
            client,
            front,
            exposure: None,
            user_clusters: None,
            hosting: None,
            components: None,
            webhook: None,
            status,
        }
    }

    /// All controllers; not started yet. That of Clusters writes the ExposedClusters.
    pub fn new(client: Client, front: Settings, exposure: ExposureSettings) -> Self {
        let front = Settings { exposed_clusters: false, ..front };
        Self { exposure: Some(exposure), ..Self::front(client, front) }
    }

    /// Keeps the insides of clusters too.
    #[must_use]
    pub fn with_user_clusters(self, settings: UserClusterSettings) -> Self {
        Self { user_clusters: Some(settings), ..self }
    }

    /// Makes the control planes of clusters that ask for one. Needs the controllers of [`Self::new`].
    #[must_use]
    pub fn with_hosting(self, hosting: HostingSettings) -> Self {
        Self { hosting: Some(hosting), ..self }
    }

    /// With the controller that makes the gateway.
    #[must_use]
    pub fn with_components(self, components: ComponentSettings) -> Self {
        Self { components: Some(components), ..self }
    }

    /// With the admission webhook. It answers by the caches of [`Self::new`].
    #[must_use]
    pub fn with_webhook(self, webhook: WebhookSettings) -> Self {
        Self { webhook: Some(webhook), ..self }
    }

    /// A view of its status, also while it runs.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// Runs until `stop` is ready, then releases its Leases. An operator shares that of the front Service
    /// with a process that has its controller alone: of both, one writes.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), OperatorError> {
        let (leading, leads) = channel::channel(Leads::default());
        let (client, front) = (self.client.clone(), self.front.clone());
        let mut election = if self.exposure.is_some() {
            let events = Events::new(client.clone(), leadership::CONTROLLER, &front.identity);
            let status = self.status.clone();
            tokio::spawn(leadership::elect_operator(client, front, events, status, leading))
        } else {
            tokio::spawn(leadership::elect_front(client, front, leading))
        };
        let ended = {
            let Self { client, front, exposure, user_clusters, hosting, components, webhook, status } = self;
            let both = exposure.is_some() || front.exposed_clusters || components.is_some();
            let (installation, installation_work) = Installation::new(&client, &status, both);
            // A process with the front Service alone has no right to look.
            let asks = exposure.is_some() || user_clusters.is_some() || components.is_some();
            let (kkp, kkp_work) = KkpWatch::new(&client, &installation, &status);
            let kkp_work = optional(asks.then_some(kkp_work));
            let (exposed, exposed_work) = ExposedWatch::new(&client, &status);
            let projected = front.exposed_clusters && exposure.is_none();
            let works = exposure.is_some() || user_clusters.is_some() || projected;
            let exposed_work = optional(works.then_some(exposed_work));
            let (clusters, clusters_work) = ClusterWatch::new(&client, &status);
            let clusters_work = optional((exposure.is_some() || projected).then_some(clusters_work));
            // Dropped together with the controllers. Then `leading` has no receiver, and the elections end.
            let manager = Manager {
                client,
                clusters,
                exposed,
                installation,
                kkp,
                observed: Observed::new(),
                status,
                leads,
                identity: front.identity.clone(),
            };
            let origin = match (&exposure, &components) {
                (_, Some(_)) => Origin::Operator,
                (Some(_), None) => Origin::AdminForSeed,
                (None, None) => Origin::Admin,
            };
            let shared = || manager.clone();
            let insides = optional(user_clusters.map(|settings| user_cluster::run(shared(), settings)));
            let hosted = optional(hosting.map(|settings| hosting::run(shared(), settings)));
            let components = optional(components.map(|settings| components::run(shared(), settings)));
            let projections =
                optional(projected.then(|| exposed::run(shared(), manager.events(front::CONTROLLER))));
            let exposures = optional(exposure.map(|settings| exposure::run(shared(), settings)));
            let services = Writer::default();
            let store = services.as_reader();
            let webhook = optional(webhook.map(|settings| webhook::run(shared(), settings, store)));
            let fronts = front::run(shared(), front, origin, services);
            // A process with the front Service alone keeps no cluster.
            let outages = optional(asks.then(|| {
                let Manager { installation, kkp, leads, .. } = shared();
                let (outages, events) = (installation.outages(), manager.events(outage::CONTROLLER));
                let seeds = move || installation.seeds.seeds().iter().map(|seed| reference(seed)).collect();
                outage::run(outages, seeds, kkp, events, leads)
            }));
            tokio::select! {
                () = fronts => Err(OperatorError::Ended("the controller of front Services")),
                () = exposures => Err(OperatorError::Ended("the controller of Clusters")),
                () = hosted => Err(OperatorError::Ended("the controller of control planes")),
                () = projections => Err(OperatorError::Ended("the controller of ExposedClusters")),
                () = insides => Err(OperatorError::Ended("the controller of user clusters")),
                () = components => Err(OperatorError::Ended("the controller of seed components")),
                () = webhook => Err(OperatorError::Ended("the admission webhook")),
                () = outages => Err(OperatorError::Ended("the watch of outages")),
                () = clusters_work => Err(OperatorError::Ended("the watch of Clusters")),
                () = installation_work => Err(OperatorError::Ended("the watch of Seeds")),
                () = exposed_work => Err(OperatorError::Ended("the watch of ExposedClusters")),
                () = kkp_work => Err(OperatorError::Ended("the watch of KKP's Deployment")),
                _ = &mut election => Err(OperatorError::Ended("the leader election")),
                () = stop => Ok(()),
            }
        };
        // The controllers, and with them every receiver of `leading`, are gone: the Leases are released.
        if !election.is_finished() && timeout(RELEASE_TIMEOUT, &mut election).await.is_err() {
            election.abort();
        }
        ended
    }
}

/// Ends when `work` does; without any, never.
async fn optional(work: Option<impl Future<Output = ()>>) {
    match work {
        Some(work) => work.await,
        None => future::pending().await,
    }
}
