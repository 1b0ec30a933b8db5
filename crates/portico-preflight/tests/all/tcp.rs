//! TCP: ports that accept and that refuse, and what a responder does for which peer.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use portico_preflight::check::{back, dns, tcp};
use portico_preflight::responder::{Bounds, Opened, Responder};
use portico_preflight::{Observation, Transport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use crate::{HERE, IMPATIENT, LIMITS, free_tcp, free_udp, serve, settings, tcp_addresses};

#[tokio::test]
async fn a_responder_is_told_from_a_service_that_waits_for_its_client() {
    let address = serve(settings([Transport::Tcp(free_tcp())]))[0];
    let greeting = tcp::check(address, LIMITS).await;
    assert!(matches!(greeting.seen, Observation::Answered { .. }), "{greeting:?}");
    let responder = greeting.responder.unwrap();
    assert!(responder.ahead_millis.abs() < 60_000, "the same clock: {responder:?}");

    let service = TcpListener::bind((HERE, 0)).await.unwrap();
    let greeting = tcp::check(service.local_addr().unwrap(), IMPATIENT).await;
    assert!(matches!(greeting.seen, Observation::Answered { .. }), "{greeting:?}");
    assert_eq!(greeting.responder, None);
}

#[tokio::test]
async fn a_responder_may_say_any_time() {
    let other = TcpListener::bind((HERE, 0)).await.unwrap();
    let address = other.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = other.accept().await {
            let banner = format!("portico-preflight/1 time={} silent=\n", i64::MIN);
            stream.write_all(banner.as_bytes()).await.unwrap();
        }
    });
    let greeting = tcp::check(address, LIMITS).await;
    assert_eq!(greeting.responder.unwrap().ahead_millis, i64::MIN);
}

#[tokio::test]
async fn a_port_without_a_listener_refuses_and_one_that_hangs_up_resets() {
    let closed = SocketAddr::new(HERE, free_tcp());
    assert_eq!(tcp::check(closed, LIMITS).await.seen, Observation::Refused { by: None });
    let listener = TcpListener::bind((HERE, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    assert_eq!(tcp::check(address, LIMITS).await.seen, Observation::Reset);
}

#[tokio::test]
async fn strangers_get_no_word_and_are_counted() {
    let mut settings = settings([Transport::Tcp(free_tcp())]);
    settings.peers = vec!["192.0.2.0/24".parse().unwrap()];
    let responder = Responder::open(settings, Bounds::default());
    let (address, counts) = (tcp_addresses(&responder)[0], responder.counts());
    tokio::spawn(responder.serve());
    assert_eq!(tcp::check(address, LIMITS).await.seen, Observation::Reset);
    assert_eq!((counts.strangers.load(Relaxed), counts.answered.load(Relaxed)), (1, 0));
}

#[tokio::test]
async fn a_connection_above_the_bound_is_closed_and_counted() {
    let bounds = Bounds { connections: 1, ..Bounds::default() };
    let responder = Responder::open(settings([Transport::Tcp(free_tcp())]), bounds);
    let (address, counts) = (tcp_addresses(&responder)[0], responder.counts());
    tokio::spawn(responder.serve());
    let mut held = TcpStream::connect(address).await.unwrap();
    held.read_u8().await.unwrap();
    assert_eq!(tcp::check(address, LIMITS).await.seen, Observation::Reset);
    assert_eq!(counts.over_bounds.load(Relaxed), 1);
}

#[tokio::test]
async fn the_way_back_is_tried_towards_the_asker_and_only_what_was_agreed_on() {
    let (udp, tcp) = (free_udp(), free_tcp());
    // Ours: what the other side is to try.
    serve(settings([Transport::Udp(udp)]));
    let mut other = settings([Transport::Tcp(tcp)]);
    other.may_try = [Transport::Udp(udp), Transport::Tcp(tcp)].into();
    let via = serve(other);
    let seen = back::check(&via, Transport::Udp(udp), LIMITS).await;
    assert!(matches!(seen, Observation::Answered { .. }), "{seen:?}");
    let seen = back::check(&via, Transport::Tcp(tcp), LIMITS).await;
    assert!(matches!(seen, Observation::Answered { .. }), "{seen:?}");
    let seen = back::check(&via, Transport::Tcp(22), LIMITS).await;
    assert!(matches!(&seen, Observation::NotTried { why } if why.contains("no tcp/22")), "{seen:?}");
}

#[tokio::test]
async fn without_a_responder_the_way_back_is_not_tried_and_the_remedy_is_named() {
    let service = TcpListener::bind((HERE, 0)).await.unwrap();
    let seen = back::check(&[service.local_addr().unwrap()], Transport::Udp(1), IMPATIENT).await;
    assert!(matches!(&seen, Observation::NotTried { why } if why.contains("--listen")), "{seen:?}");
}

#[tokio::test]
async fn a_tcp_port_of_another_program_is_left_to_it() {
    let other = TcpListener::bind((HERE, 0)).await.unwrap();
    let port = other.local_addr().unwrap().port();
    let responder = Responder::open(settings([Transport::Tcp(port)]), Bounds::default());
    assert_eq!(responder.opened(), [(HERE, Transport::Tcp(port), Opened::InUse)]);
}

/// A name server that refuses every question, as most do to strangers. The first one by UDP never arrives.
async fn name_server() -> SocketAddr {
    let tcp = TcpListener::bind((HERE, 0)).await.unwrap();
    let address = tcp.local_addr().unwrap();
    let udp = UdpSocket::bind(address).await.unwrap();
    let refuse = |question: &mut [u8]| question[2..4].copy_from_slice(&[0x81, 0x05]);
    tokio::spawn(async move {
        let mut bytes = [0; 512];
        udp.recv_from(&mut bytes).await.unwrap();
        while let Ok((length, from)) = udp.recv_from(&mut bytes).await {
            refuse(&mut bytes[..length]);
            udp.send_to(&bytes[..length], from).await.unwrap();
        }
    });
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut bytes = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut bytes).await.unwrap();
            refuse(&mut bytes);
            stream.write_u16(bytes.len() as u16).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        }
    });
    address
}

#[tokio::test]
async fn a_name_server_is_reached_by_udp_and_by_tcp_whatever_it_answers_and_though_a_packet_is_lost() {
    let server = name_server().await;
    for is_tcp in [false, true] {
        let seen = dns::check(server, is_tcp, LIMITS).await;
        assert!(matches!(seen, Observation::Answered { .. }), "{is_tcp}: {seen:?}");
    }
    let closed = SocketAddr::new(HERE, free_udp());
    assert_eq!(dns::check(closed, false, LIMITS).await, Observation::Refused { by: Some(HERE) });
}
