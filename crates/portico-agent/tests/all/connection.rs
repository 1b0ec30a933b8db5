//! One connection of a pod: bytes, half-close, counters, and waiting for a gateway.

use std::time::Duration;

use portico_agent::Upstream;
use portico_lab::clock::Clock;
use tokio::net::TcpListener;

use crate::gateway::{Answer, Gateway};
use crate::node::{AUTHORITY, Node};

#[tokio::test]
async fn bytes_go_both_ways_and_are_counted() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let mut pod = node.pod().await;
    let mut upstream = clock.by(gateway.upstream()).await;
    pod.write("question").await;
    assert_eq!(clock.by(upstream.read()).await, "question");
    upstream.write("the answer");
    let mut answer = [0; 10];
    clock.by(tokio::io::AsyncReadExt::read_exact(&mut pod.0, &mut answer)).await.unwrap();
    assert_eq!(&answer, b"the answer");

    let [record] = &node.agent.shared().connections()[..] else { panic!("one connection is open") };
    assert_eq!(record.client, pod.0.local_addr().unwrap());
    assert_eq!(record.upstream(), Some(Upstream { gateway: 0, address: gateway.address }));
    assert_eq!((record.bytes_up(), record.bytes_down()), (8, 10));
    let forward = record.forward();
    assert_eq!((forward.listen, &*forward.authority), (node.address, AUTHORITY));
    assert_eq!((forward.accepted(), forward.opened()), (1, 1));
    assert_eq!((forward.bytes_up(), forward.bytes_down()), (8, 10));
    let name = node.agent.shared().gateway_name(record.upstream().unwrap());
    assert_eq!(name, Some(&*format!("h2c://{}", gateway.address)));
}

#[tokio::test]
async fn a_direction_that_ends_leaves_the_other_open() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let mut pod = node.pod().await;
    let mut upstream = clock.by(gateway.upstream()).await;
    pod.write("question").await;
    pod.finish().await;
    assert_eq!(clock.by(upstream.read()).await, "question");
    assert!(clock.by(upstream.read()).await.is_empty());
    assert_eq!(node.ends(), []);
    upstream.write("the answer");
    upstream.finish();
    assert_eq!(clock.by(pod.read_to_end()).await, "the answer");
}

#[tokio::test]
async fn a_pod_waits_for_a_gateway_that_comes_up_in_time() {
    let clock = Clock::new();
    // Bound and not accepted on: tunnels come up once the gateway does.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let node = Node::start(listener.local_addr().unwrap());
    let mut pod = node.pod().await;
    clock.until("the pod waits", || node.waiting() == 1).await;
    let [record] = &node.agent.shared().connections()[..] else { panic!("one connection waits") };
    assert_eq!(record.upstream(), None);
    let mut gateway = Gateway::on(listener, Answer::Open, 1);
    let mut upstream = clock.by(gateway.upstream()).await;
    pod.write("at last").await;
    assert_eq!(clock.by(upstream.read()).await, "at last");
    let totals = node.agent.shared().totals();
    assert_eq!((totals.waiting, totals.open), (0, 1));
    assert_eq!(totals.opening.iter().sum::<u64>(), 1);
    assert!(totals.opening_seconds < Duration::from_secs(20).as_secs_f64());
}

#[tokio::test]
async fn connections_are_independent_of_each_other() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let node = Node::start(gateway.address);
    let (first, mut second) = (node.pod().await, node.pod().await);
    let mut upstreams = [clock.by(gateway.upstream()).await, clock.by(gateway.upstream()).await];
    clock.until("both are open", || node.opened() == 2).await;
    first.reset();
    clock.until("the first ends", || node.ends() == [("reset", "downstream")]).await;
    second.write("still here").await;
    let [one, other] = &mut upstreams;
    let read = async {
        tokio::select! {
            Some(Ok(data)) = one.receive.data() => data,
            Some(Ok(data)) = other.receive.data() => data,
        }
    };
    assert_eq!(clock.by(read).await, "still here");
}
