//! Whatever an agent and a frontend send, in any order: the server serves others, and nothing is left.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use portico_konnectivity::server;
use portico_konnectivity::server::Mode;
use portico_lab::leaks::run_alone;
use portico_wire::konnectivity::{ConnectId, DialId, Packet};
use proptest::prelude::*;
use tokio::time::timeout;

use super::leaks::{counted, nothing_is_left};
use super::support::*;
use crate::any_packet::{CHECK, bytes, packet, run_any};

/// One that the agent is fit for, and one that nobody is.
const ADDRESSES: &[&str] = &["node:10250", "nobody:9"];

/// As long as a step waits for what may not come.
const MOMENT: Duration = Duration::from_millis(1);

#[derive(Debug, Clone)]
enum Step {
    FrontendSends(Packet),
    /// What need be no packet.
    FrontendSays(Vec<u8>),
    AgentSends(Packet),
    /// What need be no packet.
    AgentSays(Vec<u8>),
    /// Answers the first dial that waits, with this connection.
    AgentAnswers(ConnectId),
    /// Opens a stream for the first dial that waits, and sends so many bytes there.
    AgentOpens(usize),
    AgentReads,
    FrontendReads,
    FrontendLeaves,
    AgentLeaves,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => packet(ADDRESSES).prop_map(Step::FrontendSends),
        1 => bytes().prop_map(Step::FrontendSays),
        6 => packet(ADDRESSES).prop_map(Step::AgentSends),
        1 => bytes().prop_map(Step::AgentSays),
        4 => (0..4_i64).prop_map(|number| Step::AgentAnswers(ConnectId(number))),
        3 => (0..5_000_usize).prop_map(Step::AgentOpens),
        2 => Just(Step::AgentReads),
        2 => Just(Step::FrontendReads),
        1 => Just(Step::FrontendLeaves),
        1 => Just(Step::AgentLeaves),
    ]
}

#[test]
fn whatever_peers_send_the_server_goes_on_and_nothing_is_left() {
    run_alone("server::any_sequence::whatever_peers_send").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[test]
fn whatever_peers_send() {
    for is_native in [false, true] {
        run_any(step(), |steps| run(steps, is_native));
    }
}

async fn run(steps: Vec<Step>, is_native: bool) {
    let rig = Rig::with(Mode::Grpc, |settings| settings.strategies = vec![server::Strategy::DestHost]).await;
    let before = counted();
    let mut peers = Peers::new(&rig, is_native).await;
    for step in steps {
        peers.do_step(step).await;
    }
    peers.leave().await;

    let (mut agent, mut frontend) = (rig.agent_with("b", "host=node", false).await, rig.proxy().await);
    frontend.asks("node:10250", 77).await;
    let of_agent = agent.accepts("node:10250", 1).await;
    let Packet::DialResponse { result: Ok(of_frontend), .. } = frontend.packet().await else {
        panic!("no connection")
    };
    agent.stream.data(of_agent, &CHECK).await;
    assert_eq!(frontend.bytes(CHECK.len()).await, CHECK);
    frontend.data(of_frontend, &CHECK).await;
    assert_eq!(agent.stream.bytes(CHECK.len()).await, CHECK);
    drop((agent, frontend));
    nothing_is_left(&rig, before).await;
}

/// An agent and a frontend that come back when the server has ended their stream.
struct Peers<'a> {
    rig: &'a Rig,
    is_native: bool,
    agent: Agent,
    frontend: Stream,
    /// Dials that the agent has read.
    asked: VecDeque<DialId>,
    /// Connections that the frontend has read of.
    connections: Vec<ConnectId>,
    streams: Vec<SendStream<Bytes>>,
}

impl<'a> Peers<'a> {
    async fn new(rig: &'a Rig, is_native: bool) -> Self {
        let (agent, frontend) = (rig.agent_with("a", "host=node", is_native).await, rig.proxy().await);
        Self {
            rig,
            is_native,
            agent,
            frontend,
            asked: VecDeque::new(),
            connections: Vec::new(),
            streams: Vec::new(),
        }
    }

