//! What goes into the [`Planner`](crate::planner::Planner) and what comes out of it.

use std::sync::Arc;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::names::ClusterName;
use portico_api::policy::ClusterPolicy;
use portico_api::problem::Problem;
use portico_api::seed::{Seed, Timeouts};
use portico_api::service::Service;

/// One object came, changed or went.
#[derive(Debug, Clone)]
pub enum Change {
    /// A Service that somebody wrote.
    Service(Box<Service>),
    /// It went.
    NoService(ObjectKey),
    /// The configuration of the installation.
    Configuration(Box<KubermaticConfiguration>),
    /// It went.
    NoConfiguration(ObjectKey),
    /// A Seed.
    Seed(Box<Seed>),
    /// It went.
    NoSeed(ObjectKey),
    /// A Cluster.
    Cluster(Box<Cluster>),
    /// It went: its Services go, its NodePorts are free again.
    NoCluster(ClusterName),
}

impl Change {
    /// Which object it is about.
    pub(crate) fn object(&self) -> ObjectRef {
        match self {
            Self::Service(service) => ObjectRef::new(Kind::Service, &service.metadata),
            Self::NoService(key) => ObjectRef { kind: Kind::Service, key: key.clone() },
            Self::Configuration(found) => ObjectRef::new(Kind::KubermaticConfiguration, &found.metadata),
            Self::NoConfiguration(key) => ObjectRef { kind: Kind::KubermaticConfiguration, key: key.clone() },
            Self::Seed(seed) => ObjectRef::new(Kind::Seed, &seed.metadata),
            Self::NoSeed(key) => ObjectRef { kind: Kind::Seed, key: key.clone() },
            Self::Cluster(cluster) => {
                ObjectRef { kind: Kind::Cluster, key: cluster_key(&cluster.metadata.name) }
            }
            Self::NoCluster(name) => ObjectRef { kind: Kind::Cluster, key: cluster_key(name.as_str()) },
        }
    }

    /// In which order changes that arrive together are best applied: what others depend on first, and what goes, which frees
    /// ports, before what comes.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::NoCluster(_) | Self::NoService(_) => 0,
            Self::Service(_) => 1,
            Self::Configuration(_) | Self::NoConfiguration(_) => 2,
            Self::Seed(_) | Self::NoSeed(_) => 3,
            Self::Cluster(_) => 4,
        }
    }
}

/// Clusters have no namespace, whatever their manifest says.
fn cluster_key(name: &str) -> ObjectKey {
    ObjectKey::new("", name)
}

/// One thing that follows from a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// This Service, which somebody wrote, is to be served as it stands here: with its NodePorts filled in.
    Service(Arc<Service>),
    /// This Service, which follows from the Cluster in its namespace, is to be served.
    Planned(Arc<Service>),
    /// It is not to be served any more.
    NoService(ObjectKey),
    /// What this user cluster allows and may use, in place of what was said before.
    Policy(Arc<ClusterPolicy>),
    /// Nothing is said about this user cluster any more.
    NoPolicy(ClusterName),
    /// Everything wrong with this object, in place of what was said before; empty once it is mended.
    Problems(ObjectRef, Vec<Problem>),
    /// Worth a line in the log: nothing is wrong, nothing is to be done.
    Note(ObjectRef, String),
    /// The connection settings of the seed, in place of those before.
    Timeouts(Timeouts),
}
