//! Every row of the outcome table is provoked over real sockets. A reason that no client can meet is found
//! here, and so is a new one without a provocation.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use portico_api::api_server_ca::ApiServerCa;
use portico_api::policy::{AllowList, Budget, ClusterFacts};
use portico_gateway::{
    Config, End, Gateway, ProxyMode, ProxyProtocol, Refusal, Side, StaticTokens, TokenSettings,
};
use portico_lab::frames::{self, RawClient, kind};
use portico_lab::pki::Pki;
use portico_net::MemoryBudget;
use portico_tunnel::Settings;
use rustix::process::{Resource, getrlimit};

use crate::support::*;

const HOST: &str = "a.example.com";
const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";
const SHORT: Duration = Duration::from_millis(50);

/// A row, and what provokes it. Each asserts that the row is counted, and the alert or the status that the
/// client gets, if the client gets one.
#[rustfmt::skip]
const REFUSALS: [(Refusal, fn()); Refusal::ALL.len()] = [
    (Refusal::ClosedEarly, closed_early),
    (Refusal::TooSlow, too_slow),
    (Refusal::Malformed, malformed),
    (Refusal::ProxyHeader, proxy_header),
    (Refusal::NoServerName, no_server_name),
    (Refusal::Unknown, unknown),
    (Refusal::NotReady, not_ready),
    (Refusal::NotAllowed, not_allowed),
    (Refusal::NotAuthorized, not_authorized),
    (Refusal::Unauthenticated, unauthenticated),
    (Refusal::ReviewFailed, review_failed),
    (Refusal::MaxReviewsWaiting, max_reviews_waiting),
    (Refusal::MaxConnections, max_connections),
    (Refusal::FairShare, fair_share),
    (Refusal::ConnectionRate, connection_rate),
    (Refusal::MaxHandshakes, max_handshakes),
    (Refusal::MaxUnauthenticated, max_unauthenticated),
    (Refusal::Flood, flood),
    (Refusal::MaxConnecting, max_connecting),
    (Refusal::ConnectFailed, connect_failed),
    (Refusal::ConnectTimedOut, connect_timed_out),
    (Refusal::OwnListener, own_listener),
    (Refusal::OutOfDescriptors, || alone("outcomes::every_refusal_is_provoked", out_of_descriptors)),
    (Refusal::Method, method),
];

#[rustfmt::skip]
const ENDS: [(End, fn()); 10] = [
    (End::Closed(Side::Downstream), closed_by_the_client),
    (End::Closed(Side::Upstream), closed_by_the_endpoint),
    (End::Reset(Side::Downstream), reset_by_the_client),
    (End::Reset(Side::Upstream), reset_by_the_endpoint),
    (End::Idle, idle),
    (End::EndpointRemoved, endpoint_removed),
    (End::Drained, drained),
    (End::Cancelled, cancelled),
    (End::Revoked, revoked),
    (End::Memory, memory),
];

#[test]
fn every_refusal_is_provoked() {
    if is_alone() {
        return out_of_descriptors();
    }
    assert_eq!(REFUSALS.map(|(refusal, _)| refusal), Refusal::ALL);
    REFUSALS.iter().for_each(|(_, provoke)| provoke());
}

#[test]
fn every_end_is_provoked() {
    assert_eq!(ENDS.map(|(end, _)| end), End::ALL);
    ENDS.iter().for_each(|(_, provoke)| provoke());
}

// === Refusals ===

fn closed_early() {
    let gateway = start(config());
    let mut client = connect(sni_address(&gateway));
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut client), b"");
    assert_counted(&gateway, Refusal::ClosedEarly);
    let gateway = start(both());
    let mut client = connect(tunnel_address(&gateway));
    client.write_all(b"CONNECT a:1 HT").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut client), b"");
    assert_counted(&gateway, Refusal::ClosedEarly);
}

fn too_slow() {
    let gateway = start(Config { hello_timeout: SHORT, ..config() });
    assert_eq!(read_to_end(&mut connect(sni_address(&gateway))), b"");
    assert_counted(&gateway, Refusal::TooSlow);
    let gateway = start(Config { hello_timeout: SHORT, ..both() });
    let mut client = connect(tunnel_address(&gateway));
    client.write_all(b"CONNECT a:1 HT").unwrap();
    assert_eq!(status_of(&mut client), status_of_row(Refusal::TooSlow));
    assert_counted(&gateway, Refusal::TooSlow);
}

