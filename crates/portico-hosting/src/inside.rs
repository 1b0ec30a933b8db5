//! The objects inside a hosted cluster: those that nodes need to join, kube-proxy, CoreDNS and
//! metrics-server. The agents and the objects of `portico_expose::user_cluster` are not among them.
//!
//! Each part is a manifest in `inside/`, with its blanks filled in; the rights of the Konnectivity server are
//! those of `deploy/konnectivity`. The names are those of kubeadm and of upstream, so that people and tools
//! find them. A part that a Cluster leaves out goes away, if Portico made it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::LazyLock;

use portico_api::annotations::WITHOUT;
use portico_api::cluster::{Cluster, HostingSpec};
use portico_api::problem::Problem;
use portico_expose::inputs::Scope;
use portico_expose::networks;
use portico_expose::user_cluster::{Inside, Kind, Object, manifest};
use serde_json::{Value, json};

use crate::facts::{digest, joined};
use crate::join::reach::{self, Way};
use crate::settings::Settings;
use crate::validate::validate;
use crate::versions::{Minor, Versions};

/// Which address of the Services' network is the name server's, as in kubeadm.
const DNS: u32 = 10;
/// Where a kubelet reads which authorities sign its clients; kubeadm writes there what `cluster-info` holds.
const CLIENT_CA_FILE: &str = "/etc/kubernetes/pki/ca.crt";
/// What the containers of a workload are in.
const POD: &str = "/spec/template";

static KONNECTIVITY: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../../../deploy/konnectivity/server-rights.yaml")));
static MONITORING: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../inside/monitoring.yaml")));
static NODES: LazyLock<Vec<Object>> = LazyLock::new(|| manifest(include_str!("../inside/nodes.yaml")));
static PROXY: LazyLock<Vec<Object>> = LazyLock::new(|| manifest(include_str!("../inside/kube-proxy.yaml")));
static NAMES: LazyLock<Vec<Object>> = LazyLock::new(|| manifest(include_str!("../inside/coredns.yaml")));
static METRICS: LazyLock<Vec<Object>> =
    LazyLock::new(|| manifest(include_str!("../inside/metrics-server.yaml")));

/// A part that a Cluster can leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    KubeProxy,
    CoreDns,
    MetricsServer,
}

impl Part {
    const ALL: [Self; 3] = [Self::KubeProxy, Self::CoreDns, Self::MetricsServer];

    const fn name(self) -> &'static str {
        match self {
            Self::KubeProxy => "kube-proxy",
            Self::CoreDns => "coredns",
            Self::MetricsServer => "metrics-server",
        }
    }

    fn objects(self) -> &'static [Object] {
        match self {
            Self::KubeProxy => &PROXY,
            Self::CoreDns => &NAMES,
            Self::MetricsServer => &METRICS,
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|part| part.name() == text);
        found.ok_or_else(|| format!("{text:?} is no part that can be left out"))
    }
}

/// The parts that a Cluster leaves out by its annotation, each as it is written.
pub(crate) fn left_out(cluster: &Cluster) -> impl Iterator<Item = Result<Part, String>> {
    let written = cluster.metadata.annotation(WITHOUT).unwrap_or_default();
    written.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::parse)
}

/// How the cluster is reached from its nodes.
#[derive(Debug, Clone, Copy)]
pub struct Reach<'a> {
    /// The URL of its API server.
    pub url: &'a str,
    /// The authority, in PEM, that signs clients of kubelets: the API server is one. `None` while it is not
    /// known.
    pub client_ca: Option<&'a str>,
    /// Where agents go, for machines to try before they join.
    pub ways: &'a [Way],
    /// Whether that URL was published only just now. No node that is away may hold up the others then.
    pub is_new: bool,
}

