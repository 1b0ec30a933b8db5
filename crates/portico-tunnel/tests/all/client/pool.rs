//! Which tunnels there are, and how they move: over minutes, on a clock that the tests move.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::harness::{Line, Wire, settings};
use super::names::{NameServer, Says};
use crate::common::{Server, UPSTREAM, plaintext};
use portico_dial::{ClientTls, ClientTlsFiles, Dialer, ProxyFiles, ProxySetting};
use portico_lab::clock::Clock;
use portico_lab::log_lines::LogLines;
use portico_lab::pki::{Authority, Certificate, Pki};
use portico_tunnel::client::{
    Client, ClientSettings, GatewayAddress, IdentityState, OpenError, Security, TunnelState, TunnelStatus,
};
use portico_tunnel::{Settings, Tls, TlsFiles};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tracing::Level;

const ONE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const TWO: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Steps of the clock are too large for PING to be answered within its time.
fn without_ping(settings: ClientSettings) -> ClientSettings {
    ClientSettings { ping_interval: Duration::from_secs(100_000), ..settings }
}

/// Addresses that live tunnels go to, sorted.
fn live(client: &Client) -> Vec<SocketAddr> {
    let status = client.status();
    let live = status.iter().filter(|tunnel| tunnel.state == Some(TunnelState::Live));
    let mut addresses: Vec<_> = live.map(|tunnel| tunnel.address.unwrap()).collect();
    addresses.sort();
    addresses
}

fn sorted<const N: usize>(mut addresses: [SocketAddr; N]) -> [SocketAddr; N] {
    addresses.sort();
    addresses
}

/// Two wires on one port of two addresses, as two gateways behind one name are.
async fn pair(gateways: [&Server; 2]) -> [Line; 2] {
    for _ in 0..100 {
        let free = TcpListener::bind((TWO, 0)).await.unwrap();
        let port = free.local_addr().unwrap().port();
        if let Ok(probe) = TcpListener::bind((ONE, port)).await {
            drop((free, probe));
            let one = Line::at((ONE, port).into(), gateways[0].address).await;
            return [one, Line::at((TWO, port).into(), gateways[1].address).await];
        }
    }
    panic!("no port is free on both 127.0.0.1 and 127.0.0.2");
}

/// A client of gateways that are found by name.
fn by_name(servers: &NameServer, port: u16) -> ClientSettings {
    let dialer = Dialer::new(ProxySetting::Off, ProxyFiles::default()).unwrap();
    let dialer = Arc::new(dialer.with_name_servers(&[servers.address]));
    let gateway: GatewayAddress = format!("h2c://gateway.example.com:{port}").parse().unwrap();
    without_ping(ClientSettings::new(vec![gateway], dialer, UPSTREAM.into()))
}

#[tokio::test]
async fn two_tunnels_on_one_gateway_move_apart_when_the_other_returns() {
    let clock = Clock::new();
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let (stays, restarts) = (Line::to(one.address).await, Line::to(two.address).await);
    let client = Client::start(without_ping(settings(&[stays.address, restarts.address])));
    let apart = sorted([stays.address, restarts.address]);
    clock.until("apart at first", || live(&client) == apart).await;
    restarts.wire.send_replace(Wire::Cut);
    clock.until("both on the one that is left", || live(&client) == [stays.address; 2]).await;
    // It is tried again and again while it is not there.
    clock.pass(Duration::from_secs(120)).await;
    assert_eq!(live(&client), [stays.address; 2]);
    restarts.wire.send_replace(Wire::Carries);
    let returned = Instant::now();
    clock.until("apart again", || live(&client) == apart).await;
    // Its last failure leaves it alone for half a minute; then it is tried within three quarters of one.
    assert!(returned.elapsed() < Duration::from_secs(80), "{:?}", returned.elapsed());
}

