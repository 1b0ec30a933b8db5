//! `portico metrics` beside a real API server, which is the control plane of a cluster too, and a real
//! Prometheus; and the alerts about gateways, as Prometheus evaluates them.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), Debian's `prometheus`, and root.

use std::fs;
use std::process::Command;
use std::time::Duration;

use portico_lab::{ApiServer, wait};
use serde_json::{Value, json};

/// Far longer than two rounds of Prometheus take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where things listen in the namespace of the test's host.
const RELAY: &str = "127.0.0.1:8007";
const PROMETHEUS: &str = "127.0.0.1:9090";

#[test]
fn prometheus_finds_a_control_plane_and_gets_what_is_kept_of_it_and_no_more() {
    let api = ApiServer::start("metrics").unwrap();
    let host = api.host();
    control_plane(&api);
    let kubeconfig = format!("--kubeconfig={}", api.admin().unwrap().display());
    let portico = env!("CARGO_BIN_EXE_portico");
    let _relay = host.spawn("metrics", portico, ["metrics", &kubeconfig]).unwrap();
    let get = |url: &str| host.run(&["curl", "-sS", "--max-time", "20", url]);
    let ready = || {
        let said = get(&format!("http://{RELAY}/readyz"))?;
        anyhow::ensure!(said == "ready\n", "{said}");
        Ok(())
    };
    wait::until("the relay", PATIENCE, ready).unwrap();

    let targets: Value = serde_json::from_str(&get(&format!("http://{RELAY}/targets")).unwrap()).unwrap();
    let target = |job: &str| {
        json!({"targets": [RELAY], "labels": {"__metrics_path__": format!("/scrape/a/control-plane-0/{job}"),
            "cluster": "a", "namespace": "cluster-a", "job": job, "pod": "control-plane-0",
            "instance": if job == "etcd" { "etcd-0" } else { "control-plane-0" }}})
    };
    assert_eq!(targets, json!([target("apiserver"), target("etcd")]));
    let others = get(&format!("http://{RELAY}/targets?cluster=b")).unwrap();
    assert_eq!(others, "[]");

    let scrape = |program: &str| get(&format!("http://{RELAY}/scrape/a/control-plane-0/{program}")).unwrap();
    let kept = scrape("apiserver");
    assert!(kept.contains("\napiserver_current_inflight_requests{"), "{kept}");
    assert!(!kept.contains("apiserver_request_duration"), "{kept}");
    let all = api.kubectl().run(&["get", "--raw", "/metrics"]).unwrap();
    assert!(kept.len() * 20 < all.len(), "{} of {} bytes", kept.len(), all.len());
    // Nothing listens there.
    let refused = scrape("etcd");
    assert!(refused.starts_with("etcd in cluster-a/control-plane-0: connecting: "), "{refused}");
    assert!(scrape("scheduler").contains("/targets lists them"));

    let config = json!({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "control-planes",
            "http_sd_configs": [{"url": format!("http://{RELAY}/targets")}]}],
    });
    let folder = host.dir();
    fs::write(folder.join("prometheus.yaml"), config.to_string()).unwrap();
    let rules = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/control-plane-rules.yaml"));
    let rules = portico_yaml::Documents::new(rules).next().unwrap().unwrap().to_value();
    fs::write(folder.join("rules.yaml"), rules["spec"].to_string()).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    host.run(&["promtool", "check", "config", &path("prometheus.yaml")]).unwrap();
    let flags = [
        format!("--config.file={}", path("prometheus.yaml")),
        format!("--storage.tsdb.path={}", path("tsdb")),
        format!("--web.listen-address={PROMETHEUS}"),
    ];
    let _prometheus = host.spawn("prometheus", "prometheus", &flags).unwrap();
    let asked = |query: &str| {
        let url = format!("http://{PROMETHEUS}/api/v1/query");
        let said = host.run(&["curl", "-sS", "-G", &url, "--data-urlencode", &format!("query={query}")])?;
        let answer: Value = serde_json::from_str(&said)?;
        let value = answer.pointer("/data/result/0/value/1").and_then(Value::as_str).map(str::to_owned);
        value.ok_or_else(|| anyhow::anyhow!("{query}: {said}"))
    };
    let up = |job: &str| wait::until(job, PATIENCE, || asked(&format!("up{{cluster=\"a\",job=\"{job}\"}}")));
    assert_eq!(up("apiserver").unwrap(), "1");
    assert_eq!(up("etcd").unwrap(), "0");
    // A recording rule, by the name that KKP's dashboards know.
    let rule = "job:process_resident_memory_bytes:clone{cluster=\"a\",job=\"apiserver\"}";
    let bytes: f64 = wait::until(rule, PATIENCE, || asked(rule)).unwrap().parse().unwrap();
    assert!(bytes > 10e6, "{bytes}");
    // An alert begins, and says of which cluster.
    let alert = "ALERTS{alertname=\"EtcdDown\",cluster=\"a\"}";
    wait::until(alert, PATIENCE, || asked(alert)).unwrap();
}

