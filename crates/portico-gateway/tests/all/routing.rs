//! Which client gets where, which is refused, and with what.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use portico_api::meta::ObjectKey;
use portico_api::policy::{AllowList, Budget};
use portico_gateway::{Config, Gateway, ProxyMode, ProxyProtocol, Refusal};
use portico_routes::route::Front;
use portico_routes::table::{RouteChange, Update};
use portico_wire::proxy::{Tlvs, encode_v2};

const HOST: &str = "a.example.com";

fn refused(gateway: &Gateway, refusal: Refusal) -> u64 {
    gateway.shared().totals().refusals[refusal as usize]
}

/// The description of the alert a client gets, 0 if the connection just ends.
fn alert_for(gateway: &Gateway, host: &str) -> u8 {
    let mut client = client(gateway, host);
    let answer = read_to_end(&mut client);
    match answer.as_slice() {
        [] => 0,
        [21, 3, _, 0, 2, 2, description] => *description,
        other => panic!("neither an alert nor nothing: {other:?}"),
    }
}

#[test]
fn clients_reach_the_cluster_they_name() {
    let gateway = start(config());
    let [a, b] = [Endpoint::new(), Endpoint::new()];
    Service::new("a", &[a.address]).host("a.example.com").expose(&gateway);
    Service::new("b", &[b.address]).host("b.example.com").expose(&gateway);
    let (_client, _server) = pair(&gateway, &a, "a.example.com");
    let (_client, _server) = pair(&gateway, &b, "b.example.com");
}

#[test]
fn case_and_trailing_dot_of_a_server_name_make_no_difference() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    for name in ["A.Example.COM", "a.example.com."] {
        let (_client, _server) = pair(&gateway, &endpoint, name);
    }
}

#[test]
fn a_hello_in_single_bytes_is_routed_like_any_other() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    let mut client = connect(sni_address(&gateway));
    client.set_nodelay(true).unwrap();
    for byte in hello(HOST) {
        client.write_all(&[byte]).unwrap();
    }
    assert_eq!(read_exactly(&mut endpoint.accept(), hello(HOST).len()), hello(HOST));
}

#[test]
fn a_node_port_leads_to_its_service_and_the_server_may_speak_first() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    let port = free_port();
    Service::new("a", &[endpoint.address]).port(port).expose(&gateway);
    let mut client = connect(SocketAddr::new(LOOPBACK.ip(), port));
    let mut server = endpoint.accept();
    server.write_all(b"220 ready").unwrap();
    assert_eq!(read_exactly(&mut client, 9), b"220 ready");
}

#[test]
fn each_refusal_is_told_apart_by_its_alert() {
    let gateway = start(config());
    let gone = SocketAddr::new(LOOPBACK.ip(), free_port());
    let endpoint = Endpoint::new();
    Service::new("waiting", &[]).host("waiting.example.com").expose(&gateway);
    Service::new("down", &[gone]).host("down.example.com").expose(&gateway);
    let nobody = |policy: &mut portico_api::policy::ClusterPolicy| {
        policy.allow = AllowList::new(["198.51.100.0/24".parse().unwrap()]);
    };
    Service::new("closed", &[endpoint.address]).host("closed.example.com").policy(nobody).expose(&gateway);
    for (host, alert, refusal) in [
        ("nobody.example.com", 112, Refusal::Unknown),
        ("a..example.com", 112, Refusal::Unknown),
        ("waiting.example.com", 80, Refusal::NotReady),
        ("down.example.com", 80, Refusal::ConnectFailed),
        ("closed.example.com", 49, Refusal::NotAllowed),
    ] {
        let before = refused(&gateway, refusal);
        assert_eq!(alert_for(&gateway, host), alert, "{host}");
        assert_eq!(refused(&gateway, refusal), before + 1, "{host}");
    }
}

#[test]
fn bytes_that_are_no_hello_just_end() {
    let gateway = start(config());
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"SSH-2.0-x\r\n", &[0; 100], &[22, 3, 1, 255, 255, 1, 1]]
    {
        let mut client = connect(sni_address(&gateway));
        client.write_all(garbage).unwrap();
        // Bytes that it never read may turn the end into a reset.
        assert_cut_off(client);
    }
    assert_eq!(refused(&gateway, Refusal::Malformed), 4);
}

