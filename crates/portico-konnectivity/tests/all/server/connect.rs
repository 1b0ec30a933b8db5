//! Frontends by HTTP CONNECT, agents by packets.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use portico_konnectivity::server::{Mode, Settings};
use portico_wire::konnectivity::{ConnectId, Packet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::support::*;

const ESTABLISHED: &str = "HTTP/1.1 200 Connection Established\r\n\r\n";

async fn rig() -> (Rig, Agent) {
    let rig = Rig::start(Mode::HttpConnect).await;
    let agent = rig.agent("a").await;
    (rig, agent)
}

#[tokio::test]
async fn a_connection_is_established_before_the_200_and_carries_both_ways() {
    let (rig, mut agent) = rig().await;
    let mut frontend = rig.http("node:10250").await;
    let connection = agent.accepts("node:10250", 1).await;
    assert_eq!(head(&mut frontend).await, ESTABLISHED);
    frontend.write_all(b"request").await.unwrap();
    assert_eq!(agent.stream.packet().await, Packet::Data { connection, payload: "request".into() });
    agent.stream.data(connection, b"response").await;
    assert_eq!(read(&mut frontend, 8).await, b"response");
    agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
    assert_eq!(rest(&mut frontend).await, "");
    until(|| rig.status.established() == 0).await;
}

#[tokio::test]
async fn bytes_of_an_endpoint_that_speaks_first_never_come_with_the_head() {
    let (rig, mut agent) = rig().await;
    for number in 1..=50 {
        let mut frontend = rig.http("node:22").await;
        let dial = agent.asked("node:22").await;
        let connection = ConnectId(number);
        agent.stream.send(Packet::DialResponse { dial, result: Ok(connection) }).await;
        agent.stream.data(connection, b"SSH-2.0").await;
        // As kube-apiserver: one read must have the head and nothing else.
        let mut first = [0; 4096];
        patiently(frontend.readable()).await.unwrap();
        let read_first = frontend.try_read(&mut first).unwrap();
        assert_eq!(std::str::from_utf8(&first[..read_first]).unwrap(), ESTABLISHED);
        assert_eq!(read(&mut frontend, 7).await, b"SSH-2.0");
    }
}

#[tokio::test]
async fn what_follows_the_request_is_kept_for_the_endpoint() {
    let (rig, mut agent) = rig().await;
    let mut frontend = UnixStream::connect(&rig.socket).await.unwrap();
    frontend.write_all(b"CONNECT node:1 HTTP/1.0\r\n\r\nearly").await.unwrap();
    let connection = agent.accepts("node:1", 1).await;
    assert_eq!(head(&mut frontend).await, ESTABLISHED);
    assert_eq!(agent.stream.packet().await, Packet::Data { connection, payload: "early".into() });
}

#[tokio::test]
async fn what_frontends_send_and_an_agent_does_not_take_counts_in_the_memory() {
    const MEMORY: usize = 256 << 10;
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.memory = MEMORY).await;
    let mut agent = rig.agent("a").await;
    let mut frontends = Vec::new();
    for number in 1..=40 {
        let mut frontend = rig.http("node:1").await;
        agent.accepts("node:1", number).await;
        assert_eq!(head(&mut frontend).await, ESTABLISHED);
        frontends.push(frontend);
    }
    // It takes no packet from here on, and gives no window.
    for frontend in &mut frontends {
        frontend.write_all(&[7; 64 << 10]).await.unwrap();
    }
    until(|| rig.ends().iter().any(|(reason, _)| *reason == "memory")).await;
    assert!(rig.status.established() > 0, "not all of them");
    until(|| rig.status.memory().0 <= MEMORY).await;
}

