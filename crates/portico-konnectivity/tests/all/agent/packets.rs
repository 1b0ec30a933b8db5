//! With an upstream server: all connections share the Connect stream.

use std::time::Duration;

use bytes::Bytes;
use portico_konnectivity::agent::Policy;
use portico_lab::clock::Clock;
use portico_net::MemoryBudget;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::support::*;

fn refused(dial: i64, error: &str) -> Packet {
    Packet::DialResponse { dial: DialId(dial), result: Err(error.to_owned()) }
}

fn closed(connection: i64, error: &str) -> Packet {
    Packet::CloseResponse { connection: ConnectId(connection), error: error.to_owned() }
}

#[tokio::test]
async fn a_dial_succeeds_and_the_server_closes() {
    let (_agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), -7).await;
    assert_eq!(connection, ConnectId(1), "the first number of a stream");
    let mut socket = endpoint.accept().await;
    connect.data(connection, b"request");
    assert_eq!(read(&mut socket, 7).await, b"request");
    write(&mut socket, b"response").await;
    assert_eq!(connect.packet().await, Packet::Data { connection, payload: Bytes::from_static(b"response") });
    connect.send(&Packet::CloseRequest(connection));
    assert_eq!(connect.packet().await, closed(1, ""));
    assert_eq!(read_to_end(&mut socket).await.unwrap(), b"");
}

#[tokio::test]
async fn a_dial_that_fails_says_why_and_leaves_a_gap_in_the_numbers() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let gone = Endpoint::start().await.address();
    connect.dial(gone, 1);
    assert_eq!(connect.packet().await, refused(1, &format!("dial tcp {gone}: connect: connection refused")));
    connect.dial("nowhere", 2);
    assert_eq!(connect.packet().await, refused(2, "dial tcp: address nowhere: missing port in address"));
    // Many answers may wait, so none is as long as what was asked for.
    connect.dial("x".repeat(100_000), 3);
    assert_eq!(connect.packet().await, refused(3, "dial: the address is longer than 512 bytes"));
    let (echo, _task) = echo().await;
    assert_eq!(connect.connected(echo, 4).await, ConnectId(4));
    assert_eq!(agent.connections().len(), 1);
}

#[tokio::test]
async fn the_endpoint_closes_and_all_it_sent_comes_before() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|index| index as u8).collect();
    let expected = sent.clone();
    let writing = tokio::spawn(async move { write(&mut socket, &sent).await });
    let (got, error) = connect.rest(connection).await;
    writing.await.unwrap();
    assert!(got == expected, "{} of {} bytes", got.len(), expected.len());
    assert_eq!(error, "");
    until(|| agent.connections().is_empty()).await;
}

#[tokio::test]
async fn bytes_that_came_before_close_req_reach_the_endpoint() {
    let (_agent, _server, mut connect) = connected(Says::upstream("s")).await;
    for round in 1..=50 {
        let endpoint = Endpoint::start().await;
        let connection = connect.connected(endpoint.address(), round).await;
        let mut socket = endpoint.accept().await;
        // Unread by us, they must not turn our FIN into a reset.
        write(&mut socket, b"unread").await;
        let payload = vec![7; 40_000];
        connect.data(connection, &payload);
        connect.send(&Packet::CloseRequest(connection));
        assert!(read_to_end(&mut socket).await.unwrap() == payload, "round {round}");
        drop(socket);
        while !matches!(connect.packet().await, Packet::CloseResponse { .. }) {}
    }
}

/// More than kernels take for an endpoint that does not read, and less than may wait.
const MUCH: usize = 900_000;

#[tokio::test]
async fn they_reach_one_that_has_to_get_rid_of_its_own_before_and_takes_its_time() {
    let (_agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    let payload = vec![7; MUCH];
    connect.data(connection, &payload);
    connect.send(&Packet::CloseRequest(connection));
    let clock = Clock::new();
    clock.pass(Duration::from_secs(5)).await;
    clock.by(write(&mut socket, &vec![1; 8 << 20])).await;
    assert!(clock.by(read_to_end(&mut socket)).await.unwrap() == payload);
}

#[tokio::test]
async fn an_endpoint_that_does_not_take_them_is_reset_and_not_told_that_it_has_all() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    connect.data(connection, &vec![7; MUCH]);
    connect.send(&Packet::CloseRequest(connection));
    let clock = Clock::new();
    let packet = clock.by(connect.packet()).await;
    let Packet::CloseResponse { error, .. } = &packet else { panic!("{packet:?}") };
    assert!(error.contains("has not taken all"), "{error}");
    clock.until("it is over", || agent.connections().is_empty()).await;
    assert!(clock.by(read_to_end(&mut socket)).await.is_err());
}

