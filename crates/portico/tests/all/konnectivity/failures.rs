//! Each part of a pairing killed in the middle of a transfer: the other side is notified, nothing stays
//! behind, and what comes back works. On a Unix socket, and over TCP with mutual TLS.

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::endpoint::{self, Endpoint};
use super::frontend::{Connection, round_trip};
use super::program::until;
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::{Grpc, HttpConnect};
use super::site::Transport::{Tls, Unix};
use super::site::{Pair, Site};
use crate::common::PATIENCE;

/// More than every buffer on the way holds.
const ENDLESS: u64 = 1 << 40;
/// Bytes after which the transfer is under way.
const SOME: u64 = 4 << 20;

macro_rules! pairings {
    ($($name:ident: $server:expr, $agent:expr, $mode:expr, $transport:expr;)*) => {$(mod $name {
        use super::*;

        #[tokio::test]
        async fn a_killed_agent_ends_its_connections_and_a_new_one_serves() {
            agent_killed(Pair::start($server, $agent, $mode, $transport).await, $server, $agent).await;
        }

        #[tokio::test]
        async fn a_killed_server_ends_its_connections_and_agents_come_back() {
            server_killed(Pair::start($server, $agent, $mode, $transport).await).await;
        }

        #[tokio::test]
        async fn a_frontend_that_leaves_leaves_nothing_behind() {
            frontend_gone(Pair::start($server, $agent, $mode, $transport).await).await;
        }
    })*};
}

pairings! {
    upstream_server_our_agent_grpc: Upstream, Ours, Grpc, Unix;
    upstream_server_our_agent_http_connect: Upstream, Ours, HttpConnect, Unix;
    our_server_upstream_agent_grpc: Ours, Upstream, Grpc, Unix;
    our_server_upstream_agent_http_connect: Ours, Upstream, HttpConnect, Unix;
    our_pair_grpc: Ours, Ours, Grpc, Unix;
    our_pair_http_connect: Ours, Ours, HttpConnect, Unix;
    upstream_server_our_agent_grpc_tls: Upstream, Ours, Grpc, Tls;
    upstream_server_our_agent_http_connect_tls: Upstream, Ours, HttpConnect, Tls;
    our_server_upstream_agent_grpc_tls: Ours, Upstream, Grpc, Tls;
    our_server_upstream_agent_http_connect_tls: Ours, Upstream, HttpConnect, Tls;
    our_pair_grpc_tls: Ours, Ours, Grpc, Tls;
    our_pair_http_connect_tls: Ours, Ours, HttpConnect, Tls;
}

#[tokio::test]
async fn a_server_out_of_descriptors_says_so_and_takes_agents_once_there_are_some() {
    let site = Site::new(HttpConnect, Unix);
    let mut server = site.server(Ours, &[]).await;
    let pid = Pid::from_raw(server.program.id().try_into().unwrap());
    let few = Rlimit { current: Some(3), maximum: getrlimit(Resource::Nofile).maximum };
    let before = prlimit(pid, Resource::Nofile, few).unwrap();
    let silent = TcpStream::connect(("127.0.0.1", server.port())).await.unwrap();
    server.program.wait_for_line("raise the limit of file descriptors").await;
    prlimit(pid, Resource::Nofile, before).unwrap();
    let mut agent = site.agent(Ours, server.port(), &[]).await;
    agent.wait_for("/readyz", 200).await;
    server.program.wait_for("/readyz", 200).await;
    assert!(server.program.metric("portico_konnectivity_server_accept_errors_total", "") > 0.0);
    drop(silent);
}

async fn agent_killed(mut pair: Pair, server: Make, agent: Make) {
    let sender = Endpoint::sender(ENDLESS).await;
    let echo = Endpoint::echo().await;
    let mut idle = pair.frontend.connect(&echo.target()).await;
    // The last one: what is not read holds up upstream's server.
    let mut busy = under_way(&pair, &sender).await;
    pair.agent.kill();
    ends(&mut busy).await;
    ends(&mut idle).await;
    until("the endpoints' connections have ended", || sender.open() + echo.open() == 0).await;
    pair.server.program.wait_for("/readyz", 500).await;
    let target = echo.target();
    let asked = pair.frontend.open(&target);
    let comes_back = pair.site.agent(agent, pair.server.port(), &[]);
    match server {
        Upstream => {
            let refused = asked.await.err().expect("there is no agent");
            assert!(refused.contains("No agent available"), "{refused}");
            pair.agent = comes_back.await;
        }
        // It has just started, and so has requests wait for an agent.
        Ours => {
            let (waited, agent) = tokio::join!(asked, comes_back);
            round_trip(&mut waited.expect("an agent has come back"), b"waited").await;
            pair.agent = agent;
        }
    }
    pair.server.program.wait_for("/readyz", 200).await;
    serves(&pair, &echo).await;
}

async fn server_killed(mut pair: Pair) {
    let sender = Endpoint::sender(ENDLESS).await;
    let mut busy = under_way(&pair, &sender).await;
    pair.server = pair.site.server_again(pair.server).await;
    ends(&mut busy).await;
    until("the endpoint's connection has ended", || sender.open() == 0).await;
    pair.server.program.wait_for("/readyz", 200).await;
    pair.agent.wait_for("/readyz", 200).await;
    let echo = Endpoint::echo().await;
    serves(&pair, &echo).await;
}

async fn frontend_gone(mut pair: Pair) {
    let (sender, holding) = (Endpoint::sender(ENDLESS).await, Endpoint::echo().await);
    let idle = pair.frontend.connect(&holding.target()).await;
    let busy = under_way(&pair, &sender).await;
    match &mut pair.helper {
        // Its client library says no goodbye.
        Some(helper) => helper.kill(),
        None => drop((busy, idle)),
    }
    until("the endpoints' connections have ended", || sender.open() + holding.open() == 0).await;
    pair.agent.wait_for_metric("konnectivity_network_proxy_agent_open_endpoint_connections", "", 0.0).await;
}

/// A transfer of which some has arrived.
async fn under_way(pair: &Pair, sender: &Endpoint) -> Connection {
    let mut connection = pair.frontend.connect(&sender.target()).await;
    endpoint::fetch(&mut connection, SOME).await.expect("what was sent");
    connection
}

/// What is in flight arrives, then the connection's end.
pub(super) async fn ends(connection: &mut Connection) {
    let mut buffer = vec![0; 65_536];
    let end = async { while connection.read(&mut buffer).await.is_ok_and(|read| read > 0) {} };
    timeout(PATIENCE, end).await.expect("the end arrives");
}

pub(super) async fn serves(pair: &Pair, echo: &Endpoint) {
    let mut connection = pair.frontend.connect(&echo.target()).await;
    round_trip(&mut connection, b"again").await;
}
