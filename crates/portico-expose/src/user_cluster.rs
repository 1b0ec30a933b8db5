//! Cluster → what should exist inside the user cluster: node agents under the strategy Tunneling,
//! Konnectivity agents, the endpoints of Service `kubernetes`, and `cluster-info`.
//!
//! While a cluster migrates between strategies, the objects of its second way in are there too, and so are
//! the probes that prove it. The second door counts until it is being closed ([`crate::migration`]).
//!
//! The agents are the manifests of `deploy/`, with their blanks filled in, so that both ways to install them
//! mean the same. An object that cannot be decided on yet is left as it is: neither wanted nor unwanted.

use std::borrow::Cow;
use std::net::IpAddr;

use portico_api::annotations::KONNECTIVITY_ENDPOINTS;
use portico_api::cluster::Cluster;
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_api::exposed_cluster::{ExposedCluster, Migration, MigrationState};
use portico_api::migration::NodeMoves;
use serde_json::{Value, json};

use crate::exposure::MANAGED_BY;
use crate::hosts::bracketed;
use crate::services::{APISERVER_PORT, runs_elsewhere};
use crate::strategy;

mod manifests;

pub use manifests::manifest;

/// The DaemonSet of KKP's agent, which holds the same address on each node.
pub const ENVOY_AGENT: Id = id(Kind::DaemonSet, "kube-system", "envoy-agent");

/// The DaemonSet of Portico's agent.
pub const NODE_AGENT: Id = id(Kind::DaemonSet, "kube-system", "portico-agent");

/// The Konnectivity agents by the first door.
pub const KONNECTIVITY_AGENT: Id = id(Kind::Deployment, "kube-system", "konnectivity-agent");

/// The Konnectivity agents by the door that is about to be published. They stay until those of
/// [`KONNECTIVITY_AGENT`] have followed.
pub const KONNECTIVITY_AGENT_NEXT: Id = id(Kind::Deployment, "kube-system", "konnectivity-agent-next");

/// The DaemonSet of a migration. Before the second door is published, its pods are ready where the node
/// reaches that door. Later they are ready where the node has left the former one.
pub const NODE_PROBE: Id = id(Kind::DaemonSet, "kube-system", "portico-migration");

/// The label by which the pods of a workload of Portico's manifests are found. Its value is the workload's
/// name.
pub const POD_LABEL: &str = "app.kubernetes.io/name";

/// The label that tells the pods of a probe from those of an earlier one. A DaemonSet that was removed and
/// made anew counts its changes from the beginning. Pods of the former one may still be there.
pub const ATTEMPT_LABEL: &str = "portico.k8c.io/attempt";

/// The label of a Node whose kubelet may be moved. Its value is that of [`ATTEMPT_LABEL`] of the pod that
/// does so.
pub const TURN_LABEL: &str = "portico.k8c.io/moves";

/// The reason of a cluster of which the operator has no kubeconfig: its inside is left alone.
pub const NO_KUBECONFIG: &str = "NoKubeconfig";

/// The reason of a cluster whose kubeconfig cannot be used.
pub const BAD_KUBECONFIG: &str = "BadKubeconfig";

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

/// The settings of agents, in every cluster of a seed.
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
    /// Where the agents of `cluster` find their Konnectivity server by the door `exposed`. `node_port` is
    /// that of Service `konnectivity-server`, for strategies that have one.
    pub fn of(cluster: &Cluster, exposed: &ExposedCluster, node_port: Option<u16>) -> Self {
        let address = &exposed.spec.address;
        let switched_off = cluster.spec.cluster_network.konnectivity_enabled == Some(false);
        let unknown =
            runs_elsewhere(cluster) && cluster.metadata.annotation(KONNECTIVITY_ENDPOINTS).is_none();
        if switched_off || unknown {
            return Self::Off;
        }
        let host = &address.external_name;
        let (prefix, port) = strategy::of(exposed.spec.expose_strategy).konnectivity(address, node_port);
        match port {
            Some(port) if !host.is_empty() => Self::At(format!("{prefix}{host}"), port),
            _ => Self::Pending,
        }
    }
}

