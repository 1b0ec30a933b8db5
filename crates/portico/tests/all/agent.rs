//! `portico agent` and `portico gateway` as two processes on loopback: bytes, identities, gateways that die, freeze and return, files that change,
//! and an agent that takes over from another.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Process, get, run, stderr, stdout};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// Certificates and manifests of two clusters.
struct Site {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

struct Gateway {
    process: Process,
    admin: u16,
}

struct Agent {
    process: Process,
    admin: u16,
    /// Where pods connect.
    port: u16,
}

impl Site {
    /// Clusters a and b, whose API servers send back what they get.
    fn new() -> Self {
        let site = Self::without_clusters();
        for cluster in ["a", "b"] {
            site.put(cluster, echo());
        }
        site
    }

    fn without_clusters() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "test CA");
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap().pem();
        let site = Self { folder, issuer: Issuer::new(params, key) };
        fs::write(site.file("ca.crt"), ca).unwrap();
        site.issue("gateway");
        site.issue("a");
        site.issue("b");
        fs::create_dir(site.file("manifests")).unwrap();
        site
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    /// Where the cluster's API server is.
    fn put(&self, cluster: &str, upstream: u16) {
        fs::write(self.file(&format!("manifests/{cluster}.yaml")), service(cluster, upstream)).unwrap();
    }

    fn issue(&self, name: &str) {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::OrganizationName, format!("portico:cluster:{name}"));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{name}.crt")), certificate.pem()).unwrap();
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    /// A gateway that asks for certificates, ready, with its tunnel at `tunnel`.
    fn gateway(&self, tunnel: u16, more: &[&str]) -> Gateway {
        let [manifests, cert, key, ca] =
            ["manifests", "gateway.crt", "gateway.key", "ca.crt"].map(|name| self.path(name));
        // Gateways of one site draw no NodePorts; what they would remember is each one's own.
        let (state, tunnel) = (self.path(&format!("state-{tunnel}")), format!("127.0.0.1:{tunnel}"));
        let arguments = ["gateway", "--manifests", &manifests, "--state-dir", &state, "--sni-listen", "off"];
        let listen = ["--tunnel-listen", &tunnel, "--admin-listen", "127.0.0.1:0", "--workers", "1"];
        let tls = ["--tunnel-tls-cert", &cert, "--tunnel-tls-key", &key, "--tunnel-client-ca", &ca];
        let mut process = Process::start(&[&arguments[..], &listen, &tls, more].concat());
        let admin = port_of(&process.wait_for("listener=admin"));
        process.wait_for("listener=tunnel");
        Gateway { process, admin }
    }

    /// An agent of cluster a for gateways at these ports, listening; `who` is its identity.
    fn agent(&self, gateways: &[u16], who: &[&str], more: &[&str]) -> Agent {
        let port = free_port();
        let mut agent = self.agent_at(port, gateways, who, more);
        agent.process.wait_for("listening forward=");
        agent
    }

    fn agent_at(&self, port: u16, gateways: &[u16], who: &[&str], more: &[&str]) -> Agent {
        let gateways: Vec<String> = gateways.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let (gateways, ca) = (gateways.join(","), self.path("ca.crt"));
        let forward = format!("127.0.0.1:{port}={}", authority("a"));
        let arguments =
            ["agent", "--gateway", &gateways, "--tls-ca", &ca, "--proxy", "off", "--address", "off"];
        let listen = ["--forward", &forward, "--admin-listen", "127.0.0.1:0"];
        let mut process = Process::start(&[&arguments[..], &listen, who, more].concat());
        let admin = port_of(&process.wait_for("listener=admin"));
        Agent { process, admin, port }
    }

    /// Flags that show the certificate of `name`.
    fn certificate(&self, name: &str) -> [String; 4] {
        let [cert, key] = ["crt", "key"].map(|end| self.path(&format!("{name}.{end}")));
        ["--tls-cert".into(), cert, "--tls-key".into(), key]
    }
}

impl Agent {
    fn metric(&self, name: &str) -> u64 {
        metric(self.admin, name)
    }

    fn ready(&self) -> bool {
        get(self.admin, "/readyz").0 == 200
    }

    fn wait_ready(&self) {
        wait_until("the agent is ready", || self.ready());
    }

    fn connect(&self) -> TcpStream {
        connect(self.port)
    }
}

fn strs<const N: usize>(strings: &[String; N]) -> [&str; N] {
    strings.each_ref().map(String::as_str)
}

fn port_of(line: &str) -> u16 {
    line.rsplit(':').next().and_then(|port| port.trim().parse().ok()).expect("the log names the port")
}

