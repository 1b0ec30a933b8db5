//! With a server of ours: each connection has an HTTP/2 stream.

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use h2::Reason;
use portico_konnectivity::agent::EndpointEnd;
use portico_wire::konnectivity::{DialId, Packet};
use tokio::io::AsyncWriteExt;

use super::support::*;

/// A connection to an endpoint that the test plays.
async fn stream(
    connect: &mut Connect,
    endpoint: &Endpoint,
    dial: i64,
) -> (h2::SendStream<Bytes>, h2::RecvStream, tokio::net::TcpStream) {
    connect.dial(endpoint.address(), dial);
    let socket = endpoint.accept().await;
    let stream = patiently(connect.streams.recv()).await.unwrap();
    assert_eq!(stream.dial(), DialId(dial));
    let (send, receive) = stream.accept();
    (send, receive, socket)
}

/// The next bytes. An END_STREAM may come with none.
async fn received(receive: &mut h2::RecvStream) -> Option<Result<Bytes, h2::Error>> {
    loop {
        let data = patiently(receive.data()).await;
        if let Some(Ok(bytes)) = &data {
            receive.flow_control().release_capacity(bytes.len()).unwrap();
            if bytes.is_empty() {
                continue;
            }
        }
        return data;
    }
}

#[tokio::test]
async fn the_agent_answers_a_dial_with_a_stream_that_carries_its_bytes() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    assert_eq!(connect.metadata["portico-streams"], "1");
    let endpoint = Endpoint::start().await;
    let (mut send, mut receive, mut socket) = stream(&mut connect, &endpoint, -5).await;
    send.send_data(Bytes::from_static(b"request"), false).unwrap();
    assert_eq!(read(&mut socket, 7).await, b"request");
    // Half-close: the answer comes after the end of the request.
    send.send_data(Bytes::new(), true).unwrap();
    assert_eq!(read_to_end(&mut socket).await.unwrap(), b"");
    write(&mut socket, b"response").await;
    assert_eq!(received(&mut receive).await.unwrap().unwrap(), "response");
    socket.shutdown().await.unwrap();
    drop(socket);
    assert!(received(&mut receive).await.is_none());
    until(|| agent.connections().is_empty()).await;
    // No packet of the Connect stream reported it.
    connect.dial("nowhere", 2);
    assert!(matches!(connect.packet().await, Packet::DialResponse { dial: DialId(2), result: Err(_) }));
}

#[tokio::test]
async fn a_reset_passes_from_either_side_to_the_other() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    let endpoint = Endpoint::start().await;
    let (mut send, _receive, mut socket) = stream(&mut connect, &endpoint, 1).await;
    send.send_reset(Reason::CANCEL);
    assert!(read_to_end(&mut socket).await.is_err());
    let (_send, mut receive, socket) = stream(&mut connect, &endpoint, 2).await;
    socket.set_zero_linger().unwrap();
    drop(socket);
    let error = received(&mut receive).await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(Reason::CONNECT_ERROR));
    until(|| agent.connections().is_empty()).await;
}

#[tokio::test]
async fn a_connection_that_the_server_has_closed_ends_although_the_endpoint_stays() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    let endpoint = Endpoint::start().await;
    let (mut send, receive, mut socket) = stream(&mut connect, &endpoint, 1).await;
    send.send_data(Bytes::from_static(b"request"), true).unwrap();
    // h2 resets it without an error, behind what was sent.
    drop((send, receive));
    assert_eq!(read_to_end(&mut socket).await.unwrap(), b"request");
    until(|| agent.connections().is_empty()).await;
    let ends: Vec<_> = EndpointEnd::ALL
        .iter()
        .zip(&agent.counters().ends)
        .filter_map(|((_, name), count)| (count.load(Relaxed) > 0).then_some(*name))
        .collect();
    assert_eq!(ends, ["closed_by_server"]);
    assert!(socket.take_error().unwrap().is_none(), "with a FIN, and no reset");
}

#[tokio::test]
async fn an_upload_that_the_server_has_closed_behind_is_whole_although_the_endpoint_is_sending() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    let endpoint = Endpoint::start().await;
    let (mut send, mut receive, mut socket) = stream(&mut connect, &endpoint, 1).await;
    // The endpoint sends more than it gets rid of: the agent has used up the window and reads no more.
    let mut window = 65_535;
    while window > 0 {
        let _ = socket.try_write(&[0; 64 * 1024]);
        window -= patiently(receive.data()).await.unwrap().unwrap().len();
    }
    while socket.try_write(&[0; 64 * 1024]).is_ok() {}
    // More than the kernel takes for an endpoint that does not read: some of it still waits in the agent.
    let upload: Vec<u8> = (0..480 * 1024_u32).map(|index| index as u8).collect();
    send.send_data(upload.clone().into(), true).unwrap();
    drop((send, receive));
    // The agent reads on, or has closed: it knows of the end.
    patiently(socket.writable()).await.unwrap();
    assert!(read_to_end(&mut socket).await.unwrap() == upload, "with a FIN, and whole");
    until(|| agent.connections().is_empty()).await;
}

#[tokio::test]
async fn a_stopped_reader_holds_up_nobody() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    let endpoint = Endpoint::start().await;
    // Either end of four connections has stopped.
    let mut stopped = Vec::new();
    for dial in 1..=4 {
        let (mut send, receive, socket) = stream(&mut connect, &endpoint, dial).await;
        while socket.try_write(&[0; 64 * 1024]).is_ok() {
            tokio::task::yield_now().await;
        }
        send.send_data(vec![0; 4 << 20].into(), false).unwrap();
        stopped.push((send, receive, socket));
    }
    let (mut send, mut receive, mut socket) = stream(&mut connect, &endpoint, 5).await;
    for _ in 0..100 {
        send.send_data(Bytes::from_static(b"ping"), false).unwrap();
        assert_eq!(read(&mut socket, 4).await, b"ping");
        write(&mut socket, b"pong").await;
        assert_eq!(received(&mut receive).await.unwrap().unwrap(), "pong");
    }
    assert_eq!(agent.connections().len(), 5, "and is not closed either: it waits as with TCP");
}

#[tokio::test]
async fn a_dial_that_the_server_abandons_opens_no_stream_or_loses_it() {
    let (agent, _server, mut connect) = connected(Says::ours("s")).await;
    let endpoint = Endpoint::start().await;
    connect.dial(endpoint.address(), 1);
    let mut socket = endpoint.accept().await;
    // The server does not take the stream.
    let mut opened = patiently(connect.streams.recv()).await.unwrap();
    opened.respond.send_reset(Reason::CANCEL);
    assert_eq!(read_to_end(&mut socket).await.unwrap_or_default(), b"");
    until(|| agent.connections().is_empty()).await;
    let failures = agent.counters().dial_failures.iter().map(|count| count.load(Relaxed)).sum::<u64>();
    assert_eq!(failures, 0, "the endpoint is well");
    // It says so before there is an answer.
    connect.dial(endpoint.address(), 2);
    let mut socket = endpoint.accept().await;
    let _unanswered = patiently(connect.streams.recv()).await.unwrap();
    connect.send(&Packet::CloseDial(DialId(2)));
    assert_eq!(read_to_end(&mut socket).await.unwrap_or_default(), b"");
    until(|| agent.connections().is_empty()).await;
}
