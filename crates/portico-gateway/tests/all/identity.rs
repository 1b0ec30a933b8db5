//! Authentication of tunnel clients: certificates, tokens, reviews by an API server, and what a revocation
//! does to tunnels that are open.
//!
//! All over real sockets. The API server here is a script that answers what the test wants; a real one is
//! asked in `portico-lab`.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::*;
use bytes::Bytes;
use h2::{RecvStream, SendStream};
use portico_api::api_server_ca::ApiServerCa;
use portico_api::policy::ClusterFacts;
use portico_gateway::{Config, End, Gateway, Method, Refusal, StaticTokens, TokenSettings};
use portico_lab::pki::{Authority, Certificate, Pki};
use portico_tunnel::TlsFiles;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

/// The authority of cluster `name`.
fn authority(name: &str) -> String {
    format!("apiserver-external.cluster-{name}.svc.cluster.local:443")
}

/// One CA for all sides, certificates of clusters a and b, and a list without revocations.
fn pki() -> Pki {
    let pki = Pki::new();
    pki.issue("a", Certificate::cluster("a"));
    pki.issue("b", Certificate::cluster("b"));
    pki.revoke(&[]);
    pki
}

/// A gateway that asks for certificates of this CA, or for none, and for tokens.
fn tunnel_config(pki: &Pki, with_ca: bool, tokens: TokenSettings) -> Config {
    let files = TlsFiles {
        client_ca: with_ca.then(|| pki.file("ca.crt").into()).into_iter().collect(),
        client_crl: with_ca.then(|| pki.file("crl.pem")),
        ..tls_files(pki, &["gateway.test"])
    };
    Config { tunnel_listen: Some(LOOPBACK), tunnel: secured(files), tokens, ..Config::default() }
}

fn tokens(pki: &Pki, text: &str) -> TokenSettings {
    let file = pki.write("tokens", text);
    TokenSettings { file: Some(Arc::new(StaticTokens::load(file).unwrap())), review: None }
}

/// TLS of a client with the certificate of this name.
fn client_tls(pki: &Pki, certificate: Option<&str>, alpn: &[u8]) -> Arc<ClientConfig> {
    Arc::new(pki.client_config(certificate, &[alpn]))
}

impl Client {
    /// Waits until the gateway closes the connection; returns the error with which it did.
    fn closed(&self) -> h2::Error {
        self.runtime.block_on(async {
            let closed = async {
                loop {
                    match self.requests.clone().ready().await {
                        Ok(_) => tokio::task::yield_now().await,
                        Err(error) => return error,
                    }
                }
            };
            tokio::time::timeout(PATIENCE, closed).await.unwrap()
        })
    }

    /// Opens a tunnel, which must work, to an endpoint that accepts it.
    fn tunnel(&self, authority: &str, endpoint: &Endpoint) -> Open {
        let (status, send, recv) = self.connect(authority);
        assert_eq!(status, 200, "{authority}");
        let mut open = Open { send, recv, server: endpoint.accept(), runtime: self.runtime.clone() };
        open.assert_alive();
        open
    }

    /// Status and sentence of a request that is refused.
    fn refused(&self, authority: &str) -> (u16, String) {
        let (status, ..) = self.connect(authority);
        (status, self.reason())
    }

    /// `OPTIONS *`.
    fn refresh(&self, authority: &str) -> (u16, String) {
        let uri =
            http::Uri::builder().scheme("https").authority(authority).path_and_query("*").build().unwrap();
        let (status, ..) = self.send(http::Request::builder().method("OPTIONS").uri(uri), true);
        (status, self.reason())
    }
}

/// A tunnel, with both ends in hand.
struct Open {
    send: SendStream<Bytes>,
    recv: RecvStream,
    server: TcpStream,
    runtime: tokio::runtime::Handle,
}

impl Open {
    fn assert_alive(&mut self) {
        self.send.send_data(Bytes::from_static(b"ping"), false).unwrap();
        assert_eq!(read_exactly(&mut self.server, 4), b"ping");
        self.server.write_all(b"pong").unwrap();
        let recv = &mut self.recv;
        let answer =
            self.runtime.block_on(async { tokio::time::timeout(PATIENCE, recv.data()).await.unwrap() });
        assert_eq!(answer.unwrap().unwrap(), "pong");
        let _ = self.recv.flow_control().release_capacity(4);
    }

    /// It was reset, towards both sides.
    fn assert_cut(mut self) {
        assert_reset(&mut self.server);
        let recv = &mut self.recv;
        let end = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, recv.data()).await.unwrap() });
        assert!(end.unwrap().is_err(), "a tunnel that is cut does not end in order");
    }
}

