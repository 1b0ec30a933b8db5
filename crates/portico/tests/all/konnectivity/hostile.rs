//! Hostile peers against server and agent as processes, each in a control group with the memory that
//! `deploy/konnectivity` gives it: it lives, and every request beside them is answered.
//!
//! What each kind of hostile peer gets is checked in `portico-konnectivity`; here they come together.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use portico_lab::frames::{self, END_HEADERS, INITIAL_WINDOW_SIZE, RawClient, kind};
use portico_lab::pki::Certificate;
use portico_wire::konnectivity::CONNECT_PATH;
use rustls::ClientConfig;
use tokio::net::UnixStream;
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};

use super::endpoint::{self, Endpoint};
use super::frontend::{Frontend, round_trip};
use super::program::{Program, until};
use super::site::Make::{Ours, Upstream};
use super::site::Mode::HttpConnect;
use super::site::Transport::Unix;
use super::site::{Part, Site};
use crate::common::PATIENCE;
use crate::hostile::support::{SMALL, Seen, connect_from};
use crate::proof::{need_descriptors, report};

/// The memory that `deploy/konnectivity/agent.yaml` gives an agent.
const SMALL_AGENT: u64 = 128 << 20;

/// Bytes without an end.
const ENDLESS: u64 = 1 << 40;

/// Lines that the log of a process may have, for the minute that a test takes at most: each kind of trouble
/// is a few lines and a number.
const LINES: usize = 300;

/// A frontend that sends a few bytes to an endpoint that echoes and waits for them, again and again: half on
/// one connection that stays, half on new ones.
pub(crate) struct Bystander {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU32>,
    task: JoinHandle<Vec<Duration>>,
}

impl Bystander {
    pub(crate) fn start(frontend: Frontend, echo: Endpoint) -> Self {
        let (stop, requests) = (Arc::new(AtomicBool::default()), Arc::new(AtomicU32::default()));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&requests));
        let task = tokio::spawn(async move {
            let (mut stays, mut times) = (frontend.connect(&echo.target()).await, Vec::new());
            while !stopped.load(Relaxed) || times.is_empty() {
                let begun = Instant::now();
                round_trip(&mut stays, b"stays").await;
                times.push(begun.elapsed());
                let begun = Instant::now();
                round_trip(&mut frontend.connect(&echo.target()).await, b"is new").await;
                times.push(begun.elapsed());
                counted.fetch_add(2, Relaxed);
            }
            times
        });
        Self { stop, requests, task }
    }

    /// Waits until it has made some requests more: while it does, the attack goes on.
    pub(crate) async fn goes_on(&self) {
        let enough = self.requests.load(Relaxed) + 20;
        until("the bystander has made its requests", || {
            self.task.is_finished() || self.requests.load(Relaxed) >= enough
        })
        .await;
        assert!(!self.task.is_finished(), "a request of the bystander failed");
    }

    /// Fails if one of its requests did.
    pub(crate) async fn stop(self) -> Seen {
        self.stop.store(true, Relaxed);
        Seen::new(self.task.await.expect("each request of the bystander is answered"))
    }
}

