//! Cluster → what should exist inside the user cluster: node agents under the strategy Tunneling,
//! Konnectivity agents, the endpoints of Service `kubernetes`, and `cluster-info`.
//!
//! The agents are the manifests of `deploy/`, with their blanks filled in, so that both ways to install them
//! mean the same. What cannot be decided yet is left as it is: neither wanted nor unwanted.

use std::borrow::Cow;
use std::net::IpAddr;

use portico_api::annotations::KONNECTIVITY_ENDPOINTS;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::strategy::ExposeStrategy;
use serde_json::{Value, json};

use crate::exposure::MANAGED_BY;
use crate::services::{APISERVER_PORT, KONNECTIVITY_PREFIX, runs_elsewhere};

mod manifests;

pub use manifests::manifest;

/// The DaemonSet of KKP's agent, which holds the same address on each node.
pub const ENVOY_AGENT: Id = id(Kind::DaemonSet, "kube-system", "envoy-agent");

/// A kind of object inside a user cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `v1`
    ServiceAccount,
    /// `v1`
    ConfigMap,
    /// `v1`
    Service,
    /// `v1`
    Endpoints,
    /// `discovery.k8s.io/v1`
    EndpointSlice,
    /// `rbac.authorization.k8s.io/v1`
    ClusterRole,
    /// `rbac.authorization.k8s.io/v1`
    ClusterRoleBinding,
    /// `rbac.authorization.k8s.io/v1`
    Role,
    /// `rbac.authorization.k8s.io/v1`
    RoleBinding,
    /// `apps/v1`
    DaemonSet,
    /// `apps/v1`
    Deployment,
    /// `policy/v1`
    PodDisruptionBudget,
    /// `apiregistration.k8s.io/v1`
    ApiService,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::ServiceAccount,
        Self::ConfigMap,
        Self::Service,
        Self::Endpoints,
        Self::EndpointSlice,
        Self::ClusterRole,
        Self::ClusterRoleBinding,
        Self::Role,
        Self::RoleBinding,
        Self::DaemonSet,
        Self::Deployment,
        Self::PodDisruptionBudget,
        Self::ApiService,
    ];

    /// Its name, group and version, and the name of its collection in URLs.
    const fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::ServiceAccount => ("ServiceAccount", "v1", "serviceaccounts"),
            Self::ConfigMap => ("ConfigMap", "v1", "configmaps"),
            Self::Service => ("Service", "v1", "services"),
            Self::Endpoints => ("Endpoints", "v1", "endpoints"),
            Self::EndpointSlice => ("EndpointSlice", "discovery.k8s.io/v1", "endpointslices"),
            Self::ClusterRole => ("ClusterRole", "rbac.authorization.k8s.io/v1", "clusterroles"),
            Self::ClusterRoleBinding => {
                ("ClusterRoleBinding", "rbac.authorization.k8s.io/v1", "clusterrolebindings")
            }
            Self::Role => ("Role", "rbac.authorization.k8s.io/v1", "roles"),
            Self::RoleBinding => ("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings"),
            Self::DaemonSet => ("DaemonSet", "apps/v1", "daemonsets"),
            Self::Deployment => ("Deployment", "apps/v1", "deployments"),
            Self::PodDisruptionBudget => ("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
            Self::ApiService => ("APIService", "apiregistration.k8s.io/v1", "apiservices"),
        }
    }

    /// Its name, as in `kind`.
    pub const fn name(self) -> &'static str {
        self.words().0
    }

    /// Group and version, as in `apiVersion`.
    pub const fn api_version(self) -> &'static str {
        self.words().1
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Which object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Id {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; `None` for kinds without.
    pub namespace: Option<Cow<'static, str>>,
    /// Its name.
    pub name: Cow<'static, str>,
}

impl Id {
    /// Its path in the API.
    pub fn path(&self) -> String {
        let (_, version, plural) = self.kind.words();
        let root = if version.contains('/') { "apis" } else { "api" };
        let namespace = self.namespace.as_ref().map(|name| format!("/namespaces/{name}"));
        let namespace = namespace.unwrap_or_default();
        format!("/{root}/{version}{namespace}/{plural}/{}", self.name)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let namespace = self.namespace.as_ref().map(|name| format!("{name}/")).unwrap_or_default();
        write!(f, "{} {namespace}{}", self.kind.name(), self.name)
    }
}

