//! 443 and nothing else: clients by server name and tunnels on one port, distinguished by ALPN and name.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use crate::support::*;
use portico_gateway::{Config, Gateway, Listener, ProxyMode, ProxyProtocol, Refusal};
use portico_lab::pki::Pki;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";

/// A gateway with both on one port, and the CA of its tunnel.
struct Shared {
    pki: Pki,
    gateway: Arc<Gateway>,
}

impl Shared {
    fn start(change: impl FnOnce(&mut Config)) -> Self {
        let pki = Pki::new();
        let tunnel = secured(tls_files(&pki, &["gateway.test", "*.tunnel.test", "a.example.com"]));
        let mut config = Config { tunnel_listen: Some(LOOPBACK), tunnel, shared_port: true, ..config() };
        change(&mut config);
        Self { pki, gateway: start(config) }
    }

    fn connect(&self) -> TcpStream {
        connect(sni_address(&self.gateway))
    }

    /// A TLS handshake with the server behind `name`; `None` sends no name.
    fn tls(&self, name: Option<&str>, alpn: &[&[u8]]) -> Tunnelled {
        let mut config = self.pki.client_config(None, alpn);
        config.enable_sni = name.is_some();
        let name = ServerName::try_from(name.unwrap_or("gateway.test").to_owned()).unwrap();
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), self.connect())
    }

    fn count(&self, refusal: Refusal) -> u64 {
        self.gateway.shared().totals().refusals[refusal as usize]
    }
}

type Tunnelled = StreamOwned<ClientConnection, TcpStream>;

/// Opens a tunnel by HTTP/1.1, whose 200 says that it was the tunnel that answered.
fn open(stream: &mut (impl Read + Write), endpoint: &Endpoint) -> TcpStream {
    write!(stream, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").unwrap();
    let server = endpoint.accept();
    let mut answer = [0; 39];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer[..], b"HTTP/1.1 200 Connection established\r\n\r\n");
    server
}

#[test]
fn a_name_of_the_gateway_or_none_leads_to_the_tunnel_and_a_route_leads_through() {
    let shared = Shared::start(|_| ());
    let (through, tunnelled) = (Endpoint::new(), Endpoint::new());
    // The route has a name that the gateway's certificate has too: the route comes first.
    Service::new("b", &[through.address]).host("a.example.com").expose(&shared.gateway);
    Service::new("a", &[tunnelled.address]).authority(AUTHORITY).expose(&shared.gateway);
    for name in [Some("gateway.test"), Some("x.tunnel.test"), None] {
        let mut client = shared.tls(name, &[b"http/1.1"]);
        let _server = open(&mut client, &tunnelled);
        let records = shared.gateway.connections();
        assert_eq!(records[0].listener, Listener::Tunnel, "{name:?}");
        drop((client, _server));
        wait_until_empty(&shared.gateway);
    }
    let (_client, _server) = pair(&shared.gateway, &through, "a.example.com");
    assert_eq!(shared.gateway.connections()[0].listener, Listener::Sni);
}

#[test]
fn a_client_that_asks_for_a_tunnel_by_alpn_gets_one_whatever_the_name() {
    let shared = Shared::start(|_| ());
    let (through, tunnelled) = (Endpoint::new(), Endpoint::new());
    Service::new("b", &[through.address]).host("a.example.com").expose(&shared.gateway);
    Service::new("a", &[tunnelled.address]).authority(AUTHORITY).expose(&shared.gateway);
    let mut client = shared.tls(Some("a.example.com"), &[portico_tunnel::ALPN, b"h2"]);
    client.flush().unwrap();
    while client.conn.is_handshaking() {
        client.conn.complete_io(&mut client.sock).unwrap();
    }
    assert_eq!(client.conn.alpn_protocol(), Some(portico_tunnel::ALPN));
}

#[test]
fn an_unknown_name_is_refused_as_on_a_port_of_its_own() {
    let shared = Shared::start(|_| ());
    let mut client = shared.connect();
    client.write_all(&hello("nobody.example.com")).unwrap();
    let alert = read_to_end(&mut client);
    assert_eq!(alert[0], 21, "an alert");
    assert_eq!(alert[6], 112, "unrecognized_name");
    assert_eq!(shared.count(Refusal::Unknown), 1);
}