#[tokio::test]
async fn tunnels_follow_the_name_of_the_gateways() {
    let clock = Clock::new();
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let lines = pair([&one, &two]).await;
    let [first, second] = lines.each_ref().map(|line| line.address);
    let server = NameServer::start(Says::Addresses(vec![ONE.into()])).await;
    let client = Client::start(by_name(&server, first.port()));
    clock.until("both at the only address", || live(&client) == [first, first]).await;

    server.says.send_replace(Says::Addresses(vec![ONE.into(), TWO.into()]));
    clock.until("one moves to the new address", || live(&client) == [first, second]).await;

    // The answers of ten minutes in which it is missing do not count: name servers may give some of many.
    server.says.send_replace(Says::Addresses(vec![TWO.into()]));
    let asked = server.asked();
    clock.pass(Duration::from_secs(590)).await;
    assert!(server.asked() > asked + 10, "{}", server.asked() - asked);
    assert_eq!(live(&client), [first, second]);
    let mut fewest = 2;
    clock
        .until("both at the new address", || {
            fewest = fewest.min(live(&client).len());
            live(&client) == [second, second]
        })
        .await;
    assert_eq!(fewest, 2, "a successor comes first");
}

#[tokio::test]
async fn what_a_name_server_does_not_say_moves_no_tunnel() {
    let clock = Clock::new();
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let lines = pair([&one, &two]).await;
    let [first, second] = lines.each_ref().map(|line| line.address);
    let server = NameServer::start(Says::Addresses(vec![ONE.into(), TWO.into()])).await;
    let client = Client::start(by_name(&server, first.port()));
    clock.until("apart", || live(&client) == [first, second]).await;
    for says in [Says::Nothing, Says::Failure, Says::Silence] {
        server.says.send_replace(says);
        let asked = server.asked();
        clock.pass(Duration::from_secs(300)).await;
        assert!((4..=100).contains(&(server.asked() - asked)), "{}", server.asked() - asked);
        assert_eq!(live(&client), [first, second]);
        assert_eq!(client.totals().tunnels_opened, 2);
    }
}

#[tokio::test]
async fn a_silent_name_server_delays_no_tunnel() {
    let clock = Clock::new();
    let server = Server::start(plaintext()).await;
    let line = Line::at("127.0.0.1:0".parse().unwrap(), server.address).await;
    let names = NameServer::start(Says::Addresses(vec![ONE.into()])).await;
    let client = Client::start(by_name(&names, line.address.port()));
    clock.until("up", || live(&client).len() == 2).await;
    names.says.send_replace(Says::Silence);
    line.wire.send_replace(Wire::Cut);
    clock.until("down", || live(&client).is_empty()).await;
    clock.pass(Duration::from_secs(20)).await;
    line.wire.send_replace(Wire::Carries);
    let back = Instant::now();
    let stream = clock.by(client.open(UPSTREAM)).await.unwrap();
    assert_eq!(stream.endpoint().address.ip(), IpAddr::from(ONE));
    assert!(back.elapsed() < Duration::from_secs(3), "{:?}", back.elapsed());
}

/// A gateway that speaks TLS.
async fn with_tls(pki: &Pki) -> Server {
    pki.issue("tls", Certificate::server(&["127.0.0.1"]));
    let (certificate, key) = (pki.file("tls.crt"), pki.file("tls.key"));
    let tls = Tls::load(TlsFiles { certificate, key, client_ca: Vec::new(), client_crl: None });
    Server::start(Settings { tls: Some(Arc::new(tls.unwrap())), ..plaintext() }).await
}

/// The certificate of a CA that signs nothing here.
fn other_ca() -> String {
    Authority::new("others").unwrap().cert()
}

/// A client of that gateway that trusts what `ca.crt` says.
fn trusting(pki: &Pki, gateway: SocketAddr) -> (ClientSettings, Arc<ClientTls>) {
    let ca = Some(pki.file("ca.crt"));
    let tls = Arc::new(ClientTls::load(ClientTlsFiles { ca, ..ClientTlsFiles::default() }).unwrap());
    let mut settings = without_ping(settings(&[gateway]));
    settings.gateways[0].security = Security::Tls;
    (ClientSettings { tls: Some(Arc::clone(&tls)), ..settings }, tls)
}