/// Exposes each of these clusters by its authority, at this endpoint.
fn expose(gateway: &Gateway, clusters: &[&str], endpoint: &Endpoint) {
    for cluster in clusters {
        Service::new(cluster, &[endpoint.address]).authority(&authority(cluster)).expose(gateway);
    }
}

fn revoked(gateway: &Gateway) -> u64 {
    let words = (End::Revoked.reason(), End::Revoked.side());
    assert_eq!(words, ("revoked", portico_gateway::Side::Gateway));
    ended(gateway.shared(), End::Revoked)
}

fn accepted(gateway: &Gateway, method: Method) -> u64 {
    gateway.shared().identities.outcomes()[method as usize][0]
}

/// Status line and body of an HTTP/1.1 CONNECT under TLS.
fn http1(gateway: &Gateway, tls: Arc<ClientConfig>, header: &str) -> String {
    let mut stream = http1_stream(gateway, tls, header);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn http1_stream(
    gateway: &Gateway,
    tls: Arc<ClientConfig>,
    header: &str,
) -> StreamOwned<ClientConnection, TcpStream> {
    let connection = ClientConnection::new(tls, gateway_name()).unwrap();
    let mut stream = StreamOwned::new(connection, connect(tunnel_address(gateway)));
    write!(stream, "CONNECT {} HTTP/1.1\r\n{header}\r\n", authority("a")).unwrap();
    stream
}

#[test]
fn a_missing_or_wrong_identity_is_401_or_403_with_the_reason() {
    let pki = pki();
    pki.issue("old", Certificate::cluster("a").not_after(2001, 2, 3));
    pki.issue("nobody", Certificate::client("nobody").organisation("system:nodes"));
    pki.issue("gone", Certificate::cluster("a"));
    pki.revoke(&["gone"]);
    let gateway = start(tunnel_config(&pki, true, tokens(&pki, "secret-of-a,a\nsecret-of-b,b\n")));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a", "b"], &endpoint);
    let nobody = "the client certificate names no cluster; it needs organisation portico:cluster:NAME or URI \
                  spiffe://DOMAIN/cluster/NAME";
    let other = "the client's identity opens nothing under this name";
    for (certificate, token, status, reason) in [
        (None, None, 401, "neither a client certificate nor a bearer token was shown"),
        (Some("old"), None, 401, "the client certificate expired on 2001-02-03T00:00:00Z"),
        (Some("gone"), None, 401, "the client certificate with serial 67:6f:6e:65 of CN=test CA was revoked"),
        (Some("nobody"), None, 401, nobody),
        (None, Some("wrong"), 401, "the token is not known to this gateway"),
        (Some("b"), None, 403, other),
        (None, Some("secret-of-b"), 403, other),
        (Some("b"), Some("wrong"), 403, other),
    ] {
        let client = Client::new(&gateway, client_tls(&pki, certificate, b"h2"));
        let client = token.into_iter().fold(client, |client, token| client.with_token(token));
        let expected = (status, reason.to_owned());
        assert_eq!(client.refused(&authority("a")), expected);
        assert_eq!(client.refresh(&authority("a")), expected, "a refresh is told the same");
        let header =
            token.map(|token| format!("Proxy-Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let answer = http1(&gateway, client_tls(&pki, certificate, b"http/1.1"), &header);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{reason}\n")), "{answer}");
        assert_eq!(answer.contains("WWW-Authenticate: Bearer\r\n"), status == 401, "{answer}");
    }
    let totals = gateway.shared().totals();
    assert_eq!(totals.refusals[Refusal::Unauthenticated as usize], 15);
    assert_eq!(totals.refusals[Refusal::NotAuthorized as usize], 9);
    let outcomes = gateway.shared().identities.outcomes();
    assert_eq!(outcomes[Method::None as usize], [0, 3, 0, 0]);
    assert_eq!(outcomes[Method::Certificate as usize], [0, 9, 3, 0]);
    assert_eq!(outcomes[Method::StaticToken as usize], [0, 3, 6, 0]);
}

#[test]
fn a_name_nobody_exposes_looks_like_a_name_of_others() {
    let pki = pki();
    let gateway = start(tunnel_config(&pki, true, TokenSettings::default()));
    expose(&gateway, &["a"], &Endpoint::new());
    let (known, unknown) = (authority("a"), "unknown.test:443");
    let stranger = Client::new(&gateway, client_tls(&pki, None, b"h2"));
    assert_eq!(stranger.refused(unknown), stranger.refused(&known));
    let other = Client::new(&gateway, client_tls(&pki, Some("b"), b"h2"));
    assert_eq!(other.refused(unknown), other.refused(&known));
    let open = start(tunnel_config(&pki, false, TokenSettings::default()));
    let anybody = Client::new(&open, client_tls(&pki, None, b"h2"));
    assert_eq!(anybody.refresh(unknown).0, 404, "where nobody is asked, there is nothing to hide");
}

