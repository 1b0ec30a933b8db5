//! The input and the output of the [`Planner`](crate::planner::Planner).

use std::sync::Arc;

use portico_api::change::Change;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::policy::ClusterPolicy;
use portico_api::problem::Problem;
use portico_api::seed::{Seed, Timeouts};
use portico_api::service::Service;

/// One change to one object, as a source delivers it.
#[derive(Debug, Clone)]
pub enum PlannerChange {
    /// A Service that a user wrote.
    Service(Change<Box<Service>>),
    /// The configuration of the installation.
    Configuration(Change<Box<KubermaticConfiguration>>),
    /// A Seed.
    Seed(Change<Box<Seed>>),
    /// A Cluster. A deleted one loses its Services and NodePorts.
    Cluster(Change<Box<Cluster>>),
}

impl PlannerChange {
    /// The object that changed.
    pub(crate) fn object(&self) -> ObjectRef {
        match self {
            Self::Service(change) => ObjectRef { kind: Kind::Service, key: change.key() },
            Self::Configuration(change) => {
                ObjectRef { kind: Kind::KubermaticConfiguration, key: change.key() }
            }
            Self::Seed(change) => ObjectRef { kind: Kind::Seed, key: change.key() },
            // Clusters have no namespace, whatever their manifest says.
            Self::Cluster(change) => {
                ObjectRef { kind: Kind::Cluster, key: ObjectKey::new("", change.key().as_str()) }
            }
        }
    }

    /// The order in which changes that arrive together are applied. Deletions free NodePorts, so they come
    /// first; a Cluster depends on all the others, so it comes last.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::Cluster(Change::Delete(_)) | Self::Service(Change::Delete(_)) => 0,
            Self::Service(Change::Apply(_)) => 1,
            Self::Configuration(_) => 2,
            Self::Seed(_) => 3,
            Self::Cluster(Change::Apply(_)) => 4,
        }
    }
}

/// One thing that follows from a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// A Service that a user wrote, with its NodePorts filled in.
    Service(Change<Arc<Service>>),
    /// A Service that is planned for the Cluster in its namespace.
    PlannedService(Change<Arc<Service>>),
    /// What a user cluster allows and may use. It replaces the policy before.
    Policy(Change<Arc<ClusterPolicy>>),
    /// Everything wrong with this object. It replaces the problems before; empty once all are solved.
    Problems(ObjectRef, Vec<Problem>),
    /// A line for the log: nothing is wrong, nothing is to be done.
    Note(ObjectRef, String),
    /// The connection settings of the seed. They replace those before.
    Timeouts(Timeouts),
}
