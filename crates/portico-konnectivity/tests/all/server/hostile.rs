//! Peers that lie, flood, do not read or do not finish. Beside each of them a pair that does no harm goes on.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::client::Body;
use portico_konnectivity::grpc::Error;
use portico_konnectivity::server::{Authentication, Binding, Expected, Mode, Strategy};
use portico_konnectivity::streams::{OFFER, VERSION};
use portico_lab::clock::Clock;
use portico_lab::frames::{self, ACK, END_HEADERS, INITIAL_WINDOW_SIZE, kind};
use portico_wire::konnectivity::{CONNECT_PATH, Code, ConnectId, DialId, PROXY_PATH, Packet};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;

use super::leaks::failures_of;
use super::support::*;

/// Connections that say nothing: more than a port has room for.
pub(super) const SILENT: usize = 1_200;

/// The beginning of a TLS record with a ClientHello, which is never finished.
pub(super) const HALF_HELLO: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];

/// Frames in one write of a flood.
const BURST: usize = 64;

async fn rig() -> Rig {
    Rig::with(Mode::HttpConnect, |settings| {
        settings.strategies = vec![Strategy::DestHost];
        // Far more than a dial takes on a busy machine.
        settings.dial_timeout = Duration::from_secs(2);
    })
    .await
}

/// An agent and a frontend that are connected.
struct Bystander {
    agent: Agent,
    frontend: UnixStream,
    connection: ConnectId,
}

impl Bystander {
    async fn new(rig: &Rig) -> Self {
        let mut agent = rig.agent_with("bystander", "host=bystander", false).await;
        let mut frontend = rig.http("bystander:1").await;
        let connection = agent.accepts("bystander:1", 1).await;
        head(&mut frontend).await;
        Self { agent, frontend, connection }
    }

    async fn goes_on(&mut self) {
        let connection = self.connection;
        self.frontend.write_all(b"ping").await.unwrap();
        let came = self.agent.stream.packet().await;
        assert_eq!(came, Packet::Data { connection, payload: "ping".into() });
        self.agent.stream.data(connection, b"pong").await;
        assert_eq!(read(&mut self.frontend, 4).await, b"pong");
    }
}

/// A connection that says this and nothing more.
pub(super) async fn says(address: SocketAddr, said: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(said).await.unwrap();
    stream
}

/// An agent by frames, which keeps none of the rules and reads nothing.
async fn raw_agent(rig: &Rig) -> TlsStream<TcpStream> {
    let before = rig.status.agents().len();
    let mut stream = rig.tls_to(rig.server.agent_address()).await.unwrap();
    let call = [("agentid", "hostile"), ("agentidentifiers", "host=hostile")];
    stream.write_all(&opening(CONNECT_PATH, &call)).await.unwrap();
    until(|| rig.status.agents().len() == before + 1).await;
    stream
}

/// The first bytes of a client that calls `path` and takes no byte of the answer.
pub(super) fn opening(path: &str, metadata: &[(&str, &str)]) -> Vec<u8> {
    let block = frames::header_block(&call_fields(path, metadata));
    let call = frames::frame(kind::HEADERS, END_HEADERS, 1, &block);
    [frames::opening(&[(INITIAL_WINDOW_SIZE, 0)]), call].concat()
}

/// The fields of a call of `path`.
pub(super) fn call_fields<'a>(path: &'a str, metadata: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut fields = vec![
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    fields.extend(metadata);
    fields
}

fn all_refused(rig: &Rig) -> u64 {
    rig.status.counters().agents_refused().map(|(_, count)| count).sum()
}

pub(super) fn floods() -> Vec<Vec<u8>> {
    let settings = |window| frames::settings(&[(INITIAL_WINDOW_SIZE, window)]);
    vec![
        frames::frame(kind::PING, 0, 0, &[0; 8]),
        // Of none that was sent.
        frames::frame(kind::PING, ACK, 0, &[0; 8]),
        [settings(65_535), settings(0)].concat(),
        frames::frame(kind::DATA, 0, 1, b""),
        frames::frame(kind::PRIORITY, 0, 1, &[0, 0, 0, 0, 16]),
        frames::frame(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]),
    ]
}

