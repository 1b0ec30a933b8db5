//! `portico gateway` on a directory: it follows the files, answers questions about itself, remembers
//! NodePorts, stops with a drain, and hands its listeners over.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use crate::common::{PATIENCE, Process, directory, free_port, get, port_of, wait_until};
use crate::proof::{LOOPBACK, echo};
use portico_lab::manifests;
use portico_lab::metrics::names;
use rustix::fs::{CWD, Mode, OFlags, mkfifoat};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, send,
    shutdown, socket_with,
};
use serde_json::json;
use tempfile::TempDir;

fn service(node_port: u16, upstream: u16) -> String {
    let expose = [("nodeport-proxy.k8s.io/expose", "NodePort")];
    manifests::service("cluster-a", "api", &expose, Some(node_port))
        + &manifests::slice("cluster-a", "api", LOOPBACK.0.into(), upstream)
}

struct Gateway {
    process: Process,
    admin: u16,
}

/// A gateway on `folder`, ready.
fn gateway(folder: &Path, more: &[&str]) -> Gateway {
    let gateway = starting(folder, &[&["--node-port-address", "127.0.0.1"], more].concat());
    wait_until("it is ready", || get(gateway.admin, "/readyz").0 == 200);
    gateway
}

/// A gateway on `folder`, of which only the admin listener is known to be open.
fn starting(folder: &Path, more: &[&str]) -> Gateway {
    let manifests = folder.to_str().unwrap();
    let arguments = ["gateway", "--manifests", manifests, "--sni-listen", "off", "--tunnel-listen", "off"];
    let admin = ["--admin-listen", "127.0.0.1:0", "--workers", "1"];
    let mut process = Process::start(&[&arguments[..], &admin, more].concat());
    let admin = port_of(&process.wait_for("listener=admin"));
    Gateway { process, admin }
}

/// One round trip on a connection.
fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping");
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn site() -> (TempDir, u16) {
    let port = free_port();
    (directory(&[("a.yaml", &service(port, echo(LOOPBACK).port()))]), port)
}

#[test]
fn listeners_come_and_go_with_the_files() {
    let (folder, port) = site();
    let gateway = gateway(folder.path(), &[]);
    let mut stream = connect(port);
    ping(&mut stream);
    let other = free_port();
    let text = service(other, echo(LOOPBACK).port()).replace("cluster-a", "cluster-b");
    fs::write(folder.path().join("b.yaml"), text).unwrap();
    wait_until("the new port is served", || TcpStream::connect(("127.0.0.1", other)).is_ok());
    ping(&mut connect(other));
    fs::remove_file(folder.path().join("b.yaml")).unwrap();
    wait_until("the port is closed", || TcpStream::connect(("127.0.0.1", other)).is_err());
    ping(&mut stream);
    drop(gateway);
}

#[test]
fn a_standard_error_that_nobody_reads_holds_up_nothing() {
    let (folder, port) = site();
    let (log, admin) = (folder.path().join("log.fifo"), free_port());
    mkfifoat(CWD, &log, Mode::RWXU).unwrap();
    // Both ends: a writer waits for a reader otherwise. Full, it takes no byte of the process.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
    let mut unread = fs::File::options().read(true).write(true).custom_flags(flags).open(&log).unwrap();
    while unread.write(&[b'x'; 4096]).is_ok() {}
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 2>\"$LOG\""]).env("LOG", &log);
    shell.arg(env!("CARGO_BIN_EXE_portico")).args(["gateway", "--node-port-address", "127.0.0.1"]);
    shell.args(["--sni-listen", "off", "--tunnel-listen", "off", "--workers", "1"]);
    shell.arg("--admin-listen").arg(format!("127.0.0.1:{admin}")).arg("--manifests").arg(folder.path());
    let mut process = Process::of(&mut shell);
    wait_until("it is ready", || {
        TcpStream::connect(("127.0.0.1", admin)).is_ok() && get(admin, "/readyz").0 == 200
    });
    for _ in 0..100 {
        assert_eq!(get(admin, "/healthz").0, 200);
        ping(&mut connect(port));
    }
    process.signal("TERM");
    assert!(process.wait().success());
}

