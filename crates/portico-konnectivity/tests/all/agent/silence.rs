//! Servers that fall silent: found by PING, on a clock that the test moves.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use portico_lab::clock::Clock;
use tokio::time::Instant;

use super::support::*;

/// How long an agent keeps a server whose machine has stopped.
async fn kept(says: Says) -> Duration {
    let (agent, server, _connect) = connected(says).await;
    let clock = Clock::new();
    server.is_frozen.store(true, Relaxed);
    let begun = Instant::now();
    clock.until("the server is given up", || agent.counters().silent.load(Relaxed) > 0).await;
    begun.elapsed()
}

#[tokio::test]
async fn a_silent_server_of_ours_is_given_up_within_ten_seconds() {
    let took = kept(Says::ours("s")).await;
    assert!(took <= Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn a_silent_upstream_server_gets_no_ping_before_keepalive_time() {
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.keepalive_time = Duration::from_secs(60);
    let agent = portico_konnectivity::agent::Agent::start(settings);
    let _connect = server.connect().await;
    until(|| agent.servers().len() == 1).await;
    let clock = Clock::new();
    server.is_frozen.store(true, Relaxed);
    let begun = Instant::now();
    clock.until("the server is given up", || agent.counters().silent.load(Relaxed) > 0).await;
    let took = begun.elapsed();
    assert!((Duration::from_secs(80)..=Duration::from_secs(150)).contains(&took), "{took:?}");
}
