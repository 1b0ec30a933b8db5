//! A Prometheus of the cluster's own, where its annotation asks for one. It is KKP's, with an hour of the
//! kept metrics, for the seed's to federate. It has targets and metrics from `portico metrics`, and so needs
//! neither rights nor certificates.

use portico_api::annotations::PROMETHEUS;
use portico_api::cluster::Cluster;
use serde_json::{Value, json};

use super::{FileSource, Program, probe, resources};
use crate::config::Files;
use crate::facts::{CLUSTER, Facts};
use crate::versions::Versions;

/// Its name, and that of its workload.
pub const NAME: &str = "prometheus";
const PORT: u16 = 9_090;
const PORT_NAME: &str = "web";

/// Its volume.
const DATA: &str = "data";
const DATA_FOLDER: &str = "/prometheus";

/// Its ConfigMap, and the keys in there.
const CONFIG: &str = NAME;
const CONFIG_KEY: &str = "prometheus.yaml";
const RULES_KEY: &str = "rules.yaml";

/// Most samples of one answer. A program at rest has two hundred.
const SAMPLES: u32 = 5_000;

/// The value of the Service's label [`CLUSTER`]: by it KKP's seed Prometheus finds those of clusters.
pub(crate) const FEDERATED: &str = "user";

/// Whether the cluster asks for one.
pub(crate) fn is_asked_for(cluster: &Cluster) -> bool {
    cluster.metadata.annotation(PROMETHEUS) == Some("true")
}

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let mut prometheus = Program::new(NAME, facts.settings.image(&Versions::known().prometheus), &[]);
    prometheus.arg_file("config.file", FileSource::config(CONFIG), CONFIG_KEY);
    prometheus.file(FileSource::config(CONFIG), RULES_KEY);
    prometheus.arg("storage.tsdb.path", DATA_FOLDER);
    prometheus.arg("storage.tsdb.retention.time", "1h");
    prometheus.arg("storage.tsdb.min-block-duration", "15m");
    prometheus.arg("storage.tsdb.max-block-duration", "30m");
    prometheus.ports = vec![(PORT_NAME, PORT)];
    prometheus.mounts.push((DATA, DATA_FOLDER));
    prometheus.liveness = probe("HTTP", "/-/healthy", PORT, 10, 5, 6);
    prometheus.readiness = Some(probe("HTTP", "/-/ready", PORT, 5, 5, 6));
    prometheus.resources = resources(None, [["20m", "96Mi"], ["500m", "1Gi"]]);
    prometheus
}

/// Its data of one hour ends with its pod.
pub(crate) fn volume() -> Value {
    json!({"name": DATA, "emptyDir": {}})
}

/// The `spec` of the Service by which it is found.
pub(crate) fn service(facts: &Facts<'_>) -> Value {
    json!({
        "clusterIP": "None",
        "selector": {"app": NAME, CLUSTER: facts.scope.cluster.metadata.name},
        "ports": [{"name": PORT_NAME, "port": PORT, "targetPort": PORT}],
    })
}

/// Its configuration.
pub(crate) fn config(cluster: &str, seed: &str, relay: &str) -> (&'static str, Files) {
    let config = json!({
        "global": {
            "scrape_interval": "30s",
            "evaluation_interval": "30s",
            "external_labels": {"cluster": cluster, "seed_cluster": seed},
        },
        "rule_files": [RULES_KEY],
        // KKP's, of the seed.
        "alerting": {"alertmanagers": [{"dns_sd_configs": [
            {"names": ["alertmanager.monitoring.svc.cluster.local"], "type": "A", "port": 9_093},
        ]}]},
        "scrape_configs": [{
            "job_name": "control-plane",
            "sample_limit": SAMPLES,
            "http_sd_configs": [{"url": format!("{relay}/targets?cluster={cluster}")}],
        }],
    });
    let files = [(CONFIG_KEY, portico_yaml::write(&config)), (RULES_KEY, rules())];
    (CONFIG, Files::from(files))
}

/// The rules of every Prometheus, as a rules file has them.
fn rules() -> String {
    let object = include_str!("../../../../deploy/control-plane-rules.yaml");
    let document = portico_yaml::Documents::new(object).next();
    let object = document.and_then(Result::ok).map(|document| document.to_value()).unwrap_or_default();
    portico_yaml::write(&object["spec"])
}
