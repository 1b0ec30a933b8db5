//! One Cluster in the planner: the version that is wanted, and the version in force.

use std::sync::Arc;

use portico_api::cluster::Cluster;
use portico_api::policy::ClusterPolicy;
use portico_api::seed::Seed;

use super::levels::Levels;
use super::served::Served;
use crate::resolve::Decision;

/// A Cluster as it is wanted, and as it is in force.
#[derive(Debug)]
pub(super) struct ClusterEntry {
    pub(super) wanted: Arc<Cluster>,
    pub(super) in_force: Option<InForce>,
    /// As it was handed out.
    pub(super) policy: Option<Arc<ClusterPolicy>>,
}

/// What is in force for a Cluster.
#[derive(Debug)]
pub(super) struct InForce {
    pub(super) cluster: Arc<Cluster>,
    pub(super) decision: Decision,
    pub(super) seed: Arc<Seed>,
    pub(super) served: Box<[Served]>,
}

impl ClusterEntry {
    /// A Cluster that is not in force yet.
    pub(super) fn new(wanted: Arc<Cluster>) -> Self {
        Self { wanted, in_force: None, policy: None }
    }

    /// Whether the Cluster is in force as wanted, on the version of its seed that is active now.
    pub(super) fn is_up_to_date(&self, levels: &Levels) -> bool {
        let Some(in_force) = &self.in_force else { return false };
        let seed = levels.seed_of(&self.wanted);
        Arc::ptr_eq(&self.wanted, &in_force.cluster)
            && seed.is_ok_and(|active| !active.refused && Arc::ptr_eq(&active.object, &in_force.seed))
    }
}
