//! `ExposedCluster` (portico.k8c.io/v1alpha1): what a gateway must know of a Cluster, without its secrets.
//!
//! A Cluster holds an admin token in `status.address.adminToken`, so the right to read Clusters is the right
//! to rule them. `portico front` writes one ExposedCluster for each Cluster; gateways read nothing else.
//! Everything is resolved: defaults of the Seed and of the KubermaticConfiguration are in it already.
//!
//! Reading is strict, unlike that of other kinds. The object decides about access, and one that does not fit
//! must not be used in part. The schema is `deploy/crds.yaml`; a test compares the two.

use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use crate::api_server_ca::ApiServerCa;
use crate::cluster::Address;
use crate::meta::ObjectMeta;
use crate::names::{ClusterName, HostName};
use crate::policy::{AllowList, Budget, ClusterFacts, ClusterPolicy};
use crate::seed::ConnectionSettings;
use crate::strategy::ExposeStrategy;

/// Group and version.
pub const API_VERSION: &str = "portico.k8c.io/v1alpha1";

/// What a gateway must know of one Cluster. Cluster-scoped, named as the Cluster, owned by it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExposedCluster {
    /// Name, and labels of the Cluster by which people select.
    pub metadata: ObjectMeta,
    /// What is exposed, and to which clients.
    pub spec: ExposedClusterSpec,
}

/// `ExposedCluster.spec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExposedClusterSpec {
    /// Its strategy: that of the published door, whose address users and nodes have.
    pub expose_strategy: ExposeStrategy,
    /// The Seed that hosts it.
    pub seed: Box<str>,
    /// Its datacenter, if it names one.
    #[serde(default, skip_serializing_if = "str_is_empty")]
    pub datacenter: Box<str>,
    /// `<cluster>.<seed>.<domain>`, empty without a domain. This name and those below it belong to the
    /// Services in the cluster's namespace.
    #[serde(default, skip_serializing_if = "str_is_empty", deserialize_with = "host_name_or_none")]
    pub host_name: Box<str>,
    /// Controllers leave it as it is; the gateway serves it all the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Client networks that may connect. Absent: every client may. An empty list admits nobody.
    #[serde(rename = "allowedIPRanges", default, skip_serializing_if = "Option::is_none")]
    pub allowed_ip_ranges: Option<Box<[IpNet]>>,
    /// Client networks that the load balancer in front admits. Absent: every client.
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    pub load_balancer_source_ranges: Box<[IpNet]>,
    /// The Seed's nodeport-proxy is disabled: no NodePort listener is opened.
    #[serde(default, skip_serializing_if = "is_false")]
    pub node_port_listeners_disabled: bool,
    /// Limits of the cluster on each gateway. Absent: the gateway's own.
    #[serde(default, skip_serializing_if = "is_default", serialize_with = "without_nulls")]
    pub budget: Budget,
    /// The Seed's settings for connections, which hold for all clusters of a gateway.
    #[serde(default, skip_serializing_if = "is_default", serialize_with = "without_nulls")]
    pub connection_settings: ConnectionSettings,
    /// CA certificates of its API server in PEM. Absent, or no CA: no token of the cluster can be reviewed.
    #[serde(rename = "apiServerCA", default, skip_serializing_if = "str_is_empty")]
    pub api_server_ca: Box<str>,
    /// Where users and nodes reach it, as far as known.
    #[serde(default, skip_serializing_if = "is_default")]
    pub address: Address,
    /// With strategy Tunneling: what its node agents need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<Tunnel>,
    /// While it migrates between strategies: how far it is. Hardly any cluster has this, and a gateway holds
    /// ten thousand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Box<Migration>>,
}

/// `ExposedCluster.spec.migration`: the record of a migration between expose strategies. It is one write with
/// the strategy in force, so that a flip of the two cannot stop half-way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// What is under way.
    pub state: MigrationState,
    /// When this state began.
    pub since: Timestamp,
    /// The other way in, beside that of the cluster's own strategy.
    pub second: SecondDoor,
}

