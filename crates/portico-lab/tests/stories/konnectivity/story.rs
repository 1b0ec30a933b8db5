//! What the steps of the story need.

use portico_lab::firewall::Firewall;
use portico_lab::{Host, Kubectl, Node, Seed, UserCluster};

use crate::support::Way;

/// The cluster's name in DNS. KKP calls it the external name.
pub(crate) const EXTERNAL_NAME: &str = "north.kubermatic.kkp.example.com";

/// The NodePort of Service `konnectivity-server`.
pub(crate) const AGENT_PORT: u16 = 30_132;

/// A worker that nothing reaches from outside, its cluster, and its users.
pub(crate) struct Story {
    // Dropped in this order: the worker before what it talks to.
    pub(crate) worker: Node,
    pub(crate) way: Way,
    pub(crate) cluster: UserCluster,
    pub(crate) client: Host,
    pub(crate) seed: Seed,
    pub(super) _wall: Firewall,
}

impl Story {
    /// kubectl as the cluster's administrator.
    pub(crate) fn kubectl(&self) -> &Kubectl {
        &self.way.kubectl
    }
}