#[test]
fn a_certificate_or_a_token_opens_its_cluster_and_a_refresh_says_so() {
    let pki = pki();
    let gateway = start(tunnel_config(&pki, true, tokens(&pki, "secret-of-a,a\n")));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a"], &endpoint);
    for client in [
        Client::new(&gateway, client_tls(&pki, Some("a"), portico_tunnel::ALPN)),
        Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("secret-of-a"),
        Client::new(&gateway, client_tls(&pki, Some("b"), b"h2")).with_token("secret-of-a"),
    ] {
        assert_eq!(client.refresh(&authority("a")), (204, String::new()));
        assert_eq!(gateway.connections().len(), 0, "a refresh opens nothing");
        client.tunnel(&authority("a"), &endpoint);
        wait_until_empty(&gateway);
    }
    assert_eq!(accepted(&gateway, Method::Certificate), 2);
    assert_eq!(accepted(&gateway, Method::StaticToken), 4);
}

#[test]
fn a_revoked_certificate_cuts_its_tunnels_at_once_and_no_other() {
    let pki = pki();
    let gateway = start(tunnel_config(&pki, true, TokenSettings::default()));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a", "b"], &endpoint);
    let tls = gateway.shared().config.tunnel.tls.clone().unwrap();
    let (a, b) = (
        Client::new(&gateway, client_tls(&pki, Some("a"), b"h2")),
        Client::new(&gateway, client_tls(&pki, Some("b"), b"h2")),
    );
    let first = a.tunnel(&authority("a"), &endpoint);
    let second = a.tunnel(&authority("a"), &endpoint);
    let mut http1 = http1_stream(&gateway, client_tls(&pki, Some("a"), b"http/1.1"), "");
    let mut http1_server = endpoint.accept();
    let mut other = b.tunnel(&authority("b"), &endpoint);

    pki.revoke(&["a"]);
    assert!(tls.reload_trust().unwrap());
    gateway.shared().identities.changed();
    first.assert_cut();
    second.assert_cut();
    assert_reset(&mut http1_server);
    let cut = http1.read_to_end(&mut Vec::new()).expect_err("what is cut does not end in order");
    assert_eq!(cut.kind(), ErrorKind::ConnectionReset);
    eventually("the ends are counted", || revoked(&gateway) == 3);
    other.assert_alive();
    let reason = "the client certificate with serial 61 of CN=test CA was revoked".to_owned();
    assert_eq!(
        a.refused(&authority("a")),
        (401, reason),
        "the connection is still there, and its next request is refused"
    );

    pki.revoke(&[]);
    assert!(tls.reload_trust().unwrap());
    gateway.shared().identities.changed();
    a.tunnel(&authority("a"), &endpoint);
    other.assert_alive();
}

#[test]
fn a_ca_that_is_gone_from_the_file_cuts_what_it_signed() {
    let pki = pki();
    let gateway = start(tunnel_config(&pki, true, TokenSettings::default()));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a"], &endpoint);
    let tls = gateway.shared().config.tunnel.tls.clone().unwrap();
    let client = Client::new(&gateway, client_tls(&pki, Some("a"), b"h2"));
    let mut open = client.tunnel(&authority("a"), &endpoint);
    let next = Authority::new("test CA").unwrap().cert();
    pki.write("ca.crt", &(pki.authority().cert() + &next));
    assert!(tls.reload_trust().unwrap());
    gateway.shared().identities.changed();
    open.assert_alive();
    pki.write("ca.crt", &next);
    assert!(tls.reload_trust().unwrap());
    gateway.shared().identities.changed();
    open.assert_cut();
    assert_eq!(client.refused(&authority("a")).0, 401);
}

