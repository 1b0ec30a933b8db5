//! What the route book costs: memory per user cluster, and processor time per change, at growing numbers of
//! clusters.
//!
//! `cargo bench -p portico-routes`. A good result at 10,000 clusters: far below 40 MB, far below 10 ms for
//! the slowest change, and medians that hardly differ from those at 100. Each number of clusters is measured
//! in a process of its own, so that memory freed by one does not hide what the next one takes. The reader of
//! the table is played by holding the last one handed out, as the gateway does: otherwise nothing would be
//! shared and nothing copied.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its result and may fail on the spot"
)]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use portico_api::annotations::{EXPOSE, PORT_MAPPING};
use portico_api::endpoint_slice::{
    Endpoint, EndpointConditions, EndpointPort, EndpointSlice, SERVICE_NAME_LABEL,
};
use portico_api::meta::ObjectMeta;
use portico_api::policy::ClusterPolicy;
use portico_api::service::{Service, ServicePort, ServiceSpec};
use portico_routes::book::{Change, RouteBook, Settings};
use portico_routes::table::RouteTable;
use rustix::time::{ClockId, clock_gettime};

const CLUSTERS: [usize; 4] = [1, 100, 2_000, 10_000];
const CHANGES: usize = 1_000;

/// `cargo bench` adds flags of its own; ours is the variable.
const ONE_SIZE: &str = "PORTICO_BENCH_CLUSTERS";

fn main() {
    match std::env::var(ONE_SIZE) {
        Ok(clusters) => measure(clusters.parse().unwrap()),
        Err(_) => {
            println!(
                "clusters  routes  book+table MB  bytes/route  first commit ms  then, us: median / p99 / slowest"
            );
            for clusters in CLUSTERS {
                let me = std::env::current_exe().unwrap();
                let status = Command::new(me).env(ONE_SIZE, clusters.to_string()).status().unwrap();
                assert!(status.success());
            }
        }
    }
}

fn measure(clusters: usize) {
    let mut book = RouteBook::new(Settings::default());
    let before = resident();
    let start = cpu_time();
    for cluster in 0..clusters {
        objects(cluster).for_each(|change| book.apply(change));
    }
    book.commit();
    let first = cpu_time() - start;
    let held = resident().saturating_sub(before);
    let routes = book.table().len();
    println!(
        "{clusters:>8}  {routes:>6}  {:>13.1}  {:>11}  {:>15.1}",
        held as f64 / 1e6,
        held / routes,
        first.as_secs_f64() * 1e3
    );
    let mut reader = book.table().clone();
    let some = |round: usize| round * 7919 % clusters;
    run("endpoints of one Service change", &mut book, &mut reader, |round| {
        vec![Change::EndpointSlice(slice(some(round), "apiserver-external", round))]
    });
    run("one Service changes its host", &mut book, &mut reader, |round| {
        vec![Change::Service(service(some(round), "konnectivity-server", "SNI", &format!("h{round}")))]
    });
    run("one cluster is added", &mut book, &mut reader, |round| objects(clusters + round).collect());
    run("one cluster is removed", &mut book, &mut reader, |round| removals(clusters + round));
    run("one policy changes", &mut book, &mut reader, |round| {
        let mut policy = (*ClusterPolicy::open_for_namespace(&namespace(some(round)))).clone();
        policy.budget.max_connections = u32::try_from(round + 1).ok();
        vec![Change::Policy(namespace(some(round)).into(), Arc::new(policy))]
    });
    run("one more claims a host that many wait for", &mut book, &mut reader, |round| {
        vec![Change::Service(service(clusters + round, "apiserver-external", "SNI", "wanted.example.com"))]
    });
    let start = cpu_time();
    let rows = book.rows().count();
    println!("{:>64}  {:>7.0}", format!("all {rows} rows listed"), micros(cpu_time() - start));
}

fn run(what: &str, book: &mut RouteBook, reader: &mut RouteTable, change: impl Fn(usize) -> Vec<Change>) {
    let mut times: Vec<Duration> = (0..CHANGES)
        .map(|round| {
            let changes = change(round);
            let start = cpu_time();
            changes.into_iter().for_each(|change| book.apply(change));
            if let Some(update) = book.commit() {
                *reader = update.table;
            }
            cpu_time() - start
        })
        .collect();
    times.sort_unstable();
    let [median, p99, slowest] = [CHANGES / 2, CHANGES * 99 / 100, CHANGES - 1].map(|at| micros(times[at]));
    println!("{what:>64}  {median:>7.1} / {p99:.1} / {slowest:.1}");
}

/// Processor time of this thread: what else the machine does makes no difference to it.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

// === A seed of KKP clusters under `Tunneling` ===

fn namespace(cluster: usize) -> String {
    format!("cluster-p{cluster:09}")
}

fn objects(cluster: usize) -> impl Iterator<Item = Change> {
    let host = format!("p{cluster:09}.north.kkp.example.com");
    [
        Change::Service(service(cluster, "apiserver-external", "SNI,Tunneling", &host)),
        Change::EndpointSlice(slice(cluster, "apiserver-external", 0)),
        Change::Service(service(
            cluster,
            "konnectivity-server",
            "SNI",
            &format!("konnectivity-server.{host}"),
        )),
        Change::EndpointSlice(slice(cluster, "konnectivity-server", 0)),
    ]
    .into_iter()
}

fn removals(cluster: usize) -> Vec<Change> {
    let key = |name: &str| portico_api::meta::ObjectKey::new(&namespace(cluster), name);
    ["apiserver-external", "konnectivity-server"]
        .into_iter()
        .flat_map(|name| {
            let slice = format!("{name}-{cluster:05x}");
            [Change::RemoveService(key(name)), Change::RemoveEndpointSlice(key(&slice))]
        })
        .collect()
}

fn service(cluster: usize, name: &str, expose: &str, host: &str) -> Service {
    let mut metadata = meta(cluster, name);
    metadata.creation_timestamp = jiff::Timestamp::from_second(1_700_000_000 + cluster as i64).ok();
    metadata.annotations.insert(EXPOSE.into(), expose.into());
    metadata.annotations.insert(PORT_MAPPING.into(), format!(r#"{{"secure":"{host}"}}"#).into());
    let port = ServicePort { name: "secure".into(), port: 443, ..ServicePort::default() };
    Service { metadata, spec: ServiceSpec { ports: vec![port], ..ServiceSpec::default() } }
}

/// Two replicas, as KKP runs by default; another `round`, other addresses.
fn slice(cluster: usize, of: &str, round: usize) -> EndpointSlice {
    let mut metadata = meta(cluster, &format!("{of}-{cluster:05x}"));
    metadata.labels.insert(SERVICE_NAME_LABEL.into(), of.into());
    let endpoint = |pod: usize| Endpoint {
        addresses: vec![format!("10.{}.{}.{}", round % 256, cluster / 250, cluster % 125 * 2 + pod).into()],
        conditions: EndpointConditions { ready: Some(true) },
    };
    EndpointSlice {
        metadata,
        address_type: "IPv4".into(),
        endpoints: vec![endpoint(0), endpoint(1)],
        ports: vec![EndpointPort { name: Some("secure".into()), port: Some(6443), protocol: None }],
    }
}

fn meta(cluster: usize, name: &str) -> ObjectMeta {
    let uid = format!("3f2a9c1e-0b7d-4e55-9a10-{cluster:012x}");
    ObjectMeta {
        name: name.into(),
        namespace: namespace(cluster).into(),
        uid: uid.into(),
        ..ObjectMeta::default()
    }
}
