//! The Services of a control plane that are exposed, as an ordered list. Names and ports are those of KKP.
//!
//! A `Child` is what holds for a Service under every strategy; [`crate::strategy`] adds type, annotations
//! and names. `openvpn-server` is not in the list: it stood in for Konnectivity, which can no longer be
//! switched off.

use portico_api::annotations::{ENDPOINTS, KONNECTIVITY_ENDPOINTS};
use portico_api::cluster::Cluster;
use portico_api::meta::{ObjectMeta, Strings};
use portico_api::names::{Authority, HostName};
use portico_api::seed::Seed;
use portico_api::service::{Protocol, Service, ServicePort, ServiceSpec, ServiceType, TargetPort};
use serde::Serialize;

use crate::inputs::Inputs;

/// The API server, as users and nodes reach it.
pub const APISERVER: &str = "apiserver-external";
/// The server side of the reverse path.
pub const KONNECTIVITY: &str = "konnectivity-server";
/// Where a user cluster sends metrics and logs.
pub const MLA_GATEWAY: &str = "mla-gateway-ext";

/// Every Service of a control plane that may be exposed, by name.
pub const EXPOSED: [&str; 3] = [APISERVER, KONNECTIVITY, MLA_GATEWAY];

/// Port of the API server's container where it has no NodePort number to listen on.
pub const APISERVER_PORT: u16 = 6_443;

/// Start of the host name of a cluster's Konnectivity server. The longest of the prefixes.
pub const KONNECTIVITY_PREFIX: &str = "konnectivity-server.";

/// What one Service is reached by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The Service, in the cluster's namespace.
    pub service: &'static str,
    /// Its port.
    pub port: u16,
    /// The NodePort number, if it is exposed by port and the number is allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_port: Option<u16>,
    /// The server name, if it is exposed by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostName>,
    /// The CONNECT authority, if worker nodes reach it through the tunnel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authority: Option<Authority>,
}

/// One exposed Service, and what it is reached by.
#[derive(Debug)]
pub struct Exposed {
    /// What it is reached by.
    pub entry: Entry,
    /// The Service, complete with type, ports and annotations.
    pub service: Service,
}

/// One exposed Service of a control plane: what every strategy has in common.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) name: &'static str,
    pub(crate) port_name: &'static str,
    pub(crate) port: u16,
    target: Target,
    selector: (&'static str, &'static str),
    /// The annotation with its addresses, for a Cluster whose API server runs elsewhere.
    pub(crate) endpoints: Option<&'static str>,
    /// Start of its host name, before the cluster's own.
    pub(crate) host_prefix: &'static str,
    /// Whether worker nodes reach it by CONNECT.
    pub(crate) tunnel: bool,
}

/// The port of the pods.
#[derive(Debug)]
enum Target {
    /// The port the API server listens on, which the strategy decides where Portico does not host it.
    ApiServer,
    Number(u16),
    Name(&'static str),
}

/// Type and NodePort of a Service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Published {
    pub(crate) service_type: ServiceType,
    /// `None` for a type without NodePorts, and while none is allocated.
    pub(crate) node_port: Option<u16>,
}

const API: Child = Child {
    name: APISERVER,
    port_name: "secure",
    port: 443,
    target: Target::ApiServer,
    selector: ("app", "apiserver"),
    endpoints: Some(ENDPOINTS),
    host_prefix: "",
    tunnel: true,
};

const REVERSE: Child = Child {
    name: KONNECTIVITY,
    port_name: "secure",
    port: 443,
    target: Target::Number(8_132),
    // The Konnectivity server is a container of the API server's pod.
    selector: ("app", "apiserver"),
    endpoints: Some(KONNECTIVITY_ENDPOINTS),
    host_prefix: KONNECTIVITY_PREFIX,
    tunnel: true,
};

const MLA: Child = Child {
    name: MLA_GATEWAY,
    port_name: "http-ext",
    port: 80,
    target: Target::Name("http-ext"),
    selector: ("app.kubernetes.io/name", "mla-gateway"),
    endpoints: None,
    host_prefix: "mla-gateway.",
    tunnel: false,
};

/// The exposed Services that `cluster` should have, the API server first.
pub(crate) fn children(cluster: &Cluster, seed: &Seed) -> impl Iterator<Item = &'static Child> {
    let mla = cluster.spec.mla;
    let wanted = seed.spec.mla.user_cluster_mla_enabled && (mla.monitoring_enabled || mla.logging_enabled);
    [&API, &REVERSE].into_iter().chain(wanted.then_some(&MLA))
}

/// Whether no pod of the seed is the API server of `cluster`.
pub(crate) fn runs_elsewhere(cluster: &Cluster) -> bool {
    cluster.metadata.annotation(ENDPOINTS).is_some()
}

impl Child {
    /// Its type: `by_strategy`, unless the datacenter gives the API server another.
    pub(crate) fn service_type(&self, by_strategy: ServiceType, of_api: Option<ServiceType>) -> ServiceType {
        of_api.filter(|_| self.name == APISERVER).unwrap_or(by_strategy)
    }

    /// Its type, as [`Self::service_type`] says, and its NodePort where the type has one.
    pub(crate) fn published(&self, by_strategy: ServiceType, inputs: &Inputs<'_>) -> Published {
        let service_type = self.service_type(by_strategy, inputs.scope.api_server_type());
        let node_port = match service_type {
            ServiceType::ClusterIP | ServiceType::ExternalName => None,
            ServiceType::NodePort | ServiceType::LoadBalancer => {
                (inputs.node_ports)(self.name, self.port_name)
            }
        };
        Published { service_type, node_port }
    }

    /// The Service as it should be. `api_server_port` is the port that an API server of KKP listens on.
    pub(crate) fn service(
        &self,
        cluster: &Cluster,
        published: Published,
        api_server_port: u16,
        annotations: Strings,
    ) -> Service {
        let target_port = match &self.target {
            // One that Portico hosts listens on the same port under every strategy: a change of the strategy
            // restarts nothing.
            Target::ApiServer if cluster.is_hosted() => TargetPort::Number(APISERVER_PORT),
            Target::ApiServer => TargetPort::Number(api_server_port),
            Target::Number(number) => TargetPort::Number(*number),
            Target::Name(name) => TargetPort::Name((*name).into()),
        };
        let port = ServicePort {
            name: self.port_name.into(),
            protocol: Protocol::TCP,
            port: self.port,
            target_port: Some(target_port),
            node_port: published.node_port,
        };
        Service {
            metadata: metadata(cluster, self.name, annotations),
            spec: ServiceSpec {
                service_type: published.service_type,
                ports: vec![port],
                // Without a selector, Kubernetes leaves the EndpointSlices to others.
                selector: (self.endpoints.is_none() || !runs_elsewhere(cluster))
                    .then(|| strings([self.selector])),
                ..ServiceSpec::default()
            },
        }
    }
}

/// Metadata of a planned Service. Age and identity decide conflicts between Services, so it has those of its
/// cluster.
pub(crate) fn metadata(cluster: &Cluster, name: &str, annotations: Strings) -> ObjectMeta {
    ObjectMeta {
        name: name.into(),
        namespace: cluster.name().namespace().into(),
        uid: cluster.metadata.uid.clone(),
        creation_timestamp: cluster.metadata.creation_timestamp,
        annotations,
        ..ObjectMeta::default()
    }
}

pub(crate) fn strings<const N: usize>(pairs: [(&str, &str); N]) -> Strings {
    pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
}