#[test]
fn it_says_what_is_open_what_is_routed_and_what_is_counted() {
    let (folder, port) = site();
    let gateway = gateway(folder.path(), &[]);
    let mut stream = connect(port);
    ping(&mut stream);
    let (_, connections) = get(gateway.admin, "/connections");
    let connections: serde_json::Value = serde_json::from_str(&connections).unwrap();
    assert_eq!(connections[0]["cluster"], "a");
    assert_eq!(connections[0]["listener"], format!("node_port:{port}"));
    assert_eq!(connections[0]["client"], stream.local_addr().unwrap().to_string());
    assert_eq!(connections[0]["bytes_up"], 4);
    let (_, table) = get(gateway.admin, "/connections?o=table&cluster=a");
    assert!(table.starts_with("CLUSTER") && table.lines().count() == 2, "{table}");
    let (_, none) = get(gateway.admin, "/connections?cluster=b");
    assert_eq!(none.trim(), "[]");
    it_says_which_clients_come_by_which_door(&gateway, &stream);
    let (_, routes) = get(gateway.admin, "/routes");
    let routes: serde_json::Value = serde_json::from_str(&routes).unwrap();
    assert_eq!(routes["routes"][0]["key"]["port"], port);
    assert_eq!(routes["routes"][0]["state"], "ready");
    let (_, metrics) = get(gateway.admin, "/metrics");
    for line in [
        "portico_ready 1",
        "portico_cluster_open_connections{cluster=\"a\"} 1",
        "portico_cluster_connections_total{cluster=\"a\"} 1",
        "portico_cluster_door_connections_total{cluster=\"a\",listener=\"node_port\"} 1",
        "portico_cluster_door_open_connections{cluster=\"a\",listener=\"node_port\"} 1",
        "portico_cluster_transferred_bytes_total{cluster=\"a\",direction=\"up\"} 4",
        "portico_routes{by=\"port\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    assert_eq!(get(gateway.admin, "/healthz"), (200, "ok\n".into()));
    assert_eq!(get(gateway.admin, "/nothing").0, 404);
    assert_eq!(get(gateway.admin, "/routes?cluster=a").0, 200);
    let (status, page) = get(gateway.admin, "/routes?cluster=nope");
    assert!(status == 404 && page.contains("\"nope\""), "{page}");
    assert_eq!(get(gateway.admin, "/routes?o=xml").0, 400);
}

/// Checks the doors of cluster `a`; `stream` is the only open connection.
fn it_says_which_clients_come_by_which_door(gateway: &Gateway, stream: &TcpStream) {
    let (_, doors) = get(gateway.admin, "/doors?cluster=a");
    let doors: serde_json::Value = serde_json::from_str(&doors).unwrap();
    let client = stream.local_addr().unwrap().ip();
    let by_port = json!([{"listener": "node_port", "open": 1, "opened": 1, "used": 0, "unused_seconds": 0,
        "clients": [{"address": client, "open": 1, "unused_seconds": 0}]}]);
    assert_eq!(doors[0]["doors"], by_port);
    let since: jiff::Timestamp = serde_json::from_value(doors[0]["since"].clone()).unwrap();
    assert!(since <= jiff::Timestamp::now(), "{since}");
    let (_, table) = get(gateway.admin, "/doors?o=table");
    assert!(table.contains("node_port") && table.contains(&client.to_string()), "{table}");
    assert_eq!(get(gateway.admin, "/doors?cluster=b"), (200, "[]\n".into()));
}

#[test]
fn every_metric_and_every_reason_is_in_the_manual() {
    let (folder, port) = site();
    let gateway = gateway(folder.path(), &[]);
    // Some are there once there is something to count.
    ping(&mut connect(port));
    let (_, metrics) = get(gateway.admin, "/metrics");
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md"));
    for name in names(&metrics) {
        assert!(manual.contains(&format!("`{name}`")), "{name} is not in docs/operations.md");
    }
    let reasons = metrics.lines().filter_map(|line| line.strip_prefix("portico_refusals_total{reason=\""));
    let reasons: Vec<&str> = reasons.filter_map(|rest| rest.split('"').next()).collect();
    assert!(reasons.len() > 10, "{metrics}");
    for reason in reasons {
        assert!(manual.contains(&format!("| `{reason}` |")), "{reason} is not in docs/operations.md");
    }
}

#[test]
fn a_broken_manifest_is_shown_and_takes_nothing_down() {
    let (folder, port) = site();
    let gateway = gateway(folder.path(), &[]);
    fs::write(folder.path().join("broken.yaml"), "kind: [\n").unwrap();
    wait_until("the problem is shown", || get(gateway.admin, "/readyz?verbose").1.contains("broken.yaml:1"));
    assert_eq!(get(gateway.admin, "/readyz").0, 200);
    assert!(
        get(gateway.admin, "/metrics").1.contains("portico_problems{severity=\"error\",reason=\"syntax\"} 1")
    );
    ping(&mut connect(port));
}

#[test]
fn a_port_that_cannot_be_bound_is_reported_on_its_service_everywhere() {
    let port = free_port();
    let taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let folder = directory(&[("a.yaml", &service(port, echo(LOOPBACK).port()))]);
    let mut gateway = gateway(folder.path(), &[]);
    assert_eq!(get(gateway.admin, "/readyz").0, 200, "everybody else is served");
    let (_, verbose) = get(gateway.admin, "/readyz?verbose");
    let row = format!(
        "Service cluster-a/api: spec.ports: NodePort {port} cannot be opened: Address already in use"
    );
    assert!(verbose.contains(&row), "{verbose}");
    let (_, routes) = get(gateway.admin, "/routes");
    let routes: serde_json::Value = serde_json::from_str(&routes).unwrap();
    let error = routes["routes"][0]["state"]["listenerFailed"]["error"].as_str().unwrap();
    assert!(error.contains("Address already in use"), "{error}");
    let (_, table) = get(gateway.admin, "/routes?o=table");
    assert!(table.contains("cannot be opened: Address already in use"), "{table}");
    let counted = "portico_problems{severity=\"error\",reason=\"node-port-failed\"} 1";
    assert!(get(gateway.admin, "/metrics").1.contains(counted));
    drop(taken);
    gateway.process.wait_for("NodePort listener opened at last");
    ping(&mut connect(port));
    assert!(!get(gateway.admin, "/metrics").1.contains("node-port-failed"));
    let said = gateway.process.said();
    let line = said.lines().find(|line| line.contains("cannot open a NodePort listener")).unwrap();
    assert!(line.contains("cluster-a/api-secure"), "{line}");
}

#[test]
fn an_endpoint_that_fails_is_shown_although_it_is_ready() {
    let (dead, port) = (free_port(), free_port());
    let folder = directory(&[("a.yaml", &service(port, dead))]);
    let gateway = gateway(folder.path(), &[]);
    for _ in 0..3 {
        // By port a refusal closes the connection.
        let end = connect(port).read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)), "{end:?}");
    }
    let (_, routes) = get(gateway.admin, "/routes");
    let routes: serde_json::Value = serde_json::from_str(&routes).unwrap();
    assert_eq!(routes["routes"][0]["state"], "ready");
    assert_eq!(routes["routes"][0]["failing"][0]["endpoint"], format!("127.0.0.1:{dead}"));
    assert_eq!(routes["routes"][0]["failing"][0]["failures"], 3);
    let (_, table) = get(gateway.admin, "/routes?o=table");
    assert!(table.contains("(1 failing)"), "{table}");
}

