//! What is counted of each way in, and which clients are named: by that a way in is closed, or is not.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};

use portico_api::listener::ListenerKind;
use portico_api::policy::AllowList;

use crate::support::*;
use portico_gateway::{Config, DoorSnapshot, Gateway};
use portico_tunnel::Settings;

const HOST: &str = "a.example.com";

const AUTHORITY: &str = "apiserver-external.cluster-a.svc.cluster.local:443";

fn door(gateway: &Gateway, listener: ListenerKind) -> DoorSnapshot {
    let clusters = gateway.shared().route_store.clusters();
    clusters.iter().find(|cluster| cluster.name.as_str() == "a").unwrap().doors()[listener as usize]
}

/// The clients that came by a kind of listener last.
fn clients(gateway: &Gateway, listener: ListenerKind) -> Vec<IpAddr> {
    let clusters = gateway.shared().route_store.clusters();
    clusters[0].last_clients(listener).into_iter().map(|client| client.address).collect()
}

/// Open, opened, and uses.
fn counts(door: DoorSnapshot) -> (u64, u64, u64) {
    (door.open, door.opened, door.used)
}

#[test]
fn each_way_in_is_counted_for_itself_and_names_its_clients() {
    let tunnel = Settings { plaintext: true, ..Settings::default() };
    let gateway = start(Config { tunnel_listen: Some(LOOPBACK), tunnel, ..config() });
    let (endpoint, port) = (Endpoint::new(), free_port());
    Service::new("a", &[endpoint.address]).host(HOST).port(port).authority(AUTHORITY).expose(&gateway);
    for listener in ListenerKind::ALL {
        assert_eq!(door(&gateway, listener), DoorSnapshot::default());
        let connected: Box<dyn FnOnce() -> TcpStream> = match listener {
            ListenerKind::Sni => Box::new(|| client(&gateway, HOST)),
            ListenerKind::Tunnel => Box::new(|| {
                let mut client = connect(tunnel_address(&gateway));
                write!(client, "CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n").unwrap();
                client
            }),
            ListenerKind::NodePort => Box::new(|| {
                let mut client = connect(SocketAddr::new(LOOPBACK.ip(), port));
                client.write_all(b"x").unwrap();
                client
            }),
        };
        let (client, server) = (connected(), endpoint.accept());
        eventually("it is counted as open", || counts(door(&gateway, listener)) == (1, 1, 0));
        if listener == ListenerKind::NodePort {
            eventually("it was heard", || gateway.connections().iter().all(|record| record.bytes_up() == 1));
        }
        drop((client, server));
        eventually("it is counted as used", || counts(door(&gateway, listener)) == (0, 1, 1));
        assert!(door(&gateway, listener).last.is_some());
        assert_eq!(clients(&gateway, listener), [LOOPBACK.ip()]);
    }
    for listener in ListenerKind::ALL {
        assert_eq!(counts(door(&gateway, listener)), (0, 1, 1), "none counts for another");
    }
}

#[test]
fn a_client_that_only_looks_whether_a_port_is_open_does_not_use_it() {
    let gateway = start(config());
    let (endpoint, port) = (Endpoint::new(), free_port());
    Service::new("a", &[endpoint.address]).port(port).expose(&gateway);
    drop((connect(SocketAddr::new(LOOPBACK.ip(), port)), endpoint.accept()));
    eventually("it has ended", || counts(door(&gateway, ListenerKind::NodePort)) == (0, 1, 0));
    assert_eq!(clients(&gateway, ListenerKind::NodePort), [] as [IpAddr; 0]);
}

#[test]
fn a_client_that_the_endpoint_resets_before_it_has_said_anything_uses_its_door() {
    let gateway = start(config());
    let (endpoint, port) = (Endpoint::new(), free_port());
    Service::new("a", &[endpoint.address]).port(port).expose(&gateway);
    let client = connect(SocketAddr::new(LOOPBACK.ip(), port));
    reset(endpoint.accept());
    // Whether the gateway sees that it was connected before is up to the kernel.
    eventually("it is counted", || door(&gateway, ListenerKind::NodePort).used == 1);
    eventually("it has ended", || door(&gateway, ListenerKind::NodePort).open == 0);
    assert_eq!(clients(&gateway, ListenerKind::NodePort), [client.local_addr().unwrap().ip()]);
}

#[test]
fn a_client_that_is_turned_away_because_nothing_is_ready_still_uses_its_door() {
    let gateway = start(config());
    let port = free_port();
    Service::new("a", &[]).port(port).host(HOST).expose(&gateway);
    let mut refused = connect(SocketAddr::new(LOOPBACK.ip(), port));
    assert_eq!(read_to_end(&mut refused), b"");
    eventually("it is counted", || counts(door(&gateway, ListenerKind::NodePort)) == (0, 0, 1));
    assert_eq!(clients(&gateway, ListenerKind::NodePort), [LOOPBACK.ip()]);
}

#[test]
fn a_client_that_may_not_come_loses_nothing_and_uses_nothing() {
    let gateway = start(config());
    let (endpoint, port) = (Endpoint::new(), free_port());
    let others = AllowList::new(["198.51.100.0/24".parse().unwrap()]);
    Service::new("a", &[endpoint.address]).port(port).policy(|policy| policy.allow = others).expose(&gateway);
    let mut refused = connect(SocketAddr::new(LOOPBACK.ip(), port));
    assert_eq!(read_to_end(&mut refused), b"");
    let refusals = || gateway.shared().totals().refusals.iter().sum::<u64>();
    eventually("it is refused", || refusals() == 1);
    assert_eq!(door(&gateway, ListenerKind::NodePort), DoorSnapshot::default());
}

#[test]
fn a_gateway_that_was_just_started_says_since_when_it_counts() {
    let endpoint = Endpoint::new();
    let service = Service::new("a", &[endpoint.address]).host(HOST);
    let since = |gateway: &Gateway| gateway.shared().route_store.clusters()[0].since;
    let first = start(config());
    service.expose(&first);
    drop(pair(&first, &endpoint, HOST));
    let counting = since(&first);
    // An update is no new beginning.
    service.expose(&first);
    assert_eq!(since(&first), counting);
    let second = start(config());
    service.expose(&second);
    assert!(since(&second) > counting);
}
