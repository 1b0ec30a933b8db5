//! Each reason of a refusal, provoked over real sockets. The pod's connection is reset, and the reason is
//! counted once.

use std::time::Duration;

use http::StatusCode;
use portico_agent::Refusal;
use portico_lab::clock::Clock;
use portico_lab::refusing::Refusing;
use tokio::time::Instant;

use crate::gateway::{Answer, Gateway};
use crate::node::{Node, OPEN_TIMEOUT};

/// The test of each reason.
const PROVOKED: [(&str, fn()); 9] = [
    ("too_many", too_many_is_a_connection_over_the_limit),
    ("too_many_waiting", too_many_waiting_is_a_connection_over_the_limit_of_those_without_a_gateway),
    ("refused", refused_is_what_the_gateway_says),
    ("no_tunnel", no_tunnel_is_a_gateway_that_is_not_reached_in_time),
    ("full", full_is_a_gateway_that_allows_no_further_stream_in_time),
    ("unanswered", unanswered_is_a_gateway_that_breaks_the_stream_off),
    ("unsendable", unsendable_is_an_authority_that_no_request_can_carry),
    ("stopping", stopping_is_an_agent_that_drains_while_the_pod_waits),
    ("left", left_is_a_pod_that_resets_while_it_waits),
];

#[test]
fn every_reason_is_provoked_here() {
    assert_eq!(PROVOKED.map(|(reason, _)| reason), Refusal::REASONS);
}

#[tokio::test]
async fn too_many_is_a_connection_over_the_limit() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::with(gateway.address, |settings| settings.max_connections = 1);
    let first = node.pod().await;
    let upstream = clock.by(gateway.upstream()).await;
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["too_many"]);
    drop((first, upstream));
}

#[tokio::test]
async fn too_many_waiting_is_a_connection_over_the_limit_of_those_without_a_gateway() {
    let clock = Clock::new();
    let nowhere = Refusing::start().unwrap();
    let node = Node::with(nowhere.address(), |settings| settings.max_waiting = 1);
    let first = node.pod().await;
    clock.until("the first pod waits", || node.waiting() == 1).await;
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["too_many_waiting"]);
    drop(first);
}

#[tokio::test]
async fn refused_is_what_the_gateway_says() {
    let clock = Clock::new();
    let gateway = Gateway::start(Answer::Refuse(StatusCode::FORBIDDEN)).await;
    let node = Node::start(gateway.address);
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["refused"]);
}

#[tokio::test]
async fn no_tunnel_is_a_gateway_that_is_not_reached_in_time() {
    let clock = Clock::new();
    let nowhere = Refusing::start().unwrap();
    let node = Node::start(nowhere.address());
    let begin = Instant::now();
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["no_tunnel"]);
    let waited = begin.elapsed();
    assert!(waited >= OPEN_TIMEOUT && waited < OPEN_TIMEOUT + Duration::from_secs(2), "{waited:?}");
}

#[tokio::test]
async fn full_is_a_gateway_that_allows_no_further_stream_in_time() {
    let clock = Clock::new();
    let mut gateway = Gateway::with_streams(Answer::Open, 1).await;
    let node = Node::start(gateway.address);
    let first = node.pod().await;
    let upstream = clock.by(gateway.upstream()).await;
    let begin = Instant::now();
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["full"]);
    assert!(begin.elapsed() >= OPEN_TIMEOUT);
    drop((first, upstream));
}

#[tokio::test]
async fn unanswered_is_a_gateway_that_breaks_the_stream_off() {
    let clock = Clock::new();
    let gateway = Gateway::start(Answer::Reset).await;
    let node = Node::start(gateway.address);
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["unanswered"]);
}

#[tokio::test]
async fn unsendable_is_an_authority_that_no_request_can_carry() {
    let clock = Clock::new();
    let gateway = Gateway::start(Answer::Open).await;
    let node = Node::with(gateway.address, |settings| {
        settings.forwards[0].authority = "not an authority".into();
    });
    assert!(clock.by(node.pod().await.is_reset()).await);
    assert_eq!(node.refusals(), ["unsendable"]);
}

#[tokio::test]
async fn stopping_is_an_agent_that_drains_while_the_pod_waits() {
    let clock = Clock::new();
    let nowhere = Refusing::start().unwrap();
    let node = Node::start(nowhere.address());
    let mut pod = node.pod().await;
    clock.until("the pod waits", || node.waiting() == 1).await;
    let begin = Instant::now();
    assert_eq!(clock.by(node.agent.drain(OPEN_TIMEOUT)).await, 0, "a pod that waits is refused, not cut");
    assert!(begin.elapsed() < OPEN_TIMEOUT, "soon, not after the time-out");
    assert!(clock.by(pod.is_reset()).await);
    assert_eq!(node.refusals(), ["stopping"]);
}

#[tokio::test]
async fn left_is_a_pod_that_resets_while_it_waits() {
    let clock = Clock::new();
    let nowhere = Refusing::start().unwrap();
    let node = Node::with(nowhere.address(), |settings| settings.max_waiting = 1);
    let pod = node.pod().await;
    clock.until("the pod waits", || node.waiting() == 1).await;
    let begin = Instant::now();
    pod.reset();
    clock.until("its permit to wait is given back", || node.waiting() == 0).await;
    assert!(begin.elapsed() < OPEN_TIMEOUT, "at once, not after the time-out");
    assert_eq!(node.refusals(), ["left"]);
    assert_eq!(node.agent.shared().totals().open, 0);
}
