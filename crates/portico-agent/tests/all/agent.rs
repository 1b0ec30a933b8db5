//! An agent from its start to the end of its drain.

use std::time::Duration;

use portico_agent::{Agent, Inherited};
use portico_lab::clock::Clock;
use portico_tunnel::client::TunnelState;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::gateway::{Answer, Gateway};
use crate::node::{Node, no_access_log, settings, socket, until_closed};

#[tokio::test]
async fn an_agent_connects_to_its_gateway_before_a_pod_needs_it_and_listens_when_told() {
    let clock = Clock::new();
    let gateway = Gateway::start(Answer::Open).await;
    let (address, socket) = socket();
    drop(socket);
    let handle = tokio::runtime::Handle::current();
    let agent = Agent::start_on(handle, settings(gateway.address, address), no_access_log());
    let live = || agent.client().status().iter().any(|tunnel| tunnel.state == Some(TunnelState::Live));
    clock.until("a tunnel is up", live).await;
    until_closed(address);
    agent.listen(Inherited::default()).unwrap();
    assert!(TcpStream::connect(address).await.is_ok());
}

#[tokio::test]
async fn a_drain_lets_connections_finish_and_takes_no_new_ones() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let mut pod = node.pod().await;
    let mut upstream = clock.by(gateway.upstream()).await;
    clock.until("the connection is open", || node.opened() == 1).await;
    let drain = async {
        let cut = node.agent.drain(Duration::from_secs(300)).await;
        assert_eq!(cut, 0, "the connection ends by itself");
    };
    let finish = async {
        // The socket is closed once the drain has begun.
        while TcpStream::connect(node.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        pod.write("one more question").await;
        assert_eq!(upstream.read().await, "one more question");
        pod.finish().await;
        upstream.finish();
        assert_eq!(pod.read_to_end().await, "");
    };
    clock.by(async { tokio::join!(drain, finish) }).await;
    // Attempts to connect may have been accepted while the socket was still open. They end with the drain,
    // too.
    assert!(node.ends().contains(&("closed", "downstream")), "{:?}", node.ends());
    assert_eq!(node.agent.shared().totals().open, 0);
}

#[tokio::test]
async fn a_request_that_is_under_way_when_the_agent_stops_is_still_served() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Wait).await;
    let node = Node::start(gateway.address);
    let mut pod = node.pod().await;
    clock.until("the pod waits", || node.waiting() == 1).await;
    let answers = gateway.answers.clone();
    let drain = async { assert_eq!(node.agent.drain(Duration::from_secs(300)).await, 0) };
    let serve = async {
        sleep(Duration::from_secs(3)).await;
        answers.send_replace(Answer::Open);
        let mut upstream = gateway.upstream().await;
        pod.write("question").await;
        assert_eq!(upstream.read().await, "question");
        upstream.finish();
        pod.finish().await;
        assert_eq!(pod.read_to_end().await, "");
    };
    clock.by(async { tokio::join!(drain, serve) }).await;
    assert_eq!((node.refusals(), node.ends().len()), (vec![], 1));
}

#[tokio::test]
async fn an_agent_on_a_thread_of_its_own_carries_connections_and_ends_them_when_it_is_dropped() {
    let mut gateway = Gateway::start(Answer::Open).await;
    let (address, socket) = socket();
    let agent = Agent::start(settings(gateway.address, address), no_access_log()).unwrap();
    agent.listen(Inherited::from_iter([(address, socket)])).unwrap();
    let mut pod = TcpStream::connect(address).await.unwrap();
    let mut upstream = gateway.upstream().await;
    pod.write_all(b"question").await.unwrap();
    assert_eq!(upstream.read().await, "question");
    drop(agent);
    let end = pod.read(&mut [0; 1]).await;
    assert!(matches!(end, Ok(0)) || end.is_err(), "{end:?}");
    until_closed(address);
}