fn metric(admin: u16, name: &str) -> u64 {
    let (_, page) = get(admin, "/metrics");
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

fn authority(cluster: &str) -> String {
    format!("apiserver-external.cluster-{cluster}.svc.cluster.local:443")
}

fn service(cluster: &str, upstream: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: apiserver-external\n  namespace: cluster-{cluster}\n  annotations:\n    \
         nodeport-proxy.k8s.io/expose: Tunneling\nspec:\n  ports: [{{name: secure, port: 443}}]\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: api-1\n  namespace: cluster-{cluster}\n  \
         labels: {{kubernetes.io/service-name: apiserver-external}}\naddressType: IPv4\n\
         endpoints:\n- addresses: [127.0.0.1]\n  conditions: {{ready: true}}\nports: [{{name: secure, port: {upstream}}}]\n"
    )
}

/// Serves each connection with `serve` on a thread of its own, for as long as the test runs.
fn server(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    port
}

/// A server that sends back what it gets.
fn echo() -> u16 {
    server(|stream| {
        let mut reader = stream.try_clone().unwrap();
        let mut writer = stream;
        let _ = std::io::copy(&mut reader, &mut writer);
        let _ = writer.shutdown(Shutdown::Write);
    })
}

/// A port of loopback that was free a moment ago, outside the range that outgoing connections take theirs from.
fn free_port() -> u16 {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let port = 13_000 + (std::process::id() % 5_000) as u16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// One round trip on a connection.
fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping");
}

/// Whether the next thing heard of a connection is its reset, which may be there before anything is said.
fn is_reset(stream: &mut TcpStream) -> bool {
    let said = stream.write_all(b"x");
    let heard = said.and_then(|()| stream.read(&mut [0; 1]));
    heard.is_err_and(|error| matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
}

/// Asks again until the answer is yes. There is no event to wait for in another process.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        // Between two questions, so that the answer has a core to be found on.
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &["--access-log", "text"]);
    let mut pod = agent.connect();
    ping(&mut pod);
    let many = vec![7; 3_000_000];
    let mut reader = pod.try_clone().unwrap();
    let reads = std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    pod.write_all(&many).unwrap();
    // The API server's direction stays open until it has answered.
    pod.shutdown(Shutdown::Write).unwrap();
    assert!(reads.join().unwrap() == many);
    let line = agent.process.wait_for(" connection=");
    for part in
        ["bytes_up=3000004", "bytes_down=3000004", "side=downstream", "reason=closed", "gateway=tls://"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(line.contains(&format!("name={:?}", authority("a"))), "{line}");
}

#[test]
fn an_api_server_that_resets_is_felt_by_the_pod() {
    let site = Site::without_clusters();
    site.put(
        "a",
        server(|mut stream| {
            let _ = stream.read(&mut [0; 1]);
            let none = Some(Duration::ZERO);
            rustix::net::sockopt::set_socket_linger(&stream, none).unwrap();
        }),
    );
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &["--access-log", "json"]);
    assert!(is_reset(&mut agent.connect()));
    let line = agent.process.wait_for("\"connection\"");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["reason"], &line["side"]), (&"reset".into(), &"upstream".into()), "{line}");
}

#[test]
fn an_identity_that_is_refused_is_told_before_a_pod_needs_it() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("b")), &[]);
    let line = agent.process.wait_for("does not accept our identity");
    assert!(line.contains("403"), "{line}");
    let (status, text) = get(agent.admin, "/readyz?verbose");
    assert!(status == 503 && text.contains("[-] identity: refused by") && text.contains("403"), "{text}");
    assert!(get(agent.admin, "/tunnels").1.contains("\"identity\":\"refused\""));
    assert!(is_reset(&mut agent.connect()));
    let line = agent.process.wait_for("a connection was not carried");
    assert!(line.contains("reason=\"refused\"") && line.contains("403"), "{line}");
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"refused\"}"), 1);
}

#[test]
fn gateways_that_freeze_or_die_are_left_and_those_that_return_are_used() {
    let site = Site::new();
    let ports = [free_port(), free_port()];
    let [first, second] = ports.map(|port| site.gateway(port, &[]));
    let agent = site.agent(&ports, &strs(&site.certificate("a")), &["--open-timeout", "50s"]);
    wait_until("there is a tunnel to each", || agent.metric("portico_agent_tunnels_opened_total") >= 2);
    let mut streams = [agent.connect(), agent.connect()];
    streams.iter_mut().for_each(ping);

    // Frozen: its TCP connections live on, and nobody answers.
    first.process.signal("STOP");
    ping(&mut agent.connect());
    wait_until("its silence is noticed", || agent.metric("portico_agent_tunnels_suspect_total") >= 1);
    ping(&mut agent.connect());
    first.process.signal("CONT");
    // What it carried while it was frozen goes on.
    streams.iter_mut().for_each(ping);

    drop((first, second));
    wait_until("no tunnel is left", || !agent.ready());
    assert!(get(agent.admin, "/readyz").1.contains("[-] tunnels: none is up"));
    let mut waits = agent.connect();
    wait_until("a pod waits", || agent.metric("portico_agent_waiting_connections") == 1);
    let _again = site.gateway(ports[1], &[]);
    ping(&mut waits);
    agent.wait_ready();
}

