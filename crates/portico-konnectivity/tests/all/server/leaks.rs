//! After thousands of dials that failed, were abandoned or ended in every way, nothing is left.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use portico_konnectivity::server::{Mode, Settings, Strategy};
use portico_lab::leaks::{descriptors, resident, run_alone, tasks};
use portico_lab::long_form;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use super::support::*;

/// Ways in which a dial or its connection ends by itself.
const WAYS: i64 = 9;

/// Dials that end in one way, in each mode and with each make of agent.
fn rounds() -> i64 {
    long_form(140, 2_800)
}

/// Dials that end together with what they share: a timeout, an agent, a budget.
const TOGETHER: i64 = 20;

/// How much more the process may have resident after hundreds of dials, the peers in this test included.
const MORE_RESIDENT: u64 = 4 << 20;

/// Descriptors and tasks.
pub(super) fn counted() -> (usize, usize) {
    (descriptors().unwrap(), tasks())
}

/// Whether there are no more of either than before.
fn is_back_to(before: (usize, usize)) -> bool {
    let now = counted();
    now.0 <= before.0 && now.1 <= before.1
}

/// In a process without other tests, whose descriptors it would count.
#[test]
fn nothing_is_left_after_dials_that_ended_in_every_way() {
    run_alone("server::leaks::dials_that_end_in_every_way").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[tokio::test]
async fn dials_that_end_in_every_way() {
    for (mode, is_native) in
        [(Mode::HttpConnect, false), (Mode::HttpConnect, true), (Mode::Grpc, false), (Mode::Grpc, true)]
    {
        each_by_itself(mode, is_native).await;
        without_an_answer(mode, is_native).await;
        with_their_agent(mode, is_native).await;
    }
    before_the_first_agent(Mode::HttpConnect).await;
    before_the_first_agent(Mode::Grpc).await;
    // One after the other: beside the megabytes of the other, four seconds would be over first.
    unread(Mode::HttpConnect).await;
    unread(Mode::Grpc).await;
}

async fn each_by_itself(mode: Mode, is_native: bool) {
    // An agent is chosen for what it claims, and none for anything else.
    let rig = Rig::with(mode, |settings| settings.strategies = vec![Strategy::DestHost]).await;
    let mut agent = rig.agent_with("a", "host=node", is_native).await;
    let (before, mut warm) = (counted(), 0);
    for round in 0..rounds() * WAYS {
        if round == 20 * WAYS {
            warm = resident().unwrap();
        }
        one(&rig, &mut agent, mode, round).await;
    }
    nothing_is_left(&rig, before).await;
    assert_eq!(rig.status.agents()[0].dials, 0);
    let more = resident().unwrap().saturating_sub(warm);
    assert!(more < MORE_RESIDENT, "{more} bytes more");

    let rounds = rounds().unsigned_abs();
    // A number of nobody's, 0 in place of a number, and the error that the frontend gets for the latter.
    let failures = [
        ("no_agent", rounds),
        ("error_response", 2 * rounds),
        ("unrecognized_response", 2 * rounds),
        // That of a dial, and that after the number of nobody's.
        ("backend_close", 2 * rounds),
        ("frontend_close", rounds),
    ];
    assert_eq!(failures_of(&rig), BTreeMap::from(failures), "{mode:?}, streams: {is_native}");
    let ends = ends_of(&rig);
    assert_eq!(ends.get("endpoint_closed"), Some(&rounds), "{ends:?}");
    assert_eq!(ends.values().sum::<u64>(), 3 * rounds, "{ends:?}");
}

/// One dial, in the way whose turn it is.
async fn one(rig: &Rig, agent: &mut Agent, mode: Mode, round: i64) {
    let way = round % WAYS;
    if way == 0 {
        return Frontend::asks(rig, mode, "nobody:9").await.is_refused().await;
    }
    let mut frontend = Frontend::asks(rig, mode, "node:9").await;
    let dial = agent.is_asked().await;
    match way {
        1 => drop(frontend),
        2 => {
            agent.stream.send(Packet::DialResponse { dial, result: Err("refused".into()) }).await;
            frontend.is_refused().await;
        }
        3 => {
            agent.stream.send(Packet::CloseDial(dial)).await;
            frontend.is_refused().await;
        }
        4 => {
            agent.stream.send(Packet::DialResponse { dial, result: Ok(ConnectId(0)) }).await;
            frontend.is_refused().await;
        }
        5 => {
            let nobodys = DialId(i64::MAX);
            agent.stream.send(Packet::DialResponse { dial: nobodys, result: Err("late".into()) }).await;
            agent.stream.send(Packet::CloseDial(dial)).await;
            frontend.is_refused().await;
        }
        way => {
            let (mut carried, ()) =
                tokio::join!(agent.carries(dial, ConnectId(round + 1)), frontend.is_accepted());
            match way {
                6 => {
                    carried.ends(agent).await;
                    frontend.is_closed().await;
                }
                7 => drop(frontend),
                _ => frontend.sends(b"bytes").await,
            }
        }
    }
}

/// Dials that nobody answers.
async fn without_an_answer(mode: Mode, is_native: bool) {
    let limit = Duration::from_millis(200);
    let rig = Rig::with(mode, |settings| settings.dial_timeout = limit).await;
    let mut agent = rig.agent_with("a", "", is_native).await;
    let before = counted();
    let mut waiting = Vec::new();
    for _ in 0..TOGETHER {
        waiting.push(Frontend::asks(&rig, mode, "node:9").await);
        agent.is_asked().await;
    }
    for mut frontend in waiting {
        frontend.is_refused().await;
    }
    nothing_is_left(&rig, before).await;
    assert_eq!(failures_of(&rig), BTreeMap::from([("backend_dial_timeout", TOGETHER.unsigned_abs())]));
}

/// Dials of a new server: frontends that leave meanwhile, and those that wait for too long.
async fn before_the_first_agent(mode: Mode) {
    let limit = Duration::from_millis(500);
    let rig = Rig::with(mode, |settings| settings.dial_timeout = limit).await;
    let before = counted();
    let (mut leave, mut stay) = (Vec::new(), Vec::new());
    for _ in 0..TOGETHER {
        leave.push(Frontend::asks(&rig, mode, "node:9").await);
        stay.push(Frontend::asks(&rig, mode, "node:9").await);
    }
    drop(leave);
    for mut frontend in stay {
        frontend.is_refused().await;
    }
    nothing_is_left(&rig, before).await;
    // Those of a slow machine may have waited for too long before they left.
    let failures = failures_of(&rig);
    assert_eq!(failures.values().sum::<u64>(), 2 * TOGETHER.unsigned_abs(), "{failures:?}");
    assert!(failures.keys().all(|reason| ["no_agent", "frontend_close"].contains(reason)), "{failures:?}");
    rig.agent("a").await;
}

/// Dials that wait for an agent, and connections, when it goes.
async fn with_their_agent(mode: Mode, is_native: bool) {
    // A dial that lost its agent waits for another within its time.
    let rig = Rig::with(mode, |settings| settings.dial_timeout = Duration::from_secs(10)).await;
    let before = counted();
    let mut agent = rig.agent_with("a", "", is_native).await;
    let (mut waiting, mut carried) = (Vec::new(), Vec::new());
    for number in 1..=TOGETHER {
        waiting.push(Frontend::asks(&rig, mode, "node:9").await);
        agent.is_asked().await;
        let mut frontend = Frontend::asks(&rig, mode, "node:9").await;
        let dial = agent.is_asked().await;
        let (of_agent, ()) = tokio::join!(agent.carries(dial, ConnectId(number)), frontend.is_accepted());
        carried.push((frontend, of_agent));
    }
    drop(agent);
    for mut frontend in waiting {
        frontend.is_refused().await;
    }
    for (mut frontend, _of_agent) in carried {
        frontend.is_closed().await;
    }
    nothing_is_left(&rig, before).await;
    assert_eq!(failures_of(&rig), BTreeMap::from([("backend_close", TOGETHER.unsigned_abs())]));
    assert_eq!(ends_of(&rig), BTreeMap::from([("agent_lost", TOGETHER.unsigned_abs())]));
}

/// Frontends of an upstream agent that read nothing. They are behind by more than all may be. So some go for
/// that, and the others once they have not read for four seconds.
async fn unread(mode: Mode) {
    let small = |settings: &mut Settings| {
        settings.connection_buffer = 64 << 10;
        settings.memory = 8 << 20;
    };
    let rig = Rig::with(mode, small).await;
    let mut agent = rig.agent("a").await;
    let mut frontends = Vec::new();
    for number in 1..=TOGETHER {
        let mut frontend = Frontend::asks(&rig, mode, "node:9").await;
        let dial = agent.is_asked().await;
        agent.carries(dial, ConnectId(number)).await;
        frontend.is_accepted().await;
        frontends.push(frontend);
    }
    patiently(async {
        while !ends_of(&rig).contains_key("buffer_full") {
            for number in 1..=TOGETHER {
                agent.stream.data(ConnectId(number), &[1; 60_000]).await;
            }
        }
    })
    .await;
    until(|| rig.status.established() == 0).await;
    drop(frontends);
    until(|| rig.status.memory().0 == 0).await;
    let ends = ends_of(&rig);
    let words: Vec<_> = ends.keys().copied().collect();
    assert_eq!(words, ["buffer_full", "not_read"], "{mode:?}: {ends:?}");
    assert_eq!(ends.values().sum::<u64>(), TOGETHER.unsigned_abs());
}

pub(super) async fn nothing_is_left(rig: &Rig, before: (usize, usize)) {
    let counters = rig.status.counters();
    let gauges = [
        &counters.http_connections,
        &counters.proxy_streams,
        &counters.pending,
        &counters.full_agents,
        &counters.full_frontends,
        &counters.reviews_waiting,
    ];
    let agents = &counters.agent_streams;
    until(|| agents.load(Relaxed) == rig.status.agents().len() as u64).await;
    until(|| rig.status.established() == 0 && gauges.iter().all(|gauge| gauge.load(Relaxed) == 0)).await;
    until(|| is_back_to(before) && rig.status.memory().0 == 0).await;
    assert!(rig.status.connections().is_empty());
}

pub(super) fn failures_of(rig: &Rig) -> BTreeMap<&'static str, u64> {
    rig.status.counters().failures().filter(|(_, count)| *count > 0).collect()
}

