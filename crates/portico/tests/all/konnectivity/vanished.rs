//! A network that loses every packet between server and agent, without a notice, while one connection is open
//! and idle. What is ours on either side ends that connection, and is back once the network is.

use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::{Host, Lab};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::endpoint::Endpoint;
use super::failures::{ends, serves};
use super::frontend::round_trip;
use super::program::until;
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::HttpConnect;
use super::site::Pair;
use super::site::Transport::Unix;
use crate::common::PATIENCE;
use crate::isolation::on;

#[test]
fn our_pair_ends_what_goes_through_a_vanished_peer() {
    packets_are_lost("vanished-peer", Ours, Ours);
}

/// It gets no PING from our agent: what finds it is TCP.
#[test]
fn our_agent_ends_what_comes_from_a_vanished_upstream_server() {
    packets_are_lost("vanished-server", Upstream, Ours);
}

#[test]
fn our_server_ends_what_goes_to_a_vanished_upstream_agent() {
    packets_are_lost("vanished-agent", Ours, Upstream);
}

/// Server, agent, frontend and endpoint are on loopback, which is that of a host of the lab.
fn packets_are_lost(name: &str, server: Make, agent: Make) {
    let lab = Lab::start(name).unwrap();
    let host = lab.host("loopback").unwrap();
    let network = host.clone();
    let work = on(&host, move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(each_side_notices(&network, server, agent));
    });
    work.join().unwrap();
}

async fn each_side_notices(host: &Host, server: Make, agent: Make) {
    // Ours would take 50 to 80 s to find an upstream agent. Upstream's says nothing of itself for an hour.
    let flags: &[&str] = if server == Ours { &["--keepalive-time=1s"] } else { &[] };
    let mut pair = Pair::start_with(server, agent, HttpConnect, Unix, flags).await;
    let echo = Endpoint::echo().await;
    let mut idle = pair.frontend.connect(&echo.target()).await;
    round_trip(&mut idle, b"before").await;

    let within = Traffic::all(Direction::Within);
    let lost = [within.clone().to_port(pair.server.port()), within.from_port(pair.server.port())];
    let walls = lost.map(|traffic| Firewall::stop(host, &traffic, Verdict::Drop).unwrap());
    // Nothing of an upstream program is claimed: that one notices after minutes.
    if server == Ours {
        ends(&mut idle).await;
        pair.server.program.wait_for("/readyz", 500).await;
    }
    if agent == Ours {
        until("the endpoint's connection has ended", || echo.open() == 0).await;
        pair.agent.wait_for("/readyz", 503).await;
    }

    for wall in walls {
        wall.lift().unwrap();
    }
    pair.agent.wait_for("/readyz", 200).await;
    pair.server.program.wait_for("/readyz", 200).await;
    if server == Upstream {
        // It asks by the connection that has ended, until it has noticed what it is told.
        let target = echo.target();
        let asks = async { while pair.frontend.open(&target).await.is_err() {} };
        timeout(PATIENCE, asks).await.expect("upstream's server asks by the new connection");
    }
    serves(&pair, &echo).await;
}
