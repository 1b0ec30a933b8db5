//! What counts as an agent, and which one gets a dial.

use std::pin::pin;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use portico_konnectivity::grpc::Error;
use portico_konnectivity::server::{Mode, Strategy};
use portico_lab::clock::Clock;
use portico_lab::pki::Authority;
use portico_wire::konnectivity::{Code, ConnectId, Packet};
use tokio::io::{AsyncReadExt, copy_bidirectional, duplex};
use tokio::net::UnixStream;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::support::*;

#[tokio::test]
async fn the_servers_name_and_number_come_at_once() {
    let rig = Rig::with(Mode::Grpc, |settings| settings.count = 3).await;
    let agent = rig.agent("a").await;
    assert_eq!(
        (&agent.answer["serverid"], &agent.answer["servercount"]),
        (&"server-1".parse().unwrap(), &"3".parse().unwrap())
    );
    assert!(!agent.answer.contains_key("portico-streams"));
    assert!(rig.status.is_ready());
}

#[tokio::test]
async fn an_agent_that_does_not_say_what_it_is_gets_unknown() {
    let rig = Rig::start(Mode::Grpc).await;
    let cases: [&[(&'static str, &'static str)]; 4] = [
        &[],
        &[("agentid", "a"), ("agentid", "b")],
        &[("agentid", "a"), ("agentidentifiers", "host=x;y")],
        &[("agentid", "a"), ("agentidentifiers", ""), ("agentidentifiers", "")],
    ];
    for headers in cases {
        let mut metadata = HeaderMap::new();
        for (name, value) in headers {
            metadata.append(*name, HeaderValue::from_static(value));
        }
        let Err(Error::Status(status)) = rig.connect(metadata).await else { panic!("{headers:?}") };
        assert_eq!(status.code, Code::UNKNOWN);
    }
    assert!(rig.status.agents().is_empty() && !rig.status.is_ready());
}

#[tokio::test]
async fn what_an_agent_says_of_itself_is_not_longer_than_anybody_needs() {
    let rig = Rig::start(Mode::Grpc).await;
    let long = |bytes: usize| "n".repeat(bytes);
    for (id, identifiers) in [(long(513), String::new()), (long(1), vec!["host=a"; 65].join("&"))] {
        let Err(Error::Status(status)) = rig.connect(metadata(&id, &identifiers, false)).await else {
            panic!("{identifiers} is accepted")
        };
        assert_eq!(status.code, Code::UNKNOWN);
        assert!(status.message.contains("longer than") || status.message.contains("more than"));
    }
    let mut metadata = metadata(&long(512), "", false);
    metadata.insert("user-agent", HeaderValue::try_from(long(5_000)).unwrap());
    let _agent = rig.connect(metadata).await.unwrap();
    until(|| !rig.status.agents().is_empty()).await;
    assert_eq!(rig.status.agents()[0].version, long(128));
}

#[tokio::test]
async fn dials_go_to_the_agent_that_claims_the_host() {
    let rig = Rig::with(Mode::HttpConnect, |settings| {
        settings.strategies = vec![Strategy::DestHost, Strategy::Default];
        settings.route_cidr = true;
    })
    .await;
    let mut host = rig.agent_with("host", "host=node-1&ipv4=10.0.0.1", false).await;
    let mut network = rig.agent_with("network", "cidr=10.0.0.0/8", false).await;
    let _frontends = [rig.http("node-1:1").await, rig.http("10.0.0.1:2").await];
    host.asked("node-1:1").await;
    host.asked("10.0.0.1:2").await;
    let _frontend = rig.http("10.9.9.9:3").await;
    network.asked("10.9.9.9:3").await;
}

#[tokio::test]
async fn an_agent_that_drains_gets_no_more_dials_and_keeps_what_it_has() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut draining = rig.agent("a").await;
    let mut frontend = rig.http("node:1").await;
    let connection = draining.accepts("node:1", 1).await;
    head(&mut frontend).await;
    draining.stream.send(Packet::Drain).await;
    until(|| rig.status.agents()[0].draining).await;
    let mut other = rig.agent("b").await;
    for _ in 0..8 {
        let _frontend = rig.http("node:2").await;
        other.asked("node:2").await;
    }
    draining.stream.data(connection, b"goes on").await;
    assert_eq!(read(&mut frontend, 7).await, b"goes on");
    drop(other);
    until(|| rig.status.agents().len() == 1).await;
    let _frontend = rig.http("node:3").await;
    draining.asked("node:3").await;
}

