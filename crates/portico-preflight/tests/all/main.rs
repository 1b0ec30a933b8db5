//! Checks and responder over real sockets of this machine.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod datagrams;
mod tcp;
mod tls;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use portico_preflight::Transport;
use portico_preflight::check::Limits;
use portico_preflight::responder::{Bounds, Opened, Responder, Settings};

/// This machine.
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Patient with what must come. What must not come is never waited for in full: see [`IMPATIENT`].
const LIMITS: Limits = Limits { answer: Duration::from_secs(20), banner: Duration::from_secs(20) };

/// For checks that must time out.
const IMPATIENT: Limits = Limits { answer: Duration::from_millis(300), banner: Duration::from_millis(100) };

/// A responder for everybody on this machine.
fn settings(transports: impl IntoIterator<Item = Transport>) -> Settings {
    Settings {
        addresses: vec![HERE],
        transports: transports.into_iter().collect(),
        peers: vec!["127.0.0.0/8".parse().unwrap()],
        may_try: BTreeSet::new(),
        limits: LIMITS,
    }
}

/// Serves until the test ends. Returns the addresses for TCP.
fn serve(settings: Settings) -> Vec<SocketAddr> {
    let responder = Responder::open(settings, Bounds::default());
    let addresses = tcp_addresses(&responder);
    tokio::spawn(responder.serve());
    addresses
}

/// Where a responder listens for TCP with sockets of its own.
fn tcp_addresses(responder: &Responder) -> Vec<SocketAddr> {
    let at = |(address, transport, how): &(IpAddr, Transport, Opened)| match (transport, how) {
        (Transport::Tcp(port), Opened::Bound) => Some(SocketAddr::new(*address, *port)),
        _ => None,
    };
    responder.opened().iter().filter_map(at).collect()
}

/// A TCP port that is free now.
fn free_tcp() -> u16 {
    TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap().port()
}

/// A UDP port that is free now.
fn free_udp() -> u16 {
    UdpSocket::bind((HERE, 0)).unwrap().local_addr().unwrap().port()
}