#[tokio::test]
async fn unknown_numbers_are_answered_in_upstreams_words() {
    let (_agent, _server, mut connect) = connected(Says::upstream("s")).await;
    connect.data(ConnectId(9), b"bytes");
    assert_eq!(connect.packet().await, closed(9, "unrecognized connectID"));
    connect.send(&Packet::CloseRequest(ConnectId(8)));
    assert_eq!(connect.packet().await, closed(8, "Unknown connectID"));
    // 0 is none, and what only agents send is ignored.
    connect.data(ConnectId(0), b"bytes");
    connect.send(&closed(1, ""));
    connect.send(&Packet::Drain);
    connect.send(&Packet::CloseDial(DialId(5)));
    connect.send(&Packet::CloseRequest(ConnectId(7)));
    assert_eq!(connect.packet().await, closed(7, "Unknown connectID"));
}

/// An address that accepts no connection and refuses none.
pub(super) fn hole() -> (Socket, Vec<Socket>, std::net::SocketAddr) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    // The queue of the listener has room for one or two.
    let fill = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address);
        socket
    };
    let queued = (0..4).map(|_| fill()).collect();
    (listener, queued, address.as_socket().unwrap())
}

#[tokio::test]
async fn a_dial_under_way_ends_with_dial_cls_and_holds_up_no_other() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let (_listener, _queued, address) = hole();
    connect.dial(address, 1);
    until(|| agent.dialling() == 1).await;
    let (echo, _task) = echo().await;
    assert_eq!(connect.connected(echo, 2).await, ConnectId(2));
    connect.send(&Packet::CloseDial(DialId(1)));
    until(|| agent.dialling() == 0).await;
    connect.send(&Packet::CloseRequest(ConnectId(1)));
    assert_eq!(connect.packet().await, closed(1, "Unknown connectID"), "no DIAL_RSP for it");
}

#[tokio::test]
async fn a_connection_whose_dial_was_abandoned_just_when_it_succeeded_is_closed() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    connect.send(&Packet::CloseDial(DialId(1)));
    assert_eq!(read_to_end(&mut socket).await.unwrap(), b"");
    until(|| agent.connections().is_empty()).await;
}

#[tokio::test]
async fn only_so_many_dials_and_connections_are_taken() {
    let limits = |mut settings: portico_konnectivity::agent::Settings| {
        settings.max_dials = 1;
        settings.max_connections = 1;
        settings
    };
    let (agent, _server, mut connect) = connected_with(Says::upstream("s"), limits).await;
    let (_listener, _queued, address) = hole();
    connect.dial(address, 1);
    connect.dial(address, 2);
    assert_eq!(
        connect.packet().await,
        refused(2, "the agent has no room: 1 dials under way, the most it takes")
    );
    connect.send(&Packet::CloseDial(DialId(1)));
    until(|| agent.dialling() == 0).await;
    let (echo, _task) = echo().await;
    connect.connected(echo, 3).await;
    connect.dial(echo, 4);
    assert_eq!(connect.packet().await, refused(4, "the agent has no room: 1 connections, the most it takes"));
}

#[tokio::test]
async fn what_the_policy_does_not_list_is_not_dialled() {
    let endpoint = Endpoint::start().await;
    let address = endpoint.address();
    let listed = format!("127.0.0.0/8:{}", address.port());
    let (_agent, _server, mut connect) = connected_with(Says::upstream("s"), |mut settings| {
        settings.policy = Policy::new([listed.parse().unwrap()]);
        settings
    })
    .await;
    connect.connected(address, 1).await;
    let (echo, _task) = echo().await;
    connect.dial(echo, 2);
    let error = format!("dial tcp {echo}: the agent's --allow-destination does not list it");
    assert_eq!(connect.packet().await, refused(2, &error));
}

/// Sends as the window allows.
async fn upload(connect: &mut super::support::Connect, connection: ConnectId, bytes: usize) {
    let mut left = bytes;
    while left > 0 {
        let size = left.min(30_000);
        let mut message = Packet::Data { connection, payload: vec![1; size].into() }.encoded();
        while !message.is_empty() {
            connect.to_agent.reserve_capacity(message.len());
            let capacity = std::future::poll_fn(|cx| connect.to_agent.poll_capacity(cx));
            let window = patiently(capacity).await.unwrap().unwrap();
            connect.to_agent.send_data(message.split_to(window.min(message.len())), false).unwrap();
        }
        left -= size;
    }
}