/// The inputs for the inside of a user cluster.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The cluster by its first door: strategy and address in force, and how far it migrates.
    pub exposed: &'a ExposedCluster,
    /// The cluster by its second door, while it migrates.
    pub second: Option<&'a ExposedCluster>,
    /// Whether the endpoints of Service `kubernetes` are kept at all.
    pub endpoints: bool,
    /// Where its Konnectivity server is, by the first door.
    pub konnectivity: &'a Konnectivity,
    /// Where its Konnectivity server is, by the second door.
    pub next: Option<&'a Konnectivity>,
    /// The kubeconfig without a user that `cluster-info` holds.
    pub cluster_info: &'a str,
    /// How agents are made.
    pub agents: &'a AgentSettings,
    /// How nodes come to the first door, while it migrates.
    pub nodes: NodeMoves,
    /// CA certificates of the gateways' tunnel certificate in PEM; `None` for those of the agents' system.
    pub tunnel_ca: Option<&'a str>,
}

/// What should exist inside a user cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inside {
    /// The objects that should exist, in the order in which they are needed.
    pub wanted: Vec<Object>,
    /// What should not, if Portico made it: what a former strategy left.
    pub unwanted: Vec<Id>,
    /// What is left as it is for now, and why.
    pub waiting: Vec<&'static str>,
    /// Whether it has node agents, which KKP's exclude.
    pub tunneling: bool,
}

impl<'a> Facts<'a> {
    /// The doors that are open, the first one first.
    fn doors(&self) -> impl Iterator<Item = &'a ExposedCluster> + use<'a> {
        [Some(self.exposed), self.second.filter(|_| self.state() != Some(MigrationState::Closing))]
            .into_iter()
            .flatten()
    }

    /// What is under way, while it migrates.
    fn state(&self) -> Option<MigrationState> {
        self.exposed.spec.migration.as_ref().map(|migration| migration.state)
    }
}

/// What should exist inside a user cluster.
pub fn inside(facts: &Facts<'_>) -> Inside {
    let mut inside = Inside::default();
    agents(facts, &mut inside);
    konnectivity(facts, &mut inside);
    next_konnectivity(facts, &mut inside);
    on_nodes(facts, &mut inside);
    endpoints(facts, &mut inside);
    cluster_info(facts, &mut inside);
    inside
}

/// The objects inside a cluster for a second door alone, once `exposed` is its first one.
pub fn of_second_door(exposed: &ExposedCluster) -> Vec<Id> {
    let agents = exposed.spec.tunnel.is_none().then(manifests::agent_ids);
    let others = [KONNECTIVITY_AGENT_NEXT, NODE_PROBE];
    agents.into_iter().flatten().chain(others).collect()
}

/// Comes before the endpoints, which lead to the agents.
fn agents(facts: &Facts<'_>, inside: &mut Inside) {
    // Hardly any cluster goes from tunnels to tunnels, and both doors have one address then.
    let door = facts.doors().find_map(|door| Some((door, door.spec.tunnel?)));
    let Some((door, tunnel)) = door else {
        inside.unwanted.extend(manifests::agent_ids());
        return;
    };
    inside.tunneling = true;
    let gateways = gateways(door, facts.agents);
    match &facts.agents.image {
        None => inside.waiting.push("node agents: the operator has no --image to make them with"),
        Some(_) if gateways.is_empty() => {
            inside.waiting.push("node agents: the name of the gateways is not known yet");
        }
        Some(image) => {
            let namespace = door.name().namespace();
            let fill = manifests::Agent {
                image,
                gateways,
                server_name: facts.agents.server_name.as_deref(),
                ca: facts.tunnel_ca,
                namespace: &namespace,
                address: tunnel.agent_ip,
            };
            inside.wanted.extend(fill.objects());
        }
    }
}