fn malformed() {
    let gateway = start(both());
    assert_eq!(status(&gateway, "no-port"), status_of_row(Refusal::Malformed));
    assert_counted(&gateway, Refusal::Malformed);
}

fn proxy_header() {
    let proxy_protocol = ProxyProtocol { sni: ProxyMode::Required, ..ProxyProtocol::default() };
    let gateway = start(Config { proxy_protocol, ..config() });
    assert_cut_off(client(&gateway, HOST));
    assert_counted(&gateway, Refusal::ProxyHeader);
}

fn no_server_name() {
    let gateway = start(config());
    assert_alert(connect(sni_address(&gateway)), &hello_without_name(), Refusal::NoServerName);
    assert_counted(&gateway, Refusal::NoServerName);
}

fn unknown() {
    let gateway = start(both());
    assert_answered(&gateway, Refusal::Unknown, |service| service, None);
}

fn not_ready() {
    let gateway = start(both());
    assert_answered(&gateway, Refusal::NotReady, |service| service, Some(&[]));
}

fn not_allowed() {
    let gateway = start(both());
    let others = |service: Service| {
        service.policy(|policy| policy.allow = AllowList::new(["198.51.100.0/24".parse().unwrap()]))
    };
    assert_answered(&gateway, Refusal::NotAllowed, others, Some(&[dead_endpoint()]));
}

fn max_connections() {
    let gateway = start(both());
    let none = |service: Service| {
        service.policy(|policy| policy.budget = Budget { max_connections: Some(0), ..Budget::default() })
    };
    assert_answered(&gateway, Refusal::MaxConnections, none, Some(&[dead_endpoint()]));
}

fn fair_share() {
    let gateway = start(Config { connection_descriptors: 0, ..both() });
    assert_answered(&gateway, Refusal::FairShare, |service| service, Some(&[dead_endpoint()]));
}

fn connection_rate() {
    let gateway = start(both());
    let none = |service: Service| {
        let budget = Budget { max_connections_per_second: Some(0), ..Budget::default() };
        service.policy(|policy| policy.budget = budget)
    };
    assert_answered(&gateway, Refusal::ConnectionRate, none, Some(&[dead_endpoint()]));
}

fn max_connecting() {
    let gateway = start(Config { max_connecting: 0, ..both() });
    assert_answered(&gateway, Refusal::MaxConnecting, |service| service, Some(&[dead_endpoint()]));
}

fn connect_failed() {
    let gateway = start(both());
    assert_answered(&gateway, Refusal::ConnectFailed, |service| service, Some(&[dead_endpoint()]));
}

fn connect_timed_out() {
    let (listener, _waiting) = silent_endpoint();
    let gateway = start(Config { connect_timeout: SHORT, ..both() });
    let address = listener.local_addr().unwrap();
    assert_answered(&gateway, Refusal::ConnectTimedOut, |service| service, Some(&[address]));
}

fn own_listener() {
    let gateway = start(both());
    assert_answered(&gateway, Refusal::OwnListener, |service| service, Some(&[sni_address(&gateway)]));
}

fn max_handshakes() {
    let gateway = start(Config { max_handshakes: 0, ..config() });
    assert_cut_off(connect(sni_address(&gateway)));
    assert_counted(&gateway, Refusal::MaxHandshakes);
}

/// In a process of its own: no descriptor is left in it.
fn out_of_descriptors() {
    let gateway = start(both());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).authority(AUTHORITY).expose(&gateway);
    let mut client = connect(sni_address(&gateway));
    let mut tunnel = connect(tunnel_address(&gateway));
    eventually("both are accepted", || gateway.shared().totals().handshakes == 2);
    let mut all: Vec<fs::File> = Vec::new();
    let kept = u32::try_from(getrlimit(Resource::Nofile).current.unwrap() / 8 * 7).unwrap();
    while all.last().is_none_or(|file| file.as_raw_fd().unsigned_abs() < kept) {
        all.push(fs::File::open("/dev/null").unwrap());
    }
    write!(tunnel, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(status_of(&mut tunnel), status_of_row(Refusal::OutOfDescriptors), "an eighth is kept");
    assert_counted(&gateway, Refusal::OutOfDescriptors);
    while let Ok(file) = fs::File::open("/dev/null") {
        all.push(file);
    }
    client.write_all(&hello(HOST)).unwrap();
    assert_eq!(alert_of(&mut client), Refusal::OutOfDescriptors.alert().map(|alert| alert as u8));
    drop(all);
    eventually("it is counted", || count(&gateway, Refusal::OutOfDescriptors) == 2);
}

