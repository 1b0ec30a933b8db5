//! The files on a machine that joins, and how its kubelet is started: kubeadm's files, under kubeadm's names.
//!
//! `pki/ca.crt` differs: kubeadm writes there what signs the API server's certificate as a server. A kubelet
//! reads there what signs its clients, and a hosted cluster has another authority for these.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use portico_pki::{Credential, Kubeconfig};
use portico_yaml::Documents;
use serde_json::{Value, json};
use thiserror::Error;

use super::options::{Label, NodeName, Taint};
use super::reach::{self, BadReach, Way};
use super::token::Token;

/// What containerd listens at where nobody says otherwise.
pub const CONTAINERD: &str = "unix:///run/containerd/containerd.sock";
/// The name of the unit, as packages of Kubernetes have it.
pub const UNIT: &str = "kubelet.service";

/// Readable by root alone: it holds the token, or stands beside what does.
pub(super) const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;

/// Where a kubelet's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFile {
    /// Where.
    pub path: PathBuf,
    /// Its content.
    pub content: String,
    /// Its permissions.
    pub mode: u32,
}

/// The cluster, as far as its machines must know it.
#[derive(Debug, Clone, Copy)]
pub struct Cluster<'a> {
    /// The URL of its API server, as the machine reaches it.
    pub server: &'a str,
    /// What signs the API server's certificate, PEM.
    pub authority: &'a str,
    /// What shows the machine to it.
    pub token: &'a Token,
}

/// What the machine says of itself.
#[derive(Debug, Clone, Copy)]
pub struct Machine<'a> {
    /// The name of the node.
    pub name: &'a NodeName,
    /// The address that others reach it at; `None` for the kubelet's choice.
    pub address: Option<IpAddr>,
    /// Labels of the node.
    pub labels: &'a [Label],
    /// Taints of the node.
    pub taints: &'a [Taint],
    /// Fields of a KubeletConfiguration that go before the cluster's.
    pub own: &'a Value,
}

/// What the ConfigMap `kube-system/kubelet-config` says.
#[derive(Debug, Clone, PartialEq)]
pub struct KubeletConfig {
    config: Value,
    client_ca: String,
    reach: Option<String>,
}

/// Why that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadKubeletConfig {
    /// The key `kubelet` is missing, or is none.
    #[error("ConfigMap kube-system/kubelet-config has no KubeletConfiguration: {0}")]
    Config(String),
    /// kubeadm's clusters have one authority for everything and no such key.
    #[error(
        "ConfigMap kube-system/kubelet-config has no client-ca.crt: Portico does not host this cluster. If \
         kubeadm made it, `kubeadm join` takes machines in"
    )]
    ClientCa,
}

impl Paths {
    /// Below this folder, which is `/` on all machines but those that tests share.
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The kubeconfig with the token.
    pub fn bootstrap(&self) -> PathBuf {
        self.root.join("etc/kubernetes/bootstrap-kubelet.conf")
    }

    /// The kubeconfig that the kubelet writes once it has its certificate.
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.join("etc/kubernetes/kubelet.conf")
    }

    /// The authorities of the kubelet's clients.
    pub fn client_ca(&self) -> PathBuf {
        self.root.join("etc/kubernetes/pki/ca.crt")
    }

    /// The configuration of the kubelet.
    pub fn config(&self) -> PathBuf {
        self.root.join("var/lib/kubelet/config.yaml")
    }

    /// The certificates that the kubelet gets.
    pub fn certificates(&self) -> PathBuf {
        self.root.join("var/lib/kubelet/pki")
    }

    /// The present client certificate of the kubelet, with its key.
    pub fn certificate(&self) -> PathBuf {
        self.certificates().join("kubelet-client-current.pem")
    }

    /// What was joined, and which files were written.
    pub fn record(&self) -> PathBuf {
        self.root.join("var/lib/portico/join.json")
    }

    /// The content of [`kubeconfig`](Self::kubeconfig) before a move that is unfinished.
    pub fn before_move(&self) -> PathBuf {
        self.root.join("etc/kubernetes/kubelet.conf.before-move")
    }

    /// With which server the kubelet was started that `portico join --kubelet` stays with.
    pub fn running(&self) -> PathBuf {
        self.root.join("var/lib/portico/kubelet.json")
    }

    /// The unit itself, for machines whose packages have none; else what changes theirs.
    pub fn unit(&self, exists: bool) -> PathBuf {
        let folder = self.root.join("etc/systemd/system");
        if exists { folder.join(format!("{UNIT}.d/50-portico.conf")) } else { folder.join(UNIT) }
    }

    /// Where units of packages and of administrators are.
    pub fn units(&self) -> [PathBuf; 3] {
        ["etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"]
            .map(|folder| self.root.join(folder).join(UNIT))
    }
}

impl KubeletConfig {
    /// Reads the ConfigMap.
    ///
    /// # Errors
    /// It is not one that Portico wrote.
    pub fn read(object: &Value) -> Result<Self, BadKubeletConfig> {
        let data = |key: &str| object["data"][key].as_str();
        let config = settings(data("kubelet").unwrap_or_default()).map_err(BadKubeletConfig::Config)?;
        let client_ca = data("client-ca.crt").filter(|pem| pem.contains("-----BEGIN CERTIFICATE-----"));
        let client_ca = client_ca.ok_or(BadKubeletConfig::ClientCa)?.to_owned();
        Ok(Self { config, client_ca, reach: data(reach::KEY).map(str::to_owned) })
    }