#[test]
fn node_ports_that_were_drawn_are_the_same_after_a_restart() {
    const SITE: &str = "\
apiVersion: kubermatic.k8c.io/v1
kind: KubermaticConfiguration
metadata: {name: kubermatic, namespace: kubermatic}
spec: {ingress: {domain: kkp.example.com}}
---
apiVersion: kubermatic.k8c.io/v1
kind: Seed
metadata: {name: kubermatic, namespace: kubermatic}
---
apiVersion: kubermatic.k8c.io/v1
kind: Cluster
metadata: {name: drawn}
";
    let folder = directory(&[("site.yaml", SITE)]);
    let ports = || {
        let mut gateway = gateway(folder.path(), &["--drain-timeout", "0s"]);
        let listing: serde_json::Value = serde_json::from_str(&get(gateway.admin, "/routes").1).unwrap();
        gateway.process.signal("TERM");
        assert!(gateway.process.wait().success());
        let keys =
            listing["routes"].as_array().unwrap().iter().map(|row| row["key"]["port"].as_u64().unwrap());
        keys.collect::<Vec<_>>()
    };
    let first = ports();
    assert_eq!(first.len(), 2);
    assert_eq!(first, ports());
    assert_eq!(first, ports());
}

#[test]
fn sigterm_lets_open_connections_finish_and_takes_no_new_ones() {
    let (folder, port) = site();
    let mut gateway = gateway(folder.path(), &["--drain-timeout", "50s"]);
    let mut stream = connect(port);
    ping(&mut stream);
    gateway.process.signal("TERM");
    wait_until("it is not ready", || get(gateway.admin, "/readyz").0 == 503);
    wait_until("new connections are refused", || TcpStream::connect(("127.0.0.1", port)).is_err());
    ping(&mut stream);
    drop(stream);
    assert!(gateway.process.wait().success());
}