fn method() {
    let gateway = start(both());
    let mut client = connect(tunnel_address(&gateway));
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(status_of(&mut client), status_of_row(Refusal::Method));
    assert_counted(&gateway, Refusal::Method);
}

fn not_authorized() {
    let secure = Secure::start("secret-of-b,b\n", |_| {});
    expose(&secure.gateway, &[dead_endpoint()]);
    let (status, ..) = secure.connect(Some("secret-of-b")).connect(AUTHORITY);
    assert_eq!(status, status_of_row(Refusal::NotAuthorized));
    assert_counted(&secure.gateway, Refusal::NotAuthorized);
}

fn unauthenticated() {
    let secure = Secure::start("secret,a\n", |_| {});
    expose(&secure.gateway, &[dead_endpoint()]);
    let (status, ..) = secure.connect(None).connect(AUTHORITY);
    assert_eq!(status, status_of_row(Refusal::Unauthenticated));
    assert_counted(&secure.gateway, Refusal::Unauthenticated);
}

/// The status of its own is for a token that was accepted before: `after_the_grace_a_token_is_refused…` in
/// `auth/tests.rs`, where ten minutes pass at once.
fn review_failed() {
    let secure = Secure::start("", |config| config.tokens.review = Some(Duration::from_secs(60)));
    let ca = ApiServerCa::parse(&secure.pki.authority().cert()).unwrap();
    Service::new("a", &[dead_endpoint()])
        .authority(AUTHORITY)
        .policy(|policy| policy.cluster = ClusterFacts::of(None, Some(ca)))
        .expose(&secure.gateway);
    let (status, ..) = secure.connect(Some("never accepted")).connect(AUTHORITY);
    assert_eq!(
        status,
        status_of_row(Refusal::Unauthenticated),
        "a client without a credential is not told why"
    );
    assert_counted(&secure.gateway, Refusal::ReviewFailed);
}

fn max_reviews_waiting() {
    let secure = Secure::start("secret,a\n", |config| {
        config.tokens.review = Some(Duration::from_secs(60));
        // A cluster has a quarter. Each takes 3 KiB and its token.
        config.review_memory = 4 * 5 * 3_200;
    });
    let ca = ApiServerCa::parse(&secure.pki.authority().cert()).unwrap();
    // An API server that says nothing.
    let silent = Endpoint::new();
    Service::new("a", &[silent.address])
        .authority(AUTHORITY)
        .policy(|policy| policy.cluster = ClusterFacts::of(None, Some(ca)))
        .expose(&secure.gateway);
    let client = secure.connect(None);
    let (status, _send, _recv) = client.send(request("secret"), false);
    assert_eq!(status, 200, "the connection has authenticated");
    let last = client.runtime.block_on(async {
        let mut waiting = Vec::new();
        for number in 0..6 {
            let mut requests = client.requests.clone().ready().await.unwrap();
            let request = request(&format!("made-up-{number}")).body(()).unwrap();
            waiting.push(requests.send_request(request, true).unwrap().0);
        }
        let last = waiting.pop().unwrap();
        tokio::time::timeout(PATIENCE, last).await.unwrap().unwrap()
    });
    assert_eq!(last.status().as_u16(), status_of_row(Refusal::MaxReviewsWaiting));
    assert_counted(&secure.gateway, Refusal::MaxReviewsWaiting);
}

fn max_unauthenticated() {
    let secure = Secure::start("secret,a\n", |config| config.max_unauthenticated = 1);
    let mut oldest = raw_client(&secure);
    oldest.send(&frames::opening(&[])).unwrap();
    oldest.send(&frames::connect(1, AUTHORITY, None)).unwrap();
    while oldest.receive().unwrap().expect("a response comes").kind != kind::HEADERS {}
    let next = secure.connect(None);
    assert_eq!(next.connect(AUTHORITY).0, status_of_row(Refusal::Unauthenticated));
    assert_dismissed(oldest, Refusal::MaxUnauthenticated);
    assert_counted(&secure.gateway, Refusal::MaxUnauthenticated);
}

