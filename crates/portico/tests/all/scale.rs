//! Two thousand clusters in one directory: what each weighs, and what one change costs.

use std::net::SocketAddr;
use std::time::Instant;

use crate::proof::*;

const CLUSTERS: u64 = 2_000;
/// What a cluster with three routes may add to the memory of the process: Services, endpoints, routes,
/// counters, and what is remembered of its file. Data only, for the program itself weighs three times as much
/// where nothing is optimised. It was 4,410 to 4,480 when last measured, as the allocator finds room. The
/// bound keeps it from creeping up; whether the shipped binary as a whole holds its bar is measured in
/// `bench/`.
const MOST_BYTES_EACH: u64 = 4_600;
/// Changes whose cost is averaged.
const CHANGES: u32 = 20;

/// A cluster with three routes, as they are with the Tunneling strategy. They lead to its API server by
/// server name and by authority, and to the server of its reverse path by a server name.
fn cluster(name: &str, endpoint: SocketAddr) -> String {
    let api_server = manifest(name, None, endpoint);
    let reverse_path = api_server
        .replace("apiserver-external", "konnectivity-server")
        .replace("SNI,Tunneling", "SNI")
        .replace(&host(name), &host(&format!("konnectivity-server.{name}")));
    format!("{api_server}---\n{reverse_path}")
}

#[test]
fn a_cluster_with_three_routes_costs_less_than_five_kilobytes_and_another_is_served_at_once() {
    let endpoint = echo(LOOPBACK);
    let empty = Gateway::start(&Site::new(), &[]).usage().data_kb();
    let site = Site::new();
    for number in 0..CLUSTERS {
        let name = format!("c{number}");
        site.put(&name, &cluster(&name, endpoint));
    }
    let begin = Instant::now();
    let gateway = Gateway::start(&site, &[]);
    let started = begin.elapsed();
    let metrics = gateway.get("/metrics");
    assert_eq!(metric(&metrics, "portico_routes{by=\"host\"}"), 2 * CLUSTERS);
    assert_eq!(metric(&metrics, "portico_routes{by=\"authority\"}"), CLUSTERS);
    let usage = gateway.usage();
    let start_cpu = usage.cpu();

    for number in 0..CHANGES {
        let name = format!("late{number}");
        site.put(&name, &cluster(&name, endpoint));
        wait_until("the new cluster is routable", || by_name(&gateway, &name).is_some());
        assert!(by_authority(&gateway, &name).is_some());
    }
    let each = (usage.data_kb() - empty) * 1024 / CLUSTERS;
    report(format_args!(
        "{CLUSTERS} clusters: ready after {:.1} s (CPU {:.1} s); {each} bytes each; the process {} KiB, of \
         them data {} KiB, {empty} KiB without clusters; CPU of one change, with the connections that found \
         it routable: {:.1} ms",
        started.as_secs_f64(),
        start_cpu.as_secs_f64(),
        usage.pss_kb(),
        usage.data_kb(),
        ((usage.cpu() - start_cpu) / CHANGES).as_secs_f64() * 1e3,
    ));
    assert!(each <= MOST_BYTES_EACH, "{each} bytes a cluster");
}
