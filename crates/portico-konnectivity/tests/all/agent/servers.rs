//! Which servers an agent is connected to.

use std::fs;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::{Request, Response};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use portico_dial::{Dialer, Target, TokenFile};
use portico_konnectivity::agent::{Agent, CountSource, Leases};
use portico_lab::clock::Clock;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::log_lines::LogLines;
use portico_lab::pki::Pki;
use portico_net::memory::Reservation;
use portico_wire::konnectivity::{ConnectId, Packet};
use tokio::net::{TcpListener, UdpSocket};
use tokio::time::{Instant, timeout};
use tower::service_fn;

use super::support::*;
use crate::names::{self, NameServer};

/// What does not come within this time, by the clock of a test, does not come.
const REST: Duration = Duration::from_secs(10);

#[tokio::test]
async fn an_agent_names_itself_and_shows_the_token_as_it_is_now() {
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let token = pki.write("token", "first\n");
    let mut settings = settings(&pki, &[server.address]);
    settings.token = Some(Arc::new(TokenFile::load(token.clone()).unwrap()));
    let _agent = Agent::start(settings);
    let mut connect = server.connect().await;
    for (name, value) in [
        ("agentid", "agent-1"),
        ("agentidentifiers", "host=node-1"),
        ("authorization", "Bearer first"),
        ("user-agent", "portico/test"),
    ] {
        assert_eq!(connect.metadata.get_all(name).iter().collect::<Vec<_>>(), [value]);
    }
    fs::write(&token, "second").unwrap();
    connect.to_agent.send_reset(h2::Reason::CANCEL);
    assert_eq!(server.connect().await.metadata["authorization"], "Bearer second");
}

#[tokio::test]
async fn an_agent_connects_to_as_many_servers_as_there_are_and_leaves_duplicates() {
    let pki = pki();
    let says = |id| Says { count: 3, ..Says::upstream(id) };
    let says = [says("one"), says("one"), says("two"), says("one"), says("two"), says("three")];
    let mut server = Server::start(&pki, &says).await;
    let agent = Agent::start(settings(&pki, &[server.address]));
    let mut connects = Vec::new();
    for _ in 0..says.len() {
        connects.push(server.connect().await);
    }
    until(|| agent.servers().len() == 3).await;
    let mut known: Vec<_> = agent.servers().iter().map(|session| session.server().to_string()).collect();
    known.sort_unstable();
    assert_eq!(known, ["one", "three", "two"]);
    assert_eq!(agent.known_servers(), 3);
    assert_eq!(agent.counters().duplicates.load(Relaxed), 3);
    // The first stream of a server is the one that stays.
    let (echo, _task) = echo().await;
    assert_eq!(connects[0].connected(echo, 1).await, ConnectId(1));
    assert!(connects[1].next().await.is_none());
}

#[tokio::test]
async fn several_addresses_are_all_connected_to() {
    let pki = pki();
    let mut servers = Vec::new();
    for id in ["one", "two", "three"] {
        servers.push(Server::start(&pki, &[Says::ours(id)]).await);
    }
    let addresses: Vec<_> = servers.iter().map(|server| server.address).collect();
    let agent = Agent::start(settings(&pki, &addresses));
    for server in &mut servers {
        server.connect().await;
    }
    until(|| agent.servers().len() == 3).await;
}

#[tokio::test]
async fn a_server_that_never_answers_does_not_hold_up_the_others() {
    let pki = pki();
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let mut settings = settings(&pki, &[mute.local_addr().unwrap(), server.address]);
    // The test is over before the first one is given up.
    settings.hello_timeout = 2 * PATIENCE;
    let agent = Agent::start(settings);
    // And one that leaves is found again meanwhile.
    drop(server.connect().await);
    let _connect = server.connect().await;
    assert_eq!(agent.counters().join_failures.load(Relaxed), 0);
    Clock::new().pass(REST).await;
    let mute = mute.into_std().unwrap();
    let open: Vec<_> = mute.incoming().map_while(Result::ok).collect();
    assert_eq!(open.len(), 1, "one at a time to one address");
}

#[tokio::test]
async fn a_name_that_is_looked_up_in_vain_does_not_hold_up_the_others() {
    let pki = pki();
    // It takes questions, and answers none.
    let name_server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.servers.insert(0, "server.example.com:8132".parse().unwrap());
    let dialer = Dialer::direct().with_name_servers(&[name_server.local_addr().unwrap()]);
    settings.to_servers = Arc::new(dialer);
    let agent = Agent::start(settings);
    let connect = server.connect().await;
    assert_eq!(agent.counters().join_failures.load(Relaxed), 0, "it waited for the name");
    // And one that leaves is found again meanwhile.
    drop(connect);
    let _connect = server.connect().await;
    assert_eq!(agent.counters().join_failures.load(Relaxed), 0, "it waited for the name");
}

