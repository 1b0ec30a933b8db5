//! What the large tests share: a site of manifests that changes as people change it, and a gateway on
//! addresses of its own. Also clients of every path, and what the kernel reports about a process.
//!
//! Every gateway listens on its own address of 127.0.0.0/8, so that these tests run side by side with
//! well-known ports.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, id};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use portico_lab::manifests;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) use crate::common::wait_until;
use crate::common::{PATIENCE, Process, get_from, portico};

/// A directory of manifests.
pub(crate) struct Site {
    folder: TempDir,
}

impl Site {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        for name in ["manifests", "drafts"] {
            fs::create_dir(folder.path().join(name)).expect("a folder can be made there");
        }
        Self { folder }
    }

    pub(crate) fn manifests(&self) -> String {
        self.folder.path().join("manifests").display().to_string()
    }

    /// Puts the manifest of `name` there in one piece, by rename.
    pub(crate) fn put(&self, name: &str, manifest: &str) {
        let draft = self.folder.path().join("drafts").join(name);
        fs::write(&draft, manifest).expect("a file can be written");
        fs::rename(&draft, self.file(name)).expect("a file can be renamed");
    }

    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).expect("the manifest is there");
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("manifests").join(format!("{name}.yaml"))
    }
}

/// The one Service of the user cluster `name`, exposed by server name ([`host`]), by CONNECT authority
/// ([`authority`]) and, with a `node_port`, by port; and its only endpoint.
pub(crate) fn manifest(name: &str, node_port: Option<u16>, endpoint: SocketAddr) -> String {
    let (namespace, service) = (format!("cluster-{name}"), "apiserver-external");
    let by = if node_port.is_some() { "SNI,Tunneling,NodePort" } else { "SNI,Tunneling" };
    let mapping = format!("{{\"secure\": \"{}\"}}", host(name));
    let annotations =
        [("nodeport-proxy.k8s.io/expose", by), ("nodeport-proxy.k8s.io/port-mapping", &*mapping)];
    manifests::service(&namespace, service, &annotations, node_port)
        + &manifests::slice(&namespace, service, endpoint.ip(), endpoint.port())
}

pub(crate) fn host(name: &str) -> String {
    format!("{name}.kkp.test")
}

pub(crate) fn authority(name: &str) -> String {
    format!("apiserver-external.cluster-{name}.svc.cluster.local:443")
}

/// The ClientHello of a real client that wants to reach the cluster `name`.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(portico_dial::provider())
        .with_safe_default_protocol_versions()
        .expect("the provider has all versions")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let server = ServerName::try_from(host(name)).expect("names of clusters are host names");
    let mut client = ClientConnection::new(Arc::new(config), server).expect("the configuration is complete");
    let mut hello = Vec::new();
    client.write_tls(&mut hello).expect("a vector takes everything");
    hello
}

/// The request of an HTTP/1.1 agent that wants to reach the cluster `name`.
pub(crate) fn connect_request(name: &str) -> String {
    format!("CONNECT {} HTTP/1.1\r\n\r\n", authority(name))
}

/// The answer that allows it.
pub(crate) const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// `portico gateway` on a site.
pub(crate) struct Gateway {
    pub(crate) process: Process,
    pub(crate) sni: SocketAddr,
    pub(crate) tunnel: SocketAddr,
    pub(crate) admin: SocketAddr,
    address: Ipv4Addr,
}

impl Gateway {
    /// Starts it with every listener, and waits until it is ready.
    pub(crate) fn start(site: &Site, more: &[&str]) -> Self {
        Self::start_with(portico(), site, more)
    }

    /// Starts it by `command`, which becomes `portico`.
    pub(crate) fn start_with(mut command: Command, site: &Site, more: &[&str]) -> Self {
        let address = own_address();
        let at = |port: u16| SocketAddr::new(address.into(), port);
        let (sni, tunnel, admin) = (at(6443), at(8088), at(8002));
        let [sni_text, tunnel_text, admin_text] = [sni, tunnel, admin].map(|listen| listen.to_string());
        let (manifests, ports) = (site.manifests(), address.to_string());
        let arguments = [
            "gateway",
            "--manifests",
            &manifests,
            "--sni-listen",
            &sni_text,
            "--tunnel-listen",
            &tunnel_text,
            "--tunnel-plaintext",
            "--node-port-address",
            &ports,
            "--admin-listen",
            &admin_text,
            "--workers",
            "1",
        ];
        let mut process = Process::of(command.args(arguments).args(more));
        process.wait_for("listener=admin");
        let gateway = Self { process, sni, tunnel, address, admin };
        wait_until("the gateway is ready", || get_from(admin, "/readyz").0 == 200);
        gateway
    }

    pub(crate) fn node_port(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address.into(), port)
    }

    pub(crate) fn get(&self, path: &str) -> String {
        let (status, body) = get_from(self.admin, path);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// One number of `/metrics`; 0 if it is not there.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        metric(&self.get("/metrics"), name)
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage(self.process.id())
    }
}

