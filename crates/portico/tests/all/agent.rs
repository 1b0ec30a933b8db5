//! `portico agent` and `portico gateway` as two processes on loopback: bytes, identities, gateways that die,
//! freeze and return, files that change, and an agent that takes over from another.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::common::{PATIENCE, Process, free_port, get, metric, port_of, run, stderr, stdout, wait_until};
use crate::proof::authority;
use crate::secure::{SecureGateway, SecureSite};
use portico_lab::metrics::names;
use portico_lab::pki::Certificate;

struct Agent {
    process: Process,
    admin: u16,
    /// Where pods connect.
    port: u16,
}

impl SecureSite {
    /// A gateway that asks for certificates, ready, with its tunnel at `tunnel`.
    fn gateway_at(&self, tunnel: u16, more: &[&str]) -> SecureGateway {
        // Gateways of one site draw no NodePorts; what they would remember is each one's own.
        let [state, ca] = [&format!("state-{tunnel}"), "ca.crt"].map(|name| self.pki.path(name));
        let tunnel = format!("127.0.0.1:{tunnel}");
        let flags = ["--state-dir", &state, "--tunnel-client-ca", &ca];
        self.gateway(&["--sni-listen", "off", "--tunnel-listen", &tunnel], &[&flags[..], more].concat())
    }

    /// An agent of cluster a for gateways at these ports, listening. `identity` is its flags of identity.
    fn agent(&self, gateways: &[u16], identity: &[&str], more: &[&str]) -> Agent {
        let port = free_port();
        let mut agent = self.agent_at(port, gateways, identity, more);
        agent.process.wait_for("listening forward=");
        agent
    }

    fn agent_at(&self, port: u16, gateways: &[u16], identity: &[&str], more: &[&str]) -> Agent {
        let gateways: Vec<String> = gateways.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let (gateways, ca) = (gateways.join(","), self.pki.path("ca.crt"));
        let forward = format!("127.0.0.1:{port}={}", authority("a"));
        let arguments =
            ["agent", "--gateway", &gateways, "--tls-ca", &ca, "--proxy", "off", "--address", "off"];
        let listen = ["--forward", &forward, "--admin-listen", "127.0.0.1:0"];
        let mut process = Process::start(&[&arguments[..], &listen, identity, more].concat());
        let admin = port_of(&process.wait_for("listener=admin"));
        Agent { process, admin, port }
    }

    /// Flags that show the certificate of `name`.
    fn certificate(&self, name: &str) -> [String; 4] {
        let [cert, key] = ["crt", "key"].map(|end| self.pki.path(&format!("{name}.{end}")));
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

/// Serves each connection with `serve` on a thread of its own, for as long as the test runs.
fn server(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    address
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

/// Whether the next event of a connection is its reset, which may come before anything is written.
fn is_reset(stream: &mut TcpStream) -> bool {
    let written = stream.write_all(b"x");
    let read = written.and_then(|()| stream.read(&mut [0; 1]));
    read.is_err_and(|error| matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
}

#[test]
fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
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
fn a_reset_of_the_api_server_reaches_the_pod() {
    let site = SecureSite::without_clusters();
    site.put(
        "a",
        server(|mut stream| {
            let _ = stream.read(&mut [0; 1]);
            let none = Some(Duration::ZERO);
            rustix::net::sockopt::set_socket_linger(&stream, none).unwrap();
        }),
    );
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &["--access-log", "json"]);
    assert!(is_reset(&mut agent.connect()));
    let line = agent.process.wait_for("\"connection\"");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["reason"], &line["side"]), (&"reset".into(), &"upstream".into()), "{line}");
}

#[test]
fn a_refused_identity_is_reported_before_a_pod_needs_it() {
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
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
    let site = SecureSite::new();
    let ports = [free_port(), free_port()];
    let [first, second] = ports.map(|port| site.gateway_at(port, &[]));
    let agent = site.agent(&ports, &strs(&site.certificate("a")), &["--open-timeout", "50s"]);
    wait_until("there is a tunnel to each", || {
        let tunnels: serde_json::Value = serde_json::from_str(&get(agent.admin, "/tunnels").1).unwrap();
        let mut upstreams = ports.iter().map(|port| format!("127.0.0.1:{port}"));
        upstreams.all(|upstream| {
            let mut all = tunnels.as_array().unwrap().iter();
            all.any(|tunnel| tunnel["upstream"] == upstream && tunnel["state"] == "live")
        })
    });
    let mut streams = [agent.connect(), agent.connect()];
    streams.iter_mut().for_each(ping);

    // Frozen: its TCP connections live on, and nothing answers.
    first.process.freeze();
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
    let _again = site.gateway_at(ports[1], &[]);
    ping(&mut waits);
    agent.wait_ready();
}

#[test]
fn tokens_and_certificates_are_renewed_under_open_streams() {
    let site = SecureSite::new();
    let [tokens, token] = ["tokens", "token"].map(|name| site.pki.path(name));
    fs::write(&tokens, "first,a\n").unwrap();
    fs::write(&token, "first").unwrap();
    let tunnel = free_port();
    let mut gateway = site.gateway_at(tunnel, &["--tunnel-tokens", &tokens]);
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
    wait_until("two are up", || agent.metric("portico_agent_tunnels_opened_total") >= 2);
    site.pki.issue("a", Certificate::cluster("a"));
    agent.process.wait_for("replaced; the new one is in force");
    wait_until("two have taken their place", || agent.metric("portico_agent_tunnels_opened_total") >= 4);
    ping(&mut pod);
    ping(&mut agent.connect());
}

#[test]
fn over_its_bounds_an_agent_refuses_at_once() {
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
    let who = site.certificate("a");
    let agent = site.agent(&[tunnel], &strs(&who), &["--max-connections", "2"]);
    let mut pods = [agent.connect(), agent.connect()];
    pods.iter_mut().for_each(ping);
    assert!(is_reset(&mut agent.connect()));
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"too_many\"}"), 1);
    pods.iter_mut().for_each(ping);

    // Nothing listens at that port.
    let agent = site.agent(&[free_port()], &strs(&who), &["--max-waiting", "1", "--open-timeout", "50s"]);
    let _waits = agent.connect();
    wait_until("one waits", || agent.metric("portico_agent_waiting_connections") == 1);
    assert!(is_reset(&mut agent.connect()));
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"too_many_waiting\"}"), 1);
}

