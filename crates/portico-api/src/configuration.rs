//! `KubermaticConfiguration` (kubermatic.k8c.io/v1): what holds for a whole installation, cut down to
//! exposure.

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
    /// The strategy where neither Cluster nor Seed says anything.
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
    /// NodePorts of user clusters; must equal the seed's own range, and is where Portico draws NodePorts
    /// from.
    pub node_port_range: Setting<PortRange>,
}
