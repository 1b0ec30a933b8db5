//! The agents' manifests of `deploy/`, with their blanks filled in.

use std::net::IpAddr;
use std::sync::LazyLock;

use portico_api::migration::NodeMoves;
use serde_json::{Value, json};

use super::{
    ATTEMPT_LABEL, Id, KONNECTIVITY_AGENT, KONNECTIVITY_AGENT_NEXT, Kind, Object, POD_LABEL, TURN_LABEL,
    managed,
};
use crate::services::{APISERVER, APISERVER_PORT};

/// The node agent.
static AGENT: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../../../../deploy/agent.yaml")));

/// The Konnectivity agent.
static KONNECTIVITY: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../../../../deploy/konnectivity/agent.yaml")));

/// The probe by which each node proves that it reaches a door.
static PROBE: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../../../../deploy/migration.yaml")));

/// What moves each node to another address.
static MOVE: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../../../../deploy/migration-nodes.yaml")));

/// The first container of a workload.
pub(super) const CONTAINER: &str = "/spec/template/spec/containers/0";

/// The first of those that run before it.
pub(super) const INIT_CONTAINER: &str = "/spec/template/spec/initContainers/0";

/// The parts that the manifest of the node agent leaves to its user.
pub(super) struct Agent<'a> {
    pub(super) image: &'a str,
    /// As `--gateway` takes them.
    pub(super) gateways: String,
    pub(super) server_name: Option<&'a str>,
    /// CA certificates in PEM; `None` for those of the system.
    pub(super) ca: Option<&'a str>,
    /// Namespace of the cluster on the seed.
    pub(super) namespace: &'a str,
    pub(super) address: IpAddr,
}

impl Agent<'_> {
    pub(super) fn objects(&self) -> Vec<Object> {
        let mut objects = AGENT.clone();
        for object in &mut objects {
            match object.id.kind {
                Kind::ConfigMap => {
                    object.fields["data"] = self.ca.map_or_else(|| json!({}), |ca| json!({"ca.crt": ca}))
                }
                Kind::DaemonSet => fill(object, CONTAINER, self.image, |arg| self.argument(arg)),
                _ => {}
            }
        }
        objects
    }

    /// What stands in the place of one argument.
    fn argument(&self, arg: &str) -> Vec<String> {
        let name = arg.split_once('=').map_or(arg, |(name, _)| name);
        match name {
            "--gateway" => {
                let server_name = self.server_name.map(|name| format!("--server-name={name}"));
                [format!("--gateway={}", self.gateways)].into_iter().chain(server_name).collect()
            }
            "--tls-ca" if self.ca.is_none() => Vec::new(),
            "--forward" => vec![format!(
                "--forward={APISERVER_PORT}={APISERVER}.{}.svc.cluster.local:443",
                self.namespace
            )],
            "--address" => vec![format!("--address={}", self.address)],
            _ => vec![arg.to_owned()],
        }
    }
}

/// The Konnectivity agent, of a server at this host and port.
pub(super) fn konnectivity(image: &str, host: &str, port: u16) -> Vec<Object> {
    let mut objects = KONNECTIVITY.clone();
    for object in objects.iter_mut().filter(|object| object.id.kind == Kind::Deployment) {
        fill(object, CONTAINER, image, |arg| {
            vec![match arg.split_once('=') {
                Some(("--proxy-server-host", _)) => format!("--proxy-server-host={host}"),
                Some(("--proxy-server-port", _)) => format!("--proxy-server-port={port}"),
                _ => arg.to_owned(),
            }]
        });
    }
    objects
}

/// A second set of Konnectivity agents, by another name and with pods of its own. Both sets share what is no
/// workload.
pub(super) fn next_konnectivity(image: &str, host: &str, port: u16) -> impl Iterator<Item = Object> {
    let workloads =
        konnectivity(image, host, port).into_iter().filter(|object| object.id == KONNECTIVITY_AGENT);
    workloads.map(|mut object| {
        object.id = KONNECTIVITY_AGENT_NEXT;
        object.fields["metadata"]["name"] = KONNECTIVITY_AGENT_NEXT.name.into();
        relabel(&mut object.fields, &KONNECTIVITY_AGENT_NEXT.name);
        object
    })
}

/// Gives another value to the label by which pods are found, wherever it is.
fn relabel(value: &mut Value, name: &str) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                if key == POD_LABEL { *value = name.into() } else { relabel(value, name) }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| relabel(value, name)),
        _ => {}
    }
}