#[test]
fn a_client_that_never_finishes_its_hello_is_ended() {
    let gateway = start(Config { hello_timeout: Duration::from_millis(50), ..config() });
    let mut client = connect(sni_address(&gateway));
    client.write_all(&hello(HOST)[..20]).unwrap();
    assert_eq!(read_to_end(&mut client), b"");
    assert_eq!(refused(&gateway, Refusal::TooSlow), 1);
}

#[test]
fn a_removed_route_refuses_new_clients_and_keeps_the_old_ones() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    let service = Service::new("a", &[endpoint.address]).host(HOST);
    service.expose(&gateway);
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    service.withdraw(&gateway);
    assert_eq!(alert_for(&gateway, HOST), 112);
    client.write_all(b"still here").unwrap();
    assert_eq!(read_exactly(&mut server, 10), b"still here");
}

#[test]
fn a_port_that_is_taken_is_reported_and_opened_once_it_is_free() {
    let gateway = start(config());
    let taken = TcpListener::bind(LOOPBACK).unwrap();
    let port = taken.local_addr().unwrap().port();
    let [endpoint, other] = [Endpoint::new(), Endpoint::new()];
    let service = Service::new("a", &[endpoint.address]).port(port);
    service.expose(&gateway);
    Service::new("b", &[other.address]).host("b.example.com").expose(&gateway);
    let [failed] = &gateway.failed_node_ports()[..] else { panic!("one port cannot be bound") };
    assert_eq!((failed.port, &failed.backend), (port, &*service.backend.id));
    assert!(failed.error.contains("in use"), "{}", failed.error);
    let (_client, _server) = pair(&gateway, &other, "b.example.com");
    assert!(gateway.retry_failed_ports(), "still taken");
    drop(taken);
    assert!(!gateway.retry_failed_ports());
    let _client = connect(SocketAddr::new(LOOPBACK.ip(), port));
    endpoint.accept();
}

#[test]
fn a_service_that_asks_for_a_port_of_the_gateway_itself_is_reported_and_keeps_nobody_from_starting() {
    let port = free_port();
    let [endpoint, other] = [Endpoint::new(), Endpoint::new()];
    let service = Service::new("a", &[endpoint.address]).port(port);
    let sni_listen = Some(SocketAddr::new(LOOPBACK.ip(), port));
    let admin_listener = TcpListener::bind(LOOPBACK).unwrap();
    let admin = admin_listener.local_addr().unwrap().port();
    let access = portico_gateway::AccessLog::start(portico_gateway::AccessFormat::Off).unwrap();
    let config = Config {
        sni_listen,
        other_listeners: vec![(SocketAddr::new(LOOPBACK.ip(), admin), "--admin-listen")],
        ..config()
    };
    let gateway = Gateway::start(config, access, Some(&service.update()), None).unwrap();
    Service::new("b", &[other.address]).host("b.example.com").expose(&gateway);
    let (_client, _server) = pair(&gateway, &other, "b.example.com");
    let error = |gateway: &Gateway| gateway.failed_node_ports()[0].error.to_string();
    assert!(error(&gateway).contains("Portico itself, by --sni-listen"), "{}", error(&gateway));
    service.withdraw(&gateway);
    Service::new("a", &[endpoint.address]).port(admin).expose(&gateway);
    assert!(error(&gateway).contains("by --admin-listen"), "{}", error(&gateway));
}

