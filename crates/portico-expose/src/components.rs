//! Seed → the objects of its gateway, as Portico's operator applies them.
//!
//! `deploy/gateway.yaml` and `deploy/network-policy.yaml` are the one source. The operator applies them with
//! the Seed's settings and its own flags put in. An administrator may apply the same files by hand. The front
//! Service is special: the controller of front Services keeps its ports and the Seed's settings on it. These
//! fields are in the object that is created. They are not among the fields that are applied later.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use ipnet::IpNet;
use portico_api::annotations::EXPOSE_NAMESPACED;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::ObjectKey;
use portico_api::port_range::PortRange;
use portico_api::problem::Problem;
use portico_api::seed::{Keepalive, Resources, Seed};
use serde_json::{Value, json};
use thiserror::Error;

use crate::exposure::{MANAGED_BY, Wanted};
use crate::front::TUNNEL_PORT;
use crate::inputs::Ingress;
use crate::load_balancer::{LoadBalancerSettings, SettingsError, of};
use crate::manifest;
use crate::validate::{self, GATEWAY_SETTING};

const GATEWAY: &str = include_str!("../../../deploy/gateway.yaml");
const NETWORK_POLICY: &str = include_str!("../../../deploy/network-policy.yaml");

/// The objects of both.
static TEMPLATES: LazyLock<Vec<Value>> =
    LazyLock::new(|| manifest::objects(GATEWAY).chain(manifest::objects(NETWORK_POLICY)).collect());

/// The name of all objects but the front Service.
const NAME: &str = portico_api::names::GATEWAY;

/// Arguments of a gateway that serves tunnels. The certificate is in the Secret that the Deployment mounts.
const TUNNEL_ARGUMENTS: [&str; 3] =
    ["--tunnel-tls-cert=/tls/tls.crt", "--tunnel-tls-key=/tls/tls.key", "--tunnel-token-review"];

/// Most keep-alive probes that the kernel sends.
const MOST_PROBES: u32 = 127;

/// One object of the gateway, by its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// What the pods are.
    ServiceAccount,
    /// What they may read.
    ClusterRole,
    /// Gives the pods the rights of the ClusterRole.
    ClusterRoleBinding,
    /// What may reach their admin listener.
    NetworkPolicy,
    /// How many may be evicted at a time.
    PodDisruptionBudget,
    /// The pods.
    Deployment,
    /// The front Service.
    Service,
}

impl Part {
    /// All of them, in the order in which they are made.
    pub const ALL: [Self; 7] = [
        Self::ServiceAccount,
        Self::ClusterRole,
        Self::ClusterRoleBinding,
        Self::NetworkPolicy,
        Self::PodDisruptionBudget,
        Self::Deployment,
        Self::Service,
    ];

    /// The kind of the object.
    pub fn kind(self) -> &'static str {
        match self {
            Self::ServiceAccount => "ServiceAccount",
            Self::ClusterRole => "ClusterRole",
            Self::ClusterRoleBinding => "ClusterRoleBinding",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::PodDisruptionBudget => "PodDisruptionBudget",
            Self::Deployment => "Deployment",
            Self::Service => "Service",
        }
    }

    /// The object's namespace, empty for one without, and its name.
    pub fn key(self, front: &ObjectKey) -> ObjectKey {
        match self {
            Self::ClusterRole | Self::ClusterRoleBinding => ObjectKey::new("", NAME),
            Self::Service => front.clone(),
            _ => ObjectKey::new(&front.namespace, NAME),
        }
    }

    /// Whether a gateway with these settings has it.
    pub fn is_wanted(self, settings: &GatewaySettings) -> bool {
        self != Self::NetworkPolicy || !settings.admin_from.is_empty()
    }

    /// The object as the manifest has it.
    fn template(self) -> Value {
        // A test finds every kind.
        TEMPLATES.iter().find(|object| object["kind"] == self.kind()).cloned().unwrap_or_default()
    }
}

/// What the operator's flags say about the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewaySettings {
    /// The front Service. The gateway is in its namespace.
    pub front: ObjectKey,
    /// The image of the gateway.
    pub image: String,
    /// The annotation by which a Service asks to be exposed.
    pub expose_annotation: String,
    /// Further arguments of the gateway.
    pub arguments: Vec<String>,
    /// What may reach the gateway's admin listener. Without any there is no NetworkPolicy.
    pub admin_from: Vec<AdminPeer>,
}

/// What may reach an admin listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminPeer {
    /// These addresses.
    Network(IpNet),
    /// The pods of the namespace of this name.
    Namespace(String),
}

/// A text that is no [`AdminPeer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("give a network such as 192.0.2.0/24, an address, or the name of a namespace")]
pub struct NoAdminPeer;

