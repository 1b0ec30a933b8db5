//! Agents of ours: each connection has an HTTP/2 stream of its own.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use portico_konnectivity::server::Mode;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio_rustls::client::TlsStream;

use super::support::*;

/// A connection that the agent has taken: the frontend, the head of its answer, and the stream.
async fn connected(rig: &Rig, agent: &mut Agent) -> (UnixStream, String, Native) {
    let mut frontend = rig.http("node:9").await;
    let dial = agent.asked("node:9").await;
    // The server answers the agent once the frontend has read its own answer.
    let (stream, head) = tokio::join!(agent.opens(dial), head(&mut frontend));
    (frontend, head, stream.unwrap())
}

/// Like [`connected`], with a frontend that uses gRPC.
async fn connected_by_grpc(rig: &Rig, agent: &mut Agent) -> (Stream, ConnectId, Native) {
    let mut frontend = rig.proxy().await;
    frontend.asks("node:9", 5).await;
    let dial = agent.asked("node:9").await;
    let stream = agent.opens(dial).await.unwrap();
    match frontend.packet().await {
        Packet::DialResponse { dial: DialId(5), result: Ok(connection) } => (frontend, connection, stream),
        other => panic!("{other:?}"),
    }
}

/// Waits for the end of the one connection there was.
async fn is_ended(rig: &Rig, reason: &str) {
    until(|| rig.status.established() == 0).await;
    assert_eq!(rig.ends(), [(reason, 1)]);
}

#[tokio::test]
async fn a_connection_carries_both_ways_and_half_closes() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    assert_eq!(agent.answer["portico-streams"], "1");
    let (mut frontend, _, mut stream) = connected(&rig, &mut agent).await;
    frontend.write_all(b"request").await.unwrap();
    frontend.shutdown().await.unwrap();
    assert_eq!(stream.bytes(7).await, b"request");
    assert!(stream.ends().await);
    stream.to_server.send_data(Bytes::from_static(b"response"), true).unwrap();
    assert_eq!(rest(&mut frontend).await, "response", "after the frontend's end");
    is_ended(&rig, "frontend_closed").await;
}

#[tokio::test]
async fn a_frontend_by_grpc_has_such_a_stream_too() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, connection, mut stream) = connected_by_grpc(&rig, &mut agent).await;
    frontend.data(connection, b"request").await;
    assert_eq!(stream.bytes(7).await, b"request");
    stream.to_server.send_data(Bytes::from_static(b"response"), false).unwrap();
    assert_eq!(frontend.bytes(8).await, b"response");
    frontend.send(Packet::CloseRequest(connection)).await;
    assert!(stream.ends().await, "what was sent before is whole");
    assert_eq!(stream.reset().await, h2::Reason::NO_ERROR, "the endpoint may stay");
    assert_eq!(frontend.packet().await, Packet::CloseResponse { connection, error: String::new() });
}

#[tokio::test]
async fn a_frontend_that_is_gone_ends_the_stream_of_an_endpoint_that_stays() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, _, mut stream) = connected(&rig, &mut agent).await;
    frontend.write_all(b"request").await.unwrap();
    drop(frontend);
    assert_eq!(stream.bytes(7).await, b"request", "what was sent before is whole");
    assert!(stream.ends().await);
    assert_eq!(stream.reset().await, h2::Reason::NO_ERROR);
    is_ended(&rig, "frontend_closed").await;
}

#[tokio::test]
async fn a_frontend_that_half_closes_and_goes_later_ends_the_stream_of_a_silent_endpoint() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, _, mut stream) = connected(&rig, &mut agent).await;
    frontend.shutdown().await.unwrap();
    assert!(stream.ends().await);
    // It still reads.
    stream.to_server.send_data(Bytes::from_static(b"response"), false).unwrap();
    assert_eq!(read(&mut frontend, 8).await, b"response");
    assert_eq!(rig.status.established(), 1);
    drop(frontend);
    assert_eq!(stream.reset().await, h2::Reason::NO_ERROR);
    is_ended(&rig, "frontend_closed").await;
}

#[tokio::test]
async fn an_endpoint_that_speaks_first_is_heard_once_the_frontend_has_read_the_head() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, answer, mut stream) = connected(&rig, &mut agent).await;
    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    stream.to_server.send_data(Bytes::from_static(b"greeting"), true).unwrap();
    assert_eq!(rest(&mut frontend).await, "greeting");
}

