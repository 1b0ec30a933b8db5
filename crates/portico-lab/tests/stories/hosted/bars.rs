//! The bars of hosting, on a seed that does nothing else: how soon a cluster answers, ten of them at once,
//! what one costs, how soon it is gone. `scripts/prove hosting` runs it with the optimised program.

use std::thread;
use std::time::{Duration, Instant};

use portico_lab::{Host, Image, Kubectl, Seed, operated, programs, say, volumes, wait};
use serde_json::{Value, json};

use super::cluster::{Hosted, STARTING};
use crate::support::SOON;

/// Clusters that are made one after the other.
const ONE_BY_ONE: usize = 20;

/// Clusters of the layout `dedicated` that are made one after the other.
const DEDICATED: usize = 10;

/// Clusters that are made at once.
const AT_ONCE: [&str; 10] = ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9"];

/// The name of each that is made alone.
const ALONE: &str = "alone";

/// A figure beside its bar.
struct Row(&'static str, f64, f64);

#[test]
#[ignore = "takes a quarter of an hour, and a machine that does nothing else: scripts/prove hosting"]
fn hosted_clusters_hold_their_bars() {
    let (_turn, lab, seed) = crate::seeded_by("hosting-bars", Seed::start_with_names);
    seed.import(&Image::api_server().unwrap()).unwrap();
    volumes::offer(&seed, ONE_BY_ONE + DEDICATED + AT_ONCE.len(), "5Gi").unwrap();
    let (client, front) = (lab.host("client").unwrap(), lab.free_address().unwrap());
    for name in AT_ONCE.into_iter().chain([ALONE]) {
        lab.name_resolves(&operated::external_name(name), front).unwrap();
    }
    operated::install(&seed, front).unwrap();
    wait::until("the front Service", SOON, || seed.give_this_address("portico", "portico", front)).unwrap();
    for deployment in ["portico-operator", "portico-gateway"] {
        seed.kubectl().wait_rolled_out("portico", deployment, STARTING).unwrap();
    }

    let mut rows = Vec::new();
    for layout in ["compact", "dedicated"] {
        let rounds = if layout == "compact" { ONE_BY_ONE } else { DEDICATED };
        let (mut answers, mut ends, mut memory) = (Vec::new(), Vec::new(), 0.0);
        for round in 0..rounds {
            let start = Instant::now();
            create(&seed, &[ALONE], layout);
            let hosted = answered(ALONE, layout, &seed, &client);
            answers.push(start.elapsed().as_secs_f64());
            for condition in ["PorticoControlPlaneReady", "PorticoUserClusterReady"] {
                operated::wait_condition(&seed, ALONE, condition).unwrap();
            }
            if round + 1 == rounds && layout == "compact" {
                memory = memory_at_rest(&hosted);
            }
            ends.push(delete(&seed, &[ALONE]));
        }
        answers.sort_by(f64::total_cmp);
        ends.sort_by(f64::total_cmp);
        say(format_args!("{layout}: answered after {answers:.1?} s, gone after {ends:.1?} s"));
        if layout == "compact" {
            rows.push(Row("compact, first authenticated answer, p50, s", answers[rounds / 2], 15.0));
            rows.push(Row("compact, the same, the slowest of 20, s", answers[rounds - 1], 25.0));
            rows.push(Row("compact, private memory awake, MiB", memory, 260.0));
            rows.push(Row("compact, deleted, the slowest of 20, s", ends[rounds - 1], 20.0));
        } else {
            rows.push(Row("dedicated, first authenticated answer, s", answers[rounds / 2], f64::INFINITY));
            rows.push(Row("dedicated, deleted, the slowest of 10, s", ends[rounds - 1], 20.0));
        }
    }

    let start = Instant::now();
    create(&seed, &AT_ONCE, "compact");
    let times = thread::scope(|scope| {
        let one = |name| {
            answered(name, "compact", &seed, &client);
            start.elapsed().as_secs_f64()
        };
        let waiting = AT_ONCE.map(|name| scope.spawn(move || one(name)));
        waiting.map(|one| one.join().unwrap())
    });
    say(format_args!("ten at once: answered after {times:.1?} s"));
    let slowest = times.into_iter().fold(0.0, f64::max);
    rows.push(Row("ten at once, all answer, s", slowest, 60.0));
    rows.push(Row("ten at once, restarts", restarts(&seed), 0.0));
    say(format_args!("ten at once: gone after {:.1} s", delete(&seed, &AT_ONCE)));

    let mut short = 0;
    for Row(what, figure, bar) in &rows {
        let verdict = if figure <= bar { "holds" } else { "SHORT" };
        short += usize::from(figure > bar);
        say(format_args!("| {what} | {figure:.1} | {bar} | {verdict} |"));
    }
    assert_eq!(short, 0, "bars that do not hold");
}

fn create(seed: &Seed, names: &[&str], layout: &str) {
    let version = programs::kube_version().unwrap();
    let items: Vec<Value> = names
        .iter()
        .map(|name| {
            let mut object = operated::cluster_object((name, "Tunneling"), version.trim_start_matches('v'));
            object["metadata"]["annotations"] = json!({"portico.k8c.io/layout": layout});
            // One etcd is what this machine has volumes and room for.
            object["spec"]["componentsOverride"] = json!({"etcd": {"clusterSize": 1}});
            object
        })
        .collect();
    seed.kubectl().apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
}

/// Once its administrator is answered, from outside. Ten that look again and again would take half of the
/// machine: kubectl watches, and nobody is answered before the condition that it waits for.
fn answered<'a>(name: &'static str, layout: &'static str, seed: &'a Seed, client: &'a Host) -> Hosted<'a> {
    let (kubectl, limit) = (seed.kubectl(), format!("--timeout={}s", STARTING.as_secs()));
    let ready = "--for=jsonpath={.status.conditions.PorticoControlPlaneReady.status}=True";
    kubectl.run(&["wait", ready, &limit, &format!("cluster/{name}")]).unwrap();
    let file = client.dir().join(format!("{name}.kubeconfig"));
    let template = "--output=go-template={{.data.kubeconfig | base64decode}}";
    let secret = ["get", "secret", "admin-kubeconfig", "-n", &format!("cluster-{name}"), template];
    std::fs::write(&file, kubectl.run(&secret).unwrap()).unwrap();
    let kubectl = Kubectl::new(client, &file).unwrap();
    let hosted = Hosted { name, layout, node_port: 0, seed, client, kubectl };
    wait::until("the first answer", SOON, || hosted.answers()).unwrap();
    hosted
}

/// Deletes Clusters, and returns how long that took in seconds.
fn delete(seed: &Seed, names: &[&str]) -> f64 {
    let start = Instant::now();
    seed.kubectl().run(&[&["delete", "cluster"], names].concat()).unwrap();
    start.elapsed().as_secs_f64()
}

/// The private memory of the one pod, in MiB, once the garbage of its start has been collected: Go looks at
/// least every two minutes.
fn memory_at_rest(hosted: &Hosted<'_>) -> f64 {
    let pod = hosted.ready_pod("app=apiserver").unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(180) {
        thread::park_timeout(Duration::from_secs(10));
    }
    hosted.tell_memory(&pod);
    let programs = hosted.seed.node().private_memory(&pod).unwrap();
    programs.iter().map(|(_, bytes)| *bytes as f64).sum::<f64>() / f64::from(1 << 20)
}

/// Containers of control planes that were started again.
fn restarts(seed: &Seed) -> f64 {
    let pods = seed.kubectl().get(&["pods", "-A", "-l", "cluster"]).unwrap();
    let statuses = pods["items"].as_array().unwrap().iter().flat_map(|pod| {
        ["initContainerStatuses", "containerStatuses"]
            .into_iter()
            .flat_map(|field| pod["status"][field].as_array().into_iter().flatten())
    });
    statuses.filter_map(|status| status["restartCount"].as_f64()).sum()
}