/// What is under way in a migration between expose strategies. The first door is the published way in, whose
/// address users and nodes have; the second is the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MigrationState {
    /// The second door is being opened: Services, load balancer, name, certificate. It is not published.
    Opening,
    /// It is open, and is tried: from outside, from every node, and by Konnectivity.
    Proving,
    /// The first door, which was the second until now, is published: status, kubeconfigs, Service
    /// `kubernetes`, kube-proxy, agents.
    Moving,
    /// Kubelets, and what else on nodes has the address in a file, follow, node by node.
    MovingNodes,
    /// Nothing of ours leads to the second door, and its last clients are waited for.
    Quieting,
    /// The second door is being closed, and what belonged to it removed.
    Closing,
}

/// `ExposedCluster.spec.migration.second`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecondDoor {
    /// Its strategy.
    pub expose_strategy: ExposeStrategy,
    /// Where the cluster is reached by it, as far as known.
    #[serde(default, skip_serializing_if = "is_default")]
    pub address: Address,
    /// With strategy Tunneling: what its node agents need. An address that the Cluster has no longer is still
    /// here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<Tunnel>,
}

/// `ExposedCluster.spec.tunnel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tunnel {
    /// Address on which the agent on each worker node listens.
    #[serde(rename = "agentIP")]
    pub agent_ip: IpAddr,
}

impl MigrationState {
    /// All states, in their order.
    pub const ALL: [Self; 6] =
        [Self::Opening, Self::Proving, Self::Moving, Self::MovingNodes, Self::Quieting, Self::Closing];

    /// Its name, as manifests spell it and conditions say it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "Opening",
            Self::Proving => "Proving",
            Self::Moving => "Moving",
            Self::MovingNodes => "MovingNodes",
            Self::Quieting => "Quieting",
            Self::Closing => "Closing",
        }
    }
}

impl ExposedCluster {
    /// The Cluster's name as an identity.
    pub fn name(&self) -> ClusterName {
        ClusterName::new(&self.metadata.name)
    }

    /// This cluster as its second door exposes it, while it migrates: for code that computes things for one
    /// door.
    pub fn by_second(&self) -> Option<Self> {
        let SecondDoor { expose_strategy, address, tunnel } = self.spec.migration.as_ref()?.second.clone();
        let spec =
            ExposedClusterSpec { expose_strategy, address, tunnel, migration: None, ..self.spec.clone() };
        Some(Self { metadata: self.metadata.clone(), spec })
    }

    /// What the gateway enforces for the cluster.
    pub fn policy(&self) -> ClusterPolicy {
        let spec = &self.spec;
        ClusterPolicy {
            tenant: self.name().into(),
            allow: match spec.allowed_ip_ranges.as_deref() {
                None => AllowList::default(),
                Some([]) => AllowList::nobody(),
                Some(networks) => AllowList::new(networks.iter().copied()),
            },
            source_ranges: AllowList::new(spec.load_balancer_source_ranges.iter().copied()),
            budget: spec.budget,
            node_port_listeners: !spec.node_port_listeners_disabled,
            cluster: ClusterFacts::of(
                HostName::parse(&spec.host_name).ok(),
                ApiServerCa::parse(&spec.api_server_ca).ok(),
            ),
        }
    }
}

fn str_is_empty(text: &str) -> bool {
    text.is_empty()
}

/// A text that is no host name would leave the names of the cluster to others.
fn host_name_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    let text = Box::<str>::deserialize(deserializer)?;
    if !text.is_empty() {
        HostName::parse(&text).map_err(|why| serde::de::Error::custom(format!("no host name: {why}")))?;
    }
    Ok(text)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Leaves absent fields out: the schema of a CustomResourceDefinition knows no `null`.
