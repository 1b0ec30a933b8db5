//! What an agent of one cluster can do to the connections of others: nothing.

use portico_lab::frames::{self, INITIAL_WINDOW_SIZE, RawClient, kind};

use super::support::{agent_tls, beside, is_sent_away, next_of};
use crate::common::wait_until;
use crate::proof::{Usage, authority};

/// Opens so many streams to the API server of cluster b.
fn open(client: &mut RawClient, streams: u32) {
    for number in 0..streams {
        client.send(&frames::connect(2 * number + 1, &authority("b"), None)).unwrap();
    }
    // The last to be answered is not the last that was asked for.
    let mut open = 0;
    while open < streams {
        open += u32::from(client.receive().unwrap().unwrap().kind == kind::HEADERS);
    }
}

#[test]
fn a_tenant_that_opens_and_closes_the_windows_of_its_streams_delays_nobody() {
    let limited = beside(|site, limited| {
        let tls = &agent_tls(site, Some("b"));
        let toggle: Vec<u8> =
            [65_535, 0].map(|size| frames::settings(&[(INITIAL_WINDOW_SIZE, size)])).concat();
        for _ in 0..3 {
            let mut client = limited.opened(tls, &[]);
            open(&mut client, 500);
            // Fails once it is sent away, which closes its connection.
            while client.send(&toggle.repeat(100)).is_ok() {}
        }
    });
    wait_until("each is a flood", || limited.floods() == 3);
}

#[test]
fn frames_that_a_tenant_never_completes_cost_its_own_connections() {
    const CLIENTS: usize = 1_500;
    let limited = beside(|site, limited| {
        let tls = &agent_tls(site, Some("b"));
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut client = limited.opened(tls, &[]);
            client.send(&frames::connect(1, &authority("b"), None)).unwrap();
            assert_eq!(next_of(&mut client, 1).payload.first(), Some(&0x88));
            // 180 MiB in all.
            let most = [&frames::header(120 * 1024, kind::DATA, 0, 1)[..], &vec![0; 120 * 1024 - 1]].concat();
            client.send(&most).unwrap();
            clients.push(client);
        }
        // The first make room for the last.
        assert!(is_sent_away(&mut clients[0]));
    });
    let usage = Usage(limited.gateway.process.id());
    wait_until("what the attack took is given back", || usage.data_kb() < 24 << 10);
}
