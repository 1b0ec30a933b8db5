//! The tools and the state of a reconciliation of a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use portico_api::meta::ObjectKey;
use portico_expose::migration::last_use::LastUse;
use portico_kube::events::Events;
use portico_kube::leader::Leads;
use tokio::sync::watch as channel;
use tokio::time::Instant;

use super::objects::{addresses_of, all_addresses_of};
use super::resolver::Resolver;
use crate::cache::Cache;
use crate::clusters::{ClusterWatch, LastWritten, Work};
use crate::contention::RepairBackoffs;
use crate::controllers::exposed::Written;
use crate::installation::Installation;
use crate::kkp::KkpWatch;
use crate::observed::Observed;
use crate::status::StatusHandle;
use crate::work_counters::WorkCounters;

/// What the controller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExposureSettings {
    /// The Service of the load balancer in front of the gateway. The names of clusters should lead to its
    /// addresses, and the load balancers of clusters lead to its pods.
    pub front: ObjectKey,
    /// Port at which clients find the listener that routes by server name.
    pub sni_port: u16,
    /// External addresses of the seed's nodes, for Seeds without a gateway.
    pub node_ips: Vec<IpAddr>,
    /// The name servers that are asked for the names of clusters; if there are none, those of the machine.
    pub name_servers: Vec<SocketAddr>,
}

/// Everything that a reconciliation needs.
pub(super) struct Context {
    pub(super) client: Client,
    pub(super) settings: ExposureSettings,
    pub(super) clusters: ClusterWatch,
    pub(super) namespaces: Arc<Cache<Namespace>>,
    pub(super) services: Arc<Cache<Service>>,
    pub(super) slices: Arc<Cache<EndpointSlice>>,
    pub(super) exposed: Arc<Cache<Written>>,
    /// The EndpointSlices of the gateway.
    pub(super) gateways: Arc<Cache<EndpointSlice>>,
    /// The EndpointSlices of API servers.
    pub(super) api_servers: Arc<Cache<EndpointSlice>>,
    pub(super) kkp: KkpWatch,
    pub(super) resolver: Resolver,
    pub(super) observed: Observed,
    /// The doors that are to close, and what was seen of their use.
    pub(super) watched: Mutex<BTreeMap<String, LastUse>>,
    pub(super) installation: Installation,
    pub(super) leads: channel::Receiver<Leads>,
    pub(super) events: Events,
    pub(super) status: StatusHandle,
    pub(super) counters: WorkCounters,
    pub(super) backoffs: Mutex<BTreeMap<String, RepairBackoffs>>,
    pub(super) written: LastWritten,
    /// Until then the definition of Clusters is taken to drop conditions.
    pub(super) outdated_until: Mutex<Option<Instant>>,
}

impl Context {
    /// Whether this replica writes, and everything is known that decides what.
    pub(super) fn is_ready(&self) -> bool {
        let known = [
            self.namespaces.is_known(),
            self.services.is_known(),
            self.slices.is_known(),
            self.gateways.is_known(),
            self.api_servers.is_known(),
            self.installation.seeds.is_known(),
            self.installation.configurations.is_known(),
            self.exposed.is_known(),
        ];
        self.leads.borrow().now() && known.into_iter().all(|known| known)
    }

    /// Passes over a cluster that failed, one after the other.
    pub(super) fn failures(&self, name: &str) -> u32 {
        self.status.clusters(|clusters| clusters.reports.get(name).map_or(0, |report| report.failures))
    }

    /// Addresses of the gateway's ready pods.
    pub(super) fn gateway_addresses(&self) -> BTreeSet<IpAddr> {
        self.gateways.all().iter().flat_map(|slice| addresses_of(&slice.value())).collect()
    }

    /// Addresses of all of the gateway's pods, ready or not.
    pub(super) fn all_gateway_addresses(&self) -> BTreeSet<IpAddr> {
        self.gateways.all().iter().flat_map(|slice| all_addresses_of(&slice.value())).collect()
    }

    pub(super) fn all(&self) -> Work {
        self.clusters.all()
    }

    /// Drops what is recorded about Clusters that are gone.
    pub(super) fn forget_gone(&self) {
        let exists = |name: &str| self.clusters.exists(name);
        self.status.clusters(|clusters| {
            clusters.reports.retain(|name, _| exists(name));
            clusters.migrating.retain(|name, _| exists(name));
        });
        self.backoffs().retain(|name, _| exists(name));
        self.resolver.retain(exists);
        self.observed.retain(exists);
        self.watched().retain(|name, _| exists(name));
        self.written.forget();
    }

    pub(super) fn watched(&self) -> MutexGuard<'_, BTreeMap<String, LastUse>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn outdated_until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.outdated_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn backoffs(&self) -> MutexGuard<'_, BTreeMap<String, RepairBackoffs>> {
        self.backoffs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
