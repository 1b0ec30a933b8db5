//! One Connect stream: an agent, the dials under way on it, and its connections.
//!
//! [`serve`] reads what the agent sends and never waits for a connection. `write` sends it control packets
//! before the bytes of connections, and one message of each connection in turn. What waits to be sent counts
//! in the memory of the server. [`Backend::dial`] asks for a connection. Every request to an agent is
//! cancelled when its caller is gone. DIAL_CLS does so, or CLOSE_REQ once the agent has answered. Dials have
//! numbers of our own towards agents, so that frontends cannot clash.

use std::collections::{HashMap, HashSet};
use std::future::{pending, poll_fn};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use h2::FlowControl;
use portico_net::memory::Reservation;
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::{ConnectId, DataHead, DialId, Identifiers, Packet};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, timeout};

use super::connection_end::ConnectionEnd;
use super::counters::Segment;
use super::inbox::{Ended, Inbox};
use super::native::NativeStream;
use super::registry::Candidate;
use super::shared::Shared;
use crate::grpc::{self, Receiver, Sender};

mod connection;

pub(crate) use connection::{PacketConnection, PacketWriter};

/// Dials of one agent that wait for its answer. kube-apiserver has fewer under way with all agents together.
const MAX_DIALS: usize = 4_096;

/// Control packets that wait to be sent: some for each connection an agent may have. An agent that does not
/// read them is given up.
const MAX_CONTROL: usize = 32 * 1024;

/// How long a control packet may wait for an agent that takes nothing, give or take a look: a dial in the
/// usual time. It costs each dial its share of that time otherwise, for as long as it is there.
const UNTAKEN: Duration = Duration::from_secs(30);

/// Between two looks at such an agent.
const LOOK: Duration = Duration::from_secs(5);

/// Connections that are closed here and not yet by the agent.
const MAX_CLOSING: usize = 64 * 1024;

/// Connections that the agent has named and that never were any here, until it has closed them. An agent
/// answers late to dials that nobody waits for any more.
const MAX_UNKNOWN: usize = MAX_DIALS;

/// Longest text of an agent's error that is passed on.
const MAX_ERROR: usize = 4 * 1024;

/// Messages with bytes of connections that wait to be sent. More only costs memory: each connection waits
/// for its turn.
const QUEUED_DATA: usize = 2;

