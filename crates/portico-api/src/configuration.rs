//! `KubermaticConfiguration` (kubermatic.k8c.io/v1): settings of a whole installation that concern exposure.

use serde::Deserialize;

use crate::meta::ObjectMeta;
use crate::port_range::PortRange;
use crate::setting::{Setting, or_default};
use crate::strategy::ExposeStrategy;

/// The one configuration of an installation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct KubermaticConfiguration {
    /// Name and namespace.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(deserialize_with = "or_default")]
    pub spec: ConfigurationSpec,
}

/// `KubermaticConfiguration.spec`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigurationSpec {
    /// The strategy of Clusters that choose none and whose Seed chooses none.
    pub expose_strategy: Setting<ExposeStrategy>,
    /// Where the installation is reached.
    #[serde(deserialize_with = "or_default")]
    pub ingress: Ingress,
    /// Defaults for user clusters.
    #[serde(deserialize_with = "or_default")]
    pub user_cluster: UserClusterDefaults,
}

/// `spec.ingress`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Ingress {
    /// The last part of every cluster's host name.
    #[serde(deserialize_with = "or_default")]
    pub domain: Box<str>,
}

/// `spec.userCluster`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UserClusterDefaults {
    /// NodePorts of user clusters. Must equal the seed's own range; Portico allocates from it.
    pub node_port_range: Setting<PortRange>,
}
