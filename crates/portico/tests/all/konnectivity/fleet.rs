//! Several servers, several agents, of one make or of both.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::endpoint::Endpoint;
use super::frontend::{Frontend, is_alive, round_trip};
use super::program::until;
use super::site::Make::{self, Ours, Upstream};
use super::site::Mode::{self, Grpc, HttpConnect};
use super::site::Transport::{Tls, Unix};
use super::site::{Pair, Site};
use crate::common::PATIENCE;

macro_rules! pairings {
    ($($name:ident: $server:expr, $agent:expr;)*) => {$(mod $name {
        use super::*;

        #[tokio::test]
        async fn an_agent_behind_a_balancer_finds_every_server() {
            behind_a_balancer($server, $agent).await;
        }

        #[tokio::test]
        async fn two_agents_do_not_mix_what_they_carry() {
            two_agents($server, $agent).await;
        }

        #[tokio::test]
        async fn a_second_agent_of_the_same_id_disturbs_nothing() {
            same_id($server, $agent).await;
        }

        #[tokio::test]
        async fn an_agent_that_drains_still_serves_if_it_is_the_only_one() {
            drains($server, $agent).await;
        }

        #[tokio::test]
        async fn dials_go_to_the_agent_that_has_the_host() {
            by_host($server, $agent).await;
        }

        #[tokio::test]
        async fn readiness_follows_the_other_side() {
            readiness($server, $agent).await;
        }

        #[tokio::test]
        async fn a_further_alpn_protocol_of_the_agent_is_no_hindrance() {
            alpn($server, $agent).await;
        }
    })*};
}

pairings! {
    upstream_server_our_agent: Upstream, Ours;
    our_server_upstream_agent: Ours, Upstream;
    our_pair: Ours, Ours;
}

pub(crate) const OPEN_SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";
const OPEN_ENDPOINTS: &str = "konnectivity_network_proxy_agent_open_endpoint_connections";
const AGENTS: &str = "konnectivity_network_proxy_server_ready_backend_connections";

/// An agent that looks for further servers comes again and again, and leaves at once.
#[tokio::test]
async fn an_agent_that_looks_for_more_servers_is_one_line_of_the_log() {
    let site = Site::new(HttpConnect, Unix);
    let server = site.server(Ours, &[]).await;
    let agent = site.agent(Ours, server.port(), &["--sync-forever"]).await;
    until("it has come three times more", || {
        agent.metric("portico_konnectivity_agent_server_duplicates_total", "") > 2.5
    })
    .await;
    let log = server.program.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("agent=")).collect();
    assert!(matches!(lines[..], [line] if line.contains("agent connected")), "{lines:#?}");
}

#[tokio::test]
async fn a_server_that_is_told_to_stop_carries_what_is_open_to_its_end() {
    for (agent, mode) in [(Upstream, Grpc), (Upstream, HttpConnect), (Ours, Grpc), (Ours, HttpConnect)] {
        let site = Site::new(mode, Unix);
        let mut server = site.server(Ours, &["--graceful-shutdown-timeout=1m"]).await;
        let mut agent = site.agent(agent, server.port(), &[]).await;
        agent.wait_for("/readyz", 200).await;
        let (frontend, _helper) = site.frontend(&server).await;
        let echo = Endpoint::echo().await;
        let mut open = frontend.connect(&echo.target()).await;
        round_trip(&mut open, b"before").await;
        server.program.signal("TERM");
        server.program.wait_for("/readyz", 500).await;
        // An agent looks after its servers ten times a second.
        let signalled = Instant::now();
        while signalled.elapsed() < Duration::from_secs(1) {
            round_trip(&mut open, b"meanwhile").await;
        }
        assert_eq!(agent.metric(OPEN_SERVERS, "") as u32, 1);
        drop(open);
        until("the server ends", || server.program.get("/healthz").is_none()).await;
    }
}