fn ends_of(rig: &Rig) -> BTreeMap<&'static str, u64> {
    rig.ends().into_iter().collect()
}

/// A frontend in either mode.
enum Frontend {
    Http(UnixStream),
    /// With the number that the server gave its connection.
    Grpc(Box<Stream>, ConnectId),
}

impl Frontend {
    async fn asks(rig: &Rig, mode: Mode, address: &str) -> Self {
        if mode == Mode::HttpConnect {
            return Self::Http(rig.http(address).await);
        }
        let mut stream = rig.proxy().await;
        stream.asks(address, 7).await;
        Self::Grpc(Box::new(stream), ConnectId(0))
    }

    async fn is_accepted(&mut self) {
        match self {
            Self::Http(stream) => assert!(head(stream).await.starts_with("HTTP/1.1 200 ")),
            Self::Grpc(stream, number) => match stream.packet().await {
                Packet::DialResponse { result: Ok(connection), .. } => *number = connection,
                other => panic!("{other:?}"),
            },
        }
    }

    async fn is_refused(&mut self) {
        match self {
            Self::Http(stream) => assert!(!rest(stream).await.starts_with("HTTP/1.1 200 ")),
            Self::Grpc(stream, _) => {
                let answer = stream.packet().await;
                assert!(matches!(answer, Packet::DialResponse { result: Err(_), .. }), "{answer:?}");
            }
        }
    }

