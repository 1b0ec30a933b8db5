//! What planning costs: `cargo run --release -p portico-expose --example scale [CLUSTERS]` (10,000 if not
//! given).
//!
//! Prints the time of the first plan of all clusters, of one change, and of a change of the Seed. Prints the
//! memory of the planner too: growth of the process's resident set (Linux only).

#![expect(clippy::print_stdout, reason = "a program that prints a table")]

use std::time::Instant;

use portico_api::change::Change;
use portico_api::port_range::PortRange;
use portico_expose::change::PlannerChange;
use portico_expose::persisted::PersistedState;
use portico_expose::planner::{Mode, Planner, Settings};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count: usize = std::env::args().nth(1).map_or(Ok(10_000), |count| count.parse())?;
    let settings = Settings { reserved_ports: vec![6_443], ..Settings::new(Mode::Plan) };
    let mut planner = Planner::new(settings, PersistedState::default(), 1);
    let before = resident_kib();

    let start = Instant::now();
    planner.apply([
        PlannerChange::Configuration(Change::Apply(Box::new(serde_json::from_str(&format!(
            r#"{{"metadata": {{"name": "kubermatic", "namespace": "kubermatic"}},
                "spec": {{"ingress": {{"domain": "kkp.example.com"}},
                    "userCluster": {{"nodePortRange": "{}"}}}}}}"#,
            PortRange::new(10_000, 65_000)?
        ))?))),
        seed("[]")?,
    ]);
    let mut outputs = 0;
    for index in 0..count {
        outputs += planner.apply([cluster(index, "[]")?]).len();
    }
    let first = start.elapsed();
    let resident = resident_kib().saturating_sub(before);

    let start = Instant::now();
    const CHANGES: usize = 1_000;
    for round in 0..CHANGES {
        let list = if round % 2 == 0 { r#"["192.0.2.0/24"]"# } else { "[]" };
        planner.apply([cluster(7, list)?]);
    }
    let one = start.elapsed() / u32::try_from(CHANGES)?;

    let start = Instant::now();
    let by_seed = planner.apply([seed(r#"["198.51.100.0/24"]"#)?]).len();
    let seed = start.elapsed();

    let start = Instant::now();
    let stored = planner.persisted().to_json()?.len();
    println!("{count} clusters, {outputs} outputs, {} problems", planner.problems().count());
    println!("all of them, one by one, with reading JSON   {first:>12.1?}");
    println!("one changed cluster, with reading JSON       {one:>12.1?}");
    println!("a changed Seed ({by_seed} outputs)              {seed:>12.1?}");
    println!("what is remembered as JSON ({stored} bytes)    {:>12.1?}", start.elapsed());
    println!("resident memory of the planner               {resident:>9} KiB");
    Ok(())
}

fn seed(defaults: &str) -> Result<PlannerChange, serde_json::Error> {
    let text = format!(
        r#"{{"metadata": {{"name": "kubermatic", "namespace": "kubermatic"}},
            "spec": {{"defaultAPIServerAllowedIPRanges": {defaults}}}}}"#
    );
    Ok(PlannerChange::Seed(Change::Apply(Box::new(serde_json::from_str(&text)?))))
}

fn cluster(index: usize, allowed: &str) -> Result<PlannerChange, serde_json::Error> {
    let strategy = ["NodePort", "LoadBalancer", "Tunneling"][index % 3];
    let text = format!(
        r#"{{"metadata": {{"name": "c{index:09}", "uid": "9b2f6f0e-3c1d-4c0e-8f63-{index:012}",
                "creationTimestamp": "2026-08-01T00:00:00Z", "labels": {{"project-id": "p7k2m4xzq1"}}}},
            "spec": {{"exposeStrategy": "{strategy}", "apiServerAllowedIPRanges": {{"cidrBlocks": {allowed}}},
                "clusterNetwork": {{"pods": {{"cidrBlocks": ["172.25.0.0/16"]}},
                    "services": {{"cidrBlocks": ["10.240.16.0/20"]}}}}}},
            "status": {{"namespaceName": "cluster-c{index:09}"}}}}"#
    );
    Ok(PlannerChange::Cluster(Change::Apply(Box::new(serde_json::from_str(&text)?))))
}

/// Resident memory of this process in KiB; 0 where the system does not say.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
}
