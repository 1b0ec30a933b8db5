//! The Services of a control plane that are exposed, as an ordered list (facts 2.3).
//!
//! `openvpn-server` is not among them: it stood in for Konnectivity, which can no longer be switched off.

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED, LOAD_BALANCER_SOURCE_RANGES, PORT_MAPPING};
use portico_api::cluster::Cluster;
use portico_api::meta::{ObjectMeta, Strings};
use portico_api::names::HostName;
use portico_api::seed::Seed;
use portico_api::service::{Protocol, Service, ServicePort, ServiceSpec, ServiceType, TargetPort};
use portico_api::strategy::ExposeStrategy;

use crate::plan::{LoadBalancers, is_on};

/// The API server, as users and nodes reach it.
pub const APISERVER: &str = "apiserver-external";
/// The server side of the reverse path.
pub const KONNECTIVITY: &str = "konnectivity-server";
/// Where a user cluster sends metrics and logs.
pub const MLA_GATEWAY: &str = "mla-gateway-ext";
/// The cluster's own load balancer, strategy LoadBalancer only.
pub const FRONT: &str = "front-loadbalancer";

/// Port of the API server's container where it has no NodePort number to listen on.
pub const APISERVER_PORT: u16 = 6_443;

/// One exposed Service: all that differs between them.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) name: &'static str,
    pub(crate) port_name: &'static str,
    pub(crate) port: u16,
    target: Target,
    selector: (&'static str, &'static str),
    /// What stands before the cluster's host name in its own.
    pub(crate) host_prefix: &'static str,
    /// Whether worker nodes also reach it by CONNECT.
    pub(crate) tunnel: bool,
}

#[derive(Debug)]
enum Target {
    /// The API server listens on the NodePort number itself.
    NodePortNumber,
    Number(u16),
    Name(&'static str),
}

const API: Child = Child {
    name: APISERVER,
    port_name: "secure",
    port: 443,
    target: Target::NodePortNumber,
    selector: ("app", "apiserver"),
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
    host_prefix: crate::plan::KONNECTIVITY_PREFIX,
    tunnel: true,
};

const MLA: Child = Child {
    name: MLA_GATEWAY,
    port_name: "http-ext",
    port: 80,
    target: Target::Name("http-ext"),
    selector: ("app.kubernetes.io/name", "mla-gateway"),
    host_prefix: "mla-gateway.",
    tunnel: false,
};

/// The exposed Services that `cluster` should have, the API server first.
pub(crate) fn children(cluster: &Cluster, seed: &Seed) -> impl Iterator<Item = &'static Child> {
    let mla = cluster.spec.mla;
    let wanted = seed.spec.mla.user_cluster_mla_enabled && (mla.monitoring_enabled || mla.logging_enabled);
    [&API, &REVERSE].into_iter().chain(wanted.then_some(&MLA))
}

impl Child {
    /// Its type; a datacenter may override that of the API server.
    pub(crate) fn service_type(&self, strategy: ExposeStrategy, api: Option<ServiceType>) -> ServiceType {
        match (strategy, api) {
            (_, Some(overridden)) if self.name == APISERVER => overridden,
            (ExposeStrategy::Tunneling, _) => ServiceType::ClusterIP,
            (ExposeStrategy::NodePort | ExposeStrategy::LoadBalancer, _) => ServiceType::NodePort,
        }
    }

