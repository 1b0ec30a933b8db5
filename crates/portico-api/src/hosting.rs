//! The fields of a Cluster that say what its control plane is made of. Only what hosts it reads them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::duration::GoDuration;
use crate::seed::Resources;
use crate::setting::{Setting, or_default};

/// How the programs of a control plane are spread over pods: the value of the annotation
/// [`LAYOUT`](crate::annotations::LAYOUT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layout {
    /// One pod with all programs and one member of etcd.
    Compact,
    /// A StatefulSet of etcd, and a Deployment for each program, as in KKP.
    Dedicated,
}

/// The text names no layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is neither compact nor dedicated")]
pub struct UnknownLayout;

impl Layout {
    /// The name as the annotation spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compact => "compact",
            Self::Dedicated => "dedicated",
        }
    }
}

impl FromStr for Layout {
    type Err = UnknownLayout;

    fn from_str(text: &str) -> Result<Self, UnknownLayout> {
        [Self::Compact, Self::Dedicated].into_iter().find(|layout| layout.name() == text).ok_or(UnknownLayout)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A version of Kubernetes: `1.35.8`, or `v1.35.8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The second number. The first has been 1 since 2015.
    pub minor: u16,
    /// The third.
    pub patch: u16,
}

/// The text is no version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it must read 1.MINOR.PATCH, as in 1.35.8")]
pub struct NoVersion;

impl FromStr for Version {
    type Err = NoVersion;

    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let numbers = text.strip_prefix('v').unwrap_or(text).strip_prefix("1.").ok_or(NoVersion)?;
        let (minor, patch) = numbers.split_once('.').ok_or(NoVersion)?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = |text: &str| digits(text).then(|| text.parse().ok()).flatten().ok_or(NoVersion);
        Ok(Self { minor: number(minor)?, patch: number(patch)? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}.{}", self.minor, self.patch)
    }
}

/// How strongly pods of one kind avoid each other's node or zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AntiAffinity {
    /// If there is room elsewhere.
    Preferred,
    /// Always.
    Required,
}

/// The text is no such strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is neither preferred nor required")]
pub struct UnknownAntiAffinity;

impl FromStr for AntiAffinity {
    type Err = UnknownAntiAffinity;

    fn from_str(text: &str) -> Result<Self, UnknownAntiAffinity> {
        match text {
            "preferred" => Ok(Self::Preferred),
            "required" => Ok(Self::Required),
            _ => Err(UnknownAntiAffinity),
        }
    }
}

/// Settings of the pods of one program: of `spec.componentsOverride`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSettings {
    /// How many pods.
    pub replicas: Setting<u16>,
    /// In place of the default requests and limits.
    pub resources: Option<Resources>,
    /// Taints of nodes that do not keep the pods away, as Kubernetes has them.
    #[serde(deserialize_with = "or_default")]
    pub tolerations: Vec<Value>,
    /// Whether two of the pods may share a node.
    pub host_anti_affinity: Setting<AntiAffinity>,
    /// Whether two of the pods may share a zone.
    pub zone_anti_affinity: Setting<AntiAffinity>,
    /// How replicas agree on one that works; controller manager and scheduler only.
    #[serde(deserialize_with = "or_default")]
    pub leader_election: LeaderElection,
}

/// `leaderElection` of the controller manager or the scheduler.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaderElection {
    /// How long others wait for a leader that is silent.
    pub lease_duration_seconds: Setting<u32>,
    /// How long a leader tries to renew before it gives up.
    pub renew_deadline_seconds: Setting<u32>,
    /// Time between two tries.
    pub retry_period_seconds: Setting<u32>,
}

/// `spec.componentsOverride.etcd`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EtcdSettings {
    /// Members.
    pub cluster_size: Setting<u16>,
    /// Class of the volumes.
    #[serde(deserialize_with = "or_default")]
    pub storage_class: Box<str>,
    /// Size of each volume.
    #[serde(deserialize_with = "or_default")]
    pub disk_size: Value,
    /// Most that etcd stores, in GiB.
    #[serde(rename = "quotaBackendGb")]
    pub quota_backend_gb: Setting<u32>,
    /// Labels of the nodes that members may run on.
    #[serde(deserialize_with = "or_default")]
    pub node_selector: BTreeMap<Box<str>, Box<str>>,
    /// In place of the default requests and limits.
    pub resources: Option<Resources>,
    /// Taints of nodes that do not keep the members away, as Kubernetes has them.
    #[serde(deserialize_with = "or_default")]
    pub tolerations: Vec<Value>,
    /// Whether two members may share a node.
    pub host_anti_affinity: Setting<AntiAffinity>,
    /// Whether two members may share a zone.
    pub zone_anti_affinity: Setting<AntiAffinity>,
}

/// `spec.componentsOverride.konnectivityProxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KonnectivitySettings {
    /// In place of the default requests and limits.
    pub resources: Option<Resources>,
    /// Time between keep-alive probes of idle connections.
    pub keepalive_time: Setting<GoDuration>,
}

/// `spec.serviceAccount`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceAccountSettings {
    /// Issuer of tokens; `https://` and a host.
    #[serde(deserialize_with = "or_default")]
    pub issuer: Box<str>,
    /// Audiences of tokens that name none.
    #[serde(deserialize_with = "or_default")]
    pub api_audiences: Vec<Box<str>>,
}

/// `spec.auditLogging`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuditLogging {
    /// Whether there is an audit log.
    #[serde(deserialize_with = "or_default")]
    pub enabled: bool,
    /// `metadata`, `recommended` or `minimal`; empty for the first.
    pub policy_preset: Setting<AuditPreset>,
    /// A Secret with the kubeconfig of a service that takes the log.
    pub webhook_backend: Option<Value>,
}