#[tokio::test]
async fn certificates_and_a_ca_that_are_replaced_count_for_the_next_agent() {
    let (site, anew) = (Site::new(HttpConnect, Unix), Site::new(HttpConnect, Unix));
    let server = site.server(Ours, &[]).await;
    let mut agent = site.agent(Ours, server.port(), &[]).await;
    agent.wait_for("/readyz", 200).await;
    let (frontend, _) = site.frontend(&server).await;
    let echo = Endpoint::echo().await;
    let mut open = frontend.connect(&echo.target()).await;
    for file in ["server.crt", "server.key", "ca.crt"] {
        std::fs::copy(anew.folder().join(file), site.folder().join(file)).unwrap();
    }
    let mut next = anew.agent(Ours, server.port(), &[]).await;
    next.wait_for("/readyz", 200).await;
    let refused =
        || server.program.metric("portico_konnectivity_server_agents_refused_total", "reason=\"tls\"");
    let before = refused();
    // It knows the new CA, and has a certificate of the old one.
    let _old = site.agent(Ours, server.port(), &[]).await;
    until("the agent of the old CA is refused", || refused() > before + 0.5).await;
    assert_eq!(server.program.metric(AGENTS, "") as u32, 2);
    round_trip(&mut open, b"by the first agent").await;
}

#[tokio::test]
async fn certificates_and_a_ca_that_are_replaced_count_for_the_next_frontend() {
    let (site, anew) = (Site::new(HttpConnect, Tls), Site::new(HttpConnect, Tls));
    // Of the frontends' port alone: agents have others.
    let own = |file: &str| site.pki().file(&format!("frontends-{file}"));
    let replace = |files: &[&str], by: &Site| {
        for file in files {
            std::fs::copy(by.folder().join(file), own(file)).unwrap();
        }
    };
    replace(&["server.crt", "server.key", "ca.crt"], &site);
    let flags =
        [("--server-cert", "server.crt"), ("--server-key", "server.key"), ("--server-ca-cert", "ca.crt")];
    let flags = flags.map(|(flag, file)| format!("{flag}={}", own(file).display()));
    let server = site.server(Ours, &flags.each_ref().map(String::as_str)).await;
    let mut agent = site.agent(Ours, server.port(), &[]).await;
    agent.wait_for("/readyz", 200).await;
    let (frontend, _) = site.frontend(&server).await;
    let echo = Endpoint::echo().await;
    let mut open = frontend.connect(&echo.target()).await;
    let Frontend::Tls { address, .. } = frontend else { panic!("it is asked over TCP") };
    let in_force = async |times: usize| {
        let line = "replaced; the new one is in force";
        until("the files are in force", || server.program.log().matches(line).count() == times).await;
    };
    let config = |ca: &Site, client: &Site| {
        let client = client.pki().identity("frontend");
        Arc::new(ca.pki().authority().client_config(Some(&client), &[]).unwrap())
    };

    replace(&["server.crt", "server.key"], &anew);
    in_force(1).await;
    let with_old = Frontend::Tls { address, config: config(&anew, &site) };
    round_trip(&mut with_old.connect(&echo.target()).await, b"the new certificate").await;

    replace(&["ca.crt"], &anew);
    in_force(2).await;
    let with_new = Frontend::Tls { address, config: config(&anew, &anew) };
    round_trip(&mut with_new.connect(&echo.target()).await, b"the new CA").await;
    let connector = TlsConnector::from(config(&anew, &site));
    let (name, stream) = ("127.0.0.1".try_into().unwrap(), TcpStream::connect(address).await.unwrap());
    let mut refused = connector.connect(name, stream).await.unwrap();
    assert!(timeout(PATIENCE, refused.read_u8()).await.expect("an end").is_err(), "its CA is the old one");
    round_trip(&mut open, b"by the first frontend").await;
}

async fn behind_a_balancer(server: Make, agent: Make) {
    let site = Site::new(Grpc, Unix);
    let start = async |number: u8| {
        site.server(server, &["--server-count=3", &format!("--server-id=server-{number}")]).await
    };
    let mut servers = [start(1).await, start(2).await, start(3).await];
    let balancer = Balancer::start(servers.iter().map(|server| server.port()).collect()).await;
    let agent = site.agent(agent, balancer.port, &[]).await;
    agent.wait_for_metric(OPEN_SERVERS, "", 3.0).await;
    let echo = Endpoint::echo().await;
    let mut open = Vec::new();
    for server in &servers {
        let (frontend, helper) = site.frontend(server).await;
        let mut connection = frontend.connect(&echo.target()).await;
        round_trip(&mut connection, b"every").await;
        open.push((connection, helper));
    }
    servers[0].program.kill();
    balancer.serve(servers[1..].iter().map(|server| server.port()).collect());
    agent.wait_for_metric(OPEN_SERVERS, "", 2.0).await;
    for (connection, _) in &mut open[1..] {
        round_trip(connection, b"by the others").await;
    }
    servers[0] = start(4).await;
    balancer.serve(servers.iter().map(|server| server.port()).collect());
    agent.wait_for_metric(OPEN_SERVERS, "", 3.0).await;
    let (frontend, _helper) = site.frontend(&servers[0]).await;
    round_trip(&mut frontend.connect(&echo.target()).await, b"new").await;
}

