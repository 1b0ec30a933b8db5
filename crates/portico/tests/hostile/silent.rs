//! Connections that say nothing, or not enough, of where they want to go.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use crate::common::PATIENCE;
use crate::proof::{hello, report};
use crate::secure::SecureSite;
use crate::support::{Bystander, Limited, SMALL};

/// Connections of the flood: each could hold 16 KiB, together more than the gateway has.
const FLOOD: u32 = 16_000;
/// Addresses they come from.
const SOURCES: u32 = 200;

/// A connection from one of many addresses.
fn connect_from(source: u32, to: SocketAddr) -> Option<TcpStream> {
    let from = Ipv4Addr::from_bits(Ipv4Addr::new(127, 77, 0, 1).to_bits() + source % SOURCES);
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
    bind(&socket, &SocketAddr::from((from, 0))).ok()?;
    connect(&socket, &to).ok()?;
    Some(socket.into())
}

#[test]
fn hellos_that_never_end_are_bounded_and_honest_ones_beside_them_are_served() {
    let site = SecureSite::new();
    let mut limited = Limited::start(&site, SMALL, &["--tunnel-client-ca", &site.pki.path("ca.crt")]);
    let gateway = &limited.gateway;
    let bystander = Bystander::start(&site, gateway, "a");
    // All but the last byte of a record that begins a hello of 16 KiB.
    let unfinished = [&[22, 3, 1, 0x3f, 0xf0, 1, 0, 0x3f, 0xec][..], &[7; 16_000]].concat();
    let hello = hello("a");
    let (mut held, mut honest) = (Vec::new(), 0);
    for number in 0..FLOOD {
        let to = if number % 2 == 0 { limited.sni } else { gateway.tunnel_address() };
        // Fails for those that were closed meanwhile, which is the point.
        held.extend(connect_from(number, to).filter(|mut stream| stream.write_all(&unfinished).is_ok()));
        if number % 350 == 349 {
            let mut stream = TcpStream::connect(limited.sni).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(&hello).unwrap();
            let mut answer = vec![0; hello.len()];
            stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("honest client {honest}: {error}"));
            honest += 1;
        }
        if held.len() > 4_000 {
            held.drain(..1_000);
        }
    }
    bystander.make(5);
    let seen = bystander.stop();
    report(format_args!("{honest} served, p99 {:?}, {} MiB", seen.p99(), limited.peak() >> 20));
    assert!(honest >= 45 && limited.lives() && limited.gateway.is_ready());
    let process = &mut limited.gateway.process;
    process.signal("TERM");
    let _ = process.wait_for("told to stop");
    let log = process.said();
    assert!(log.contains("the oldest are closed"), "{log}");
    assert!(log.lines().count() < 60, "what happens is said once: {log}");
}