#[test]
fn no_endpoint_leads_to_a_listener_of_the_gateway_itself() {
    let endpoint = Endpoint::new();
    let admin = TcpListener::bind("0.0.0.0:0").unwrap();
    let anywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let gateway = start(Config {
        sni_listen: Some(anywhere),
        node_port_address: anywhere.ip(),
        other_listeners: vec![(admin.local_addr().unwrap(), "--admin-listen")],
        ..config()
    });
    let node_port = free_port();
    Service::new("a", &[endpoint.address]).port(node_port).expose(&gateway);
    assert!(gateway.failed_node_ports().is_empty());
    let sni = sni_address(&gateway).port();
    for own in [sni, node_port, admin.local_addr().unwrap().port()] {
        for machine in ["127.0.0.1", "127.9.9.9", "::ffff:127.0.0.1"] {
            let stolen = SocketAddr::new(machine.parse().unwrap(), own);
            Service::new("thief", &[stolen]).host("thief.example.com").expose(&gateway);
            let mut client = connect(SocketAddr::new(LOOPBACK.ip(), sni));
            client.write_all(&hello("thief.example.com")).unwrap();
            let answer = read_to_end(&mut client);
            assert_eq!(answer.first(), Some(&21), "{stolen}: an alert, and nothing of what listens there");
        }
    }
    assert_eq!(refused(&gateway, Refusal::OwnListener), 9);
    Service::new("a", &[endpoint.address]).withdraw(&gateway);
}

/// What the index says of the Service in front.
fn front(keeps_addresses: bool, replicas: &[&str]) -> Update {
    let front = Front {
        service: ObjectKey::new("portico", "portico"),
        keeps_addresses,
        replicas: replicas.iter().map(|ip| ip.parse().unwrap()).collect(),
    };
    Update { changes: vec![RouteChange::Front(Some(front))] }
}

#[test]
fn no_endpoint_leads_to_a_listener_of_a_replica() {
    let gateway = start(config());
    let replica = TcpListener::bind(("127.0.0.2", sni_address(&gateway).port())).unwrap();
    let replica = Endpoint { address: replica.local_addr().unwrap(), listener: replica };
    Service::new("thief", &[replica.address]).host(HOST).expose(&gateway);
    // Not known as one, it is an endpoint like any other.
    drop(pair(&gateway, &replica, HOST));
    gateway.apply(&front(true, &["127.0.0.1", "127.0.0.2"]));
    assert_ne!(alert_for(&gateway, HOST), 0);
    assert_eq!(refused(&gateway, Refusal::OwnListener), 1);
    // Another port of that machine may be an API server's.
    let other = TcpListener::bind("127.0.0.2:0").unwrap();
    let other = Endpoint { address: other.local_addr().unwrap(), listener: other };
    Service::new("thief", &[other.address]).host(HOST).expose(&gateway);
    drop(pair(&gateway, &other, HOST));
}

#[test]
fn source_ranges_hold_while_the_service_in_front_keeps_the_addresses_of_clients() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    let ranges = AllowList::new(["192.0.2.0/24".parse().unwrap()]);
    Service::new("a", &[endpoint.address])
        .host(HOST)
        .policy(|policy| policy.source_ranges = ranges)
        .expose(&gateway);
    drop(pair(&gateway, &endpoint, HOST));
    gateway.apply(&front(true, &[]));
    assert_ne!(alert_for(&gateway, HOST), 0);
    gateway.apply(&front(false, &[]));
    drop(pair(&gateway, &endpoint, HOST));
    gateway.apply(&front(true, &[]));
    assert_ne!(alert_for(&gateway, HOST), 0);
    gateway.apply(&Update { changes: vec![RouteChange::Front(None)] });
    drop(pair(&gateway, &endpoint, HOST));
}

#[test]
fn a_second_gateway_does_not_silently_share_a_port() {
    let first = start(config());
    let address = sni_address(&first);
    let access = portico_gateway::AccessLog::start(portico_gateway::AccessFormat::Off).unwrap();
    let second = Gateway::start(Config { sni_listen: Some(address), ..config() }, access, None, None);
    let message = second.expect_err("the address is taken").to_string();
    assert!(message.contains(&address.to_string()) && message.contains("--sni-listen"), "{message}");
}