async fn two_agents(server: Make, agent: Make) {
    for mode in [Grpc, HttpConnect] {
        let pair = Pair::start(server, agent, mode, Unix).await;
        let mut second = pair.site.agent(agent, pair.server.port(), &[]).await;
        second.wait_for("/readyz", 200).await;
        let echo = Endpoint::echo().await;
        let mut asking = JoinSet::new();
        let frontend = Arc::new(pair.frontend);
        for number in 0..100 {
            let (frontend, target) = (Arc::clone(&frontend), echo.target());
            asking.spawn(async move {
                let mut connection = frontend.connect(&target).await;
                for turn in 0..10 {
                    round_trip(&mut connection, format!("{number} {turn}").repeat(100).as_bytes()).await;
                }
            });
        }
        timeout(PATIENCE, asking.join_all()).await.expect("all are answered");
    }
}

async fn same_id(server: Make, agent: Make) {
    for mode in [Grpc, HttpConnect] {
        let site = Site::new(mode, Unix);
        let server = site.server(server, &[]).await;
        let start = async || site.agent(agent, server.port(), &["--agent-id=worker"]).await;
        let mut one = start().await;
        one.wait_for("/readyz", 200).await;
        let (frontend, _helper) = site.frontend(&server).await;
        let echo = Endpoint::echo().await;
        let mut open = frontend.connect(&echo.target()).await;
        round_trip(&mut open, b"before").await;
        let mut other = start().await;
        other.wait_for("/readyz", 200).await;
        round_trip(&mut open, b"beside").await;
        other.kill();
        server.program.wait_for_metric(AGENTS, "", 1.0).await;
        round_trip(&mut open, b"after").await;
    }
}

async fn drains(server: Make, agent: Make) {
    let pair = Pair::start(server, agent, HttpConnect, Unix).await;
    let echo = Endpoint::echo().await;
    let mut open = pair.frontend.connect(&echo.target()).await;
    pair.agent.signal("TERM");
    round_trip(&mut open, b"goes on").await;
    let mut new = pair.frontend.connect(&echo.target()).await;
    round_trip(&mut new, b"nobody else").await;
    round_trip(&mut open, b"still").await;
}

/// Two addresses of loopback, an agent for each.
async fn by_host(server: Make, agent: Make) {
    let site = Site::new(HttpConnect, Unix);
    let mut server = site.server(server, &["--proxy-strategies=destHost"]).await;
    let port = server.port();
    let identified =
        async |of: &str| site.agent(agent, port, &[&format!("--agent-identifiers=ipv4={of}")]).await;
    let (mut first, mut second) = (identified("127.0.0.1").await, identified("127.0.0.2").await);
    first.wait_for("/readyz", 200).await;
    second.wait_for("/readyz", 200).await;
    server.program.wait_for("/readyz", 200).await;
    let (frontend, _helper) = site.frontend(&server).await;
    let echo = Endpoint::echo().await;
    round_trip(&mut frontend.connect(&echo.target()).await, b"first").await;
    second.kill();
    server.program.wait_for_metric(AGENTS, "", 1.0).await;
    let other = format!("127.0.0.2:{}", echo.port());
    let refused = frontend.open(&other).await.err().expect("its agent is gone");
    assert!(refused.contains("No agent available"), "{refused}");
    round_trip(&mut frontend.connect(&echo.target()).await, b"first").await;
}

async fn readiness(server: Make, agent: Make) {
    let site = Site::new(Grpc, Unix);
    let mut server = site.server(server, &[]).await;
    server.program.wait_for("/readyz", 500).await;
    let mut agent = site.agent(agent, server.port(), &[]).await;
    agent.wait_for("/readyz", 200).await;
    server.program.wait_for("/readyz", 200).await;
    server.program.kill();
    agent.wait_for("/readyz", 503).await;
    agent.wait_for("/healthz", 200).await;
}