#[tokio::test]
async fn an_endpoint_that_stopped_reading_is_closed_with_the_reason_and_the_others_go_on() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let stopped = connect.connected(endpoint.address(), 1).await;
    let _socket = endpoint.accept().await;
    let (echo, _task) = echo().await;
    let other = connect.connected(echo, 2).await;
    // More than the sockets and the buffer hold.
    upload(&mut connect, stopped, 32 << 20).await;
    connect.data(other, b"ping");
    let mut reasons = Vec::new();
    loop {
        match connect.packet().await {
            Packet::CloseResponse { connection, error } if connection == stopped => reasons.push(error),
            Packet::Data { connection, payload } if connection == other => break assert_eq!(payload, "ping"),
            other => panic!("{other:?}"),
        }
    }
    assert!(reasons[0].starts_with("the endpoint does not read"), "{}", reasons[0]);
    assert!(agent.settings().memory.held() < 1 << 20);
}

#[tokio::test]
async fn an_upload_goes_as_fast_as_the_endpoint_reads_and_loses_nothing() {
    let (_agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    let total = 24 << 20;
    let reading = tokio::spawn(async move {
        let mut got = 0;
        while got < total {
            // Slower than the bytes come: they come as fast as the machine can.
            tokio::task::yield_now().await;
            got += read(&mut socket, (total - got).min(64 * 1024)).await.len();
        }
    });
    upload(&mut connect, connection, total).await;
    patiently(reading).await.unwrap();
}

#[tokio::test]
async fn a_server_that_does_not_read_makes_the_agent_stop_reading_endpoints() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let mut sockets = Vec::new();
    for dial in 1..=20 {
        connect.connected(endpoint.address(), dial).await;
        sockets.push(endpoint.accept().await);
    }
    // Nobody reads the stream from here on. What the sockets take beyond that is the kernel's.
    for socket in &sockets {
        while socket.try_write(&[0; 64 * 1024]).is_ok() {}
    }
    for _ in 0..2000 {
        tokio::task::yield_now().await;
        assert!(
            agent.settings().memory.held() <= 2 << 20,
            "{} bytes are held",
            agent.settings().memory.held()
        );
    }
    // Control packets go first once it reads again.
    connect.send(&Packet::CloseRequest(ConnectId(99)));
    let mut data = 0;
    while connect.packet().await != closed(99, "Unknown connectID") {
        data += 1;
        assert!(data < 40, "what was on its way, and one chunk a connection at most");
    }
}

#[tokio::test]
async fn memory_is_bounded_over_all_connections() {
    let memory = MemoryBudget::new(3 << 20);
    let budget = memory.clone();
    let (agent, _server, mut connect) = connected_with(Says::upstream("s"), |mut settings| {
        settings.memory = budget;
        settings
    })
    .await;
    let endpoint = Endpoint::start().await;
    let mut sockets = Vec::new();
    let mut connections = Vec::new();
    for dial in 1..=6 {
        connections.push(connect.connected(endpoint.address(), dial).await);
        let socket = endpoint.accept().await;
        socket2::SockRef::from(&socket).set_recv_buffer_size(4096).unwrap();
        sockets.push(socket);
    }
    for connection in &connections {
        // Below the bound of one, with what the kernel takes.
        upload(&mut connect, *connection, 900_000).await;
    }
    assert!(memory.held() <= 3 << 20);
    let _ = agent;
}

#[tokio::test]
async fn a_lost_server_closes_its_connections_and_the_agent_comes_back() {
    let (agent, mut server, mut connect) = connected(Says::upstream("s")).await;
    let endpoint = Endpoint::start().await;
    let connection = connect.connected(endpoint.address(), 1).await;
    let mut socket = endpoint.accept().await;
    connect.data(connection, b"last words");
    assert_eq!(read(&mut socket, 10).await, b"last words");
    connect.to_agent.send_reset(h2::Reason::CANCEL);
    let error = read_to_end(&mut socket).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it did not end in order");
    let mut again = server.connect().await;
    assert_eq!(again.connected(endpoint.address(), 1).await, ConnectId(1), "numbers begin anew");
    assert_eq!(agent.servers().len(), 1);
}

#[tokio::test]
async fn a_reset_of_the_endpoint_closes_the_connection() {
    let (agent, _server, mut connect) = connected(Says::upstream("s")).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connection = connect.connected(listener.local_addr().unwrap(), 1).await;
    let (socket, _): (TcpStream, _) = listener.accept().await.unwrap();
    socket.set_zero_linger().unwrap();
    drop(socket);
    assert_eq!(connect.rest(connection).await, (Vec::new(), String::new()));
    until(|| agent.connections().is_empty()).await;
    let mut unused = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    unused.shutdown().await.unwrap();
}
