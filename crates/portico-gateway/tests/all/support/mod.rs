//! A gateway in this process, with routes made by hand, and the clients and endpoints around it: all real
//! sockets on loopback.
#![allow(unreachable_pub, reason = "a toolbox of this one binary")]

mod client;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use portico_api::change::Change;
use portico_api::meta::ObjectKey;
use portico_api::names::{Authority, ClusterName, HostName};
use portico_api::policy::ClusterPolicy;
use portico_gateway::{AccessFormat, AccessLog, Config, End, Gateway, Listener, Shared};
use portico_routes::route::{Backend, BackendId, Route, RouteKey};
use portico_routes::table::{RouteChange, Update};
use socket2::{Domain, Socket, Type};
use tokio::time::Instant;

pub use client::{Client, gateway_name, secured, tls_files, tunnel_address};

/// How long anything may take before a test gives up; nothing waits this long when all is well.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub fn config() -> Config {
    Config { sni_listen: Some(LOOPBACK), node_port_address: LOOPBACK.ip(), ..Config::default() }
}

pub fn start(config: Config) -> Arc<Gateway> {
    let access = AccessLog::start(AccessFormat::Off).unwrap();
    Arc::new(Gateway::start(config, access, None, None).unwrap())
}

pub fn sni_address(gateway: &Gateway) -> SocketAddr {
    let addresses = gateway.listen_addresses();
    addresses.iter().find(|(listener, _)| *listener == Listener::Sni).expect("the SNI listener is open").1
}

/// One exposed Service of the cluster `name`.
#[derive(Clone)]
pub struct Service {
    pub backend: Backend,
    pub keys: Vec<RouteKey>,
}

impl Service {
    pub fn new(name: &str, endpoints: &[SocketAddr]) -> Self {
        let policy = ClusterPolicy::open(ClusterName::new(name));
        let id = Arc::new(BackendId {
            service: ObjectKey::new(&policy.tenant.namespace(), "apiserver-external"),
            port_name: "secure".into(),
            port: 443,
        });
        let backend = Backend {
            id,
            endpoints: endpoints.into(),
            policy: Arc::new(policy),
            send_proxy: false,
            api_server_ca: None,
        };
        Self { backend, keys: Vec::new() }
    }

    pub fn host(mut self, name: &str) -> Self {
        self.keys.push(RouteKey::Host(HostName::parse(name).unwrap()));
        self
    }

    pub fn port(mut self, port: u16) -> Self {
        self.keys.push(RouteKey::Port(port));
        self
    }

    pub fn authority(mut self, authority: &str) -> Self {
        self.keys.push(RouteKey::Authority(Authority::parse(authority).unwrap()));
        self
    }

    pub fn policy(mut self, change: impl FnOnce(&mut ClusterPolicy)) -> Self {
        change(Arc::make_mut(&mut self.backend.policy));
        self
    }

    pub fn expose(&self, gateway: &Gateway) {
        gateway.apply(&self.update());
    }

    /// What exposes it.
    pub fn update(&self) -> Update {
        let mut changes = vec![RouteChange::Backend(Change::Apply(Arc::new(self.backend.clone())))];
        let routes = self.keys.iter().cloned().map(|key| Route { key, to: self.backend.id.clone() });
        changes.extend(routes.map(|route| RouteChange::Route(Change::Apply(route))));
        Update { changes }
    }

    pub fn withdraw(&self, gateway: &Gateway) {
        let keys = self.keys.iter().cloned();
        let mut changes: Vec<_> = keys.map(|key| RouteChange::Route(Change::Delete(key))).collect();
        changes.push(RouteChange::Backend(Change::Delete(self.backend.id.clone())));
        gateway.apply(&Update { changes });
    }
}

/// A listener that answers no SYN, because its queue is full; with the clients that fill it.
pub fn silent_endpoint() -> (TcpListener, Vec<TcpStream>) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&LOOPBACK.into()).unwrap();
    socket.listen(0).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    // A queue of nothing has room for one; the kernel may allow one more.
    let waiting =
        std::iter::from_fn(|| TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok());
    let waiting = waiting.take(10).collect();
    (listener, waiting)
}

