//! The client half against the server half over real sockets, with a wire between them that can freeze and
//! break.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::harness::{Line, Pod, Wire, beat, connected, settings, wait_for};
use crate::common::{Server, UPSTREAM, is_reset, patiently, pattern, plaintext, read_to_end};
use portico_lab::clock::Clock;
use portico_lab::refusing::Refusing;
use portico_net::MemoryBudget;
use portico_tunnel::client::{Client, ClientSettings, OpenError, TunnelState};
use portico_tunnel::{End, Side, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Streams that one tunnel does not get alone.
const MORE_THAN_A_GROUP: usize = 33;

#[tokio::test]
async fn bytes_arrive_both_ways_whole_and_in_order() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    let (mut pod, upstream) = connected(&client, &server).await;
    let bytes = pattern(20_000_000);
    let (mut pod_reads, mut pod_writes) = pod.socket.split();
    let (mut upstream_reads, mut upstream_writes) = upstream.into_split();
    let expected = bytes.clone();
    let check = |got: Vec<u8>| assert!(got == expected, "{} bytes differ", got.len());
    let (mut up, mut down) = (Vec::new(), Vec::new());
    patiently(async {
        tokio::join!(
            async {
                pod_writes.write_all(&bytes).await.unwrap();
                pod_writes.shutdown().await.unwrap();
            },
            async {
                upstream_writes.write_all(&bytes).await.unwrap();
                upstream_writes.shutdown().await.unwrap();
            },
            async { upstream_reads.read_to_end(&mut up).await.unwrap() },
            async { pod_reads.read_to_end(&mut down).await.unwrap() },
        )
    })
    .await;
    check(up);
    check(down);
    let report = pod.report().await;
    assert_eq!((report.up, report.down), (20_000_000, 20_000_000));
}

#[tokio::test]
async fn either_side_may_finish_first_and_still_listen() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    let (mut pod, mut upstream) = connected(&client, &server).await;
    pod.socket.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut upstream).await.0, b"");
    upstream.write_all(b"late").await.unwrap();
    upstream.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut pod.socket).await.0, b"late");
    assert_eq!(pod.report().await.end, Some(End::Closed { first: Side::Downstream }));

    let (mut pod, mut upstream) = connected(&client, &server).await;
    upstream.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut pod.socket).await.0, b"");
    pod.socket.write_all(b"late").await.unwrap();
    pod.socket.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut upstream).await.0, b"late");
    assert_eq!(pod.report().await.end, Some(End::Closed { first: Side::Upstream }));
}

#[tokio::test]
async fn a_reset_arrives_on_the_other_side_as_a_reset() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    let (pod, mut upstream) = connected(&client, &server).await;
    pod.socket.set_zero_linger().unwrap();
    let Pod { socket, mut reports } = pod;
    drop(socket);
    assert!(is_reset(&read_to_end(&mut upstream).await.1));
    let report = patiently(reports.recv()).await.unwrap();
    assert_eq!(report.end, Some(End::Reset { by: Side::Downstream }));

    let (mut pod, upstream) = connected(&client, &server).await;
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    assert!(is_reset(&read_to_end(&mut pod.socket).await.1));
    assert_eq!(pod.report().await.end, Some(End::Reset { by: Side::Upstream }));
}

#[tokio::test]
async fn a_pod_that_stops_reading_slows_no_other() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(ClientSettings { tunnels: 1, ..settings(&[server.address]) });
    let (_stopped, mut flood) = connected(&client, &server).await;
    let (mut pod, mut upstream) = connected(&client, &server).await;
    // Until everything between is full.
    let bytes = vec![0; 1 << 20];
    let mut sent = 0;
    while let Ok(written) = tokio::time::timeout(Duration::from_millis(500), flood.write(&bytes)).await {
        sent += written.unwrap();
    }
    assert!(sent < 64 << 20, "{sent} bytes are held");
    for _ in 0..100 {
        beat(&mut pod.socket, &mut upstream).await;
    }
}