#[tokio::test]
async fn an_address_that_leads_nowhere_keeps_no_agent_from_the_servers_behind_another_one() {
    let pki = pki();
    let says = |id| Says { count: 3, ..Says::upstream(id) };
    let mut balancer = Server::start(&pki, &["one", "two", "three"].map(says)).await;
    // Nothing listens on its port there.
    let dead = IpAddr::from([127, 0, 0, 2]);
    let names = NameServer::start(names::Says::Addresses(vec![dead, balancer.address.ip()])).await;
    let mut settings = settings(&pki, &[balancer.address]);
    settings.servers[0].host = "server.example.com".into();
    settings.to_servers = Arc::new(Dialer::direct().with_name_servers(&[names.address]));
    let agent = Agent::start(settings);
    let mut connects = Vec::new();
    for _ in 0..3 {
        connects.push(balancer.connect().await);
    }
    until(|| agent.servers().len() == 3).await;
    assert!(agent.counters().join_failures.load(Relaxed) > 0, "the other address was not tried");
}

#[tokio::test]
async fn an_address_that_leads_nowhere_is_tried_on_and_costs_the_servers_nothing() {
    let pki = pki();
    // One of two is away.
    let server = Server::start(&pki, &[Says { count: 2, ..Says::upstream("one") }]).await;
    let dead = IpAddr::from([127, 0, 0, 2]);
    let names = NameServer::start(names::Says::Addresses(vec![dead, server.address.ip()])).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.servers[0].host = "server.example.com".into();
    settings.to_servers = Arc::new(Dialer::direct().with_name_servers(&[names.address]));
    settings.sync_interval_cap = Duration::from_secs(1);
    let agent = Agent::start(settings);
    let failures = || agent.counters().join_failures.load(Relaxed);
    until(|| failures() >= 200).await;
    let draws = agent.counters().duplicates.load(Relaxed);
    assert!(2 * draws < failures(), "{draws} handshakes with the other server");
}

#[tokio::test]
async fn a_server_that_was_away_for_long_is_found_as_soon_as_one_that_has_just_left() {
    // Waits that grow with each would take hours for all of them.
    const ATTEMPTS: usize = 32;
    let pki = pki();
    for absence in [Absence::HangsUp, Absence::Alert, Absence::Unavailable] {
        let mut says = vec![Says::nothing(absence); ATTEMPTS];
        says.push(Says::ours("s"));
        let mut server = Server::start(&pki, &says).await;
        let mut settings = settings(&pki, &[server.address]);
        settings.sync_interval_cap = Duration::from_secs(3_600);
        let agent = Agent::start(settings);
        let _connect = server.connect().await;
        assert_eq!(agent.counters().join_failures.load(Relaxed), ATTEMPTS as u64, "{absence:?}");
    }
}

#[tokio::test]
async fn a_server_that_ends_each_connection_at_once_is_tried_again_after_a_pause() {
    const PAUSE: Duration = Duration::from_secs(10);
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.sync_interval = PAUSE;
    let agent = Agent::start(settings);
    let mut connect = server.connect().await;
    let clock = Clock::new();
    connect.to_agent.send_reset(h2::Reason::CANCEL);
    until(|| agent.counters().lost.load(Relaxed) == 1).await;
    clock.pass(PAUSE / 2).await;
    assert!(server.connects.is_empty(), "it connects again at once");
    clock.by(server.connect()).await;
}

#[tokio::test]
async fn a_server_that_ends_each_connection_is_some_lines_of_the_log() {
    const TIMES: u64 = 100;
    let (lines, _collected) =
        LogLines::collect(|metadata| metadata.target().starts_with("portico_konnectivity"));
    let (agent, mut server, connect) = connected(Says::upstream("s")).await;
    let (clock, begun) = (Clock::new(), Instant::now());
    let mut next = Some(connect);
    while agent.counters().lost.load(Relaxed) < TIMES {
        let mut connect = match next.take() {
            Some(connect) => connect,
            None => clock.by(server.connect()).await,
        };
        connect.to_agent.send_reset(h2::Reason::CANCEL);
    }
    // Some at once, and then one each so often.
    let most = 11 + begun.elapsed().as_secs() / 10;
    for text in ["connected to a server", "a server is gone"] {
        let count = lines.messages().iter().filter(|line| *line == text).count() as u64;
        assert!((1..=most.min(TIMES - 1)).contains(&count), "{text}: {count}, and {most} are the most");
    }
}

