//! The programs of a control plane, one file each: arguments, files, ports, probes, resources.
//!
//! A program asks for a file by the Secret or ConfigMap that holds it ([`Program::file`]) and gets its path.
//! So the mounted files are those that are used. Of an authority only its certificate is mounted where
//! nothing signs.

pub(crate) mod api_server;
pub(crate) mod controller_manager;
pub(crate) mod etcd;
pub(crate) mod konnectivity;
pub(crate) mod prometheus;
pub(crate) mod scheduler;

use std::collections::{BTreeMap, BTreeSet};

use portico_api::hosting::{Layout, PodSettings};
use portico_api::seed::Resources;
use portico_pki::inventory::{CLIENT_CERTIFICATE, CLIENT_KEY, KUBECONFIG_OF_FILES};
use serde_json::{Value, json};

use crate::facts::Facts;

/// Where a program finds its files, each at `SECRET/KEY` below it.
const FILES: &str = "/etc/kubernetes";

/// Where etcd has its volume.
pub(crate) const DATA_FOLDER: &str = "/var/lib/etcd";

/// The user of all programs, as in Portico's own images.
pub(crate) const USER: u32 = 65_532;

/// A Secret or ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileSource {
    Secret(String),
    ConfigMap(String),
}

impl FileSource {
    pub(crate) fn secret(name: &str) -> Self {
        Self::Secret(name.to_owned())
    }

    pub(crate) fn config(name: &str) -> Self {
        Self::ConfigMap(name.to_owned())
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Secret(name) | Self::ConfigMap(name) => name,
        }
    }
}

/// A container, before it is one.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    image: String,
    command: &'static [&'static str],
    args: Vec<String>,
    env: Vec<Value>,
    ports: Vec<(&'static str, u16)>,
    files: BTreeSet<(FileSource, String)>,
    mounts: Vec<(&'static str, &'static str)>,
    /// Volumes that another container writes.
    read_mounts: Vec<(&'static str, &'static str)>,
    startup: Option<Value>,
    liveness: Value,
    readiness: Option<Value>,
    resources: Value,
    /// The program has a file capability, without which it cannot even be started.
    binds_low_ports: bool,
}

impl Program {
    fn new(name: &'static str, image: String, command: &'static [&'static str]) -> Self {
        Self {
            name,
            image,
            command,
            args: Vec::new(),
            env: Vec::new(),
            ports: Vec::new(),
            files: BTreeSet::new(),
            mounts: Vec::new(),
            read_mounts: Vec::new(),
            startup: None,
            liveness: Value::Null,
            readiness: None,
            resources: Value::Null,
            binds_low_ports: false,
        }
    }

    /// In one pod of many on a seed a Go program takes a sixth less memory, for a little CPU.
    fn small_heap(&mut self, layout: Layout) {
        if layout == Layout::Compact {
            self.env.push(json!({"name": "GOGC", "value": "50"}));
        }
    }

    fn arg(&mut self, flag: &str, value: impl std::fmt::Display) {
        self.args.push(format!("--{flag}={value}"));
    }

    /// The path of a key of a Secret or ConfigMap.
    fn file(&mut self, holder: FileSource, key: &str) -> String {
        let path = format!("{FILES}/{}/{key}", holder.name());
        self.files.insert((holder, key.to_owned()));
        path
    }

    /// An argument that is such a path.
    fn arg_file(&mut self, flag: &str, holder: FileSource, key: &str) {
        let path = self.file(holder, key);
        self.arg(flag, path);
    }

    /// An argument that is a file of a Secret.
    fn arg_secret(&mut self, flag: &str, secret: &str, key: &str) {
        self.arg_file(flag, FileSource::secret(secret), key);
    }

    /// Arguments that are the kubeconfig in a Secret, with the certificate and the key that it names.
    fn arg_kubeconfig(&mut self, flags: &[&str], secret: &str) {
        for flag in flags {
            self.arg_secret(flag, secret, KUBECONFIG_OF_FILES);
        }
        for key in [CLIENT_CERTIFICATE, CLIENT_KEY] {
            self.file(FileSource::secret(secret), key);
        }
    }

    /// What it reads.
    pub(crate) fn holders(&self) -> BTreeSet<&FileSource> {
        self.files.iter().map(|(holder, _)| holder).collect()
    }

    /// As a container of a pod; `sidecar` if others wait for it to have started, and end before it.
    pub(crate) fn container(&self, sidecar: bool) -> Value {
        let mut mounts: Vec<Value> =
            self.mounts.iter().map(|(name, path)| json!({"name": name, "mountPath": path})).collect();
        mounts.extend(
            self.read_mounts
                .iter()
                .map(|(name, path)| json!({"name": name, "mountPath": path, "readOnly": true})),
        );
        if !self.files.is_empty() {
            mounts.push(json!({"name": self.volume_name(), "mountPath": FILES, "readOnly": true}));
        }
        let ports = self.ports.iter().map(|(name, port)| json!({"name": name, "containerPort": port}));
        let mut capabilities = json!({"drop": ["ALL"]});
        if self.binds_low_ports {
            capabilities["add"] = json!(["NET_BIND_SERVICE"]);
        }
        let mut container = json!({
            "name": self.name,
            "image": self.image,
            "args": self.args,
            "resources": self.resources,
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": capabilities,
            },
            "volumeMounts": mounts,
        });
        let optional = [
            ("ports", (!self.ports.is_empty()).then(|| ports.collect())),
            ("livenessProbe", (!self.liveness.is_null()).then(|| self.liveness.clone())),
            ("command", (!self.command.is_empty()).then(|| json!(self.command))),
            ("env", (!self.env.is_empty()).then(|| json!(self.env))),
            ("startupProbe", self.startup.clone()),
            ("readinessProbe", self.readiness.clone()),
            ("restartPolicy", sidecar.then(|| json!("Always"))),
        ];
        for (field, value) in optional {
            if let Some(value) = value {
                container[field] = value;
            }
        }
        container
    }

