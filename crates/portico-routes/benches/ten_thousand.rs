//! What routes cost: memory per user cluster, and processor time per change, at growing numbers of clusters.
//!
//! `cargo bench -p portico-routes`. A good result at 10,000 clusters: far below 40 MB, and below 10 ms for
//! the slowest change. Each change is applied to the index and committed; a table then follows as in the
//! gateway: cloned as a whole if a key changed. Each number of clusters is measured in a process of its own,
//! so that memory freed by one does not hide what the next one takes.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its result and may fail on the spot"
)]

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use portico_api::annotations::{EXPOSE, PORT_MAPPING};
use portico_api::change::Change;
use portico_api::endpoint_slice::{
    Endpoint, EndpointConditions, EndpointPort, EndpointSlice, SERVICE_NAME_LABEL,
};
use portico_api::meta::{ObjectKey, ObjectMeta};
use portico_api::policy::ClusterPolicy;
use portico_api::service::{Service, ServicePort, ServiceSpec};
use portico_routes::index::{IndexChange, RouteIndex, Settings};
use portico_routes::route::{Backend, BackendId};
use portico_routes::table::{RouteChange, RouteTable};
use rustix::time::{ClockId, clock_gettime};

const CLUSTERS: [usize; 4] = [1, 100, 2_000, 10_000];
const CHANGES: usize = 1_000;
/// Services in the namespace of a cluster that are not exposed.
const UNEXPOSED: usize = 20;

/// `cargo bench` adds flags of its own; ours is the variable.
const ONE_SIZE: &str = "PORTICO_BENCH_CLUSTERS";

fn main() {
    match std::env::var(ONE_SIZE) {
        Ok(clusters) => measure(clusters.parse().unwrap()),
        Err(_) => {
            println!(
                "clusters  routes  index+table MB  bytes/route  first commit ms  \
                 then, us: median / p99 / slowest"
            );
            for clusters in CLUSTERS {
                let me = std::env::current_exe().unwrap();
                let status = Command::new(me).env(ONE_SIZE, clusters.to_string()).status().unwrap();
                assert!(status.success());
            }
        }
    }
}

/// An index and what a gateway makes of its commits.
struct Site {
    index: RouteIndex,
    backends: HashMap<Arc<BackendId>, Arc<Backend>>,
    table: Arc<RouteTable<Arc<Backend>>>,
    /// The table that a worker uses meanwhile: without it the next change would need no clone.
    in_use: Arc<RouteTable<Arc<Backend>>>,
}

impl Site {
    fn new() -> Self {
        let table = Arc::new(RouteTable::default());
        let in_use = Arc::clone(&table);
        Self {
            index: RouteIndex::new(Settings { in_kubernetes: true, ..Settings::default() }),
            backends: HashMap::new(),
            table,
            in_use,
        }
    }

    fn apply(&mut self, changes: impl IntoIterator<Item = IndexChange>) {
        changes.into_iter().for_each(|change| self.index.apply(change));
        for change in self.index.commit().into_iter().flat_map(|update| update.changes) {
            match change {
                RouteChange::Kept(..) | RouteChange::Front(_) => {}
                RouteChange::Backend(Change::Apply(backend)) => {
                    drop(self.backends.insert(backend.id.clone(), backend));
                }
                RouteChange::Backend(Change::Delete(id)) => drop(self.backends.remove(&id)),
                RouteChange::Route(Change::Apply(route)) => {
                    let backend = Arc::clone(&self.backends[&route.to]);
                    Arc::make_mut(&mut self.table).insert(route.key, backend);
                }
                RouteChange::Route(Change::Delete(key)) => {
                    Arc::make_mut(&mut self.table).remove(&key);
                }
            }
        }
        self.in_use = Arc::clone(&self.table);
    }
}