#[test]
fn a_token_that_is_gone_from_the_file_cuts_its_tunnels_and_the_latest_one_counts() {
    let pki = pki();
    let settings = tokens(&pki, "first,a\nother,a\nof-b,b\n");
    let file = settings.file.clone().unwrap();
    let gateway = start(tunnel_config(&pki, false, settings));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a", "b"], &endpoint);
    let client = |token| Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token(token);
    let renewed = client("first");
    let mut survives = renewed.tunnel(&authority("a"), &endpoint);
    let left_behind = client("first");
    let cut = left_behind.tunnel(&authority("a"), &endpoint);
    let of_b = client("of-b");
    let mut untouched = of_b.tunnel(&authority("b"), &endpoint);

    let renewed = renewed.with_token("other");
    assert_eq!(renewed.refresh(&authority("a")).0, 204);
    pki.write("tokens", "other,a\nof-b,b\n");
    eventually("a second look misses the token, too", || file.reload().unwrap());
    gateway.shared().identities.changed();
    cut.assert_cut();
    assert_eq!(
        left_behind.refused(&authority("a")),
        (401, "the token is not known to this gateway".to_owned())
    );
    survives.assert_alive();
    untouched.assert_alive();

    pki.write("tokens", "other,b\nof-b,b\n");
    assert!(file.reload().unwrap());
    gateway.shared().identities.changed();
    survives.assert_cut();
    assert_eq!(renewed.refused(&authority("a")).0, 403, "it is a token of another cluster now");
    untouched.assert_alive();
    assert_eq!(revoked(&gateway), 2);
}

#[test]
fn a_certificate_that_expires_opens_nothing_new_and_cuts_nothing() {
    let pki = pki();
    // The first moment of a certificate's last second, and then a little more than that second.
    let end = std::time::SystemTime::now() + Duration::from_secs(3);
    let seconds = end.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let epoch = Certificate::cluster("a").not_after(1970, 1, 1);
    pki.issue("short", epoch.with(|params| params.not_after += Duration::from_secs(seconds)));
    let gateway = start(tunnel_config(&pki, true, TokenSettings::default()));
    let endpoint = Endpoint::new();
    expose(&gateway, &["a"], &endpoint);
    let client = Client::new(&gateway, client_tls(&pki, Some("short"), b"h2"));
    let mut open = client.tunnel(&authority("a"), &endpoint);
    eventually("the certificate expires", || client.refresh(&authority("a")).0 == 401);
    let (status, reason) = client.refused(&authority("a"));
    assert_eq!(status, 401);
    assert!(reason.starts_with("the client certificate expired on 2"), "{reason}");
    gateway.shared().identities.changed();
    open.assert_alive();
    assert_eq!(revoked(&gateway), 0);
}

/// An API server that answers TokenReviews as the test wants, and counts them.
#[derive(Clone)]
struct ApiServer {
    address: SocketAddr,
    asked: Arc<AtomicU32>,
    /// Status and body; with status 0 it takes the request and says nothing.
    says: Arc<Mutex<(u16, String)>>,
    /// Requests that it lets hang, now and at most: any of a token that begins with [`HANGS`].
    hanging: Arc<AtomicU32>,
    most_hanging: Arc<AtomicU32>,
}

const HANGS: &str = "hangs-";

/// The response to a token that no API server has accepted.
const NOT_ACCEPTED: &str = "the token proves nothing here; the log of the gateway says why";

const YES: &str = r#"{"kind":"TokenReview","status":{"authenticated":true}}"#;

impl ApiServer {
    fn new(pki: &Pki) -> Self {
        let names = ["a", "b"].map(|name| authority(name).trim_end_matches(":443").to_owned());
        let identity = pki.issue("api", Certificate::server(&names));
        let config = Arc::new(identity.server_config(&[]).unwrap());
        let listener = TcpListener::bind(LOOPBACK).unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(AtomicU32::default());
        let says = Arc::new(Mutex::new((201, YES.to_owned())));
        let server = Self { address, asked, says, hanging: Arc::default(), most_hanging: Arc::default() };
        let own = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, config, api) = (stream.unwrap(), Arc::clone(&config), own.clone());
                std::thread::spawn(move || serve(stream, config, &api));
            }
        });
        server
    }

    fn says(&self, status: u16, body: &str) {
        *self.says.lock().unwrap() = (status, body.to_owned());
    }

    fn asked(&self) -> u32 {
        self.asked.load(SeqCst)
    }

    /// Exposes it as the API server of `cluster`, known by the CA of `pki`.
    fn expose(&self, gateway: &Gateway, cluster: &str, pki: &Pki) {
        let ca = ApiServerCa::parse(&pki.authority().cert()).unwrap();
        Service::new(cluster, &[self.address])
            .authority(&authority(cluster))
            .policy(|policy| policy.cluster = ClusterFacts::of(None, Some(ca)))
            .expose(gateway);
    }
}

