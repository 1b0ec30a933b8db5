//! What a client of the tunnel port can do before it has shown an identity that is accepted: next to nothing.
//! A small pod lives on, and a bystander's every request succeeds beside it.

use portico_lab::frames::{self, END_HEADERS, INITIAL_WINDOW_SIZE, kind};

use super::support::{agent_tls, beside, is_sent_away, next_of};
use crate::common::wait_until;
use crate::proof::{authority, report};

#[test]
fn a_gateway_in_256_mib_serves_a_bystander_and_refuses_a_client_without_an_identity() {
    beside(|site, limited| {
        let tls = &agent_tls(site, None);
        let mut client = limited.opened(tls, &[]);
        client.send(&frames::connect(1, &authority("a"), None)).unwrap();
        assert_eq!(next_of(&mut client, 1).kind, kind::HEADERS);
        assert_eq!(limited.gateway.metric("portico_tunnel_unproven_connections"), 1);
    });
}

#[test]
fn refusals_that_nobody_takes_hold_no_memory() {
    beside(|site, limited| {
        let tls = &agent_tls(site, None);
        let before = limited.peak();
        let mut clients = Vec::new();
        for _ in 0..500 {
            let mut client = limited.opened(tls, &[(INITIAL_WINDOW_SIZE, 0)]);
            // As many as are taken at once.
            for number in 0..25 {
                client.send(&frames::connect(2 * number + 1, &authority("a"), None)).unwrap();
            }
            clients.push(client);
        }
        // Each is whole without a window.
        for client in &mut clients {
            let answer = next_of(client, 1);
            assert_eq!((answer.kind, answer.flags), (kind::HEADERS, END_HEADERS | frames::END_STREAM));
        }
        let grown = limited.peak().saturating_sub(before) >> 10;
        report(format_args!("{grown} KiB for {} connections", clients.len()));
        assert!(grown < 96 * clients.len() as u64, "{grown} KiB");
    });
}

#[test]
fn requests_that_come_without_end_end_their_connection() {
    let limited = beside(|site, limited| {
        let tls = &agent_tls(site, None);
        for _ in 0..20 {
            let mut client = limited.opened(tls, &[(INITIAL_WINDOW_SIZE, 0)]);
            for number in 0..20_000 {
                // Fails once it is sent away, which closes its connection.
                if client.send(&frames::connect(2 * number + 1, &authority("a"), None)).is_err() {
                    break;
                }
            }
            assert!(is_sent_away(&mut client));
        }
    });
    assert!(limited.floods() >= 20);
}

#[test]
fn settings_that_open_and_close_the_window_delay_nobody() {
    let limited = beside(|site, limited| {
        let tls = &agent_tls(site, None);
        let open = frames::settings(&[(INITIAL_WINDOW_SIZE, 65_535)]);
        let close = frames::settings(&[(INITIAL_WINDOW_SIZE, 0)]);
        let storm = [open, close].concat().repeat(1_000);
        for _ in 0..60 {
            let mut client = limited.opened(tls, &[]);
            while client.send(&storm).is_ok() {}
        }
    });
    wait_until("each is a flood", || limited.floods() == 60);
}

#[test]
fn frames_that_make_a_library_complain_fill_no_log() {
    beside(|site, limited| {
        let tls = &agent_tls(site, None);
        let unasked = frames::frame(kind::PING, frames::ACK, 0, b"8 bytes!").repeat(200);
        for _ in 0..50 {
            let mut client = limited.opened(tls, &[]);
            client.send(&unasked).unwrap();
            client.send(&frames::connect(1, &authority("a"), None)).unwrap();
            assert_eq!(next_of(&mut client, 1).kind, kind::HEADERS);
        }
    });
}

#[test]
fn frames_that_never_complete_are_counted_and_bounded() {
    const CLIENTS: usize = 3_000;
    beside(|site, limited| {
        let tls = &agent_tls(site, None);
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let mut client = limited.opened(tls, &[]);
            let begun = match number % 3 {
                // DATA on a stream that is open; one byte is missing.
                0 => [
                    frames::connect(1, &authority("a"), None),
                    frames::header(16 * 1024, kind::DATA, 0, 1).to_vec(),
                    vec![0; 16 * 1024 - 1],
                ]
                .concat(),
                // A header block, and another piece of it.
                1 => [
                    frames::frame(kind::HEADERS, 0, 1, &frames::header_block(&[("a", "b")])),
                    frames::header(16 * 1024, kind::CONTINUATION, 0, 1).to_vec(),
                    vec![0; 16 * 1024 - 1],
                ]
                .concat(),
                // What a client that has authenticated may send.
                _ => frames::header(120 * 1024, kind::DATA, 0, 1).to_vec(),
            };
            // Fails for those that have been sent away already.
            let _ = client.send(&begun);
            clients.push(client);
        }
        let large = clients.iter_mut().skip(2).step_by(3);
        assert!(large.take(10).all(is_sent_away));
    });
}