#[tokio::test]
async fn a_stream_for_no_dial_is_refused() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let (mut agent, mut other) = (rig.native_agent("a").await, rig.native_agent("b").await);
    assert!(agent.opens(DialId(1_000)).await.is_err());
    let _frontend = rig.http("node:9").await;
    let (asked, stranger) = tokio::select! {
        packet = agent.stream.packet() => (packet, &mut other),
        packet = other.stream.packet() => (packet, &mut agent),
    };
    let Packet::DialRequest { dial, .. } = asked else { panic!("{asked:?}") };
    assert!(stranger.opens(dial).await.is_err(), "another agent's dial");
}

#[tokio::test]
async fn a_dial_that_fails_and_one_that_is_cancelled_go_over_the_connect_stream() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let mut frontend = rig.http("node:9").await;
    let dial = agent.asked("node:9").await;
    agent.stream.send(Packet::DialResponse { dial, result: Err("no such host".to_owned()) }).await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 502"));
    let frontend = rig.http("node:9").await;
    let dial = agent.asked("node:9").await;
    drop(frontend);
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
    assert!(agent.opens(dial).await.is_err());
}

#[tokio::test]
async fn an_endpoint_that_resets_is_not_taken_for_an_agent_that_is_lost() {
    for mode in [Mode::HttpConnect, Mode::Grpc] {
        let rig = Rig::start(mode).await;
        let mut agent = rig.native_agent("a").await;
        match mode {
            Mode::HttpConnect => {
                let (mut frontend, _, mut stream) = connected(&rig, &mut agent).await;
                stream.to_server.send_reset(h2::Reason::CONNECT_ERROR);
                assert_eq!(rest(&mut frontend).await, "");
            }
            Mode::Grpc => {
                let (mut frontend, connection, mut stream) = connected_by_grpc(&rig, &mut agent).await;
                stream.to_server.send_reset(h2::Reason::CONNECT_ERROR);
                let packet = frontend.packet().await;
                assert!(matches!(packet, Packet::CloseResponse { connection: of, .. } if of == connection));
            }
        }
        is_ended(&rig, "endpoint_reset").await;
    }
}

#[tokio::test]
async fn the_loss_of_the_agent_is_reported_to_the_frontend() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, _, _stream) = connected(&rig, &mut agent).await;
    drop(agent);
    assert_eq!(rest(&mut frontend).await, "");
    until(|| rig.status.established() == 0).await;
}

/// More than any window.
const ENDLESS: usize = 10 << 20;

/// Sends until nobody takes more.
fn uploads(mut to: impl AsyncWrite + Unpin + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(async move {
        // It is aborted while it waits.
        let _ = to.write_all(&vec![1; ENDLESS]).await;
        std::future::pending::<()>().await;
    })
}

/// Waits until the agent's window for the one connection is used up.
async fn is_stuck(rig: &Rig) {
    until(|| rig.status.connections()[0].up >= AGENT_WINDOW).await;
}

/// Like [`uploads`], by gRPC.
fn uploads_by_grpc(mut to: Stream, connection: ConnectId) -> JoinHandle<()> {
    tokio::spawn(async move {
        while to.try_send(Packet::Data { connection, payload: vec![1; 60_000].into() }).await {}
    })
}

#[tokio::test]
async fn a_frontend_by_grpc_that_leaves_while_its_endpoint_takes_nothing_ends_the_stream() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut agent = rig.native_agent("a").await;
    let (frontend, connection, mut stream) = connected_by_grpc(&rig, &mut agent).await;
    let sends = uploads_by_grpc(frontend, connection);
    until(|| rig.status.counters().full_frontends.load(Relaxed) == 1).await;
    sends.abort();
    assert_eq!(stream.reset().await, h2::Reason::CANCEL);
    is_ended(&rig, "frontend_lost").await;
}

#[tokio::test]
async fn a_frontend_under_tls_that_resets_while_its_endpoint_takes_nothing_ends_the_stream() {
    let (rig, _agent, mut stream, frontend) = stuck_under_tls().await;
    frontend.leave();
    assert_eq!(stream.reset().await, h2::Reason::CANCEL);
    is_ended(&rig, "frontend_lost").await;
}