#[tokio::test]
async fn an_agent_that_only_answers_ping_is_seen() {
    let rig = Rig::start(Mode::Grpc).await;
    let _agent = rig.agent("a").await;
    // A look after 30 s, PING after 60, and a look at its answer after 80.
    Clock::new().pass(Duration::from_secs(100)).await;
    let [agent] = &rig.status.agents()[..] else { panic!("it is gone") };
    assert!(agent.last_seen < Duration::from_secs(50), "{agent:?}");
}

#[tokio::test]
async fn a_second_stream_of_an_agent_takes_nothing_from_the_first() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut first = rig.agent("a").await;
    let second = rig.agent("a").await;
    let mut frontend = rig.http("node:1").await;
    let connection = first.accepts("node:1", 1).await;
    head(&mut frontend).await;
    drop(second);
    until(|| rig.status.agents().len() == 1).await;
    first.stream.data(connection, b"still here").await;
    assert_eq!(read(&mut frontend, 10).await, b"still here");
}

#[tokio::test]
async fn an_agent_whose_first_stream_is_dead_gets_dials_on_its_second() {
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.strategies = vec![Strategy::DestHost]).await;
    let mut dead = rig.agent_with("a", "host=node", false).await;
    let mut back = rig.agent_with("a", "host=node", false).await;
    let mut frontend = rig.http("node:1").await;
    dead.asked("node:1").await;
    let clock = Clock::new();
    clock.by(back.accepts("node:1", 1)).await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_server_that_drains_keeps_agents_and_connections_and_takes_no_dial() {
    let mut rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.agent("a").await;
    let mut frontend = rig.http("node:1").await;
    let connection = agent.accepts("node:1", 1).await;
    head(&mut frontend).await;
    let left = rig.server.drain(Duration::from_millis(50)).await;
    assert_eq!(left, 1);
    assert!(!rig.status.is_ready() && !rig.socket.exists());
    agent.stream.data(connection, b"goes on").await;
    assert_eq!(read(&mut frontend, 7).await, b"goes on");
    rig.server.stop().await;
    assert_eq!(rest(&mut frontend).await, "");
    assert_eq!(agent.stream.next().await, None, "the agent learns it last");
}

#[tokio::test]
async fn a_server_that_drains_waits_for_dials_that_are_under_way() {
    let mut rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.agent("a").await;
    let mut frontend = rig.http("node:1").await;
    let dial = agent.asked("node:1").await;
    let mut drains = Box::pin(rig.server.drain(PATIENCE));
    assert!(timeout(Duration::ZERO, &mut drains).await.is_err());
    agent.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(1)) }).await;
    assert!(head(&mut frontend).await.starts_with("HTTP/1.1 200 "));
    drop(frontend);
    assert_eq!(agent.stream.packet().await, Packet::CloseRequest(ConnectId(1)));
    agent.stream.send(Packet::CloseResponse { connection: ConnectId(1), error: String::new() }).await;
    assert_eq!(patiently(drains).await, 0);
}

#[tokio::test]
async fn a_server_that_drains_does_not_wait_for_peers_that_are_no_agents() {
    let mut rig = Rig::start(Mode::Grpc).await;
    let _agent = rig.agent("a").await;
    let mut stranger = rig.peer().await;
    until(|| rig.status.unauthenticated() == 1).await;
    let (clock, begun) = (Clock::new(), Instant::now());
    assert_eq!(clock.by(rig.server.drain(PATIENCE)).await, 0);
    assert!(begun.elapsed() < Duration::from_secs(5), "a stranger has ten");
    stranger.ends().await;
    assert_eq!(rig.status.agents().len(), 1, "agents stay");
}

#[tokio::test]
async fn a_server_that_drains_does_not_wait_for_a_peer_that_says_no_more_than_tls() {
    let mut rig = Rig::start(Mode::Grpc).await;
    let mut stranger = rig.tls_to(rig.server.agent_address()).await.unwrap();
    until(|| rig.status.unauthenticated() == 1).await;
    let (clock, begun) = (Clock::new(), Instant::now());
    assert_eq!(clock.by(rig.server.drain(PATIENCE)).await, 0);
    assert!(begun.elapsed() < Duration::from_secs(5), "a stranger has ten");
    // Its end, with or without a word.
    let _ = patiently(stranger.read_to_end(&mut Vec::new())).await;
}