/// Sends the same without a pause, and reads what comes, until the server ends the connection. Returns how
/// often it could.
pub(super) async fn flood(stream: impl AsyncRead + AsyncWrite, frame: &[u8]) -> usize {
    let (mut from, mut to) = split(stream);
    let (all, mut said, mut sent) = (frame.repeat(BURST), vec![0; 4096], 0);
    patiently(async {
        loop {
            tokio::select! {
                written = to.write_all(&all) => match written {
                    Ok(()) => sent += BURST,
                    Err(_) => return sent,
                },
                read = from.read(&mut said) => if !matches!(read, Ok(1..)) { return sent },
            }
        }
    })
    .await
}

/// Calls `path` on thousands of streams and resets each at once, until the server ends the connection.
/// Beside each hundred of them something else goes on.
pub(super) async fn storm(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    path: &str,
    metadata: &[(&str, &str)],
    mut goes_on: impl AsyncFnMut(),
) {
    let (from, mut to) = split(stream);
    let reads = tokio::spawn(is_closed(from));
    let call = frames::header_block(&call_fields(path, metadata));
    let opened_and_reset = |stream: u32| {
        let cancel = frames::frame(kind::RST_STREAM, 0, stream, &8_u32.to_be_bytes());
        [frames::frame(kind::HEADERS, END_HEADERS, stream, &call), cancel].concat()
    };
    let numbers: Vec<u32> = (3..40_000).step_by(2).collect();
    for some in numbers.chunks(100) {
        let all: Vec<u8> = some.iter().flat_map(|number| opened_and_reset(*number)).collect();
        if patiently(to.write_all(&all)).await.is_err() {
            break;
        }
        goes_on().await;
    }
    reads.abort();
}

#[tokio::test]
async fn streams_that_an_agent_opens_and_resets_leave_nothing_and_hold_up_nobody() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let call = [("agentid", "hostile"), ("agentidentifiers", "host=hostile")];
    let agent = raw_agent(&rig).await;
    storm(agent, CONNECT_PATH, &call, async || bystander.goes_on().await).await;
    until(|| rig.status.agents().len() == 1).await;
    // One that has not been an agent for longer than a moment.
    let mut stranger = rig.tls_to(rig.server.agent_address()).await.unwrap();
    stranger.write_all(&frames::opening(&[])).await.unwrap();
    storm(stranger, CONNECT_PATH, &call, async || bystander.goes_on().await).await;
    until(|| rig.status.agents().len() == 1).await;
    until(|| rig.status.counters().agent_streams.load(Relaxed) == 1).await;
    assert!(rig.status.memory().0 < 1 << 20);
    bystander.goes_on().await;
}

#[tokio::test]
async fn a_client_that_leaves_in_order_before_it_is_an_agent_is_counted() {
    let rig = rig().await;
    let mut stream = rig.tls_to(rig.server.agent_address()).await.unwrap();
    stream.write_all(&frames::opening(&[])).await.unwrap();
    stream.shutdown().await.unwrap();
    let _ = patiently(stream.read_to_end(&mut Vec::new())).await;
    until(|| refused(&rig, "http2") == 1).await;
}

#[tokio::test]
async fn an_agent_that_answers_dials_that_nobody_asked_for_is_given_up() {
    let rig = rig().await;
    let (mut bystander, mut liar) = (Bystander::new(&rig).await, rig.agent("liar").await);
    let mut answers = 0;
    loop {
        let dial = DialId(-answers);
        answers += 1;
        let answer = Packet::DialResponse { dial, result: Ok(ConnectId(answers)) };
        if !liar.stream.try_send(answer).await {
            break;
        }
        assert!(answers < 200_000, "what it names is counted, and bounded");
    }
    until(|| rig.status.agents().len() == 1).await;
    bystander.goes_on().await;
}

#[tokio::test]
async fn an_agent_that_gives_two_connections_one_number_loses_all() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let mut liar = rig.agent_with("liar", "host=liar", false).await;
    let mut frontends = [rig.http("liar:1").await, rig.http("liar:2").await];
    liar.accepts("liar:1", 7).await;
    liar.accepts("liar:2", 7).await;
    until(|| rig.status.agents().len() == 1).await;
    for frontend in &mut frontends {
        patiently(frontend.read_to_end(&mut Vec::new())).await.unwrap();
    }
    bystander.goes_on().await;
}