#[test]
fn tokens_and_certificates_are_renewed_under_open_streams() {
    let site = Site::new();
    let [tokens, token] = ["tokens", "token"].map(|name| site.path(name));
    fs::write(&tokens, "first,a\n").unwrap();
    fs::write(&token, "first").unwrap();
    let tunnel = free_port();
    let mut gateway = site.gateway(tunnel, &["--tunnel-tokens", &tokens]);
    let mut agent = site.agent(&[tunnel], &["--token-file", &token], &[]);
    agent.wait_ready();
    let mut pod = agent.connect();
    ping(&mut pod);
    // What cannot be a token changes nothing.
    fs::write(&token, "two words").unwrap();
    agent.process.wait_for("cannot be used; the old one stays in force");
    let (status, text) = get(agent.admin, "/readyz?verbose");
    assert!(status == 200 && text.contains("[!] token: "), "{text}");
    assert_eq!(agent.metric("portico_agent_unusable_files"), 1);
    // The gateway knows both for a while; once the agent has shown the new one, the old one may go.
    fs::write(&tokens, "first,a\nsecond,a\n").unwrap();
    gateway.process.wait_for("new content of a file of the tunnel listener in force");
    let accepted = "portico_tunnel_authentications_total{method=\"static_token\",outcome=\"accepted\"}";
    let asked = || metric(gateway.admin, accepted);
    let before = asked();
    fs::write(&token, "second").unwrap();
    agent.process.wait_for("replaced; the new one is in force");
    wait_until("it was shown on both tunnels", || asked() >= before + 2 && agent.ready());
    fs::write(&tokens, "second,a\n").unwrap();
    gateway.process.wait_for("new content of a file of the tunnel listener in force");
    for _ in 0..20 {
        ping(&mut pod);
        ping(&mut agent.connect());
    }

    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &[]);
    agent.wait_ready();
    let mut pod = agent.connect();
    ping(&mut pod);
    wait_until("two are up", || agent.metric("portico_agent_tunnels_opened_total") == 2);
    site.issue("a");
    agent.process.wait_for("replaced; the new one is in force");
    wait_until("two have taken their place", || agent.metric("portico_agent_tunnels_opened_total") == 4);
    ping(&mut pod);
    ping(&mut agent.connect());
}

#[test]
fn over_its_bounds_an_agent_refuses_at_once() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let who = site.certificate("a");
    let agent = site.agent(&[tunnel], &strs(&who), &["--max-connections", "2"]);
    let mut pods = [agent.connect(), agent.connect()];
    pods.iter_mut().for_each(ping);
    assert!(is_reset(&mut agent.connect()));
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"too_many\"}"), 1);
    pods.iter_mut().for_each(ping);

    // Nobody is at that port.
    let agent = site.agent(&[free_port()], &strs(&who), &["--max-waiting", "1", "--open-timeout", "50s"]);
    let _waits = agent.connect();
    wait_until("one waits", || agent.metric("portico_agent_waiting_connections") == 1);
    assert!(is_reset(&mut agent.connect()));
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"too_many_waiting\"}"), 1);
}

#[test]
fn a_pod_that_resets_while_it_waits_gives_its_place_back_at_once() {
    let site = Site::new();
    // Nobody is at that port.
    let more = ["--max-waiting", "1", "--open-timeout", "1h"];
    let agent = site.agent(&[free_port()], &strs(&site.certificate("a")), &more);
    let waits = agent.connect();
    wait_until("one waits", || agent.metric("portico_agent_waiting_connections") == 1);
    rustix::net::sockopt::set_socket_linger(&waits, Some(Duration::ZERO)).unwrap();
    drop(waits);
    wait_until("nobody waits", || agent.metric("portico_agent_waiting_connections") == 0);
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"left\"}"), 1);
    assert_eq!(agent.metric("portico_agent_connections"), 0);
}

#[test]
fn sigterm_lets_open_connections_finish_and_takes_no_new_ones() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &[]);
    let mut pod = agent.connect();
    ping(&mut pod);
    agent.process.signal("TERM");
    wait_until("nobody listens", || TcpStream::connect(("127.0.0.1", agent.port)).is_err());
    assert!(get(agent.admin, "/readyz").1.contains("stopping"));
    ping(&mut pod);
    drop(pod);
    assert!(agent.process.wait().success(), "{}", agent.process.said());
}