/// One object as it is applied: all wanted fields, and no others.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Which one.
    pub id: Id,
    /// The object, with `apiVersion` and `kind`.
    pub fields: Value,
}

/// What agents are made with, in every cluster of a seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSettings {
    /// Their image. Without one no agents are made, and those that exist are left alone.
    pub image: Option<String>,
    /// Gateways as `portico agent --gateway` takes them. Without any, the agents of each cluster go to its
    /// external name.
    pub gateways: Vec<String>,
    /// The name in the gateways' certificate, if it is not the one they are reached by.
    pub server_name: Option<String>,
    /// The port of the gateways' tunnel listener, at the external name.
    pub tunnel_port: u16,
}

/// Where the agents of a cluster find their Konnectivity server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Konnectivity {
    /// There is none.
    Off,
    /// It has no NodePort yet.
    Pending,
    /// Here.
    At(String, u16),
}

impl Konnectivity {
    /// That of `cluster`. `node_port` is that of Service `konnectivity-server`, for strategies that have one.
    pub fn of(cluster: &Cluster, exposed: &ExposedCluster, node_port: Option<u16>) -> Self {
        let address = &exposed.spec.address;
        let switched_off = cluster.spec.cluster_network.konnectivity_enabled == Some(false);
        let unknown =
            runs_elsewhere(cluster) && cluster.metadata.annotation(KONNECTIVITY_ENDPOINTS).is_none();
        if switched_off || unknown {
            return Self::Off;
        }
        let host = &address.external_name;
        let (prefix, port) = match exposed.spec.expose_strategy {
            ExposeStrategy::Tunneling => (KONNECTIVITY_PREFIX, address.port),
            ExposeStrategy::NodePort | ExposeStrategy::LoadBalancer => ("", node_port),
        };
        match port {
            Some(port) if !host.is_empty() => Self::At(format!("{prefix}{host}"), port),
            _ => Self::Pending,
        }
    }
}

/// What the inside of a user cluster follows from.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// Strategy and address in force.
    pub exposed: &'a ExposedCluster,
    /// Whether the endpoints of Service `kubernetes` are kept at all.
    pub endpoints: bool,
    /// Where its Konnectivity server is.
    pub konnectivity: &'a Konnectivity,
    /// The kubeconfig without a user that `cluster-info` holds.
    pub cluster_info: &'a str,
    /// How agents are made.
    pub agents: &'a AgentSettings,
    /// CA certificates of the gateways' tunnel certificate in PEM; `None` for those of the agents' system.
    pub tunnel_ca: Option<&'a str>,
}

/// What should exist inside a user cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inside {
    /// What should exist, in the order in which it is needed.
    pub wanted: Vec<Object>,
    /// What should not, if Portico made it: what a former strategy left.
    pub unwanted: Vec<Id>,
    /// What is left as it is for now, and why.
    pub waiting: Vec<&'static str>,
    /// Whether it has node agents, which KKP's exclude.
    pub tunneling: bool,
}

/// What should exist inside a user cluster.
pub fn inside(facts: &Facts<'_>) -> Inside {
    let mut inside = Inside::default();
    agents(facts, &mut inside);
    konnectivity(facts, &mut inside);
    endpoints(facts, &mut inside);
    cluster_info(facts, &mut inside);
    inside
}

/// Comes before the endpoints, which lead to the agents.
fn agents(facts: &Facts<'_>, inside: &mut Inside) {
    let Some(tunnel) = facts.exposed.spec.tunnel else {
        inside.unwanted.extend(manifests::agent_ids());
        return;
    };
    inside.tunneling = true;
    match &facts.agents.image {
        None => inside.waiting.push("node agents: the operator has no --image to make them with"),
        Some(image) => {
            let namespace = facts.exposed.name().namespace();
            let fill = manifests::Agent {
                image,
                gateways: gateways(facts.exposed, facts.agents),
                server_name: facts.agents.server_name.as_deref(),
                ca: facts.tunnel_ca,
                namespace: &namespace,
                address: tunnel.agent_ip,
            };
            inside.wanted.extend(fill.objects());
        }
    }
}