    async fn do_step(&mut self, step: Step) {
        match step {
            Step::FrontendSends(packet) => {
                let packet = self.aimed(packet);
                self.frontend_says(&packet.encoded()).await;
            }
            Step::FrontendSays(bytes) => self.frontend_says(&bytes).await,
            Step::AgentSends(packet) => self.agent_says(&packet.encoded()).await,
            Step::AgentSays(bytes) => self.agent_says(&bytes).await,
            Step::AgentAnswers(connection) => {
                self.read_agent().await;
                if let Some(dial) = self.asked.pop_front() {
                    let answer = Packet::DialResponse { dial, result: Ok(connection) };
                    self.agent_says(&answer.encoded()).await;
                }
            }
            Step::AgentOpens(len) => {
                self.read_agent().await;
                if let Some(dial) = self.asked.pop_front() {
                    self.open(dial, len).await;
                }
            }
            Step::AgentReads => self.read_agent().await,
            Step::FrontendReads => {
                while let Ok(Some(packet)) = timeout(MOMENT, self.frontend.next()).await {
                    if let Packet::DialResponse { result: Ok(connection), .. } = packet {
                        self.connections.push(connection);
                    }
                }
            }
            Step::FrontendLeaves => self.frontend_comes_back().await,
            Step::AgentLeaves => self.agent_comes_back().await,
        }
    }

    /// With the number of a connection that exists in place of a small one, if there is any.
    fn aimed(&self, mut packet: Packet) -> Packet {
        if let Packet::CloseRequest(id)
        | Packet::Data { connection: id, .. }
        | Packet::CloseResponse { connection: id, .. } = &mut packet
            && let Ok(index @ 1..) = usize::try_from(id.0)
            && let Some(&known) = self.connections.get(index - 1)
        {
            *id = known;
        }
        packet
    }

    async fn frontend_says(&mut self, bytes: &[u8]) {
        if !self.frontend.try_bytes(bytes).await {
            self.frontend_comes_back().await;
        }
    }

    async fn agent_says(&mut self, bytes: &[u8]) {
        if !self.agent.stream.try_bytes(bytes).await {
            self.agent_comes_back().await;
        }
    }

    async fn read_agent(&mut self) {
        while let Ok(Some(packet)) = timeout(MOMENT, self.agent.stream.next()).await {
            if let Packet::DialRequest { dial, .. } = packet {
                self.asked.push_back(dial);
            }
        }
    }

    /// An agent without streams that opens one is refused, which is for the server to say.
    async fn open(&mut self, dial: DialId, len: usize) {
        let request = http::Request::post("https://localhost/portico.Konnectivity/Stream");
        let request = request.header("portico-dial", dial.0).body(()).unwrap();
        let Ok(mut requests) = self.agent.peer.requests.clone().ready().await else { return };
        let Ok((_answer, mut stream)) = requests.send_request(request, false) else { return };
        // The server may have refused it already.
        let _ = stream.send_data(vec![b'x'; len].into(), len.is_multiple_of(2));
        self.streams.push(stream);
    }

    async fn frontend_comes_back(&mut self) {
        self.frontend = self.rig.proxy().await;
        self.connections.clear();
    }

    async fn agent_comes_back(&mut self) {
        self.streams.clear();
        self.asked.clear();
        let mut peer = self.rig.peer().await;
        let metadata = metadata("a", "host=node", self.is_native);
        let (stream, answer) = peer.connects(metadata).await.unwrap();
        self.agent = Agent { peer, stream, answer, is_native: self.is_native };
        until(|| self.rig.status.agents().len() == 1).await;
    }

    async fn leave(self) {
        let rig = self.rig;
        drop(self);
        until(|| rig.status.agents().is_empty()).await;
    }
}
