//! `portico konnectivity server` and `agent` beside a real kube-apiserver, with the rights that the manual
//! names and no more: Leases by which servers are counted, and reviews of agents' tokens.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use portico_lab::frames::{self, END_HEADERS, INITIAL_WINDOW_SIZE, RawClient, kind};
use portico_lab::{ApiServer, Kubectl, programs};
use rustls::ClientConfig;
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::common::PATIENCE;
use crate::hostile::support::{SMALL, connect_from};
use crate::konnectivity::endpoint::Endpoint;
use crate::konnectivity::fleet::{Balancer, OPEN_SERVERS};
use crate::konnectivity::hostile::{Bystander, hostile_call, outlived};
use crate::konnectivity::metrics::{are_upstreams, page};
use crate::konnectivity::program::{Program, until};
use crate::konnectivity::site::{Make, Mode, Part, Site, Transport};
use crate::proof::need_descriptors;

const SERVER: &str = "system:konnectivity-server";
const ACCOUNT: &str = "konnectivity-agent";

const KNOWN_SERVERS: &str = "konnectivity_network_proxy_agent_known_server_count";

/// What a token of an agent is for, as everybody names it.
const AUDIENCE: &str = "system:konnectivity-server";

/// The flags of a server that has tokens of agents reviewed, its kubeconfig aside.
const BY_TOKEN: [&str; 4] = [
    "--cluster-ca-cert=",
    "--agent-namespace=kube-system",
    "--agent-service-account=konnectivity-agent",
    "--authentication-audience=system:konnectivity-server",
];

/// Strangers, some more than there is room for.
const STRANGERS: u32 = 1_500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_and_tokens_with_a_real_api_server() {
    let api = ApiServer::start("konnectivity-api").unwrap();
    for (namespace, name) in [("kube-system", ACCOUNT), ("kube-system", "other"), ("default", ACCOUNT)] {
        api.kubectl().run(&["create", "serviceaccount", "-n", namespace, name]).unwrap();
    }
    servers_keep_leases_and_agents_count_them(&api).await;
    each_agent_is_at_each_server_however_many_there_are(&api).await;
    api.kubectl().apply(&shipped("server-rights.yaml")).unwrap();
    an_agent_has_the_identity_that_the_api_server_says_its_token_is_of(&api).await;
    an_agent_claims_the_node_of_its_tokens_pod_and_no_other(&api).await;
    a_server_in_a_small_pod_outlives_strangers_with_made_up_tokens(&api).await;
}

