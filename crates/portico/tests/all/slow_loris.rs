//! Clients that say nothing, or next to nothing. On every listener they cost a bounded number of slots for a
//! bounded time, others are served beside them, and nothing is left of them.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::proof::*;

const CLUSTER: &str = "patient";
const PORT: u16 = 30_443;
/// The header of a load balancer, without which the NodePort listener here refuses every client.
const PROXY_HEADER: &[u8] = b"PROXY TCP4 192.0.2.1 192.0.2.2 40000 443\r\n";

/// A gateway with one cluster, whose NodePort listener reads too: PROXY headers.
fn gateway(more: &[&str]) -> (Site, Gateway) {
    let site = Site::new();
    site.put(CLUSTER, &manifest(CLUSTER, Some(PORT), echo(LOOPBACK)));
    let flags = ["--proxy-protocol", "node-port=required", "--trusted-proxy", "127.0.0.0/8"];
    let gateway = Gateway::start(&site, &[&flags[..], more].concat());
    (site, gateway)
}

/// Every listener, with what a proper client would begin with there.
fn listeners(gateway: &Gateway) -> [(SocketAddr, Vec<u8>); 3] {
    [
        (gateway.sni, hello(CLUSTER)),
        (gateway.tunnel, connect_request(CLUSTER).into_bytes()),
        (gateway.node_port(PORT), PROXY_HEADER.into()),
    ]
}

/// A connection by port from behind a load balancer.
fn by_port_with_header(gateway: &Gateway) -> Option<TcpStream> {
    let mut stream = connect(gateway.node_port(PORT));
    stream.write_all(PROXY_HEADER).ok()?;
    comes_back(&mut stream, b"ping").then_some(stream)
}

/// One new connection on every path.
fn new_connections(gateway: &Gateway) -> [Option<TcpStream>; 3] {
    [by_name(gateway, CLUSTER), by_authority(gateway, CLUSTER), by_port_with_header(gateway)]
}

/// What a proper client of the admin listener begins with.
const ADMIN_REQUEST: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n";

