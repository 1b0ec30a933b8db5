//! The state that must be the same in the next run of a gateway on a directory: allocated NodePorts, and the
//! strategy of each Cluster. Users have both in their kubeconfigs.

use std::collections::BTreeMap;

use portico_api::names::ClusterName;
use portico_api::strategy::ExposeStrategy;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::node_ports::{NodePortAllocator, PortKey, Twice};

/// Version of the document that [`PersistedState::to_json`] writes.
const FORMAT: u32 = 1;

/// The state that outlives a run.
#[derive(Debug, Default)]
pub struct PersistedState {
    /// The NodePorts that no manifest fixes.
    pub node_ports: NodePortAllocator,
    /// The strategy that exposes each Cluster: only a migration may change it.
    pub strategies: BTreeMap<ClusterName, ExposeStrategy>,
}

/// Why a stored document cannot be used.
#[derive(Debug, Error)]
pub enum PersistedStateError {
    /// Not the JSON document that was written.
    #[error("it is damaged ({0}); restore it, or remove it and let every NodePort be drawn anew")]
    Damaged(#[from] serde_json::Error),
    /// Written by a later Portico.
    #[error("it has format {0}, this program knows {FORMAT}; use the program that wrote it")]
    Format(u32),
    /// One port, two owners.
    #[error("it {0}; remove one of the two lines")]
    Twice(#[from] Twice),
    /// A strategy that does not exist.
    #[error(
        "it says that Cluster {0} is exposed by {1:?}, which is no strategy; write {strategies}",
        strategies = ExposeStrategy::one_of(ExposeStrategy::ALL)
    )]
    Strategy(String, String),
}

/// The document. It is sorted, and printed with one line an entry, so that people can read and repair it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    format: u32,
    node_ports: BTreeMap<PortKey, u16>,
    #[serde(default)]
    strategies: BTreeMap<String, String>,
}

impl PersistedState {
    /// Reads what [`Self::to_json`] wrote.
    ///
    /// # Errors
    /// What is wrong with the document, and what to do about it.
    pub fn from_json(text: &str) -> Result<Self, PersistedStateError> {
        let document: Document = serde_json::from_str(text)?;
        if document.format != FORMAT {
            return Err(PersistedStateError::Format(document.format));
        }
        let strategies = document.strategies.into_iter().map(|(name, strategy)| match strategy.parse() {
            Ok(known) => Ok((ClusterName::new(&name), known)),
            Err(_) => Err(PersistedStateError::Strategy(name, strategy)),
        });
        Ok(Self {
            strategies: strategies.collect::<Result<_, _>>()?,
            node_ports: NodePortAllocator::restored(document.node_ports)?,
        })
    }

    /// The document to store.
    ///
    /// # Errors
    /// Only if it cannot be written as JSON, which no content of it causes.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let strategies = self.strategies.iter();
        serde_json::to_string_pretty(&Document {
            format: FORMAT,
            node_ports: self.node_ports.all().map(|(key, port)| (key.clone(), port)).collect(),
            strategies: strategies.map(|(name, strategy)| (name.to_string(), strategy.to_string())).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use portico_api::port_range::PortRange;

    use super::*;
    use crate::random::Random;

    #[test]
    fn what_was_stored_is_restored() {
        let mut state = PersistedState::default();
        let keys = ["a", "b"].map(|name| PortKey::new(name, "api", "secure"));
        state.node_ports.allocate(&keys, PortRange::NODE_PORTS, &mut Random::new(1)).unwrap();
        state.strategies.insert(ClusterName::new("a"), ExposeStrategy::Tunneling);
        let again = PersistedState::from_json(&state.to_json().unwrap()).unwrap();
        assert_eq!(again.strategies, state.strategies);
        assert!(keys.iter().all(|key| again.node_ports.get(key) == state.node_ports.get(key)));
    }

    #[test]
    fn a_document_that_cannot_be_used_is_an_error_that_says_what_to_do() {
        let error = |text| PersistedState::from_json(text).unwrap_err().to_string();
        assert_eq!(
            error(r#"{"format": 1, "nodePorts": {"a/b/c": 30000, "a/b/d": 30000}}"#),
            "it gives port 30000 to a/b/c and to a/b/d; remove one of the two lines"
        );
        assert_eq!(
            error(r#"{"format": 2, "nodePorts": {}}"#),
            "it has format 2, this program knows 1; use the program that wrote it"
        );
        assert_eq!(
            error(r#"{"format": 1, "nodePorts": {}, "strategies": {"a": "SNI"}}"#),
            format!(
                "it says that Cluster a is exposed by \"SNI\", which is no strategy; write {}",
                ExposeStrategy::one_of(ExposeStrategy::ALL)
            )
        );
        assert!(matches!(PersistedState::from_json("{}"), Err(PersistedStateError::Damaged(_))));
    }
}
