//! A gateway that runs out of file descriptors stops accepting, serves on what is open, says so, and recovers
//! as connections end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::proof::*;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const CLUSTER: &str = "a";
const PORT: u16 = 30_443;
/// The descriptors allowed.
const ALLOWED: u64 = 100;
/// Clusters with a listener each, which leaves some twenty connections.
const LISTENERS: u16 = 30;
/// Clusters that are used: one alone could not use the descriptors up, for it gets as many as are left.
const USED: usize = 10;
/// Clients of each, in all more than there are descriptors for.
const CLIENTS: usize = 8;

/// `portico` with few descriptors.
fn with_few_descriptors() -> Command {
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={ALLOWED}:{ALLOWED}")).arg(env!("CARGO_BIN_EXE_portico"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// A client whose hello is sent and waits for an answer.
fn knock(gateway: &Gateway, hello: &[u8]) -> TcpStream {
    let mut stream = connect(gateway.sni);
    stream.write_all(hello).unwrap();
    stream
}

/// Whether a client that knocked is let in by and by: its hello comes back from the echo server.
fn is_let_in(stream: &mut TcpStream, hello: &[u8]) -> bool {
    let mut answer = vec![0; hello.len()];
    stream.read_exact(&mut answer).is_ok() && answer == hello
}

/// Sends a megabyte through an echo server: more than fits into buffers, so that a pipe is asked for.
fn carries_a_megabyte(stream: &mut TcpStream) -> bool {
    let bytes: Vec<u8> = (0_u32..250_000).flat_map(u32::to_be_bytes).collect();
    let (mut writer, sent) = (stream.try_clone().unwrap(), bytes.clone());
    let write = std::thread::spawn(move || writer.write_all(&sent).is_ok());
    let mut answer = vec![0; bytes.len()];
    stream.read_exact(&mut answer).is_ok() && write.join().unwrap() && answer == bytes
}

#[test]
fn out_of_descriptors_it_serves_on_what_is_open_says_so_and_lets_the_others_in_as_connections_end() {
    let site = Site::new();
    site.put(CLUSTER, &manifest(CLUSTER, Some(PORT), echo(LOOPBACK)));
    for number in 0..LISTENERS {
        let name = format!("listens-{number}");
        site.put(&name, &manifest(&name, Some(PORT + 1 + number), echo(LOOPBACK)));
    }
    let mut gateway = Gateway::start_with(with_few_descriptors(), &site, &[]);
    let mut open: Vec<TcpStream> =
        [by_name(&gateway, CLUSTER), by_authority(&gateway, CLUSTER), by_port(&gateway, PORT)]
            .into_iter()
            .flatten()
            .collect();
    assert_eq!(open.len(), 3);

    let hellos: Vec<Vec<u8>> = (0..USED).map(|number| hello(&format!("listens-{number}"))).collect();
    let clients = hellos.iter().cycle().take(USED * CLIENTS);
    let mut clients: Vec<_> = clients.map(|hello| (knock(&gateway, hello), hello)).collect();
    gateway.process.wait_for("out of file descriptors");
    assert!(gateway.get("/readyz?verbose").contains("[!] accepting: rests until file descriptors are free"));
    assert_eq!(gateway.metric("portico_accepting"), 0);
    assert!(open.iter_mut().all(|stream| comes_back(stream, b"ping")));
    assert!(open.iter_mut().all(carries_a_megabyte));

    // Each client that is let in ends, and makes room for another: none is turned away, late ones wait.
    let served = clients
        .drain(..)
        .filter_map(|(mut client, hello)| is_let_in(&mut client, hello).then_some(()))
        .count();
    let metrics = gateway.get("/metrics");
    let refusals: Vec<_> =
        metrics.lines().filter(|line| line.starts_with("portico_cluster_refusals")).collect();
    assert_eq!(served, USED * CLIENTS, "{refusals:?}");
    assert!(open.iter_mut().all(|stream| comes_back(stream, b"ping")));
    for _ in 0..10 {
        assert!(by_name(&gateway, CLUSTER).is_some());
        assert!(by_authority(&gateway, CLUSTER).is_some());
        assert!(by_port(&gateway, PORT).is_some());
    }
    assert_eq!(gateway.metric("portico_refusals_total{reason=\"out_of_descriptors\",side=\"gateway\"}"), 0);
    gateway.process.wait_for("accepting goes on");
    assert_eq!(gateway.metric("portico_accepting"), 1);
    assert!(gateway.metric("portico_accept_rests_total") > 0);
}

#[test]
fn a_manifest_that_cannot_be_opened_for_want_of_descriptors_keeps_its_routes() {
    let (site, endpoint) = (Site::new(), echo(LOOPBACK));
    site.put(CLUSTER, &manifest(CLUSTER, None, endpoint));
    let mut gateway = Gateway::start(&site, &[]);
    let mut open = by_name(&gateway, CLUSTER).unwrap();
    let pid = i32::try_from(gateway.process.id()).ok().and_then(Pid::from_raw);
    let before = prlimit(pid, Resource::Nofile, Rlimit { current: Some(3), maximum: Some(20_000) }).unwrap();
    site.put(CLUSTER, &manifest(CLUSTER, Some(PORT), endpoint));
    gateway.process.wait_for("cannot be read");
    assert!(comes_back(&mut open, b"ping"));
    prlimit(pid, Resource::Nofile, before).unwrap();
    assert!(by_name(&gateway, CLUSTER).is_some(), "the route is still there");
}