#[tokio::test]
async fn a_server_that_drains_waits_until_a_slow_frontend_by_grpc_has_got_the_last_bytes() {
    // More than a Unix socket holds.
    const LAST: usize = 512 * 1024;
    let mut rig = Rig::start(Mode::Grpc).await;
    let mut agent = rig.agent("a").await;
    let (near, mut far) = duplex(4096);
    let mut socket = UnixStream::connect(&rig.socket).await.unwrap();
    // The frontend reads while this is polled.
    let mut reads = pin!(copy_bidirectional(&mut far, &mut socket));
    let opens = async {
        let mut frontend = proxy_over(near).await;
        frontend.asks("node:1", 1).await;
        let connection = agent.accepts("node:1", 1).await;
        assert!(matches!(frontend.packet().await, Packet::DialResponse { result: Ok(_), .. }));
        (frontend, connection)
    };
    let (mut frontend, connection) = while_reading(opens, &mut reads).await;
    agent.stream.data(connection, &[1; LAST]).await;
    agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
    while rig.status.established() > 0 {
        while_reading(yield_now(), &mut reads).await;
    }
    let mut drains = Box::pin(rig.server.drain(PATIENCE));
    assert!(timeout(Duration::ZERO, &mut drains).await.is_err(), "the frontend has not read all");
    while_reading(frontend.bytes(LAST), &mut reads).await;
    assert!(matches!(while_reading(frontend.packet(), &mut reads).await, Packet::CloseResponse { .. }));
    assert_eq!(while_reading(drains, &mut reads).await, 0);
}

/// Does `what`, while a frontend reads.
async fn while_reading<T>(what: impl Future<Output = T>, reads: &mut (impl Future + Unpin)) -> T {
    tokio::select! {
        done = patiently(what) => done,
        _ = reads => panic!("the frontend's connection has ended"),
    }
}

#[tokio::test]
async fn a_client_of_another_ca_is_no_agent() {
    let (rig, stranger) = (Rig::start(Mode::Grpc).await, Rig::start(Mode::Grpc).await);
    assert!(stranger.tls_to(rig.server.agent_address()).await.is_err());
    until(|| refused(&rig, "tls") == 1).await;
}

/// An agent with these CAs behind its certificate is accepted. With that of the rig beside them it is not.
async fn one_more_ca_is_too_much(mut rig: Rig, cas: impl IntoIterator<Item = String>) {
    rig.agent.cert.extend(cas);
    let _agent = rig.agent("a").await;
    rig.agent.cert.push_str(&rig.ca.cert());
    assert!(rig.connect(metadata("b", "", false)).await.is_err());
    until(|| refused(&rig, "tls") == 1).await;
}

#[tokio::test]
async fn a_client_with_more_than_five_cas_in_its_chain_is_refused() {
    let others = (0..5).map(|other| Authority::new(&format!("{other}")).unwrap().cert());
    one_more_ca_is_too_much(Rig::start(Mode::Grpc).await, others).await;
}

#[tokio::test]
async fn a_client_with_three_cas_of_one_name_in_its_chain_is_refused() {
    let rig = Rig::start(Mode::Grpc).await;
    let twice = rig.ca.cert().repeat(2);
    one_more_ca_is_too_much(rig, [twice]).await;
}

#[tokio::test]
async fn in_a_file_of_cas_other_blocks_count_for_nothing_and_what_is_no_certificate_is_an_error() {
    let rig = Rig::start(Mode::Grpc).await;
    let file = rig.folder.path().join("ca.crt");
    let block = |name: &str| format!("-----BEGIN {name}-----\nbm8gREVS\n-----END {name}-----\n");
    std::fs::write(&file, block("PRIVATE KEY") + &rig.ca.cert()).unwrap();
    assert!(rig.tls.reload().unwrap());
    rig.agent("a").await;
    std::fs::write(&file, rig.ca.cert() + &block("CERTIFICATE")).unwrap();
    let error = rig.tls.reload().unwrap_err().to_string();
    assert!(error.contains(&file.display().to_string()), "{error}");
    rig.connect(metadata("b", "", false)).await.expect("what was in force stays");
}

#[tokio::test]
async fn a_certificate_that_is_replaced_is_in_force_for_the_next_agent() {
    let rig = Rig::start(Mode::Grpc).await;
    let first = rig.agent("a").await;
    assert!(!rig.tls.reload().unwrap(), "nothing has changed");
    let before = rig.certificate().await;
    std::fs::write(rig.folder.path().join("server.crt"), "nothing").unwrap();
    assert!(rig.tls.reload().is_err());
    assert_eq!(rig.certificate().await, before, "what was in force stays");
    rig.issue();
    assert!(rig.tls.reload().unwrap());
    assert_ne!(rig.certificate().await, before);
    assert_eq!(rig.status.agents().len(), 1, "who was there stays");
    drop(first);
}