#[test]
fn alerts_fire_where_no_gateway_serves_and_where_the_certificate_of_the_tunnel_ends() {
    const LEADER: (&str, i64) = ("portico_front_leader{instance=\"front\"}", 1);
    const READY: (&str, i64) = ("portico_ready{instance=\"a\"}", 1);
    const STOPPING: (&str, i64) = ("portico_stopping{instance=\"a\"}", 1);
    const DISABLED: (&str, i64) =
        ("portico_operator_seed_ready{seed=\"portico/north\",reason=\"Disabled\"}", 1);
    const MADE: (&str, i64) =
        ("portico_operator_seed_ready{seed=\"portico/north\",reason=\"GatewayReady\"}", 1);
    const HOUR: i64 = 3_600;
    // The hours of a certificate, before and after 1970.
    let start = |hours: i64| ("portico_tunnel_certificate_start_seconds{instance=\"a\"}", hours * HOUR);
    let end = |hours: i64| ("portico_tunnel_certificate_end_seconds{instance=\"a\"}", hours * HOUR);
    let made_end = |hours: i64| ("portico_operator_tunnel_certificate_end_seconds", hours * HOUR);
    // Each series keeps its value for 20 minutes, from 1970 on.
    let case = |series: &[(&str, i64)], firing: &[&str]| {
        let series: Vec<_> = series
            .iter()
            .map(|(series, value)| json!({"series": series, "values": format!("{value}x20")}))
            .collect();
        let alert = |name: &&str| json!({"labels": format!("{{alertname=\"{name}\"}}"), "value": 1});
        let firing: Vec<_> = firing.iter().map(alert).collect();
        let asked = "sum by (alertname) (ALERTS{alertstate=\"firing\"})";
        json!({"interval": "1m", "input_series": series, "promql_expr_test":
            [{"expr": asked, "eval_time": "20m", "exp_samples": firing}]})
    };
    let ends = &["PorticoTunnelCertificateEnds"];
    let tests = [
        case(&[], &["PorticoFrontWithoutLeader", "PorticoGatewaysAbsent"]),
        case(&[LEADER, READY], &[]),
        case(&[LEADER, READY, STOPPING], &["PorticoGatewaysAbsent"]),
        case(&[LEADER, MADE], &["PorticoGatewaysAbsent"]),
        case(&[LEADER, DISABLED], &[]),
        // Of a year.
        case(&[LEADER, READY, start(-8_000), end(200)], &[]),
        case(&[LEADER, READY, start(-8_000), end(160)], ends),
        // Of two days.
        case(&[LEADER, READY, start(-32), end(16)], &[]),
        case(&[LEADER, READY, start(-38), end(10)], ends),
        case(&[LEADER, READY, made_end(200)], &[]),
        case(&[LEADER, READY, made_end(160)], ends),
    ];
    let folder = tempfile::tempdir().unwrap();
    let alerts = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/alerts.yaml"));
    let alerts = portico_yaml::Documents::new(alerts).next().unwrap().unwrap().to_value();
    fs::write(folder.path().join("alerts.yaml"), alerts["spec"].to_string()).unwrap();
    let tests = json!({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests});
    fs::write(folder.path().join("tests.yaml"), tests.to_string()).unwrap();
    let mut promtool = Command::new("promtool");
    let output = promtool.args(["test", "rules", "tests.yaml"]).current_dir(&folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The objects by which the API server of the seed is one of a hosted cluster. Its etcd does not answer.
fn control_plane(api: &ApiServer) {
    let kubectl = api.kubectl();
    let object = |kind: &str, name: &str| {
        let metadata = json!({"name": name, "namespace": "cluster-a"});
        json!({"apiVersion": "v1", "kind": kind, "metadata": metadata})
    };
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "cluster-a"}});
    kubectl.apply_json(&namespace).unwrap();
    kubectl.apply_json(&object("ServiceAccount", "default")).unwrap();
    let mut secret = object("Secret", "prometheus-kubeconfig");
    secret["stringData"] = json!({"kubeconfig": api.admin_with_everything().unwrap()});
    kubectl.apply_json(&secret).unwrap();
    let (_, address) = api.access().server().split_once("://").unwrap();
    let (ip, port) = address.rsplit_once(':').unwrap();
    let port: u16 = port.trim_end_matches('/').parse().unwrap();
    let mut pod = object("Pod", "control-plane-0");
    pod["metadata"]["labels"] = json!({"app": "apiserver", "cluster": "a"});
    pod["spec"] = json!({"automountServiceAccountToken": false, "containers": [
        {"name": "apiserver", "image": "any", "ports": [{"name": "secure", "containerPort": port}]},
        {"name": "etcd", "image": "any", "ports": [{"name": "etcd-metrics", "containerPort": 9}]}]});
    kubectl.apply_json(&pod).unwrap();
    let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}}).to_string();
    let patch = ["patch", "pod", "-n", "cluster-a", "control-plane-0", "--subresource=status"];
    kubectl.run(&[&patch[..], &["--type=merge", "-p", &status]].concat()).unwrap();
}
