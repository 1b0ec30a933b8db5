//! HTTP/2 CONNECT over real sockets: what TCP promises survives, and one stream never holds another.

use std::time::Duration;

use crate::common::*;
use bytes::Bytes;
use h2::Reason;
use http::{Method, StatusCode};
use portico_lab::clock::Clock;
use portico_lab::frames::{self, kind};
use portico_tunnel::{End, Failure, Finished, REASON, Settings, Side};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, advance};

#[tokio::test]
async fn the_answer_is_200_only_when_the_upstream_is_connected() {
    let server = Server::start(plaintext()).await;
    server.routes.gate.send_replace(false);
    let mut client = server.client().await;
    let (mut answer, _send) = client.connect(UPSTREAM).await;
    let early = tokio::select! {
        biased;
        answer = &mut answer => panic!("answered {answer:?} before the upstream was asked"),
        () = async {
            while server.routes.requests.lock().unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
        } => true,
    };
    assert!(early);
    assert!(!server.routes.requests.lock().unwrap()[0].client_first, "the upstream may speak first");
    server.routes.gate.send_replace(true);
    assert_eq!(patiently(answer).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn every_refusal_carries_its_status_and_a_sentence() {
    let server = Server::start(plaintext()).await;
    let mut client = server.client().await;
    for status in [400, 403, 404, 429, 502, 503, 504] {
        let (answer, _send) = client.connect(&format!("{status}.test:443")).await;
        let answer = patiently(answer).await.unwrap();
        assert_eq!(answer.status().as_u16(), status);
        assert_eq!(answer.headers()["content-length"], "0");
        assert_eq!(answer.headers()[REASON], "as the test wants it");
        assert!(answer.body().is_end_stream());
    }
}

#[tokio::test]
async fn other_methods_are_told_which_one_is_served() {
    let server = Server::start(plaintext()).await;
    let mut client = server.client().await;
    let request = http::Request::builder().method(Method::GET).uri("http://test/").body(()).unwrap();
    let (answer, _) = client.requests.send_request(request, true).unwrap();
    let answer = patiently(answer).await.unwrap();
    assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.headers()["allow"], "CONNECT");
    assert!(server.routes.requests.lock().unwrap().is_empty());
    assert_eq!(*server.routes.refusals.lock().unwrap(), [StatusCode::METHOD_NOT_ALLOWED]);
}

#[tokio::test]
async fn data_sent_together_with_the_request_reaches_the_upstream() {
    let server = Server::start(plaintext()).await;
    let mut client = server.client().await;
    let (answer, mut send) = client.connect(UPSTREAM).await;
    send.send_data(Bytes::from_static(b"early"), false).unwrap();
    let mut upstream = server.upstream().await;
    let mut bytes = [0; 5];
    patiently(upstream.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"early");
    assert!(server.routes.requests.lock().unwrap()[0].client_first);
    assert_eq!(patiently(answer).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn the_client_may_finish_first() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    ends.write(b"question");
    ends.finish();
    let (question, end) = read_to_end(&mut upstream).await;
    assert_eq!((&question[..], end.is_ok()), (&b"question"[..], true));
    upstream.write_all(b"answer").await.unwrap();
    drop(upstream);
    assert_eq!(ends.read_to_end().await, (b"answer".to_vec(), None));
    let report = server.report().await;
    assert_eq!(report, Report { up: 8, down: 6, end: Some(End::Closed { first: Side::Downstream }) });
}

#[tokio::test]
async fn the_upstream_may_finish_first() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    upstream.write_all(b"greeting").await.unwrap();
    upstream.shutdown().await.unwrap();
    assert_eq!(ends.read_to_end().await, (b"greeting".to_vec(), None));
    ends.write(b"late");
    ends.finish();
    let (late, end) = read_to_end(&mut upstream).await;
    assert_eq!((&late[..], end.is_ok()), (&b"late"[..], true));
    assert_eq!(server.report().await.end, Some(End::Closed { first: Side::Upstream }));
}

#[tokio::test]
async fn bytes_before_a_client_reset_reach_the_upstream_and_then_the_reset_does() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    let bytes = pattern(200_000);
    ends.write_all(bytes.clone()).await.unwrap();
    // The client's own queue is thrown away by its reset, so it must be empty by then: one byte has come all
    // the way.
    upstream.readable().await.unwrap();
    let mut received = vec![0; 150_000];
    patiently(upstream.read_exact(&mut received)).await.unwrap();
    while ends.send.capacity() < 60_000 {
        ends.send.reserve_capacity(60_000);
        patiently(std::future::poll_fn(|cx| ends.send.poll_capacity(cx))).await.unwrap().unwrap();
    }
    ends.send.send_reset(Reason::CANCEL);
    let (rest, end) = read_to_end(&mut upstream).await;
    received.extend_from_slice(&rest);
    assert!(received == bytes, "{} of {} bytes", received.len(), bytes.len());
    assert!(is_reset(&end), "{end:?}");
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));
}

