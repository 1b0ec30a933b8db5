//! `portico operator` with many clusters, beside a real API server: what a start costs, what a change writes,
//! and what it holds. Clusters that cannot be exposed harm no other.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use portico_lab::{ApiServer, Kubectl, long_form};
use serde_json::{Value, json};

use crate::common::{Process, free_port, get, run, stdout, wait_until};
use crate::proof::{Usage, report};

mod failing;
mod hosted;

/// Far longer than a start with all clusters takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Private memory of a process with all clusters, in KiB.
const MEMORY: u64 = 60_000;

/// Most requests that a change of one cluster costs: its objects, its condition, and a look at its inside.
const REQUESTS_OF_A_CHANGE: u64 = 20;

/// What `kubectl annotate` sends: it reads, and it patches.
const REQUESTS_OF_KUBECTL: u64 = 2;

/// A running operator.
struct Operator {
    process: Process,
    admin: u16,
}

impl Operator {
    fn start(api: &ApiServer) -> Self {
        Self::start_with(api, &[])
    }

    fn start_with(api: &ApiServer, more: &[&str]) -> Self {
        let (kubeconfig, admin) = (api.admin().unwrap(), free_port());
        let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
        let admin_listen = format!("--admin-listen=127.0.0.1:{admin}");
        let flags =
            ["operator", "--service=portico/portico", "--tunnel-port=off", &kubeconfig, &admin_listen];
        let process = Process::start(&[&flags, more].concat());
        wait_until("it serves its status", || std::net::TcpStream::connect(("127.0.0.1", admin)).is_ok());
        Self { process, admin }
    }

    /// The status of clusters.
    fn clusters(&self) -> Value {
        self.status()["clusters"].clone()
    }

    /// What the controller that exposes clusters did.
    fn work(&self) -> Value {
        self.status()["controllers"]["portico-exposure"].clone()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&get(self.admin, "/status").1).unwrap_or_default()
    }

    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        self.wait_status(what, |status| is_so(&status["clusters"]));
    }

    fn wait_work(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        self.wait_status(what, |status| is_so(&status["controllers"]["portico-exposure"]));
    }

    fn wait_status(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        while !is_so(&self.status()) {
            assert!(start.elapsed() < PATIENCE, "waited in vain until {what}: {}", self.process.said());
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
}

fn writes(work: &Value) -> u64 {
    let kinds = work["writes"].as_object().into_iter().flatten();
    kinds.filter_map(|(_, writes)| writes.as_u64()).sum()
}

fn passes(work: &Value) -> u64 {
    work["passes"].as_u64().unwrap_or_default()
}

/// Objects written by all controllers.
fn all_writes(status: &Value) -> u64 {
    status["controllers"].as_object().into_iter().flatten().map(|(_, work)| writes(work)).sum()
}

/// Requests that the API server has answered about what an operator reads and writes. Watches are none: they
/// count when they end.
fn requests(kubectl: &Kubectl) -> u64 {
    const RESOURCES: [&str; 8] = [
        "clusters",
        "exposedclusters",
        "namespaces",
        "services",
        "endpoints",
        "endpointslices",
        "secrets",
        "events",
    ];
    let metrics = kubectl.run(&["get", "--raw", "/metrics"]).unwrap();
    let requests = metrics.lines().filter(|line| line.starts_with("apiserver_request_total{"));
    let of_operator = requests.filter(|line| {
        let is = |label: &str, value: &str| line.contains(&format!("{label}=\"{value}\""));
        !is("verb", "WATCH") && RESOURCES.iter().any(|resource| is("resource", resource))
    });
    of_operator.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// One in twenty by each strategy with ports, and all others by name; some of them broken.
fn cluster(index: usize) -> Value {
    let strategy = match index % 20 {
        0 => "NodePort",
        1 => "LoadBalancer",
        _ => "Tunneling",
    };
    let mut cluster = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": {"name": format!("c{index}")},
        "spec": {"humanReadableName": "one of many", "version": "1.35.8", "exposeStrategy": strategy,
            "cloud": {"dc": "lab-1", "bringyourown": {}}}});
    match index % 100 {
        97 => cluster["spec"]["cloud"]["dc"] = "nowhere".into(),
        98 => cluster["metadata"]["annotations"] = json!({"portico.k8c.io/endpoints": "localhost"}),
        99 => cluster["spec"]["pause"] = true.into(),
        _ => {}
    }
    cluster
}

fn versions(kubectl: &Kubectl, kind: &str) -> BTreeSet<String> {
    let found = kubectl.get(&[kind, "-A"]).unwrap();
    let items = found["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| {
            let meta = &item["metadata"];
            format!("{kind} {}/{} {}", meta["namespace"], meta["name"], meta["resourceVersion"])
        })
        .collect()
}

fn all_versions(kubectl: &Kubectl) -> BTreeSet<String> {
    let kinds = ["services", "endpointslices", "namespaces", "exposedclusters", "clusters"];
    kinds.into_iter().flat_map(|kind| versions(kubectl, kind)).collect()
}

