//! etcd. Members find each other by a list that does not change: the number of members is that of the day the
//! cluster was made. `portico etcd` starts it, in upstream's image: an init container brings the program.

use portico_api::hosting::Layout;
use portico_pki::inventory::CA_CERTIFICATE;
use serde_json::json;

use super::{DATA_FOLDER, Program, pod_name, probe, readiness, resources};
use crate::facts::Facts;

pub(crate) const NAME: &str = "etcd";
/// The first member, which is the only one of `compact`.
pub(crate) const FIRST: &str = "etcd-0";
/// Port of clients.
pub(crate) const CLIENT_PORT: u16 = 2_379;
/// Port of other members.
pub(crate) const PEER_PORT: u16 = 2_380;
/// Port of probes and metrics, without TLS.
pub const METRICS_PORT: u16 = 2_378;
pub(crate) const METRICS_PORT_NAME: &str = "etcd-metrics";

/// The volume.
pub(crate) const VOLUME: &str = "data";

/// Copies the program that starts etcd.
const LAUNCHER: &str = "etcd-launcher";
/// The volume with that program.
pub(crate) const LAUNCHER_VOLUME: &str = "launcher";
const LAUNCHER_FOLDER: &str = "/launcher";
const LAUNCHER_FILE: &str = "/launcher/portico";

/// What the launcher has from a ConfigMap: in the pod itself it would restart etcd once it changes.
pub(crate) const CONFIG: &str = "etcd-launcher";
/// Whether the cluster has held data.
pub(crate) const INITIALIZED: &str = "initialized";

/// Its certificate.
const SECRET: &str = "etcd-tls-certificate";

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let image = facts.settings.upstream("etcd", &facts.minor.etcd);
    let mut etcd = Program::new(NAME, image, &[LAUNCHER_FILE]);
    let namespace = &facts.namespace;
    let alone = facts.layout == Layout::Compact;
    let host = |name: &str| match alone {
        true => "127.0.0.1".to_owned(),
        false => format!("{name}.etcd.{namespace}.svc.cluster.local"),
    };
    // Nothing outside the pod reaches a member that serves its own pod alone.
    let listen = if alone { "127.0.0.1" } else { "0.0.0.0" };
    let (name, own) = match alone {
        true => (FIRST, host(FIRST)),
        false => ("$(POD_NAME)", host("$(POD_NAME)")),
    };
    if !alone {
        etcd.env.push(pod_name());
    }
    // Read anew whenever the container starts.
    let key = json!({"name": CONFIG, "key": INITIALIZED});
    etcd.env.push(json!({"name": "INITIALIZED", "valueFrom": {"configMapKeyRef": key}}));
    etcd.args = ["etcd", "run"].map(str::to_owned).to_vec();
    etcd.arg("initialized", "$(INITIALIZED)");
    let members: Vec<String> = (0..facts.members).map(|number| format!("etcd-{number}")).collect();
    let urls = members.iter().map(|member| format!("https://{}:{CLIENT_PORT}", host(member)));
    etcd.arg("endpoints", urls.collect::<Vec<_>>().join(","));
    etcd.args.extend(["--", "etcd"].map(str::to_owned));
    etcd.arg("name", name);
    etcd.arg("data-dir", format_args!("{DATA_FOLDER}/data"));
    etcd.arg("listen-client-urls", format_args!("https://{listen}:{CLIENT_PORT}"));
    etcd.arg("advertise-client-urls", format_args!("https://{own}:{CLIENT_PORT}"));
    etcd.arg("listen-peer-urls", format_args!("https://{listen}:{PEER_PORT}"));
    etcd.arg("initial-advertise-peer-urls", format_args!("https://{own}:{PEER_PORT}"));
    etcd.arg("listen-metrics-urls", format_args!("http://0.0.0.0:{METRICS_PORT}"));
    let ring = members.iter().map(|member| format!("{member}=https://{}:{PEER_PORT}", host(member)));
    etcd.arg("initial-cluster", ring.collect::<Vec<_>>().join(","));
    etcd.arg("initial-cluster-token", &facts.scope.cluster.metadata.name);
    etcd.arg("initial-cluster-state", "new");
    tls(&mut etcd);
    etcd.arg("auto-compaction-mode", "periodic");
    etcd.arg("auto-compaction-retention", "8h");
    etcd.arg("feature-gates", "InitialCorruptCheck=true");
    if facts.members == 1 {
        // After a restart a member without others waits for one election: 0.15 s, in place of 1.5 to 2 s.
        etcd.arg("heartbeat-interval", 10);
        etcd.arg("election-timeout", 100);
    }
    let written = facts.scope.cluster.spec.components_override.etcd.as_deref();
    if let Some(quota) = written.and_then(|written| written.quota_backend_gb.get()) {
        etcd.arg("quota-backend-bytes", u64::from(*quota) << 30);
    }
    etcd.ports = vec![(METRICS_PORT_NAME, METRICS_PORT)];
    if !alone {
        etcd.ports.extend([("client", CLIENT_PORT), ("peer", PEER_PORT)]);
    }
    etcd.mounts.push((VOLUME, DATA_FOLDER));
    etcd.read_mounts.push((LAUNCHER_VOLUME, LAUNCHER_FOLDER));
    // Without other members yet, a member is alive and not ready.
    let started = if alone { "/readyz" } else { "/livez" };
    etcd.startup = Some(probe("HTTP", started, METRICS_PORT, 1, 5, 300));
    etcd.liveness = probe("HTTP", "/livez", METRICS_PORT, 10, 15, 8);
    etcd.readiness = readiness(facts, probe("HTTP", "/readyz", METRICS_PORT, 5, 15, 3));
    let default = match facts.layout {
        Layout::Compact => [["25m", "48Mi"], ["2", "2Gi"]],
        Layout::Dedicated => [["50m", "64Mi"], ["2", "2Gi"]],
    };
    etcd.resources = resources(written.and_then(|written| written.resources.as_ref()), default);
    etcd
}

/// What brings the launcher into the pod before etcd starts.
pub(crate) fn launcher(facts: &Facts<'_>) -> Program {
    let mut launcher = Program::new(LAUNCHER, facts.settings.own(), &[]);
    launcher.args = ["etcd", "install", LAUNCHER_FILE].map(str::to_owned).to_vec();
    launcher.mounts.push((LAUNCHER_VOLUME, LAUNCHER_FOLDER));
    launcher.resources = resources(None, [["10m", "16Mi"], ["1", "128Mi"]]);
    launcher
}

/// One certificate, for clients and for other members. It is read again for each connection.
fn tls(etcd: &mut Program) {
    for prefix in ["", "peer-"] {
        etcd.arg_secret(&format!("{prefix}cert-file"), SECRET, "etcd-tls.crt");
        etcd.arg_secret(&format!("{prefix}key-file"), SECRET, "etcd-tls.key");
        etcd.arg_secret(&format!("{prefix}trusted-ca-file"), SECRET, CA_CERTIFICATE);
        etcd.arg(&format!("{prefix}client-cert-auth"), true);
    }
}
