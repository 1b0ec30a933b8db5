//! Whatever a server sends, in any order: the agent goes on, and nothing is left.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use portico_konnectivity::agent::Policy;
use portico_lab::leaks::run_alone;
use portico_wire::konnectivity::{DialId, Packet};
use proptest::prelude::*;
use tokio::time::timeout;

use super::support::*;
use crate::any_packet::{CHECK, bytes, packet, run_any};

/// In place of the address of an endpoint that echoes, which only the run knows.
const ECHO: &str = "echo";

/// And those of dials that fail: by the policy, by the address, by its name.
const ADDRESSES: &[&str] = &[ECHO, ECHO, "127.0.0.2:9", "nowhere", "nowhere.invalid:9"];

/// As long as a step waits for what may not come.
const MOMENT: Duration = Duration::from_millis(1);

#[derive(Debug, Clone)]
enum Step {
    Sends(Packet),
    /// Says what need be no packet, and then leaves. The agent comes back.
    Says(Vec<u8>),
    Reads,
    /// Accepts a stream that the agent has opened, and sends so many bytes there.
    Accepts(usize),
    /// Resets the stream that was accepted last.
    Resets,
    /// Leaves a stream that the agent has opened without an answer.
    Drops,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => packet(ADDRESSES).prop_map(Step::Sends),
        1 => bytes().prop_map(Step::Says),
        2 => Just(Step::Reads),
        3 => (0..5_000_usize).prop_map(Step::Accepts),
        1 => Just(Step::Resets),
        1 => Just(Step::Drops),
    ]
}

#[test]
fn whatever_a_server_sends_the_agent_goes_on_and_nothing_is_left() {
    run_alone("agent::any_sequence::whatever_a_server_sends").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[test]
fn whatever_a_server_sends() {
    for says in [Says::upstream("s"), Says::ours("s")] {
        run_any(step(), |steps| run(steps, says.clone()));
    }
}

async fn run(steps: Vec<Step>, says: Says) {
    let has_streams = says.has_streams;
    let (agent, mut server, mut connect) = connected_with(says, |mut settings| {
        settings.policy = Policy::new(["127.0.0.1/32".parse().unwrap()]);
        settings
    })
    .await;
    let (endpoint, _task) = echo().await;
    let mut accepted = Vec::new();
    for step in steps {
        do_step(&mut server, &mut connect, endpoint, &mut accepted, step).await;
    }

    connect.dial(endpoint, 1_000);
    if has_streams {
        carries_a_stream(&mut connect).await;
    } else {
        carries_packets(&mut connect).await;
    }
    drop((connect, accepted));
    until(|| agent.connections().is_empty() && agent.dialling() == 0).await;
    until(|| agent.settings().memory.held() == 0).await;
}

async fn do_step(
    server: &mut Server,
    connect: &mut Connect,
    endpoint: SocketAddr,
    accepted: &mut Vec<SendStream<Bytes>>,
    step: Step,
) {
    match step {
        Step::Sends(mut packet) => {
            if let Packet::DialRequest { address, .. } = &mut packet
                && address == ECHO
            {
                *address = endpoint.to_string();
            }
            connect.send(&packet);
        }
        Step::Says(bytes) => {
            connect.to_agent.send_data(bytes.into(), false).unwrap();
            while let Ok(Some(_)) = timeout(MOMENT, connect.next()).await {}
            connect.to_agent.send_reset(h2::Reason::CANCEL);
            *connect = server.connect().await;
        }
        Step::Reads => while timeout(MOMENT, connect.packet()).await.is_ok() {},
        Step::Accepts(len) => {
            // The agent may have reset it already.
            if let Ok(Some(stream)) = timeout(MOMENT, connect.streams.recv()).await
                && let Ok((mut to_agent, _)) = stream.try_accept()
            {
                let _ = to_agent.send_data(vec![b'x'; len].into(), len.is_multiple_of(2));
                accepted.push(to_agent);
            }
        }
        Step::Resets => {
            if let Some(mut stream) = accepted.pop() {
                stream.send_reset(h2::Reason::CANCEL);
            }
        }
        Step::Drops => drop(timeout(MOMENT, connect.streams.recv()).await),
    }
}

/// The agent answers dial 1,000 with a connection, and carries bytes on it.
async fn carries_packets(connect: &mut Connect) {
    let connection = loop {
        if let Packet::DialResponse { dial: DialId(1_000), result } = connect.packet().await {
            break result.unwrap();
        }
    };
    connect.data(connection, &CHECK);
    let mut echoed = Vec::new();
    while echoed.len() < CHECK.len() {
        if let Packet::Data { connection: of, payload } = connect.packet().await
            && of == connection
        {
            echoed.extend_from_slice(&payload);
        }
    }
    assert_eq!(echoed, CHECK);
}

/// The agent opens a stream for dial 1,000, and carries bytes on it.
async fn carries_a_stream(connect: &mut Connect) {
    let stream = loop {
        let stream = patiently(connect.streams.recv()).await.unwrap();
        if stream.dial() == DialId(1_000) {
            break stream;
        }
    };
    let (mut to_agent, mut from_agent) = stream.accept();
    to_agent.send_data(CHECK, false).unwrap();
    let mut echoed = Vec::new();
    while echoed.len() < CHECK.len() {
        echoed.extend_from_slice(&patiently(from_agent.data()).await.unwrap().unwrap());
    }
    assert_eq!(echoed, CHECK);
}