#[tokio::test]
async fn so_does_one_whose_endpoint_has_said_all() {
    let (rig, _agent, mut stream, mut frontend) = stuck_under_tls().await;
    stream.to_server.send_data(Bytes::new(), true).unwrap();
    assert_eq!(patiently(frontend.reads.read(&mut [0])).await.unwrap(), 0);
    assert_eq!(rig.status.established(), 1, "what it sends may still be taken");
    frontend.leave();
    assert_eq!(stream.reset().await, h2::Reason::CANCEL);
    is_ended(&rig, "frontend_lost").await;
}

#[tokio::test]
async fn what_a_frontend_under_tls_says_after_its_endpoint_is_delivered_with_its_end() {
    let (rig, mut agent, mut frontend) = under_tls().await;
    let dial = agent.asked("node:9").await;
    let mut stream = agent.opens(dial).await.unwrap();
    stream.to_server.send_data(Bytes::new(), true).unwrap();
    let mut answer = Vec::new();
    patiently(frontend.read_to_end(&mut answer)).await.unwrap();
    frontend.write_all(b"the rest").await.unwrap();
    frontend.shutdown().await.unwrap();
    assert_eq!(stream.bytes(8).await, b"the rest");
    assert!(stream.ends().await);
    is_ended(&rig, "endpoint_closed").await;
}

#[tokio::test]
async fn an_endpoint_or_agent_that_is_lost_after_its_end_ends_the_connection_of_a_silent_frontend() {
    for is_agent in [false, true] {
        let (rig, mut agent, mut frontend) = under_tls().await;
        let dial = agent.asked("node:9").await;
        let mut stream = agent.opens(dial).await.unwrap();
        stream.to_server.send_data(Bytes::from_static(b"all"), true).unwrap();
        let mut answer = Vec::new();
        patiently(frontend.read_to_end(&mut answer)).await.unwrap();
        assert!(answer.ends_with(b"\r\n\r\nall"));
        assert_eq!(rig.status.established(), 1, "what it sends may still be taken");
        if is_agent {
            drop(agent);
            is_ended(&rig, "agent_lost").await;
        } else {
            stream.to_server.send_reset(h2::Reason::CONNECT_ERROR);
            is_ended(&rig, "endpoint_reset").await;
        }
    }
}

/// A frontend under TLS that asks for `node:9`. Dropped, it is reset.
async fn under_tls() -> (Rig, Agent, TlsStream<TcpStream>) {
    let rig = Rig::over_tls(Mode::HttpConnect, |_| {}).await;
    let agent = rig.native_agent("a").await;
    let mut frontend = rig.tls_to(rig.server.frontend_address().unwrap()).await.unwrap();
    socket2::SockRef::from(frontend.get_ref().0).set_linger(Some(Duration::ZERO)).unwrap();
    frontend.write_all(b"CONNECT node:9 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    (rig, agent, frontend)
}

/// One that sends until nobody takes more.
struct Stuck {
    reads: ReadHalf<TlsStream<TcpStream>>,
    sends: JoinHandle<()>,
}

impl Stuck {
    /// Resets its connection.
    fn leave(self) {
        self.sends.abort();
    }
}

/// A frontend under TLS whose endpoint takes nothing.
async fn stuck_under_tls() -> (Rig, Agent, Native, Stuck) {
    let (rig, mut agent, frontend) = under_tls().await;
    let dial = agent.asked("node:9").await;
    let stream = agent.opens(dial).await.unwrap();
    let (mut reads, writes) = tokio::io::split(frontend);
    let mut head = [0; b"HTTP/1.1 200 Connection Established\r\n\r\n".len()];
    patiently(reads.read_exact(&mut head)).await.unwrap();
    let sends = uploads(writes);
    // A piece of which the window takes a part counts once all of it is taken.
    until(|| rig.status.connections()[0].up > AGENT_WINDOW - 64 * 1024).await;
    until(|| rig.status.counters().full_frontends.load(Relaxed) == 1).await;
    (rig, agent, stream, Stuck { reads, sends })
}

#[tokio::test]
async fn a_frontend_that_is_gone_ends_the_stream_of_an_endpoint_that_takes_nothing_more() {
    for has_said_all in [false, true] {
        let rig = Rig::start(Mode::HttpConnect).await;
        let mut agent = rig.native_agent("a").await;
        let (frontend, _, mut stream) = connected(&rig, &mut agent).await;
        let (mut reads, writes) = frontend.into_split();
        let sends = uploads(writes);
        is_stuck(&rig).await;
        if has_said_all {
            stream.to_server.send_data(Bytes::new(), true).unwrap();
            assert_eq!(patiently(reads.read(&mut [0])).await.unwrap(), 0);
        }
        drop(reads);
        sends.abort();
        assert_eq!(rig.status.established(), 1, "it may be busy");
        tokio::time::pause();
        stream.reset().await;
        is_ended(&rig, "frontend_lost").await;
        tokio::time::resume();
    }
}

#[tokio::test]
async fn what_frontends_do_not_read_of_streams_is_counted_and_one_of_them_goes_when_it_is_too_much() {
    const MEMORY: usize = 1 << 20;
    let rig = Rig::with(Mode::Grpc, |settings| settings.memory = MEMORY).await;
    let mut agent = rig.native_agent("a").await;
    let mut stuck = Vec::new();
    for _ in 0..4 {
        let (frontend, _, mut stream) = connected_by_grpc(&rig, &mut agent).await;
        stream.to_server.send_data(vec![1; ENDLESS].into(), false).unwrap();
        stuck.push((frontend, stream));
    }
    let by_memory = || rig.status.counters().ends().find(|(reason, _)| *reason == "memory");
    until(|| by_memory().is_some_and(|(_, count)| count > 0)).await;
    until(|| rig.status.memory().0 <= MEMORY).await;
    assert!(rig.status.established() > 0, "not all of them");
}

/// Sends pieces to a frontend by gRPC, which does not read.
fn says(stream: &mut Native, piece: usize, count: usize) {
    for _ in 0..count {
        stream.to_server.send_data(vec![1; piece].into(), false).unwrap();
    }
}

#[tokio::test]
async fn what_a_frontend_by_grpc_has_not_read_comes_in_packets_that_it_takes() {
    const PIECE: usize = 10_000;
    const PIECES: usize = AGENT_WINDOW as usize / PIECE + 600;
    let rig = Rig::with(Mode::Grpc, |settings| settings.connection_buffer = 16 << 20).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, _, mut stream) = connected_by_grpc(&rig, &mut agent).await;
    says(&mut stream, PIECE, PIECES);
    until(|| rig.status.memory().0 > 5 << 20).await;
    assert_eq!(frontend.bytes(PIECE * PIECES).await.len(), PIECE * PIECES);
}