#[test]
fn bytes_that_are_no_tls_are_a_tunnel_where_plain_text_is_served() {
    let shared = Shared::start(|config| config.tunnel.plaintext = true);
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).authority(AUTHORITY).expose(&shared.gateway);
    let mut client = shared.connect();
    let mut server = open(&mut client, &endpoint);
    server.write_all(b"hello").unwrap();
    assert_eq!(read_exactly(&mut client, 5), b"hello");

    let closed = Shared::start(|_| ());
    let mut client = closed.connect();
    client.write_all(format!("CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
    assert_cut_off(client);
    assert_eq!(closed.count(Refusal::Malformed), 1);
}

#[test]
fn the_proxy_header_comes_before_either() {
    let shared = Shared::start(|config| {
        config.tunnel.plaintext = true;
        config.proxy_protocol = ProxyProtocol {
            sni: ProxyMode::Required,
            tunnel: ProxyMode::Required,
            trusted: vec!["127.0.0.0/8".parse().unwrap()],
            ..ProxyProtocol::default()
        };
    });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host("a.example.com").authority(AUTHORITY).expose(&shared.gateway);
    let header = b"PROXY TCP4 192.0.2.7 192.0.2.1 40000 443\r\n";
    let mut by_name = shared.connect();
    by_name.write_all(&[&header[..], &hello("a.example.com")].concat()).unwrap();
    let _through = endpoint.accept();
    let mut tunnel = shared.connect();
    tunnel.write_all(header).unwrap();
    let _tunnelled = open(&mut tunnel, &endpoint);
    eventually("both are known by the address in the header", || {
        let clients: Vec<_> =
            shared.gateway.connections().iter().map(|record| record.client.to_string()).collect();
        clients == ["192.0.2.7:40000", "192.0.2.7:40000"]
    });
}

#[test]
fn a_client_that_stays_silent_holds_no_slot_longer_than_on_a_port_of_its_own() {
    let shared = Shared::start(|config| config.hello_timeout = std::time::Duration::from_millis(20));
    let _silent = shared.connect();
    eventually("silence is counted", || shared.count(Refusal::TooSlow) == 1);
    let mut begins = shared.tls(Some("gateway.test"), &[]);
    begins.conn.write_tls(&mut begins.sock).unwrap();
    eventually("a handshake that does not go on is counted", || shared.count(Refusal::TooSlow) == 2);
    // A slot is given back after the refusal is counted.
    eventually("no slot is held", || shared.gateway.shared().totals().handshakes == 0);
}

/// Type of a frame (RFC 9113 section 6.8).
const GOAWAY: u8 = 7;

/// Type of the last frame of HTTP/2.
fn last_frame(mut bytes: &[u8]) -> Option<u8> {
    let mut last = None;
    while let [a, b, c, kind, ..] = *bytes {
        last = Some(kind);
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        bytes = bytes.get(9 + length..).unwrap_or_default();
    }
    last
}

#[test]
fn a_client_that_proves_nothing_on_a_shared_port_makes_room_for_the_next() {
    let tokens = tempfile::NamedTempFile::new().unwrap();
    let file = portico_gateway::StaticTokens::load(tokens.path().to_owned()).unwrap();
    let shared = Shared::start(|config| {
        config.tokens.file = Some(Arc::new(file));
        config.max_unauthenticated = 1;
    });
    let silent = || {
        let mut client = shared.tls(Some("gateway.test"), &[b"h2"]);
        // Preface and empty SETTINGS; and SETTINGS of the gateway, by which the connection has its slot.
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
        eventually("it has its slot", || shared.gateway.shared().totals().handshakes == 0);
        client
    };
    let mut first = silent();
    eventually("it is one that proved nothing", || shared.gateway.shared().identities.unauthenticated() == 1);
    let _next = silent();
    let mut words = Vec::new();
    let _ = first.read_to_end(&mut words);
    assert_eq!(last_frame(&words), Some(GOAWAY));
    eventually("it is counted", || shared.count(Refusal::MaxUnauthenticated) == 1);
}
