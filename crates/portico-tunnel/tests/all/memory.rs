//! Bytes without a receiver are bounded, by connection and by process, and hold up no other stream.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::common::*;
use bytes::Bytes;
use h2::Reason;
use portico_net::MemoryBudget;
use portico_tunnel::{End, Settings};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

/// The window of a stream.
const WINDOW: usize = 240 * 1024;

/// What a connection may hold for its peer.
const ROOM: usize = 1 << 20;

fn limited(limit: usize) -> (MemoryBudget, Settings) {
    let memory = MemoryBudget::new(limit);
    (memory.clone(), Settings { memory, ..plaintext() })
}

/// Returns once it is so.
async fn until(what: impl Fn() -> bool) {
    patiently(async {
        while !what() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Returns once what is held has not changed for a thousand turns of all tasks. It never is more than `most`.
async fn at_rest(memory: &MemoryBudget, most: usize) -> usize {
    let (mut last, mut same) = (0, 0);
    patiently(async {
        while same < 1000 {
            tokio::task::yield_now().await;
            let held = memory.held();
            assert!(held <= most, "{held} bytes are held, {most} may be");
            same = if held == last { same + 1 } else { 0 };
            last = held;
        }
    })
    .await;
    last
}

/// A socket whose owner may stop reading.
struct Deaf(TcpStream, Arc<AtomicBool>);

impl AsyncRead for Deaf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.1.load(Relaxed) {
            // Wakes itself for the next turn, because it may read again then.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Switches of a [`Deaf`] client.
struct Ear {
    deaf: Arc<AtomicBool>,
    /// To take back the window of every stream.
    take_back: Arc<AtomicBool>,
}

/// A client that gives a whole window on each of its streams, and reads its socket as long as it is not deaf.
async fn client_that_may_be_deaf(server: &Server) -> (Client, Ear) {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let ear = Ear { deaf: Arc::default(), take_back: Arc::default() };
    let window = u32::try_from(WINDOW).unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window).initial_connection_window_size(1 << 30);
    let (requests, mut connection) = builder.handshake(Deaf(stream, Arc::clone(&ear.deaf))).await.unwrap();
    let take_back = Arc::clone(&ear.take_back);
    let connection = poll_fn(move |cx| {
        if take_back.swap(false, Relaxed) {
            connection.set_initial_window_size(0).unwrap();
        }
        Pin::new(&mut connection).poll(cx)
    });
    (Client { requests, connection: tokio::spawn(connection) }, ear)
}

/// A connection for the HTTP/2 peer of `streams` tunnels, whose upstreams send a window each while it does
/// not read.
async fn deaf_client(server: &Server, streams: usize) -> (Client, Ear, Vec<Ends>) {
    let (mut client, ear) = client_that_may_be_deaf(server).await;
    let mut tunnels = Vec::new();
    for _ in 0..streams {
        tunnels.push(server.tunnel_of(&mut client).await);
    }
    ear.deaf.store(true, Relaxed);
    let all = tunnels.into_iter().map(|(ends, mut upstream)| {
        tokio::spawn(async move {
            // Fails where the connection is ended for it.
            let _ = upstream.write_all(&pattern(WINDOW)).await;
            let _ = upstream.shutdown().await;
            let _ = upstream.read(&mut [0]).await;
        });
        ends
    });
    (client, ear, all.collect())
}

async fn echoes(ends: &mut Ends, upstream: &mut TcpStream) {
    let mut word = [0; 4];
    ends.write(b"ping");
    patiently(upstream.read_exact(&mut word)).await.unwrap();
    assert_eq!(&word, b"ping");
    upstream.write_all(b"pong").await.unwrap();
    assert_eq!(ends.read().await.unwrap(), "pong");
}

#[tokio::test]
async fn a_peer_that_gives_window_and_does_not_read_costs_a_megabyte_and_gets_all_in_the_end() {
    let (memory, settings) = limited(64 << 20);
    let server = Server::start(settings).await;
    let (_other, mut ends, mut upstream) = server.tunnel().await;
    let (client, ear, tunnels) = deaf_client(&server, 100).await;
    let held = at_rest(&memory, ROOM + WINDOW).await;
    assert!(held >= ROOM / 2, "the peer reads nothing, and only {held} bytes are held");
    echoes(&mut ends, &mut upstream).await;
    ear.deaf.store(false, Relaxed);
    let all = tunnels.into_iter().map(|mut ends| tokio::spawn(async move { ends.read_to_end().await }));
    let expected = pattern(WINDOW);
    for received in all.collect::<Vec<_>>() {
        let (bytes, reset) = received.await.unwrap();
        assert_eq!(reset, None);
        assert!(bytes == expected);
    }
    until(|| memory.held() == 0).await;
    drop(client);
}

/// Sends until the window is used up for good, or the stream is reset. Returns which.
fn send_for_ever(mut ends: Ends) -> tokio::task::JoinHandle<Option<Reason>> {
    tokio::spawn(async move {
        let bytes = Bytes::from_static(&[7; WINDOW]);
        loop {
            ends.send.reserve_capacity(bytes.len());
            let window = poll_fn(|cx| {
                if let Poll::Ready(reason) = ends.send.poll_reset(cx) {
                    return Poll::Ready(Err(reason.ok()));
                }
                ends.send.poll_capacity(cx).map(|window| window.transpose().map_err(|error| error.reason()))
            });
            match window.await {
                Ok(Some(window)) => {
                    ends.send.send_data(bytes.slice(..window.min(bytes.len())), false).unwrap()
                }
                Ok(None) => return None,
                Err(reason) => return reason,
            }
        }
    })
}

#[tokio::test]
async fn streams_whose_sockets_do_not_read_are_reset_at_the_limit_and_no_others() {
    const STREAMS: usize = 24;
    let limit = 8 * WINDOW;
    let (memory, settings) = limited(limit);
    let mut server = Server::start(settings).await;
    SockRef::from(&server.upstreams).set_recv_buffer_size(4096).unwrap();
    let mut client = server.client().await;
    let (mut ends, mut upstream) = server.tunnel_of(&mut client).await;
    let (_other, mut other_ends, mut other_upstream) = server.tunnel().await;
    let (mut senders, mut stopped) = (Vec::new(), Vec::new());
    for _ in 0..STREAMS {
        let (ends, upstream) = server.tunnel_of(&mut client).await;
        stopped.push(upstream);
        senders.push(send_for_ever(ends));
    }
    // One read of the connection's socket may exceed the limit, until the streams that were cancelled have
    // gone.
    let most = limit + 4 * WINDOW;
    patiently(async {
        while senders.iter().filter(|sender| sender.is_finished()).count() < STREAMS / 2 {
            echoes(&mut ends, &mut upstream).await;
            assert!(memory.held() <= most, "{} bytes are held, {most} may be", memory.held());
        }
    })
    .await;
    let held = at_rest(&memory, most).await;
    assert!(held <= limit && held >= limit / 2, "{held} bytes are held of {limit}");
    echoes(&mut ends, &mut upstream).await;
    echoes(&mut other_ends, &mut other_upstream).await;
    let reset: Vec<_> = senders.extract_if(.., |sender| sender.is_finished()).collect();
    assert!(reset.len() < STREAMS, "no more are reset than must be");
    for sender in reset {
        assert_eq!(sender.await.unwrap(), Some(Reason::ENHANCE_YOUR_CALM));
        assert_eq!(server.report().await.end, Some(End::Memory));
    }
    for sender in &senders {
        sender.abort();
    }
    drop(stopped);
    until(|| memory.held() == 0).await;
}

#[tokio::test]
async fn a_cluster_over_its_budget_loses_its_own_streams() {
    let (memory, settings) = limited(64 << 20);
    let cluster = MemoryBudget::new(4 * WINDOW);
    let mut server = Server::start_with(settings, Some(cluster.clone())).await;
    SockRef::from(&server.upstreams).set_recv_buffer_size(4096).unwrap();
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    let (mut clients, mut senders, mut stopped) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..8 {
        let (client, ends, upstream) = server.tunnel().await;
        clients.push(client);
        stopped.push(upstream);
        senders.push(send_for_ever(ends));
    }
    assert_eq!(server.report().await.end, Some(End::Memory));
    let held = at_rest(&cluster, 4 * WINDOW).await;
    assert_eq!(memory.held(), held, "what counts for the cluster counts for the process");
    echoes(&mut ends, &mut upstream).await;
    assert!(!senders.iter().all(tokio::task::JoinHandle::is_finished));
    for sender in &senders {
        sender.abort();
    }
    drop(stopped);
    until(|| memory.held() == 0 && cluster.held() == 0).await;
}

#[tokio::test]
async fn what_agents_of_a_cluster_do_not_read_is_bounded_for_all_of_them() {
    let (memory, settings) = limited(64 << 20);
    let cluster = MemoryBudget::new(ROOM);
    let server = Server::start_with(settings, Some(cluster.clone())).await;
    let mut agents = Vec::new();
    for _ in 0..2 {
        agents.push(deaf_client(&server, 100).await);
        until(|| cluster.held() >= ROOM / 2).await;
        // And a small chunk each.
        let held = at_rest(&memory, ROOM + 32 * 1024).await;
        assert_eq!(cluster.held(), held, "what counts for the process counts for the cluster");
    }
    drop(agents);
    until(|| memory.held() == 0 && cluster.held() == 0).await;
}

#[tokio::test]
async fn what_comes_before_the_upstream_is_connected_counts() {
    let (memory, settings) = limited(1 << 20);
    let server = Server::start(settings).await;
    server.routes.gate.send_replace(false);
    let mut client = server.client().await;
    let mut senders = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..8 {
        let (answer, mut send) = client.connect(UPSTREAM).await;
        send_all(&mut send, pattern(1)).await.unwrap();
        streams.push((answer, send));
    }
    // Now each stream has waited longer than any frame of the connection will, and goes first.
    until(|| memory.held() >= 8).await;
    for (answer, mut send) in streams {
        senders.push(tokio::spawn(async move {
            send_all(&mut send, pattern(WINDOW).slice(1..)).await.unwrap();
            answer.await.map(|answer| answer.status())
        }));
    }
    until(|| senders.iter().any(tokio::task::JoinHandle::is_finished)).await;
    assert!(at_rest(&memory, 2 << 20).await <= 1 << 20);
    let reset = senders.extract_if(.., |sender| sender.is_finished());
    for sender in reset.collect::<Vec<_>>() {
        assert_eq!(sender.await.unwrap().unwrap_err().reason(), Some(Reason::ENHANCE_YOUR_CALM));
    }
    let expected = pattern(WINDOW);
    server.routes.gate.send_replace(true);
    for sender in senders {
        let mut received = vec![0; WINDOW];
        patiently(server.upstream().await.read_exact(&mut received)).await.unwrap();
        assert!(received == expected);
        assert_eq!(sender.await.unwrap().unwrap(), 200);
    }
    until(|| memory.held() == 0).await;
}

/// What a peer may leave for so long without being given up.
const WORKS: Duration = Duration::from_secs(1);

/// A peer makes the server hold what it does not take, in one way or another; others want memory later. It is
/// given up, and they are not.
async fn is_given_up_for_others(does: impl AsyncFnOnce(&Ear)) {
    let (memory, settings) = limited(640 * 1024);
    let mut server = Server::start(settings).await;
    SockRef::from(&server.upstreams).set_recv_buffer_size(4096).unwrap();
    let (client, ear, _tunnels) = deaf_client(&server, 100).await;
    at_rest(&memory, 640 * 1024).await;
    does(&ear).await;
    let held = at_rest(&memory, 640 * 1024).await;
    assert!(held >= 320 * 1024, "{held} bytes are held");
    let begun = Instant::now();
    until(|| begun.elapsed() > WORKS).await;
    // Each of these holds less than the average.
    let (_one, ends, _stopped) = server.tunnel().await;
    let (_two, more, _stopped_as_well) = server.tunnel().await;
    let senders = [send_for_ever(ends), send_for_ever(more)];
    for _ in 0..100 {
        assert_eq!(server.report().await.end, Some(End::Memory));
    }
    let failure = server.result().await.unwrap_err();
    assert!(failure.to_string().contains("does not read what it asked for"), "{failure}");
    assert!(!senders.iter().any(tokio::task::JoinHandle::is_finished));
    drop(client);
}

#[tokio::test]
async fn a_peer_that_does_not_read_its_socket_is_given_up_for_others_at_the_limit() {
    is_given_up_for_others(async |_| {}).await;
}

#[tokio::test]
async fn a_peer_that_takes_its_window_back_is_given_up_for_others_at_the_limit() {
    is_given_up_for_others(async |ear| {
        ear.take_back.store(true, Relaxed);
        until(|| !ear.take_back.load(Relaxed)).await;
        ear.deaf.store(false, Relaxed);
    })
    .await;
}