#[tokio::test]
async fn a_frontend_that_closes_and_does_not_read_holds_no_memory_and_has_its_last_words_delivered() {
    const PIECE: usize = 100_000;
    // All that the agent sends comes: in messages of one piece.
    let rig = Rig::with(Mode::Grpc, |settings| settings.connection_buffer = 16 << 20).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, connection, mut stream) = connected_by_grpc(&rig, &mut agent).await;
    says(&mut stream, PIECE, ENDLESS / PIECE);
    until(|| rig.status.connections()[0].down > AGENT_WINDOW - PIECE as u64).await;
    until(|| rig.status.memory().0 > 5 * PIECE).await;
    frontend.data(connection, b"last words").await;
    frontend.send(Packet::CloseRequest(connection)).await;
    until(|| rig.status.memory().0 < 2 * PIECE).await;
    assert_eq!(rig.status.established(), 1, "it has not been told yet");
    drop(frontend);
    assert_eq!(stream.bytes(10).await, b"last words");
    assert!(stream.ends().await);
    assert_eq!(stream.reset().await, h2::Reason::NO_ERROR);
    is_ended(&rig, "frontend_closed").await;
}

#[tokio::test]
async fn what_an_endpoint_does_not_take_from_a_frontend_by_grpc_is_counted() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut agent = rig.native_agent("a").await;
    let (frontend, connection, _stream) = connected_by_grpc(&rig, &mut agent).await;
    let sends = uploads_by_grpc(frontend, connection);
    until(|| rig.status.memory().0 > 150_000).await;
    sends.abort();
    until(|| rig.status.memory().0 == 0).await;
}

#[tokio::test]
async fn a_large_message_that_an_endpoint_does_not_take_is_counted() {
    const MESSAGE: usize = 3 << 20;
    let rig = Rig::start(Mode::Grpc).await;
    let mut agent = rig.native_agent("a").await;
    let (mut frontend, connection, stream) = connected_by_grpc(&rig, &mut agent).await;
    // The last one has to wait for window.
    for _ in 0..AGENT_WINDOW as usize / MESSAGE + 1 {
        frontend.data(connection, &vec![1; MESSAGE]).await;
    }
    until(|| rig.status.memory().0 >= MESSAGE).await;
    drop(stream);
    until(|| rig.status.memory().0 == 0).await;
}
