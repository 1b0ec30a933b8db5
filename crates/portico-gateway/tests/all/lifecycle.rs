//! Changes around open connections: routes that come and go, a gateway that stops, a gateway that is
//! replaced.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use crate::support::*;
use portico_gateway::{AccessFormat, AccessLog, Config, End, Gateway, Listener, Offer, take_over};

const HOST: &str = "a.example.com";

/// Answers every connection with what it sends, until the process ends.
fn echo_server() -> SocketAddr {
    let endpoint = Endpoint::new();
    let address = endpoint.address;
    std::thread::spawn(move || {
        for stream in endpoint.listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut reader = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut &stream);
            });
        }
    });
    address
}

fn beat(stream: &mut TcpStream, beat: &[u8]) {
    stream.write_all(beat).unwrap();
    assert_eq!(read_exactly(stream, beat.len()), beat);
}

/// A client whose hello was echoed, so that it is connected for certain.
fn connected(gateway: &Gateway, host: &str) -> TcpStream {
    let mut client = client(gateway, host);
    let hello = hello(host);
    assert_eq!(read_exactly(&mut client, hello.len()), hello);
    client
}

/// The gateway has reset it.
fn assert_cut(client: &mut TcpStream) {
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn two_hundred_connections_do_not_notice_a_thousand_changes_to_other_clusters() {
    let gateway = start(config());
    let echo = echo_server();
    let port = free_port();
    Service::new("a", &[echo]).host(HOST).expose(&gateway);
    let mut clients: Vec<_> = (0..200).map(|_| connected(&gateway, HOST)).collect();
    for change in 0..1_000_u32 {
        let other = Service::new("other", &[echo]).host("other.example.com").port(port);
        if change % 2 == 0 {
            other.expose(&gateway)
        } else {
            other.withdraw(&gateway)
        }
        let index = change as usize % clients.len();
        beat(&mut clients[index], &change.to_be_bytes());
    }
    for client in &mut clients {
        beat(client, b"alive");
    }
    assert_eq!(gateway.connections().len(), 200);
}

#[test]
fn connections_to_an_endpoint_that_left_end_when_their_time_is_over() {
    let gateway = start(Config { removed_endpoint_timeout: Some(Duration::from_millis(20)), ..config() });
    let [old, new] = [echo_server(), echo_server()];
    Service::new("a", &[old]).host(HOST).expose(&gateway);
    let mut leaves = connected(&gateway, HOST);
    Service::new("a", &[new]).host(HOST).expose(&gateway);
    let mut stays = connected(&gateway, HOST);
    assert_cut(&mut leaves);
    beat(&mut stays, b"alive");
}

#[test]
fn connections_to_an_endpoint_that_came_back_in_time_stay() {
    // Long beside the moment between two changes.
    let gateway = start(Config { removed_endpoint_timeout: Some(Duration::from_secs(1)), ..config() });
    let [flaps, other] = [echo_server(), echo_server()];
    Service::new("a", &[flaps]).host(HOST).expose(&gateway);
    Service::new("b", &[flaps]).host("b.example.com").expose(&gateway);
    let mut stays = connected(&gateway, HOST);
    let mut leaves = connected(&gateway, "b.example.com");
    Service::new("a", &[other]).host(HOST).expose(&gateway);
    Service::new("a", &[flaps]).host(HOST).expose(&gateway);
    Service::new("b", &[other]).host("b.example.com").expose(&gateway);
    // Its time is over, and that of the other would be.
    assert_cut(&mut leaves);
    beat(&mut stays, b"alive");
}

#[test]
fn without_a_limit_connections_to_an_endpoint_that_left_stay() {
    let gateway = start(config());
    let [old, new] = [echo_server(), echo_server()];
    Service::new("a", &[old]).host(HOST).expose(&gateway);
    let mut client = connected(&gateway, HOST);
    Service::new("a", &[new]).host(HOST).expose(&gateway);
    beat(&mut client, b"alive");
}

#[test]
fn an_idle_timeout_ends_only_what_is_silent() {
    let idle = portico_gateway::IdleTimeouts { sni: Some(Duration::from_secs(1)), ..Default::default() };
    let gateway = start(Config { idle, ..config() });
    Service::new("a", &[echo_server()]).host(HOST).expose(&gateway);
    let mut silent = connected(&gateway, HOST);
    let mut busy = connected(&gateway, HOST);
    let done = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&done);
    let beats = std::thread::spawn(move || {
        while !stop.load(Relaxed) {
            beat(&mut busy, b"x");
        }
        beat(&mut busy, b"last");
    });
    assert_eq!(read_to_end(&mut silent), b"");
    done.store(true, Relaxed);
    beats.join().unwrap();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn a_drain_refuses_new_clients_and_waits_for_the_old_ones() {
    let gateway = start(config());
    let address = sni_address(&gateway);
    Service::new("a", &[echo_server()]).host(HOST).expose(&gateway);
    let mut client = connected(&gateway, HOST);
    let draining = Arc::clone(&gateway);
    let drain = std::thread::spawn(move || block_on(draining.drain(PATIENCE)));
    eventually("nobody is accepted", || TcpStream::connect(address).is_err());
    beat(&mut client, b"alive");
    drop(client);
    assert_eq!(drain.join().unwrap(), 0, "no connection had to be cut");
}

#[test]
fn a_drain_ends_what_is_left_when_its_time_is_over() {
    let gateway = start(config());
    Service::new("a", &[echo_server()]).host(HOST).expose(&gateway);
    let mut client = connected(&gateway, HOST);
    assert_eq!(block_on(gateway.drain(Duration::from_millis(20))), 1);
    assert_cut(&mut client);
    assert_eq!(ended(gateway.shared(), End::Drained), 1);
}

#[test]
fn a_client_that_is_cut_while_bytes_wait_for_it_sees_a_reset_and_no_end() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    let mut client = client(&gateway, HOST);
    let mut sender = endpoint.accept();
    sender.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let blocked = std::iter::repeat_with(|| sender.write_all(&[0; 64 * 1024])).find_map(Result::err);
    assert_eq!(blocked.unwrap().kind(), ErrorKind::WouldBlock);
    assert_eq!(block_on(gateway.drain(Duration::from_millis(20))), 1);
    let read = std::io::copy(&mut client, &mut std::io::sink());
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset, "it must not take that for all");
}

