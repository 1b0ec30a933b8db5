//! CONNECT through the whole data plane: routing, refusals, budgets, drain. What one tunnel promises is
//! tested in `portico-tunnel`; here it meets routes and records.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use bytes::Bytes;
use portico_gateway::{Config, End, Gateway, ProxyMode, ProxyProtocol, Refusal, Side};
use portico_lab::pki::{Certificate, Pki};
use portico_tunnel::{Settings, TlsFiles};
use portico_wire::{Parse, proxy};

const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

fn tunnel_config() -> Config {
    let tunnel = Settings { plaintext: true, ..Settings::default() };
    Config { tunnel_listen: Some(LOOPBACK), tunnel, ..Config::default() }
}

fn ask(gateway: &Gateway, authority: &str) -> TcpStream {
    let mut client = connect(tunnel_address(gateway));
    write!(client, "CONNECT {authority} HTTP/1.1\r\n\r\n").unwrap();
    client
}

fn answer(gateway: &Gateway, authority: &str) -> String {
    String::from_utf8(read_to_end(&mut ask(gateway, authority))).unwrap()
}

fn count(gateway: &Gateway, refusal: Refusal) -> u64 {
    gateway.shared().totals().refusals[refusal as usize]
}

#[test]
fn tunnel_connections_and_streams_of_one_cluster_leave_as_much_to_others() {
    // Four tunnels with a stream each; of two clusters each takes what the other leaves.
    let gateway = start(Config { connection_descriptors: 8, ..tunnel_config() });
    let [a, b] = [Endpoint::new(), Endpoint::new()];
    Service::new("a", &[a.address]).authority(AUTHORITY).expose(&gateway);
    let other = AUTHORITY.replace("cluster-a", "cluster-b");
    Service::new("b", &[b.address]).authority(&other).expose(&gateway);
    let first = Client::plaintext(&gateway);
    let streams: Vec<_> = (0..6).map(|_| first.connect(AUTHORITY)).collect();
    let statuses: Vec<_> = streams.iter().map(|(status, ..)| *status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429, 429]);
    assert_eq!(Client::plaintext(&gateway).connect(AUTHORITY).0, 429, "nor by another connection");
    let neighbour = Client::plaintext(&gateway);
    assert_eq!(neighbour.connect(&other).0, 200);
    assert_eq!(count(&gateway, Refusal::FairShare), 4);
    drop(streams);
    drop(first);
    eventually("what ended is given back", || gateway.shared().totals().connection_descriptors <= 2);
}

#[test]
fn a_stream_reaches_the_endpoint_of_its_authority_however_it_is_written() {
    let gateway = start(tunnel_config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&gateway);
    let client = Client::plaintext(&gateway);
    for authority in
        [AUTHORITY, &AUTHORITY.to_uppercase(), "apiserver-external.cluster-a.svc.cluster.local.:443"]
    {
        let (status, mut send, mut recv) = client.connect(authority);
        assert_eq!(status, 200, "{authority}");
        let mut server = endpoint.accept();
        send.send_data(Bytes::from_static(b"ping"), false).unwrap();
        assert_eq!(read_exactly(&mut server, 4), b"ping");
        server.write_all(b"pong").unwrap();
        assert_eq!(client.read(&mut recv).unwrap().unwrap(), "pong");
        eventually("the bytes are counted", || {
            gateway.connections().iter().any(|record| (record.bytes_up(), record.bytes_down()) == (4, 4))
        });
        let records = gateway.connections();
        assert_eq!(records[0].name.as_deref(), Some(AUTHORITY));
        send.send_data(Bytes::new(), true).unwrap();
        drop(server);
        wait_until_empty(&gateway);
    }
}

#[test]
fn http1_streams_are_copied_and_counted_like_any_connection() {
    let gateway = start(tunnel_config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&gateway);
    let mut client = connect(tunnel_address(&gateway));
    write!(client, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\nearly").unwrap();
    let mut server = endpoint.accept();
    assert_eq!(read_exactly(&mut server, 5), b"early");
    server.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&mut client, ESTABLISHED.len()), ESTABLISHED);
    assert_eq!(read_exactly(&mut client, 6), b"answer");
    assert_eq!(gateway.connections().len(), 1);
    reset(server);
    assert_reset(&mut client);
    wait_until_empty(&gateway);
}

