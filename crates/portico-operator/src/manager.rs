//! The parts that the controllers of one process share: one connection, one cache of each kind, one
//! leadership.

use kube::Client;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use tokio::sync::watch as channel;

use crate::clusters::ClusterWatch;
use crate::controllers::exposed::ExposedWatch;
use crate::installation::Installation;
use crate::kkp::KkpWatch;
use crate::observed::Observed;
use crate::status::StatusHandle;

/// What every controller is given beside its settings. A clone has the same caches.
#[derive(Clone)]
pub(crate) struct Manager {
    pub(crate) client: Client,
    pub(crate) clusters: ClusterWatch,
    pub(crate) exposed: ExposedWatch,
    /// Seeds and configurations.
    pub(crate) installation: Installation,
    pub(crate) kkp: KkpWatch,
    /// The observations of one controller about clusters that migrate, for another.
    pub(crate) observed: Observed,
    pub(crate) status: StatusHandle,
    /// Whether this replica writes.
    pub(crate) leads: channel::Receiver<Leads>,
    /// The name of this replica, on Events.
    pub(crate) identity: String,
}

impl Manager {
    /// Events of the controller with this name.
    pub(crate) fn events(&self, controller: &str) -> Events {
        Events::new(self.client.clone(), controller, &self.identity)
    }
}