/// A file of `deploy/konnectivity`.
fn shipped(name: &str) -> String {
    let path = programs::checkout().join("deploy/konnectivity").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn kubeconfig(api: &ApiServer, user: &str) -> String {
    format!("--kubeconfig={}", api.access().kubeconfig(user, None).unwrap().display())
}

/// A kubeconfig of the agents' service account.
fn kubeconfig_of_agents(api: &ApiServer, folder: &Path) -> String {
    let file = api.access().kubeconfig(SERVER, None).unwrap();
    let token = api.kubectl().run(&["create", "token", "-n", "kube-system", ACCOUNT]).unwrap();
    let cluster = json!({
        "server": api.access().server(),
        "certificate-authority": file.with_file_name("ca.crt"),
    });
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": token.trim()}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    });
    let path = folder.join("agents.kubeconfig");
    std::fs::write(&path, config.to_string()).unwrap();
    format!("--kubeconfig={}", path.display())
}

async fn servers_keep_leases_and_agents_count_them(api: &ApiServer) {
    let kubectl = api.kubectl();
    kubectl.apply(&shipped("server-leases.yaml")).unwrap();
    kubectl.apply_json(&crashed("crashed", "konnectivity-server")).unwrap();
    kubectl.apply_json(&crashed("other", "something-else")).unwrap();

    let site = Site::new(Mode::HttpConnect, Transport::Unix);
    let of_server = kubeconfig(api, SERVER);
    let server = site.server(Make::Ours, &[&of_server, "--enable-lease-controller", "--server-id=a"]).await;
    let other = site.server(Make::Ours, &[&of_server, "--enable-lease-controller", "--server-id=b"]).await;
    let counts = ["--count-server-leases", &kubeconfig_of_agents(api, site.folder())];
    let mut agent = site.agent(Make::Ours, server.port(), &counts).await;
    agent.wait_for("/readyz", 200).await;

    // It has no right yet.
    let lists = "konnectivity_network_proxy_agent_lease_lists_total";
    let denied = "http_response_code=\"403\",reason=\"Forbidden\"";
    until("the API server denies the agent its list", || agent.metric(lists, denied) >= 1.0).await;
    kubectl.apply(&shipped("agent-leases.yaml")).unwrap();

    agent.wait_for_metric(KNOWN_SERVERS, "", 2.0).await;
    let answered = "http_response_code=\"200\",reason=\"\"";
    let watches = "konnectivity_network_proxy_agent_lease_watches_total";
    until("the agent watches", || agent.metric(watches, answered) >= 1.0).await;
    assert!(agent.metric(lists, answered) >= 1.0);
    let times = "konnectivity_network_proxy_agent_lease_list_latency_seconds_count";
    assert!(agent.metric(times, "http_response_code=\"200\"") >= 1.0);
    assert!(agent.metric("portico_konnectivity_agent_lease_failures_total", "") >= 1.0);
    let written = lease(kubectl, "a").expect("the server has written its Lease");
    assert_eq!(written["metadata"]["labels"], json!({"k8s-app": "konnectivity-server"}));
    let spec = &written["spec"];
    assert_eq!((&spec["holderIdentity"], &spec["leaseDurationSeconds"]), (&json!("a"), &json!(30)));
    until("the Lease of the crashed server is gone", || lease(kubectl, "crashed").is_none()).await;
    assert!(lease(kubectl, "other").is_some(), "what has other labels stays");
    let culled = "konnectivity_network_proxy_server_culled_leases_count";
    let removed = server.program.metric(culled, "") + other.program.metric(culled, "");
    assert!((removed - 1.0).abs() < 0.5, "{removed}");
    let ours = [page(&server.program), page(&other.program), page(&agent)].concat();

    other.program.signal("TERM");
    agent.wait_for_metric(KNOWN_SERVERS, "", 1.0).await;
    assert!(lease(kubectl, "b").is_none());
    drop(server);

    // Upstream's have the same rights, and show no more of it.
    kubectl.apply_json(&crashed("crashed", "konnectivity-server")).unwrap();
    let server = site.server(Make::Upstream, &[&of_server, "--enable-lease-controller"]).await;
    let agent = site.agent(Make::Upstream, server.port(), &counts).await;
    until("the Lease of the crashed server is gone", || lease(kubectl, "crashed").is_none()).await;
    until("the agent has listed Leases", || agent.metric(lists, answered) >= 1.0).await;
    let theirs = [page(&server.program), page(&agent)].concat();
    let names = are_upstreams(&theirs, &ours);
    assert_eq!(names.iter().filter(|name| name.contains("_lease_")).count(), 6, "{names:?}");
}

/// Two servers and two agents behind a balancer become four of each.
async fn each_agent_is_at_each_server_however_many_there_are(api: &ApiServer) {
    let site = Site::new(Mode::Grpc, Transport::Unix);
    // Servers of other tests do not count.
    let (label, of_server) = ("--lease-label=k8s-app=scaled", kubeconfig(api, SERVER));
    let of_agents = kubeconfig_of_agents(api, site.folder());
    let start = async |number: usize| {
        let id = format!("--server-id=scaled-{number}");
        site.server(Make::Ours, &[&of_server, "--enable-lease-controller", label, &id]).await
    };
    let balancer = Balancer::start(Vec::new()).await;
    let (mut servers, mut agents) = (Vec::new(), Vec::new());
    for number in [2, 4] {
        while servers.len() < number {
            servers.push(start(servers.len()).await);
        }
        balancer.serve(servers.iter().map(|server| server.port()).collect());
        while agents.len() < number {
            let counts = ["--count-server-leases", label, &of_agents];
            agents.push(site.agent(Make::Ours, balancer.port, &counts).await);
        }
        for agent in &agents {
            agent.wait_for_metric(KNOWN_SERVERS, "", number as f64).await;
            agent.wait_for_metric(OPEN_SERVERS, "", number as f64).await;
        }
    }
}

fn lease(kubectl: &Kubectl, server: &str) -> Option<Value> {
    let name = format!("konnectivity-proxy-server-{server}");
    kubectl.get(&["lease", "-n", "kube-system", &name]).ok()
}

/// The Lease of a server that renewed it long ago.
fn crashed(server: &str, label: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {
            "name": format!("konnectivity-proxy-server-{server}"), "namespace": "kube-system",
            "labels": {"k8s-app": label},
        },
        "spec": {
            "holderIdentity": server, "leaseDurationSeconds": 30,
            "renewTime": "2020-01-01T00:00:00.000000Z",
        },
    })
}