fn measure(clusters: usize) {
    let mut site = Site::new();
    let before = resident();
    let start = cpu_time();
    site.apply((0..clusters).flat_map(objects));
    let first = cpu_time() - start;
    let held = resident().saturating_sub(before);
    let routes = site.table.hosts.len() + site.table.authorities.len();
    println!(
        "{clusters:>8}  {routes:>6}  {:>14.1}  {:>11}  {:>15.1}",
        held as f64 / 1e6,
        held / routes,
        first.as_secs_f64() * 1e3
    );
    let some = |round: usize| round * 7919 % clusters;
    let before = resident();
    site.apply((0..clusters).flat_map(unexposed));
    let held = resident().saturating_sub(before) as f64 / 1e6;
    println!(
        "{:>64}  {held:>7.1} MB",
        format!("{UNEXPOSED} more Services a cluster, not exposed, and their ClusterIPs")
    );
    run("endpoints of one Service change", &mut site, |round| {
        vec![sliced(slice(some(round), "apiserver-external", round))]
    });
    run("one Service changes its host", &mut site, |round| {
        vec![written(service(some(round), "konnectivity-server", "SNI", &format!("h{round}")))]
    });
    run("one cluster is added", &mut site, |round| objects(clusters + round).collect());
    run("one cluster is removed", &mut site, |round| deletions(clusters + round));
    run("one policy changes", &mut site, |round| {
        let mut policy = (*ClusterPolicy::open_for_namespace(&namespace(some(round)))).clone();
        policy.budget.max_connections = u32::try_from(round + 1).ok();
        vec![IndexChange::Policy(Change::Apply(Arc::new(policy)))]
    });
    run("one more claims a host that many wait for", &mut site, |round| {
        vec![written(service(clusters + round, "apiserver-external", "SNI", "wanted.example.com"))]
    });
    let start = cpu_time();
    let rows = site.index.rows().count();
    println!("{:>64}  {:>7.0}", format!("all {rows} rows listed"), micros(cpu_time() - start));
}

fn run(what: &str, site: &mut Site, change: impl Fn(usize) -> Vec<IndexChange>) {
    let mut times: Vec<Duration> = (0..CHANGES)
        .map(|round| {
            let changes = change(round);
            let start = cpu_time();
            site.apply(changes);
            cpu_time() - start
        })
        .collect();
    times.sort_unstable();
    let [median, p99, slowest] = [CHANGES / 2, CHANGES * 99 / 100, CHANGES - 1].map(|at| micros(times[at]));
    println!("{what:>64}  {median:>7.1} / {p99:.1} / {slowest:.1}");
}

/// Processor time of this thread: the same on a busy machine, nearly.
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

fn objects(cluster: usize) -> impl Iterator<Item = IndexChange> {
    let host = format!("p{cluster:09}.north.kkp.example.com");
    let reverse_path = format!("konnectivity-server.{host}");
    [
        written(service(cluster, "apiserver-external", "SNI,Tunneling", &host)),
        sliced(slice(cluster, "apiserver-external", 0)),
        written(service(cluster, "konnectivity-server", "SNI", &reverse_path)),
        sliced(slice(cluster, "konnectivity-server", 0)),
    ]
    .into_iter()
}

/// Services of a control plane that nobody outside needs: etcd, DNS, metrics, webhooks.
fn unexposed(cluster: usize) -> impl Iterator<Item = IndexChange> {
    (0..UNEXPOSED).flat_map(move |number| {
        let mut service = service(cluster, &format!("internal-{number}"), "", "");
        service.metadata.annotations.clear();
        let place = u32::try_from(cluster * UNEXPOSED + number).unwrap();
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(172, 16, 0, 0).to_bits() + place).into();
        let slice = slice(cluster, &service.metadata.name, 0);
        [written(service), sliced(slice), IndexChange::ClusterIp(Change::Apply(address))]
    })
}

fn deletions(cluster: usize) -> Vec<IndexChange> {
    let key = |name: &str| ObjectKey::new(&namespace(cluster), name);
    let of = |name: &str| {
        let slice = key(&format!("{name}-{cluster:05x}"));
        [IndexChange::Service(Change::Delete(key(name))), IndexChange::EndpointSlice(Change::Delete(slice))]
    };
    ["apiserver-external", "konnectivity-server"].into_iter().flat_map(of).collect()
}

fn written(service: Service) -> IndexChange {
    IndexChange::Service(Change::Apply(Arc::new(service)))
}

fn sliced(slice: EndpointSlice) -> IndexChange {
    IndexChange::EndpointSlice(Change::Apply(Box::new(slice)))
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