    /// The Service as it should be. `host` is its SNI host name, for Tunneling.
    pub(crate) fn service(
        &self,
        metadata: ObjectMeta,
        kind: ServiceType,
        strategy: ExposeStrategy,
        balancers: LoadBalancers,
        node_port: Option<u16>,
        host: Option<&HostName>,
    ) -> Service {
        let target_port = match (&self.target, strategy) {
            (Target::NodePortNumber, ExposeStrategy::Tunneling) => TargetPort::Number(APISERVER_PORT),
            (Target::NodePortNumber, _) => TargetPort::Number(node_port.unwrap_or(APISERVER_PORT)),
            (Target::Number(number), _) => TargetPort::Number(*number),
            (Target::Name(name), _) => TargetPort::Name((*name).into()),
        };
        let port = ServicePort {
            name: self.port_name.into(),
            protocol: Protocol::TCP,
            port: self.port,
            target_port: Some(target_port),
            node_port,
        };
        let annotations = self.annotations(strategy, balancers, host);
        Service {
            metadata: ObjectMeta { name: self.name.into(), annotations, ..metadata },
            spec: ServiceSpec {
                service_type: kind,
                ports: vec![port],
                selector: Some(strings([self.selector])),
                ..ServiceSpec::default()
            },
        }
    }

    fn annotations(
        &self,
        strategy: ExposeStrategy,
        balancers: LoadBalancers,
        host: Option<&HostName>,
    ) -> Strings {
        match (strategy, balancers) {
            (ExposeStrategy::LoadBalancer, LoadBalancers::Cloud) => strings([(EXPOSE_NAMESPACED, "true")]),
            (ExposeStrategy::NodePort, _) | (ExposeStrategy::LoadBalancer, LoadBalancers::Gateway) => {
                strings([(EXPOSE, "NodePort")])
            }
            (ExposeStrategy::Tunneling, _) => {
                let mut annotations = strings([(EXPOSE, if self.tunnel { "SNI,Tunneling" } else { "SNI" })]);
                if let Some(host) = host {
                    // Port and host names hold nothing that JSON would escape.
                    let mapping = format!("{{\"{}\":\"{host}\"}}", self.port_name);
                    annotations.insert(PORT_MAPPING.into(), mapping.into());
                }
                annotations
            }
        }
    }
}

/// The cluster's own load balancer. Its one port is a placeholder: the ports follow the NodePorts of the other Services.
pub(crate) fn front(metadata: ObjectMeta, cluster: &Cluster, seed: &Seed, ranges: &[String]) -> Service {
    let mut annotations = balancer_annotations(cluster, seed);
    if !ranges.is_empty() {
        annotations.insert(LOAD_BALANCER_SOURCE_RANGES.into(), ranges.join(",").into());
    }
    let port = ServicePort {
        name: "secure".into(),
        protocol: Protocol::TCP,
        port: 443,
        target_port: Some(TargetPort::Number(443)),
        node_port: None,
    };
    Service {
        metadata: ObjectMeta { name: FRONT.into(), annotations, ..metadata },
        spec: ServiceSpec {
            service_type: ServiceType::LoadBalancer,
            ports: vec![port],
            selector: Some(strings([("app", "nodeport-proxy-envoy")])),
            load_balancer_source_ranges: ranges.iter().map(|range| range.as_str().into()).collect(),
            ..ServiceSpec::default()
        },
    }
}

const AWS_TYPE: (&str, &str) = ("service.beta.kubernetes.io/aws-load-balancer-type", "nlb");
/// Watches are silent for hours; AWS cuts after a minute unless told otherwise, and an hour is the most it accepts.
const AWS_IDLE: (&str, &str) =
    ("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout", "3600");
const AWS_CROSS_ZONE: (&str, &str) =
    ("service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled", "true");

fn balancer_annotations(cluster: &Cluster, seed: &Seed) -> Strings {
    let proxy = &seed.spec.nodeport_proxy;
    let mut annotations = proxy.annotations.clone();
    match &proxy.envoy.load_balancer_service.annotations {
        Some(written) => annotations.extend(written.clone()),
        None => annotations.extend(strings([AWS_TYPE, AWS_IDLE])),
    }
    if is_on(cluster, seed, "aws") {
        annotations.extend(strings([AWS_TYPE, AWS_IDLE, AWS_CROSS_ZONE]));
    }
    annotations
}

fn strings<const N: usize>(pairs: [(&str, &str); N]) -> Strings {
    pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
}
