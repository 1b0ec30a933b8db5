//! What is set on sockets, as the kernel has it: accepted ones inherit from their listener, those to
//! endpoints get what only a lasting connection needs once it lasts.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use portico_gateway::{Config, End, Gateway, Keepalive};
use portico_lab::pki::Pki;
use portico_tunnel::Settings;
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use rustls::{ClientConnection, StreamOwned};
use socket2::SockRef;

use crate::support::*;

const HOST: &str = "a.example.com";
const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";
const KEEPALIVE: Keepalive =
    Keepalive { time: Duration::from_secs(71), interval: Duration::from_secs(7), probes: 3 };

/// A copy of the socket of this process that goes from `local` to `peer`.
fn socket_between(local: SocketAddr, peer: SocketAddr) -> OwnedFd {
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let copies = numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok());
    let is_it = |socket: &OwnedFd| {
        let socket = SockRef::from(socket);
        let address = |address: std::io::Result<socket2::SockAddr>| address.ok()?.as_socket();
        address(socket.peer_addr()) == Some(peer) && address(socket.local_addr()) == Some(local)
    };
    copies.into_iter().find(is_it).expect("the gateway has this connection")
}

fn keepalive_of(socket: &OwnedFd) -> Option<Keepalive> {
    sockopt::socket_keepalive(socket).unwrap().then(|| Keepalive {
        time: sockopt::tcp_keepidle(socket).unwrap(),
        interval: sockopt::tcp_keepintvl(socket).unwrap(),
        probes: sockopt::tcp_keepcnt(socket).unwrap(),
    })
}

#[test]
fn accepted_sockets_inherit_the_options_of_their_listener() {
    let gateway = start(Config { downstream_keepalive: KEEPALIVE, ..config() });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    let (client, _server) = pair(&gateway, &endpoint, HOST);
    let accepted = socket_between(sni_address(&gateway), client.local_addr().unwrap());
    assert!(sockopt::tcp_nodelay(&accepted).unwrap());
    assert_eq!(keepalive_of(&accepted), Some(KEEPALIVE));
}

#[test]
fn a_socket_to_an_endpoint_gets_keep_alive_once_the_connection_lasts() {
    let gateway = start(Config { upstream_keepalive: KEEPALIVE, ..config() });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    let (_client, server) = pair(&gateway, &endpoint, HOST);
    let upstream = socket_between(server.peer_addr().unwrap(), endpoint.address);
    assert!(sockopt::tcp_nodelay(&upstream).unwrap(), "from the first byte");
    eventually("it lasts", || keepalive_of(&upstream) == Some(KEEPALIVE));
}

/// The gateway's socket to `endpoint`, and the end of it that `endpoint` accepts.
fn to_upstream(endpoint: &Endpoint) -> (OwnedFd, TcpStream) {
    let server = endpoint.accept();
    (socket_between(server.peer_addr().unwrap(), endpoint.address), server)
}

fn tunnel(tunnel: Settings) -> (Arc<Gateway>, Endpoint) {
    let config = Config { tunnel_listen: Some(LOOPBACK), tunnel, ..Config::default() };
    let gateway = start(Config { upstream_keepalive: KEEPALIVE, ..config });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&gateway);
    (gateway, endpoint)
}

fn plaintext() -> Settings {
    Settings { plaintext: true, ..Settings::default() }
}

#[test]
fn a_socket_behind_a_connect_request_gets_keep_alive_once_the_stream_lasts() {
    let (gateway, endpoint) = tunnel(plaintext());
    let http2 = Client::plaintext(&gateway);
    let (status, _send, _recv) = http2.connect(AUTHORITY);
    assert_eq!(status, 200);
    let of_http2 = to_upstream(&endpoint);
    let mut http1 = connect(tunnel_address(&gateway));
    write!(http1, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").unwrap();
    let of_http1 = to_upstream(&endpoint);
    let pki = Pki::new();
    let (gateway, endpoint) = tunnel(secured(tls_files(&pki, &["gateway.test"])));
    let tls = Arc::new(pki.client_config(None, &[b"http/1.1"]));
    let tls = ClientConnection::new(tls, gateway_name()).unwrap();
    let mut under_tls = StreamOwned::new(tls, connect(tunnel_address(&gateway)));
    write!(under_tls, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").unwrap();
    let of_tls = to_upstream(&endpoint);
    for (upstream, _server) in [&of_http2, &of_http1, &of_tls] {
        assert!(sockopt::tcp_nodelay(upstream).unwrap(), "from the first byte");
        eventually("it lasts", || keepalive_of(upstream) == Some(KEEPALIVE));
    }
}

#[test]
fn what_came_with_a_connect_request_travels_with_the_handshake_and_no_endpoint_is_kept_waiting_for_it() {
    let (gateway, endpoint) = tunnel(plaintext());
    // Whether the kernel acknowledged the handshake at once.
    let acknowledged_at_once = |early: &str| {
        let mut client = connect(tunnel_address(&gateway));
        write!(client, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n{early}").unwrap();
        let (upstream, mut server) = to_upstream(&endpoint);
        assert_eq!(read_exactly(&mut server, early.len()), early.as_bytes());
        sockopt::tcp_quickack(&upstream).unwrap()
    };
    assert!((0..20).all(|_| acknowledged_at_once("")));
    // The kernel waits 40 ms for the bytes. A worker that stood still that long sends them on their own.
    assert!((0..20).any(|_| !acknowledged_at_once("early")));
}

#[test]
fn a_socket_behind_a_stream_takes_no_more_than_a_window_that_it_cannot_send() {
    let (gateway, endpoint) = tunnel(plaintext());
    let client = Client::plaintext(&gateway);
    let (_, mut send, _recv) = client.connect(AUTHORITY);
    let (upstream, mut server) = to_upstream(&endpoint);
    let bound = || SockRef::from(&upstream).tcp_notsent_lowat().unwrap();
    let window = Settings::default().stream_window;
    assert_ne!(bound(), window, "a short connection saves the system call");
    let bytes = vec![0; 2 * window as usize];
    let length = bytes.len();
    send.send_data(bytes.into(), false).unwrap();
    read_exactly(&mut server, length);
    assert_eq!(bound(), window);
}

#[test]
fn what_lasts_and_is_silent_is_still_cancelled() {
    let config = Config { tunnel_listen: Some(LOOPBACK), tunnel: plaintext(), workers: 1, ..config() };
    let gateway = start(Config { upstream_keepalive: KEEPALIVE, ..config });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).authority(AUTHORITY).expose(&gateway);
    let tunnels = Client::plaintext(&gateway);
    let (status, _send, mut recv) = tunnels.connect(AUTHORITY);
    assert_eq!(status, 200);
    let _stream = endpoint.accept();
    // Once this later one lasts, the first does, too.
    let (_client, server) = pair(&gateway, &endpoint, HOST);
    let upstream = socket_between(server.peer_addr().unwrap(), endpoint.address);
    eventually("it lasts", || keepalive_of(&upstream) == Some(KEEPALIVE));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(gateway.drain(Duration::ZERO)), 2);
    assert_eq!(ended(gateway.shared(), End::Drained), 2);
    assert!(tunnels.read(&mut recv).is_some_and(|read| read.is_err()));
}
