//! Many clusters whose control planes are hosted, as far as their objects go: no kubelet runs here.

use std::time::{Duration, Instant};

use portico_lab::{ApiServer, long_form};
use serde_json::{Value, json};

use super::{MEMORY, Operator, all_writes, create, install, passes, writes as written_by};
use crate::proof::{Usage, report};

/// Most writes to the seed's API by which a cluster gets its control plane, Events and conditions included.
const WRITES: u64 = 50;

fn cluster(index: usize) -> Value {
    let layout = if index.is_multiple_of(5) { "dedicated" } else { "compact" };
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": {"name": format!("c{index}"), "annotations": {"portico.k8c.io/layout": layout}},
        "spec": {"humanReadableName": "one of many", "version": "1.34.4", "exposeStrategy": "Tunneling",
            "cloud": {"dc": "lab-1", "bringyourown": {}}}})
}

/// 20 clusters; 500 with `PORTICO_PROVE=1`.
#[test]
fn many_clusters_are_hosted_with_few_writes_each_and_none_at_rest() {
    let count = long_form(20, 500);
    let api = ApiServer::start("hosts").unwrap();
    let kubectl = api.kubectl();
    install(kubectl);
    create(kubectl, &(0..count).map(cluster).collect::<Vec<_>>());
    let start = Instant::now();
    let operator = Operator::start_with(&api, &["--image=localhost/portico:dev"]);
    operator.wait_status("every control plane is made", |status| {
        let reports = status["controlPlanes"]["reports"].as_object();
        let starting = reports.into_iter().flatten().filter(|(_, report)| report["reason"] == "Starting");
        starting.count() == count
    });
    let made = start.elapsed();
    let idle = |status: &Value| {
        let controllers = status["controllers"].as_object();
        controllers.is_some_and(|all| all.values().all(|work| work["queued"] == 0))
    };
    // The last write of each is about its inside, which nobody reaches here.
    operator.wait_status("nothing to wait", |status| {
        let insides = status["userClusters"]["reports"].as_object().map_or(0, |reports| reports.len());
        insides == count && idle(status)
    });
    let (writes, memory) = (all_writes(&operator.status()), Usage(operator.process.id()));
    let each = writes.div_ceil(count as u64);
    assert!(each <= WRITES, "{each} writes for a cluster");
    let sets = kubectl.get(&["statefulsets", "-A"]).unwrap();
    assert_eq!(sets["items"].as_array().unwrap().len(), count, "one pod, or that of etcd first");
    // Nobody reaches an inside here, so that is asked for again and again: of the others nothing is written.
    let work = |status: &Value| status["controllers"]["portico-hosting"].clone();
    let (before, written) = (passes(&work(&operator.status())), written_by(&work(&operator.status())));
    kubectl.run(&["label", "cluster", "c0", "touched=true"]).unwrap();
    operator.wait_status("another pass", |status| passes(&work(status)) > before && idle(status));
    assert_eq!(written_by(&work(&operator.status())), written, "nothing is written at rest");
    // At rest: what making them has left free is given back by then.
    let burst = memory.data_kb();
    let given_up = Instant::now() + Duration::from_secs(60);
    while memory.data_kb() > MEMORY && Instant::now() < given_up {
        std::thread::sleep(Duration::from_secs(1));
    }
    report(format_args!(
        "{count} hosted clusters, objects alone: made after {made:.1?}, {each} writes each, {} MB private, \
         {} MB just after, {} MB at most",
        memory.data_kb() / 1_000,
        burst / 1_000,
        memory.peak_kb() / 1_000,
    ));
    assert!(memory.data_kb() <= MEMORY, "{} KiB", memory.data_kb());
}