/// Answers a TokenReview; anything that is no TLS is a tunnel, and is echoed.
fn serve(stream: TcpStream, config: Arc<ServerConfig>, api: &ApiServer) {
    let mut first = [0];
    if stream.peek(&mut first).unwrap_or(0) == 0 || first[0] != 22 {
        let mut stream = stream;
        let mut writer = stream.try_clone().unwrap();
        let _ = std::io::copy(&mut stream, &mut writer);
        return;
    }
    let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    let mut request = Vec::new();
    let mut bytes = [0; 4096];
    while !request.ends_with(b"\"}}") && !request.ends_with(b"}") {
        match stream.read(&mut bytes) {
            Ok(read) if read > 0 => request.extend_from_slice(&bytes[..read]),
            _ => return,
        }
    }
    api.asked.fetch_add(1, SeqCst);
    let request = String::from_utf8(request).unwrap();
    assert!(
        request.starts_with("POST /apis/authentication.k8s.io/v1/tokenreviews HTTP/1.1\r\n"),
        "{request}"
    );
    let token = request.split("authorization: Bearer ").nth(1).unwrap().split("\r\n").next().unwrap();
    assert!(request.contains(&format!("\"token\":\"{token}\"")), "it is reviewed by itself: {request}");
    let (status, body) = api.says.lock().unwrap().clone();
    if status == 0 || token.starts_with(HANGS) {
        let now = api.hanging.fetch_add(1, SeqCst) + 1;
        api.most_hanging.fetch_max(now, SeqCst);
        let _ = stream.read(&mut bytes);
        api.hanging.fetch_sub(1, SeqCst);
        return;
    }
    let length = body.len();
    let _ = write!(stream, "HTTP/1.1 {status} As-Told\r\nContent-Length: {length}\r\n\r\n{body}");
}

fn reviewing(pki: &Pki, every: Duration) -> Arc<Gateway> {
    start(tunnel_config(pki, false, TokenSettings { file: None, review: Some(every) }))
}

/// A tunnel to the scripted API server, which echoes.
fn echo(client: &Client, authority: &str) -> (SendStream<Bytes>, RecvStream) {
    let (status, mut send, mut recv) = client.connect(authority);
    assert_eq!(status, 200);
    assert_echoes(client, &mut send, &mut recv);
    (send, recv)
}

fn assert_echoes(client: &Client, send: &mut SendStream<Bytes>, recv: &mut RecvStream) {
    send.send_data(Bytes::from_static(b"ping"), false).unwrap();
    let answer = client.read(recv);
    assert_eq!(answer.unwrap().unwrap(), "ping");
    let _ = recv.flow_control().release_capacity(4);
}

#[test]
fn a_token_is_reviewed_by_the_api_server_of_its_cluster_once_for_many_streams() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_secs(60));
    api.expose(&gateway, "a", &pki);
    let clients: Vec<_> =
        (0..4).map(|_| Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good")).collect();
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| drop((0..5).map(|_| echo(client, &authority("a"))).collect::<Vec<_>>()));
        }
    });
    assert_eq!(api.asked(), 1, "requests that come meanwhile wait for the answer");
    assert_eq!(accepted(&gateway, Method::TokenReview), 20);
    let totals = gateway.shared().identities.reviews().unwrap();
    assert_eq!((totals.yes, totals.no, totals.failed, totals.remembered), (1, 0, 0, 1));
    assert_eq!(clients[0].refresh("unknown.test:443"), (401, NOT_ACCEPTED.to_owned()));
}

