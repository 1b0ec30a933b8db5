//! Frontends by gRPC, agents by packets: the sequences of upstream's server.

use std::time::Duration;

use portico_konnectivity::server::Mode;
use portico_lab::clock::Clock;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use tokio::time::Instant;

use super::support::*;

async fn rig() -> (Rig, Agent, Stream) {
    let rig = Rig::start(Mode::Grpc).await;
    let (agent, frontend) = (rig.agent("a").await, rig.proxy().await);
    (rig, agent, frontend)
}

fn closed(connection: ConnectId) -> Packet {
    Packet::CloseResponse { connection, error: String::new() }
}

fn refused(error: &str) -> Packet {
    Packet::DialResponse { dial: DialId(77), result: Err(error.to_owned()) }
}

#[tokio::test]
async fn a_dial_succeeds_carries_data_and_the_frontend_closes() {
    let (rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, of_agent) = established(&mut agent, &mut frontend, 1).await;
    frontend.data(of_frontend, b"request").await;
    assert_eq!(agent.stream.packet().await, Packet::Data { connection: of_agent, payload: "request".into() });
    agent.stream.data(of_agent, b"response").await;
    assert_eq!(frontend.bytes(8).await, b"response");
    frontend.send(Packet::CloseRequest(of_frontend)).await;
    assert_eq!(frontend.packet().await, closed(of_frontend));
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(of_agent));
    agent.stream.send(closed(of_agent)).await;
    assert_eq!(frontend.next().await, None, "the stream ends");
    until(|| rig.status.established() == 0).await;
}

#[tokio::test]
async fn bytes_that_wait_for_an_agent_count_in_the_memory_when_their_frontend_has_left() {
    const MESSAGE: usize = 60_000;
    let (rig, mut agent, mut frontend) = rig().await;
    let (connection, of_agent) = established(&mut agent, &mut frontend, 1).await;
    let uploads = tokio::spawn(async move {
        while frontend.try_send(Packet::Data { connection, payload: vec![1; MESSAGE].into() }).await {}
    });
    // The agent's window is used up, and more waits.
    until(|| rig.status.connections()[0].up >= AGENT_WINDOW + MESSAGE as u64).await;
    uploads.abort();
    assert!(uploads.await.unwrap_err().is_cancelled(), "it is stuck");
    until(|| rig.status.established() == 0).await;
    assert!(rig.status.memory().0 > MESSAGE, "{} bytes", rig.status.memory().0);
    while agent.stream.packet().await != Packet::CloseRequest(of_agent) {}
    until(|| rig.status.memory().0 == 0).await;
}

#[tokio::test]
async fn that_there_is_no_agent_any_more_is_reported_to_the_frontend() {
    let rig = Rig::with(Mode::Grpc, |settings| settings.dial_timeout = Duration::from_millis(50)).await;
    let (agent, mut frontend) = (rig.agent("a").await, rig.proxy().await);
    drop(agent);
    until(|| rig.status.agents().is_empty()).await;
    frontend.asks("node:10250", 77).await;
    assert_eq!(frontend.packet().await, refused("No agent available"));
}

#[tokio::test]
async fn a_dial_at_a_new_server_waits_for_the_first_agent_and_ends_with_its_frontend() {
    let rig = Rig::start(Mode::Grpc).await;
    let (mut left, mut stays) = (rig.proxy().await, rig.proxy().await);
    left.asks("node:10250", 77).await;
    until(|| rig.pending() == 1).await;
    stays.asks("node:10250", 77).await;
    until(|| rig.pending() == 2).await;
    drop(left);
    until(|| rig.pending() == 1).await;
    let mut agent = rig.agent("first").await;
    accepted(&mut agent, &mut stays, 1).await;
}

#[tokio::test]
async fn the_agents_error_reaches_the_frontend_as_it_is() {
    let (_rig, mut agent, mut frontend) = rig().await;
    frontend.asks("127.0.0.1:9", 77).await;
    let dial = agent.asked("127.0.0.1:9").await;
    let error = "dial tcp 127.0.0.1:9: connect: connection refused".to_owned();
    agent.stream.send(Packet::DialResponse { dial, result: Err(error.clone()) }).await;
    assert_eq!(frontend.packet().await, refused(&error));
}

#[tokio::test]
async fn a_dial_without_an_answer_ends_in_time_and_its_late_connection_is_closed() {
    let rig = Rig::with(Mode::Grpc, |settings| settings.dial_timeout = Duration::from_millis(50)).await;
    let (mut agent, mut frontend) = (rig.agent("a").await, rig.proxy().await);
    frontend.asks("node:10250", 77).await;
    let dial = agent.asked("node:10250").await;
    assert_eq!(frontend.packet().await, refused("timed out waiting for backend dial"));
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
    agent.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(1)) }).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(ConnectId(1)));
    let counters = rig.status.counters();
    let (_, times) = counters.dial_results().find(|(word, _)| *word == "backend_dial_timeout").unwrap();
    assert!(times.seconds() >= 0.05, "the time of a dial that failed is known: {}", times.seconds());
    assert_eq!(counters.dial_results().flat_map(|(_, times)| times.counts()).sum::<u64>(), 1);
}

