//! What attacks share: a gateway under a memory limit, clients of it, and a bystander.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portico_lab::cgroup::LimitedGroup;
use portico_lab::frames::{self, RawClient, kind};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use rustls::ClientConfig;

use crate::common::{PATIENCE, Process, get, metric, port_of, wait_until};
use crate::proof::{LOOPBACK, authority, echo, need_descriptors, own_address, report};
use crate::secure::{SecureGateway, SecureSite};

/// The memory of a small pod.
pub(crate) const SMALL: u64 = 256 << 20;

/// `portico gateway` with TLS on its tunnel, alone in a control group with a memory limit. What it takes
/// beyond that ends it, as it would in a pod.
pub(crate) struct Limited {
    pub(crate) gateway: SecureGateway,
    /// Where clients are routed by name.
    pub(crate) sni: SocketAddr,
    group: LimitedGroup,
}

impl Limited {
    /// Starts it, as root: a control group is made by no one else.
    fn start(site: &SecureSite, more: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let path = format!("/portico-hostile-{}-{number}", std::process::id());
        let group = LimitedGroup::make(path, SMALL).expect("a control group has a memory limit");
        let [cert, key] = ["gateway.crt", "gateway.key"].map(|name| site.pki.path(name));
        let manifests = site.manifests.manifests();
        let flags = ["gateway", "--manifests", &manifests, "--workers", "1"];
        let sni = SocketAddr::from((own_address(), 6443));
        let (sni_listen, ports) = (sni.to_string(), sni.ip().to_string());
        let own = ["--sni-listen", &sni_listen, "--node-port-address", &ports];
        let listen = ["--tunnel-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let tls = ["--tunnel-tls-cert", &cert, "--tunnel-tls-key", &key];
        let mut command = group.command(env!("CARGO_BIN_EXE_portico")).expect("a command joins its group");
        let mut process = Process::of(command.args([&flags[..], &own, &listen, &tls, more].concat()));
        let admin = port_of(&process.wait_for("listener=admin"));
        let tunnel = port_of(&process.wait_for("listener=tunnel"));
        Self { gateway: SecureGateway { process, admin, tunnel }, sni, group }
    }

    /// Whether it is still the process that was started.
    pub(crate) fn lives(&self) -> bool {
        self.group.pids().is_ok_and(|pids| pids.contains(&self.gateway.process.id().cast_signed()))
    }

    /// Where clients are routed by port.
    pub(crate) fn node_port(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.sni.ip(), port)
    }

    /// The most memory that it had, as the limit counts it.
    pub(crate) fn peak(&self) -> u64 {
        self.group
            .peak_memory()
            .expect("the kernel tells the peak of a control group: Linux 5.19, or version 1")
    }
}

impl SecureGateway {
    /// Where its tunnel listener is.
    pub(crate) fn tunnel_address(&self) -> std::net::SocketAddr {
        ([127, 0, 0, 1], self.tunnel).into()
    }

    /// A client that speaks bytes, after its TLS handshake.
    pub(crate) fn raw(&self, config: &Arc<ClientConfig>) -> RawClient {
        RawClient::connect(self.tunnel_address(), config, PATIENCE).expect("the gateway accepts")
    }

    /// One number of `/metrics`, which must be there.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        metric(self.admin, name)
    }

    /// The gateway answers its probes.
    pub(crate) fn is_ready(&self) -> bool {
        get(self.admin, "/readyz").0 == 200
    }
}

/// TLS of an agent: with the certificate of this name, or with none.
pub(crate) fn agent_tls(site: &SecureSite, name: Option<&str>) -> Arc<ClientConfig> {
    Arc::new(site.pki.client_config(name, &[b"h2"]))
}

/// An agent of a cluster with a certificate. Again and again it opens a stream to its API server (an echo
/// server), sends a few bytes and waits for them. Half of the streams are on one connection that stays, half
/// on new ones.
pub(crate) struct Bystander {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU32>,
    thread: JoinHandle<Vec<Duration>>,
}

/// What a bystander saw.
pub(crate) struct Seen {
    /// The time of each request, in order of size.
    times: Vec<Duration>,
}

impl Seen {
    /// Of some requests.
    pub(crate) fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self { times }
    }

    pub(crate) fn requests(&self) -> usize {
        self.times.len()
    }

    /// The time that 99 of 100 requests stayed below. For people: the machine's mood is in it.
    pub(crate) fn p99(&self) -> Duration {
        self.times[self.times.len() * 99 / 100]
    }
}

impl Bystander {
    /// Starts one of `cluster`, whose certificate is `cluster`.
    pub(crate) fn start(site: &SecureSite, gateway: &SecureGateway, cluster: &'static str) -> Self {
        let (stop, requests) = (Arc::new(AtomicBool::default()), Arc::new(AtomicU32::default()));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&requests));
        let (tls, address) = (agent_tls(site, Some(cluster)), gateway.tunnel_address());
        let connect = move || {
            let mut client = RawClient::connect(address, &tls, PATIENCE).expect("a bystander connects");
            client.send(&frames::opening(&[])).expect("a bystander says what it speaks");
            client
        };
        let thread = std::thread::spawn(move || {
            let mut stays = connect();
            let (mut next, mut times) = (1, Vec::new());
            while !stopped.load(Relaxed) || times.is_empty() {
                let begun = Instant::now();
                if times.len() % 2 == 0 {
                    exchange(&mut stays, cluster, next);
                    next += 2;
                } else {
                    exchange(&mut connect(), cluster, 1);
                }
                times.push(begun.elapsed());
                counted.fetch_add(1, Relaxed);
            }
            times
        });
        Self { stop, requests, thread }
    }

    /// Waits until it has made so many requests more: while it does, the attack goes on.
    pub(crate) fn make(&self, requests: u32) {
        let until = self.requests.load(Relaxed) + requests;
        wait_until("the bystander has made its requests", || {
            self.thread.is_finished() || self.requests.load(Relaxed) >= until
        });
        assert!(!self.thread.is_finished(), "a request of the bystander failed");
    }

    /// Fails if one of its requests did.
    pub(crate) fn stop(self) -> Seen {
        self.stop.store(true, Relaxed);
        let Ok(times) = self.thread.join() else { panic!("a request of the bystander failed") };
        Seen::new(times)
    }
}