#[test]
fn a_pod_that_resets_while_it_waits_gives_its_permit_back_at_once() {
    let site = SecureSite::new();
    // Nothing listens at that port.
    let more = ["--max-waiting", "1", "--open-timeout", "1h"];
    let agent = site.agent(&[free_port()], &strs(&site.certificate("a")), &more);
    let waits = agent.connect();
    wait_until("one waits", || agent.metric("portico_agent_waiting_connections") == 1);
    rustix::net::sockopt::set_socket_linger(&waits, Some(Duration::ZERO)).unwrap();
    drop(waits);
    wait_until("none waits", || agent.metric("portico_agent_waiting_connections") == 0);
    assert_eq!(agent.metric("portico_agent_refusals_total{reason=\"left\"}"), 1);
    assert_eq!(agent.metric("portico_agent_connections"), 0);
}

#[test]
fn sigterm_lets_open_connections_finish_and_takes_no_new_ones() {
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
    let mut agent = site.agent(&[tunnel], &strs(&site.certificate("a")), &[]);
    let mut pod = agent.connect();
    ping(&mut pod);
    agent.process.signal("TERM");
    wait_until("nothing listens", || TcpStream::connect(("127.0.0.1", agent.port)).is_err());
    assert!(get(agent.admin, "/readyz").1.contains("stopping"));
    ping(&mut pod);
    drop(pod);
    assert!(agent.process.wait().success(), "{}", agent.process.said());
}

#[test]
fn a_successor_takes_over_under_load_and_no_connect_fails() {
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
    let (who, socket) = (site.certificate("a"), site.pki.path("take-over.sock"));
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
    // SIGTERM after that is a matter of course, and no reason to cut anything.
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
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &[]);
    let socket = site.pki.path("take-over.sock");
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
    let site = SecureSite::new();
    let tunnel = free_port();
    let _gateway = site.gateway_at(tunnel, &["--tunnel-plaintext"]);
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
fn user_and_password_of_a_proxy_do_not_stay_among_the_arguments() {
    let forward = format!("127.0.0.1:{}=api:443", free_port());
    let arguments = ["agent", "--gateway", "h2c://127.0.0.1:1", "--address", "off", "--forward", &forward];
    let proxy = ["--proxy", "http://user:se%63ret@127.0.0.1:1", "--admin-listen", "off"];
    let mut process = Process::start(&[&arguments[..], &proxy].concat());
    process.wait_for("--proxy-credentials");
    process.wait_for("listening forward=");
    let of_it = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", process.id())).unwrap();
    let arguments = of_it("cmdline");
    assert!(arguments.contains("http://127.0.0.1:1") && !arguments.contains("user"), "{arguments}");
    assert!(of_it("environ").contains("PORTICO_PROXY_AUTH=user:secret\0"));
    assert!(!process.said().contains("secret") && !process.said().contains("se%63ret"), "{}", process.said());
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
    let site = SecureSite::new();
    let agent = site.agent(&[free_port()], &strs(&site.certificate("a")), &[]);
    let (_, metrics) = get(agent.admin, "/metrics");
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/agent.md"));
    for name in names(&metrics) {
        assert!(manual.contains(&format!("`{name}`")), "{name} is not in docs/agent.md");
    }
    let reasons =
        metrics.lines().filter_map(|line| line.strip_prefix("portico_agent_refusals_total{reason=\""));
    for reason in reasons.filter_map(|rest| rest.split('"').next()) {
        assert!(manual.contains(&format!("| `{reason}` |")), "{reason} is not in docs/agent.md");
    }
}
