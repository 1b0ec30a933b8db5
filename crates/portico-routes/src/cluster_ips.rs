//! ClusterIPs are no endpoints: a node leads a connection to one on to pods. Nothing here knows whose pods
//! those are.

use std::net::IpAddr;

use portico_api::change::Change;
use portico_api::meta::ObjectKey;

use crate::endpoints;
use crate::facts::SliceFacts;
use crate::index::{RouteIndex, ServiceEntry};
use crate::route::Endpoints;

impl RouteIndex {
    pub(crate) fn apply_cluster_ip(&mut self, change: Change<IpAddr>) {
        let address = change.key();
        let changed = match change {
            Change::Apply(address) => self.cluster_ips.insert(address),
            Change::Delete(address) => self.cluster_ips.remove(&address),
        };
        if changed && !self.changed_cluster_ips.insert(address) {
            self.changed_cluster_ips.remove(&address);
        }
    }

    /// Marks the Services with an endpoint that is a ClusterIP now, or is one no longer.
    pub(crate) fn follow_cluster_ips(&mut self) {
        let changed = std::mem::take(&mut self.changed_cluster_ips);
        if changed.is_empty() {
            return;
        }
        let has_one = |(_, entry): &(&ObjectKey, &ServiceEntry)| {
            entry.slices.iter().any(|slice| slice.ready.iter().any(|address| changed.contains(address)))
        };
        let concerned: Vec<ObjectKey> =
            self.services.iter().filter(has_one).map(|(key, _)| key.clone()).collect();
        self.problems_version += u64::from(!concerned.is_empty());
        self.changed.extend(concerned);
    }

    /// The ready endpoints of the Service port named `port_name`, but for ClusterIPs.
    pub(crate) fn ready(&self, slices: &[SliceFacts], port_name: &str) -> Endpoints {
        endpoints::ready(slices, port_name, |address| self.cluster_ips.contains(&address))
    }
}