#[tokio::test]
async fn an_agent_may_claim_what_its_certificate_is_bound_to_and_that_is_said() {
    let bindings: Vec<Binding> = vec!["agent=host=node-1".parse().unwrap()];
    let rig = Rig::bound(Mode::HttpConnect, bindings).await;
    let _honest = rig.agent_with("a", "host=node-1", false).await;
    for claimed in ["host=node-2", "host=node-1&cidr=10.0.0.0/8", "default-route=true"] {
        let Err(Error::Status(status)) = rig.connect(metadata("b", claimed, false)).await else {
            panic!("{claimed} is accepted")
        };
        assert_eq!(status.code, Code::UNKNOWN);
        assert!(status.message.starts_with("the agent may not claim "), "{}", status.message);
        assert!(status.message.contains("--bind-identifiers") && status.message.ends_with("agent"));
    }
    assert_eq!((refused(&rig, "identifiers"), rig.status.agents().len()), (3, 1));
}

#[tokio::test]
async fn of_more_agents_than_may_be_each_is_refused_until_another_has_left() {
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.max_agents = 1).await;
    let first = rig.agent("a").await;
    let Err(Error::Status(status)) = rig.connect(metadata("b", "", true)).await else {
        panic!("one too many is accepted")
    };
    assert_eq!(status.code, Code::RESOURCE_EXHAUSTED);
    assert_eq!(&*status.message, "the server has 1 agents already, and --max-agents allows no more");
    assert_eq!((refused(&rig, "full"), rig.status.agents().len()), (1, 1));
    drop(first);
    until(|| rig.status.agents().is_empty()).await;
    rig.agent("b").await;
}

#[tokio::test]
async fn a_message_that_is_too_long_or_none_ends_its_agent_only() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    // Lengths of 4 GiB and of three bytes, which are no packet; and a frame that is never finished.
    for message in [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]] {
        let mut liar = raw_agent(&rig).await;
        liar.write_all(&frames::frame(kind::DATA, 0, 1, message)).await.unwrap();
        until(|| rig.status.agents().len() == 1).await;
        bystander.goes_on().await;
    }
    let mut unfinished = raw_agent(&rig).await;
    unfinished.write_all(&frames::header(100_000, kind::DATA, 0, 1)).await.unwrap();
    bystander.goes_on().await;
    assert!(rig.status.memory().0 < 1 << 20);
}

#[tokio::test]
async fn an_agent_that_is_given_up_is_told_at_once_although_a_connection_of_it_is_open() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.native_agent("a").await;
    let mut frontend = rig.http("node:1").await;
    let dial = agent.asked("node:1").await;
    let (_stream, _head) = tokio::join!(agent.opens(dial), head(&mut frontend));
    assert_eq!(agent.stream.lies(&[0xff; 3]).await, Some(h2::Reason::CANCEL));
}

/// By tokens that this API server reviews.
fn by_token(api: kube::Client) -> Authentication {
    let expected = Expected {
        namespace: "kube-system".into(),
        service_account: "konnectivity-agent".into(),
        audience: "system:konnectivity-server".into(),
    };
    Authentication::by_token(api, expected)
}

#[tokio::test]
async fn agents_whose_token_is_not_reviewed_in_time_are_told_so() {
    /// Three times as many as are reviewed at once, for five seconds each.
    const AGENTS: usize = 3 * 8;
    let silent = tower::service_fn(|_: http::Request<Body>| {
        std::future::pending::<Result<http::Response<Body>, kube::Error>>()
    });
    let authentication = by_token(kube::Client::new(silent, "default"));
    let rig = Rig::of(Mode::HttpConnect, authentication, |_| {}).await;
    let mut frontend = rig.http("node:1").await;
    until(|| rig.pending() == 1).await;
    let mut agents = Vec::new();
    for _ in 0..AGENTS {
        let mut agent = rig.tls_to(rig.server.agent_address()).await.unwrap();
        let call = [("agentid", "a"), ("authorization", "Bearer token")];
        agent.write_all(&opening(CONNECT_PATH, &call)).await.unwrap();
        agents.push(agent);
    }
    let waiting = || rig.status.counters().reviews_waiting.load(Relaxed);
    until(|| waiting() == AGENTS as u64).await;
    let clock = Clock::new();
    clock.until("all are refused", || refused(&rig, "review") == AGENTS as u64).await;
    clock.until("they have left, or are closed", || rig.status.unauthenticated() == 0).await;
    assert_eq!(refused(&rig, "silent"), 0, "each counts once");
    // The reviews may have waited for this dial, which would have waited longer for an agent.
    let begun = Instant::now();
    assert!(clock.by(head(&mut frontend)).await.starts_with("HTTP/1.1 500 "));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn an_agent_that_reads_nothing_delays_its_own_dials_only_and_is_given_up_for_it() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let _deaf = raw_agent(&rig).await;
    let mut waiting = Vec::new();
    for _ in 0..100 {
        waiting.push(rig.http("hostile:1").await);
        bystander.goes_on().await;
    }
    for frontend in &mut waiting {
        assert!(head(frontend).await.starts_with("HTTP/1.1 504"));
    }
    assert_eq!(rig.status.agents().iter().map(|agent| agent.dials).sum::<usize>(), 0);
    let (clock, begun) = (Clock::new(), Instant::now());
    clock.until("the deaf agent is given up", || rig.status.agents().len() == 1).await;
    assert!(begun.elapsed() <= Duration::from_secs(31), "{:?}", begun.elapsed());
    let mut next = rig.http("hostile:1").await;
    assert!(clock.by(head(&mut next)).await.starts_with("HTTP/1.1 500"), "no agent, at once");
    clock.by(bystander.goes_on()).await;
    assert!(rig.status.memory().0 < 1 << 20);
}

