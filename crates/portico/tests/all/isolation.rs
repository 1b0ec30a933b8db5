//! One control plane falls silent and thousands of its clients retry: the others do not notice, and what it
//! costs is bounded.
//!
//! The gateway, the control planes and the clients are hosts of their own, and the silence is a firewall's.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, get_from};
use crate::proof::*;
use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::{Host, Lab};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const HEALTHY: &str = "healthy";
const SILENT: &str = "silent";

const CLIENTS: u32 = 5_000;
/// How often each tries.
const ATTEMPTS: u32 = 3;
/// Between two attempts of one client, and the time over which the first ones are spread. So thousands come a
/// second, and not all in one moment. All in one moment would measure the queue of the kernel and not the
/// gateway.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// Most clients that may wait for the silent control plane at a time.
const MOST_CONNECTING: usize = 256;
/// Clients of the healthy cluster at a time, and the most that each asks.
const HEALTHY_CLIENTS: usize = 8;
const MOST_REQUESTS: usize = 20_000;

/// What thousands of clients at the door may cost on top: 16 KiB each, for a hello, a task and what the
/// allocator keeps, also where nothing is optimised. A buffer of 64 KiB each, or a queue that grows with
/// every attempt, would not fit.
const MOST_GROWTH_KB: u64 = 16 * CLIENTS as u64;
/// Descriptors on top of one for each client and those of the bounded attempts to connect. They are for
/// clients that try again before the gateway has seen the end of their last attempt. They are also for
/// manifests, admin connections and pipes.
const SLACK: usize = CLIENTS as usize / 2;

/// A fatal alert `internal_error` (RFC 8446): the answer to a client whose control plane cannot be reached.
const INTERNAL_ERROR: (u8, u8) = (0x15, 80);

/// Runs `work` on a thread that lives in the network of `host`.
pub(crate) fn on<T: Send + 'static>(
    host: &Host,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let network = File::open(format!("/run/netns/{}", host.namespace())).unwrap();
    std::thread::spawn(move || {
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    })
}

/// A control plane on a host of its own.
fn control_plane(lab: &Lab, name: &str) -> (Host, SocketAddr) {
    let host = lab.host(name).unwrap();
    let address = host.address();
    let bound = on(&host, move || echo((address, 6443))).join().unwrap();
    (host, bound)
}

/// One request, on a connection of its own.
async fn request(gateway: SocketAddr, hello: &[u8]) -> io::Result<()> {
    let mut stream = TcpStream::connect(gateway).await?;
    exchange(&mut stream, hello).await?;
    exchange(&mut stream, b"GET /healthz").await
}

/// Requests of the healthy cluster until `stop`: how long each took, or why one failed.
async fn healthy(gateway: SocketAddr, stop: Arc<AtomicBool>) -> Result<Vec<Duration>, String> {
    let hello: Arc<[u8]> = hello(HEALTHY).into();
    let mut clients = Vec::new();
    for _ in 0..HEALTHY_CLIENTS {
        let (hello, stop) = (Arc::clone(&hello), Arc::clone(&stop));
        clients.push(tokio::spawn(async move {
            let mut times = Vec::new();
            while times.is_empty() || (!stop.load(Relaxed) && times.len() < MOST_REQUESTS) {
                let begin = Instant::now();
                let outcome = timeout(PATIENCE, request(gateway, &hello)).await;
                outcome.map_err(|_| "no answer".to_owned())?.map_err(|error| error.to_string())?;
                times.push(begin.elapsed());
            }
            Ok::<_, String>(times)
        }));
    }
    let mut all = Vec::new();
    for client in clients {
        all.extend(client.await.map_err(|error| error.to_string())??);
    }
    Ok(all)
}

/// One attempt to reach the silent cluster: what the client gets.
async fn attempt(gateway: SocketAddr, hello: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(gateway).await?;
    stream.write_all(hello).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Thousands of clients of the silent cluster. Returns how many attempts were not answered with the alert,
/// and how.
async fn storm(gateway: SocketAddr) -> Vec<String> {
    let hello: Arc<[u8]> = hello(SILENT).into();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let hello = Arc::clone(&hello);
            tokio::spawn(async move {
                let mut odd = Vec::new();
                tokio::time::sleep(RETRY_AFTER * client / CLIENTS).await;
                for _ in 0..ATTEMPTS {
                    match timeout(PATIENCE, attempt(gateway, &hello)).await {
                        Ok(Ok(answer)) if answer.len() == 7 && (answer[0], answer[6]) == INTERNAL_ERROR => {}
                        Ok(outcome) => odd.push(format!("{outcome:?}")),
                        Err(_) => odd.push("no answer".to_owned()),
                    }
                    tokio::time::sleep(RETRY_AFTER).await;
                }
                odd
            })
        })
        .collect();
    let mut odd = Vec::new();
    for client in clients {
        odd.extend(client.await.unwrap());
    }
    odd
}

/// For people.
fn percentile_99(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let count = times.len();
    format!("p99 {:.1} ms of {count} requests", times[count * 99 / 100].as_secs_f64() * 1e3)
}