#[test]
fn an_api_server_decides_and_a_client_without_a_credential_is_not_told_why() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_secs(60));
    api.expose(&gateway, "a", &pki);
    let client = Client::new(&gateway, client_tls(&pki, None, b"h2"));
    let mut number = 0;
    let mut ask = |status, body: &str| {
        api.says(status, body);
        number += 1;
        let token = format!("token-{number}");
        Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token(&token).refresh(&authority("a"))
    };
    let not_accepted = (401, NOT_ACCEPTED.to_owned());
    assert_eq!(ask(401, ""), not_accepted);
    assert_eq!(ask(201, r#"{"status":{"authenticated":false}}"#), not_accepted);
    assert_eq!(ask(403, ""), not_accepted);
    assert_eq!(ask(500, ""), not_accepted);
    let long = format!("{{\"status\":{{\"authenticated\":true,\"error\":\"{}\"}}}}", "x".repeat(70_000));
    assert_eq!(ask(201, &long), not_accepted, "an answer without end is not read to its end");
    assert_eq!(ask(201, YES).0, 204);
    assert_eq!(client.refresh(&authority("a")), (401, "no bearer token was shown".to_owned()));
    let before = api.asked();
    let flood = client.with_token(&"x".repeat(9 * 1024));
    assert_eq!(flood.refresh(&authority("a")), (401, "the token is longer than 8 KiB".to_owned()));
    assert_eq!(api.asked(), before);
}

#[test]
fn a_client_without_a_credential_cannot_find_out_whether_a_cluster_exists() {
    let pki = pki();
    let (api, away) = (ApiServer::new(&pki), Endpoint::new().address);
    let tokens = TokenSettings { review: Some(Duration::from_secs(60)), ..tokens(&pki, "secret-of-z,z\n") };
    let gateway = start(tunnel_config(&pki, true, tokens));
    api.says(401, "");
    api.expose(&gateway, "refuses", &pki);
    let ca = ApiServerCa::parse(&pki.authority().cert()).unwrap();
    let trusted = |name: &str| {
        Service::new(name, &[away])
            .authority(&authority(name))
            .policy(|policy| policy.cluster = ClusterFacts::of(None, Some(ca.clone())))
    };
    trusted("away").expose(&gateway);
    Service::new("untrusted", &[away]).authority(&authority("untrusted")).expose(&gateway);
    let elsewhere = portico_api::policy::AllowList::nobody();
    trusted("elsewhere").policy(|policy| policy.allow = elsewhere).expose(&gateway);
    let clients = [
        (Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("junk"), 401),
        // A client with another credential learns no more than that.
        (Client::new(&gateway, client_tls(&pki, Some("b"), b"h2")).with_token("junk"), 403),
        (Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("secret-of-z"), 403),
    ];
    for (client, status) in clients {
        let nobody = client.refused(&authority("nobody"));
        assert_eq!(nobody.0, status);
        for name in ["refuses", "away", "untrusted", "elsewhere"] {
            assert_eq!(client.refused(&authority(name)), nobody, "{name}");
            assert_eq!(client.refresh(&authority(name)), nobody, "{name}");
        }
    }
}

#[test]
fn a_token_is_not_shown_to_an_api_server_of_another_ca() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_secs(60));
    api.expose(&gateway, "a", &Pki::new());
    let client = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    assert_eq!(client.refresh(&authority("a")), (401, NOT_ACCEPTED.to_owned()));
    assert_eq!(gateway.shared().identities.reviews().unwrap().failed, 1);
    assert_eq!(api.asked(), 0, "the token is not shown to strangers");
    Service::new("b", &[api.address]).authority(&authority("b")).expose(&gateway);
    assert_eq!(client.refresh(&authority("b")), (401, NOT_ACCEPTED.to_owned()), "nobody says whom to trust");
    assert_eq!(gateway.shared().identities.reviews().unwrap().failed, 1);
}

#[test]
fn a_service_beside_the_api_server_is_opened_by_a_review_of_the_api_server() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_secs(60));
    api.expose(&gateway, "a", &pki);
    let endpoint = Endpoint::new();
    let beside = "openvpn-server.cluster-a.svc.cluster.local:1194";
    let ca = ApiServerCa::parse(&pki.authority().cert()).unwrap();
    let mut service = Service::new("a", &[endpoint.address])
        .authority(beside)
        .policy(|policy| policy.cluster = ClusterFacts::of(None, Some(ca)));
    let id = Arc::make_mut(&mut service.backend.id);
    id.service = portico_api::meta::ObjectKey::new("cluster-a", "openvpn-server");
    service.expose(&gateway);
    let client = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    client.tunnel(beside, &endpoint);
    assert_eq!(api.asked(), 1);
}

#[test]
fn a_token_in_use_is_reviewed_again_and_a_no_cuts_its_tunnels() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_millis(200));
    api.expose(&gateway, "a", &pki);
    let client = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    let (mut send, mut recv) = echo(&client, &authority("a"));
    eventually("it is asked about again", || api.asked() >= 3);
    assert_echoes(&client, &mut send, &mut recv);

    // One no may be an API server that has just started.
    let before = gateway.shared().identities.reviews().unwrap();
    api.says(401, "");
    eventually("it says no once", || gateway.shared().identities.reviews().unwrap().no > before.no);
    api.says(201, YES);
    assert_echoes(&client, &mut send, &mut recv);
    let before = gateway.shared().identities.reviews().unwrap();
    eventually("it says yes again", || gateway.shared().identities.reviews().unwrap().yes > before.yes + 1);
    assert_echoes(&client, &mut send, &mut recv);

    api.says(401, "");
    let end = client.read(&mut recv);
    assert!(end.unwrap().is_err());
    assert_eq!(revoked(&gateway), 1);
    assert_eq!(client.refused(&authority("a")).0, 401);
}