#[tokio::test]
async fn bytes_before_an_upstream_reset_reach_the_client_and_then_the_reset_does() {
    let mut server = Server::start(plaintext()).await;
    for length in [1, 10_000, 60_000] {
        let (_client, mut ends, mut upstream) = server.tunnel().await;
        let bytes = pattern(length);
        upstream.write_all(&bytes).await.unwrap();
        // What the kernel has not sent would be thrown away by the reset, before it reaches us.
        let first = ends.read().await.unwrap();
        upstream.set_zero_linger().unwrap();
        drop(upstream);
        let (rest, reason) = ends.read_to_end().await;
        assert!([&first[..], &rest].concat() == bytes, "{} + {} of {length} bytes", first.len(), rest.len());
        assert_eq!(reason, Some(Reason::CONNECT_ERROR));
        assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
    }
}

#[tokio::test]
async fn a_client_reset_is_seen_while_the_upstream_reads_nothing() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    fill_window(&mut ends).await;
    ends.send.send_reset(Reason::CANCEL);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));
    let (_, end) = read_to_end(&mut upstream).await;
    assert!(is_reset(&end), "{end:?}");
}

#[tokio::test]
async fn an_upstream_reset_is_seen_while_the_client_reads_nothing() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, upstream) = server.tunnel().await;
    fill_socket(&upstream).await;
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
    assert_eq!(ends.read_to_end().await.1, Some(Reason::CONNECT_ERROR));
}

#[tokio::test]
async fn an_upstream_reset_is_seen_while_the_upstream_reads_nothing() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, upstream) = server.tunnel().await;
    fill_window(&mut ends).await;
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
    assert_eq!(ends.read_to_end().await.1, Some(Reason::CONNECT_ERROR));
}

#[tokio::test]
async fn an_upstream_reset_after_its_own_end_is_seen() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    upstream.shutdown().await.unwrap();
    assert_eq!(ends.read_to_end().await, (vec![], None));
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Upstream }));
}

#[tokio::test]
async fn a_client_reset_after_both_are_half_closed_is_seen() {
    let mut server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    ends.finish();
    assert_eq!(read_to_end(&mut upstream).await.0, b"");
    ends.send.send_reset(Reason::CANCEL);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));
}

#[tokio::test]
async fn a_lost_connection_resets_its_upstreams() {
    let mut server = Server::start(plaintext()).await;
    let (client, _ends, mut upstream) = server.tunnel().await;
    client.connection.abort();
    let (_, end) = read_to_end(&mut upstream).await;
    assert!(is_reset(&end), "{end:?}");
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));
}

