//! Listening sockets: bound, inherited, closed, handed to a successor.

use std::net::TcpListener;
use std::os::fd::OwnedFd;

use portico_agent::{Agent, Inherited};
use portico_lab::clock::Clock;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use crate::gateway::{Answer, Gateway};
use crate::node::{Node, no_access_log, settings, socket, until_closed};

#[tokio::test]
async fn a_socket_that_is_bound_gives_its_options_to_connections() {
    let gateway = Gateway::start(Answer::Open).await;
    let settings = settings(gateway.address, "127.0.0.1:0".parse().unwrap());
    let agent = Agent::start_on(Handle::current(), settings, no_access_log());
    agent.listen(Inherited::default()).unwrap();
    let (name, socket) = agent.sockets().unwrap().remove(0);
    assert_eq!(name, "127.0.0.1:0");
    let socket = SockRef::from(&socket);
    assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
}

#[tokio::test]
async fn an_inherited_socket_that_no_forward_asks_for_is_closed() {
    let gateway = Gateway::start(Answer::Open).await;
    let ((wanted, first), (surplus, second)) = (socket(), socket());
    let agent = Agent::start_on(Handle::current(), settings(gateway.address, wanted), no_access_log());
    agent.listen(Inherited::from_iter([(wanted, first), (surplus, second)])).unwrap();
    assert!(TcpStream::connect(wanted).await.is_ok());
    until_closed(surplus);
}

#[tokio::test]
async fn connections_that_wait_in_a_socket_are_served_by_the_agent_that_inherits_it() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let (address, socket) = socket();
    // Connected before anything accepts.
    let _pod = TcpStream::connect(address).await.unwrap();
    let agent = Agent::start_on(Handle::current(), settings(gateway.address, address), no_access_log());
    agent.listen(Inherited::from_iter([(address, socket)])).unwrap();
    let _upstream = clock.by(gateway.upstream()).await;
    assert_eq!(agent.shared().forwards[0].accepted(), 1);
}

#[tokio::test]
async fn a_socket_given_to_a_successor_stays_open_when_its_first_owner_drains() {
    let clock = Clock::new();
    let mut gateway = Gateway::start(Answer::Open).await;
    let old = Node::start(gateway.address);
    let sockets: Vec<(String, OwnedFd)> = old.agent.sockets().unwrap();
    let new = Agent::start_on(Handle::current(), settings(gateway.address, old.address), no_access_log());
    let inherited = sockets.into_iter().map(|(name, socket)| (name.parse().unwrap(), socket));
    new.listen(inherited.collect()).unwrap();
    assert_eq!(clock.by(old.agent.drain(std::time::Duration::from_secs(1))).await, 0);
    let _pod = TcpStream::connect(old.address).await.unwrap();
    let _upstream = clock.by(gateway.upstream()).await;
    assert_eq!((old.agent.shared().totals().open, new.shared().totals().open), (0, 1));
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_with_its_flag() {
    let gateway = Gateway::start(Answer::Open).await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let agent = Agent::start_on(Handle::current(), settings(gateway.address, listen), no_access_log());
    let error = agent.listen(Inherited::default()).unwrap_err().to_string();
    assert!(error.contains(&format!("--forward {listen}=")) && error.contains("--take-over"), "{error}");
}