/// Why an agent's stream ended otherwise than by the agent's wish.
#[derive(Debug, Error)]
pub(crate) enum BackendError {
    /// The stream broke.
    #[error(transparent)]
    Grpc(#[from] grpc::Error),
    /// A packet is no packet.
    #[error("the agent sent what is no packet: {0}")]
    Malformed(#[from] portico_wire::Malformed),
    /// A connection number was used twice.
    #[error("the agent answered two dials with connection {}", .0.0)]
    Twice(ConnectId),
    /// More unknown connections than there can be.
    #[error("the agent names {MAX_UNKNOWN} connections that are none here, and does not close them")]
    TooManyUnknown,
    /// More connections that were closed here, and that the agent does not close.
    #[error("the agent does not close {MAX_CLOSING} connections that it was told to")]
    TooManyClosing,
    /// It does not read.
    #[error("the agent does not read its control packets")]
    NotReading,
    /// Others need what waits for it.
    #[error("the agent does not read its control packets, and the memory for that is used up")]
    Memory,
}

/// Why a dial did not reach the agent's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum DialLost {
    /// The stream ended first.
    #[error("the agent was lost")]
    Agent,
    /// Too many wait already.
    #[error("{MAX_DIALS} dials wait for the agent already")]
    TooMany,
}

/// A connection that the agent has opened.
#[derive(Debug)]
pub(crate) enum Opened {
    /// By packets on the shared stream.
    Packets(PacketConnection),
    /// By a stream of its own.
    Native(NativeStream),
}

impl Opened {
    /// Lets an upstream agent go on while the frontend of this connection takes nothing. It is polled from
    /// the start, because all connections of such an agent share its window. Returns why the connection has
    /// to end, when it has to.
    pub(crate) fn pace(&self) -> impl Future<Output = ConnectionEnd> + use<> {
        let pace = match self {
            Self::Packets(connection) => Some(connection.pace()),
            Self::Native(_) => None,
        };
        async move {
            match pace {
                Some(pace) => pace.await,
                None => pending().await,
            }
        }
    }
}

/// The agent's answer: a connection, or why there is none.
pub(crate) type Answer = Result<Opened, String>;

/// An agent's stream.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) agent: Box<str>,
    pub(crate) identifiers: Identifiers,
    pub(crate) peer: SocketAddr,
    pub(crate) version: Box<str>,
    pub(crate) is_native: bool,
    pub(crate) since: Instant,
    activity: Arc<Activity>,
    draining: AtomicBool,
    state: Mutex<State>,
    control: mpsc::Sender<Packet>,
    /// Whether a control packet found no room.
    has_lost: AtomicBool,
    /// Counts what waits there.
    held: Reservation,
    data: mpsc::Sender<(ConnectId, Item)>,
    window: FlowControl,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct State {
    is_gone: bool,
    dials: HashMap<DialId, oneshot::Sender<Answer>>,
    connections: HashMap<ConnectId, Arc<Inbox>>,
    /// Closed here; the agent has not reported their end yet.
    closing: HashSet<ConnectId>,
    /// Connections that never were any here; the agent has not reported their end yet.
    unknown: HashSet<ConnectId>,
}

/// The facts that an agent states of itself when it connects.
#[derive(Debug)]
pub(crate) struct Authenticated {
    pub(crate) agent: Box<str>,
    pub(crate) identifiers: Identifiers,
    pub(crate) peer: SocketAddr,
    pub(crate) version: Box<str>,
    pub(crate) is_native: bool,
}

/// Bytes that wait for their turn among those of other connections.
#[derive(Debug)]
enum Item {
    /// Counted by the activity of the agent's connection.
    Bytes(Bytes),
    /// CLOSE_REQ behind all bytes of its connection.
    Close,
}

/// The queues of a stream, for its writer.
pub(crate) struct Outgoing {
    control: mpsc::Receiver<Packet>,
    data: mpsc::Receiver<(ConnectId, Item)>,
}

impl Backend {
    pub(crate) fn new(
        authenticated: Authenticated,
        receiver: &mut Receiver,
        activity: &Arc<Activity>,
        shared: &Arc<Shared>,
    ) -> (Arc<Self>, Outgoing) {
        let Authenticated { agent, identifiers, peer, version, is_native } = authenticated;
        let (control, control_out) = mpsc::channel(MAX_CONTROL);
        let (data, data_out) = mpsc::channel(QUEUED_DATA);
        let backend = Self {
            agent,
            identifiers,
            peer,
            version,
            is_native,
            since: Instant::now(),
            activity: Arc::clone(activity),
            draining: AtomicBool::default(),
            state: Mutex::default(),
            control,
            has_lost: AtomicBool::default(),
            held: Reservation::new(vec![shared.memory.clone()], Duration::ZERO),
            data,
            window: receiver.flow_control(),
            shared: Arc::clone(shared),
        };
        (Arc::new(backend), Outgoing { control: control_out, data: data_out })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the agent for a connection to `address`. If the future is dropped before the answer, the agent is
    /// notified.
    pub(crate) async fn dial(self: &Arc<Self>, address: &str) -> Result<Answer, DialLost> {
        let (answer, answered) = oneshot::channel();
        let dial = self.shared.next_dial();
        {
            let mut state = self.state();
            if state.is_gone {
                return Err(DialLost::Agent);
            }
            if state.dials.len() >= MAX_DIALS {
                return Err(DialLost::TooMany);
            }
            state.dials.insert(dial, answer);
        }
        let _pending = Pending { backend: self, dial };
        self.send(Packet::DialRequest { protocol: "tcp".into(), address: address.into(), dial });
        answered.await.map_err(|_| DialLost::Agent)
    }

    /// A stream of its own for a dial. `None` if nothing waits for that dial.
    pub(crate) fn take_dial(&self, dial: DialId) -> Option<oneshot::Sender<Answer>> {
        self.state().dials.remove(&dial)
    }

    /// Sends a control packet. A stream whose queue is full loses it, and ends by the next packet that comes.
    fn send(&self, packet: Packet) {
        // Before it is there: the writer may take it at once.
        let cost = packet.memory();
        self.held.charge(cost);
        // A writer that is gone has taken the stream with it.
        if self.control.try_send(packet).is_err() {
            self.held.release(cost);
            self.has_lost.store(true, Relaxed);
        }
    }

    /// Says when the agent leaves more to be done than may be.
    fn overrun(&self) -> Result<(), BackendError> {
        if self.has_lost.load(Relaxed) {
            return Err(BackendError::NotReading);
        }
        if self.state().closing.len() > MAX_CLOSING {
            return Err(BackendError::TooManyClosing);
        }
        Ok(())
    }

    /// How long ago a look at the connection last found that the agent had sent something.
    pub(crate) fn last_seen(&self) -> Duration {
        self.activity.last_seen()
    }

    /// Dials that wait for the agent.
    pub(crate) fn dials(&self) -> usize {
        self.state().dials.len()
    }

    /// Ends what rests on the stream: dials are lost, and frontends notified.
    pub(crate) fn end(&self) {
        let (dials, connections) = {
            let mut state = self.state();
            state.is_gone = true;
            (state.closing, state.unknown) = (HashSet::new(), HashSet::new());
            (std::mem::take(&mut state.dials), std::mem::take(&mut state.connections))
        };
        drop(dials);
        connections.values().for_each(|inbox| inbox.end(Ended::AgentLost));
    }

    /// Handles one packet. Window that is given back now is returned.
    fn take(self: &Arc<Self>, packet: Packet, window: usize) -> Result<usize, BackendError> {
        match packet {
            Packet::Data { connection, payload } => return self.take_data(connection, payload, window),
            Packet::DialResponse { dial, result } => self.take_answer(dial, result)?,
            Packet::CloseResponse { connection, .. } | Packet::CloseRequest(connection) => {
                let mut state = self.state();
                state.closing.remove(&connection);
                state.unknown.remove(&connection);
                if let Some(inbox) = state.connections.remove(&connection) {
                    inbox.end(Ended::Closed);
                }
            }
            Packet::CloseDial(dial) => drop(self.take_dial(dial)),
            Packet::Drain => {
                if !self.draining.swap(true, Relaxed)
                    && let Some(left_out) = self.shared.admits_coming()
                {
                    tracing::info!(agent = &*self.agent, peer = %self.peer, left_out, "agent drains");
                }
            }
            Packet::DialRequest { .. } | Packet::Unknown => {}
        }
        Ok(window)
    }

    fn take_data(&self, connection: ConnectId, payload: Bytes, window: usize) -> Result<usize, BackendError> {
        let inbox = self.state().connections.get(&connection).map(Arc::clone);
        match inbox {
            Some(inbox) if !payload.is_empty() => Ok(inbox.push(payload, window)),
            None if connection.0 != 0 => self.close_unknown(connection).map(|()| window),
            _ => Ok(window),
        }
    }

    fn take_answer(
        self: &Arc<Self>,
        dial: DialId,
        result: Result<ConnectId, String>,
    ) -> Result<(), BackendError> {
        let waits = self.take_dial(dial);
        if waits.is_none() || result == Ok(ConnectId(0)) {
            self.shared.counters.dial_failed("unrecognized_response");
        }
        let Some(waits) = waits else {
            return match result {
                Ok(id) if self.state().connections.contains_key(&id) => Err(BackendError::Twice(id)),
                Ok(id) if id.0 != 0 => self.close_unknown(id),
                _ => Ok(()),
            };
        };
        let answer = match result {
            Err(mut error) => {
                error.truncate(error.floor_char_boundary(MAX_ERROR));
                // It may be as large as a packet, and waits uncounted for a frontend or the next agent.
                error.shrink_to_fit();
                Err(error)
            }
            Ok(ConnectId(0)) => Err("the agent answered without a connection".to_owned()),
            Ok(id) => Ok(Opened::Packets(self.open(id)?)),
        };
        // One that is dropped, because nobody waits for it any more, closes the connection.
        drop(waits.send(answer));
        Ok(())
    }

    fn open(self: &Arc<Self>, id: ConnectId) -> Result<PacketConnection, BackendError> {
        let mut state = self.state();
        if state.connections.contains_key(&id) {
            return Err(BackendError::Twice(id));
        }
        let Shared { settings, memory, excess, .. } = &*self.shared;
        let inbox = Arc::new(Inbox::new(settings.connection_buffer, memory, excess));
        state.connections.insert(id, Arc::clone(&inbox));
        Ok(PacketConnection::new(Arc::clone(self), id, inbox))
    }

    /// Has the agent close a connection that is none here. It does so once, however often the agent names it.
    fn close_unknown(&self, id: ConnectId) -> Result<(), BackendError> {
        let mut state = self.state();
        if state.closing.contains(&id) || state.unknown.contains(&id) {
            return Ok(());
        }
        if state.unknown.len() >= MAX_UNKNOWN {
            return Err(BackendError::TooManyUnknown);
        }
        state.unknown.insert(id);
        drop(state);
        self.send(Packet::CloseRequest(id));
        Ok(())
    }
}

impl Candidate for Backend {
    fn agent(&self) -> &str {
        &self.agent
    }