/// Lines that the log may have in ten seconds of an attack for each cluster, and as many for none. They are
/// ten and one more of clients that are turned away, and as many of reviews that fail.
const LINES: usize = 22;

/// [`beside_on`] a site with nothing more, and a gateway without other flags.
pub(crate) fn beside(attack: impl FnOnce(&SecureSite, &Limited)) -> Limited {
    beside_on(&SecureSite::new(), &[], attack)
}

/// A gateway that asks for certificates in a small pod, a bystander of cluster a, and an attack beside it.
/// The gateway lives, every request of the bystander succeeds, the log says little, and what it says of a
/// third cluster is there.
pub(crate) fn beside_on(
    site: &SecureSite,
    more: &[&str],
    attack: impl FnOnce(&SecureSite, &Limited),
) -> Limited {
    need_descriptors(20_000);
    site.put("quiet", echo(LOOPBACK));
    let ca = site.pki.path("ca.crt");
    let mut limited = Limited::start(site, &[&["--tunnel-client-ca", &ca], more].concat());
    let bystander = Bystander::start(site, &limited.gateway, "a");
    bystander.make(20);
    let begun = Instant::now();
    attack(site, &limited);
    bystander.make(20);
    let mut wrong = limited.opened(&agent_tls(site, Some("b")), &[]);
    wrong.send(&frames::connect(1, &authority("quiet"), None)).expect("a request is taken");
    limited.gateway.process.wait_for(&authority("quiet"));
    let (windows, said) = (1 + begun.elapsed().as_secs() as usize / 10, limited.gateway.process.said());
    let seen = bystander.stop();
    let (requests, p99, peak) = (seen.requests(), seen.p99(), limited.peak() >> 20);
    let lines = said.lines().count();
    let clusters = std::fs::read_dir(site.manifests.manifests()).expect("the site is there").count();
    report(format_args!("{requests} requests, p99 {p99:?}, at most {peak} MiB, {lines} lines"));
    assert!(limited.lives() && limited.gateway.is_ready());
    assert!(
        lines <= LINES * (1 + clusters) * windows,
        "{lines} lines in {windows} times ten seconds: {said}"
    );
    limited
}

/// Addresses of [`connect_from`].
const SOURCES: u32 = 200;

/// A connection from one of many addresses.
pub(crate) fn connect_from(source: u32, to: SocketAddr) -> Option<TcpStream> {
    let from = Ipv4Addr::from_bits(Ipv4Addr::new(127, 77, 0, 1).to_bits() + source % SOURCES);
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
    bind(&socket, &SocketAddr::from((from, 0))).ok()?;
    rustix::net::connect(&socket, &to).ok()?;
    Some(socket.into())
}

impl Limited {
    /// A client that has sent what it speaks.
    pub(crate) fn opened(&self, tls: &Arc<ClientConfig>, values: &[(u16, u32)]) -> RawClient {
        let mut client = self.gateway.raw(tls);
        client.send(&frames::opening(values)).expect("the gateway takes it");
        client
    }

    /// Connections that were ended for what they sent.
    pub(crate) fn floods(&self) -> u64 {
        self.gateway.metric("portico_refusals_total{reason=\"flood\",side=\"downstream\"}")
    }
}

/// Reads up to the GOAWAY that ends a connection, or to its end.
pub(crate) fn is_sent_away(client: &mut RawClient) -> bool {
    loop {
        match client.receive() {
            Ok(Some(frame)) if frame.kind != kind::GOAWAY => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

/// One stream: opened, used and ended.
fn exchange(client: &mut RawClient, cluster: &str, stream: u32) {
    client.send(&frames::connect(stream, &authority(cluster), None)).expect("a request is taken");
    let answer = next_of(client, stream);
    // Status 200 is the eighth entry of the static table (RFC 7541 appendix A).
    assert_eq!((answer.kind, answer.payload.first()), (kind::HEADERS, Some(&0x88)), "{answer:?}");
    client.send(&frames::frame(kind::DATA, 0, stream, b"ping")).expect("bytes are taken");
    let answer = next_of(client, stream);
    assert_eq!((answer.kind, &answer.payload[..]), (kind::DATA, &b"ping"[..]));
    client.send(&frames::frame(kind::DATA, frames::END_STREAM, stream, b"")).expect("an end is taken");
}

/// The next frame of this stream. Settings are acknowledged, the rest is passed over.
pub(crate) fn next_of(client: &mut RawClient, stream: u32) -> frames::Received {
    loop {
        let received = client.receive().expect("an answer comes in time").expect("the connection stays");
        if received.stream == stream && received.kind != kind::WINDOW_UPDATE {
            return received;
        }
        if received.kind == kind::SETTINGS && received.flags & frames::ACK == 0 {
            client.send(&frames::frame(kind::SETTINGS, frames::ACK, 0, b"")).expect("it is taken");
        }
    }
}