#[tokio::test]
async fn failures_are_answered_as_upstream_does() {
    // The last dial waits for an agent within its time.
    let brief = |settings: &mut Settings| settings.dial_timeout = Duration::from_secs(5);
    let rig = Rig::with(Mode::HttpConnect, brief).await;
    let mut agent = rig.agent("a").await;
    for (error, status) in [
        ("dial tcp 127.0.0.1:9: connect: connection refused", "502 Bad Gateway"),
        ("dial tcp 1.2.3.4:80: i/o timeout", "504 Gateway Timeout"),
        ("socket: too many open files", "503 Service Unavailable"),
    ] {
        let mut frontend = rig.http("node:9").await;
        let dial = agent.asked("node:9").await;
        agent.stream.send(Packet::DialResponse { dial, result: Err(error.to_owned()) }).await;
        assert!(head(&mut frontend).await.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{error}");
        assert_eq!(rest(&mut frontend).await, error);
    }
    drop(agent);
    until(|| rig.status.agents().is_empty()).await;
    let mut frontend = rig.http("node:9").await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 500 Internal Server Error\r\n"));
    assert_eq!(rest(&mut frontend).await, "currently no tunnels available: No agent available");
    let mut frontend = UnixStream::connect(&rig.socket).await.unwrap();
    frontend.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let refusal = head(&mut frontend).await;
    assert!(
        refusal.starts_with("HTTP/1.1 405 Method Not Allowed\r\n") && refusal.contains("Content-Length: 45")
    );
}

#[tokio::test]
async fn a_dial_that_one_agent_has_no_room_for_goes_to_another() {
    let (rig, mut full) = rig().await;
    let mut frontend = rig.http("node:9").await;
    let dial = full.asked("node:9").await;
    let mut other = rig.agent("other").await;
    let text = "the agent has no room: 2 dials under way, the most it takes";
    full.stream.send(Packet::DialResponse { dial, result: Err(text.to_owned()) }).await;
    other.accepts("node:9", 1).await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 200 "));
    drop(other);
    until(|| rig.status.agents().len() == 1).await;
    let mut frontend = rig.http("node:9").await;
    let dial = full.asked("node:9").await;
    full.stream.send(Packet::DialResponse { dial, result: Err(text.to_owned()) }).await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 502 "));
    assert_eq!(rest(&mut frontend).await, text, "there is no other");
}

#[tokio::test]
async fn an_answer_that_ends_before_the_upload_arrives_whole_under_tls() {
    const ANSWER: usize = 1_000_000;
    let rig = Rig::over_tls(Mode::HttpConnect, |_| {}).await;
    let mut agent = rig.agent("a").await;
    let mut frontend = rig.tls_to(rig.server.frontend_address().unwrap()).await.unwrap();
    frontend.write_all(b"CONNECT node:9 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let connection = agent.accepts("node:9", 1).await;
    let mut head = [0; 39];
    patiently(frontend.read_exact(&mut head)).await.unwrap();
    // More than the server reads once the connection is over.
    let upload = vec![1; 4 << 20];
    let (mut reader, mut writer) = tokio::io::split(frontend);
    let sends = tokio::spawn(async move {
        let _ = writer.write_all(&upload).await;
        writer
    });
    for _ in 0..ANSWER / 10_000 {
        agent.stream.data(connection, &[2; 10_000]).await;
    }
    agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
    let mut answer = Vec::new();
    patiently(reader.read_to_end(&mut answer)).await.unwrap();
    assert_eq!(answer.len(), ANSWER);
    sends.abort();
}

#[tokio::test]
async fn a_dial_without_an_answer_is_a_504_in_time() {
    let rig =
        Rig::with(Mode::HttpConnect, |settings| settings.dial_timeout = Duration::from_millis(50)).await;
    let mut agent = rig.agent("a").await;
    let mut frontend = rig.http("node:9").await;
    let dial = agent.asked("node:9").await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"));
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
}

#[tokio::test]
async fn a_frontend_that_leaves_while_it_waits_is_noticed() {
    let (rig, mut agent) = rig().await;
    let frontend = rig.http("node:9").await;
    let dial = agent.asked("node:9").await;
    drop(frontend);
    assert_eq!(agent.stream.packet().await, Packet::CloseDial(dial));
    assert_eq!(
        rig.status.counters().failures().find(|(reason, _)| *reason == "frontend_close"),
        Some(("frontend_close", 1))
    );
}

#[tokio::test]
async fn the_end_of_a_frontend_closes_a_connection_by_packets() {
    let (rig, mut agent) = rig().await;
    let mut frontend = rig.http("node:9").await;
    let connection = agent.accepts("node:9", 1).await;
    head(&mut frontend).await;
    frontend.write_all(b"last words").await.unwrap();
    frontend.shutdown().await.unwrap();
    assert_eq!(agent.stream.packet().await, Packet::Data { connection, payload: "last words".into() });
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(connection));
}

#[tokio::test]
async fn a_frontend_that_leaves_while_its_end_waits_for_an_agent_that_takes_nothing_is_noticed() {
    let (rig, mut agent) = rig().await;
    let mut busy = rig.http("node:9").await;
    agent.accepts("node:9", 1).await;
    head(&mut busy).await;
    let mut frontend = rig.http("node:9").await;
    agent.accepts("node:9", 2).await;
    head(&mut frontend).await;
    let sends = tokio::spawn(async move {
        // It is aborted while it waits.
        let _ = busy.write_all(&vec![1; 2 * AGENT_WINDOW as usize]).await;
    });
    let is_full = |up| up > AGENT_WINDOW - 64 * 1024;
    until(|| rig.status.connections().iter().any(|connection| is_full(connection.up))).await;
    until(|| rig.status.counters().full_frontends.load(Relaxed) == 1).await;
    drop(frontend);
    tokio::time::pause();
    until(|| rig.ends().contains(&("frontend_lost", 1))).await;
    tokio::time::resume();
    sends.abort();
}
