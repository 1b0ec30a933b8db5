//! Packets that cross, and what comes after the end: sequences that upstream's protocol allows and that its
//! server loses connections or time by.

use portico_konnectivity::server::Mode;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};

use super::support::*;

async fn rig() -> (Rig, Agent, Stream) {
    let rig = Rig::start(Mode::Grpc).await;
    let (agent, frontend) = (rig.agent("a").await, rig.proxy().await);
    (rig, agent, frontend)
}

/// An established connection: its number for the frontend, and for the agent.
async fn established(agent: &mut Agent, frontend: &mut Stream) -> (ConnectId, ConnectId) {
    frontend.asks("node:10250", 77).await;
    let of_agent = agent.accepts("node:10250", 1).await;
    match frontend.packet().await {
        Packet::DialResponse { dial: DialId(77), result: Ok(of_frontend) } => (of_frontend, of_agent),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_dial_that_is_cancelled_just_when_it_succeeded_is_closed() {
    let (rig, mut agent, mut frontend) = rig().await;
    let (_, of_agent) = established(&mut agent, &mut frontend).await;
    frontend.send(Packet::CloseDial(DialId(77))).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(of_agent));
    until(|| rig.status.established() == 0).await;
}

#[tokio::test]
async fn what_a_frontend_sends_after_close_req_is_discarded() {
    let (rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, of_agent) = established(&mut agent, &mut frontend).await;
    frontend.send(Packet::CloseRequest(of_frontend)).await;
    frontend.data(of_frontend, b"late").await;
    frontend.send(Packet::CloseRequest(of_frontend)).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(of_agent));
    let mut other = rig.proxy().await;
    other.asks("node:1", 5).await;
    agent.asked("node:1").await;
    let closed = Packet::CloseResponse { connection: of_frontend, error: String::new() };
    assert_eq!(frontend.packet().await, closed);
}

#[tokio::test]
async fn close_req_is_answered_although_the_agent_is_gone() {
    let (rig, mut agent, mut frontend) = rig().await;
    let (of_frontend, _) = established(&mut agent, &mut frontend).await;
    drop(agent);
    frontend.send(Packet::CloseRequest(of_frontend)).await;
    let closed = Packet::CloseResponse { connection: of_frontend, error: String::new() };
    assert_eq!(frontend.packet().await, closed, "kube-apiserver waits ten seconds for it");
    until(|| rig.status.established() == 0).await;
}

#[tokio::test]
async fn a_dial_that_its_agent_abandons_is_reported_to_the_frontend() {
    let (_rig, mut agent, mut frontend) = rig().await;
    frontend.asks("node:10250", 77).await;
    let dial = agent.asked("node:10250").await;
    agent.stream.send(Packet::CloseDial(dial)).await;
    assert!(matches!(frontend.packet().await, Packet::DialResponse { dial: DialId(77), result: Err(_) }));
}

#[tokio::test]
async fn a_dial_without_a_connection_in_its_answer_is_a_failure() {
    let (rig, mut agent, mut frontend) = rig().await;
    frontend.asks("node:10250", 77).await;
    let dial = agent.asked("node:10250").await;
    agent.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(0)) }).await;
    assert!(matches!(frontend.packet().await, Packet::DialResponse { dial: DialId(77), result: Err(_) }));
    let counted = rig.status.counters().failures().find(|(reason, _)| *reason == "unrecognized_response");
    assert_eq!(counted, Some(("unrecognized_response", 1)));
}

#[tokio::test]
async fn each_stream_of_a_frontends_connection_has_a_connection_of_its_own() {
    let (rig, mut agent, mut first) = rig().await;
    // As the reusable tunnel of later client libraries has it.
    let mut second = first.beside().await;
    let (of_first, first_of_agent) = established(&mut agent, &mut first).await;
    second.asks("node:2", 78).await;
    let second_of_agent = agent.accepts("node:2", 2).await;
    let Packet::DialResponse { dial: DialId(78), result: Ok(of_second) } = second.packet().await else {
        panic!("no connection")
    };
    assert_ne!(of_first, of_second);
    agent.stream.data(second_of_agent, b"second").await;
    assert_eq!(second.bytes(6).await, b"second");
    first.send(Packet::CloseRequest(of_first)).await;
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(first_of_agent));
    agent.stream.data(second_of_agent, b"goes on").await;
    assert_eq!(second.bytes(7).await, b"goes on");
    until(|| rig.status.established() == 1).await;
}