/// Kinds, namespace, configuration and Seeds.
fn install(kubectl: &Kubectl) {
    let definitions = stdout(&run(&["crds"]));
    kubectl.run_with_input(&["apply", "--server-side", "-f", "-"], &definitions).unwrap();
    kubectl.wait_served("clusters.kubermatic.k8c.io").unwrap();
    kubectl.wait_served("exposedclusters.portico.k8c.io").unwrap();
    kubectl.run(&["create", "namespace", "portico"]).unwrap();
    let above = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kkp", "namespace": "portico"},
            "spec": {"ingress": {"domain": "kkp.invalid"}}},
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": "north", "namespace": "portico"},
            "spec": {"datacenters": {"lab-1": {"spec": {"bringyourown": {}}}}}},
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": "south", "namespace": "portico"}, "spec": {"datacenters": {"lab-2": {}}}}]});
    kubectl.apply_json(&above).unwrap();
}

fn create(kubectl: &Kubectl, clusters: &[Value]) {
    for part in clusters.chunks(500) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": part}).to_string();
        kubectl.run_with_input(&["create", "-f", "-"], &list).unwrap();
    }
}

/// 200 clusters; 2,000 with `PORTICO_PROVE=1`.
#[test]
fn many_clusters_are_exposed_and_a_change_of_one_writes_its_own_objects_alone() {
    let count = long_form(200, 2_000);
    let api = ApiServer::start("fleet").unwrap();
    let kubectl = api.kubectl();
    install(kubectl);
    let items: Vec<_> = (0..count).map(cluster).collect();
    create(kubectl, &items);

    let start = Instant::now();
    let operator = Operator::start(&api);
    operator.wait("every cluster has a condition", |clusters| {
        clusters["reports"].as_object().is_some_and(|reports| reports.len() == count)
    });
    let first = start.elapsed();
    let clusters = operator.clusters();
    let reports = clusters["reports"].as_object().unwrap();
    let reasons = |reason: &str| reports.values().filter(|report| report["reason"] == reason).count();
    assert_eq!(reasons("InvalidConfiguration"), count / 50, "those that are broken, and no others");
    assert_eq!(reasons("Paused"), count / 100);
    assert_eq!(reasons("LoadBalancerPending"), count / 20);
    let exposed = count - count / 50 - count / 100 - count / 20;
    assert_eq!(reasons("NameNotResolved"), exposed, "{clusters}");
    assert_eq!(operator.work()["errors"], json!({}));

    // Beside it each cluster is reported to have no kubeconfig: a condition, and the last write of all.
    wait_until("every inside has a condition", || {
        let inside = operator.status()["userClusters"]["reports"].clone();
        let reports = inside.as_object().into_iter().flatten();
        reports.filter(|(_, report)| report["reason"] == "NoKubeconfig").count() == exposed
    });
    let all = start.elapsed();
    // Passes follow upon the last writes; then there is rest.
    let until_quiet = |before: u64| {
        kubectl.run(&["label", "cluster", "c2", &format!("touched=t{before}"), "--overwrite"]).unwrap();
        operator.wait_work("another pass", |work| passes(work) > before);
        operator.wait_status("nothing to wait", |status| {
            let controllers = status["controllers"].as_object();
            controllers.is_some_and(|all| all.values().all(|work| work["queued"] == 0))
        });
    };
    until_quiet(passes(&operator.work()));
    let (at_rest, before) = (all_writes(&operator.status()), all_versions(kubectl));
    let quiet = requests(kubectl);
    until_quiet(passes(&operator.work()));
    let touched_requests = requests(kubectl) - quiet;
    assert_eq!(all_writes(&operator.status()), at_rest, "nothing is written at rest");

    // One change of one cluster.
    let (quiet, writes_before) = (requests(kubectl), writes(&operator.work()));
    kubectl.run(&["annotate", "cluster", "c2", "portico.k8c.io/endpoints=192.0.2.7:6443"]).unwrap();
    operator.wait_work("the change is written", |work| writes(work) > writes_before + 1);
    until_quiet(passes(&operator.work()));
    // Less those of kubectl and of the pass that is waited for.
    let requests = (requests(kubectl) - quiet).saturating_sub(touched_requests + REQUESTS_OF_KUBECTL);
    assert!(requests <= REQUESTS_OF_A_CHANGE, "{requests} requests");
    let after = all_versions(kubectl);
    let touched: Vec<_> = after.difference(&before).collect();
    assert!(touched.iter().all(|name| name.contains("c2\"")), "{touched:?}");
    let memory = Usage(operator.process.id());
    assert!(memory.data_kb() <= MEMORY, "{} KiB", memory.data_kb());
    report(format_args!(
        "{count} clusters: exposed after {first:.1?}, insides looked at after {all:.1?}, {at_rest} writes, \
         {} and {requests} requests for one change, {} MB private, {} MB in all, {} MB at most",
        all_writes(&operator.status()) - at_rest,
        memory.data_kb() / 1_000,
        memory.pss_kb() / 1_000,
        memory.peak_kb() / 1_000,
    ));
}
