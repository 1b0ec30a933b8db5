//! The kinds of listeners of a gateway: by which of them a connection came tells by which strategy its client
//! came.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A kind of listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenerKind {
    /// One port for all clusters: routed by server name.
    Sni,
    /// CONNECT requests of node agents.
    Tunnel,
    /// A port for each Service port.
    NodePort,
}

impl ListenerKind {
    /// All of them, in the order of their variants.
    pub const ALL: [Self; 3] = [Self::Sni, Self::Tunnel, Self::NodePort];

    /// The label value for metrics and listings. Stable.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Tunnel => "tunnel",
            Self::NodePort => "node_port",
        }
    }
}

impl fmt::Display for ListenerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_read_by_its_word_and_at_its_place() {
        for (index, kind) in ListenerKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
    }
}
