//! Dials that fail: what the frontend gets, what is counted, what stays behind.
//!
//! The tests are named after upstream's integration tests, spelled out.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::endpoint::Endpoint;
use super::frontend::round_trip;
use super::program::until;
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::{self, Grpc, HttpConnect};
use super::site::Transport::Unix;
use super::site::{Pair, Site};
use crate::common::free_port;

macro_rules! pairings {
    ($($name:ident: $server:expr, $agent:expr;)*) => {$(mod $name {
        use super::*;

        #[tokio::test]
        async fn a_refused_dial_is_reported_and_counted_at_both_ends() {
            refused($server, $agent).await;
        }

        #[tokio::test]
        async fn a_name_that_does_not_resolve_is_reported_and_counted() {
            unknown_name($server, $agent).await;
        }

        #[tokio::test]
        async fn an_endpoint_that_never_answers_is_given_up_and_counted() {
            silent($server, $agent).await;
        }

        #[tokio::test]
        async fn fifty_dials_cancelled_in_flight_leave_nothing() {
            for mode in [Grpc, HttpConnect] {
                cancelled($server, $agent, mode).await;
            }
        }
    })*};
}

pairings! {
    upstream_server_our_agent: Upstream, Ours;
    our_server_upstream_agent: Ours, Upstream;
    our_pair: Ours, Ours;
}

const SERVER: &str = "konnectivity_network_proxy_server_";
const AGENT: &str = "konnectivity_network_proxy_agent_";

async fn refused(server: Make, agent: Make) {
    for (mode, status) in [(Grpc, "connection refused"), (HttpConnect, " 502 Bad Gateway\r\n")] {
        let pair = Pair::start(server, agent, mode, Unix).await;
        let refused = pair.frontend.open(&format!("127.0.0.1:{}", free_port())).await.err().unwrap();
        assert!(refused.contains(status) && refused.contains("connection refused"), "{refused}");
        is_counted(&pair, "unknown").await;
    }
}

async fn unknown_name(server: Make, agent: Make) {
    let pair = Pair::start(server, agent, HttpConnect, Unix).await;
    let refused = pair.frontend.open("nowhere.invalid:80").await.err().unwrap();
    // A machine without a name server says that instead.
    assert!(
        refused.contains(" 502 Bad Gateway\r\n") && refused.contains("lookup nowhere.invalid"),
        "{refused}"
    );
    pair.agent.wait_for_metric(&format!("{AGENT}endpoint_dial_failure_total"), "", 1.0).await;
}

async fn silent(server: Make, agent: Make) {
    let hole = BlackHole::open();
    let refused = async |mode: Mode, status: &str| {
        let pair = Pair::start(server, agent, mode, Unix).await;
        let refused = pair.frontend.open(&hole.target()).await.err().unwrap();
        assert!(refused.contains(status) && refused.contains("i/o timeout"), "{refused}");
        is_counted(&pair, "timeout").await;
    };
    // At the same time: an agent gives up after five seconds.
    tokio::join!(refused(Grpc, "i/o timeout"), refused(HttpConnect, " 504 Gateway Timeout\r\n"));
}

async fn is_counted(pair: &Pair, reason: &str) {
    pair.server
        .program
        .wait_for_metric(&format!("{SERVER}dial_failure_count"), "reason=\"error_response\"", 1.0)
        .await;
    let labels = format!("reason=\"{reason}\"");
    pair.agent.wait_for_metric(&format!("{AGENT}endpoint_dial_failure_total"), &labels, 1.0).await;
}

async fn cancelled(server: Make, agent: Make, mode: Mode) {
    let hole = BlackHole::open();
    let target = hole.target();
    let pair = Pair::start(server, agent, mode, Unix).await;
    // At the same time: an agent gives up after five seconds.
    let waiting = join_all((0..50).map(|_| pair.frontend.ask(&target))).await;
    let pending = format!("{SERVER}pending_backend_dials");
    pair.server.program.wait_for_metric(&pending, "", 50.0).await;
    // They hold nothing up.
    let echo = Endpoint::echo().await;
    drop(pair.frontend.connect(&echo.target()).await);
    drop(waiting);
    // Upstream's server keeps stale values here.
    if server == Ours {
        pair.server.program.wait_for_metric(&pending, "", 0.0).await;
        let failures = format!("{SERVER}dial_failure_count");
        pair.server.program.wait_for_metric(&failures, "reason=\"frontend_close\"", 50.0).await;
    }
    pair.agent.wait_for_metric(&format!("{AGENT}open_endpoint_connections"), "", 0.0).await;
    until("the endpoint's connection has ended", || echo.open() == 0).await;
}

#[tokio::test]
async fn that_there_is_no_agent_any_more_is_reported_to_a_frontend() {
    for (mode, text) in [(Grpc, "No agent available"), (HttpConnect, "HTTP/1.1 500 Internal Server Error")] {
        let site = Site::new(mode, Unix);
        // A dial waits for another agent within its time.
        let mut server = site.server(Ours, &["--backend-dial-timeout=1s"]).await;
        let mut agent = site.agent(Ours, server.port(), &[]).await;
        server.program.wait_for("/readyz", 200).await;
        agent.kill();
        server.program.wait_for("/readyz", 500).await;
        let (frontend, _helper) = site.frontend(&server).await;
        let refused = frontend.open("127.0.0.1:1").await.err().unwrap();
        assert!(refused.contains(text) && refused.contains("No agent available"), "{refused}");
    }
}

#[tokio::test]
async fn a_request_at_a_new_server_waits_for_the_first_agent() {
    for (mode, agent) in [(Grpc, Ours), (HttpConnect, Upstream)] {
        let site = Site::new(mode, Unix);
        let server = site.server(Ours, &[]).await;
        let (frontend, _helper) = site.frontend(&server).await;
        let echo = Endpoint::echo().await;
        let target = echo.target();
        let comes = async {
            server.program.wait_for_metric(&format!("{SERVER}pending_backend_dials"), "", 1.0).await;
            site.agent(agent, server.port(), &[]).await
        };
        let (mut connection, _agent) = tokio::join!(frontend.connect(&target), comes);
        round_trip(&mut connection, b"first").await;
    }
}

#[tokio::test]
async fn a_request_that_is_no_connect_is_answered_with_405() {
    let site = Site::new(HttpConnect, Unix);
    let server = site.server(Ours, &[]).await;
    let socket = site.folder().join(format!("server-{}.sock", server.port()));
    let mut stream = tokio::net::UnixStream::connect(socket).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{answer}");
    assert!(answer.ends_with("this proxy only supports CONNECT passthrough\n"), "{answer}");
}

/// An address of loopback that answers no SYN: a listener whose queue is full.
struct BlackHole {
    listener: TcpListener,
    _queued: Vec<TcpStream>,
}

impl BlackHole {
    fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let mut queued = Vec::new();
        // A handshake on loopback takes microseconds; a dropped SYN is repeated after a second.
        while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
            queued.push(stream);
            assert!(queued.len() < 8, "this kernel makes no black hole");
        }
        Self { listener, _queued: queued }
    }

    fn target(&self) -> String {
        self.listener.local_addr().unwrap().to_string()
    }
}