#[test]
fn the_only_endpoint_is_tried_for_every_client_however_often_it_failed() {
    const CLIENTS: u64 = 8;
    let (listener, waiting) = silent_endpoint();
    let gateway = start(Config { connect_timeout: Duration::from_millis(20), ..config() });
    Service::new("a", &[listener.local_addr().unwrap()]).host(HOST).expose(&gateway);
    for _ in 0..CLIENTS {
        assert_eq!(alert_for(&gateway, HOST), 80);
    }
    let cluster = &gateway.shared().route_store.clusters()[0];
    assert_eq!(cluster.snapshot().connect_failures, CLIENTS, "nobody is turned away without an attempt");
    assert_eq!(refused(&gateway, Refusal::ConnectTimedOut), CLIENTS);
    let upstream = &gateway.shared().route_store.upstreams()[0];
    assert!(upstream.endpoints()[0].is_failing());
    // It answers again: the next client is served, whatever is left of the time it is skipped for.
    for _ in 0..waiting.len() {
        listener.accept().unwrap();
    }
    let mut client = connect(sni_address(&gateway));
    client.write_all(&hello(HOST)).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    assert_eq!(read_exactly(&mut server, hello(HOST).len()), hello(HOST));
    eventually("it counts as healthy", || !upstream.endpoints()[0].is_failing());
}

#[test]
fn an_endpoint_that_refuses_is_passed_over_for_one_that_does_not() {
    let gateway = start(config());
    let gone = SocketAddr::new(LOOPBACK.ip(), free_port());
    let endpoint = Endpoint::new();
    Service::new("a", &[gone, endpoint.address]).host(HOST).expose(&gateway);
    let pairs: Vec<_> = (0..10).map(|_| pair(&gateway, &endpoint, HOST)).collect();
    assert_eq!(pairs.len(), 10);
    assert_eq!(refused(&gateway, Refusal::ConnectFailed), 0);
}

#[test]
fn connections_spread_over_all_endpoints() {
    let gateway = start(config());
    let endpoints = [Endpoint::new(), Endpoint::new(), Endpoint::new()];
    let addresses: Vec<_> = endpoints.iter().map(|endpoint| endpoint.address).collect();
    Service::new("a", &addresses).host(HOST).expose(&gateway);
    let mut held = Vec::new();
    for count in 1..=9 {
        held.push(client(&gateway, HOST));
        eventually("it is connected", || gateway.connections().len() == count);
    }
    for endpoint in &endpoints {
        let to = |record: &&Arc<portico_gateway::Record>| record.endpoint().address == endpoint.address;
        assert_eq!(gateway.connections().iter().filter(to).count(), 3);
    }
}

#[test]
fn a_cluster_over_its_budget_is_refused_and_its_neighbour_is_not() {
    let gateway = start(config());
    let [a, b] = [Endpoint::new(), Endpoint::new()];
    let two = Budget { max_connections: Some(2), ..Budget::default() };
    Service::new("a", &[a.address])
        .host("a.example.com")
        .policy(|policy| policy.budget = two)
        .expose(&gateway);
    Service::new("b", &[b.address]).host("b.example.com").expose(&gateway);
    let first = pair(&gateway, &a, "a.example.com");
    let _second = pair(&gateway, &a, "a.example.com");
    assert_eq!(alert_for(&gateway, "a.example.com"), 80);
    assert_eq!(refused(&gateway, Refusal::MaxConnections), 1);
    let _neighbour = pair(&gateway, &b, "b.example.com");
    drop(first);
    eventually("there is room for one", || gateway.connections().len() == 2);
    let _third = pair(&gateway, &a, "a.example.com");
}

#[test]
fn the_oldest_silent_connection_makes_room_for_the_next() {
    let gateway = start(Config { max_handshakes: 3, ..config() });
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host("a.example.com").expose(&gateway);
    let silent = |count| {
        let client = connect(sni_address(&gateway));
        eventually("it is counted", || gateway.shared().totals().handshakes == count);
        client
    };
    let mut oldest = silent(1);
    let _others = [silent(2), silent(3)];
    let _served = pair(&gateway, &endpoint, "a.example.com");
    assert_eq!(read_to_end(&mut oldest), b"");
    assert_eq!(refused(&gateway, Refusal::MaxHandshakes), 1);
    assert_eq!(gateway.shared().totals().handshakes, 2);
}