#[tokio::test]
async fn a_client_that_gives_up_while_we_connect_leaves_no_upstream() {
    let server = Server::start(plaintext()).await;
    server.routes.gate.send_replace(false);
    let mut client = server.client().await;
    let (answer, mut send) = client.connect(UPSTREAM).await;
    patiently(async {
        while server.routes.gate.receiver_count() == 0 {
            tokio::task::yield_now().await
        }
    })
    .await;
    send.send_reset(Reason::CANCEL);
    drop(answer);
    patiently(async {
        while server.routes.gate.receiver_count() > 0 {
            tokio::task::yield_now().await
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_that_stopped_reading_holds_none_of_fifty_others() {
    let server = Server::start(plaintext()).await;
    let mut client = server.client().await;
    let (_stalled, stalled_upstream) = server.tunnel_of(&mut client).await;
    fill_socket(&stalled_upstream).await;
    fifty_go_on(&server, &mut client).await;
}

#[tokio::test]
async fn upstreams_that_stopped_reading_hold_none_of_fifty_others() {
    let server = Server::start(plaintext()).await;
    let mut client = server.client().await;
    let mut stalled = Vec::new();
    for _ in 0..20 {
        let (mut ends, upstream) = server.tunnel_of(&mut client).await;
        fill_window(&mut ends).await;
        stalled.push((ends, upstream));
    }
    fifty_go_on(&server, &mut client).await;
}

/// Echoes 1 MiB over each of fifty tunnels of the same connection.
async fn fifty_go_on(server: &Server, client: &mut Client) {
    let bytes = pattern(1 << 20);
    let mut echoes = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (ends, upstream) = server.tunnel_of(client).await;
        echoes.spawn(echo(ends, upstream, bytes.clone()));
    }
    while let Some(echoed) = patiently(echoes.join_next()).await {
        assert!(echoed.unwrap() == bytes);
    }
}

/// Sends everything and returns what the upstream, which echoes, sent back.
async fn echo(ends: Ends, mut upstream: tokio::net::TcpStream, bytes: Bytes) -> Vec<u8> {
    let server = async {
        let (mut from, mut to) = upstream.split();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let Ends { mut send, mut recv } = ends;
    let writer = async {
        send_all(&mut send, bytes).await.unwrap();
        send.send_data(Bytes::new(), true).unwrap();
    };
    let ((), (), (echoed, reset)) = tokio::join!(server, writer, receive_all(&mut recv));
    assert_eq!(reset, None);
    echoed
}

#[tokio::test]
async fn sixty_megabytes_arrive_unharmed_each_way_at_once() {
    let mut server = Server::start(plaintext()).await;
    let bytes = pattern(60_000_000);
    let (_client, ends, upstream) = server.tunnel().await;
    let echoed = echo(ends, upstream, bytes.clone()).await;
    assert!(echoed == bytes, "{} of {} bytes", echoed.len(), bytes.len());
    let report = server.report().await;
    assert_eq!((report.up, report.down), (60_000_000, 60_000_000));
}

#[tokio::test]
async fn frames_of_one_byte_arrive_whole_and_cost_no_memory() {
    let server = Server::start(plaintext()).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    let bytes = pattern(20_000);
    for byte in 0..bytes.len() {
        ends.write_all(bytes.slice(byte..=byte)).await.unwrap();
    }
    ends.finish();
    assert!(read_to_end(&mut upstream).await.0 == bytes);
}

#[tokio::test]
async fn a_drain_says_goaway_and_lets_streams_finish() {
    let mut server = Server::start(plaintext()).await;
    let (client, mut ends, mut upstream) = server.tunnel().await;
    server.drain.send_replace(true);
    // The client's handle learns of the GOAWAY as an error of the next request.
    let refused = async {
        loop {
            let Ok(mut ready) = client.requests.clone().ready().await else { return };
            let uri = http::Uri::builder().authority("404.test:443").build().unwrap();
            let request = http::Request::builder().method(Method::CONNECT).uri(uri).body(()).unwrap();
            let Ok((answer, _)) = ready.send_request(request, true) else { return };
            if answer.await.is_err_and(|error| error.is_go_away()) {
                return;
            }
        }
    };
    patiently(refused).await;
    ends.write(b"still here");
    ends.finish();
    assert_eq!(read_to_end(&mut upstream).await.0, b"still here");
    upstream.write_all(b"me too").await.unwrap();
    drop(upstream);
    assert_eq!(ends.read_to_end().await, (b"me too".to_vec(), None));
    assert_eq!(server.report().await.end, Some(End::Closed { first: Side::Downstream }));
    assert!(matches!(server.result().await, Ok(Finished::Drained)));
}

#[tokio::test]
async fn a_connection_whose_slot_is_needed_is_closed_with_the_reason() {
    let mut server = Server::start(plaintext()).await;
    server.routes.gate.send_replace(false);
    let mut client = server.client().await;
    let (answer, _send) = client.connect(UPSTREAM).await;
    patiently(async {
        while server.routes.gate.receiver_count() == 0 {
            tokio::task::yield_now().await
        }
    })
    .await;
    server.routes.full.send_replace(true);
    let error = patiently(client.connection).await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM));
    assert!(error.is_go_away());
    assert!(answer.await.is_err());
    assert!(matches!(server.result().await, Err(Failure::Evicted)));
    patiently(async {
        while server.routes.gate.receiver_count() > 0 {
            tokio::task::yield_now().await
        }
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_answers_no_ping_is_given_up() {
    let settings = Settings {
        ping_interval: Duration::from_millis(20),
        ping_timeout: Duration::from_millis(20),
        ..plaintext()
    };
    let mut server = Server::start(settings).await;
    // Preface and empty SETTINGS, then silence.
    let _silent = raw(&server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    assert!(matches!(server.result().await, Err(Failure::Silent)));
}

#[tokio::test]
async fn a_peer_that_answers_pings_may_rest() {
    let settings = Settings {
        ping_interval: Duration::from_secs(1),
        ping_timeout: Duration::from_secs(1),
        ..plaintext()
    };
    let mut server = Server::start(settings).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    let clock = Clock::new();
    clock.pass(Duration::from_secs(60)).await;
    upstream.write_all(b"awake").await.unwrap();
    assert_eq!(ends.read().await.unwrap(), "awake");
    assert!(server.results.try_recv().is_err());
}

#[tokio::test]
async fn a_tunnel_that_moves_nothing_ends_if_the_operator_wants_that() {
    let settings = Settings { stream_idle: Some(Duration::from_millis(50)), ..plaintext() };
    let mut server = Server::start(settings).await;
    let (_client, mut ends, mut upstream) = server.tunnel().await;
    assert_eq!(server.report().await.end, Some(End::Idle));
    assert_eq!(ends.read_to_end().await.1, Some(Reason::CANCEL));
    assert!(is_reset(&read_to_end(&mut upstream).await.1));
}

#[tokio::test]
async fn a_connection_without_streams_ends_if_the_operator_wants_that() {
    let settings = Settings { connection_idle: Some(Duration::from_millis(50)), ..plaintext() };
    let mut server = Server::start(settings).await;
    let _client = server.client().await;
    assert!(server.result().await.is_ok());
}

#[tokio::test]
async fn a_connection_with_streams_now_and_then_ends_only_when_they_are_over() {
    let idle = Duration::from_secs(10);
    let mut server = Server::start(Settings { connection_idle: Some(idle), ..plaintext() }).await;
    let mut client = server.client().await;
    tokio::time::pause();
    // In steps, so that each look comes in time.
    let seconds = async |number| {
        for _ in 0..number {
            advance(Duration::from_secs(1)).await;
        }
    };
    // For so long there is a stream, and then for so long none.
    for (open, none) in [[(0, 6); 10], [(15, 6); 10], [(0, 0); 10]].concat() {
        let (mut ends, _upstream) = server.tunnel_of(&mut client).await;
        seconds(open).await;
        ends.send.send_reset(Reason::CANCEL);
        server.report().await;
        seconds(none).await;
    }
    let over = Instant::now();
    assert!(server.result().await.is_ok());
    assert!((idle..=idle * 2).contains(&over.elapsed()), "{:?}", over.elapsed());
}

#[tokio::test]
async fn a_new_token_on_a_connection_without_streams_does_not_keep_it() {
    let idle = Duration::from_secs(10);
    let mut server = Server::start(Settings { connection_idle: Some(idle), ..plaintext() }).await;
    let mut client = server.client().await;
    client.refresh(UPSTREAM, None).await;
    tokio::time::pause();
    advance(idle / 2).await;
    client.refresh(UPSTREAM, None).await;
    let refreshed = Instant::now();
    assert!(server.result().await.is_ok());
    assert!(refreshed.elapsed() <= idle);
}

#[tokio::test]
async fn requests_cancelled_in_masses_are_refused_for_a_second_and_what_is_open_stays() {
    /// Opens and cancels streams until one is refused.
    async fn cancel_until_refused(server: &Server, client: &mut Client) -> u32 {
        for number in 0..1_000 {
            let (mut answer, mut send) = client.connect(UPSTREAM).await;
            // It waits at the gate, or is refused.
            while server.routes.gate.receiver_count() == 0 {
                tokio::select! {
                    biased;
                    answer = &mut answer => {
                        assert_eq!(answer.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
                        return number;
                    }
                    () = tokio::task::yield_now() => {}
                }
            }
            send.send_reset(Reason::CANCEL);
            while server.routes.gate.receiver_count() > 0 {
                tokio::task::yield_now().await;
            }
        }
        panic!("1,000 requests cancelled, and nothing happened");
    }
    let server = Server::start(Settings { max_streams: 10, ..plaintext() }).await;
    let (mut client, mut open, mut upstream) = server.tunnel().await;
    tokio::time::pause();
    server.routes.gate.send_replace(false);
    assert_eq!(patiently(cancel_until_refused(&server, &mut client)).await, 11);
    server.routes.gate.send_replace(true);
    let (answer, _send) = client.connect(UPSTREAM).await;
    assert_eq!(answer.await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS, "the second is not over");
    open.write(b"still here");
    let mut bytes = [0; 10];
    upstream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"still here");

    advance(Duration::from_secs(1)).await;
    server.tunnel_of(&mut client).await;
    assert_eq!(*server.routes.refusals.lock().unwrap(), [StatusCode::TOO_MANY_REQUESTS; 2]);
}

#[tokio::test]
async fn requests_cancelled_before_they_were_seen_do_not_end_the_connection() {
    // What an agent has sent to a gateway that stood still, all of it read at once when it goes on.
    let mut bytes = frames::opening(&[]);
    for stream in (1..200).step_by(2) {
        bytes.extend(frames::connect(stream, UPSTREAM, None));
        bytes.extend(frames::frame(kind::RST_STREAM, 0, stream, &[0, 0, 0, 8]));
    }
    bytes.extend(frames::connect(201, UPSTREAM, None));
    let server = Server::start(plaintext()).await;
    let mut client = TcpStream::connect(server.address).await.unwrap();
    client.write_all(&bytes).await.unwrap();
    while next_frame(&mut client).await != (kind::HEADERS, 201) {}
}

/// Kind and stream of the next frame, which is no GOAWAY.
async fn next_frame(client: &mut TcpStream) -> (u8, u32) {
    let read = async {
        let mut header = [0; 9];
        client.read_exact(&mut header).await.unwrap();
        let [high, middle, low, kind, _, a, b, c, d] = header;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        client.read_exact(&mut payload).await.unwrap();
        assert_ne!(kind, kind::GOAWAY, "{}", String::from_utf8_lossy(&payload));
        (kind, u32::from_be_bytes([a, b, c, d]))
    };
    patiently(read).await
}

/// A pod that writes just when its connection is refused: more such frames than the connection may have of
/// streams that are forgotten.
#[tokio::test]
async fn what_was_under_way_for_refused_requests_does_not_end_the_connection() {
    let streams = || (1..801).step_by(2);
    let requests = streams().map(|stream| frames::connect(stream, "404.test:443", None));
    let late = streams().map(|stream| frames::frame(kind::DATA, 0, stream, b"x"));
    let ping = frames::frame(kind::PING, 0, 0, &[0; 8]);
    let server = Server::start(plaintext()).await;
    let mut client = TcpStream::connect(server.address).await.unwrap();
    client.write_all(&[frames::opening(&[]), requests.collect::<Vec<_>>().concat()].concat()).await.unwrap();
    for _ in streams() {
        while next_frame(&mut client).await.0 != kind::HEADERS {}
    }
    let late = late.chain([ping]).collect::<Vec<_>>().concat();
    for _ in 0..48 {
        client.write_all(&late).await.unwrap();
        while next_frame(&mut client).await.0 != kind::PING {}
    }
}

/// Sends until the client's window for the stream is used up: its upstream reads nothing.
async fn fill_window(ends: &mut Ends) {
    let chunk = pattern(64 * 1024);
    // The kernel's buffers on the way take some megabytes; the window stops the rest.
    loop {
        ends.send.reserve_capacity(chunk.len());
        let window = std::future::poll_fn(|cx| ends.send.poll_capacity(cx));
        match tokio::time::timeout(Duration::from_millis(200), window).await {
            Ok(window) => {
                let window = window.unwrap().unwrap();
                ends.send.send_data(chunk.slice(..window.min(chunk.len())), false).unwrap();
            }
            Err(_) => return,
        }
    }
}

/// Writes until the socket takes no more: the client reads nothing.
async fn fill_socket(upstream: &tokio::net::TcpStream) {
    let chunk = pattern(64 * 1024);
    while tokio::time::timeout(Duration::from_millis(200), upstream.writable()).await.is_ok() {
        let _ = upstream.try_write(&chunk);
    }
}