/// The process under attack is the one that was started, and said little.
pub(crate) fn outlived(site: &Site, program: &Program, seen: &Seen) {
    let (requests, p99) = (seen.requests(), seen.p99());
    let (lines, peak) = (program.log().lines().count(), site.group().peak_memory().unwrap_or(0) >> 20);
    report(format_args!("{requests} requests, p99 {p99:?}, at most {peak} MiB, {lines} lines"));
    assert!(site.group().pids().unwrap().contains(&program.id().cast_signed()), "it was killed");
    assert!(lines < LINES, "{lines} lines:\n{}", program.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_in_a_small_pod_outlives_strangers_agents_and_frontends_that_do_harm() {
    need_descriptors(20_000);
    let site = Site::new(HttpConnect, Unix).within(Part::Server, SMALL);
    site.pki().issue("hostile", Certificate::client("hostile"));
    let mut server = site.server(Ours, &["--proxy-strategies=destHost"]).await;
    // Dials go by the name that they ask for: to a number by ours, to a name by upstream's.
    let agent = site.agent(Ours, server.port(), &["--agent-identifiers=host=127.0.0.1"]).await;
    let of_upstream = site.agent(Upstream, server.port(), &["--agent-identifiers=host=localhost"]).await;
    until("both agents are there", || server.admin("/agents").matches("127.0.0.1:").count() >= 2).await;
    let (frontend, _) = site.frontend(&server).await;
    let bystander = Bystander::start(frontend, Endpoint::echo().await);
    bystander.goes_on().await;

    let agents = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
    let strangers = spawn_blocking(move || strangers_that_say_nothing(agents)).await.unwrap();
    assert!(strangers.len() > 2_000, "only {} connections were made", strangers.len());
    bystander.goes_on().await;
    let refused = |reason: &str| {
        let reason = format!("reason=\"{reason}\"");
        server.program.metric("portico_konnectivity_server_agents_refused_total", &reason)
    };
    for (name, reason) in [(None, "tls"), (Some("hostile"), "flood")] {
        let tls = Arc::new(site.pki().client_config(name, &[b"h2"]));
        let before = refused(reason);
        spawn_blocking(move || floods(agents, &tls)).await.unwrap();
        bystander.goes_on().await;
        assert!(refused(reason) > before, "nobody was refused for {reason}");
    }
    let (frontend, _) = site.frontend(&server).await;
    let unread = frontends_that_do_not_read(&frontend).await;
    bystander.goes_on().await;
    let unfinished = frontends_that_never_finish(&site.socket_of(&server)).await;
    bystander.goes_on().await;

    outlived(&site, &server.program, &bystander.stop().await);
    drop((strangers, unread, unfinished));
    until("nothing of them is left", || server.admin("/connections").trim() == "[]").await;
    server.program.wait_for("/readyz", 200).await;
    drop((agent, of_upstream));
}

/// More connections than the port has room for, from many addresses.
fn strangers_that_say_nothing(agents: SocketAddr) -> Vec<std::net::TcpStream> {
    (0..3_000).filter_map(|source| connect_from(source, agents)).collect()
}

/// The fields of the call of an agent that does harm.
pub(crate) fn hostile_call() -> Vec<(&'static str, &'static str)> {
    vec![
        (":method", "POST"),
        (":scheme", "https"),
        (":path", CONNECT_PATH),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("agentid", "hostile"),
        ("agentidentifiers", "host=hostile"),
    ]
}

/// Clients by frames that ask for Connect and then send what costs work and carries nothing, until they are
/// cut off. Those without a certificate are before they can ask.
fn floods(agents: SocketAddr, tls: &Arc<ClientConfig>) {
    let call = frames::frame(kind::HEADERS, END_HEADERS, 1, &frames::header_block(&hostile_call()));
    let settings = |window| frames::settings(&[(INITIAL_WINDOW_SIZE, window)]);
    let kinds = [
        frames::frame(kind::PING, 0, 0, &[0; 8]),
        [settings(65_535), settings(0)].concat(),
        frames::frame(kind::DATA, 0, 1, b""),
        call.clone(),
        // A header block without an end.
        frames::frame(kind::HEADERS, 0, 3, &[0; 16 * 1024]),
    ];
    for _ in 0..10 {
        for flood in &kinds {
            let Ok(mut client) = RawClient::connect(agents, tls, PATIENCE) else { continue };
            let opening = [frames::opening(&[(INITIAL_WINDOW_SIZE, 0)]), call.clone()].concat();
            let (many, mut is_taken) = (flood.repeat(50), client.send(&opening).is_ok());
            while is_taken {
                is_taken = client.send(&many).is_ok();
            }
        }
    }
}

/// Frontends of endpoints that never stop sending, by upstream's agent, which has one window for all: what
/// they do not read is more than the pod has.
async fn frontends_that_do_not_read(frontend: &Frontend) -> (Endpoint, Vec<super::frontend::Connection>) {
    let sender = Endpoint::sender(ENDLESS).await;
    let target = format!("localhost:{}", sender.port());
    let mut unread = Vec::new();
    for _ in 0..300 {
        let mut connection = frontend.connect(&target).await;
        // The first of them may be closed by now, to make room for others.
        let _ = endpoint::fetch(&mut connection, 4_096).await;
        unread.push(connection);
    }
    (sender, unread)
}

/// Frontends that say nothing, and some that say half of what they want.
async fn frontends_that_never_finish(socket: &std::path::Path) -> Vec<UnixStream> {
    let mut all = Vec::new();
    for number in 0..2_000 {
        let stream = UnixStream::connect(socket).await.unwrap();
        if number % 2 == 0 {
            // One that has made room already takes nothing.
            let _ = stream.try_write(b"CONNECT 127.0.0.1:9 HTTP/1.1\r\nHost:");
        }
        all.push(stream);
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_in_a_small_pod_outlives_endpoints_that_take_nothing_and_dials_that_get_no_answer() {
    let site = Site::new(HttpConnect, Unix).within(Part::Agent, SMALL_AGENT);
    // Upstream's, which has one window for all connections of an agent.
    let server = site.server(Upstream, &[]).await;
    let mut agent = site.agent(Ours, server.port(), &[]).await;
    agent.wait_for("/readyz", 200).await;
    let (frontend, _) = site.frontend(&server).await;
    let bystander = Bystander::start(frontend, Endpoint::echo().await);
    bystander.goes_on().await;

    let (frontend, holding) = (site.frontend(&server).await.0, Endpoint::holding().await);
    let mut writing = JoinSet::new();
    for _ in 0..200 {
        let mut connection = frontend.connect(&holding.target()).await;
        // Fails once the connection is closed for what it does not read, and may never end.
        writing.spawn(async move { endpoint::send(&mut connection, 4 << 20).await });
    }
    bystander.goes_on().await;
    // Nothing answers at this address of the documentation (RFC 5737).
    let mut asked = Vec::new();
    for _ in 0..300 {
        asked.push(frontend.ask("192.0.2.1:9").await);
    }
    bystander.goes_on().await;
    outlived(&site, &agent, &bystander.stop().await);
}