#[tokio::test]
async fn what_an_agent_is_to_be_told_and_does_not_read_counts_in_the_memory() {
    const FIRST: i64 = 1_000;
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.memory = 256 << 10).await;
    let mut bystander = Bystander::new(&rig).await;
    let mut liar = raw_agent(&rig).await;
    // Each packet is for an unknown connection, which the server asks the agent to close.
    let names = |ids: std::ops::Range<i64>| {
        let data = |id| Packet::Data { connection: ConnectId(id), payload: "x".into() }.encoded();
        ids.map(data).map(|data| frames::frame(kind::DATA, 0, 1, &data)).collect::<Vec<_>>().concat()
    };
    liar.write_all(&names(1..FIRST + 1)).await.unwrap();
    // The first one is already with the stream.
    until(|| rig.status.memory().0 >= size_of::<Packet>() * (FIRST as usize - 10)).await;
    liar.write_all(&names(FIRST + 1..8 * FIRST)).await.unwrap();
    until(|| rig.status.agents().len() == 1).await;
    bystander.goes_on().await;
    until(|| rig.status.memory().0 == 0).await;
}

#[tokio::test]
async fn an_agent_that_leaves_no_room_for_what_it_is_to_be_told_is_given_up_by_its_next_packet() {
    const ROOM: usize = 32 << 10;
    const ADDRESS: &str = "hostile:1";
    /// Few enough for one process, and more than find room in the end.
    const MORE: usize = 100;
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let mut deaf = raw_agent(&rig).await;
    // Each is a request, and its cancellation, unless the frontend was gone before that. There is room for
    // 32,768 packets, and every other one has a protocol and an address.
    let dial = "tcp".len() + ADDRESS.len();
    let mut dials = 0;
    while rig.status.memory().0 < ROOM * size_of::<Packet>() + (ROOM / 2 - MORE) * dial {
        drop(rig.http(ADDRESS).await);
        dials += 1;
        assert!(dials < 100_000, "{} bytes wait", rig.status.memory().0);
    }
    let mut more = Vec::new();
    for _ in 0..MORE {
        more.push(rig.http(ADDRESS).await);
    }
    until(|| rig.pending() >= MORE as u64).await;
    drop(more);
    until(|| rig.status.agents().iter().all(|agent| agent.dials == 0)).await;
    bystander.goes_on().await;
    assert_eq!(rig.status.agents().len(), 2);
    let (clock, begun) = (Clock::new(), Instant::now());
    deaf.write_all(&frames::frame(kind::DATA, 0, 1, &Packet::Drain.encoded())).await.unwrap();
    clock.until("it is given up", || rig.status.agents().len() == 1).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "for a packet that found no room");
    clock.by(bystander.goes_on()).await;
}

