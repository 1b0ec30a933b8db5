//! HTTP/2 clients that have not authenticated, and those that flood, by frames made by hand: what they may do
//! is bounded, and what they make the server hold is counted.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::common::*;
use portico_lab::clock::Clock;
use portico_lab::frames::{self, ACK, END_HEADERS, END_STREAM, INITIAL_WINDOW_SIZE, kind};
use portico_net::MemoryBudget;
use portico_tunnel::{Failure, Flood, Settings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// ENHANCE_YOUR_CALM (RFC 9113 section 7).
const CALM: u8 = 11;

async fn server(is_authenticated: bool) -> (Server, MemoryBudget) {
    let memory = MemoryBudget::new(16 << 20);
    let server = Server::start(Settings { memory: memory.clone(), ..plaintext() }).await;
    server.routes.is_authenticated.store(is_authenticated, Relaxed);
    (server, memory)
}

/// A client that sends frames as they are.
struct Raw(TcpStream);

impl Raw {
    async fn new(server: &Server) -> Self {
        let mut client = Self(TcpStream::connect(server.address).await.unwrap());
        client.send(&frames::opening(&[])).await;
        client
    }

    async fn send(&mut self, bytes: &[u8]) {
        // Fails once the server has ended the connection, which is what the tests are about.
        let _ = patiently(self.0.write_all(bytes)).await;
    }

    /// The next frame that is none of the connection's housekeeping; `None` at the end.
    async fn next(&mut self) -> Option<(u8, u8, Vec<u8>)> {
        loop {
            let mut head = [0; 9];
            patiently(self.0.read_exact(&mut head)).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            patiently(self.0.read_exact(&mut payload)).await.ok()?;
            if head[3] == kind::SETTINGS && head[4] == 0 {
                self.send(&frames::frame(kind::SETTINGS, ACK, 0, b"")).await;
            }
            if ![kind::SETTINGS, kind::WINDOW_UPDATE, kind::PING].contains(&head[3]) {
                return Some((head[3], head[4], payload));
            }
        }
    }

    /// The error code of the GOAWAY that ends the connection; `None` for an end without one.
    async fn goaway(&mut self) -> Option<u8> {
        loop {
            let (frame, _, payload) = self.next().await?;
            if frame == kind::GOAWAY {
                return Some(payload[7]);
            }
        }
    }

    /// Opens a stream to the upstream.
    async fn tunnel(&mut self, server: &Server) -> TcpStream {
        self.send(&frames::connect(1, UPSTREAM, None)).await;
        let upstream = server.upstream().await;
        assert_eq!(self.next().await.unwrap().0, kind::HEADERS);
        upstream
    }
}

async fn until(mut is_so: impl FnMut() -> bool) {
    patiently(async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn sixteen_requests_wait_before_a_client_has_authenticated_and_more_are_refused() {
    let (server, memory) = server(false).await;
    server.routes.gate.send_replace(false);
    let mut client = Raw::new(&server).await;
    for number in 0..20 {
        client.send(&frames::connect(2 * number + 1, UPSTREAM, None)).await;
    }
    let mut refused = 0;
    while refused < 4 {
        let (frame, flags, _) = client.next().await.unwrap();
        // The server does not wait for what the client has not sent: RST_STREAM follows.
        if frame == kind::HEADERS {
            assert_eq!(flags, END_HEADERS | END_STREAM);
            refused += 1;
        }
    }
    assert_eq!(*server.routes.refusals.lock().unwrap(), [429; 4]);
    assert_eq!(server.routes.requests.lock().unwrap().len(), 16);
    let waiting = memory.held();
    assert!(waiting > 16 * 1024, "{waiting} bytes are counted");
    server.routes.gate.send_replace(true);
    until(|| memory.held() < waiting - 15 * 1024).await;
}

#[tokio::test]
async fn a_client_that_authenticates_is_no_longer_counted_and_has_its_full_window() {
    let (server, memory) = server(false).await;
    let mut client = server.client().await;
    until(|| memory.held() > 0).await;
    server.routes.is_authenticated.store(true, Relaxed);
    let (mut ends, mut upstream) = server.tunnel_of(&mut client).await;
    until(|| memory.held() == 0).await;
    let bytes = pattern(200 * 1024);
    let mut received = vec![0; bytes.len()];
    let (sent, read) =
        tokio::join!(ends.write_all(bytes.clone()), patiently(upstream.read_exact(&mut received)));
    assert!(sent.is_ok() && read.is_ok() && received == bytes);
}

#[tokio::test]
async fn early_data_of_a_client_that_has_not_authenticated_is_at_most_64_kib() {
    let (mut server, _) = server(false).await;
    server.routes.gate.send_replace(false);
    let mut client = Raw::new(&server).await;
    for stream in [1, 3, 5, 7, 9] {
        client.send(&frames::connect(stream, UPSTREAM, None)).await;
        client.send(&frames::frame(kind::DATA, 0, stream, &[0; 16 * 1024])).await;
    }
    // FLOW_CONTROL_ERROR (RFC 9113 section 7).
    assert_eq!(client.goaway().await, Some(3));
    assert!(matches!(server.result().await, Err(Failure::Http2(_))));
}

#[tokio::test]
async fn a_frame_over_16_kib_before_an_identity_is_a_flood() {
    let (mut server, _) = server(false).await;
    let mut client = Raw::new(&server).await;
    client.send(&frames::header(16 * 1024 + 1, kind::DATA, 0, 1)).await;
    assert_eq!(client.goaway().await, Some(CALM));
    assert!(matches!(server.result().await, Err(Failure::Flood(Flood::Frame))));
}

#[tokio::test]
async fn frames_that_carry_nothing_are_bounded_for_any_client() {
    let ping = frames::frame(kind::PING, 0, 0, &[0; 8]);
    let update = frames::frame(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]);
    let empty = frames::frame(kind::DATA, 0, 1, b"");
    let priority = frames::frame(kind::PRIORITY, 0, 1, &[0, 0, 0, 0, 16]);
    let unknown = frames::frame(200, 0, 1, b"");
    let open = frames::settings(&[(INITIAL_WINDOW_SIZE, 65_535)]);
    let close = frames::settings(&[(INITIAL_WINDOW_SIZE, 0)]);
    for is_authenticated in [false, true] {
        for flood in [&ping, &update, &empty, &priority, &unknown, &[open.clone(), close.clone()].concat()] {
            let (mut server, _) = server(is_authenticated).await;
            let mut client = Raw::new(&server).await;
            let mut answer = client.0.split();
            // What the server says is read all the time, or it would have nothing to do.
            let (mut sent, mut said) = (0, vec![0; 4096]);
            let all = flood.repeat(64);
            patiently(async {
                while server.results.is_empty() {
                    tokio::select! {
                        written = answer.1.write_all(&all) => match written {
                            Ok(()) => sent += 64,
                            Err(_) => break,
                        },
                        read = answer.0.read(&mut said) => if !matches!(read, Ok(1..)) { break },
                    }
                }
            })
            .await;
            let result = server.result().await;
            assert!(matches!(result, Err(Failure::Flood(Flood::Rate))), "{:?}: {result:?}", &flood[..9]);
            assert!(sent < 40_000, "{sent} frames of {:?}", &flood[..9]);
        }
    }
}

#[tokio::test]
async fn a_client_that_makes_requests_and_takes_no_answers_is_a_flood() {
    let (mut server, memory) = server(false).await;
    let mut client = Raw::new(&server).await;
    // Refused at once, for it is no authority.
    let request = frames::frame(
        kind::HEADERS,
        END_HEADERS | END_STREAM,
        1,
        &frames::header_block(&[
            (":method", "GET"),
            (":scheme", "http"),
            (":path", "/"),
            (":authority", "a"),
        ]),
    );
    for number in 0..10_000_u32 {
        let mut next = request.clone();
        next[5..9].copy_from_slice(&(2 * number + 1).to_be_bytes());
        client.send(&next).await;
        if !server.results.is_empty() {
            break;
        }
    }
    assert!(matches!(server.result().await, Err(Failure::Flood(Flood::Rate))));
    until(|| memory.held() == 0).await;
}

#[tokio::test]
async fn a_frame_that_is_not_finished_is_counted_until_it_is() {
    let (server, memory) = server(true).await;
    let mut client = Raw::new(&server).await;
    let mut upstream = client.tunnel(&server).await;
    client.send(&frames::header(100 * 1024, kind::DATA, 0, 1)).await;
    client.send(b"x").await;
    until(|| memory.held() == 100 * 1024).await;
    client.send(&vec![b'x'; 100 * 1024 - 1]).await;
    let mut received = vec![0; 100 * 1024];
    patiently(upstream.read_exact(&mut received)).await.unwrap();
    until(|| memory.held() == 0).await;
}

#[tokio::test]
async fn header_blocks_that_are_not_finished_are_counted() {
    let (server, memory) = server(true).await;
    let mut client = Raw::new(&server).await;
    client.send(&frames::frame(kind::HEADERS, 0, 1, &frames::header_block(&[("a", "b")]))).await;
    client.send(&frames::header(8 * 1024, kind::CONTINUATION, 0, 1)).await;
    until(|| memory.held() > 8 * 1024).await;
}

#[tokio::test]
async fn the_connection_whose_frame_waits_longest_is_the_first_to_go_when_memory_is_short() {
    let memory = MemoryBudget::new(300 * 1024);
    let mut server = Server::start(Settings { memory: memory.clone(), ..plaintext() }).await;
    let mut clients = Vec::new();
    for number in 1..=3 {
        let mut client = Raw::new(&server).await;
        client.send(&frames::header(110 * 1024, kind::DATA, 0, 1)).await;
        until(|| memory.held() >= number.min(2) * 110 * 1024).await;
        clients.push(client);
    }
    let failure = server.result().await.unwrap_err().to_string();
    assert!(failure.contains("does not finish what it began"), "{failure}");
    assert!(clients[0].next().await.is_none());
}

#[tokio::test]
async fn frames_that_are_not_finished_count_for_their_cluster() {
    let (memory, cluster) = (MemoryBudget::new(16 << 20), MemoryBudget::new(200 * 1024));
    let settings = Settings { memory: memory.clone(), ..plaintext() };
    let mut server = Server::start_with(settings, Some(cluster.clone())).await;
    let [mut first, mut second] = [Raw::new(&server).await, Raw::new(&server).await];
    first.send(&frames::header(110 * 1024, kind::DATA, 0, 1)).await;
    until(|| (cluster.held(), memory.held()) == (110 * 1024, 110 * 1024)).await;
    second.send(&frames::header(110 * 1024, kind::DATA, 0, 1)).await;
    let failure = server.result().await.unwrap_err().to_string();
    assert!(failure.contains("does not finish what it began"), "{failure}");
    assert!(first.next().await.is_none(), "the first of its own makes room");
    until(|| (cluster.held(), memory.held()) == (110 * 1024, 110 * 1024)).await;
}

#[tokio::test]
async fn empty_data_frames_of_an_honest_peer_cut_nothing() {
    let (server, _) = server(true).await;
    let mut client = Raw::new(&server).await;
    let mut upstream = client.tunnel(&server).await;
    for number in 0..500_u32 {
        client.send(&frames::frame(kind::DATA, 0, 1, b"")).await;
        client.send(&frames::frame(kind::DATA, 0, 1, &number.to_be_bytes())).await;
        let mut received = [0; 4];
        patiently(upstream.read_exact(&mut received)).await.unwrap();
        assert_eq!(u32::from_be_bytes(received), number);
    }
}

#[tokio::test]
async fn frames_arrive_whole_wherever_reads_cut_them() {
    let (server, _) = server(true).await;
    let mut client = Raw::new(&server).await;
    client.0.set_nodelay(true).unwrap();
    let mut upstream = client.tunnel(&server).await;
    let bytes: Vec<u8> = (0..40_u8)
        .flat_map(|number| {
            let empty = frames::frame(kind::DATA, 0, 1, b"");
            [empty, frames::frame(kind::DATA, 0, 1, &[number; 3])].concat()
        })
        .collect();
    let mut expected = Vec::new();
    for step in 1..=12 {
        for piece in bytes.chunks(step) {
            client.send(piece).await;
            tokio::task::yield_now().await;
        }
        expected.extend((0..40_u8).flat_map(|number| [number; 3]));
    }
    let mut received = vec![0; expected.len()];
    patiently(upstream.read_exact(&mut received)).await.unwrap();
    assert_eq!(received, expected);
}

#[tokio::test]
async fn a_client_that_does_not_authenticate_is_sent_away_in_time() {
    let (mut server, _) = server(false).await;
    let mut client = Raw::new(&server).await;
    client.send(&frames::connect(1, "401.test:443", None)).await;
    assert_eq!(client.next().await.unwrap().0, kind::HEADERS);
    let clock = Clock::new();
    // It is alive all the time.
    for _ in 0..13 {
        client.send(&frames::frame(kind::PING, 0, 0, &[0; 8])).await;
        clock.pass(Duration::from_secs(10)).await;
    }
    clock.until("sent away", || !server.results.is_empty()).await;
    assert!(matches!(server.result().await, Err(Failure::Unauthenticated)));
    assert_eq!(client.goaway().await, Some(CALM));
}

#[tokio::test]
async fn a_frame_that_is_never_finished_ends_its_connection_and_one_that_is_long_does_not() {
    let (mut server, _) = server(true).await;
    let mut client = Raw::new(&server).await;
    let mut upstream = client.tunnel(&server).await;
    let clock = Clock::new();
    for _ in 0..5 {
        client.send(&frames::frame(kind::DATA, 0, 1, b"some")).await;
        client.send(&frames::header(4, kind::DATA, 0, 1)).await;
        clock.pass(Duration::from_secs(20)).await;
        client.send(b"more").await;
        let mut received = [0; 8];
        clock.by(upstream.read_exact(&mut received)).await.unwrap();
        assert_eq!(&received, b"somemore");
    }
    client.send(&frames::header(9, kind::DATA, 0, 1)).await;
    for _ in 0..7 {
        client.send(b"x").await;
        clock.pass(Duration::from_secs(10)).await;
    }
    clock.until("ended", || !server.results.is_empty()).await;
    assert!(matches!(server.result().await, Err(Failure::Unfinished)));
}