/// A port that no other test takes in the meantime: below those the kernel gives to connections, and each
/// only once.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let port = 20_000 + (std::process::id() % 5_000) as u16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

/// A TLS 1.2 ClientHello of the least size that names `host`.
pub fn hello(host: &str) -> Vec<u8> {
    let name = host.as_bytes();
    let u16b = |n: usize| u16::try_from(n).unwrap().to_be_bytes();
    let mut sni = Vec::new();
    sni.extend([0, 0]);
    sni.extend(u16b(name.len() + 5));
    sni.extend(u16b(name.len() + 3));
    sni.push(0);
    sni.extend(u16b(name.len()));
    sni.extend(name);
    client_hello(&sni)
}

/// One that names no host.
pub fn hello_without_name() -> Vec<u8> {
    client_hello(&[])
}

fn client_hello(extensions: &[u8]) -> Vec<u8> {
    let u16b = |n: usize| u16::try_from(n).unwrap().to_be_bytes();
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.push(0);
    body.extend([0, 2, 0x13, 0x01, 1, 0]);
    body.extend(u16b(extensions.len()));
    body.extend(extensions);
    let mut message = vec![1, 0];
    message.extend(u16b(body.len()));
    message.extend(body);
    let mut record = vec![22, 3, 1];
    record.extend(u16b(message.len()));
    record.extend(message);
    record
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A client that has sent its hello.
pub fn client(gateway: &Gateway, host: &str) -> TcpStream {
    let mut stream = connect(sni_address(gateway));
    stream.write_all(&hello(host)).unwrap();
    stream
}

/// An endpoint, and the connections that reach it.
pub struct Endpoint {
    pub listener: TcpListener,
    pub address: SocketAddr,
}

impl Endpoint {
    pub fn new() -> Self {
        let listener = TcpListener::bind(LOOPBACK).unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    pub fn accept(&self) -> TcpStream {
        let stream = self.listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

/// A client and the endpoint it reached through the gateway, past the hello and listed by the gateway.
pub fn pair(gateway: &Gateway, endpoint: &Endpoint, host: &str) -> (TcpStream, TcpStream) {
    let client = client(gateway, host);
    let mut server = endpoint.accept();
    let hello = hello(host);
    assert_eq!(read_exactly(&mut server, hello.len()), hello);
    let address = client.local_addr().unwrap();
    eventually("it is listed", || gateway.connections().iter().any(|record| record.client == address));
    (client, server)
}

pub fn read_exactly(stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

pub fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Makes closing `stream` a reset.
pub fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

pub fn assert_reset(stream: &mut TcpStream) {
    let mut byte = [0];
    let error = stream.read(&mut byte).expect_err("the connection should have been reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// The connection ends, in order or by a reset, and nothing comes before.
pub fn assert_cut_off(mut client: TcpStream) {
    let mut received = Vec::new();
    if let Err(error) = client.read_to_end(&mut received) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    assert_eq!(received, b"");
}

/// Waits until `condition` holds. For what happens on the gateway's own threads a moment later.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        std::thread::yield_now();
    }
}

pub fn wait_until_empty(gateway: &Gateway) {
    eventually("every connection is gone", || gateway.connections().is_empty());
}

/// How many connections ended so.
pub fn ended(shared: &Shared, end: End) -> u64 {
    let index = End::ALL.iter().position(|&row| row == end).expect("every end has a row");
    shared.totals().ends[index]
}

/// Set where a test runs in a process of its own.
const ALONE: &str = "PORTICO_TEST_ALONE";

/// Whether this is such a process.
pub fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs `body` in a process of its own: this binary, with only the test `name`. For tests that look at the
/// process.
pub fn alone(name: &str, body: impl FnOnce()) {
    if is_alone() {
        return body();
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