async fn alpn(server: Make, agent: Make) {
    let site = Site::new(Grpc, Unix);
    let server = site.server(server, &[]).await;
    let mut agent = site.agent(agent, server.port(), &["--alpn-proto=konnectivity"]).await;
    agent.wait_for("/readyz", 200).await;
}

/// As while a cluster moves from one make to the other: both get work, and either goes without the other.
#[tokio::test]
async fn agents_of_both_makes_share_a_server_and_stand_in_for_each_other() {
    for (server, mode) in [(Ours, Grpc), (Ours, HttpConnect), (Upstream, Grpc)] {
        for killed in [Ours, Upstream] {
            agents_of_both_makes(server, mode, killed).await;
        }
    }
}

async fn agents_of_both_makes(server: Make, mode: Mode, killed: Make) {
    let pair = Pair::start(server, killed, mode, Unix).await;
    let stays = if killed == Ours { Upstream } else { Ours };
    let mut stays = pair.site.agent(stays, pair.server.port(), &[]).await;
    stays.wait_for("/readyz", 200).await;
    pair.server.program.wait_for_metric(AGENTS, "", 2.0).await;
    let echo = Endpoint::echo().await;
    let mut open = Vec::new();
    for _ in 0..40 {
        open.push(pair.frontend.connect(&echo.target()).await);
    }
    let kept = stays.metric(OPEN_ENDPOINTS, "");
    let lost = pair.agent.metric(OPEN_ENDPOINTS, "");
    assert!(kept > 0.0 && lost > 0.0, "{kept} and {lost} of 40");
    let mut agent = pair.agent;
    agent.kill();
    let mut alive = 0.0;
    for connection in &mut open {
        alive += f64::from(u8::from(is_alive(connection).await));
    }
    assert!((alive - kept).abs() < 0.5, "{alive} go on, {kept} were the other agent's");
    pair.server.program.wait_for_metric(AGENTS, "", 1.0).await;
    for _ in 0..5 {
        round_trip(&mut pair.frontend.connect(&echo.target()).await, b"by the other").await;
    }
}

#[tokio::test]
async fn agents_of_both_makes_serve_servers_of_both_makes() {
    let site = Site::new(HttpConnect, Unix);
    let start = async |make: Make, id: &str| {
        site.server(make, &["--server-count=2", &format!("--server-id={id}")]).await
    };
    let servers = [start(Ours, "ours").await, start(Upstream, "upstream").await];
    let balancer = Balancer::start(servers.iter().map(|server| server.port()).collect()).await;
    let agents = [site.agent(Ours, balancer.port, &[]).await, site.agent(Upstream, balancer.port, &[]).await];
    for agent in &agents {
        agent.wait_for_metric(OPEN_SERVERS, "", 2.0).await;
    }
    let echo = Endpoint::echo().await;
    for server in &servers {
        server.program.wait_for_metric(AGENTS, "", 2.0).await;
        let (frontend, _helper) = site.frontend(server).await;
        for _ in 0..10 {
            round_trip(&mut frontend.connect(&echo.target()).await, b"either").await;
        }
    }
}

/// A TCP load balancer, which sends each connection to the next server.
pub(crate) struct Balancer {
    pub(crate) port: u16,
    servers: Arc<Mutex<Vec<u16>>>,
}

impl Balancer {
    pub(crate) async fn start(servers: Vec<u16>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", crate::common::free_port())).await.unwrap();
        let (port, servers) = (listener.local_addr().unwrap().port(), Arc::new(Mutex::new(servers)));
        let known = Arc::clone(&servers);
        tokio::spawn(async move {
            let mut turn = 0;
            while let Ok((mut stream, _)) = listener.accept().await {
                turn += 1;
                let to = {
                    let servers = known.lock().unwrap();
                    servers[turn % servers.len()]
                };
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(("127.0.0.1", to)).await?;
                    tokio::io::copy_bidirectional(&mut stream, &mut server).await
                });
            }
        });
        Self { port, servers }
    }

    /// From now on.
    pub(crate) fn serve(&self, servers: Vec<u16>) {
        *self.servers.lock().unwrap() = servers;
    }
}