#[tokio::test]
async fn a_dial_that_the_frontend_cancels_is_taken_back() {
    let (rig, mut agent, mut frontend) = rig().await;
    frontend.asks("node:10250", 77).await;
    let dial = agent.asked("node:10250").await;
    frontend.send(Packet::CloseDial(DialId(77))).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
    // An upstream agent ignores that, and answers late.
    agent.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(1)) }).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(ConnectId(1)));
    until(|| rig.status.agents()[0].dials == 0).await;
}

#[tokio::test]
async fn a_frontend_that_is_lost_while_it_dials_takes_the_dial_back() {
    let (_rig, mut agent, mut frontend) = rig().await;
    frontend.asks("node:10250", 77).await;
    let dial = agent.asked("node:10250").await;
    drop(frontend);
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
}

#[tokio::test]
async fn the_connection_of_a_frontend_that_is_lost_is_closed() {
    for is_reset in [true, false] {
        let (rig, mut agent, mut frontend) = rig().await;
        let (_, of_agent) = established(&mut agent, &mut frontend, 1).await;
        if is_reset {
            frontend.reset()
        } else {
            drop(frontend)
        }
        assert_eq!(agent.stream.packet().await, Packet::CloseRequest(of_agent));
        until(|| rig.status.established() == 0).await;
    }
}

#[tokio::test]
async fn all_that_the_endpoint_sent_comes_before_its_end() {
    let (rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, of_agent) = established(&mut agent, &mut frontend, 1).await;
    for _ in 0..40 {
        agent.stream.data(of_agent, &[7; 16_000]).await;
    }
    agent.stream.send(closed(of_agent)).await;
    assert_eq!(frontend.bytes(640_000).await.len(), 640_000);
    assert_eq!(frontend.packet().await, closed(of_frontend));
    until(|| rig.status.established() == 0).await;
}

#[tokio::test]
async fn the_loss_of_an_agent_is_reported_to_its_frontends() {
    // A dial that lost its agent waits for another within its time.
    let rig = Rig::with(Mode::Grpc, |settings| settings.dial_timeout = Duration::from_secs(5)).await;
    let (mut agent, mut frontend) = (rig.agent("a").await, rig.proxy().await);
    let (of_frontend, _) = established(&mut agent, &mut frontend, 1).await;
    let mut dials = rig.proxy().await;
    dials.asks("other:1", 77).await;
    agent.asked("other:1").await;
    drop(agent);
    assert_eq!(frontend.packet().await, closed(of_frontend));
    assert_eq!(dials.packet().await, refused("the agent was lost"));
}

#[tokio::test]
async fn a_dial_whose_agent_is_lost_goes_to_the_next() {
    let (rig, mut agent, mut frontend) = rig().await;
    frontend.asks("node:10250", 77).await;
    agent.asked("node:10250").await;
    let mut other = rig.agent("b").await;
    drop(agent);
    other.accepts("node:10250", 5).await;
    assert!(matches!(frontend.packet().await, Packet::DialResponse { dial: DialId(77), result: Ok(_) }));
}

#[tokio::test]
async fn a_dial_that_an_agent_does_not_answer_goes_to_the_next_in_time() {
    let rig = Rig::start(Mode::Grpc).await;
    let (mut a, mut b, mut frontend) = (rig.agent("a").await, rig.agent("b").await, rig.proxy().await);
    frontend.asks("node:10250", 77).await;
    let (dial, mut silent, mut other) = tokio::select! {
        dial = a.asked("node:10250") => (dial, a, b),
        dial = b.asked("node:10250") => (dial, b, a),
    };
    let (clock, begun) = (Clock::new(), Instant::now());
    clock.by(other.accepts("node:10250", 5)).await;
    assert_eq!(begun.elapsed().as_secs(), 10, "a third of the time");
    let answer = clock.by(frontend.packet()).await;
    assert!(matches!(answer, Packet::DialResponse { dial: DialId(77), result: Ok(_) }));
    assert_eq!(silent.stream.packet().await, Packet::CloseDial(dial), "it need not go on");
}

#[tokio::test]
async fn data_of_a_connection_that_is_unknown_closes_it_once() {
    let (_rig, mut agent, mut frontend) = rig().await;
    for _ in 0..50 {
        agent.stream.data(ConnectId(9), b"late").await;
    }
    agent.stream.data(ConnectId(0), b"none").await;
    frontend.asks("node:10250", 77).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(ConnectId(9)));
    agent.asked("node:10250").await;
    agent.stream.send(closed(ConnectId(9))).await;
    agent.stream.data(ConnectId(9), b"again").await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(ConnectId(9)), "once it was closed, anew");
}

