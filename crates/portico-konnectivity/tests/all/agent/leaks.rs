//! After thousands of dials that failed, were abandoned or ended in every way, nothing is left.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use portico_konnectivity::agent::{Agent, DialFailure, EndpointEnd, Policy, Settings};
use portico_lab::leaks::{descriptors, resident, run_alone, tasks};
use portico_lab::long_form;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use socket2::{Domain, Socket, Type};

use super::packets::hole;
use super::support::*;

/// Ways in which a dial or its connection ends by itself.
const WAYS: i64 = 7;

/// Dials that end in one way, with each make of servers.
fn rounds() -> i64 {
    long_form(360, 7_200)
}

/// Dials that end together with what they share: a limit in time or number, a server.
const TOGETHER: i64 = 20;

/// How much more the process may have resident after thousands of dials, the peers in this test included.
const MORE_RESIDENT: u64 = 4 << 20;

/// Descriptors and tasks.
fn counted() -> (usize, usize) {
    (descriptors().unwrap(), tasks())
}

/// Whether there are no more of either than before.
fn is_back_to(before: (usize, usize)) -> bool {
    let now = counted();
    now.0 <= before.0 && now.1 <= before.1
}

/// In a process without other tests, whose descriptors it would count.
#[test]
fn nothing_is_left_after_dials_that_ended_in_every_way() {
    run_alone("agent::leaks::dials_that_end_in_every_way").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[tokio::test]
async fn dials_that_end_in_every_way() {
    for says in [Says::upstream("s"), Says::ours("s")] {
        each_by_itself(says).await;
    }
    together().await;
}

/// Only this network may be dialled.
fn of_one_network(mut settings: Settings) -> Settings {
    settings.policy = Policy::new(["127.0.0.1/32".parse().unwrap()]);
    settings
}

async fn each_by_itself(says: Says) {
    let has_streams = says.has_streams;
    let (agent, _server, mut connect) = connected_with(says, of_one_network).await;
    let endpoint = Endpoint::start().await;
    // Bound and not listening: nobody else gets the port, and each dial is refused.
    let bound = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let gone = bound.local_addr().unwrap().as_socket().unwrap().to_string();
    let (before, mut warm) = (counted(), 0);
    for round in 0..rounds() * WAYS {
        if round == 20 * WAYS {
            warm = resident().unwrap();
        }
        match (round % WAYS, has_streams) {
            (way @ 0..3, _) => {
                let address = [&gone, "127.0.0.2:9", "nowhere.invalid:9"][usize::try_from(way).unwrap()];
                connect.dial(address, round);
                while !is_refusal(&connect.packet().await, round) {}
            }
            (3, _) => {
                connect.dial(endpoint.address(), round);
                connect.send(&Packet::CloseDial(DialId(round)));
            }
            (way, true) => {
                connect.dial(endpoint.address(), round);
                with_stream(&mut connect, &endpoint, round, way).await;
            }
            (way, false) => {
                connect.dial(endpoint.address(), round);
                with_packets(&mut connect, &endpoint, round, way).await;
            }
        }
    }
    nothing_is_left(&agent, &endpoint, before).await;
    let more = resident().unwrap().saturating_sub(warm);

    assert!(more < MORE_RESIDENT, "{more} bytes more");

    let rounds = rounds().unsigned_abs();
    // One that refuses, and one that has no address.
    assert_eq!(failures_of(&agent), BTreeMap::from([("unknown", 2 * rounds), ("not_allowed", rounds)]));
    assert_eq!(agent.counters().dials_abandoned.load(Relaxed), rounds);
    let mut ends = ends_of(&agent);
    // These are abandoned dials that had just succeeded.
    ends.remove("stopped");
    let expected = if has_streams {
        vec![("reset_by_server", rounds), ("closed_by_server", rounds), ("reset_by_endpoint", rounds)]
    } else {
        // CLOSE_RSP knows no difference between an end and a reset.
        vec![("closed_by_server", rounds), ("closed_by_endpoint", 2 * rounds)]
    };
    assert_eq!(ends, expected.into_iter().collect(), "streams: {has_streams}");
}

/// Dials without an answer, dials over the limit, and what ends with a server; both makes of servers at once.
async fn together() {
    let few = |mut settings: Settings| {
        settings.max_dials = u32::try_from(TOGETHER).unwrap();
        settings
    };
    let (of_upstream, _one, connect_of_upstream) = connected_with(Says::upstream("s"), few).await;
    let (of_ours, _other, connect_of_ours) = connected_with(Says::ours("s"), few).await;
    let (endpoint, before) = (Endpoint::start().await, counted());
    tokio::join!(
        end_together(&of_upstream, connect_of_upstream, false),
        end_together(&of_ours, connect_of_ours, true)
    );
    // Both have a server again.
    for agent in [&of_upstream, &of_ours] {
        until(|| agent.servers().len() == 1).await;
        nothing_is_left(agent, &endpoint, before).await;
    }
}

async fn end_together(agent: &Agent, mut connect: Connect, has_streams: bool) {
    let (_listener, _queued, hole) = hole();
    for dial in 1..=2 * TOGETHER {
        connect.dial(hole, dial);
    }
    for _ in 1..=2 * TOGETHER {
        let answer = connect.packet().await;
        assert!(matches!(answer, Packet::DialResponse { result: Err(_), .. }), "{answer:?}");
    }
    let each = TOGETHER.unsigned_abs();
    assert_eq!(failures_of(agent), BTreeMap::from([("timeout", each), ("limit", each)]));

    let endpoint = Endpoint::start().await;
    let mut streams = Vec::new();
    for dial in 1..=TOGETHER {
        connect.dial(endpoint.address(), dial);
        if has_streams {
            streams.push(patiently(connect.streams.recv()).await.unwrap().accept());
        } else {
            let answer = connect.packet().await;
            assert!(matches!(answer, Packet::DialResponse { result: Ok(_), .. }), "{answer:?}");
        }
    }
    connect.dial(hole, 0);
    until(|| agent.dialling() == 1 && agent.connections().len() == usize::try_from(TOGETHER).unwrap()).await;
    connect.to_agent.send_reset(h2::Reason::CANCEL);
    until(|| agent.dialling() == 0 && agent.connections().is_empty()).await;
    assert_eq!(ends_of(agent), BTreeMap::from([("server_lost", each)]), "streams: {has_streams}");
}

/// What abandoned dials have left in the endpoint's queue is taken out meanwhile.
async fn nothing_is_left(agent: &Agent, endpoint: &Endpoint, before: (usize, usize)) {
    let quiet = tokio::time::timeout(PATIENCE, async {
        while agent.dialling() > 0 || !agent.connections().is_empty() || !is_back_to(before) {
            drop(tokio::time::timeout(Duration::from_millis(10), endpoint.accept()).await);
        }
    });
    let quiet = quiet.await;
    assert!(quiet.is_ok(), "{before:?} before, {:?} after", counted());
    assert_eq!(agent.settings().memory.held(), 0);
}

fn failures_of(agent: &Agent) -> BTreeMap<&'static str, u64> {
    let counts = agent.counters().dial_failures.iter().map(|count| count.load(Relaxed));
    DialFailure::ALL.iter().map(|(_, name)| *name).zip(counts).filter(|(_, count)| *count > 0).collect()
}