/// The gateways that the node agents of a cluster go to, as `portico agent --gateway` takes them. Empty if
/// they are found by the external name of the cluster, and that is not known.
pub fn gateways(exposed: &ExposedCluster, agents: &AgentSettings) -> String {
    let name = &exposed.spec.address.external_name;
    match &agents.gateways[..] {
        [] if name.is_empty() => String::new(),
        [] => format!("{name}:{}", agents.tunnel_port),
        gateways => gateways.join(","),
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

/// Konnectivity by the door that is tried, beside that of the first door. When the two change places, they
/// keep their server, and carry everything while the others follow.
fn next_konnectivity(facts: &Facts<'_>, inside: &mut Inside) {
    let next = match facts.state() {
        Some(MigrationState::Proving) => facts.next,
        Some(MigrationState::Moving) => Some(facts.konnectivity),
        _ => None,
    };
    match (next, &facts.agents.image) {
        (None | Some(Konnectivity::Off), _) => inside.unwanted.push(KONNECTIVITY_AGENT_NEXT),
        (Some(Konnectivity::Pending), _) => {
            inside.waiting.push("Konnectivity agents of the other door: it has no address or port yet");
        }
        (_, None) => {
            inside.waiting.push("Konnectivity agents of the other door: the operator has no --image")
        }
        (Some(Konnectivity::At(host, port)), Some(image)) => {
            inside.wanted.extend(manifests::next_konnectivity(image, host, *port));
        }
    }
}

/// The objects that prove on every node that it reaches the second door. Later ones lead its kubelet to the
/// first door.
fn on_nodes(facts: &Facts<'_>, inside: &mut Inside) {
    use MigrationState::{Closing, Moving, MovingNodes, Opening, Proving, Quieting};

    let (Some(migration), Some(second)) = (&facts.exposed.spec.migration, facts.second) else {
        return inside.unwanted.push(NODE_PROBE);
    };
    let url = &*second.spec.address.url;
    let (image, attempt) = (facts.agents.image.as_deref(), attempt(migration));
    match (migration.state, image) {
        (Opening | Moving | Closing, _) => inside.unwanted.push(NODE_PROBE),
        // As they are: a node that was away follows as long as both doors are open.
        (Quieting, _) => {}
        // Nothing can use a door without an address.
        (MovingNodes, _) if url.is_empty() => inside.unwanted.push(NODE_PROBE),
        (Proving, _) if url.is_empty() => {
            inside.waiting.push("the probe of the second door: its address is not known yet");
        }
        (Proving | MovingNodes, None) => {
            inside.waiting.push("the pods of the migration on nodes: the operator has no --image");
        }
        (Proving, Some(image)) => {
            inside.wanted.extend(manifests::probe(image, &ways_of_nodes(second), &attempt));
        }
        (MovingNodes, Some(image)) => {
            let new = &*facts.exposed.spec.address.url;
            let moves = manifests::Moves { new, old: url, how: facts.nodes };
            inside.wanted.extend(moves.objects(image, &attempt));
        }
    }
}

/// The value of [`ATTEMPT_LABEL`] in this state of a migration. No state is entered twice at the same time.
pub fn attempt(migration: &Migration) -> String {
    migration.since.as_nanosecond().unsigned_abs().to_string()
}

/// The URLs by which the nodes of a cluster reach its API server: kubelets by its address, pods where there
/// are agents by theirs.
fn ways_of_nodes(exposed: &ExposedCluster) -> Vec<String> {
    let agents = exposed
        .spec
        .tunnel
        .map(|tunnel| format!("https://{}:{APISERVER_PORT}", bracketed(&tunnel.agent_ip.to_string())));
    [exposed.spec.address.url.to_string()].into_iter().chain(agents).collect()
}

/// The endpoints of Service `kubernetes`: the agent on each node, or the address of the API server. They are
/// those of the first door. Agents of the second one stay until it is closed, so that no endpoint leads to
/// nothing.
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
        &json!({SERVICE_NAME_LABEL: "kubernetes"}),
        json!({"addressType": family, "ports": ports,
            "endpoints": [{"addresses": [ip], "conditions": {"ready": true}}]}),
    ));
}

/// The object that a joining machine reads without any credentials. It has the address of the API server, and
/// the authority of its certificate.
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

/// Says that Portico keeps an object: people find out why it comes back.
fn managed(fields: &mut Value) {
    let (key, value) = MANAGED_BY;
    fields["metadata"]["labels"][key] = value.into();
}

#[cfg(test)]
mod tests;
