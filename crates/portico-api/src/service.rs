//! `Service` (v1), with the fields that concern exposure.

use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::meta::{ObjectMeta, Strings};

/// A Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// Name, namespace, annotations.
    pub metadata: ObjectMeta,
    /// Type and ports.
    pub spec: ServiceSpec,
}

/// `Service.spec`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// How Kubernetes publishes it.
    #[serde(rename = "type")]
    pub service_type: ServiceType,
    /// Its ports, in the order written.
    pub ports: Vec<ServicePort>,
    /// The ClusterIP; empty while none is assigned, `None` for a headless Service.
    #[serde(rename = "clusterIP", skip_serializing_if = "Option::is_none")]
    pub cluster_ip: Option<Box<str>>,
    /// The ClusterIPs, of which `cluster_ip` is the first: one a family.
    #[serde(rename = "clusterIPs", skip_serializing_if = "Vec::is_empty")]
    pub cluster_ips: Vec<Box<str>>,
    /// Which nodes lead clients from outside to its pods.
    #[serde(skip_serializing_if = "ExternalTrafficPolicy::is_cluster")]
    pub external_traffic_policy: ExternalTrafficPolicy,
    /// Labels of the pods behind it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<Strings>,
    /// Networks a cloud load balancer admits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub load_balancer_source_ranges: Vec<Box<str>>,
}

impl Service {
    /// The addresses by which it is reached inside its cluster; none for a headless Service.
    pub fn cluster_ips(&self) -> impl Iterator<Item = IpAddr> {
        let spec = &self.spec;
        spec.cluster_ip.iter().chain(&spec.cluster_ips).filter_map(|ip| ip.parse().ok())
    }

    /// The numbers by which every node leads to it.
    pub fn node_ports(&self) -> impl Iterator<Item = u16> {
        self.spec.ports.iter().filter_map(|port| port.node_port).filter(|&number| number != 0)
    }
}

/// `Service.spec.externalTrafficPolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExternalTrafficPolicy {
    /// Every node; its own address takes the place of the client's.
    #[default]
    Cluster,
    /// Nodes with a pod; pods see the addresses of clients.
    Local,
}

impl ExternalTrafficPolicy {
    fn is_cluster(&self) -> bool {
        *self == Self::Cluster
    }
}

/// `Service.spec.type`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ServiceType {
    /// An address inside the cluster only.
    #[default]
    ClusterIP,
    /// Also a port on every node.
    NodePort,
    /// Also an external load balancer.
    LoadBalancer,
    /// A DNS alias: nothing to expose.
    ExternalName,
}

/// The text names no Service type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it is none of ClusterIP, NodePort, LoadBalancer (upper and lower case matter)")]
pub struct UnknownServiceType;

impl FromStr for ServiceType {
    type Err = UnknownServiceType;

    /// The types that expose something; `ExternalName` is none of them.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "ClusterIP" => Ok(Self::ClusterIP),
            "NodePort" => Ok(Self::NodePort),
            "LoadBalancer" => Ok(Self::LoadBalancer),
            _ => Err(UnknownServiceType),
        }
    }
}

/// One port of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServicePort {
    /// Unique within the Service; may be empty where there is only one port.
    #[serde(skip_serializing_if = "str_is_empty")]
    pub name: Box<str>,
    /// Transport protocol; only TCP is exposed.
    pub protocol: Protocol,
    /// Port of the ClusterIP.
    pub port: u16,
    /// Port of the pods, by number or by name; absent means the same as `port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_port: Option<TargetPort>,
    /// Port on every node, once allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_port: Option<u16>,
}

/// A pod's port by number or by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetPort {
    /// A port number.
    Number(u16),
    /// The name of a container port.
    Name(Box<str>),
}

/// Transport protocol of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// The default.
    #[default]
    TCP,
    /// Not exposed.
    UDP,
    /// Not exposed.
    SCTP,
}

fn str_is_empty(text: &str) -> bool {
    text.is_empty()
}
