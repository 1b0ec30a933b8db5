//! Upstream agents and frontends that fall silent: found by PING, on a clock that the test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use portico_konnectivity::server::{Mode, Settings};
use portico_lab::clock::Clock;
use portico_wire::konnectivity::{ConnectId, Packet};
use tokio::time::Instant;

use super::support::*;
use crate::freezable::Freezable;

/// How long a server keeps an upstream agent whose machine has stopped.
async fn kept(change: impl FnOnce(&mut Settings)) -> Duration {
    let rig = Rig::with(Mode::Grpc, change).await;
    let is_frozen = Arc::new(AtomicBool::default());
    let stream = rig.tls_to(rig.server.agent_address()).await.unwrap();
    let mut peer = Peer::over(Freezable(stream, Arc::clone(&is_frozen))).await;
    let _connect = peer.connects(metadata("a", "", false)).await.unwrap();
    until(|| rig.status.agents().len() == 1).await;
    let clock = Clock::new();
    is_frozen.store(true, Relaxed);
    let begun = Instant::now();
    clock.until("the agent is given up", || rig.status.agents().is_empty()).await;
    begun.elapsed()
}

#[tokio::test]
async fn a_silent_upstream_agent_is_given_up_within_eighty_seconds() {
    let took = kept(|_| {}).await;
    assert!((50..=80).contains(&took.as_secs()), "{took:?}");
}

#[tokio::test]
async fn a_longer_keepalive_time_counts_for_a_silent_upstream_agent() {
    let took = kept(|settings| settings.keepalive = Duration::from_mins(2)).await;
    // PING comes with the second look at the latest, and 20 s are left for its answer.
    assert!((140..=260).contains(&took.as_secs()), "{took:?}");
}

#[tokio::test]
async fn a_silent_frontend_by_grpc_over_tcp_is_given_up_and_its_connection_ends() {
    let rig =
        Rig::over_tls(Mode::Grpc, |settings| settings.frontend_keepalive = Duration::from_mins(1)).await;
    let mut agent = rig.agent("a").await;
    let address = rig.server.frontend_address().unwrap();
    let is_frozen = Arc::new(AtomicBool::default());
    let mut silent = proxy_over(Freezable(rig.tls_to(address).await.unwrap(), Arc::clone(&is_frozen))).await;
    let mut other = proxy_over(rig.tls_to(address).await.unwrap()).await;
    for (number, frontend) in [(1, &mut silent), (2, &mut other)] {
        frontend.asks("node:1", number).await;
        agent.accepts("node:1", number).await;
        assert!(matches!(frontend.packet().await, Packet::DialResponse { result: Ok(_), .. }));
    }
    let clock = Clock::new();
    is_frozen.store(true, Relaxed);
    let begun = Instant::now();
    clock.until("the frontend is given up", || rig.status.established() == 1).await;
    let took = begun.elapsed();
    assert!((80..=140).contains(&took.as_secs()), "{took:?}");
    assert_eq!(clock.by(agent.stream.packet()).await, Packet::CloseRequest(ConnectId(1)));
    agent.stream.data(ConnectId(2), b"goes on").await;
    assert_eq!(clock.by(other.bytes(7)).await, b"goes on");
}