impl FromStr for AdminPeer {
    type Err = NoAdminPeer;

    fn from_str(text: &str) -> Result<Self, NoAdminPeer> {
        if let Ok(network) = text.parse::<IpNet>() {
            return Ok(Self::Network(network.trunc()));
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Network(address.into()));
        }
        let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let valid = (1..=63).contains(&text.len()) && text.chars().all(is_label);
        if valid { Ok(Self::Namespace(text.to_owned())) } else { Err(NoAdminPeer) }
    }
}

impl AdminPeer {
    fn to_value(&self) -> Value {
        match self {
            Self::Network(network) => json!({"ipBlock": {"cidr": network}}),
            Self::Namespace(name) => {
                json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}})
            }
        }
    }
}

/// The objects that should exist for the gateway of a Seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Components {
    /// The objects, in the order in which they are made. The front Service is here with only the fields that
    /// stay.
    pub objects: Vec<(Part, Wanted)>,
    /// The front Service as it is created.
    pub front: Value,
}

/// The settings of the load balancer of `seed`, if a gateway can be made as it asks for.
///
/// # Errors
/// Everything wrong with the settings of the Seed, if they must not be used as written. What exists must stay
/// then.
pub fn usable(seed: &Seed) -> Result<LoadBalancerSettings, Refused> {
    let verdict = validate::seed(seed);
    let mut problems = verdict.problems;
    problems.retain(|problem| verdict.refused || problem.reason == GATEWAY_SETTING);
    if problems.is_empty() { Ok(of(seed)?) } else { Err(Refused::Problems(problems)) }
}

/// The objects of the gateway of `seed`. Its load balancer has the settings that [`usable`] returned.
/// `tunnel` says whether its tunnel listener has a certificate.
pub fn components(
    seed: &Seed,
    load_balancer: &LoadBalancerSettings,
    configuration: &KubermaticConfiguration,
    settings: &GatewaySettings,
    tunnel: bool,
) -> Components {
    let mut front = Value::Null;
    let mut objects = Vec::new();
    for part in Part::ALL.into_iter().filter(|part| part.is_wanted(settings)) {
        let mut object = placed(part, settings);
        match part {
            Part::Deployment => shape_deployment(&mut object, seed, settings, tunnel),
            Part::NetworkPolicy => shape_policy(&mut object, configuration, settings),
            Part::Service => {
                front = created(object.clone(), load_balancer);
                if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
                    spec.remove("ports");
                }
            }
            _ => {}
        }
        let name = part.key(&settings.front).name.to_string();
        objects.push((part, Wanted { name, fields: object }));
    }
    Components { objects, front }
}

/// Why there are no components: the Seed must not be used as written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    /// Something is wrong with the Seed.
    #[error("{}", first(.0))]
    Problems(Vec<Problem>),
    /// The settings of its load balancer are not known.
    #[error(transparent)]
    LoadBalancer(#[from] SettingsError),
}

fn first(problems: &[Problem]) -> String {
    problems.first().map(ToString::to_string).unwrap_or_default()
}

/// The names by which agents reach the gateway's tunnel listener. Each Seed has a wildcard for the names of
/// its clusters. Further names are those of the front Service, and of its load balancer. Host names and
/// addresses.
pub fn tunnel_hosts<S: AsRef<Seed>>(
    seeds: &[S],
    configuration: &KubermaticConfiguration,
    front: &ObjectKey,
    ingress: &[Ingress],
) -> BTreeSet<String> {
    let ObjectKey { namespace, name } = front;
    let service = format!("{name}.{namespace}");
    let mut hosts = BTreeSet::from([format!("{service}.svc"), format!("{service}.svc.cluster.local")]);
    hosts.insert(service);
    let domain = &configuration.spec.ingress.domain;
    if !domain.is_empty() {
        hosts.extend(seeds.iter().map(|seed| format!("*.{}.{domain}", seed.as_ref().dns_label())));
    }
    for Ingress { ip, hostname } in ingress {
        hosts.extend(ip.map(|ip| ip.to_string()));
        hosts.extend((!hostname.is_empty()).then(|| hostname.to_string()));
    }
    hosts
}

/// The object of the manifest, in the namespace of the front Service.
fn placed(part: Part, settings: &GatewaySettings) -> Value {
    let mut object = part.template();
    let key = part.key(&settings.front);
    let meta = &mut object["metadata"];
    meta["name"] = json!(key.name);
    if !key.namespace.is_empty() {
        meta["namespace"] = json!(key.namespace);
    }
    meta["labels"][MANAGED_BY.0] = json!(MANAGED_BY.1);
    for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
        subject["namespace"] = json!(settings.front.namespace);
    }
    object
}