    async fn sends(&mut self, bytes: &[u8]) {
        match self {
            Self::Http(stream) => stream.write_all(bytes).await.unwrap(),
            Self::Grpc(stream, number) => stream.data(*number, bytes).await,
        }
    }

    /// Its connection ends from the other side.
    async fn is_closed(&mut self) {
        match self {
            Self::Http(stream) => assert_eq!(rest(stream).await, ""),
            Self::Grpc(stream, _) => {
                let packet = stream.packet().await;
                assert!(matches!(packet, Packet::CloseResponse { .. }), "{packet:?}");
            }
        }
    }
}

/// An agent's side of a connection.
enum Carried {
    Packets(ConnectId),
    Stream(Native),
}

impl Carried {
    /// The endpoint ends it.
    async fn ends(&mut self, agent: &mut Agent) {
        match self {
            Self::Packets(connection) => {
                let connection = *connection;
                agent.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
            }
            Self::Stream(stream) => {
                stream.to_server.send_data(bytes::Bytes::new(), true).unwrap();
            }
        }
    }
}

impl Agent {
    /// The next DIAL_REQ. What comes of connections before is answered as agents do.
    async fn is_asked(&mut self) -> DialId {
        loop {
            match self.stream.packet().await {
                Packet::DialRequest { dial, .. } => return dial,
                Packet::CloseRequest(connection) => {
                    self.stream.send(Packet::CloseResponse { connection, error: String::new() }).await;
                }
                _ => {}
            }
        }
    }

    /// Answers a dial with a connection: by this number, or by a stream of its own.
    async fn carries(&mut self, dial: DialId, connection: ConnectId) -> Carried {
        if self.is_native {
            return Carried::Stream(self.opens(dial).await.unwrap());
        }
        self.stream.send(Packet::DialResponse { dial, result: Ok(connection) }).await;
        Carried::Packets(connection)
    }
}
