//! Metrics of hosted control planes, by `portico metrics` as its manifest has it, and a Prometheus of one
//! cluster.

use std::fs;

use anyhow::{Context, Result, ensure};
use portico_hosting::versions::Versions;
use portico_lab::{Image, Seed, programs, say, wait};
use serde_json::Value;

use super::cluster::{API_SERVERS, Hosted, STARTING};

/// The annotation by which a cluster gets a Prometheus.
const ASKS: &str = "portico.k8c.io/prometheus";

/// Programs of the layout `compact` with metrics.
const PROGRAMS: usize = 5;

/// A Prometheus of a cluster's own.
pub(super) struct Prometheus<'a> {
    cluster: &'a Hosted<'a>,
}

/// Every program of every cluster is a target, and answers with what is kept.
pub(super) fn every_program_is_scraped(clusters: &[Hosted<'_>]) {
    let seed = clusters[0].seed;
    let relay = address(seed, "portico", "app.kubernetes.io/name=portico-metrics").unwrap();
    let get = |path: &str| {
        let url = format!("http://{relay}:8007{path}");
        seed.host().run(&["curl", "-sS", "--fail-with-body", "--max-time", "20", &url])
    };
    let targets: Vec<Value> = serde_json::from_str(&get("/targets").unwrap()).unwrap();
    let programs: usize = clusters.iter().map(programs_of).sum();
    assert_eq!(targets.len(), programs, "{targets:?}");
    let (mut bytes, mut series) = (0, 0);
    for target in &targets {
        let path = target["labels"]["__metrics_path__"].as_str().unwrap();
        let kept = wait::until(path, STARTING, || get(path)).unwrap();
        let samples = kept.lines().filter(|line| !line.starts_with('#')).count();
        assert!(samples > 3, "{path}: {kept}");
        (bytes, series) = (bytes + kept.len(), series + samples);
    }
    let (bytes, series) = (bytes / clusters.len(), series / clusters.len());
    say(format_args!("metrics: {series} series and {bytes} bytes are kept of a cluster"));
}

/// Programs of a cluster with metrics.
fn programs_of(cluster: &Hosted<'_>) -> usize {
    // Each API server more has a Konnectivity server more beside it.
    let more = if cluster.layout == "dedicated" { 2 * (API_SERVERS - 1) } else { 0 };
    PROGRAMS + more
}

/// The address of a pod with this label.
fn address(seed: &Seed, namespace: &str, label: &str) -> Result<String> {
    let pods = seed.kubectl().get(&["pods", "-n", namespace, "-l", label])?;
    let ip = pods.pointer("/items/0/status/podIP").and_then(Value::as_str);
    Ok(ip.with_context(|| format!("no pod {label} with an address: {pods}"))?.to_owned())
}

impl<'a> Prometheus<'a> {
    /// That of `cluster`, which asks for it from now on.
    pub(super) fn of(cluster: &'a Hosted<'a>) -> Self {
        let (seed, kubectl) = (cluster.seed, cluster.seed.kubectl());
        let manifest = programs::checkout().join("deploy/monitoring.yaml");
        kubectl.apply(&fs::read_to_string(manifest).unwrap()).unwrap();
        kubectl.wait_rolled_out("portico", "portico-metrics", STARTING).unwrap();
        seed.import(&Image::prometheus(&Versions::known().prometheus).unwrap()).unwrap();
        kubectl.run(&["annotate", "cluster", cluster.name, &format!("{ASKS}=true")]).unwrap();
        Self { cluster }
    }

    /// It has each program of its cluster, those of no other, and what is recorded of them; without the
    /// annotation it goes.
    pub(super) fn knows_its_cluster_and_goes(self) {
        let Self { cluster } = self;
        let (seed, kubectl, namespace) = (cluster.seed, cluster.seed.kubectl(), cluster.namespace());
        kubectl.wait_rolled_out(&namespace, "prometheus", STARTING).unwrap();
        let ip = address(seed, &namespace, "app=prometheus").unwrap();
        let asked = |query: &str| -> Result<String> {
            let url = format!("http://{ip}:9090/api/v1/query");
            let query = format!("query={query}");
            let said = seed.host().run(&["curl", "-sS", "-G", &url, "--data-urlencode", &query])?;
            let answer: Value = serde_json::from_str(&said)?;
            let value = answer.pointer("/data/result/0/value/1").and_then(Value::as_str);
            Ok(value.context(said.clone())?.to_owned())
        };
        let up = format!("count(up{{cluster=\"{}\"}} == 1)", cluster.name);
        wait::until("all programs to be scraped", STARTING, || {
            let (up, all) = (asked(&up)?, asked("count(up)")?);
            ensure!(up == PROGRAMS.to_string() && all == up, "{up} of {all}");
            Ok(())
        })
        .unwrap();
        wait::until("what is recorded", STARTING, || asked("job:etcd_server_has_leader:sum == 1")).unwrap();
        let pod = cluster.ready_pod("app=prometheus").unwrap();
        cluster.tell_memory(&pod);
        let health = &kubectl.get(&["cluster", cluster.name]).unwrap()["status"]["extendedHealth"];
        assert_eq!(health["monitoring"], "HealthStatusUp", "{health}");
        kubectl.run(&["annotate", "cluster", cluster.name, &format!("{ASKS}-")]).unwrap();
        wait::until("it to go", STARTING, || {
            let left = ["get", "deployments,services,configmaps", "-n", &namespace, "--output=name"];
            let left = kubectl.run(&left)?;
            ensure!(!left.contains("prometheus"), "{left}");
            Ok(())
        })
        .unwrap();
    }
}