fn shape_deployment(object: &mut Value, seed: &Seed, settings: &GatewaySettings, tunnel: bool) {
    let proxy = &seed.spec.nodeport_proxy.envoy;
    if let Some(replicas) = proxy.replicas.get() {
        object["spec"]["replicas"] = json!(replicas);
    }
    let Some(container) = object.pointer_mut("/spec/template/spec/containers/0") else { return };
    container["image"] = json!(settings.image);
    let expose = [&*settings.expose_annotation, EXPOSE_NAMESPACED];
    let mut arguments: Vec<String> =
        expose.iter().map(|annotation| format!("--expose-annotation={annotation}")).collect();
    if tunnel {
        arguments.extend(TUNNEL_ARGUMENTS.map(str::to_owned));
        if let Some(ports) = container["ports"].as_array_mut() {
            ports.push(json!({"name": "tunnel", "containerPort": TUNNEL_PORT}));
        }
    }
    arguments.extend(connection_arguments(seed));
    arguments.extend(settings.arguments.iter().cloned());
    if let Some(list) = container["args"].as_array_mut() {
        list.extend(arguments.into_iter().map(Value::from));
    }
    let Resources { requests, limits } = &proxy.resources;
    for (what, quantities) in [("requests", requests), ("limits", limits)] {
        for (name, quantity) in quantities {
            // The API server keeps quantities as text.
            let text = quantity.as_str().map_or_else(|| quantity.to_string(), str::to_owned);
            container["resources"][what][&**name] = json!(text);
        }
    }
}

/// The Seed's connection settings as flags. A gateway reads them once, at its start: as arguments a change of
/// them is a rolling update, which cuts nothing.
fn connection_arguments(seed: &Seed) -> Vec<String> {
    let timeouts = seed.spec.nodeport_proxy.envoy.connection_settings.effective();
    let mut arguments = Vec::new();
    let mut add = |flag: &str, time: Option<Duration>| {
        arguments.extend(time.map(|time| format!("--{flag}={}ms", time.as_millis())));
    };
    add("sni-idle-timeout", timeouts.sni_idle);
    add("tunnel-connection-idle-timeout", timeouts.tunnel_connection_idle);
    add("tunnel-stream-idle-timeout", timeouts.tunnel_stream_idle);
    let sides = [("downstream", timeouts.downstream_keepalive), ("upstream", timeouts.upstream_keepalive)];
    for (side, keepalive) in sides {
        let Keepalive { time, interval, .. } = keepalive.unwrap_or_default();
        add(&format!("{side}-keepalive-time"), time);
        add(&format!("{side}-keepalive-interval"), interval);
    }
    for (side, keepalive) in sides {
        let probes = keepalive.and_then(|keepalive| keepalive.probes);
        let probes = probes.map(|probes| probes.min(MOST_PROBES));
        arguments.extend(probes.map(|probes| format!("--{side}-keepalive-probes={probes}")));
    }
    arguments
}

fn shape_policy(object: &mut Value, configuration: &KubermaticConfiguration, settings: &GatewaySettings) {
    let range = configuration.spec.user_cluster.node_port_range.get().copied();
    let range = range.unwrap_or(PortRange::NODE_PORTS);
    if let Some(ports) = object.pointer_mut("/spec/ingress/0/ports/2") {
        ports["port"] = json!(range.first());
        ports["endPort"] = json!(range.last());
    }
    if let Some(from) = object.pointer_mut("/spec/ingress/1/from") {
        *from = settings.admin_from.iter().map(AdminPeer::to_value).chain([operator_pods()]).collect();
    }
}

/// The operator beside the gateway, which asks what that routes while a cluster migrates.
fn operator_pods() -> Value {
    json!({"podSelector": {"matchLabels": {"app.kubernetes.io/name": "portico-operator"}}})
}

/// The front Service with the settings of the Seed: a load balancer is restricted before it has clients.
fn created(mut object: Value, settings: &LoadBalancerSettings) -> Value {
    if !settings.annotations.is_empty() {
        object["metadata"]["annotations"] = json!(settings.annotations);
    }
    let spec = &mut object["spec"];
    if !settings.source_ranges.is_empty() {
        spec["loadBalancerSourceRanges"] = json!(settings.source_ranges);
    }
    if !settings.ip_family_policy.is_empty() {
        spec["ipFamilyPolicy"] = json!(settings.ip_family_policy);
    }
    if !settings.ip_families.is_empty() {
        spec["ipFamilies"] = json!(settings.ip_families);
    }
    object
}

#[cfg(test)]
mod tests;