    fn identifiers(&self) -> &Identifiers {
        &self.identifiers
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }
}

/// A dial that waits. Dropped before the answer, it is taken back.
struct Pending<'a> {
    backend: &'a Backend,
    dial: DialId,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.backend.take_dial(self.dial).is_some() {
            self.backend.send(Packet::CloseDial(self.dial));
        }
    }
}

/// Serves an agent's stream until it ends.
pub(crate) async fn serve(
    backend: &Arc<Backend>,
    outgoing: Outgoing,
    sender: &mut Sender,
    receiver: &mut Receiver,
) -> Result<(), BackendError> {
    tokio::select! {
        ended = read(backend, receiver) => ended,
        ended = write(backend, outgoing, sender) => ended,
        () = poll_fn(|cx| backend.held.poll_evicted(cx)) => Err(BackendError::Memory),
    }
}

async fn read(backend: &Arc<Backend>, receiver: &mut Receiver) -> Result<(), BackendError> {
    let counters = &backend.shared.counters;
    let failed = |error: &grpc::Error| counters.stream_failed(Segment::FromAgent, error, "Unknown");
    while let Some(message) = receiver.message().await.inspect_err(failed)? {
        let packet = Packet::decode(&message.bytes)?;
        counters.packet(Segment::FromAgent, &packet);
        let window = backend.take(packet, message.window)?;
        receiver.release(window);
        backend.overrun()?;
        // A window of small packets is tens of thousands.
        consume_budget().await;
    }
    Ok(())
}

