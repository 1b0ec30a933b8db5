//! What one tenant can take from the others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::common::wait_until;
use crate::proof::*;

/// The descriptors of the gateway.
const DESCRIPTORS: u64 = 400;
/// Connections of one tenant: more than there are descriptors for.
const GREEDY: usize = 400;
const PORT: u16 = 30_444;

/// `portico gateway` with few descriptors, and two clusters, `greedy` and `honest`.
fn gateway() -> (Site, Gateway) {
    let site = Site::new();
    for (index, name) in ["greedy", "honest"].into_iter().enumerate() {
        let port = PORT + u16::try_from(index).unwrap();
        site.put(name, &manifest(name, Some(port), echo(LOOPBACK)));
    }
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={DESCRIPTORS}:{DESCRIPTORS}")).arg(env!("CARGO_BIN_EXE_portico"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    let gateway = Gateway::start_with(command, &site, &[]);
    (site, gateway)
}

/// Whether others, and the admin listener, are served while `greedy` holds what it could get.
fn others_are_served(gateway: &Gateway) {
    for round in 0..20 {
        assert!(by_name(gateway, "honest").is_some(), "round {round}");
        assert!(by_authority(gateway, "honest").is_some(), "round {round}");
        assert!(by_port(gateway, PORT + 1).is_some(), "round {round}");
        assert_eq!(gateway.get("/readyz"), "ready\n");
    }
    let refused = "portico_refusals_total{reason=\"fair_share\",side=\"gateway\"}";
    assert!(gateway.metric(refused) > 0);
    assert_eq!(gateway.metric("portico_refusals_total{reason=\"out_of_descriptors\",side=\"gateway\"}"), 0);
    // Clients that were refused are accepted first, and for a moment that may be too many at once.
    wait_until("accepting goes on", || gateway.metric("portico_accepting") == 1);
}

#[test]
fn idle_connections_to_one_node_port_leave_descriptors_to_all_others() {
    let (_site, gateway) = gateway();
    let _held: Vec<TcpStream> = (0..GREEDY).map(|_| connect(gateway.node_port(PORT))).collect();
    others_are_served(&gateway);
}

#[test]
fn a_cluster_with_another_fair_share_gets_it_and_the_listing_shows_what_it_takes() {
    let (site, gateway) = gateway();
    // How many of the 250 descriptors for all clusters it takes, and how many it may take.
    let used = || {
        let routes: serde_json::Value = serde_json::from_str(&gateway.get("/routes")).unwrap();
        let shares = routes["shares"].as_array().cloned().unwrap_or_default();
        let greedy = shares.into_iter().find(|share| share["cluster"] == "greedy").unwrap_or_default();
        ["taken", "most"].map(|what| greedy["descriptors"][what].as_u64().unwrap_or(0))
    };
    let _held: Vec<TcpStream> = (0..GREEDY).map(|_| connect(gateway.node_port(PORT))).collect();
    wait_until("it has half", || used() == [124, 125]);
    let more = "annotations:\n    portico.k8c.io/fair-share: \"80\"\n";
    let greedy = manifest("greedy", Some(PORT), echo(LOOPBACK)).replacen("annotations:\n", more, 1);
    site.put("greedy", &greedy);
    // Some of the first connections may not be accepted yet. They may take some of it at once.
    wait_until("it may have more", || matches!(used(), [124..=200, 200]));
    let _more: Vec<TcpStream> = (0..GREEDY).map(|_| connect(gateway.node_port(PORT))).collect();
    wait_until("it has more", || used() == [200, 200]);
    let ratio = gateway.get("/metrics");
    let ratio = ratio.lines().find(|line| line.starts_with("portico_cluster_fair_share_used_ratio"));
    assert_eq!(ratio, Some("portico_cluster_fair_share_used_ratio{cluster=\"greedy\"} 1.0"));
    assert!(by_name(&gateway, "honest").is_some());
}

#[test]
fn streams_of_one_cluster_leave_descriptors_to_all_others() {
    let (_site, gateway) = gateway();
    let ask = |_| {
        let mut stream = connect(gateway.tunnel);
        stream.write_all(connect_request("greedy").as_bytes()).unwrap();
        stream
    };
    let _held: Vec<TcpStream> = (0..GREEDY).map(ask).collect();
    others_are_served(&gateway);
}

#[test]
fn refusals_of_some_clients_do_not_silence_those_of_others() {
    let (_site, mut gateway) = {
        let site = Site::new();
        let gone = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        site.put("honest", &manifest("honest", None, gone));
        let gateway = Gateway::start(&site, &["--access-log", "text"]);
        (site, gateway)
    };
    let unknown = hello("unknown");
    for _ in 0..400 {
        let mut stream = connect(gateway.sni);
        // Fails for one that is closed already.
        let _ = stream.write_all(&unknown).and_then(|()| stream.read_exact(&mut [0]));
    }
    assert!(by_name(&gateway, "honest").is_none());
    gateway.process.wait_for("cluster=honest");
    let lines = gateway.process.said().matches("reason=unknown").count();
    let left_out = gateway.metric("portico_access_lines_left_out_total");
    assert!(left_out > 0 && lines as u64 + left_out == 400, "{lines} lines, {left_out} left out");
}
