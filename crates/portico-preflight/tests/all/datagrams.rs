//! Datagrams: UDP, UDP beside the program that has the port, IP-in-IP, and the largest that arrives.

use std::net::{IpAddr, UdpSocket};

use portico_preflight::check::{datagram, path_mtu};
use portico_preflight::responder::{Bounds, Opened, Responder};
use portico_preflight::{Observation, Transport};
use tokio::sync::oneshot;

use crate::{HERE, IMPATIENT, LIMITS, free_tcp, free_udp, serve, settings};

#[tokio::test]
async fn a_probe_comes_back_or_names_the_machine_that_refused_it() {
    let port = free_udp();
    assert_eq!(
        datagram::check(HERE, Transport::Udp(port), LIMITS).await,
        Observation::Refused { by: Some(HERE) }
    );
    serve(settings([Transport::Udp(port)]));
    let seen = datagram::check(HERE, Transport::Udp(port), LIMITS).await;
    assert!(matches!(seen, Observation::Answered { .. }), "{seen:?}");
}

#[tokio::test]
async fn a_program_that_has_the_port_is_left_alone_and_probes_come_back_beside_it() {
    for address in [HERE, IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])] {
        let program = UdpSocket::bind((address, 0)).unwrap();
        let transport = Transport::Udp(program.local_addr().unwrap().port());
        let seen = datagram::check(address, transport, IMPATIENT).await;
        assert!(matches!(seen, Observation::TimedOut { .. }), "{seen:?}");
        let mut settings = settings([transport]);
        settings.addresses = vec![address];
        settings.peers.push("::1".parse::<IpAddr>().unwrap().into());
        let responder = Responder::open(settings, Bounds::default());
        assert_eq!(responder.opened(), [(address, transport, Opened::Raw)]);
        tokio::spawn(responder.serve());
        let seen = datagram::check(address, transport, LIMITS).await;
        assert!(matches!(seen, Observation::Answered { .. }), "{address}: {seen:?}");
    }
}

#[tokio::test]
async fn strangers_get_no_datagram() {
    let port = free_udp();
    let mut settings = settings([Transport::Udp(port)]);
    settings.peers = vec!["192.0.2.0/24".parse().unwrap()];
    serve(settings);
    let seen = datagram::check(HERE, Transport::Udp(port), IMPATIENT).await;
    assert!(matches!(seen, Observation::TimedOut { .. }), "{seen:?}");
}

#[tokio::test]
async fn ip_in_ip_needs_no_tunnel_device() {
    // Before: the kernel knows the protocol or does not, and nothing comes back.
    serve(settings([Transport::IpInIp]));
    let seen = datagram::check(HERE, Transport::IpInIp, LIMITS).await;
    assert!(matches!(seen, Observation::Answered { .. }), "{seen:?}");
}

#[tokio::test]
async fn the_path_mtu_of_loopback_is_that_of_its_interface() {
    let port = free_udp();
    serve(settings([Transport::Udp(port), Transport::IpInIp]));
    for transport in [Transport::Udp(port), Transport::IpInIp] {
        let seen = path_mtu::check(HERE, transport, LIMITS).await;
        // 65,536 in the interface, 65,535 in a packet.
        assert_eq!(seen, Observation::PathMtu { mtu: 65_535, interface: 65_535, by: None }, "{transport}");
    }
}

/// As where machines come and go: the next responder must find the ports free.
#[tokio::test]
async fn a_responder_that_was_stopped_has_left_every_port() {
    let transports = [Transport::Tcp(free_tcp()), Transport::Udp(free_udp())];
    for _ in 0..20 {
        let responder = Responder::open(settings(transports), Bounds::default());
        assert!(responder.opened().iter().all(|(_, _, how)| *how == Opened::Bound), "{responder:?}");
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(responder.serve_until(async { drop(stopped.await) }));
        let seen = datagram::check(HERE, transports[1], LIMITS).await;
        assert!(matches!(seen, Observation::Answered { .. }), "{seen:?}");
        drop(stop);
        assert!(serving.await.unwrap().is_none());
    }
}

#[tokio::test]
async fn ip_in_ip_is_answered_on_addresses_of_ipv4_and_asked_of_no_others() {
    let mut both = settings([Transport::IpInIp]);
    both.addresses.push(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]));
    let responder = Responder::open(both, Bounds::default());
    assert_eq!(responder.opened(), [(HERE, Transport::IpInIp, Opened::Raw)], "nothing is called silent");
}