async fn write(backend: &Backend, mut outgoing: Outgoing, sender: &mut Sender) -> Result<(), BackendError> {
    let counters = &backend.shared.counters;
    let mut last = "Unknown";
    loop {
        let mut untaken = Duration::ZERO;
        while let Err(_nothing_taken) = match timeout(LOOK, sender.ready()).await {
            Ok(ready) => {
                ready.inspect_err(|error| counters.stream_failed(Segment::ToAgent, error, last))?;
                Ok(())
            }
            Err(elapsed) => Err(elapsed),
        } {
            // Bytes may wait for as long as their endpoint takes none.
            untaken =
                if last == "DATA" && outgoing.control.is_empty() { Duration::ZERO } else { untaken + LOOK };
            if untaken >= UNTAKEN {
                return Err(BackendError::NotReading);
            }
        }
        // Control packets first, always.
        let packet = tokio::select! {
            biased;
            Some(packet) = outgoing.control.recv() => {
                backend.held.release(packet.memory());
                packet
            }
            Some((connection, item)) = outgoing.data.recv() => match item {
                Item::Close => Packet::CloseRequest(connection),
                Item::Bytes(payload) => {
                    last = "DATA";
                    counters.data_packet(Segment::ToAgent);
                    sender.send_counted(DataHead::new(connection, payload.len()).as_bytes(), payload);
                    continue;
                }
            },
            else => return Ok(()),
        };
        last = packet.type_name();
        counters.packet(Segment::ToAgent, &packet);
        sender.send(&packet.encoded(), Bytes::new());
    }
}

/// Numbers of dials.
#[derive(Debug)]
pub(crate) struct DialIds(AtomicI64);

impl Default for DialIds {
    fn default() -> Self {
        Self(AtomicI64::new(1))
    }
}

impl DialIds {
    pub(crate) fn next(&self) -> DialId {
        DialId(self.0.fetch_add(1, Relaxed))
    }
}