#[tokio::test]
async fn servers_that_end_each_connection_at_once_are_not_tried_as_fast_as_handshakes_go() {
    let pki = pki();
    let ids = (0..100).map(|number| &*Box::leak(number.to_string().into_boxed_str()));
    // More than there ever are, so that one lacks whenever another attempt may begin.
    let says: Vec<_> = ids.map(|id| Says { count: 200, ..Says::upstream(id) }).collect();
    let mut server = Server::start(&pki, &says).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.sync_interval = Duration::from_secs(3_600);
    settings.sync_interval_cap = settings.sync_interval;
    let _agent = Agent::start(settings);
    server.connect().await.to_agent.send_reset(h2::Reason::CANCEL);
    let (clock, mut connections) = (Clock::new(), 1);
    while let Ok(connect) = clock.by(timeout(REST, server.connects.recv())).await {
        connect.unwrap().to_agent.send_reset(h2::Reason::CANCEL);
        connections += 1;
        assert!(connections < 20, "it does not pause");
    }
}

#[tokio::test]
async fn servers_without_end_get_a_bounded_number_of_connections() {
    const MOST: usize = 256;
    let pki = pki();
    let ids = (0..=MOST).map(|number| &*Box::leak(number.to_string().into_boxed_str()));
    let says: Vec<_> = ids.map(|id| Says { count: u32::MAX, ..Says::upstream(id) }).collect();
    let mut server = Server::start(&pki, &says).await;
    let agent = Agent::start(settings(&pki, &[server.address]));
    let mut connects = Vec::new();
    for _ in 0..MOST {
        connects.push(server.connect().await);
    }
    until(|| agent.servers().len() == MOST).await;
    Clock::new().pass(REST).await;
    assert!(server.connects.is_empty(), "it connects to more");
}

#[tokio::test]
async fn with_sync_forever_servers_that_were_added_are_found() {
    let pki = pki();
    let says = [Says::ours("one"), Says::ours("one"), Says::ours("two")];
    let mut server = Server::start(&pki, &says).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.sync_forever = true;
    let agent = Agent::start(settings);
    let _first = server.connect().await;
    until(|| agent.servers().len() == 2).await;
}

/// A balancer. It leads to each of two servers once, then to `one` for so many draws, and then to `two`.
async fn balancer(pki: &Pki, count: u32, draws: usize) -> Server {
    let says = |id| Says { count, ..Says::ours(id) };
    let mut all = vec![says("one"), says("two")];
    all.resize(2 + draws, says("one"));
    all.push(says("two"));
    Server::start(pki, &all).await
}

#[tokio::test]
async fn with_sync_forever_draws_come_each_interval_for_ever_and_find_a_server_that_was_replaced() {
    let pki = pki();
    let mut server = balancer(&pki, 2, 100).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.sync_forever = true;
    settings.sync_interval_cap = Duration::from_secs(3_600);
    let agent = Agent::start(settings);
    let (_one, two) = (server.connect().await, server.connect().await);
    until(|| agent.counters().duplicates.load(Relaxed) >= 50).await;
    drop(two);
    until(|| agent.counters().lost.load(Relaxed) == 1).await;
    until(|| agent.servers().len() == 2).await;
}

#[tokio::test]
async fn a_server_that_was_replaced_is_found_though_another_one_has_long_been_out_of_reach() {
    let pki = pki();
    let mut server = balancer(&pki, 3, 60).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.sync_interval_cap = Duration::from_secs(3_600);
    let agent = Agent::start(settings);
    let (_one, two) = (server.connect().await, server.connect().await);
    // Draws have become rare by then.
    until(|| agent.counters().duplicates.load(Relaxed) >= 36).await;
    drop(two);
    until(|| agent.counters().lost.load(Relaxed) == 1).await;
    until(|| agent.servers().len() == 2).await;
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_tried_on_beside_a_server_that_is_connected() {
    let pki = pki();
    let server = Server::start(&pki, &[Says::ours("one")]).await;
    let mut settings = settings(&pki, &[server.address]);
    // It fails at once, so that no look-up is under way during the wait after a draw.
    settings.servers.push(Target { host: "no..name".into(), port: 8132 });
    settings.sync_interval_cap = Duration::from_secs(3_600);
    let agent = Agent::start(settings);
    // Several fail during each handshake with the other server: long after draws have become rare.
    until(|| agent.counters().join_failures.load(Relaxed) >= 300).await;
}

#[tokio::test]
async fn a_drained_agent_tells_its_servers_serves_them_still_and_is_idle_once_nothing_is_open() {
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::upstream("s")]).await;
    let agent = Agent::start(settings(&pki, &[server.address]));
    let mut connect = server.connect().await;
    let (echo, _task) = echo().await;
    connect.connected(echo, 1).await;
    agent.drain();
    assert_eq!(connect.packet().await, Packet::Drain);
    let connection = connect.connected(echo, 2).await;
    connect.data(connection, b"ping");
    assert!(matches!(connect.packet().await, Packet::Data { .. }));
    let clock = Clock::new();
    let mut idle = pin!(agent.idle(Duration::from_millis(1)));
    let early = clock.by(timeout(REST, &mut idle)).await;
    assert!(early.is_err(), "two connections are open");
    for connection in 1..=2 {
        connect.send(&Packet::CloseRequest(ConnectId(connection)));
    }
    clock.by(idle).await;
    // It connects to no server any more.
    drop(connect);
    until(|| agent.servers().is_empty()).await;
    clock.pass(REST).await;
    assert!(server.connects.is_empty(), "it connects again");
}