#[test]
fn every_refusal_has_its_status_its_sentence_and_its_counter() {
    let gateway = start(tunnel_config());
    let refusing = LOOPBACK.ip();
    Service::new("empty", &[]).authority("empty.test:443").expose(&gateway);
    let closed = SocketAddr::new(refusing, free_port());
    Service::new("closed", &[closed]).authority("closed.test:443").expose(&gateway);
    let endpoint = Endpoint::new();
    let private = ["192.0.2.0/24".parse().unwrap()];
    Service::new("private", &[endpoint.address])
        .authority("private.test:443")
        .policy(|policy| policy.allow = portico_api::policy::AllowList::new(private))
        .expose(&gateway);
    Service::new("full", &[endpoint.address])
        .authority("full.test:443")
        .policy(|policy| policy.budget.max_connections = Some(0))
        .expose(&gateway);
    let client = Client::plaintext(&gateway);
    for (authority, status, refusal) in [
        ("unknown.test:443", 404, Refusal::Unknown),
        ("empty.test:443", 503, Refusal::NotReady),
        ("closed.test:443", 502, Refusal::ConnectFailed),
        ("private.test:443", 403, Refusal::NotAllowed),
        ("full.test:443", 429, Refusal::MaxConnections),
        ("no-port", 400, Refusal::Malformed),
    ] {
        let sentence = match refusal {
            Refusal::Malformed => "the authority must be HOST:PORT",
            refusal => refusal.message(),
        };
        let before = count(&gateway, refusal);
        let text = answer(&gateway, authority);
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{authority}: {text}");
        assert!(text.contains(&format!("\r\n\r\n{sentence}")), "{authority}: {text}");
        assert_eq!(client.connect(authority).0, status, "{authority}");
        let reason = client.reason();
        assert!(reason.starts_with(sentence), "{authority}: {reason}");
        assert_eq!(count(&gateway, refusal) - before, 2, "{authority}");
    }
    assert_eq!(gateway.connections().len(), 0);
}

#[test]
fn an_identity_opens_its_own_cluster_and_no_other() {
    let pki = Pki::new();
    pki.issue("a", Certificate::cluster("a"));
    pki.issue("b", Certificate::cluster("b"));
    let files = TlsFiles { client_ca: vec![pki.file("ca.crt").into()], ..tls_files(&pki, &["127.0.0.1"]) };
    let gateway = start(Config { tunnel: secured(files), ..tunnel_config() });
    let endpoint = Endpoint::new();
    for cluster in ["a", "b"] {
        Service::new(cluster, &[endpoint.address]).authority(&format!("{cluster}.test:443")).expose(&gateway);
    }
    let ask = |certificate: &str, authority: &str| curl(&pki, &gateway, certificate, authority);
    assert_eq!(ask("a", "b.test:443"), 403);
    assert_eq!(count(&gateway, Refusal::NotAuthorized), 1);
    assert_eq!(ask("b", "a.test:443"), 403);
    assert_eq!(count(&gateway, Refusal::NotAuthorized), 2);
    // A name that is not exposed looks the same, or clusters could be found by guessing; the operator sees
    // the difference.
    assert_eq!(ask("a", "unknown.test:443"), 403);
    assert_eq!(count(&gateway, Refusal::Unknown), 1);
    let server = std::thread::spawn(move || drop(endpoint.accept()));
    assert_eq!(ask("a", "a.test:443"), 200);
    server.join().unwrap();
    let answer = answer(&gateway, "a.test:443");
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    eventually("the refusal is counted", || count(&gateway, Refusal::NotAuthorized) == 3);
}

#[test]
fn the_endpoint_learns_the_client_by_proxy_header_before_anything_else() {
    let mut config = tunnel_config();
    config.proxy_protocol = ProxyProtocol {
        tunnel: ProxyMode::Required,
        trusted: vec!["127.0.0.0/8".parse().unwrap()],
        ..Default::default()
    };
    let gateway = start(config);
    let endpoint = Endpoint::new();
    let mut service = Service::new("a", &[endpoint.address]).authority(AUTHORITY);
    service.backend.send_proxy = true;
    service.expose(&gateway);
    let mut client = connect(tunnel_address(&gateway));
    write!(client, "PROXY TCP4 192.0.2.7 192.0.2.1 40000 8088\r\nCONNECT {AUTHORITY} HTTP/1.1\r\n\r\nearly")
        .unwrap();
    let mut server = endpoint.accept();
    let fixed = read_exactly(&mut server, 16);
    let rest = read_exactly(&mut server, usize::from(u16::from_be_bytes([fixed[14], fixed[15]])));
    let header = [fixed, rest].concat();
    let Parse::Complete(proxy::Header::Proxied { source, .. }) = proxy::parse(&header) else {
        panic!("{header:?}")
    };
    assert_eq!(source, "192.0.2.7:40000".parse().unwrap());
    assert!(header.windows(AUTHORITY.len()).any(|window| window == AUTHORITY.as_bytes()));
    assert_eq!(read_exactly(&mut server, 5), b"early");
}