fn flood() {
    let secure = Secure::start("secret,a\n", |_| {});
    let mut client = raw_client(&secure);
    client.send(&frames::opening(&[])).unwrap();
    client.send(&frames::settings(&[]).repeat(64)).unwrap();
    assert_dismissed(client, Refusal::Flood);
    assert_counted(&secure.gateway, Refusal::Flood);
    cancelled_in_masses();
}

fn cancelled_in_masses() {
    const MAX: u32 = 2;
    let (listener, _waiting) = silent_endpoint();
    let tunnel = Settings { max_streams: MAX, ..both().tunnel };
    let gateway = start(Config { tunnel, ..both() });
    expose(&gateway, &[listener.local_addr().unwrap()]);
    let client = Client::plaintext(&gateway);
    let connecting = || gateway.shared().route_store.clusters()[0].snapshot().connecting;
    let is_refused = async || {
        let mut requests = client.requests.clone().ready().await.unwrap();
        let request = request("unused").body(()).unwrap();
        let (mut answer, mut send) = requests.send_request(request, false).unwrap();
        // It waits for the endpoint, or is refused.
        while connecting() == 0 {
            tokio::select! {
                biased;
                answer = &mut answer => return answer.unwrap().status() == status_of_row(Refusal::Flood),
                () = tokio::task::yield_now() => {}
            }
        }
        send.send_reset(h2::Reason::CANCEL);
        while connecting() > 0 {
            tokio::task::yield_now().await;
        }
        false
    };
    // A machine that stands still for a second begins anew.
    eventually("a request is refused", || client.runtime.block_on(is_refused()));
    assert_counted(&gateway, Refusal::Flood);
}

#[test]
fn a_client_that_leaves_before_its_first_request_has_left_early_whatever_it_began() {
    let secure = Secure::start("secret,a\n", |_| {});
    let mut hello = connect(tunnel_address(&secure.gateway));
    hello.write_all(&[22, 3, 1]).unwrap();
    drop(hello);
    drop(raw_client(&secure));
    let mut opened = raw_client(&secure);
    opened.send(&frames::opening(&[])).unwrap();
    opened.receive().unwrap().expect("SETTINGS come");
    drop(opened);
    eventually("three have left", || count(&secure.gateway, Refusal::ClosedEarly) == 3);
    assert_eq!(count(&secure.gateway, Refusal::Malformed), 0);
}

#[test]
fn a_client_that_breaks_the_protocol_before_its_first_request_is_counted_once() {
    for (frames, refusal) in [
        // DATA on a stream that was never opened.
        (frames::frame(kind::DATA, 0, 1, b"x"), Refusal::Malformed),
        (
            [
                frames::frame(kind::HEADERS, 0, 1, &[]),
                frames::frame(kind::CONTINUATION, 0, 1, &[]).repeat(200),
            ]
            .concat(),
            Refusal::Flood,
        ),
    ] {
        let secure = Secure::start("secret,a\n", |_| {});
        let mut client = raw_client(&secure);
        client.send(&[frames::opening(&[]), frames].concat()).unwrap();
        assert_counted(&secure.gateway, refusal);
        let all: u64 = Refusal::ALL.iter().map(|&refusal| count(&secure.gateway, refusal)).sum();
        assert_eq!(all, 1, "{refusal:?}");
    }
}

// === Ends ===

fn closed_by_the_client() {
    let (gateway, client, server) = passed_through(config());
    drop(client);
    drop(server);
    assert_ended(&gateway, End::Closed(Side::Downstream));
}

fn closed_by_the_endpoint() {
    let (gateway, mut client, server) = passed_through(config());
    drop(server);
    assert_eq!(read_to_end(&mut client), b"");
    drop(client);
    assert_ended(&gateway, End::Closed(Side::Upstream));
}

fn reset_by_the_client() {
    let (gateway, client, mut server) = passed_through(config());
    reset(client);
    assert_reset(&mut server);
    assert_ended(&gateway, End::Reset(Side::Downstream));
}

fn reset_by_the_endpoint() {
    let tunnel = Tunnel::open(|_| {});
    reset(tunnel.server);
    assert_eq!(code_of(tunnel.client.runtime, tunnel.recv), End::Reset(Side::Upstream).h2_code());
    assert_ended(&tunnel.secure.gateway, End::Reset(Side::Upstream));
}