/// One number of an answer of `/metrics`; 0 if it is not there.
pub(crate) fn metric(metrics: &str, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    metrics.lines().find_map(value).unwrap_or(0)
}

/// An address of loopback that no other gateway of any test uses.
pub(crate) fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Sixteen for each process, far from 127.0.0.1.
    let offset = id().wrapping_mul(16).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % (1 << 22);
    Ipv4Addr::from_bits(Ipv4Addr::new(127, 64, 0, 0).to_bits() + offset)
}

/// What the kernel says about a process, by its id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage(pub(crate) u32);

impl Usage {
    pub(crate) fn descriptors(self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.0)).expect("the process runs").count()
    }

    /// Memory that is its own, and its share of what it shares, in KiB.
    pub(crate) fn pss_kb(self) -> u64 {
        self.kilobytes("smaps_rollup", "Pss:")
    }

    /// Like [`Self::pss_kb`], without what is mapped from files, which is the program itself.
    pub(crate) fn data_kb(self) -> u64 {
        self.kilobytes("smaps_rollup", "Pss_Anon:")
    }

    /// The most memory it ever had, in KiB.
    pub(crate) fn peak_kb(self) -> u64 {
        self.kilobytes("status", "VmHWM:")
    }

    /// CPU time of all its threads, from schedstat: utime and stime count in steps of 10 ms.
    pub(crate) fn cpu(self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0)).expect("the process runs");
        let nanos = threads.flatten().map(|thread| {
            // A thread that has ended meanwhile has no file.
            let text = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
        });
        Duration::from_nanos(nanos.sum())
    }

    fn kilobytes(self, file: &str, key: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/{file}", self.0)).expect("the process runs");
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        value.and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok()).expect("a size in kB")
    }
}

/// Makes room for `count` descriptors in this process and those it starts.
pub(crate) fn need_descriptors(count: u64) {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    assert!(
        most >= count,
        "this test needs {count} file descriptors; allow them, as by `ulimit -Hn {count}`"
    );
    if limit.current.is_some_and(|current| current < count) {
        let raised = Rlimit { current: Some(count), maximum: limit.maximum };
        setrlimit(Resource::Nofile, raised).expect("a soft limit may be raised to the hard one");
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made")
}

/// Starts a server on `address` that sends back what it gets, on a thread of its own, for as long as the test
/// runs.
pub(crate) fn echo(address: impl Into<SocketAddr>) -> SocketAddr {
    let listener = std::net::TcpListener::bind(address.into()).expect("an address of the test's own is free");
    let bound = listener.local_addr().expect("a bound socket has an address");
    listener.set_nonblocking(true).expect("a socket can be non-blocking");
    std::thread::spawn(move || {
        runtime().block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("the runtime takes the socket");
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { continue };
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    // Ends with the connection, however that ends.
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
    });
    bound
}

/// Where [`echo`] servers on loopback listen.
pub(crate) const LOOPBACK: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// A client that waits no longer than a test does.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("the listener accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream
}

/// Sends `bytes` to an echo server; whether they come back. Neither a refusal nor an end is a yes.
pub(crate) fn comes_back(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    let mut answer = vec![0; bytes.len()];
    stream.write_all(bytes).and_then(|()| stream.read_exact(&mut answer)).is_ok() && answer == bytes
}

/// A connection by server name to the echo server of the cluster `name`, if it is routable.
pub(crate) fn by_name(gateway: &Gateway, name: &str) -> Option<TcpStream> {
    let mut stream = connect(gateway.sni);
    comes_back(&mut stream, &hello(name)).then_some(stream)
}

/// A connection by HTTP/1.1 CONNECT to the echo server of the cluster `name`, if it is routable.
pub(crate) fn by_authority(gateway: &Gateway, name: &str) -> Option<TcpStream> {
    let mut stream = connect(gateway.tunnel);
    let mut answer = [0; ESTABLISHED.len()];
    stream.write_all(connect_request(name).as_bytes()).ok()?;
    stream.read_exact(&mut answer).ok()?;
    (answer == ESTABLISHED && comes_back(&mut stream, b"ping")).then_some(stream)
}

/// A connection by port to an echo server, if it is routable.
pub(crate) fn by_port(gateway: &Gateway, port: u16) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(gateway.node_port(port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    comes_back(&mut stream, b"ping").then_some(stream)
}

/// As [`comes_back`], for clients by the thousand.
pub(crate) async fn exchange(stream: &mut tokio::net::TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let mut answer = vec![0; bytes.len()];
    stream.write_all(bytes).await?;
    stream.read_exact(&mut answer).await?;
    if answer == bytes { Ok(()) } else { Err(std::io::Error::other(format!("got {answer:?} back"))) }
}

/// Whether nothing but the end comes.
pub(crate) fn has_ended(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    match stream.read(&mut byte) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Writes down what was measured, for people: numbers of a busy machine are no promise.
#[allow(clippy::print_stderr, reason = "shown with --nocapture, or when the test fails")]
pub(crate) fn report(line: impl std::fmt::Display) {
    eprintln!("{line}");
}