#[test]
fn a_cluster_whose_service_is_made_anew_keeps_its_budget_and_gauges() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    let three = Budget { max_connections: Some(3), ..Budget::default() };
    let service = Service::new("a", &[endpoint.address]).host("a.example.com");
    let service = service.policy(|policy| policy.budget = three);
    service.expose(&gateway);
    let open = || {
        let clusters = gateway.shared().route_store.clusters();
        clusters.iter().map(|cluster| cluster.snapshot().open).collect::<Vec<_>>()
    };
    let mut connections = vec![pair(&gateway, &endpoint, "a.example.com")];
    for anew in 0..3 {
        service.withdraw(&gateway);
        assert_eq!(open(), [1 + anew.min(2)], "what is open is shown without a Service, too");
        service.expose(&gateway);
        if anew < 2 {
            connections.push(pair(&gateway, &endpoint, "a.example.com"));
        }
    }
    assert_eq!(alert_for(&gateway, "a.example.com"), 80);
    assert_eq!(refused(&gateway, Refusal::MaxConnections), 1);
    service.withdraw(&gateway);
    drop(connections);
    eventually("nothing is left of it", || open().is_empty());
}

#[test]
fn a_cluster_that_takes_all_it_can_leaves_as_much_to_others() {
    // Eight connections.
    let gateway = start(Config { connection_descriptors: 16, ..config() });
    let [a, b] = [Endpoint::new(), Endpoint::new()];
    let port = free_port();
    Service::new("a", &[a.address]).host("a.example.com").port(port).expose(&gateway);
    Service::new("b", &[b.address]).host("b.example.com").expose(&gateway);
    let idle: Vec<_> = (0..8).map(|_| connect((LOOPBACK.ip(), port).into())).collect();
    eventually("half of them are refused", || refused(&gateway, Refusal::FairShare) == 4);
    assert_eq!(gateway.shared().totals().connection_descriptors, 8);
    let _neighbour = [pair(&gateway, &b, "b.example.com"), pair(&gateway, &b, "b.example.com")];
    drop((idle, (0..4).map(|_| a.accept()).collect::<Vec<_>>()));
    eventually("what ended is given back", || gateway.shared().totals().connection_descriptors == 4);
    let _again = pair(&gateway, &a, "a.example.com");
}

fn behind_a_load_balancer(mode: ProxyMode, trusted: &str) -> Config {
    let trusted = vec![trusted.parse().unwrap()];
    Config {
        proxy_protocol: ProxyProtocol { sni: mode, node_port: mode, trusted, ..Default::default() },
        ..config()
    }
}

fn header(client: &str) -> Vec<u8> {
    encode_v2(client.parse().unwrap(), "203.0.113.1:6443".parse().unwrap(), Tlvs::default())
}

#[test]
fn allow_lists_judge_the_client_a_trusted_hop_names() {
    let gateway = start(behind_a_load_balancer(ProxyMode::Required, "127.0.0.0/8"));
    let endpoint = Endpoint::new();
    let office = AllowList::new(["198.51.100.0/24".parse().unwrap()]);
    Service::new("a", &[endpoint.address]).host(HOST).policy(|policy| policy.allow = office).expose(&gateway);
    let connect_as = |client: &str| {
        let mut stream = connect(sni_address(&gateway));
        stream.write_all(&[header(client), hello(HOST)].concat()).unwrap();
        stream
    };
    let _client = connect_as("198.51.100.7:4242");
    assert_eq!(read_exactly(&mut endpoint.accept(), hello(HOST).len()), hello(HOST));
    eventually("it is listed", || !gateway.connections().is_empty());
    assert_eq!(gateway.connections()[0].client, "198.51.100.7:4242".parse().unwrap());
    assert_eq!(read_to_end(&mut connect_as("192.0.2.7:4242"))[6], 49);
    let mut v1 = connect(sni_address(&gateway));
    v1.write_all(b"PROXY TCP4 198.51.100.9 203.0.113.1 5151 6443\r\n").unwrap();
    v1.write_all(&hello(HOST)).unwrap();
    assert_eq!(read_exactly(&mut endpoint.accept(), hello(HOST).len()), hello(HOST));
}