    /// Where agents of this machine will go. None, if an operator wrote it that does not say so yet.
    ///
    /// # Errors
    /// It says something that no operator of this version writes.
    pub fn ways(&self) -> Result<Vec<Way>, BadReach> {
        self.reach.as_deref().map_or(Ok(Vec::new()), reach::read)
    }

    /// The configuration of this machine's kubelet.
    pub fn of(&self, machine: &Machine<'_>, paths: &Paths) -> Value {
        let mut config = self.config.clone();
        let defaults = json!({
            "authentication": {"x509": {"clientCAFile": paths.client_ca()}},
            "containerRuntimeEndpoint": CONTAINERD,
            "staticPodPath": paths.root.join("etc/kubernetes/manifests"),
        });
        merge(&mut config, &defaults);
        merge(&mut config, machine.own);
        if !machine.taints.is_empty() {
            config["registerWithTaints"] = machine.taints.iter().map(Taint::object).collect();
        }
        config
    }
}

/// A KubeletConfiguration, or some fields of one.
///
/// # Errors
/// What is wrong with it.
pub fn settings(text: &str) -> Result<Value, String> {
    let document = Documents::new(text).next().ok_or("it is empty")?;
    let value = document.map_err(|error| error.to_string())?.to_value();
    let is = |field: &str, wanted: &str| value.get(field).is_none_or(|found| found == wanted);
    let right = is("kind", "KubeletConfiguration") && is("apiVersion", "kubelet.config.k8s.io/v1beta1");
    if !value.is_object() || !right {
        return Err("it is no KubeletConfiguration of kubelet.config.k8s.io/v1beta1".to_owned());
    }
    Ok(value)
}

/// The files by which the kubelet joins.
pub fn files(cluster: &Cluster<'_>, kubelet: &KubeletConfig, config: &Value, paths: &Paths) -> [NewFile; 3] {
    let bootstrap = Kubeconfig {
        cluster: "default".to_owned(),
        server: cluster.server.to_owned(),
        authority: cluster.authority.to_owned(),
        credential: Credential::Token(cluster.token.reveal()),
    };
    let file = |path, content, mode| NewFile { path, content, mode };
    [
        file(paths.client_ca(), kubelet.client_ca.clone(), PUBLIC),
        file(paths.config(), portico_yaml::write(config), PUBLIC),
        file(paths.bootstrap(), bootstrap.to_yaml(), SECRET),
    ]
}

/// With which flags the kubelet is started: what its configuration has no fields for.
pub fn arguments(machine: &Machine<'_>, paths: &Paths) -> Vec<String> {
    let path = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let mut arguments = vec![
        path("bootstrap-kubeconfig", &paths.bootstrap()),
        path("kubeconfig", &paths.kubeconfig()),
        path("config", &paths.config()),
        path("root-dir", &paths.root.join("var/lib/kubelet")),
        path("cert-dir", &paths.certificates()),
        format!("--hostname-override={}", machine.name),
    ];
    arguments.extend(machine.address.map(|address| format!("--node-ip={address}")));
    if !machine.labels.is_empty() {
        let labels: Vec<String> = machine.labels.iter().map(ToString::to_string).collect();
        arguments.push(format!("--node-labels={}", labels.join(",")));
    }
    arguments
}

/// The unit by which systemd runs the kubelet. If a package has one (`exists`), the drop-in that changes it.
pub fn unit(kubelet: &Path, arguments: &[String], exists: bool, paths: &Paths) -> NewFile {
    let program = kubelet.display().to_string();
    let words = [&program].into_iter().chain(arguments).map(|word| quoted(word));
    let start = words.collect::<Vec<_>>().join(" \\\n  ");
    let head = "[Unit]\nDescription=kubelet: the node agent of Kubernetes\nAfter=containerd.service \
                network-online.target\nWants=network-online.target\n\n[Service]\n";
    let tail = "Restart=always\nRestartSec=5\n\n[Install]\nWantedBy=multi-user.target\n";
    // A second ExecStart would be refused; an empty one forgets those of the package.
    let content = if exists {
        format!("[Service]\nExecStart=\nExecStart={start}\nRestart=always\n")
    } else {
        format!("{head}ExecStart={start}\n{tail}")
    };
    NewFile { path: paths.unit(exists), content, mode: PUBLIC }
}

/// A word as it stands in a unit: systemd expands `%` and `$`.
fn quoted(word: &str) -> String {
    let escaped = word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    if escaped.contains([' ', '"', '\'', ';']) { format!("\"{escaped}\"") } else { escaped }
}

/// Puts fields over others, field by field.
fn merge(under: &mut Value, over: &Value) {
    let Value::Object(fields) = over else { return under.clone_from(over) };
    if !under.is_object() {
        *under = json!({});
    }
    for (key, value) in fields {
        merge(&mut under[key], value);
    }
}

#[cfg(test)]
mod tests;