/// The probe by which each node proves that it reaches all of these URLs, in an attempt by this name.
pub(super) fn probe(image: &str, urls: &[String], attempt: &str) -> Vec<Object> {
    on_each_node(&PROBE, image, attempt, |arg| match arg.starts_with("https://") {
        true => urls.to_vec(),
        false => vec![arg.to_owned()],
    })
}

/// How the nodes of a cluster are moved to another address.
pub(super) struct Moves<'a> {
    /// The URL for kubelets.
    pub(super) new: &'a str,
    /// The one that nothing on the node should use any more.
    pub(super) old: &'a str,
    /// Whether the pods do it, and what before, or only say whether it was done.
    pub(super) how: NodeMoves,
}

impl Moves<'_> {
    /// What does so, in an attempt by this name.
    pub(super) fn objects(&self, image: &str, attempt: &str) -> Vec<Object> {
        let mut objects = on_each_node(&MOVE, image, attempt, |arg| match arg {
            "--in-pod" if self.how == NodeMoves::Drained => vec![arg.to_owned(), "--drain".to_owned()],
            _ if arg.starts_with("--turn=") => vec![format!("--turn={TURN_LABEL}={attempt}")],
            _ if arg.starts_with("--server=") => vec![format!("--server={}", self.new)],
            _ if arg.starts_with("https://") => vec![self.old.to_owned()],
            _ => vec![arg.to_owned()],
        });
        for object in &mut objects {
            let pods = object.fields.pointer_mut("/spec/template/spec").and_then(Value::as_object_mut);
            if let Some(pods) = pods.filter(|_| self.how == NodeMoves::ByHand) {
                // Nothing needs to reach into the node then.
                for field in ["initContainers", "volumes", "hostPID"] {
                    pods.remove(field);
                }
            }
        }
        objects
    }
}

/// A workload of one pod on each node, which does something for a migration, in an attempt by this name.
fn on_each_node(
    manifest: &[Object],
    image: &str,
    attempt: &str,
    argument: impl Fn(&str) -> Vec<String>,
) -> Vec<Object> {
    let mut objects = manifest.to_vec();
    for object in &mut objects {
        for container in [CONTAINER, INIT_CONTAINER] {
            fill(object, container, image, &argument);
        }
        if let Some(labels) = object.fields.pointer_mut("/spec/template/metadata/labels") {
            labels[ATTEMPT_LABEL] = attempt.into();
        }
        let container = object.fields.pointer_mut(CONTAINER);
        if let Some(asked) = container.and_then(|it| it.pointer_mut("/readinessProbe/exec/command")) {
            *asked = arguments(asked, &argument);
        }
    }
    objects
}

/// What the node agent consists of. The DaemonSet first: without its pods nobody needs the rest.
pub(super) fn agent_ids() -> impl Iterator<Item = Id> {
    AGENT.iter().rev().map(|object| object.id.clone())
}

/// What the Konnectivity agent consists of.
pub(super) fn konnectivity_ids() -> impl Iterator<Item = Id> {
    KONNECTIVITY.iter().rev().map(|object| object.id.clone())
}

/// Puts image and arguments into the container at `pointer` of a workload, if it has that.
fn fill(object: &mut Object, pointer: &str, image: &str, argument: impl Fn(&str) -> Vec<String>) {
    let Some(container) = object.fields.pointer_mut(pointer) else { return };
    container["image"] = image.into();
    container["args"] = arguments(&container["args"], argument);
}

fn arguments(written: &Value, argument: impl Fn(&str) -> Vec<String>) -> Value {
    let written = written.as_array().into_iter().flatten();
    written.filter_map(Value::as_str).flat_map(argument).collect()
}

/// The objects of a manifest that was there when this was compiled, with the label of what Portico keeps.
pub fn manifest(text: &'static str) -> Vec<Object> {
    crate::manifest::objects(text)
        .filter_map(|mut fields| {
            managed(&mut fields);
            let text = |path: &str| fields.pointer(path).and_then(Value::as_str);
            let name = text("/metadata/name")?.to_owned().into();
            let namespace = text("/metadata/namespace").map(|name| name.to_owned().into());
            let id = Id { kind: Kind::named(text("/kind")?)?, namespace, name };
            Some(Object { id, fields })
        })
        .collect()
}