fn without_nulls<S: serde::Serializer>(value: &impl Serialize, serializer: S) -> Result<S::Ok, S::Error> {
    let fields = serde_json::to_value(value).map_err(serde::ser::Error::custom)?;
    let present = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    serializer.collect_map(present)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &str) -> Result<ExposedCluster, serde_json::Error> {
        serde_json::from_str(&format!(r#"{{"metadata": {{"name": "a"}}, "spec": {spec}}}"#))
    }

    fn allow(ranges: &str) -> AllowList {
        let spec = format!(r#"{{"exposeStrategy": "NodePort", "seed": "north"{ranges}}}"#);
        read(&spec).unwrap().policy().allow
    }

    #[test]
    fn without_a_list_every_client_is_admitted_and_with_an_empty_one_nobody() {
        let client = "203.0.113.9".parse().unwrap();
        assert!(allow("").admits(client));
        assert!(!allow(r#", "allowedIPRanges": []"#).admits(client));
        assert!(!allow(r#", "allowedIPRanges": ["198.51.100.0/24"]"#).admits(client));
        assert!(allow(r#", "allowedIPRanges": ["203.0.113.0/24"]"#).admits(client));
    }

    #[test]
    fn an_object_that_does_not_fit_is_not_used_in_part() {
        for wrong in [
            r#""allowedIPRanges": "203.0.113.0/24""#,
            r#""allowedIPRanges": ["203.0.113.0/24", "203.0.113"]"#,
            r#""nodePortListenersDisabled": "yes""#,
            r#""hostName": "not a host!""#,
            r#""hostName": "*.north.example.com""#,
            &format!(r#""hostName": "{}example.com""#, "a.".repeat(150)),
            r#""budget": {"maxConnections": -1}"#,
            r#""budget": {"fairShare": 101}"#,
            r#""migration": {"state": "Opened", "since": "2026-01-02T03:04:05Z",
                "second": {"exposeStrategy": "Tunneling"}}"#,
            r#""migration": {"state": "Opening", "since": "today",
                "second": {"exposeStrategy": "Tunneling"}}"#,
            r#""migration": {"state": "Opening", "since": "2026-01-02T03:04:05Z"}"#,
        ] {
            assert!(read(&format!(r#"{{"exposeStrategy": "NodePort", "seed": "n", {wrong}}}"#)).is_err());
        }
        assert!(read(r#"{"exposeStrategy": "Tunnelling", "seed": "n"}"#).is_err());
        assert!(read(r#"{"seed": "n"}"#).is_err());
    }

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let written = r#"{"metadata":{"name":"a"},"spec":{"exposeStrategy":"Tunneling","seed":"north",
            "datacenter":"lab-1","allowedIPRanges":["198.51.100.0/24"],
            "budget":{"maxConnections":5,"fairShare":75},"address":{"port":6443},
            "tunnel":{"agentIP":"100.64.30.10"}}}"#;
        let object: ExposedCluster = serde_json::from_str(written).unwrap();
        let expected: serde_json::Value = serde_json::from_str(written).unwrap();
        assert_eq!(serde_json::to_value(&object).unwrap(), expected);
    }

    fn migrating() -> ExposedCluster {
        read(
            r#"{"exposeStrategy": "NodePort", "seed": "north", "allowedIPRanges": ["198.51.100.0/24"],
                "address": {"url": "https://a.example.com:31234", "port": 31234},
                "migration": {"state": "MovingNodes", "since": "2026-01-02T03:04:05.000000678Z",
                    "second": {"exposeStrategy": "Tunneling", "address": {"port": 6443},
                        "tunnel": {"agentIP": "100.64.30.11"}}}}"#,
        )
        .unwrap()
    }

    #[test]
    fn the_record_of_a_migration_is_read_as_it_was_written_to_the_nanosecond() {
        let object = migrating();
        let written = serde_json::to_value(&object).unwrap();
        assert_eq!(written["spec"]["migration"]["since"], "2026-01-02T03:04:05.000000678Z");
        assert_eq!(serde_json::from_value::<ExposedCluster>(written).unwrap(), object);
        for state in MigrationState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }

    #[test]
    fn by_its_second_door_only_what_depends_on_the_door_differs() {
        let second = migrating().by_second().unwrap();
        let expected = read(
            r#"{"exposeStrategy": "Tunneling", "seed": "north", "allowedIPRanges": ["198.51.100.0/24"],
                "address": {"port": 6443}, "tunnel": {"agentIP": "100.64.30.11"}}"#,
        );
        assert_eq!(second, expected.unwrap());
        assert_eq!(second.by_second(), None);
    }
}