#[tokio::test]
async fn a_ca_that_is_set_right_is_tried_at_once() {
    let clock = Clock::new();
    let pki = Pki::new();
    let server = with_tls(&pki).await;
    pki.write("ca.crt", &other_ca());
    let (settings, tls) = trusting(&pki, server.address);
    let client = Client::start(settings);
    // Long enough for the waits to have grown.
    clock.pass(Duration::from_secs(120)).await;
    assert!(live(&client).is_empty());
    pki.write("ca.crt", &pki.authority().cert());
    assert!(tls.reload().unwrap());
    client.certificate_changed();
    let right = Instant::now();
    clock.until("up", || live(&client).len() == 2).await;
    assert!(right.elapsed() < Duration::from_secs(4), "{:?}", right.elapsed());
}

#[tokio::test]
async fn a_balancer_with_no_gateway_behind_it_is_tried_often_while_a_stream_waits() {
    let clock = Clock::new();
    let pki = Pki::new();
    let server = with_tls(&pki).await;
    // It accepts, and closes at once.
    let balancer = Line::to(server.address).await;
    balancer.wire.send_replace(Wire::Cut);
    let (settings, _) = trusting(&pki, balancer.address);
    let client = Client::start(ClientSettings { open_timeout: Duration::from_secs(600), ..settings });
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.open(UPSTREAM).await }
    });
    clock.pass(Duration::from_secs(120)).await;
    balancer.wire.send_replace(Wire::Carries);
    let back = Instant::now();
    clock.by(waiting).await.unwrap().unwrap();
    assert!(back.elapsed() < Duration::from_secs(2), "{:?}", back.elapsed());
}

/// So many tunnels that have nothing to do any more with our identity.
async fn at_rest(clock: &Clock, client: &Client, tunnels: usize) {
    clock
        .until("at rest", || {
            let status = client.status();
            let rests =
                |tunnel: &&TunnelStatus| tunnel.identity != IdentityState::Unknown && tunnel.streams == 0;
            live(client).len() == tunnels && status.iter().filter(rests).count() == tunnels
        })
        .await;
}

#[tokio::test]
async fn a_stream_that_waits_for_room_gets_that_of_one_that_ends() {
    let clock = Clock::new();
    let server = Server::start(plaintext()).await;
    let settings = without_ping(settings(&[server.address]));
    let client = Client::start(ClientSettings { tunnels: 1, max_tunnels: 1, max_streams: 2, ..settings });
    at_rest(&clock, &client, 1).await;
    let first = clock.by(client.open(UPSTREAM)).await.unwrap();
    let second = clock.by(client.open(UPSTREAM)).await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.open(UPSTREAM).await }
    });
    clock.pass(Duration::from_secs(2)).await;
    assert!(!waiting.is_finished());
    drop(first);
    let freed = Instant::now();
    let third = clock.by(waiting).await.unwrap();
    assert!(third.is_ok() && freed.elapsed() < Duration::from_secs(1), "{third:?} {:?}", freed.elapsed());

    let error = clock.by(client.open(UPSTREAM)).await.unwrap_err();
    assert!(matches!(error, OpenError::Full { tunnels: 1, streams: 2, .. }), "{error}");
    let two = [(); 2].map(|()| {
        let client = client.clone();
        tokio::spawn(async move { client.open(UPSTREAM).await })
    });
    clock.pass(Duration::from_secs(2)).await;
    // Both in one turn: only the first leaves a full tunnel.
    drop((second, third));
    let freed = Instant::now();
    for waiting in two {
        assert!(clock.by(waiting).await.unwrap().is_ok());
    }
    assert!(freed.elapsed() < Duration::from_secs(1), "{:?}", freed.elapsed());
    assert_eq!(
        error.to_string().split_once(": ").unwrap().1,
        "1 tunnels are up with 2 streams, as many as the gateways allow"
    );
}