#[tokio::test]
async fn what_comes_before_a_dial_is_answered_in_upstreams_words() {
    let (rig, _agent, mut frontend) = rig().await;
    frontend.data(ConnectId(4), b"early").await;
    let says = |error: &str| Packet::CloseResponse { connection: ConnectId(4), error: error.to_owned() };
    assert_eq!(frontend.packet().await, says("backend not initialized"));
    let mut frontend = rig.proxy().await;
    frontend.send(Packet::CloseRequest(ConnectId(4))).await;
    assert_eq!(frontend.packet().await, says("backend uninitialized"));
    let mut frontend = rig.proxy().await;
    let (protocol, address) = ("foo".to_owned(), "a:1".to_owned());
    frontend.send(Packet::DialRequest { protocol, address, dial: DialId(77) }).await;
    assert_eq!(frontend.packet().await, refused("dial: unknown network foo"));
}

#[tokio::test]
async fn two_frontends_with_one_number_do_not_clash() {
    let (rig, mut agent, mut first) = rig().await;
    let mut second = rig.proxy().await;
    let (of_first, first_of_agent) = established(&mut agent, &mut first, 1).await;
    let (of_second, second_of_agent) = established(&mut agent, &mut second, 2).await;
    agent.stream.data(second_of_agent, b"second").await;
    agent.stream.data(first_of_agent, b"first").await;
    assert_eq!(first.bytes(5).await, b"first");
    assert_eq!(second.bytes(6).await, b"second");
    assert_ne!(of_first, of_second);
}

#[tokio::test]
async fn a_frontend_that_names_another_connection_loses_its_own() {
    let (_rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, of_agent) = established(&mut agent, &mut frontend, 1).await;
    frontend.data(ConnectId(of_frontend.0 + 1), b"elsewhere").await;
    assert_eq!(frontend.packet().await, closed(of_frontend));
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(of_agent));
}

#[tokio::test]
async fn a_large_write_reaches_the_agent_in_packets_that_it_takes() {
    let (_rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, of_agent) = established(&mut agent, &mut frontend, 1).await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|index| index as u8).collect();
    let write = frontend.data(of_frontend, &sent);
    let read = async {
        let mut read = Vec::new();
        while read.len() < sent.len() {
            match agent.stream.packet().await {
                Packet::Data { connection, payload } => {
                    assert!(connection == of_agent && payload.len() <= 64 * 1024);
                    read.extend_from_slice(&payload);
                }
                other => panic!("{other:?}"),
            }
        }
        read
    };
    let (_, read) = tokio::join!(write, read);
    assert!(read == sent);
}

#[tokio::test]
async fn a_frontend_that_stops_reading_holds_up_no_other_and_loses_its_connection() {
    let (rig, mut agent, mut stuck) = rig().await;
    let mut other = rig.proxy().await;
    let (_, stuck_of_agent) = established(&mut agent, &mut stuck, 1).await;
    let (_, other_of_agent) = established(&mut agent, &mut other, 2).await;
    // Far more than all buffers and windows between.
    let mut rounds = 0;
    patiently(async {
        loop {
            rounds += 1;
            agent.stream.data(stuck_of_agent, &[1; 60_000]).await;
            agent.stream.data(other_of_agent, b"ping").await;
            assert_eq!(other.bytes(4).await, b"ping", "round {rounds}");
            if rig.status.established() == 1 {
                return;
            }
        }
    })
    .await;
    assert_eq!(rig.ends(), [("not_read", 1)]);
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(stuck_of_agent));
    drop(stuck);
    until(|| rig.status.memory().0 == 0).await;
}

#[tokio::test]
async fn of_frontends_that_stop_reading_one_goes_once_all_hold_what_the_server_may() {
    const MEMORY: usize = 1 << 20;
    let rig = Rig::with(Mode::Grpc, |settings| settings.memory = MEMORY).await;
    let mut agent = rig.agent("a").await;
    let mut stuck = Vec::new();
    for number in 1..=4 {
        // Its window is never given back.
        let mut frontend = rig.proxy().await;
        let (_, of_agent) = established(&mut agent, &mut frontend, number).await;
        stuck.push((frontend, of_agent));
    }
    // Each stays below its own buffer of a megabyte, and more than fits goes to all.
    let sends = async {
        loop {
            for (_, of_agent) in &stuck {
                agent.stream.data(*of_agent, &[1; 16_000]).await;
            }
            if rig.ends().iter().any(|(reason, _)| *reason == "memory") {
                return;
            }
        }
    };
    patiently(sends).await;
    assert!(rig.status.established() > 0, "not all of them");
    until(|| rig.status.memory().0 <= MEMORY).await;
}