/// The gateways that the node agents of a cluster go to, as `portico agent --gateway` takes them.
pub fn gateways(exposed: &ExposedCluster, agents: &AgentSettings) -> String {
    if agents.gateways.is_empty() {
        format!("{}:{}", exposed.spec.address.external_name, agents.tunnel_port)
    } else {
        agents.gateways.join(",")
    }
}

fn konnectivity(facts: &Facts<'_>, inside: &mut Inside) {
    match (facts.konnectivity, &facts.agents.image) {
        (Konnectivity::Off, _) => inside.unwanted.extend(manifests::konnectivity_ids()),
        (Konnectivity::Pending, _) => {
            inside.waiting.push("Konnectivity agents: Service konnectivity-server has no NodePort yet");
        }
        (_, None) => {
            inside.waiting.push("Konnectivity agents: the operator has no --image to make them with")
        }
        (Konnectivity::At(host, port), Some(image)) => {
            inside.wanted.extend(manifests::konnectivity(image, host, *port));
        }
    }
}

/// The endpoints of Service `kubernetes`: the agent on each node, or the address of the API server.
fn endpoints(facts: &Facts<'_>, inside: &mut Inside) {
    if !facts.endpoints {
        return;
    }
    let address = &facts.exposed.spec.address;
    let (ip, port) = match facts.exposed.spec.tunnel {
        Some(tunnel) => (Some(tunnel.agent_ip), Some(APISERVER_PORT)),
        None => (address.ip, address.port),
    };
    let (Some(ip), Some(port)) = (ip, port) else {
        inside.waiting.push("endpoints of Service kubernetes: the address of the cluster is not known yet");
        return;
    };
    let ports = json!([{"name": "https", "port": port, "protocol": "TCP"}]);
    let family = if IpAddr::is_ipv6(&ip) { "IPv6" } else { "IPv4" };
    // Otherwise a controller of the user cluster makes a second slice from them.
    let skip_mirror = json!({"endpointslice.kubernetes.io/skip-mirror": "true"});
    inside.wanted.push(object(
        id(Kind::Endpoints, "default", "kubernetes"),
        &skip_mirror,
        json!({"subsets": [{"addresses": [{"ip": ip}], "ports": ports}]}),
    ));
    inside.wanted.push(object(
        id(Kind::EndpointSlice, "default", "kubernetes"),
        &json!({"kubernetes.io/service-name": "kubernetes"}),
        json!({"addressType": family, "ports": ports,
            "endpoints": [{"addresses": [ip], "conditions": {"ready": true}}]}),
    ));
}

/// What a machine that joins reads without any credentials: where the API server is, and what signs its
/// certificate.
fn cluster_info(facts: &Facts<'_>, inside: &mut Inside) {
    let of = |kind| id(kind, "kube-public", "cluster-info");
    let none = json!({});
    let role = json!({"rules": [{"apiGroups": [""], "resources": ["configmaps"],
        "resourceNames": ["cluster-info"], "verbs": ["get"]}]});
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "cluster-info"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:anonymous"}]});
    let data = json!({"data": {"kubeconfig": facts.cluster_info}});
    inside.wanted.push(object(of(Kind::ConfigMap), &none, data));
    inside.wanted.push(object(of(Kind::Role), &none, role));
    inside.wanted.push(object(of(Kind::RoleBinding), &none, binding));
}

const fn id(kind: Kind, namespace: &'static str, name: &'static str) -> Id {
    Id { kind, namespace: Some(Cow::Borrowed(namespace)), name: Cow::Borrowed(name) }
}

/// An object with these labels, and those that everything has.
fn object(id: Id, labels: &Value, mut fields: Value) -> Object {
    fields["metadata"] = json!({"name": id.name, "namespace": id.namespace, "labels": labels});
    fields["apiVersion"] = id.kind.api_version().into();
    fields["kind"] = id.kind.name().into();
    managed(&mut fields);
    Object { id, fields }
}

/// Says who keeps an object: people find out why it comes back.
fn managed(fields: &mut Value) {
    let (key, value) = MANAGED_BY;
    fields["metadata"]["labels"][key] = value.into();
}

#[cfg(test)]
mod tests;