fn ends_of(agent: &Agent) -> BTreeMap<&'static str, u64> {
    let counts = agent.counters().ends.iter().map(|count| count.load(Relaxed));
    EndpointEnd::ALL.iter().map(|(_, name)| *name).zip(counts).filter(|(_, count)| *count > 0).collect()
}

fn is_refusal(packet: &Packet, dial: i64) -> bool {
    matches!(packet, Packet::DialResponse { dial: DialId(refused), result: Err(_) } if *refused == dial)
}

/// The socket of the dial, which is the last in the listener's queue: abandoned ones may be before it.
async fn with_packets(connect: &mut Connect, endpoint: &Endpoint, dial: i64, way: i64) {
    let connection = loop {
        match connect.packet().await {
            Packet::DialResponse { dial: DialId(answered), result: Ok(connection) } if answered == dial => {
                break connection;
            }
            // The answer to an abandoned dial that had succeeded, or its end.
            Packet::DialResponse { .. } | Packet::CloseResponse { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    let mut sockets = accepted(endpoint).await;
    match way {
        4 => connect.send(&Packet::CloseRequest(connection)),
        5 => sockets.clear(),
        _ => {
            connect.data(connection, b"bytes");
            sockets.iter().for_each(|socket| socket.set_zero_linger().unwrap());
            sockets.clear();
        }
    }
    loop {
        match connect.packet().await {
            Packet::CloseResponse { connection: ConnectId(closed), .. } if closed == connection.0 => return,
            _ => {}
        }
    }
}

async fn with_stream(connect: &mut Connect, endpoint: &Endpoint, dial: i64, way: i64) {
    let stream = loop {
        let stream = patiently(connect.streams.recv()).await.unwrap();
        if stream.dial() == DialId(dial) {
            break stream;
        }
    };
    let mut sockets = accepted(endpoint).await;
    let (mut send, mut receive) = stream.accept();
    match way {
        4 => {
            // Once the agent carries: a reset overtakes the answer to its request.
            sockets.iter_mut().for_each(|socket| assert_eq!(socket.try_write(b"x").unwrap(), 1));
            patiently(receive.data()).await.unwrap().unwrap();
            send.send_reset(h2::Reason::CANCEL);
        }
        5 => drop(send.send_data(Bytes::new(), true)),
        _ => sockets.iter().for_each(|socket| socket.set_zero_linger().unwrap()),
    }
    drop(sockets);
    while let Some(Ok(_)) = patiently(receive.data()).await {}
}

/// All connections that are there, one at least.
async fn accepted(endpoint: &Endpoint) -> Vec<tokio::net::TcpStream> {
    let mut sockets = vec![endpoint.accept().await];
    while let Ok(socket) = tokio::time::timeout(std::time::Duration::ZERO, endpoint.accept()).await {
        sockets.push(socket);
    }
    sockets
}
