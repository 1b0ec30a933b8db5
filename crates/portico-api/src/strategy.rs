//! The three ways to expose a control plane.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

/// How a user cluster's control plane is reached. The spelling is exact, as in the CRD.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum ExposeStrategy {
    /// By a port of its own on the seed's one gateway. What applies where nobody says anything.
    #[default]
    NodePort,
    /// By a load balancer of its own.
    LoadBalancer,
    /// By its host name on ports shared by all, with an agent on each worker.
    Tunneling,
}

/// The text names no strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is none of NodePort, LoadBalancer, Tunneling (upper and lower case matter)")]
pub struct UnknownStrategy;

impl ExposeStrategy {
    /// All of them, in the order in which documentation names them.
    pub const ALL: [Self; 3] = [Self::NodePort, Self::LoadBalancer, Self::Tunneling];

    /// The name as it stands in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::Tunneling => "Tunneling",
        }
    }
}

impl FromStr for ExposeStrategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == text).ok_or(UnknownStrategy)
    }
}

impl fmt::Display for ExposeStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