/// What the cluster of `scope` has inside, which is that of [`portico_expose::validate::usable`].
///
/// # Errors
/// Everything wrong with the Cluster, if it must not be used as written. What exists must stay then.
pub fn inside(scope: &Scope<'_>, settings: &Settings, reach: Reach<'_>) -> Result<Inside, Vec<Problem>> {
    let verdict = validate(scope, settings);
    let written = HostingSpec::default();
    let hosting = scope.cluster.spec.hosting.as_deref().unwrap_or(&written);
    let known = hosting.version.get().and_then(|version| Some((*version, Versions::known().of(*version)?)));
    let (kubevirt, cluster) = (scope.is_on("kubevirt"), scope.cluster);
    let services = networks::services(cluster, kubevirt);
    let (false, Some((version, minor)), Some(dns)) =
        (verdict.refused, known, services.first().and_then(|network| nth(network.network(), DNS)))
    else {
        return Err(verdict.problems);
    };
    let mut inside = Inside::default();
    inside.wanted.extend(KONNECTIVITY.iter().chain(&*MONITORING).cloned());
    match reach.client_ca {
        Some(client_ca) => {
            let mut data = json!({"kubelet": portico_yaml::write(&kubelet(dns)), "client-ca.crt": client_ca});
            if !reach.ways.is_empty() {
                data[reach::KEY] = reach::write(reach.ways).into();
            }
            inside.wanted.extend(filled(&NODES, None, &data, None));
        }
        None => inside.waiting.push("what nodes need to join: Secret client-ca is not there yet"),
    }
    let without: Vec<Part> = left_out(cluster).filter_map(Result::ok).collect();
    let ebpf = &*cluster.spec.cluster_network.proxy_mode == "ebpf";
    for part in Part::ALL {
        if without.contains(&part) || part == Part::KubeProxy && ebpf {
            // In the other order: nobody must need what goes.
            inside.unwanted.extend(part.objects().iter().rev().map(|object| object.id.clone()));
            continue;
        }
        let (image, data) = match part {
            Part::KubeProxy => {
                let image = settings.upstream("kube-proxy", &format!("v{version}"));
                (image, proxy(cluster, kubevirt, reach.url))
            }
            Part::CoreDns => {
                (core_dns(settings, minor), json!({"Corefile": include_str!("../inside/Corefile")}))
            }
            Part::MetricsServer => {
                let image = settings.upstream("metrics-server/metrics-server", &minor.metrics_server);
                (image, Value::Null)
            }
        };
        let objects = filled(part.objects(), Some(&image), &data, Some(dns));
        inside.wanted.extend(objects.map(|object| if reach.is_new { at_once(object) } else { object }));
    }
    Ok(inside)
}

/// A DaemonSet counts pods of nodes that are away among those that it may miss. kube-proxy's rules hold while
/// it starts anew.
fn at_once(mut object: Object) -> Object {
    if object.id.kind == Kind::DaemonSet {
        object.fields["spec"]["updateStrategy"] =
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}});
    }
    object
}

fn core_dns(settings: &Settings, minor: &Minor) -> String {
    settings.upstream("coredns/coredns", &minor.coredns)
}

/// A manifest with image, content of its ConfigMap and address of its name server.
fn filled<'a>(
    objects: &'a [Object],
    image: Option<&'a str>,
    data: &'a Value,
    dns: Option<IpAddr>,
) -> impl Iterator<Item = Object> + 'a {
    objects.iter().cloned().map(move |mut object| {
        if object.id.kind == Kind::ConfigMap {
            object.fields["data"] = data.clone();
        }
        if let Some(dns) = dns.filter(|_| object.id.kind == Kind::Service && object.id.name == "kube-dns") {
            object.fields["spec"]["clusterIP"] = json!(dns);
        }
        if let (Some(image), Some(template)) = (image, object.fields.pointer_mut(POD)) {
            template["spec"]["containers"][0]["image"] = json!(image);
            // It reads its configuration at its start alone.
            if object.id.name == Part::KubeProxy.name() {
                template["metadata"]["annotations"] =
                    json!({"checksum.portico.k8c.io/kube-proxy": digest(texts(data))});
            }
        }
        object
    })
}

fn texts(data: &Value) -> impl Iterator<Item = (&str, &str)> {
    data.as_object().into_iter().flatten().filter_map(|(key, value)| Some((&**key, value.as_str()?)))
}

/// What is the same for all kubelets. Where the container runtime says which driver it has for cgroups, that
/// one counts.
fn kubelet(dns: IpAddr) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": CLIENT_CA_FILE},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "systemd",
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "rotateCertificates": true,
        "serverTLSBootstrap": true,
        "staticPodPath": "/etc/kubernetes/manifests",
    })
}

/// kube-proxy reaches the API server without Services, which it makes.
fn proxy(cluster: &Cluster, kubevirt: bool, url: &str) -> Value {
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "default",
            "cluster": {"certificate-authority": format!("{account}/ca.crt"), "server": url}}],
        "users": [{"name": "default", "user": {"tokenFile": format!("{account}/token")}}],
        "contexts": [{"name": "default",
            "context": {"cluster": "default", "namespace": "default", "user": "default"}}],
        "current-context": "default",
    });
    let mode = match &*cluster.spec.cluster_network.proxy_mode {
        "" => "iptables",
        written => written,
    };
    let config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf"},
        "clusterCIDR": joined(&networks::pods(cluster, kubevirt)),
        "mode": mode,
    });
    let text = |value| portico_yaml::write(value);
    json!({"config.conf": text(&config), "kubeconfig.conf": text(&kubeconfig)})
}

fn nth(network: IpAddr, number: u32) -> Option<IpAddr> {
    Some(match network {
        IpAddr::V4(first) => Ipv4Addr::from(u32::from(first).checked_add(number)?).into(),
        IpAddr::V6(first) => Ipv6Addr::from(u128::from(first).checked_add(number.into())?).into(),
    })
}