#[tokio::test]
async fn full_tunnels_get_company_that_leaves_when_it_is_not_needed() {
    let clock = Clock::new();
    let server = Server::start(plaintext()).await;
    let settings = without_ping(settings(&[server.address]));
    let client = Client::start(ClientSettings { max_tunnels: 4, max_streams: 5, ..settings });
    at_rest(&clock, &client, 2).await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(clock.by(client.open(UPSTREAM)).await.unwrap());
    }
    assert_eq!(live(&client).len(), 4);
    let error = clock.by(client.open(UPSTREAM)).await.unwrap_err();
    assert!(matches!(error, OpenError::Full { tunnels: 4, streams: 20, .. }), "{error}");

    // A few that end are no reason to leave: they may come again.
    streams.truncate(10);
    clock.pass(Duration::from_secs(120)).await;
    assert_eq!(live(&client).len(), 4);
    streams.truncate(2);
    clock.until("two again", || live(&client).len() == 2).await;
    clock.pass(Duration::from_secs(120)).await;
    assert_eq!(live(&client).len(), 2);
    assert_eq!(client.totals().tunnels_opened, 4);
    drop(streams);
    clock.until("those that left are gone", || client.status().len() == 2).await;
}

#[tokio::test]
async fn company_of_a_full_tunnel_stays_while_it_would_be_replaced() {
    let clock = Clock::new();
    let server = Server::start(plaintext()).await;
    let settings = without_ping(settings(&[server.address]));
    let client = Client::start(ClientSettings { tunnels: 3, max_streams: 2, ..settings });
    at_rest(&clock, &client, 3).await;
    // Both go to the same one.
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(clock.by(client.open(UPSTREAM)).await.unwrap());
    }
    clock.until("company", || live(&client).len() == 4).await;
    clock.pass(Duration::from_secs(300)).await;
    assert_eq!((live(&client).len(), client.totals().tunnels_opened), (4, 4));
    // The tunnel does not stay longer than that, either.
    streams.clear();
    clock.until("three again", || live(&client).len() == 3).await;
    clock.pass(Duration::from_secs(120)).await;
    assert_eq!((live(&client).len(), client.totals().tunnels_opened), (3, 4));
}

#[tokio::test]
async fn a_successor_that_does_not_come_up_is_counted_logged_and_shown_while_the_old_tunnels_serve() {
    let (warnings, _collected) = LogLines::collect(|metadata| *metadata.level() == Level::WARN);
    let clock = Clock::new();
    let pki = Pki::new();
    let server = with_tls(&pki).await;
    let (settings, tls) = trusting(&pki, server.address);
    let client = Client::start(settings);
    clock.until("up", || live(&client).len() == 2).await;
    pki.write("ca.crt", &other_ca());
    assert!(tls.reload().unwrap());
    client.certificate_changed();
    clock.until("tried again and again", || client.totals().tunnel_failures >= 5).await;
    let said = warnings.messages();
    assert_eq!(said.len(), 5, "{said:?}");
    assert!(said.iter().all(|line| line.contains("no successor for a tunnel that is up")), "{said:?}");
    assert_eq!(live(&client).len(), 2);
    let error = || client.status().iter().find_map(|tunnel| tunnel.error.clone());
    assert!(error().is_some_and(|error| error.contains("TLS to")), "{:?}", error());
    clock.by(client.open(UPSTREAM)).await.unwrap();
    pki.write("ca.crt", &pki.authority().cert());
    assert!(tls.reload().unwrap());
    client.certificate_changed();
    let right = Instant::now();
    clock.until("two successors", || client.totals().tunnels_opened == 4).await;
    assert!(right.elapsed() < Duration::from_secs(4), "{:?}", right.elapsed());
    assert_eq!(error(), None);
}

#[test]
fn there_is_room_for_the_connections_that_an_agent_carries_by_default() {
    let settings = settings(&[]);
    assert!(settings.max_tunnels * settings.max_streams as usize >= 10_000);
}
