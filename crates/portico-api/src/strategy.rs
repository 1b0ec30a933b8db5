//! The three ways to expose a control plane, and what accepts its connections.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a user cluster's control plane is reached. The spelling is exact, as in the CRD.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ExposeStrategy {
    /// By a port of its own on the seed's one gateway. The default.
    #[default]
    NodePort,
    /// By a load balancer of its own.
    LoadBalancer,
    /// By its host name on ports that all clusters share, with an agent on each worker node.
    Tunneling,
}

/// The text names no strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is none of NodePort, LoadBalancer, Tunneling (upper and lower case matter)")]
pub struct UnknownStrategy;

impl ExposeStrategy {
    /// All strategies, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::NodePort, Self::LoadBalancer, Self::Tunneling];

    /// The name as manifests spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::Tunneling => "Tunneling",
        }
    }

    /// The names of `strategies` for a message, as in `A, B or C`.
    pub fn one_of(strategies: impl IntoIterator<Item = Self>) -> String {
        let names: Vec<&str> = strategies.into_iter().map(Self::name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
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

/// What accepts connections at a cluster's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum AnsweredBy {
    /// The seed's one gateway.
    Gateway,
    /// Any node of the seed, because its nodeport-proxy is disabled. DNS must point at the nodes.
    SeedNodes,
    /// The cluster's own load balancer.
    LoadBalancer,
}

impl fmt::Display for AnsweredBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gateway => "gateway",
            Self::SeedNodes => "seed nodes",
            Self::LoadBalancer => "its load balancer",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_listed_as_in_a_sentence() {
        assert_eq!(ExposeStrategy::one_of(ExposeStrategy::ALL), "NodePort, LoadBalancer or Tunneling");
        assert_eq!(ExposeStrategy::one_of([ExposeStrategy::Tunneling]), "Tunneling");
    }

    #[test]
    fn every_strategy_is_read_by_its_name() {
        for strategy in ExposeStrategy::ALL {
            assert_eq!(strategy.name().parse(), Ok(strategy));
            assert!(UnknownStrategy.to_string().contains(strategy.name()));
        }
    }
}
