//! Every pairing in every mode: small and large transfers, many connections, upstream's test programs.

use std::process::Command;

use portico_lab::long_form;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::endpoint::{self, Endpoint};
use super::program::{Program, until};
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::{self, Grpc, HttpConnect};
use super::site::Transport::{self, Tls, Unix};
use super::site::{Pair, upstream};
use crate::common::{PATIENCE, free_port};
use crate::proof::need_descriptors;

/// Bytes of a large transfer, one way; 1 GB in the long form.
fn much() -> u64 {
    long_form(32 << 20, 1 << 30)
}

/// Messages one after the other: a guard against floods once took half as many for one.
const ROUND_TRIPS: usize = 20_000;

/// Connections open at the same time.
const MANY: usize = 1000;

macro_rules! pairings {
    ($($name:ident: $server:expr, $agent:expr, $mode:expr, $transport:expr;)*) => {$(
        #[tokio::test]
        async fn $name() {
            carries_everything($server, $agent, $mode, $transport).await;
        }
    )*};
}

pairings! {
    upstream_server_our_agent_grpc_unix: Upstream, Ours, Grpc, Unix;
    upstream_server_our_agent_grpc_tls: Upstream, Ours, Grpc, Tls;
    upstream_server_our_agent_http_connect_unix: Upstream, Ours, HttpConnect, Unix;
    upstream_server_our_agent_http_connect_tls: Upstream, Ours, HttpConnect, Tls;
    our_server_upstream_agent_grpc_unix: Ours, Upstream, Grpc, Unix;
    our_server_upstream_agent_grpc_tls: Ours, Upstream, Grpc, Tls;
    our_server_upstream_agent_http_connect_unix: Ours, Upstream, HttpConnect, Unix;
    our_server_upstream_agent_http_connect_tls: Ours, Upstream, HttpConnect, Tls;
    our_server_our_agent_grpc_unix: Ours, Ours, Grpc, Unix;
    our_server_our_agent_grpc_tls: Ours, Ours, Grpc, Tls;
    our_server_our_agent_http_connect_unix: Ours, Ours, HttpConnect, Unix;
    our_server_our_agent_http_connect_tls: Ours, Ours, HttpConnect, Tls;
}

async fn carries_everything(server: Make, agent: Make, mode: Mode, transport: Transport) {
    need_descriptors(8192);
    let pair = Pair::start(server, agent, mode, transport).await;
    echoes(&pair).await;
    if server == Ours && mode == HttpConnect {
        greets(&pair).await;
    }
    carries_what_the_test_programs_ask(&pair).await;
    if (server, agent) == (Ours, Upstream) {
        converses(&pair).await;
    }
    carries_much(&pair).await;
    carries_many(&pair).await;
    pair.agent.wait_for_metric("konnectivity_network_proxy_agent_open_endpoint_connections", "", 0.0).await;
}

/// Partial reads, several writes, and an end that arrives.
async fn echoes(pair: &Pair) {
    let endpoint = Endpoint::echo().await;
    let mut connection = pair.frontend.connect(&endpoint.target()).await;
    for word in ["one", "two", "three"] {
        connection.write_all(word.as_bytes()).await.unwrap();
        connection.flush().await.unwrap();
        let mut answer = vec![0; word.len()];
        let (first, rest) = answer.split_at_mut(1);
        connection.read_exact(first).await.unwrap();
        connection.read_exact(rest).await.unwrap();
        assert_eq!(answer, word.as_bytes());
    }
    drop(connection);
    until("the endpoint's connection has ended", || endpoint.open() == 0).await;
}

/// Small messages to and fro, as fast as they go: gRPC puts a PING and window updates beside each.
async fn converses(pair: &Pair) {
    let endpoint = Endpoint::echo().await;
    let mut connection = pair.frontend.connect(&endpoint.target()).await;
    let mut answer = [0; 16];
    for number in 0..ROUND_TRIPS {
        let word = format!("{number:016}");
        connection.write_all(word.as_bytes()).await.unwrap();
        connection.flush().await.unwrap();
        connection.read_exact(&mut answer).await.unwrap_or_else(|error| panic!("after {number}: {error}"));
        assert_eq!(answer, word.as_bytes());
    }
}

/// An endpoint that speaks first, and ends. Upstream's server now and then forwards what it says before it
/// has answered the dial, or forgets to pass its end on. Upstream's gRPC client drops what comes before it
/// has noted that its dial succeeded.
async fn greets(pair: &Pair) {
    let endpoint = Endpoint::greeting(b"welcome").await;
    let mut connection = pair.frontend.connect(&endpoint.target()).await;
    let mut greeting = Vec::new();
    timeout(PATIENCE, connection.read_to_end(&mut greeting)).await.expect("the end arrives").unwrap();
    assert_eq!(greeting, b"welcome");
}

async fn carries_much(pair: &Pair) {
    let bytes = much();
    let (sender, taker) = (Endpoint::sender(bytes).await, Endpoint::taker(bytes).await);
    let mut download = pair.frontend.connect(&sender.target()).await;
    endpoint::fetch(&mut download, bytes).await.expect("what was sent");
    let mut upload = pair.frontend.connect(&taker.target()).await;
    endpoint::send(&mut upload, bytes).await.expect("the tunnel takes all");
    let judged = timeout(PATIENCE, upload.read_u8()).await.expect("a judgement");
    assert_eq!(judged.unwrap(), 1, "what was taken was not what was sent");
}

/// All open at once, each with bytes of its own.
async fn carries_many(pair: &Pair) {
    let endpoint = Endpoint::echo().await;
    let mut connections = Vec::new();
    // In groups, as the queue of a listening socket is short.
    while connections.len() < MANY {
        let target = endpoint.target();
        let opening = (0..50).map(|_| pair.frontend.connect(&target));
        connections.extend(futures_util::future::join_all(opening).await);
    }
    until("the endpoint has accepted all of them", || endpoint.open() == MANY).await;
    let mut talking = JoinSet::new();
    for (number, mut connection) in connections.into_iter().enumerate() {
        talking.spawn(async move {
            let word = format!("{number:08}").repeat(64);
            connection.write_all(word.as_bytes()).await.unwrap();
            connection.flush().await.unwrap();
            let mut answer = vec![0; word.len()];
            connection.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, word.as_bytes(), "bytes of another connection");
        });
    }
    timeout(PATIENCE, talking.join_all()).await.expect("every connection is answered");
    until("the endpoint's connections have ended", || endpoint.open() == 0).await;
}

/// Upstream's test client asks upstream's test server, which is an HTTP server.
async fn carries_what_the_test_programs_ask(pair: &Pair) {
    let port = free_port();
    let mut command = Command::new(upstream("test-server"));
    command.arg(format!("--server-port={port}"));
    let _server = Program::start(pair.site.folder(), "test-server", command, 0);
    until("the test server listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()).await;
    let mut client = pair.site.test_client(&pair.server);
    // It takes any signal for its end, also the one by which Go's runtime preempts its own threads.
    client.env("GODEBUG", "asyncpreemptoff=1");
    client.args(["--request-host=127.0.0.1", &format!("--request-port={port}")]);
    let answered = client.args(["--request-path=success", "--test-requests=3"]).output().unwrap();
    let said = String::from_utf8_lossy(&answered.stderr);
    assert!(answered.status.success(), "upstream's test client: {said}");
}
