//! After thousands of dials that failed, were abandoned or ended in every way, nothing is left.

use std::sync::atomic::Ordering::Relaxed;

use portico_konnectivity::server::Mode;
use portico_lab::leaks::{descriptors, run_alone, tasks};
use portico_lab::long_form;
use portico_wire::konnectivity::{ConnectId, Packet};
use tokio::io::AsyncWriteExt;

use super::support::*;

/// Dials: 100,000 in the long form.
fn rounds() -> i64 {
    long_form(5_000, 100_000)
}

/// Descriptors and tasks.
fn counted() -> (usize, usize) {
    (descriptors().unwrap(), tasks())
}

/// In a process without other tests, whose descriptors it would count.
#[test]
fn nothing_is_left_after_dials_that_ended_in_every_way() {
    run_alone("server::leaks::dials_that_end_in_every_way").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[tokio::test]
async fn dials_that_end_in_every_way() {
    for is_native in [false, true] {
        let rig = Rig::start(Mode::HttpConnect).await;
        let mut agent = rig.agent_with("a", "", is_native).await;
        let before = counted();
        for round in 0..rounds() / 2 {
            one(&rig, &mut agent, round, is_native).await;
        }
        let counters = rig.status.counters();
        until(|| rig.status.established() == 0 && counters.http_connections.load(Relaxed) == 0).await;
        until(|| counted() <= before).await;
        assert_eq!((counters.pending.load(Relaxed), rig.status.memory().0), (0, 0));
        assert_eq!(rig.status.agents()[0].dials, 0);
        assert!(rig.status.connections().is_empty());
    }
}

async fn one(rig: &Rig, agent: &mut Agent, round: i64, is_native: bool) {
    let mut frontend = rig.http("node:9").await;
    let dial = loop {
        match agent.stream.packet().await {
            Packet::DialRequest { dial, .. } => break dial,
            Packet::CloseRequest(connection) => {
                agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
            }
            _ => {}
        }
    };
    match round % 5 {
        0 => agent.stream.send(Packet::DialResponse { dial, result: Err("refused".into()) }).await,
        1 => drop(frontend),
        way if is_native => {
            let (stream, _) = tokio::join!(agent.opens(dial), head(&mut frontend));
            let mut stream = stream.unwrap();
            match way {
                2 => stream.to_server.send_reset(h2::Reason::CANCEL),
                3 => drop(frontend),
                _ => frontend.write_all(b"bytes").await.unwrap(),
            }
        }
        way => {
            let connection = ConnectId(round + 1);
            agent.stream.send(Packet::DialResponse { dial, result: Ok(connection) }).await;
            head(&mut frontend).await;
            match way {
                2 => agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await,
                3 => drop(frontend),
                _ => frontend.write_all(b"bytes").await.unwrap(),
            }
        }
    }
}