async fn an_agent_has_the_identity_that_the_api_server_says_its_token_is_of(api: &ApiServer) {
    let token = |namespace: &str, name: &str, audience: &str| token(api, namespace, name, audience, &[]);
    let good = || token("kube-system", ACCOUNT, AUDIENCE);

    let way = Way::to(api).await;
    let kubeconfig = way.kubeconfig(api);
    let site = Site::new(Mode::HttpConnect, Transport::Unix);
    let server = site.server(Make::Ours, &[&BY_TOKEN[..], &[&kubeconfig]].concat()).await;
    let agent = async |name: &str, token: &str| {
        let file = site.folder().join(name);
        std::fs::write(&file, token).unwrap();
        site.agent(Make::Ours, server.port(), &[&format!("--service-account-token-path={}", file.display())])
            .await
    };
    let mut accepted = agent("good", &good()).await;
    accepted.wait_for("/readyz", 200).await;

    let signer = api.host().dir().join("seed-control-plane/sa.key");
    for (name, token, line) in [
        ("audience", token("kube-system", ACCOUNT, "other"), "does not accept the token"),
        ("account", token("kube-system", "other", AUDIENCE), "the token is of"),
        ("namespace", token("default", ACCOUNT, AUDIENCE), "the token is of"),
        ("expired", expired(&signer), "does not accept the token"),
        ("forged", "eyJhbGciOiJub25lIn0.e30.".to_owned(), "does not accept the token"),
    ] {
        let refused = agent(name, &token).await;
        refused.wait_for_line(line).await;
        assert_eq!(refused.get("/readyz").unwrap().0, 503, "{name}");
    }
    assert!(refusals(&server.program, "token") >= 5.0);

    // The API server is away, and then it says nothing: new agents wait, others stay.
    for (passes, line) in
        [(Passes::Nobody, "cannot review the token"), (Passes::Nothing, "no answer within 5s")]
    {
        let token = good();
        way.passes(passes);
        let mut waits = agent(&format!("{passes:?}"), &token).await;
        waits.wait_for_line(line).await;
        assert_eq!(accepted.get("/readyz").unwrap().0, 200);
        way.passes(Passes::All);
        waits.wait_for("/readyz", 200).await;
    }
    assert!(refusals(&server.program, "review") >= 2.0);
}

async fn an_agent_claims_the_node_of_its_tokens_pod_and_no_other(api: &ApiServer) {
    let kubectl = api.kubectl();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "agent-of-node-1", "namespace": "kube-system"},
        "spec": {
            "serviceAccountName": ACCOUNT, "nodeName": "node-1",
            "containers": [{"name": "agent", "image": "never-pulled"}],
        },
    });
    kubectl.apply_json(&pod).unwrap();
    let bound = ["--bound-object-kind=Pod", "--bound-object-name=agent-of-node-1"];
    let token = token(api, "kube-system", ACCOUNT, AUDIENCE, &bound);

    let site = Site::new(Mode::HttpConnect, Transport::Unix);
    let kubeconfig = kubeconfig(api, SERVER);
    let flags = [&kubeconfig, "--bind-identifiers=node:*=host=*", "--proxy-strategies=destHost"];
    let server = site.server(Make::Ours, &[&BY_TOKEN[..], &flags].concat()).await;
    let file = site.folder().join("token");
    std::fs::write(&file, token).unwrap();
    let file = format!("--service-account-token-path={}", file.display());
    let agent = async |claims: &str| {
        let claims = format!("--agent-identifiers={claims}");
        site.agent(Make::Ours, server.port(), &[&file, &claims]).await
    };
    let refused = agent("host=node-2").await;
    let line = refused.wait_for_line("may not claim host=node-2").await;
    assert!(line.contains("node:node-1"), "it is told what it is taken for: {line}");
    agent("host=node-1").await.wait_for("/readyz", 200).await;
    assert_eq!(refused.get("/readyz").unwrap().0, 503);
    assert!(refusals(&server.program, "identifiers") >= 1.0);
}

/// As `deploy/konnectivity` has it, nobody needs a certificate to ask. The API server says nothing about the
/// tokens of strangers.
async fn a_server_in_a_small_pod_outlives_strangers_with_made_up_tokens(api: &ApiServer) {
    need_descriptors(3 * u64::from(STRANGERS));
    let way = Way::to(api).await;
    let kubeconfig = way.kubeconfig(api);
    let site = Site::new(Mode::HttpConnect, Transport::Unix).within(Part::Server, SMALL);
    let server = site.server(Make::Ours, &[&BY_TOKEN[..], &[&kubeconfig]].concat()).await;
    let file = site.folder().join("token");
    std::fs::write(&file, token(api, "kube-system", ACCOUNT, AUDIENCE, &[])).unwrap();
    let token = format!("--service-account-token-path={}", file.display());
    let agent = async || site.agent(Make::Ours, server.port(), &[&token]).await;
    let mut accepted = agent().await;
    accepted.wait_for("/readyz", 200).await;
    let (frontend, _) = site.frontend(&server).await;
    let bystander = Bystander::start(frontend, Endpoint::echo().await);
    bystander.goes_on().await;

    way.passes(Passes::Nothing);
    let agents = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
    let tls = Arc::new(site.pki().client_config(None, &[b"h2"]));
    let strangers = spawn_blocking(move || strangers_with_tokens(agents, &tls)).await.unwrap();
    assert!(strangers.len() > 1_200, "only {} strangers were heard", strangers.len());
    bystander.goes_on().await;
    until("what has no room is refused", || refusals(&server.program, "crowded") > 0.0).await;
    until("reviews have no answer in time", || refusals(&server.program, "review") > 0.0).await;
    outlived(&site, &server.program, &bystander.stop().await);

    drop(strangers);
    way.passes(Passes::All);
    agent().await.wait_for("/readyz", 200).await;
    assert_eq!(accepted.get("/readyz").unwrap().0, 200, "it stays");
}