/// What an audit log records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AuditPreset {
    /// Which user did what to which object, for every request.
    #[default]
    Metadata,
    /// Bodies of requests that change something, too; not of Secrets. Without noise.
    Recommended,
    /// Requests that change something.
    Minimal,
}

/// The text names no preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is none of metadata, recommended, minimal")]
pub struct UnknownPreset;

impl FromStr for AuditPreset {
    type Err = UnknownPreset;

    fn from_str(text: &str) -> Result<Self, UnknownPreset> {
        match text {
            "metadata" => Ok(Self::Metadata),
            "recommended" => Ok(Self::Recommended),
            "minimal" => Ok(Self::Minimal),
            _ => Err(UnknownPreset),
        }
    }
}

/// `spec.oidc`: users of one identity provider.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Oidc {
    /// The issuer of their tokens; `https://` and a host. Empty for none.
    #[serde(rename = "issuerURL", deserialize_with = "or_default")]
    pub issuer_url: Box<str>,
    /// The audience of their tokens.
    #[serde(rename = "clientID", deserialize_with = "or_default")]
    pub client_id: Box<str>,
    /// The claim with the name of the user; empty for `sub`.
    #[serde(deserialize_with = "or_default")]
    pub username_claim: Box<str>,
    /// Before the name of the user; empty for the issuer, `-` for nothing.
    #[serde(deserialize_with = "or_default")]
    pub username_prefix: Box<str>,
    /// The claim with the groups of the user.
    #[serde(deserialize_with = "or_default")]
    pub groups_claim: Box<str>,
    /// Before the name of each group.
    #[serde(rename = "groupsPrefix", alias = "groupPrefix", deserialize_with = "or_default")]
    pub groups_prefix: Box<str>,
    /// Claims that tokens must have: `KEY=VALUE`, separated by commas.
    #[serde(deserialize_with = "or_default")]
    pub required_claim: Box<str>,
}

/// `spec.authenticationConfiguration`: a Secret in the namespace of the cluster with an
/// AuthenticationConfiguration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SecretRef {
    /// Name of the Secret.
    #[serde(deserialize_with = "or_default")]
    pub secret_name: Box<str>,
    /// Key in it.
    #[serde(deserialize_with = "or_default")]
    pub secret_key: Box<str>,
}

/// `spec.encryptionConfiguration`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Encryption {
    /// Whether Secrets are encrypted before they are stored.
    #[serde(deserialize_with = "or_default")]
    pub enabled: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_three_numbers() {
        for text in ["1.35.8", "v1.35.8"] {
            assert_eq!(text.parse(), Ok(Version { minor: 35, patch: 8 }));
        }
        for text in ["", "1", "1.35", "1.35.", "1.35.8-rc.1", "2.0.0", "1.+5.8", "1.35.8.1", "latest"] {
            assert_eq!(text.parse::<Version>(), Err(NoVersion), "{text}");
        }
    }
}
