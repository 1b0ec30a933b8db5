//! Connections of which one end has stopped reading: four of them hold up no other.

use tokio::task::JoinSet;

use super::endpoint::{self, Endpoint};
use super::frontend::{Frontend, round_trip};
use super::program::until;
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::{self, Grpc, HttpConnect};
use super::site::Pair;
use super::site::Transport::Unix;

/// Many bytes that nobody reads: four frontends that stopped, on the way up from the endpoint.
async fn beside_stopped_frontends(server: Make, agent: Make, mode: Mode) {
    const ENDLESS: u64 = 1 << 40;
    let pair = Pair::start(server, agent, mode, Unix).await;
    let sender = Endpoint::sender(ENDLESS).await;
    let mut stopped = Vec::new();
    for _ in 0..4 {
        let mut connection = pair.frontend.connect(&sender.target()).await;
        endpoint::fetch(&mut connection, 1 << 20).await.expect("what was sent");
        stopped.push(connection);
    }
    others_go_on(&pair.frontend).await;
    drop(stopped);
    until("the endpoint's connections have ended", || sender.open() == 0).await;
}

/// Many bytes that nobody reads: four endpoints that do not read, on the way down from the frontend.
async fn beside_stopped_endpoints(server: Make, agent: Make, mode: Mode) {
    let pair = Pair::start(server, agent, mode, Unix).await;
    let holding = Endpoint::holding().await;
    let mut writing = JoinSet::new();
    for _ in 0..4 {
        let mut connection = pair.frontend.connect(&holding.target()).await;
        // Fails if a connection that does not read is closed, never ends if it is paused: both are allowed.
        writing.spawn(async move { endpoint::send(&mut connection, 64 << 20).await });
    }
    others_go_on(&pair.frontend).await;
}

async fn others_go_on(frontend: &Frontend) {
    let echo = Endpoint::echo().await;
    let mut stays = frontend.connect(&echo.target()).await;
    for turn in 0..200 {
        let word = format!("{turn}").repeat(2000);
        round_trip(&mut stays, word.as_bytes()).await;
        if turn % 10 == 0 {
            round_trip(&mut frontend.connect(&echo.target()).await, word.as_bytes()).await;
        }
    }
}

macro_rules! stopped {
    ($($name:ident: $test:ident($server:expr, $agent:expr, $mode:expr);)*) => {$(
        #[tokio::test]
        async fn $name() {
            $test($server, $agent, $mode).await;
        }
    )*};
}

// Upstream's agent stops as a whole when an endpoint does not read, and nothing tells its server; upstream's
// server does when a frontend does not.
stopped! {
    our_pair_stopped_frontends_grpc: beside_stopped_frontends(Ours, Ours, Grpc);
    our_pair_stopped_frontends_http_connect: beside_stopped_frontends(Ours, Ours, HttpConnect);
    our_server_stopped_frontends_grpc: beside_stopped_frontends(Ours, Upstream, Grpc);
    our_server_stopped_frontends_http_connect: beside_stopped_frontends(Ours, Upstream, HttpConnect);
    our_pair_stopped_endpoints_grpc: beside_stopped_endpoints(Ours, Ours, Grpc);
    our_pair_stopped_endpoints_http_connect: beside_stopped_endpoints(Ours, Ours, HttpConnect);
    our_agent_stopped_endpoints_grpc: beside_stopped_endpoints(Upstream, Ours, Grpc);
    our_agent_stopped_endpoints_http_connect: beside_stopped_endpoints(Upstream, Ours, HttpConnect);
}
