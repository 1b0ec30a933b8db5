//! Programs as pods: labels, what rolls them, their security, where they may run.

use std::collections::BTreeMap;

use portico_api::hosting::{AntiAffinity, Layout};
use portico_api::setting::Setting;
use serde_json::{Map, Value, json};

use crate::facts::{CLUSTER, Facts};
use crate::program::{FileSource, Program, USER};
use crate::{config, program};

/// On a pod template: the content of a mounted Secret or ConfigMap, if its programs read that at their start
/// only. A change of it replaces the pods.
const CHECKSUM: &str = "checksum.portico.k8c.io/";

/// On a Cluster, copied to its pods: another value replaces them.
const LAST_RESTART: &str = "kubermatic.k8c.io/last-restart";

/// Where the pods of one program may run.
pub(crate) struct Placement<'a> {
    pub(crate) tolerations: &'a [Value],
    pub(crate) node_selector: Option<&'a BTreeMap<Box<str>, Box<str>>>,
    pub(crate) host: Option<AntiAffinity>,
    pub(crate) zone: Option<AntiAffinity>,
}

impl<'a> Placement<'a> {
    pub(crate) fn of(
        tolerations: &'a [Value],
        host: &Setting<AntiAffinity>,
        zone: &Setting<AntiAffinity>,
    ) -> Self {
        Self { tolerations, node_selector: None, host: host.get().copied(), zone: zone.get().copied() }
    }
}

/// A pod template. `before` runs to its end first. `sidecars` start in their order, each once the one before
/// has started. They end in the reverse order, after `programs`.
pub(crate) fn template(
    facts: &Facts<'_>,
    app: &str,
    (before, sidecars, programs): (Option<Program>, &[Program], &[Program]),
    placement: &Placement<'_>,
    volumes: Vec<Value>,
) -> Value {
    let all = || sidecars.iter().chain(programs);
    let mut labels = json!({"app": app, CLUSTER: facts.scope.cluster.metadata.name});
    if ![program::etcd::NAME, program::prometheus::NAME].contains(&app) {
        labels["version"] = json!(facts.version.to_string());
    }
    let mut metadata = json!({"labels": labels});
    let annotations = annotations(facts, all());
    if !annotations.is_empty() {
        metadata["annotations"] = Value::Object(annotations);
    }
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 60,
        "containers": programs.iter().map(|program| program.container(false)).collect::<Vec<_>>(),
        "volumes": all().filter_map(Program::volume).chain(volumes).collect::<Vec<_>>(),
    });
    let before = before.iter().map(|program| program.container(false));
    let first: Vec<Value> = before.chain(sidecars.iter().map(|program| program.container(true))).collect();
    if !first.is_empty() {
        spec["initContainers"] = json!(first);
    }
    let secrets = &facts.settings.pull_secrets;
    if !secrets.is_empty() {
        spec["imagePullSecrets"] = secrets.iter().map(|name| json!({"name": name})).collect();
    }
    set_placement(&mut spec, facts, app, placement);
    json!({"metadata": metadata, "spec": spec})
}

fn annotations<'a>(facts: &Facts<'_>, programs: impl Iterator<Item = &'a Program>) -> Map<String, Value> {
    let mut annotations = Map::new();
    for holder in programs.flat_map(Program::holders) {
        let digest = match holder {
            FileSource::Secret(name) => facts.digests.get(name).cloned(),
            // The API server reads its identity providers again.
            FileSource::ConfigMap(name) if name == config::AUTHENTICATION => None,
            FileSource::ConfigMap(name) => facts.config_digest(name),
        };
        if let Some(digest) = digest {
            annotations.insert(format!("{CHECKSUM}{}", holder.name()), json!(digest));
        }
    }
    if let Some(time) = facts.scope.cluster.metadata.annotation(LAST_RESTART) {
        annotations.insert(LAST_RESTART.to_owned(), json!(time));
    }
    annotations
}

fn set_placement(spec: &mut Value, facts: &Facts<'_>, app: &str, placement: &Placement<'_>) {
    if !placement.tolerations.is_empty() {
        spec["tolerations"] = json!(placement.tolerations);
    }
    if let Some(selector) = placement.node_selector.filter(|selector| !selector.is_empty()) {
        spec["nodeSelector"] = json!(selector);
    }
    // One pod has nobody to avoid.
    if facts.layout == Layout::Compact {
        return;
    }
    let labels = json!({"matchLabels": {"app": app, CLUSTER: facts.scope.cluster.metadata.name}});
    let (mut preferred, mut required) = (Vec::new(), Vec::new());
    for (key, strength, weight) in
        [("kubernetes.io/hostname", placement.host, 100), ("topology.kubernetes.io/zone", placement.zone, 10)]
    {
        let term = json!({"labelSelector": labels, "topologyKey": key});
        match strength {
            Some(AntiAffinity::Required) => required.push(term),
            Some(AntiAffinity::Preferred) | None => {
                preferred.push(json!({"weight": weight, "podAffinityTerm": term}));
            }
        }
    }
    let mut rules = Map::new();
    for (how, terms) in [
        ("preferredDuringSchedulingIgnoredDuringExecution", preferred),
        ("requiredDuringSchedulingIgnoredDuringExecution", required),
    ] {
        if !terms.is_empty() {
            rules.insert(how.to_owned(), json!(terms));
        }
    }
    spec["affinity"] = json!({"podAntiAffinity": rules});
}