#[tokio::test]
async fn a_silent_agent_of_ours_is_given_up_within_ten_seconds() {
    let rig = Rig::start(Mode::HttpConnect).await;
    let mut agent = rig.tls_to(rig.server.agent_address()).await.unwrap();
    agent.write_all(&opening(CONNECT_PATH, &[("agentid", "frozen"), (OFFER, VERSION)])).await.unwrap();
    until(|| rig.status.agents().len() == 1).await;
    let clock = Clock::new();
    // As late as can be: what came last counts for the interval that has just begun.
    agent.write_all(&frames::frame(kind::PING, 0, 0, &[0; 8])).await.unwrap();
    let begun = Instant::now();
    clock.until("the agent is given up", || rig.status.agents().is_empty()).await;
    assert!(begun.elapsed() <= Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_frontend_that_does_not_take_its_answer_loses_its_connection_and_holds_up_no_other() {
    const MEGABYTE: usize = 1 << 20;
    let rig = Rig::with(Mode::Grpc, |settings| settings.connection_buffer = MEGABYTE).await;
    let (mut agent, mut frontend) = (rig.agent("a").await, rig.proxy().await);
    frontend.asks("node:1", 1).await;
    let of_agent = agent.accepts("node:1", 1).await;
    let Packet::DialResponse { result: Ok(of_frontend), .. } = frontend.packet().await else { panic!() };
    let mut deaf = UnixStream::connect(&rig.socket).await.unwrap();
    let dial = Packet::DialRequest { protocol: "tcp".into(), address: "node:2".into(), dial: DialId(2) };
    let asks = frames::frame(kind::DATA, 0, 1, &dial.encoded());
    deaf.write_all(&[opening(PROXY_PATH, &[]), asks].concat()).await.unwrap();
    let of_deaf = agent.accepts("node:2", 2).await;
    until(|| rig.status.established() == 2).await;
    let clock = Clock::new();
    // More than the buffer and the window of the stream that both share.
    let sends = async {
        for _ in 0..64 {
            agent.stream.data(of_deaf, &[7; MEGABYTE / 4]).await;
        }
        agent.stream.data(of_agent, b"goes on").await;
    };
    clock.by(sends).await;
    assert_eq!(clock.by(frontend.bytes(7)).await, b"goes on");
    clock.until("the deaf one has lost its connection", || rig.status.established() == 1).await;
    assert_eq!(failures_of(&rig).into_iter().collect::<Vec<_>>(), [("send_rsp", 1)]);
    frontend.send(Packet::CloseRequest(of_frontend)).await;
    assert_eq!(
        clock.by(frontend.packet()).await,
        Packet::CloseResponse { connection: of_frontend, error: String::new() }
    );
}

#[tokio::test]
async fn an_agent_that_floods_frames_is_given_up() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    for frame in floods() {
        let agent = raw_agent(&rig).await;
        let sent = flood(agent, &frame).await;
        assert!(sent < 40_000, "{sent} frames {:?}", &frame[..9]);
        until(|| rig.status.agents().len() == 1).await;
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn a_stranger_that_floods_frames_is_cut_off() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    for (before, frame) in (0..).zip(floods()) {
        let mut stranger = rig.tls_to(rig.server.agent_address()).await.unwrap();
        stranger.write_all(&frames::opening(&[])).await.unwrap();
        let sent = flood(stranger, &frame).await;
        assert!(sent < 40_000, "{sent} frames {:?}", &frame[..9]);
        until(|| refused(&rig, "flood") + refused(&rig, "http2") == before + 1).await;
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn a_connection_has_one_connect_stream() {
    let rig = rig().await;
    let mut agent = rig.agent_with("a", "host=a", false).await;
    let Err(Error::Status(status)) = agent.peer.connects(metadata("b", "host=b", false)).await else {
        panic!("a second one is accepted")
    };
    assert_eq!(status.code, Code::RESOURCE_EXHAUSTED);
    assert_eq!(rig.status.agents().len(), 1);
}

#[tokio::test]
async fn an_agent_that_asks_again_and_again_for_what_is_refused_is_given_up_and_holds_up_nobody() {
    const AT_ONCE: u32 = 1_000;
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let mut hostile = raw_agent(&rig).await;
    let block = frames::header_block(&[(":method", "POST"), (":scheme", "https"), (":path", CONNECT_PATH)]);
    let request = |number| frames::frame(kind::HEADERS, END_HEADERS, 3 + 2 * number, &block);
    let mut sent = 0;
    // It takes no answer.
    let ended = async {
        loop {
            let some = (sent..sent + AT_ONCE).map(request).collect::<Vec<_>>().concat();
            if hostile.write_all(&some).await.is_err() {
                return;
            }
            sent += AT_ONCE;
        }
    };
    patiently(ended).await;
    // What the sockets took beside.
    assert!(sent < 200 * AT_ONCE, "{sent}");
    until(|| rig.status.agents().len() == 1).await;
    bystander.goes_on().await;
}

/// Two for each connection: more than many shells allow.
pub(super) fn allow_descriptors() {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
}

#[tokio::test]
async fn connections_that_say_nothing_or_half_a_hello_make_room_for_agents() {
    allow_descriptors();
    for said in [&b""[..], HALF_HELLO] {
        let rig = rig().await;
        let mut bystander = Bystander::new(&rig).await;
        let mut strangers = Vec::new();
        for _ in 0..SILENT {
            strangers.push(says(rig.server.agent_address(), said).await);
        }
        let _agent = rig.agent_with("late", "host=late", false).await;
        bystander.goes_on().await;
        until(|| refused(&rig, "crowded") >= (SILENT - 1_024) as u64).await;
        assert!(rig.status.unauthenticated() <= 1_024);
        drop(strangers);
        until(|| rig.status.unauthenticated() == 0).await;
    }
}

#[tokio::test]
async fn connections_that_say_nothing_by_http2_make_room_too() {
    allow_descriptors();
    let (rig, mut strangers) = (rig().await, Vec::new());
    // However long it takes, none of them is late.
    let clock = Clock::new();
    // Its handshake is over once its own side is: one by one, so that each is a connection of HTTP/2 at last.
    for _ in 0..SILENT {
        strangers.push(rig.tls_to(rig.server.agent_address()).await.unwrap());
    }
    let has_room = || refused(&rig, "crowded") >= (SILENT - 1_024) as u64;
    clock.until("those beyond the limit are gone", has_room).await;
    // The first to come was the first to go, and nothing of it is left.
    is_closed(strangers.swap_remove(0)).await;
    assert_eq!(refused(&rig, "silent"), 0);
}

#[tokio::test]
async fn strangers_take_nothing_of_the_memory_of_a_frontend_that_reads_slowly() {
    const SENT: usize = 500_000;
    const STRANGERS: u32 = 100;
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.memory = 1 << 20).await;
    let mut bystander = Bystander::new(&rig).await;
    for _ in 0..10 {
        bystander.agent.stream.data(bystander.connection, &[1; SENT / 10]).await;
    }
    // Its socket takes some.
    until(|| rig.status.memory().0 > SENT / 10).await;
    // The most that a frame of a stranger may have, and none is finished.
    let header = frames::header(16 << 10, kind::HEADERS, END_HEADERS, 1);
    let unfinished = [&frames::opening(&[])[..], &header].concat();
    let mut strangers = Vec::new();
    for _ in 0..STRANGERS {
        let mut stranger = rig.tls_to(rig.server.agent_address()).await.unwrap();
        stranger.write_all(&unfinished).await.unwrap();
        strangers.push(stranger);
    }
    assert_eq!((rig.status.unauthenticated(), rig.status.established()), (STRANGERS, 1));
    assert!(rig.status.memory().0 <= SENT);
    assert_eq!(read(&mut bystander.frontend, SENT).await.len(), SENT);
    bystander.goes_on().await;
    assert_eq!(all_refused(&rig), 0, "nor does the frontend take theirs");
}

#[tokio::test]
async fn agents_that_use_up_the_memory_by_messages_they_do_not_finish_keep_no_new_agent_out() {
    const MEMORY: usize = 1 << 20;
    const HOSTILE: usize = 8;
    /// What each of them holds. A thousand bytes of the memory are left.
    const HELD: usize = MEMORY / HOSTILE - 125;
    let rig = Rig::with(Mode::HttpConnect, |settings| settings.memory = MEMORY).await;
    let mut bystander = Bystander::new(&rig).await;
    // A message of 4 MiB that is not finished.
    let mut message = vec![0; HELD];
    message[1..5].copy_from_slice(&(4_u32 << 20).to_be_bytes());
    // Only once they are acknowledged do SETTINGS give the stream its window.
    let mut unfinished = frames::frame(kind::SETTINGS, ACK, 0, b"");
    message.chunks(16 << 10).for_each(|part| unfinished.extend(frames::frame(kind::DATA, 0, 1, part)));
    let (mut hostile, mut honest) = (Vec::new(), Vec::new());
    for _ in 0..HOSTILE {
        let mut agent = raw_agent(&rig).await;
        agent.write_all(&unfinished).await.unwrap();
        hostile.push(agent);
        until(|| rig.status.memory().0 == hostile.len() * HELD).await;
    }
    for number in 0..10 {
        let agent = rig.connect(metadata(&format!("honest-{number}"), "", number % 2 == 0)).await;
        honest.push(agent.expect("it takes nothing of what others use up"));
    }
    // More of the same ends one that holds the memory already.
    let mut last = raw_agent(&rig).await;
    last.write_all(&unfinished).await.unwrap();
    let count = |name| rig.status.agents().iter().filter(|row| row.agent.starts_with(name)).count();
    until(|| count("hostile") == HOSTILE).await;
    assert_eq!(count("honest-"), honest.len());
    bystander.goes_on().await;
    assert!(rig.status.memory().0 <= MEMORY);
    assert_eq!(all_refused(&rig), 0);
}

#[tokio::test]
async fn agents_with_made_up_tokens_wait_in_bounded_numbers_and_keep_no_other_address_from_its_review() {
    const WAITING: u64 = 256;
    const MORE: u64 = 20;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let silent = tower::service_fn(move |request: http::Request<Body>| {
        let seen = Arc::clone(&seen);
        async move {
            let body = request.into_body().collect_bytes().await?;
            seen.lock().unwrap().push(String::from_utf8_lossy(&body).into_owned());
            std::future::pending::<Result<http::Response<Body>, kube::Error>>().await
        }
    });
    let authentication = by_token(kube::Client::new(silent, "default"));
    let rig = Rig::of(Mode::HttpConnect, authentication, |_| {}).await;
    let connect = async |from: Ipv4Addr, token: String| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let call = [("agentid", "a"), ("authorization", &*format!("Bearer {token}"))];
        let stream = socket.connect(rig.server.agent_address()).await.unwrap();
        let mut agent = rig.tls_over(stream).await.unwrap();
        agent.write_all(&opening(CONNECT_PATH, &call)).await.unwrap();
        agent
    };
    let mut strangers = Vec::new();
    for number in 0..WAITING + MORE {
        strangers.push(connect(Ipv4Addr::LOCALHOST, format!("made-up-{number}")).await);
    }
    until(|| refused(&rig, "review") >= MORE).await;
    let waiting = || rig.status.counters().reviews_waiting.load(Relaxed);
    assert!(waiting() > 0 && waiting() <= WAITING);
    assert!(rig.status.agents().is_empty());
    strangers.push(connect(Ipv4Addr::new(127, 0, 0, 2), "honest".to_owned()).await);
    until(|| asked.lock().unwrap().iter().any(|review| review.contains("\"honest\""))).await;
    let clock = Clock::new();
    let begun = Instant::now();
    drop(strangers);
    clock.until("those that left do not wait any more", || waiting() == 0).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "at once, not when a review has taken too long");
}

#[tokio::test]
async fn frontends_that_open_and_never_finish_hold_up_nobody_and_leave_nothing() {
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let mut open = Vec::new();
    for _ in 0..300 {
        let mut frontend = UnixStream::connect(&rig.socket).await.unwrap();
        frontend.write_all(b"CONNECT bystander:1 HTTP/1.1\r\nHost:").await.unwrap();
        open.push(frontend);
    }
    bystander.goes_on().await;
    let counters = rig.status.counters();
    until(|| counters.http_connections.load(Relaxed) == 301).await;
    drop(open);
    until(|| counters.http_connections.load(Relaxed) == 1).await;
    bystander.goes_on().await;
}

#[tokio::test]
async fn frontends_that_ask_for_nothing_make_room_for_those_that_do() {
    allow_descriptors();
    let rig = rig().await;
    let mut bystander = Bystander::new(&rig).await;
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(UnixStream::connect(&rig.socket).await.unwrap());
    }
    let mut late = rig.http("bystander:2").await;
    bystander.agent.accepts("bystander:2", 2).await;
    head(&mut late).await;
    // The bystander and the late one have asked.
    let open = &rig.status.counters().http_connections;
    until(|| open.load(Relaxed) <= 1_024 + 2).await;
    bystander.goes_on().await;
}