#[test]
fn the_log_says_what_is_in_force_and_which_signal_ended_it() {
    let (folder, _) = site();
    let mut gateway = gateway(folder.path(), &[]);
    gateway.process.signal("TERM");
    assert!(gateway.process.wait().success());
    let said = gateway.process.said();
    assert!(said.contains("routes in force clusters=1 ports=1 hosts=0 authorities=0"), "{said}");
    assert!(said.contains("told to stop signal=SIGTERM"), "{said}");
}

#[test]
fn sighup_is_no_reason_to_stop_where_there_is_no_terminal() {
    let (folder, port) = site();
    let mut gateway = gateway(folder.path(), &[]);
    let mut stream = connect(port);
    gateway.process.signal("HUP");
    gateway.process.wait_for("SIGHUP: nothing to do");
    ping(&mut stream);
    ping(&mut connect(port));
    assert_eq!(get(gateway.admin, "/readyz").0, 200);
}

#[test]
fn before_every_object_is_read_nothing_is_said_to_be_welcome_and_each_failure_is_reported_once() {
    // No process listens there, and port 1 is never an ephemeral port.
    const KUBECONFIG: &str = "\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: \
                              'http://127.0.0.1:1'}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
";
    let folder = directory(&[("kubeconfig", KUBECONFIG)]);
    let file = folder.path().join("kubeconfig");
    let arguments =
        ["gateway", "--kubeconfig", file.to_str().unwrap(), "--sni-listen", "off", "--tunnel-listen", "off"];
    let mut process = Process::start(&[&arguments[..], &["--admin-listen", "127.0.0.1:0"]].concat());
    let line = process.wait_for("listener=admin");
    let admin = line.rsplit(':').next().and_then(|port| port.trim().parse().ok()).unwrap();
    let (status, verbose) = get(admin, "/readyz?verbose");
    assert_eq!(status, 503);
    assert!(verbose.contains("[-] accepting: no listener is open yet"), "{verbose}");
    process.wait_for("Connection refused");
    process.signal("TERM");
    assert!(process.wait().success());
    // What the client library says of it names neither the kind nor the remedy.
    assert!(!process.said().contains("failed with error"), "{}", process.said());
}

#[test]
fn a_second_signal_ends_a_drain() {
    let (folder, port) = site();
    let mut gateway = gateway(folder.path(), &["--drain-timeout", "1h"]);
    let mut stream = connect(port);
    ping(&mut stream);
    gateway.process.signal("TERM");
    gateway.process.wait_for("draining");
    gateway.process.signal("TERM");
    assert!(gateway.process.wait().success());
}