#[test]
fn an_api_server_that_is_away_cuts_nothing_and_accepts_no_new_token() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_millis(200));
    api.expose(&gateway, "a", &pki);
    let known = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    let (mut send, mut recv) = echo(&known, &authority("a"));
    api.says(503, "");
    let failed = || gateway.shared().identities.reviews().unwrap().failed;
    eventually("it is found to be away", || failed() >= 1);
    assert_echoes(&known, &mut send, &mut recv);
    assert_eq!(known.refresh(&authority("a")).0, 204, "a token that it accepted stays accepted");
    drop(echo(&known, &authority("a")));
    let new = || Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("new");
    assert_eq!(new().refresh(&authority("a")), (401, NOT_ACCEPTED.to_owned()));
    let totals = gateway.shared().totals();
    assert_eq!(totals.refusals[Refusal::ReviewFailed as usize], 1, "we know why");
    api.says(201, YES);
    eventually("it is asked when it is back", || new().refresh(&authority("a")).0 == 204);
    assert_echoes(&known, &mut send, &mut recv);
}

#[test]
fn an_api_server_that_hangs_delays_no_review_of_another_cluster() {
    let pki = pki();
    let (hangs, answers) = (ApiServer::new(&pki), ApiServer::new(&pki));
    let gateway = reviewing(&pki, Duration::from_millis(200));
    hangs.expose(&gateway, "a", &pki);
    answers.expose(&gateway, "b", &pki);
    let new = || Client::new(&gateway, client_tls(&pki, None, b"h2"));
    let many: Vec<_> = (0..80).map(|number| new().with_token(&format!("token-{number}"))).collect();
    let _open: Vec<_> = many.iter().map(|client| echo(client, &authority("a"))).collect();
    let other = new().with_token("good");
    let (_send, mut recv) = echo(&other, &authority("b"));
    hangs.says(0, "");
    let before = hangs.asked();
    eventually("reviews of the one that hangs are under way", || hangs.asked() > before);
    let failed = || gateway.shared().identities.reviews().unwrap().failed;
    let failed_before = failed();
    answers.says(401, "");
    let end = other.read(&mut recv);
    assert!(end.unwrap().is_err(), "the other's token is reviewed, twice, and its tunnel is cut");
    // Eighty that wait 3 s each, eight at a time, would have failed by the dozen before.
    assert!(failed() - failed_before <= 16, "it waited for {} failures", failed() - failed_before);
}

#[test]
fn a_flood_of_made_up_tokens_is_bounded_and_others_are_still_reviewed() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_secs(60));
    api.expose(&gateway, "a", &pki);
    // Each client makes no more requests than an agent may make before it has authenticated.
    let flood: Vec<_> = (0..4).map(|_| Client::new(&gateway, client_tls(&pki, None, b"h2"))).collect();
    let uri = http::Uri::builder().authority(authority("a")).build().unwrap();
    let junk = |number: u32| {
        let request = http::Request::builder().method("CONNECT").uri(uri.clone());
        let request = request.header("authorization", format!("Bearer {HANGS}{number}")).body(()).unwrap();
        let client = &flood[number as usize / 16];
        client.runtime.block_on(async {
            let mut requests = client.requests.clone().ready().await.unwrap();
            requests.send_request(request, false).unwrap()
        })
    };
    let answers: Vec<_> = (0..64).map(junk).collect();
    eventually("as many as may be are reviewed", || api.hanging.load(SeqCst) == 8);
    let honest = || Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    eventually("one of another connection is, too", || honest().refresh(&authority("a")).0 == 204);
    drop(answers);
    // Eight; and eight more while the script has not seen yet that the first were given up.
    assert!(
        api.most_hanging.load(SeqCst) <= 16,
        "an API server has eight reviews under way, whatever is shown"
    );
}

#[test]
fn a_service_that_is_made_anew_still_has_its_old_tunnels_reviewed() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let gateway = reviewing(&pki, Duration::from_millis(200));
    api.expose(&gateway, "a", &pki);
    let client = || Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    let (old, new) = (client(), client());
    let (_send, mut recv) = echo(&old, &authority("a"));
    Service::new("a", &[api.address]).authority(&authority("a")).withdraw(&gateway);
    api.expose(&gateway, "a", &pki);
    let _open = echo(&new, &authority("a"));
    api.says(401, "");
    let end = old.read(&mut recv);
    assert!(end.unwrap().is_err(), "its token is not accepted any more");
    eventually("that of the new one is cut, too", || revoked(&gateway) == 2);
}

fn gave_way(gateway: &Gateway) -> u64 {
    gateway.shared().totals().refusals[Refusal::MaxUnauthenticated as usize]
}