#[tokio::test]
async fn of_more_streams_than_a_frontend_may_have_each_is_refused() {
    const STREAMS: u32 = 1_024;
    let rig = Rig::start(Mode::Grpc).await;
    let mut frontend = UnixStream::connect(&rig.socket).await.unwrap();
    frontend.write_all(&opening(PROXY_PATH, &[])).await.unwrap();
    let call = frames::header_block(&call_fields(PROXY_PATH, &[]));
    let stream = |number: u32| frames::frame(kind::HEADERS, END_HEADERS, 2 * number + 1, &call);
    for number in 1..STREAMS {
        frontend.write_all(&stream(number)).await.unwrap();
    }
    until(|| rig.status.counters().proxy_streams.load(Relaxed) == u64::from(STREAMS)).await;
    frontend.write_all(&stream(STREAMS)).await.unwrap();
    let refused_stream = 7_u32.to_be_bytes();
    let refusal = frames::frame(kind::RST_STREAM, 0, 2 * STREAMS + 1, &refused_stream);
    let mut came = Vec::new();
    while !came.ends_with(&refusal) {
        assert!(patiently(frontend.read_buf(&mut came)).await.unwrap() > 0);
    }
    let mut other = rig.proxy().await;
    other.asks("node:1", 1).await;
    // It waits for the first agent.
    until(|| rig.pending() == 1).await;
}