#[test]
fn a_successor_takes_over_under_load_and_no_connect_fails() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let (who, socket) = (site.certificate("a"), site.path("take-over.sock"));
    let flags = |name| ["--take-over", &socket, "--drain-timeout", "50s", "--linger", "--instance", name];
    let mut old = site.agent(&[tunnel], &strs(&who), &flags("old"));
    old.wait_ready();
    let port = old.port;
    let mut early = connect(port);
    ping(&mut early);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let load = std::thread::spawn(move || {
        let mut done = 0;
        while stopped.try_recv().is_err() {
            ping(&mut connect(port));
            done += 1;
        }
        done
    });
    let mut new = site.agent_at(port, &[tunnel], &strs(&who), &flags("new"));
    old.process.wait_for("a successor has taken over");
    new.process.wait_for("listening forward=");
    new.wait_ready();
    let admin = format!("127.0.0.1:{}", new.admin);
    let asked = |name| run(&["agent", "ready", "--admin", &admin, "--instance", name]);
    assert!(asked("new").status.success());
    let other = asked("old");
    assert!(other.status.code() == Some(1) && stdout(&other).contains("this is the agent \"new\""));
    // To be told to stop after that is a matter of course, and no reason to cut anything.
    old.process.signal("TERM");
    ping(&mut early);
    drop(early);
    assert!(old.process.wait().success(), "{}", old.process.said());
    stop.send(()).unwrap();
    assert!(load.join().expect("every connection is served") > 0);
    assert_eq!(new.metric("portico_agent_accept_errors_total"), 0);
}

#[test]
fn a_successor_that_no_gateway_accepts_replaces_nothing_until_the_old_one_is_gone() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &[]);
    let socket = site.path("take-over.sock");
    let flags = ["--take-over", &socket];
    let old = site.agent(&[tunnel], &strs(&site.certificate("a")), &flags);
    let mut new = site.agent_at(old.port, &[tunnel], &strs(&site.certificate("b")), &flags);
    new.process.wait_for("does not accept our identity");
    assert!(!new.ready());
    ping(&mut old.connect());
    assert!(old.ready());
    // Killed, not stopped: what it listened on is in the hands of the other already, and no connect fails.
    let port = old.port;
    drop(old);
    new.process.wait_for("the predecessor is gone");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
}

#[test]
fn an_agent_has_two_threads_and_says_what_plaintext_means() {
    let site = Site::new();
    let tunnel = free_port();
    let _gateway = site.gateway(tunnel, &["--tunnel-plaintext"]);
    let (gateway, port) = (format!("h2c://127.0.0.1:{tunnel}"), free_port());
    let forward = format!("127.0.0.1:{port}={}", authority("b"));
    let arguments =
        ["agent", "--gateway", &gateway, "--proxy", "off", "--address", "off", "--forward", &forward];
    let mut process = Process::start(&[&arguments[..], &["--admin-listen", "127.0.0.1:0"]].concat());
    let admin = port_of(&process.wait_for("listener=admin"));
    process.wait_for("listening forward=");
    assert!(process.said().contains("without TLS"), "{}", process.said());
    ping(&mut connect(port));
    assert_eq!(metric(admin, "portico_agent_plaintext_gateways"), 1);
    assert_eq!(get(admin, "/connections?o=table").0, 200);
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    assert!(status.contains("Threads:\t2\n"), "{status}");
}

#[test]
fn a_port_that_is_taken_is_named_with_its_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let forward = format!("{}=api:443", taken.local_addr().unwrap());
    let arguments = ["agent", "--gateway", "h2c://127.0.0.1:1", "--address", "off", "--admin-listen", "off"];
    let output = run(&[&arguments[..], &["--forward", &forward]].concat());
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains(&format!("--forward {forward}")) && said.contains("--take-over"), "{said}");
}

#[test]
fn every_metric_and_every_reason_is_in_the_manual() {
    let site = Site::new();
    let agent = site.agent(&[free_port()], &strs(&site.certificate("a")), &[]);
    let (_, metrics) = get(agent.admin, "/metrics");
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/agent.md"));
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        assert!(manual.contains(&format!("`{name}{suffix}`")), "{name}{suffix} is not in docs/agent.md");
    }
    let reasons =
        metrics.lines().filter_map(|line| line.strip_prefix("portico_agent_refusals_total{reason=\""));
    for reason in reasons.filter_map(|rest| rest.split('"').next()) {
        assert!(manual.contains(&format!("| `{reason}` |")), "{reason} is not in docs/agent.md");
    }
}