fn idle() {
    let tunnel = Tunnel::open(|config| config.idle.tunnel_stream = Some(SHORT));
    tunnel.assert_cut(End::Idle);
}

fn endpoint_removed() {
    let tunnel = Tunnel::open(|config| config.removed_endpoint_timeout = Some(SHORT));
    expose(&tunnel.secure.gateway, &[dead_endpoint()]);
    tunnel.assert_cut(End::EndpointRemoved);
}

fn drained() {
    let tunnel = Tunnel::open(|_| {});
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    assert_eq!(runtime.block_on(tunnel.secure.gateway.drain(SHORT)), 1);
    tunnel.assert_cut(End::Drained);
}

fn cancelled() {
    let (gateway, _client, _server) = passed_through(config());
    let shared = Arc::clone(gateway.shared());
    drop(gateway);
    assert_eq!(ended(&shared, End::Cancelled), 1);
}

fn revoked() {
    let tunnel = Tunnel::open(|_| {});
    tunnel.secure.pki.write("tokens", "");
    eventually("a second look misses the token, too", || tunnel.secure.tokens.reload().unwrap());
    tunnel.secure.gateway.shared().identities.changed();
    tunnel.assert_cut(End::Revoked);
}

fn memory() {
    let mut tunnel = Tunnel::open(|config| {
        config.tunnel.memory = MemoryBudget::new(64 * 1024);
        config.tunnel.stream_window = 1 << 20;
    });
    // The endpoint does not read: once its socket is full, bytes wait in the gateway.
    let (mut send, runtime) = (tunnel.send.take().unwrap(), tunnel.client.runtime.clone());
    let filling = runtime.spawn(async move {
        loop {
            send.reserve_capacity(16 * 1024);
            match std::future::poll_fn(|cx| send.poll_capacity(cx)).await {
                Some(Ok(room)) if send.send_data(Bytes::from(vec![7; room]), false).is_ok() => {}
                _ => return,
            }
        }
    });
    tunnel.assert_cut(End::Memory);
    filling.abort();
}

// === What the provocations share ===

fn both() -> Config {
    let tunnel = Settings { plaintext: true, ..Settings::default() };
    Config { tunnel_listen: Some(LOOPBACK), tunnel, ..config() }
}

/// A CONNECT with this token.
fn request(token: &str) -> http::request::Builder {
    let uri = http::Uri::builder().authority(AUTHORITY).build().unwrap();
    let request = http::Request::builder().method("CONNECT").uri(uri);
    request.header("authorization", format!("Bearer {token}"))
}

fn expose(gateway: &Gateway, endpoints: &[SocketAddr]) {
    Service::new("a", endpoints).host(HOST).authority(AUTHORITY).expose(gateway);
}

/// An address that refuses.
fn dead_endpoint() -> SocketAddr {
    SocketAddr::new(LOOPBACK.ip(), free_port())
}

/// Exposes a Service, if it has `endpoints` at all, and asks for it by server name and by CONNECT: alert and
/// status are those of the row.
fn assert_answered(
    gateway: &Gateway,
    refusal: Refusal,
    change: impl Fn(Service) -> Service,
    endpoints: Option<&[SocketAddr]>,
) {
    if let Some(endpoints) = endpoints {
        change(Service::new("a", endpoints).host(HOST).authority(AUTHORITY)).expose(gateway);
    }
    assert_alert(connect(sni_address(gateway)), &hello(HOST), refusal);
    assert_eq!(status(gateway, AUTHORITY), status_of_row(refusal), "{refusal:?}");
    eventually("both are counted", || count(gateway, refusal) == 2);
}

fn assert_alert(mut client: TcpStream, hello: &[u8], refusal: Refusal) {
    client.write_all(hello).unwrap();
    assert_eq!(alert_of(&mut client), refusal.alert().map(|alert| alert as u8), "{refusal:?}");
}

fn raw_client(secure: &Secure) -> RawClient {
    let tls = Arc::new(secure.pki.client_config(None, &[b"h2"]));
    RawClient::connect(tunnel_address(&secure.gateway), &tls, Duration::from_secs(30)).unwrap()
}

/// The last frame is GOAWAY with the code of the row.
fn assert_dismissed(mut client: RawClient, refusal: Refusal) {
    let mut last = None;
    while let Some(frame) = client.receive().unwrap() {
        last = Some(frame);
    }
    let last = last.expect("a frame comes before the end");
    assert_eq!(last.kind, kind::GOAWAY);
    assert_eq!(Some(u32::from_be_bytes(last.payload[4..8].try_into().unwrap())), refusal.goaway());
}