/// Until the server has closed it.
pub(super) async fn is_closed(mut stream: impl AsyncRead + Unpin) {
    while stream.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
}

#[tokio::test]
async fn a_peer_that_does_not_say_what_it_wants_is_given_up_agents_after_ten_seconds() {
    let rig = rig().await;
    let silent = TcpStream::connect(rig.server.agent_address()).await.unwrap();
    let under_tls = rig.tls_to(rig.server.agent_address()).await.unwrap();
    let clock = Clock::new();
    let begun = Instant::now();
    clock.by(is_closed(silent)).await;
    clock.by(is_closed(under_tls)).await;
    assert!((9..=11).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_peer_that_does_not_say_what_it_wants_is_given_up_frontends_after_a_minute() {
    for mode in [Mode::Grpc, Mode::HttpConnect] {
        let rig = Rig::start(mode).await;
        let silent = UnixStream::connect(&rig.socket).await.unwrap();
        let clock = Clock::new();
        let begun = Instant::now();
        clock.by(is_closed(silent)).await;
        assert!((59..=61).contains(&begun.elapsed().as_secs()), "{mode:?}: {:?}", begun.elapsed());
        tokio::time::resume();
    }
}

#[tokio::test]
async fn a_frontend_by_grpc_without_a_stream_is_given_up_after_two_minutes_and_one_with_a_stream_is_not() {
    let rig = Rig::start(Mode::Grpc).await;
    let (mut agent, mut frontend) = (rig.agent("a").await, rig.proxy().await);
    frontend.asks("node:1", 1).await;
    let connection = agent.accepts("node:1", 1).await;
    frontend.packet().await;
    let mut idle = UnixStream::connect(&rig.socket).await.unwrap();
    let cancel = frames::frame(kind::RST_STREAM, 0, 1, &8_u32.to_be_bytes());
    idle.write_all(&[opening(PROXY_PATH, &[]), cancel].concat()).await.unwrap();
    until(|| rig.status.counters().proxy_streams.load(Relaxed) == 1).await;
    let clock = Clock::new();
    let begun = Instant::now();
    clock.by(is_closed(idle)).await;
    assert!((60..=121).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    agent.stream.data(connection, b"goes on").await;
    assert_eq!(clock.by(frontend.bytes(7)).await, b"goes on");
}

#[tokio::test]
async fn a_connection_whose_connect_stream_is_over_takes_no_other_counts_as_an_agent_and_ends() {
    let rig = Rig::with(Mode::Grpc, |settings| settings.max_agents = 1).await;
    let Agent { mut peer, stream, .. } = rig.agent("a").await;
    let refused = |connect: Result<_, Error>| match connect {
        Err(Error::Status(status)) => assert_eq!(status.code, Code::RESOURCE_EXHAUSTED),
        _ => panic!("it is one too many"),
    };
    stream.reset();
    until(|| rig.status.agents().is_empty()).await;
    refused(peer.connects(metadata("a", "", false)).await.map(drop));
    refused(rig.connect(metadata("b", "", false)).await.map(drop));
    tokio::time::pause();
    peer.ends().await;
    tokio::time::resume();
    rig.agent("b").await;
}
