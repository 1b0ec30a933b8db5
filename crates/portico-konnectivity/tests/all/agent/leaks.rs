//! After thousands of dials that failed, were abandoned or ended in every way, nothing is left.

use bytes::Bytes;
use portico_lab::leaks::{descriptors, run_alone, tasks};
use portico_lab::long_form;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};

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
    run_alone("agent::leaks::dials_that_end_in_every_way").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[tokio::test]
async fn dials_that_end_in_every_way() {
    for says in [Says::upstream("s"), Says::ours("s")] {
        let has_streams = says.has_streams;
        let (agent, _server, mut connect) = connected(says).await;
        let endpoint = Endpoint::start().await;
        let gone = Endpoint::start().await.address();
        let before = counted();
        for round in 1..=rounds() / 2 {
            match (round % 5, has_streams) {
                (0, _) => {
                    connect.dial(gone, round);
                    while !is_refusal(&connect.packet().await, round) {}
                }
                (1, _) => {
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
        let settled = tokio::time::timeout(PATIENCE, async {
            while agent.dialling() > 0 || !agent.connections().is_empty() || counted() > before {
                drop(tokio::time::timeout(std::time::Duration::from_millis(10), endpoint.accept()).await);
            }
        });
        let settled = settled.await;
        assert!(settled.is_ok(), "{before:?} before, {:?} after", counted());
        assert_eq!(agent.settings().memory.held(), 0);
    }
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
            // Of an abandoned dial that had succeeded.
            Packet::DialResponse { .. } | Packet::CloseResponse { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    let mut sockets = accepted(endpoint).await;
    match way {
        2 => connect.send(&Packet::CloseRequest(connection)),
        3 => sockets.clear(),
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
    let sockets = accepted(endpoint).await;
    let (mut send, mut receive) = stream.accept();
    match way {
        2 => send.send_reset(h2::Reason::CANCEL),
        3 => drop(send.send_data(Bytes::new(), true)),
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
