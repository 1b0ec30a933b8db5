//! The tools and the state of a reconciliation of the gateway.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Client;
use kube::runtime::reflector::{ObjectRef, Store};
use portico_api::meta::ObjectKey;
use portico_api::seed::Seed;
use portico_expose::components::{GatewaySettings, Part};
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use portico_source::served::Served;
use tokio::sync::watch as channel;

use crate::installation::Installation;
use crate::issued::Issued;
use crate::kkp::KkpWatch;
use crate::managed::{Managed, ManagedObject};
use crate::status::StatusHandle;
use crate::work_counters::WorkCounters;

/// What the controller is to do.
#[derive(Debug, Clone)]
pub struct ComponentSettings {
    /// The gateway.
    pub gateway: GatewaySettings,
    /// The Seed of the gateway, where there are several.
    pub seed: Option<String>,
    /// What time it is.
    pub clock: fn() -> Timestamp,
}

/// Everything that a reconciliation needs.
pub(super) struct Context {
    pub(super) client: Client,
    pub(super) settings: ComponentSettings,
    pub(super) seeds: Store<Served<Seed>>,
    /// The objects of the gateway, in the order in which they are made.
    pub(super) parts: Vec<(Part, Box<dyn Managed>)>,
    /// The certificate of the tunnel listener: which one it is, its Secret, its authority, and the
    /// authorities that agents trust.
    pub(super) issued: Issued,
    pub(super) certificate: ManagedObject<Secret>,
    pub(super) authority: ManagedObject<Secret>,
    pub(super) trusted: ManagedObject<ConfigMap>,
    pub(super) kkp: KkpWatch,
    pub(super) installation: Installation,
    pub(super) leads: channel::Receiver<Leads>,
    pub(super) events: Events,
    pub(super) status: StatusHandle,
    pub(super) counters: WorkCounters,
}

/// What there is to reconcile.
pub(super) type Work = Vec<ObjectRef<Served<Seed>>>;

impl Context {
    /// Whether this replica writes, and everything is known that decides what.
    pub(super) fn is_ready(&self) -> bool {
        let known = [self.installation.seeds.is_known(), self.installation.configurations.is_known()];
        self.leads.borrow().now()
            && known.into_iter().all(|known| known)
            && self.held().all(Managed::is_known)
    }

    /// All objects.
    pub(super) fn held(&self) -> impl Iterator<Item = &dyn Managed> {
        let parts = self.parts.iter().map(|(_, held)| &**held);
        parts.chain([&self.certificate as &dyn Managed, &self.authority, &self.trusted])
    }

    pub(super) fn part(&self, wanted: Part) -> Option<&dyn Managed> {
        self.parts.iter().find(|(part, _)| *part == wanted).map(|(_, held)| &**held)
    }

    pub(super) fn count(&self, written: bool, kind: &'static str) {
        if written {
            self.counters.wrote(kind);
        }
    }

    pub(super) fn all(&self) -> Work {
        self.seeds.state().iter().map(|served| ObjectRef::from_obj(&**served)).collect()
    }

    /// Drops what is recorded about Seeds that are gone.
    pub(super) fn forget_gone(&self) {
        let exists =
            |key: &ObjectKey| self.seeds.get(&ObjectRef::new(&key.name).within(&key.namespace)).is_some();
        self.status.seeds(|seeds| seeds.reports.retain(|key, _| exists(key)));
    }

    pub(super) fn forget(&self) {
        self.held().for_each(Managed::forget);
        self.status.seeds(|seeds| {
            seeds.reports.clear();
            seeds.certificate_ends = None;
            seeds.observing = None;
        });
    }
}