#[test]
fn source_ranges_hold_for_clients_whose_own_address_is_known_and_for_no_others() {
    let endpoint = Endpoint::new();
    let office = AllowList::new(["198.51.100.0/24".parse().unwrap()]);
    let service = Service::new("a", &[endpoint.address]).host(HOST);
    let service = service.policy(|policy| policy.source_ranges = office);
    let mut config = behind_a_load_balancer(ProxyMode::Optional, "127.0.0.0/8");
    let gateway = start(config.clone());
    service.expose(&gateway);
    let connect_as = |header: &[u8]| {
        let mut stream = connect(sni_address(&gateway));
        stream.write_all(&[header, &hello(HOST)].concat()).unwrap();
        stream
    };
    let _inside = connect_as(&header("198.51.100.7:4242"));
    endpoint.accept();
    assert_eq!(read_to_end(&mut connect_as(&header("192.0.2.7:4242")))[6], 49);
    let _masked = connect_as(&[]);
    endpoint.accept();
    assert_eq!(refused(&gateway, Refusal::NotAllowed), 1);
    config.proxy_protocol.direct = true;
    let direct = start(config);
    service.expose(&direct);
    assert_eq!(alert_for(&direct, HOST), 49, "127.0.0.1 is the client's own address");
}

#[test]
fn an_optional_header_may_be_missing() {
    let gateway = start(behind_a_load_balancer(ProxyMode::Optional, "127.0.0.0/8"));
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    let (_client, _server) = pair(&gateway, &endpoint, HOST);
}

#[test]
fn a_header_that_is_wrong_is_refused_where_it_is_optional_too() {
    let gateway = start(behind_a_load_balancer(ProxyMode::Optional, "127.0.0.0/8"));
    let endpoint = Endpoint::new();
    // The hop is on the list, its clients are not.
    let office = AllowList::new(["127.0.0.0/8".parse().unwrap()]);
    let port = free_port();
    let service = Service::new("a", &[endpoint.address]).host(HOST).port(port);
    service.policy(|policy| policy.allow = office).expose(&gateway);
    let mut too_long = header("198.51.100.7:4242");
    too_long[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
    let wrong = [&b"PROXY TCP4 198.51.100.256 203.0.113.1 5151 443\r\n"[..], b"PROXY TCP5\r\n", &too_long];
    for wrong in wrong {
        for address in [sni_address(&gateway), ([127, 0, 0, 1], port).into()] {
            let mut client = connect(address);
            client.write_all(&[wrong, &hello(HOST)].concat()).unwrap();
            // It may be a reset: the hello was not read.
            assert_cut_off(client);
        }
    }
    eventually("each is refused", || refused(&gateway, Refusal::ProxyHeader) == 6);
    assert!(gateway.connections().is_empty());
}

#[test]
fn a_header_from_a_stranger_is_never_believed() {
    for mode in [ProxyMode::Optional, ProxyMode::Required] {
        let gateway = start(behind_a_load_balancer(mode, "192.0.2.0/24"));
        let endpoint = Endpoint::new();
        Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
        let mut client = connect(sni_address(&gateway));
        client.write_all(&[header("198.51.100.7:4242"), hello(HOST)].concat()).unwrap();
        assert_cut_off(client);
        assert!(gateway.connections().is_empty());
    }
}

#[test]
fn a_service_that_asks_for_it_learns_the_client_from_a_proxy_header() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    let mut service = Service::new("a", &[endpoint.address]).host(HOST);
    service.backend.send_proxy = true;
    service.expose(&gateway);
    let client = client(&gateway, HOST);
    let mut server = endpoint.accept();
    let mut bytes = Vec::new();
    let (source, authority, id, length) = loop {
        bytes.extend(read_exactly(&mut server, 1));
        if let portico_wire::Parse::Complete(portico_wire::proxy::Header::Proxied {
            source, tlvs, len, ..
        }) = portico_wire::proxy::parse(&bytes)
        {
            break (source, tlvs.authority.map(String::from), tlvs.unique_id.map(Vec::from), len);
        }
    };
    assert_eq!(length, bytes.len());
    assert_eq!(source, client.local_addr().unwrap());
    eventually("it is listed", || !gateway.connections().is_empty());
    assert_eq!(authority.as_deref(), Some(HOST));
    assert_eq!(id, Some(format!("{}", gateway.connections()[0].id).into_bytes()));
    assert_eq!(read_exactly(&mut server, hello(HOST).len()), hello(HOST));
}