#[tokio::test]
async fn pods_that_do_not_read_are_reset_at_the_limit_and_others_go_on() {
    const STOPPED: usize = 16;
    // Half a window may be given back before the peer is notified: so many hold at least the other half.
    const MOST_LEFT: usize = 8;
    // The windows of four streams.
    let memory = MemoryBudget::new(4 * 240 * 1024);
    let server = Server::start(plaintext()).await;
    let settings = ClientSettings { tunnels: 1, memory: memory.clone(), ..settings(&[server.address]) };
    let client = Client::start(settings);
    let (mut pod, mut upstream) = connected(&client, &server).await;
    let mut stopped = Vec::new();
    for _ in 0..STOPPED {
        let (pod, mut flood) = connected(&client, &server).await;
        tokio::spawn(async move { while flood.write_all(&[0; 1 << 16]).await.is_ok() {} });
        stopped.push(pod);
    }
    let mut reset = 0;
    patiently(async {
        while reset < STOPPED - MOST_LEFT {
            beat(&mut pod.socket, &mut upstream).await;
            assert!(memory.held() <= 2 * memory.limit(), "{} bytes are held", memory.held());
            let ends: Vec<_> = stopped.iter_mut().filter_map(|pod| pod.reports.try_recv().ok()).collect();
            assert!(ends.iter().all(|report| report.end == Some(End::Memory)), "{ends:?}");
            reset += ends.len();
        }
    })
    .await;
    for _ in 0..100 {
        beat(&mut pod.socket, &mut upstream).await;
    }
    drop(stopped);
    patiently(async {
        while memory.held() > 0 {
            beat(&mut pod.socket, &mut upstream).await;
        }
    })
    .await;
}