#[test]
fn a_successor_takes_the_listeners_over_and_no_connect_fails() {
    let (folder, port) = site();
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("take-over.sock");
    let flags = ["--take-over", socket.to_str().unwrap(), "--drain-timeout", "50s"];
    let mut old = gateway(folder.path(), &flags);
    let mut early = connect(port);
    ping(&mut early);
    wait_until("the listeners are offered", || socket.exists());
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let load = std::thread::spawn(move || {
        let mut done = 0;
        while stopped.try_recv().is_err() {
            ping(&mut connect(port));
            done += 1;
        }
        done
    });
    let new = gateway(folder.path(), &flags);
    old.process.wait_for("a successor has taken the listeners over");
    ping(&mut early);
    // The signal of whatever stops the old one is a matter of course, and no reason to cut anything.
    old.process.signal("TERM");
    old.process.wait_for("draining already");
    ping(&mut early);
    drop(early);
    assert!(old.process.wait().success(), "{}", old.process.said());
    ping(&mut connect(port));
    stop.send(()).unwrap();
    assert!(load.join().expect("every connection is served") > 0);
    drop(new);
}

#[test]
fn a_gateway_whose_predecessor_dies_once_it_has_sent_its_sockets_serves_all_the_same() {
    let (folder, port) = site();
    let sockets = tempfile::tempdir().unwrap();
    let path = sockets.path().join("take-over.sock");
    let offer = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&offer, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&offer, 1).unwrap();
    let (dies, dead) = std::sync::mpsc::channel::<()>();
    let predecessor = std::thread::spawn(move || {
        let successor = accept(&offer).unwrap();
        // Before the last message, that there are no sockets: nothing that the successor sends can reach it.
        shutdown(&successor, Shutdown::Read).unwrap();
        send(&successor, b"[]", SendFlags::NOSIGNAL).unwrap();
        dead.recv().unwrap();
    });
    let mut gateway = gateway(folder.path(), &["--take-over", path.to_str().unwrap()]);
    gateway.process.wait_for("the predecessor has ended meanwhile");
    ping(&mut connect(port));
    dies.send(()).unwrap();
    predecessor.join().unwrap();
}

#[test]
fn a_successor_told_another_address_listens_there_and_nowhere_else() {
    let (folder, port) = site();
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("take-over.sock");
    let flags = ["--take-over", socket.to_str().unwrap(), "--drain-timeout", "50s"];
    let mut old = gateway(folder.path(), &flags);
    wait_until("the listeners are offered", || socket.exists());
    let new = starting(folder.path(), &[&flags[..], &["--node-port-address", "127.0.0.2"]].concat());
    assert!(old.process.wait().success(), "{}", old.process.said());
    wait_until("it is ready", || get(new.admin, "/readyz").0 == 200);
    let mut stream = TcpStream::connect(("127.0.0.2", port)).unwrap();
    ping(&mut stream);
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "the address it was told before");
}

#[test]
fn a_predecessor_that_hangs_stops_neither_the_admin_listener_nor_sigterm() {
    let (folder, port) = site();
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("take-over.sock");
    let flags = ["--take-over", socket.to_str().unwrap()];
    let old = gateway(folder.path(), &flags);
    wait_until("the listeners are offered", || socket.exists());
    old.process.freeze();
    let mut new = starting(folder.path(), &[&flags[..], &["--node-port-address", "127.0.0.1"]].concat());
    let error = format!("the process at {} (PID {}) was asked", socket.display(), old.process.id());
    assert_eq!(get(new.admin, "/healthz").0, 200);
    assert_eq!(get(new.admin, "/readyz").0, 503);
    new.process.signal("TERM");
    new.process.wait_for("told to stop before anything was served");
    assert!(new.process.wait().success());
    // One that nobody stops gives up by itself, and says what hangs.
    let mut next = starting(folder.path(), &[&flags[..], &["--node-port-address", "127.0.0.1"]].concat());
    next.process.wait_for(&error);
    assert_eq!(next.process.wait().code(), Some(2));
    old.process.signal("CONT");
    ping(&mut connect(port));
}