    /// The volume with its files, and no others.
    pub(crate) fn volume(&self) -> Option<Value> {
        let sources: Vec<Value> = self.holders().into_iter().map(|holder| self.source(holder)).collect();
        let projected = json!({"defaultMode": 0o440, "sources": sources});
        (!sources.is_empty()).then(|| json!({"name": self.volume_name(), "projected": projected}))
    }

    fn source(&self, holder: &FileSource) -> Value {
        let keys = self.files.iter().filter(|(found, _)| found == holder).map(|(_, key)| key);
        let item = |key| json!({"key": key, "path": format!("{}/{key}", holder.name())});
        let files = json!({"name": holder.name(), "items": keys.map(item).collect::<Vec<_>>()});
        match holder {
            FileSource::Secret(_) => json!({"secret": files}),
            FileSource::ConfigMap(_) => json!({"configMap": files}),
        }
    }

    fn volume_name(&self) -> String {
        format!("{}-files", self.name)
    }
}

/// The name of the pod, for arguments.
fn pod_name() -> Value {
    json!({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
}

/// Readiness of a program with a pod of its own. In a pod with the API server that one alone decides:
/// without a scheduler, users still reach their cluster.
fn readiness(facts: &Facts<'_>, probe: Value) -> Option<Value> {
    (facts.layout == Layout::Dedicated).then_some(probe)
}

fn probe(scheme: &str, path: &str, port: u16, period: u32, timeout: u32, failures: u32) -> Value {
    json!({
        "httpGet": {"scheme": scheme, "path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    })
}

/// Requests and limits: as written, else the default. Written values replace all of the default, so that a
/// request never exceeds a limit that somebody else chose.
fn resources(written: Option<&Resources>, default: [[&str; 2]; 2]) -> Value {
    match written {
        Some(Resources { requests, limits }) => {
            // The API server keeps quantities as text.
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let all = |from: &BTreeMap<Box<str>, Value>| -> Value {
                from.iter().map(|(name, value)| (name.to_string(), json!(text(value)))).collect()
            };
            json!({"requests": all(requests), "limits": all(limits)})
        }
        None => {
            let [[cpu, memory], [most_cpu, most_memory]] = default;
            json!({"requests": {"cpu": cpu, "memory": memory},
                "limits": {"cpu": most_cpu, "memory": most_memory}})
        }
    }
}

/// The feature gates of a Cluster, for the programs of Kubernetes.
fn feature_gates(program: &mut Program, facts: &Facts<'_>) {
    if let Some(gates) = &facts.feature_gates {
        program.arg("feature-gates", gates);
    }
}

/// Flags by which replicas agree on one that works. A single pod that is never two at once needs none, and
/// starts without waiting for the lease of its former self.
fn leader_election(program: &mut Program, facts: &Facts<'_>, settings: Option<&PodSettings>) {
    if facts.layout == Layout::Compact {
        return program.arg("leader-elect", false);
    }
    program.arg("leader-elect", true);
    let Some(election) = settings.map(|settings| &settings.leader_election) else { return };
    let times = [
        ("lease-duration", &election.lease_duration_seconds),
        ("renew-deadline", &election.renew_deadline_seconds),
        ("retry-period", &election.retry_period_seconds),
    ];
    for (flag, seconds) in times {
        if let Some(seconds) = seconds.get() {
            program.arg(&format!("leader-elect-{flag}"), format_args!("{seconds}s"));
        }
    }
}