/// One half asks with a large token. The other begins a frame as large as it may be.
fn strangers_with_tokens(agents: SocketAddr, tls: &Arc<ClientConfig>) -> Vec<RawClient> {
    let unfinished = frames::header(16 << 10, kind::HEADERS, END_HEADERS, 1);
    let one = |number| {
        let socket = connect_from(number, agents)?;
        let mut client = RawClient::over(socket, agents.ip(), tls, PATIENCE).ok()?;
        let said = if number % 2 == 0 {
            let token = format!("Bearer made-up-{number:-<7000}");
            let call = [hostile_call(), vec![("authorization", &*token)]].concat();
            frames::frame(kind::HEADERS, END_HEADERS, 1, &frames::header_block(&call))
        } else {
            [&unfinished[..], &[0; 16 << 10][1..]].concat()
        };
        client.send(&[frames::opening(&[(INITIAL_WINDOW_SIZE, 0)]), said].concat()).ok()?;
        Some(client)
    };
    (0..STRANGERS).filter_map(one).collect()
}

/// A token that the API server issues to a service account.
fn token(api: &ApiServer, namespace: &str, name: &str, audience: &str, flags: &[&str]) -> String {
    let audience = format!("--audience={audience}");
    api.kubectl().run(&[&["create", "token", "-n", namespace, name, &audience], flags].concat()).unwrap()
}

fn refusals(server: &Program, reason: &str) -> f64 {
    server.metric("portico_konnectivity_server_agents_refused_total", &format!("reason=\"{reason}\""))
}

/// A token that was good for an hour, an hour ago.
fn expired(signer: &Path) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let account = json!({"name": "konnectivity-agent", "uid": "1"});
    let claims = json!({
        "iss": "https://kubernetes.default.svc", "aud": [AUDIENCE],
        "sub": "system:serviceaccount:kube-system:konnectivity-agent",
        "kubernetes.io": {"namespace": "kube-system", "serviceaccount": account},
        "iat": now - 7_200, "nbf": now - 7_200, "exp": now - 3_600,
    });
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(json!({"alg": "ES256", "typ": "JWT"})), part(claims));
    let pem = std::fs::read_to_string(signer).unwrap();
    let key: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    let key =
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &STANDARD.decode(key).unwrap()).unwrap();
    let signature = key.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

/// What passes on the way to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passes {
    All,
    /// Connections are accepted, and nothing is ever sent.
    Nothing,
    /// Connections are closed.
    Nobody,
}

/// A way to the API server that can be barred.
struct Way {
    address: SocketAddr,
    passes: watch::Sender<Passes>,
}

impl Way {
    async fn to(api: &ApiServer) -> Self {
        let upstream = api.access().server().trim_start_matches("https://").to_owned();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let passes = watch::Sender::new(Passes::All);
        let receiver = passes.subscribe();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(pass(stream, upstream.clone(), receiver.clone()));
            }
        });
        Self { address, passes }
    }

    /// The flag with a kubeconfig of the server that leads here.
    fn kubeconfig(&self, api: &ApiServer) -> String {
        let access = api.access().through(&format!("https://{}", self.address));
        let access = access.with_server_name("kubernetes");
        format!("--kubeconfig={}", access.kubeconfig(SERVER, None).unwrap().display())
    }

    fn passes(&self, passes: Passes) {
        self.passes.send_replace(passes);
    }
}

async fn pass(mut stream: TcpStream, upstream: String, mut passes: watch::Receiver<Passes>) {
    let copies = async {
        let mut to = TcpStream::connect(upstream).await.unwrap();
        // Ends as the connection does.
        let _ = copy_bidirectional(&mut stream, &mut to).await;
    };
    tokio::select! {
        biased;
        barred = passes.wait_for(|passes| *passes != Passes::All) => {
            if barred.is_ok_and(|barred| *barred == Passes::Nobody) {
                return;
            }
        }
        () = copies => return,
    }
    // Until the other side gives up.
    tokio::time::sleep(Duration::from_secs(60)).await;
}