#[test]
fn the_oldest_unauthenticated_connection_gives_way_and_an_authenticated_one_stays() {
    let pki = pki();
    let gateway = start(Config {
        max_unauthenticated: 3,
        ..tunnel_config(&pki, true, tokens(&pki, "secret-of-b,b\n"))
    });
    let endpoint = Endpoint::new();
    expose(&gateway, &["a", "b"], &endpoint);
    let silent = || {
        let client = Client::new(&gateway, client_tls(&pki, None, b"h2"));
        // By its answer the connection has its slot.
        assert_eq!(client.refresh(&authority("a")).0, 401);
        client
    };
    let oldest = silent();
    let next = silent();
    let by_certificate = Client::new(&gateway, client_tls(&pki, Some("a"), b"h2"));
    let by_token = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("secret-of-b");
    let mut open =
        [by_certificate.tunnel(&authority("a"), &endpoint), by_token.tunnel(&authority("b"), &endpoint)];
    let third = silent();
    assert_eq!(next.refresh(&authority("a")).0, 401, "there is room for three");
    assert_eq!(gateway.shared().identities.unauthenticated(), 3);
    assert_eq!(gave_way(&gateway), 0);

    let flood: Vec<_> = (0..5).map(|_| silent()).collect();
    for gone in [&oldest, &next, &third, &flood[0], &flood[1]] {
        let error = gone.closed();
        assert_eq!(error.reason().map(u32::from), Refusal::MaxUnauthenticated.goaway(), "{error}");
    }
    for stays in &flood[2..] {
        assert_eq!(stays.refresh(&authority("a")).0, 401);
    }
    eventually("those that had to go are counted", || gave_way(&gateway) == 5);
    // A hundred honest ones at once, each of which may stay.
    let honest: Vec<_> = (0..100)
        .map(|number| {
            let (certificate, cluster) = if number % 2 == 0 { (Some("a"), "a") } else { (None, "b") };
            let client =
                Client::new(&gateway, client_tls(&pki, certificate, b"h2")).with_token("secret-of-b");
            assert_eq!(client.refresh(&authority(cluster)).0, 204);
            (client, cluster)
        })
        .collect();
    for (client, cluster) in &honest {
        assert_eq!(client.refresh(&authority(cluster)).0, 204);
    }
    open.iter_mut().for_each(Open::assert_alive);
}

#[test]
fn connections_of_one_certificate_leave_as_much_to_others_without_a_single_stream() {
    let pki = pki();
    let config = tunnel_config(&pki, true, TokenSettings::default());
    let gateway = start(Config { connection_descriptors: 8, ..config });
    let endpoint = Endpoint::new();
    expose(&gateway, &["a", "b"], &endpoint);
    let connect = |name| Client::new(&gateway, client_tls(&pki, Some(name), b"h2"));
    let taken = || gateway.shared().totals().connection_descriptors;
    let held: Vec<_> = (1..=4)
        .map(|count| {
            let client = connect("a");
            eventually("it is counted", || taken() == count);
            client
        })
        .collect();
    let error = connect("a").closed();
    assert_eq!(error.reason().map(u32::from), Refusal::FairShare.goaway(), "{error}");
    let refused = || gateway.shared().totals().refusals[Refusal::FairShare as usize];
    eventually("it is counted", || refused() == 1);
    let neighbour = connect("b").tunnel(&authority("b"), &endpoint);
    assert_eq!(taken(), 6, "a connection and its stream");
    drop((held, neighbour));
    eventually("all is given back", || taken() == 0);
}

#[test]
fn an_http1_request_that_waits_for_a_review_makes_room_for_the_next() {
    let pki = pki();
    let api = ApiServer::new(&pki);
    let tokens = TokenSettings { file: None, review: Some(Duration::from_secs(60)) };
    let gateway = start(Config { max_unauthenticated: 1, ..tunnel_config(&pki, false, tokens) });
    api.expose(&gateway, "a", &pki);
    let header = format!("Authorization: Bearer {HANGS}\r\n");
    let mut first = http1_stream(&gateway, client_tls(&pki, None, b"http/1.1"), &header);
    first.flush().unwrap();
    eventually("its token is asked about", || api.hanging.load(SeqCst) == 1);
    let next = Client::new(&gateway, client_tls(&pki, None, b"h2")).with_token("good");
    assert_eq!(next.refresh(&authority("a")).0, 204);
    let mut answer = String::new();
    first.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    eventually("it is counted", || gave_way(&gateway) == 1);
    let totals = gateway.shared().totals();
    assert_eq!(totals.refusals[Refusal::ClosedEarly as usize], 0, "once, and not as the client's doing");
}