#[tokio::test]
async fn tunnels_go_to_different_addresses_and_streams_are_spread_in_groups() {
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let client = Client::start(settings(&[one.address, two.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    let mut addresses: Vec<_> = client.status().iter().map(|tunnel| tunnel.address.unwrap()).collect();
    addresses.sort();
    let mut expected = [one.address, two.address];
    expected.sort();
    assert_eq!(addresses, expected);
    let mut streams = Vec::new();
    // What asks about our identity may still be open.
    for (wanted, fewest, most) in [(10, 0..=1, 10..=11), (64, 31..=33, 31..=33)] {
        while streams.len() < wanted {
            streams.push(patiently(client.open(UPSTREAM)).await.unwrap());
        }
        let mut counts: Vec<_> = client.status().iter().map(|tunnel| tunnel.streams).collect();
        counts.sort_unstable();
        assert!(fewest.contains(&counts[0]) && most.contains(&counts[1]), "{counts:?}");
    }
}

/// Streams that are opened until both tunnels have some, by the gateway that they go to.
async fn on_each(client: &Client, gateways: [SocketAddr; 2]) -> [Vec<Pod>; 2] {
    let mut pods = [Vec::new(), Vec::new()];
    for _ in 0..MORE_THAN_A_GROUP {
        let stream = patiently(client.open(UPSTREAM)).await.unwrap();
        let gateway = gateways.iter().position(|gateway| *gateway == stream.endpoint().address).unwrap();
        pods[gateway].push(Pod::on(stream).await);
    }
    assert!(pods.iter().all(|pods| !pods.is_empty()));
    pods
}

#[tokio::test]
async fn a_frozen_gateway_gets_no_new_streams_and_keeps_the_old_ones() {
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let (frozen, other) = (Line::to(one.address).await, Line::to(two.address).await);
    let client = Client::start(settings(&[frozen.address, other.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    let [mut on_frozen, mut on_other] = on_each(&client, [frozen.address, other.address]).await;
    let mut upstreams = (one.upstream().await, two.upstream().await);
    frozen.wire.send_replace(Wire::Frozen);
    let (clock, began) = (Clock::new(), Instant::now());
    let is_seen = || client.status().iter().any(|tunnel| tunnel.state == Some(TunnelState::Unresponsive));
    clock.until("it is seen to be frozen", is_seen).await;
    // The promise is three seconds. The clock of the test moves by 50 ms, and each of three timers may end a
    // step late.
    assert!(began.elapsed() <= Duration::from_millis(3_150), "{:?}", began.elapsed());
    drop(clock);
    tokio::time::resume();
    // Those that the other gateway has already come before the new ones.
    for _ in 1..on_other.len() {
        drop(two.upstream().await);
    }
    for _ in 0..4 {
        let (mut pod, mut upstream) = connected(&client, &two).await;
        beat(&mut pod.socket, &mut upstream).await;
    }
    frozen.wire.send_replace(Wire::Carries);
    // The one that froze lives on.
    beat(&mut on_frozen[0].socket, &mut upstreams.0).await;
    beat(&mut on_other[0].socket, &mut upstreams.1).await;
    wait_for(&client, TunnelState::Unresponsive, 0).await;
}

#[tokio::test]
async fn a_request_that_a_frozen_gateway_holds_is_asked_again_elsewhere() {
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let (frozen, other) = (Line::to(one.address).await, Line::to(two.address).await);
    let client = Client::start(settings(&[frozen.address, other.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    frozen.wire.send_replace(Wire::Frozen);
    // At least one of so many is given to the gateway that is not known to be frozen yet.
    let mut opening = JoinSet::new();
    for _ in 0..MORE_THAN_A_GROUP {
        let client = client.clone();
        opening.spawn(async move { client.open(UPSTREAM).await });
    }
    let opened = patiently(opening.join_all()).await;
    assert!(opened.iter().all(Result::is_ok));
    assert!(client.totals().streams_retried >= 1);
}

#[tokio::test]
async fn a_gateway_that_drains_finishes_its_streams_and_gets_no_new_ones() {
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let client = Client::start(settings(&[one.address, two.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    let [mut on_drained, on_other] = on_each(&client, [one.address, two.address]).await;
    let mut drained = one.upstream().await;
    for _ in &on_other {
        drop(two.upstream().await);
    }
    one.drain.send_replace(true);
    wait_for(&client, TunnelState::Draining, 1).await;
    for _ in 0..4 {
        let (mut pod, mut upstream) = connected(&client, &two).await;
        beat(&mut pod.socket, &mut upstream).await;
    }
    // The stream that is there finishes in its own time.
    drained.write_all(b"last words").await.unwrap();
    drained.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut on_drained[0].socket).await.0, b"last words");
}

#[tokio::test]
async fn a_stream_finds_a_gateway_that_comes_back() {
    let server = Server::start(plaintext()).await;
    let line = Line::to(server.address).await;
    let client = Client::start(settings(&[line.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    let (mut pod, _upstream) = connected(&client, &server).await;
    line.wire.send_replace(Wire::Cut);
    assert!(is_reset(&read_to_end(&mut pod.socket).await.1), "a lost tunnel resets its streams");
    wait_for(&client, TunnelState::Live, 0).await;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.open(UPSTREAM).await.map(drop) }
    });
    let before = line.accepted();
    patiently(async {
        while line.accepted() < before + 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    line.wire.send_replace(Wire::Carries);
    patiently(waiting).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stream_that_waits_for_a_gateway_in_vain_says_why() {
    let nobody = Refusing::start().unwrap();
    let client = Client::start(ClientSettings {
        open_timeout: Duration::from_millis(300),
        ..settings(&[nobody.address()])
    });
    let error = patiently(client.open(UPSTREAM)).await.unwrap_err();
    let OpenError::NoTunnel { last, .. } = &error else { panic!("{error}") };
    assert!(last.contains(&nobody.address().port().to_string()), "{error}");
}

#[tokio::test]
async fn a_stream_that_waits_for_silent_gateways_names_one_of_them_and_counts_the_others() {
    // The kernel accepts, and nobody answers.
    let silent = [(), ()].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = silent.each_ref().map(|listener| listener.local_addr().unwrap());
    for (gateways, end) in [(&addresses[..1], ""), (&addresses[..], " and 1 more")] {
        let client = Client::start(ClientSettings {
            open_timeout: Duration::from_millis(300),
            tunnels: 2,
            ..settings(gateways)
        });
        let error = patiently(client.open(UPSTREAM)).await.unwrap_err().to_string();
        let names = |gateway: &SocketAddr| {
            error.ends_with(&format!("still connecting to h2c://{gateway} at {gateway}{end}"))
        };
        assert!(gateways.iter().any(names), "{error}");
    }
}

#[tokio::test]
async fn a_refusal_arrives_with_its_status_and_reason() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    for status in [401, 403, 404, 503] {
        let error = patiently(client.open(&format!("{status}.test:443"))).await.unwrap_err();
        let OpenError::Refused { status: got, reason, .. } = error else { panic!("{error}") };
        assert_eq!(got, StatusCode::from_u16(status).unwrap());
        assert_eq!(&*reason, "as the test wants it");
    }
}

#[tokio::test]
async fn a_full_tunnel_hands_streams_to_the_other() {
    let few = portico_tunnel::Settings { max_streams: 3, ..plaintext() };
    let server = Server::start(few).await;
    // No third one.
    let client = Client::start(ClientSettings { max_tunnels: 2, ..settings(&[server.address]) });
    wait_for(&client, TunnelState::Live, 2).await;
    let mut streams = Vec::new();
    for _ in 0..6 {
        streams.push(patiently(client.open(UPSTREAM)).await.unwrap());
    }
    drop(streams);
}

#[tokio::test]
async fn a_full_tunnel_shows_a_new_token_too() {
    let few = portico_tunnel::Settings { max_streams: 3, ..plaintext() };
    let server = Server::start(few).await;
    let client = Client::start(ClientSettings { tunnels: 1, max_tunnels: 1, ..settings(&[server.address]) });
    wait_for(&client, TunnelState::Live, 1).await;
    let shown = || server.routes.verified.lock().unwrap().len();
    patiently(async {
        while shown() < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(patiently(client.open(UPSTREAM)).await.unwrap());
    }
    client.token_changed();
    patiently(async {
        while shown() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    drop(streams);
}

#[tokio::test]
async fn a_renewed_certificate_gets_new_tunnels_and_cuts_no_stream() {
    let server = Server::start(plaintext()).await;
    let line = Line::to(server.address).await;
    let client = Client::start(settings(&[line.address]));
    wait_for(&client, TunnelState::Live, 2).await;
    let (mut pod, mut upstream) = connected(&client, &server).await;
    client.certificate_changed();
    patiently(async {
        while line.accepted() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    wait_for(&client, TunnelState::Live, 2).await;
    wait_for(&client, TunnelState::Draining, 1).await;
    beat(&mut pod.socket, &mut upstream).await;
}

#[tokio::test]
async fn draining_waits_for_the_last_stream() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    let (mut pod, mut upstream) = connected(&client, &server).await;
    let draining = tokio::spawn({
        let client = client.clone();
        async move { client.drain().await }
    });
    patiently(async {
        while !matches!(client.open(UPSTREAM).await, Err(OpenError::Stopping)) {
            tokio::task::yield_now().await;
        }
    })
    .await;
    beat(&mut pod.socket, &mut upstream).await;
    assert!(!draining.is_finished());
    drop(pod.socket);
    drop(upstream);
    patiently(draining).await.unwrap();
    assert!(client.status().is_empty(), "{:?}", client.status());
}

#[tokio::test]
async fn a_request_on_a_draining_tunnel_that_freezes_is_asked_again_elsewhere() {
    let (one, two) = (Server::start(plaintext()).await, Server::start(plaintext()).await);
    let (first, second) = (Line::to(one.address).await, Line::to(two.address).await);
    let gateways = settings(&[first.address, second.address]);
    let client = Client::start(ClientSettings { tunnels: 1, ..gateways });
    wait_for(&client, TunnelState::Live, 1).await;
    let on_first = client.status()[0].address == Some(first.address);
    let (server, line) = if on_first { (&one, &first) } else { (&two, &second) };
    // The gateway has the request, says that it stops, and freezes before it answers.
    server.routes.gate.send_replace(false);
    let opening = tokio::spawn({
        let client = client.clone();
        async move { client.open(UPSTREAM).await }
    });
    patiently(async {
        while server.routes.requests.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    server.drain.send_replace(true);
    wait_for(&client, TunnelState::Draining, 1).await;
    wait_for(&client, TunnelState::Live, 1).await;
    line.wire.send_replace(Wire::Frozen);
    patiently(opening).await.unwrap().unwrap();
    assert_eq!(client.totals().streams_retried, 1);
}

#[tokio::test]
async fn a_pod_that_does_not_read_makes_the_kernel_hold_little_for_it() {
    let server = Server::start(plaintext()).await;
    let client = Client::start(settings(&[server.address]));
    let (pod, mut upstream) = connected(&client, &server).await;
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    let sender = tokio::spawn(async move {
        let piece = pattern(64 * 1024);
        while let Ok(bytes) = upstream.write(&piece).await {
            count.fetch_add(bytes, Relaxed);
        }
    });
    // Until everything on the way is full.
    let mut before = usize::MAX;
    while before != taken.load(Relaxed) {
        before = taken.load(Relaxed);
        for _ in 0..20_000 {
            tokio::task::yield_now().await;
        }
    }
    let Pod { socket, mut reports } = pod;
    drop(socket);
    let down = patiently(reports.recv()).await.unwrap().down;
    sender.abort();
    assert!(down < 1 << 20, "{down} bytes went to the pod's socket");
}

#[tokio::test]
async fn few_streams_are_asked_for_until_the_gateway_has_accepted_one_and_then_all_that_waited() {
    const STREAMS: usize = 60;
    let server = Server::start(plaintext()).await;
    server.routes.is_authenticated.store(false, Relaxed);
    server.routes.verifies.send_replace(false);
    server.routes.gate.send_replace(false);
    let client = Client::start(ClientSettings { tunnels: 1, max_tunnels: 4, ..settings(&[server.address]) });
    wait_for(&client, TunnelState::Live, 1).await;
    let mut streams = JoinSet::new();
    for _ in 0..STREAMS {
        let client = client.clone();
        streams.spawn(async move { client.open(UPSTREAM).await });
    }
    patiently(async {
        while server.routes.requests.lock().unwrap().len() < 14 {
            tokio::task::yield_now().await;
        }
        // Whatever would come, has come.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(server.routes.requests.lock().unwrap().len() <= 15);
    server.routes.is_authenticated.store(true, Relaxed);
    server.routes.verifies.send_replace(true);
    server.routes.gate.send_replace(true);
    while let Some(stream) = patiently(streams.join_next()).await {
        stream.unwrap().unwrap();
    }
    assert!(server.routes.refusals.lock().unwrap().is_empty());
    assert_eq!((client.totals().streams_refused, client.totals().tunnels_opened), (0, 1));
}