#[test]
fn a_drain_waits_for_streams_and_then_cuts_them() {
    let gateway = start(tunnel_config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&gateway);
    let client = Client::plaintext(&gateway);
    let (_, mut finishes, _recv) = client.connect(AUTHORITY);
    let mut finishing = endpoint.accept();
    let (_, _send, mut cut) = client.connect(AUTHORITY);
    let mut stays = endpoint.accept();
    let drained = {
        let gateway = Arc::clone(&gateway);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(gateway.drain(Duration::from_secs(3)))
        })
    };
    eventually("the gateway drains", || gateway.shared().is_draining());
    finishes.send_data(Bytes::from_static(b"last words"), true).unwrap();
    assert_eq!(read_to_end(&mut finishing), b"last words");
    drop(finishing);
    assert_eq!(drained.join().unwrap(), 1);
    assert!(client.read(&mut cut).unwrap().is_err());
    assert_reset(&mut stays);
    assert_eq!(gateway.connections().len(), 0);
    let word = |end: End| (end.reason(), end.side());
    assert_eq!(word(End::Drained), ("drain_timeout", Side::Gateway));
    let count = |end| ended(gateway.shared(), end);
    assert_eq!((count(End::Closed(Side::Downstream)), count(End::Drained)), (1, 1));
}

#[test]
fn fifty_tunnels_do_not_notice_five_hundred_changes_to_other_clusters() {
    let gateway = start(tunnel_config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&gateway);
    let client = Client::plaintext(&gateway);
    let mut tunnels: Vec<_> = (0..50)
        .map(|_| {
            let (status, send, recv) = client.connect(AUTHORITY);
            assert_eq!(status, 200);
            (send, recv, endpoint.accept())
        })
        .collect();
    for change in 0..500_u32 {
        let other = Service::new("other", &[endpoint.address]).authority("other.test:443");
        if change % 2 == 0 {
            other.expose(&gateway)
        } else {
            other.withdraw(&gateway)
        }
        let count = tunnels.len();
        let (send, _, server) = &mut tunnels[change as usize % count];
        send.send_data(Bytes::copy_from_slice(&change.to_be_bytes()), false).unwrap();
        assert_eq!(read_exactly(server, 4), change.to_be_bytes());
    }
    assert_eq!(gateway.connections().len(), 50);
}

#[test]
fn clients_that_never_ask_are_counted_by_what_they_did() {
    let config = Config { hello_timeout: Duration::from_millis(500), ..tunnel_config() };
    let gateway = start(config);
    drop(connect(tunnel_address(&gateway)));
    eventually("leaving at once is counted", || count(&gateway, Refusal::ClosedEarly) == 1);
    let _silent = connect(tunnel_address(&gateway));
    eventually("silence is counted", || count(&gateway, Refusal::TooSlow) == 1);
    connect(tunnel_address(&gateway)).write_all(b"\x16\x03\x01").unwrap();
    eventually("TLS without a certificate is counted", || count(&gateway, Refusal::Malformed) == 1);
    eventually("no handshake slot is held", || gateway.shared().totals().handshakes == 0);
}

#[test]
fn a_connection_that_rests_holds_no_handshake_slot() {
    let gateway = start(tunnel_config());
    let _client = Client::plaintext(&gateway);
    eventually("the slot is given back", || {
        let totals = gateway.shared().totals();
        totals.accepted == 1 && totals.handshakes == 0
    });
}

/// The status curl got for its CONNECT.
fn curl(pki: &Pki, gateway: &Gateway, certificate: &str, authority: &str) -> u16 {
    let mut curl = std::process::Command::new("curl");
    curl.args([
        "-s",
        "--max-time",
        "20",
        "--noproxy",
        "",
        "--proxytunnel",
        "-o",
        "/dev/null",
        "-w",
        "%{http_connect}",
    ])
    .args(["--proxy", &format!("https://{}", tunnel_address(gateway)), "--proxy-cacert"])
    .arg(pki.file("ca.crt"))
    .arg("--proxy-cert")
    .arg(pki.file(&format!("{certificate}.crt")))
    .arg("--proxy-key")
    .arg(pki.file(&format!("{certificate}.key")))
    .arg(format!("http://{authority}/"));
    let output = curl.output().expect("curl runs; apt-get install curl");
    String::from_utf8(output.stdout).unwrap().parse().unwrap()
}