#[tokio::test]
async fn a_drained_agent_is_not_idle_while_bytes_are_on_their_way() {
    let pki = pki();
    let settings = settings(&pki, &[]);
    let bytes = Reservation::new(vec![settings.memory.clone()], Duration::ZERO);
    let agent = Agent::start(settings);
    agent.drain();
    bytes.charge(1);
    let clock = Clock::new();
    let mut idle = pin!(agent.idle(Duration::from_millis(1)));
    assert!(clock.by(timeout(REST, &mut idle)).await.is_err(), "a byte is on its way");
    drop(bytes);
    clock.by(idle).await;
}

#[tokio::test]
async fn a_server_that_sends_goaway_is_replaced_and_its_connections_go_on() {
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::upstream("one"), Says::upstream("one")]).await;
    let agent = Agent::start(settings(&pki, &[server.address]));
    let mut connect = server.connect().await;
    let (echo, _task) = echo().await;
    let connection = connect.connected(echo, 1).await;
    connect.goaway();
    let _again = server.connect().await;
    until(|| agent.servers().len() == 2).await;
    connect.data(connection, b"ping");
    assert!(matches!(connect.packet().await, Packet::Data { .. }));
}

/// How long a Lease is valid: longer than an agent takes to start.
const VALID: Duration = Duration::from_secs(5);

/// An API server that lists Leases of `servers` servers, valid for [`VALID`] from now on, in an answer with
/// that many more bytes. Its watches end at once.
fn leases_of(servers: usize, more: usize) -> Client {
    let renewed = MicroTime(Timestamp::now());
    let leases: Vec<_> = (0..servers)
        .map(|number| Lease {
            metadata: ObjectMeta { name: Some(format!("server-{number}")), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                renew_time: Some(renewed.clone()),
                lease_duration_seconds: Some(VALID.as_secs() as i32),
                ..LeaseSpec::default()
            }),
        })
        .collect();
    let list = serde_json::json!({ "metadata": { "resourceVersion": "1" }, "items": leases }).to_string();
    let list = list + &" ".repeat(more);
    let service = service_fn(move |request: Request<Body>| {
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let body = if is_watch { Vec::new() } else { list.clone().into_bytes() };
        async { Ok::<_, kube::Error>(Response::new(Body::from(body))) }
    });
    Client::new(service, "kube-system")
}

fn counted_by(client: Client) -> CountSource {
    let (namespace, selector) = ("kube-system".to_owned(), "k8s-app=konnectivity-server".to_owned());
    CountSource::Leases(Leases { client, namespace, selector })
}

#[tokio::test]
async fn an_answer_about_leases_that_is_too_long_is_not_read_to_its_end() {
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::ours("s")]).await;
    let mut settings = settings(&pki, &[server.address]);
    settings.count = counted_by(leases_of(3, 1 << 20));
    let agent = Agent::start(settings);
    let _connect = server.connect().await;
    until(|| agent.counters().lease_failures.load(Relaxed) > 0).await;
    assert_eq!(agent.known_servers(), 1);
}

#[tokio::test]
async fn the_last_count_of_leases_stays_while_the_api_server_is_away() {
    let begun = std::time::Instant::now();
    let pki = pki();
    let mut server = Server::start(&pki, &[Says::ours("s")]).await;
    let api = FaultyApi::default();
    let mut settings = settings(&pki, &[server.address]);
    settings.count = counted_by(api.client(&leases_of(3, 0)));
    let agent = Agent::start(settings);
    let _connect = server.connect().await;
    until(|| agent.known_servers() == 3).await;
    api.rules(|rules| rules.answers.push(("/leases", Answer::Status(500), usize::MAX)));
    let clock = Clock::new();
    clock.until("it has failed again", || agent.counters().lease_failures.load(Relaxed) > 3).await;
    // By the clock on the wall, and then some looks by the other one.
    while begun.elapsed() < VALID {
        tokio::task::yield_now().await;
    }
    clock.pass(Duration::from_secs(120)).await;
    assert_eq!(agent.known_servers(), 3, "renewals are missing, and not servers");
}
