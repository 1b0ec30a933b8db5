//! Connections that say nothing, or not enough, of where they want to go: on every kind of listener.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::support::{Limited, beside, beside_on, connect_from};
use crate::common::PATIENCE;
use crate::proof::{LOOPBACK, echo, hello, manifest, report};
use crate::secure::SecureSite;

/// Connections of a flood: each could hold 16 KiB, together more than the gateway has.
const FLOOD: u32 = 16_000;
/// Connections of the flood for each honest one.
const TO_ONE: u32 = 350;

/// Opens them, each to `address` with the first bytes that `begin` has for its number, while clients of
/// `honest_at` send `honest`, whose `echoed` end comes back. All of them are served.
fn flood<'a>(
    begin: impl Fn(u32) -> (SocketAddr, &'a [u8]),
    honest_at: SocketAddr,
    honest: &[u8],
    echoed: &[u8],
) {
    let (mut held, mut served) = (Vec::new(), 0);
    for number in 0..FLOOD {
        let (to, first) = begin(number);
        // Fails for those that were closed meanwhile, which is the point.
        held.extend(connect_from(number, to).filter(|mut stream| stream.write_all(first).is_ok()));
        if number % TO_ONE == TO_ONE - 1 {
            let mut stream = TcpStream::connect(honest_at).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(honest).unwrap();
            let mut answer = vec![0; echoed.len()];
            stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("honest client {served}: {error}"));
            assert_eq!(answer, echoed);
            served += 1;
        }
        if held.len() > 4_000 {
            held.drain(..1_000);
        }
    }
    report(format_args!("{served} served"));
    assert_eq!(served, FLOOD / TO_ONE);
}

/// The log warns that there are too many.
fn has_warned(limited: &Limited) {
    let said = limited.gateway.process.said();
    assert!(said.contains("the oldest are closed"), "{said}");
}

#[test]
fn hellos_that_never_end_are_bounded_and_honest_ones_beside_them_are_served() {
    let limited = beside(|_, limited| {
        // All but the last byte of a record that begins a hello of 16 KiB.
        let unfinished = [&[22, 3, 1, 0x3f, 0xf0, 1, 0, 0x3f, 0xec][..], &[7; 16_000]].concat();
        let listeners = [limited.sni, limited.gateway.tunnel_address()];
        let hello = hello("a");
        flood(|number| (listeners[number as usize % 2], &unfinished), limited.sni, &hello, &hello);
    });
    has_warned(&limited);
}

#[test]
fn clients_of_a_node_port_that_send_half_a_proxy_header_are_bounded_and_honest_ones_are_served() {
    const PORT: u16 = 30_446;
    let site = SecureSite::new();
    site.manifests.put("p", &manifest("p", Some(PORT), echo(LOOPBACK)));
    let flags = ["--proxy-protocol", "node-port=required", "--trusted-proxy", "127.0.0.0/8"];
    let limited = beside_on(&site, &flags, |_, limited| {
        let port = limited.node_port(PORT);
        let halves = [&b""[..], b"PROXY TCP4 198.51.100.7 "];
        let honest = b"PROXY TCP4 198.51.100.7 203.0.113.1 40000 443\r\nping";
        flood(|number| (port, halves[number as usize % 2]), port, honest, b"ping");
    });
    has_warned(&limited);
}

#[test]
fn tls_handshakes_that_never_end_hold_no_more_than_a_slot_counts() {
    beside(|_, limited| {
        let before = limited.peak();
        // A hello of 65,000 bytes, in records of 4,000.
        let hello = [&[1, 0, 0xfd, 0xe8][..], &[0; 65_000]].concat();
        let records = hello.chunks(4_000).flat_map(|part| {
            let length = u16::try_from(part.len()).unwrap().to_be_bytes();
            [&[22, 3, 1][..], &length, part].concat()
        });
        let records: Vec<u8> = records.collect();
        let (to, mut held) = (limited.gateway.tunnel_address(), Vec::new());
        for number in 0..4_000 {
            let Some(mut stream) = connect_from(number, to) else { continue };
            // Half of them stop at what they may send, and half do not. Those fail once they are closed.
            let most = if number % 2 == 0 { 20_000 } else { records.len() };
            let _ = stream.write_all(&records[..most]);
            held.push(stream);
        }
        assert!(held.len() > 3_000, "only {} connections were made", held.len());
        let slots = limited.gateway.metric("portico_limit{of=\"handshakes\"}");
        let grown = limited.peak().saturating_sub(before) >> 10;
        report(format_args!("{grown} KiB for {slots} slots"));
        // What waits in the kernel to be accepted counts, too. rustls by itself would keep 64 KiB.
        assert!(grown < 48 * slots, "{grown} KiB");
    });
}