/// Clients that say one byte a second of something sensible, on a thread of their own until they are stopped.
struct Drip {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Drip {
    fn start(mut clients: Vec<(TcpStream, Vec<u8>)>) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut position = 0;
            while stopped.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                for (stream, words) in &mut clients {
                    if let Some(byte) = words.get(position) {
                        // Fails for clients that were refused, which is the point.
                        let _ = stream.write_all(&[*byte]);
                    }
                }
                position += 1;
            }
        });
        Self { stop, thread }
    }

    fn stop(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

/// Opens `each` silent and `each` dripping clients on every listener. The streams returned are of both kinds.
fn slow_clients(gateway: &Gateway, each: usize) -> (Vec<TcpStream>, Drip) {
    let (mut all, mut dripping) = (Vec::new(), Vec::new());
    for (address, words) in listeners(gateway) {
        for _ in 0..each {
            all.push(connect(address));
            let drip = connect(address);
            all.push(drip.try_clone().unwrap());
            dripping.push((drip, words.clone()));
        }
    }
    (all, Drip::start(dripping))
}

fn handshakes(gateway: &Gateway) -> u64 {
    gateway.metric("portico_handshakes")
}

fn refusals(gateway: &Gateway, reason: &str, side: &str) -> u64 {
    gateway.metric(&format!("portico_refusals_total{{reason=\"{reason}\",side=\"{side}\"}}"))
}

#[test]
fn a_client_that_says_too_little_is_sent_away_on_every_listener_and_leaves_nothing_behind() {
    const EACH: usize = 20;
    let (_site, gateway) = gateway(&["--hello-timeout", "2500ms"]);
    let before = gateway.usage().descriptors();
    let (mut clients, drip) = slow_clients(&gateway, EACH);
    // Only the gateway closes connections: each read ends with the connection, or not at all.
    for client in &mut clients {
        let mut said = Vec::new();
        match client.read_to_end(&mut said) {
            Ok(_) => {}
            // Its last byte crossed the end of the connection.
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        assert!(
            said.is_empty() || said.starts_with(b"HTTP/1.1 408 "),
            "{:?}",
            String::from_utf8_lossy(&said)
        );
    }
    drip.stop();
    assert_eq!(refusals(&gateway, "too_slow", "downstream"), clients.len() as u64);
    assert_eq!(handshakes(&gateway), 0);
    drop(clients);
    wait_until("every descriptor is given back", || gateway.usage().descriptors() <= before);
    assert!(new_connections(&gateway).iter().all(Option::is_some));
}

#[test]
fn others_are_served_while_slow_clients_sit_on_every_listener() {
    const EACH: usize = 30;
    // No client is refused in this test.
    let (_site, gateway) = gateway(&["--hello-timeout", "1h", "--max-handshakes", "200"]);
    let before = gateway.usage().descriptors();
    let mut early: Vec<TcpStream> = new_connections(&gateway).into_iter().flatten().collect();
    assert_eq!(early.len(), 3);
    let (clients, drip) = slow_clients(&gateway, EACH);
    wait_until("all of them sit there", || handshakes(&gateway) == clients.len() as u64);
    for _ in 0..50 {
        assert!(new_connections(&gateway).iter().all(Option::is_some));
        assert!(early.iter_mut().all(|stream| comes_back(stream, b"ping")));
    }
    assert_eq!(handshakes(&gateway), clients.len() as u64);
    drip.stop();
    drop((clients, early));
    wait_until("no handshake is left", || handshakes(&gateway) == 0);
    wait_until("every descriptor is given back", || gateway.usage().descriptors() <= before);
    assert_eq!(refusals(&gateway, "max_handshakes", "gateway"), 0);
}

#[test]
fn of_more_slow_clients_than_allowed_the_oldest_are_closed_and_every_new_client_is_served() {
    const MOST: u64 = 60;
    const HONEST: usize = 46;
    let (_site, gateway) = gateway(&["--hello-timeout", "1h", "--max-handshakes", &MOST.to_string()]);
    let mut early: Vec<TcpStream> = new_connections(&gateway).into_iter().flatten().collect();
    assert_eq!(early.len(), 3);
    let mut flood = Vec::new();
    for round in 0..HONEST {
        for (address, _) in listeners(&gateway) {
            flood.extend((0..20).map(|_| connect(address)));
        }
        let served = new_connections(&gateway).each_ref().map(Option::is_some);
        assert_eq!(served, [true; 3], "round {round}: by name, authority and port");
    }
    assert!(handshakes(&gateway) <= MOST);
    assert!(early.iter_mut().all(|stream| comes_back(stream, b"ping")));
    wait_until("all others are closed", || {
        refusals(&gateway, "max_handshakes", "gateway") >= flood.len() as u64 - MOST
    });
    drop(flood);
    wait_until("the slots are free again", || handshakes(&gateway) == 0);
}

#[test]
fn probes_are_answered_beside_hundreds_of_slow_clients_of_the_admin_listener() {
    const EACH: usize = 300;
    /// Connections the admin listener holds, and some slack for what else happens in a process.
    const MOST_KEPT: usize = 64 + 16;
    let (_site, gateway) = gateway(&[]);
    let before = gateway.usage().descriptors();
    let silent: Vec<TcpStream> = (0..EACH).map(|_| connect(gateway.admin)).collect();
    let dripping: Vec<TcpStream> = (0..EACH).map(|_| connect(gateway.admin)).collect();
    let drops = dripping.iter().map(|stream| (stream.try_clone().unwrap(), ADMIN_REQUEST.to_vec())).collect();
    let drip = Drip::start(drops);
    // One after the other in the queue of the kernel, they would keep a probe waiting for a minute and more.
    for _ in 0..50 {
        assert_eq!(gateway.get("/healthz"), "ok\n");
        assert!(gateway.get("/metrics").ends_with("# EOF\n"));
    }
    assert!(gateway.usage().descriptors() <= before + MOST_KEPT);
    drip.stop();
    for mut client in silent.into_iter().chain(dripping) {
        assert!(has_ended(&mut client), "no client stays that says too little");
    }
    wait_until("every descriptor is given back", || gateway.usage().descriptors() <= before);
}