#[test]
fn a_successor_takes_the_listeners_over_and_no_client_under_load_notices() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("take-over.sock");
    let echo = echo_server();
    let service = Service::new("a", &[echo]).host(HOST).port(free_port());
    let mut running = start(Config { workers: 2, ..config() });
    service.expose(&running);
    let address = sni_address(&running);
    let done = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let load: Vec<_> = (0..4)
        .map(|_| {
            let (done, served) = (Arc::clone(&done), Arc::clone(&served));
            std::thread::spawn(move || {
                while !done.load(Relaxed) {
                    let mut client = connect(address);
                    client.write_all(&hello(HOST)).unwrap();
                    assert_eq!(read_exactly(&mut client, hello(HOST).len()), hello(HOST));
                    served.fetch_add(1, Relaxed);
                }
            })
        })
        .collect();
    let mut watch = connected(&running, HOST);
    // One more worker each time, then fewer: sockets and threads need not match.
    for workers in [3, 1, 2] {
        let offering = Arc::clone(&running);
        let offered = path.clone();
        let old = std::thread::spawn(move || {
            block_on(async {
                offering.hand_over(&Offer::new(&offered).unwrap()).await;
                offering.drain(PATIENCE).await
            })
        });
        let mut predecessor = None;
        eventually("the offer is open", || block_on(take_over(&path)).unwrap().is_some());
        eventually("the offer is open again", || path.exists());
        while predecessor.is_none() {
            predecessor = block_on(take_over(&path)).unwrap();
        }
        let mut predecessor = predecessor.expect("an offer is open");
        let access = AccessLog::start(AccessFormat::Off).unwrap();
        let config = Config { sni_listen: Some(address), workers, ..config() };
        let next = Arc::new(
            Gateway::start(config, access, Some(&service.update()), Some(&mut predecessor)).unwrap(),
        );
        predecessor.ready().unwrap();
        let target = served.load(Relaxed) + 50;
        eventually("the load goes on", || served.load(Relaxed) >= target);
        beat(&mut watch, b"alive");
        drop(watch);
        assert_eq!(old.join().unwrap(), 0, "no connection had to be cut");
        watch = connected(&next, HOST);
        running = next;
    }
    done.store(true, Relaxed);
    load.into_iter().for_each(|thread| thread.join().unwrap());
    let mut byte = [0];
    watch.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let silence = watch.read(&mut byte).expect_err("nobody sent anything");
    assert_eq!(silence.kind(), ErrorKind::WouldBlock, "the last connection is open and silent");
}

#[test]
fn a_successor_that_cannot_have_all_listeners_takes_no_connection_from_its_predecessor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("take-over.sock");
    let [inherited, taken] = [(); 2].map(|()| TcpListener::bind(LOOPBACK).unwrap());
    inherited.set_nonblocking(true).unwrap();
    let [sni, tunnel] = [&inherited, &taken].map(|listener| listener.local_addr().unwrap());
    let clients: Vec<_> = (0..50).map(|_| connect(sni)).collect();
    // So often, since one that accepts too early may fail before the first connection is taken.
    for _ in 0..300 {
        let mut predecessor = block_on(async {
            let offer = Offer::new(&path).unwrap();
            let sockets = || Ok(vec![(Listener::Sni.to_string(), inherited.as_fd().try_clone_to_owned()?)]);
            tokio::select! {
                () = offer.serve(None, sockets) => panic!("no successor is ready"),
                predecessor = take_over(&path) => predecessor.unwrap().unwrap(),
            }
        });
        let config = Config { sni_listen: Some(sni), tunnel_listen: Some(tunnel), ..config() };
        let access = AccessLog::start(AccessFormat::Off).unwrap();
        let error = Gateway::start(config, access, None, Some(&mut predecessor)).unwrap_err();
        assert!(error.to_string().contains("--tunnel-listen"), "{error}");
    }
    let waiting = inherited.incoming().take_while(Result::is_ok).count();
    assert_eq!(waiting, clients.len());
}