#[test]
fn a_silent_control_plane_with_5000_retrying_clients_costs_others_nothing_and_the_gateway_little() {
    need_descriptors(u64::from(2 * CLIENTS));
    let lab = Lab::start("isolation").unwrap();
    let (seed, users) = (lab.host("seed").unwrap(), lab.host("users").unwrap());
    let (_healthy, healthy_endpoint) = control_plane(&lab, HEALTHY);
    let (silent, silent_endpoint) = control_plane(&lab, SILENT);
    let site = Site::new();
    site.put(HEALTHY, &manifest(HEALTHY, None, healthy_endpoint));
    site.put(SILENT, &manifest(SILENT, None, silent_endpoint));
    let at = |port: u16| SocketAddr::new(seed.address().into(), port);
    let (sni, admin) = (at(6443), at(8002));
    let (manifests, sni_text, admin_text) = (site.manifests(), sni.to_string(), admin.to_string());
    let most_connecting = MOST_CONNECTING.to_string();
    let arguments = [
        "gateway",
        "--manifests",
        &manifests,
        "--sni-listen",
        &sni_text,
        "--tunnel-listen",
        "off",
        "--admin-listen",
        &admin_text,
        "--workers",
        "1",
        // Long enough for the limit to be reached before the first attempts are given up.
        "--connect-timeout",
        "5s",
        "--max-connecting-per-cluster",
        &most_connecting,
        // Five thousand clients on a busy machine may be slow to speak; that is not what is tested here.
        "--hello-timeout",
        "60s",
        "--max-handshakes",
        "8192",
    ];
    let gateway = seed.spawn("portico", env!("CARGO_BIN_EXE_portico"), arguments).unwrap();
    gateway.wait_for_log("listener=sni", PATIENCE).unwrap();

    // Before: both clusters are served.
    let calm = on(&users, move || {
        runtime().block_on(async {
            request(sni, &hello(SILENT)).await.expect("the silent one is not silent yet");
            let stop = Arc::new(AtomicBool::new(false));
            let load = tokio::spawn(healthy(sni, Arc::clone(&stop)));
            tokio::time::sleep(Duration::from_secs(2)).await;
            stop.store(true, Relaxed);
            load.await.unwrap()
        })
    });
    let calm = calm.join().unwrap().expect("every request of a calm day succeeds");
    let usage = Usage(gateway.pid());
    let (descriptors, memory) = (usage.descriptors(), usage.peak_kb());

    // It falls silent, and all its clients come.
    let to_silent = Traffic::all(Direction::In).with(seed.address()).to_port(silent_endpoint.port());
    let wall = Firewall::stop(&silent, &to_silent, Verdict::Drop).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let others = on(&users, move || runtime().block_on(healthy(sni, stop)));
    let clients = on(&users, move || runtime().block_on(storm(sni)));
    let (mut most_descriptors, mut most_connecting) = (0, 0);
    while !clients.is_finished() {
        most_descriptors = most_descriptors.max(usage.descriptors());
        let metrics = get_from(admin, "/metrics").1;
        most_connecting =
            most_connecting.max(metric(&metrics, "portico_cluster_connecting{cluster=\"silent\"}"));
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let odd = clients.join().unwrap();
    over.store(true, Relaxed);
    let stormy = others.join().unwrap().expect("every request of others succeeds");
    let metrics = get_from(admin, "/metrics").1;
    let refused = |reason| {
        metric(&metrics, &format!("portico_cluster_refusals_total{{cluster=\"silent\",reason=\"{reason}\"}}"))
    };
    let (crowded, timed_out) = (refused("max_connecting"), refused("connect_timed_out"));
    report(format_args!(
        "before: {}; during: {}; {crowded} refused as too many were connecting (at most {most_connecting}), \
         {timed_out} as it did not answer; descriptors {descriptors} before, {most_descriptors} at most; \
         memory {memory} KiB before, {} KiB at most",
        percentile_99(calm),
        percentile_99(stormy),
        usage.peak_kb(),
    ));
    assert!(
        odd.is_empty(),
        "{} of {} attempts were not answered: {:?}",
        odd.len(),
        CLIENTS * ATTEMPTS,
        odd.first()
    );
    assert!(crowded > 0, "those beyond the bound are refused and counted");
    assert_eq!(crowded + timed_out, u64::from(CLIENTS * ATTEMPTS), "every attempt is counted by its reason");
    assert!(most_connecting <= MOST_CONNECTING as u64, "{most_connecting} waited at a time");
    let bound = descriptors + CLIENTS as usize + MOST_CONNECTING + 2 * HEALTHY_CLIENTS + SLACK;
    assert!(most_descriptors <= bound, "{most_descriptors} descriptors, more than {bound}");
    let growth = usage.peak_kb() - memory;
    assert!(growth <= MOST_GROWTH_KB, "memory grew by {growth} KiB");
    wait_until("every descriptor is given back", || usage.descriptors() <= descriptors);

    // It speaks again, and is served again.
    wall.lift().unwrap();
    let again = on(&users, move || {
        let hello = hello(SILENT);
        wait_until("the cluster is served again", || runtime().block_on(request(sni, &hello)).is_ok());
    });
    again.join().unwrap();
}