/// The alert a client gets before it is closed.
fn alert_of(client: &mut TcpStream) -> Option<u8> {
    match read_to_end(client)[..] {
        [21, 3, _, 0, 2, 2, alert] => Some(alert),
        ref other => panic!("no alert: {other:?}"),
    }
}

fn status(gateway: &Gateway, authority: &str) -> u16 {
    let mut client = connect(tunnel_address(gateway));
    write!(client, "CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n").unwrap();
    status_of(&mut client)
}

fn status_of(client: &mut TcpStream) -> u16 {
    let head = read_exactly(client, "HTTP/1.1 000".len());
    std::str::from_utf8(&head).unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn status_of_row(refusal: Refusal) -> u16 {
    refusal.status().expect("the row has a status")
}

fn count(gateway: &Gateway, refusal: Refusal) -> u64 {
    gateway.shared().totals().refusals[refusal as usize]
}

fn assert_counted(gateway: &Gateway, refusal: Refusal) {
    eventually(refusal.reason(), || count(gateway, refusal) == 1);
}

fn assert_ended(gateway: &Gateway, end: End) {
    eventually(end.reason(), || ended(gateway.shared(), end) == 1);
}

/// A gateway, and a connection by server name with both its ends.
fn passed_through(config: Config) -> (Arc<Gateway>, TcpStream, TcpStream) {
    let gateway = start(config);
    let endpoint = Endpoint::new();
    expose(&gateway, &[endpoint.address]);
    let (client, server) = pair(&gateway, &endpoint, HOST);
    (gateway, client, server)
}

/// A gateway whose tunnel is under TLS and asks for a token.
struct Secure {
    pki: Pki,
    tokens: Arc<StaticTokens>,
    gateway: Arc<Gateway>,
}

impl Secure {
    fn start(tokens: &str, change: impl FnOnce(&mut Config)) -> Self {
        let pki = Pki::new();
        let tunnel = secured(tls_files(&pki, &["gateway.test", "127.0.0.1"]));
        let tokens = Arc::new(StaticTokens::load(pki.write("tokens", tokens)).unwrap());
        let settings = TokenSettings { file: Some(Arc::clone(&tokens)), review: None };
        let mut config =
            Config { tunnel_listen: Some(LOOPBACK), tunnel, tokens: settings, ..Config::default() };
        change(&mut config);
        Self { pki, tokens, gateway: start(config) }
    }

    /// Connects over TLS and HTTP/2.
    fn connect(&self, token: Option<&str>) -> Client {
        let client = Client::new(&self.gateway, Arc::new(self.pki.client_config(None, &[b"h2"])));
        token.into_iter().fold(client, |client, token| client.with_token(token))
    }
}

/// An open stream with both its ends.
struct Tunnel {
    secure: Secure,
    client: Client,
    send: Option<SendStream<Bytes>>,
    recv: RecvStream,
    server: TcpStream,
    _endpoint: Endpoint,
}

impl Tunnel {
    fn open(change: impl FnOnce(&mut Config)) -> Self {
        let secure = Secure::start("secret,a\n", change);
        let endpoint = Endpoint::new();
        expose(&secure.gateway, &[endpoint.address]);
        let client = secure.connect(Some("secret"));
        let (status, send, recv) = client.connect(AUTHORITY);
        assert_eq!(status, 200);
        let server = endpoint.accept();
        Self { secure, client, send: Some(send), recv, server, _endpoint: endpoint }
    }

    /// The gateway resets both sides: the stream with the code of the row.
    fn assert_cut(self, end: End) {
        assert_eq!(code_of(self.client.runtime, self.recv), end.h2_code(), "{end:?}");
        eventually("the endpoint is reset", || (&self.server).read(&mut [0; 65536]).is_err());
        assert_ended(&self.secure.gateway, end);
    }
}

/// The code of the RST_STREAM that ends a stream.
fn code_of(runtime: tokio::runtime::Handle, mut recv: RecvStream) -> Option<u32> {
    let end = runtime.block_on(async { tokio::time::timeout(PATIENCE, recv.data()).await.unwrap() });
    end.expect("it does not end in order").err()?.reason().map(u32::from)
}
