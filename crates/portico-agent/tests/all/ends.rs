//! Each way in which a connection that was carried ends, provoked over real sockets, and counted once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use portico_agent::{Agent, ENDS, Inherited};
use portico_lab::clock::Clock;
use portico_net::MemoryBudget;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::gateway::{Answer, Gateway, Upstream};
use crate::node::{Node, Pod, no_access_log, settings, socket};

/// The word of an end and its side.
type Row = (&'static str, &'static str);

/// The test of each end.
const PROVOKED: [(Row, fn()); 8] = [
    (("closed", "downstream"), closed_by_the_pod_first),
    (("closed", "upstream"), closed_by_the_api_server_first),
    (("reset", "downstream"), reset_by_the_pod),
    (("reset", "upstream"), reset_by_the_api_server),
    (("idle_timeout", "agent"), idle_for_longer_than_the_limit),
    (("drain_timeout", "agent"), open_when_the_time_to_drain_is_over),
    (("cancelled", "agent"), cancelled_with_the_thread_of_the_agent),
    (("memory", "agent"), over_the_memory_budget_for_a_pod_that_does_not_read),
];

#[test]
fn every_end_is_provoked_here() {
    assert_eq!(PROVOKED.map(|(end, _)| end), ENDS);
}

/// A connection that a gateway has opened.
async fn open(clock: &Clock, node: &Node, gateway: &mut Gateway) -> (Pod, Upstream) {
    let pod = node.pod().await;
    let upstream = clock.by(gateway.upstream()).await;
    clock.until("the agent knows that it is open", || node.opened() == 1).await;
    (pod, upstream)
}

async fn wait_for_end(clock: &Clock, node: &Node, end: (&str, &str)) {
    clock.until("the connection ends", || !node.ends().is_empty()).await;
    assert_eq!(node.ends(), [end]);
    assert_eq!(node.agent.shared().totals().open, 0);
}

#[tokio::test]
async fn closed_by_the_pod_first() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (mut pod, mut upstream) = open(&clock, &node, &mut gateway).await;
    pod.finish().await;
    assert!(clock.by(upstream.read()).await.is_empty());
    upstream.finish();
    assert_eq!(clock.by(pod.read_to_end()).await, "");
    wait_for_end(&clock, &node, ("closed", "downstream")).await;
}

#[tokio::test]
async fn closed_by_the_api_server_first() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (mut pod, mut upstream) = open(&clock, &node, &mut gateway).await;
    upstream.finish();
    assert_eq!(clock.by(pod.read_to_end()).await, "");
    pod.finish().await;
    wait_for_end(&clock, &node, ("closed", "upstream")).await;
}

#[tokio::test]
async fn reset_by_the_pod() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (pod, mut upstream) = open(&clock, &node, &mut gateway).await;
    pod.reset();
    let read = clock.by(upstream.receive.data()).await.unwrap();
    assert!(read.unwrap_err().is_reset());
    wait_for_end(&clock, &node, ("reset", "downstream")).await;
}

#[tokio::test]
async fn reset_by_the_api_server() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (mut pod, mut upstream) = open(&clock, &node, &mut gateway).await;
    upstream.reset();
    assert!(clock.by(pod.is_reset()).await);
    wait_for_end(&clock, &node, ("reset", "upstream")).await;
}

#[tokio::test]
async fn idle_for_longer_than_the_limit() {
    let clock = Clock::new();
    let limit = Duration::from_secs(5);
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::with(gateway.address, |settings| settings.client.stream_idle = Some(limit));
    let (_pod, _upstream) = open(&clock, &node, &mut gateway).await;
    let begin = Instant::now();
    wait_for_end(&clock, &node, ("idle_timeout", "agent")).await;
    assert!(begin.elapsed() + Duration::from_secs(1) >= limit, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn open_when_the_time_to_drain_is_over() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (_pod, _upstream) = open(&clock, &node, &mut gateway).await;
    let begin = Instant::now();
    let limit = Duration::from_secs(30);
    assert_eq!(clock.by(node.agent.drain(limit)).await, 1);
    assert!(begin.elapsed() >= limit);
    wait_for_end(&clock, &node, ("drain_timeout", "agent")).await;
}

#[tokio::test]
async fn cancelled_with_the_thread_of_the_agent() {
    let mut gateway = Gateway::start(Answer::Open).await;
    let (address, socket) = socket();
    let agent = Agent::start(settings(gateway.address, address), no_access_log()).unwrap();
    agent.listen(Inherited::from_iter([(address, socket)])).unwrap();
    let _pod = TcpStream::connect(address).await.unwrap();
    let _upstream = gateway.upstream().await;
    let shared = Arc::clone(agent.shared());
    drop(agent);
    let ends: Vec<_> = ENDS.iter().zip(shared.totals().ends).filter(|(_, count)| *count > 0).collect();
    assert_eq!(ends, [(&("cancelled", "agent"), 1)]);
}

#[tokio::test]
async fn over_the_memory_budget_for_a_pod_that_does_not_read() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::with(gateway.address, |settings| settings.client.memory = MemoryBudget::new(64 << 10));
    let (_pod, mut upstream) = open(&clock, &node, &mut gateway).await;
    // As much as the windows and the sockets on the way take, until the agent gives up.
    let sending = tokio::spawn(async move {
        loop {
            upstream.send.reserve_capacity(1 << 16);
            let Some(Ok(capacity)) = std::future::poll_fn(|cx| upstream.send.poll_capacity(cx)).await else {
                return;
            };
            if upstream.send.send_data(Bytes::from(vec![7; capacity]), false).is_err() {
                return;
            }
        }
    });
    wait_for_end(&clock, &node, ("memory", "agent")).await;
    clock.by(sending).await.unwrap();
}
