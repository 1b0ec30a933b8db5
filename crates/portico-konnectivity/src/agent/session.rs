//! The Connect stream of one server: its requests, and our answers.
//!
//! One task reads the stream and writes it. It waits for no dial, and for a connection only as [`Blocked`]
//! says: dials and connections have tasks of their own. With a server of ours a connection moves to an HTTP/2
//! stream of its own (`native`). With another one its bytes share this stream (`endpoint`, `outbound`).

use std::collections::HashMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::uri::Authority;
use portico_net::linger;
use portico_tunnel::connection::{Activity, cause};
use portico_wire::konnectivity::{Code, ConnectId, DataHead, DialId, Packet, address};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::dial::{DialFailure, Refusal, dial};
use super::endpoint::{Blocked, Carrier, Endpoint};
use super::native;
use super::outbound::{Next, Outbound};
use super::record::Guard;
use super::shared::{Dialling, Shared};
use crate::grpc::{self, Receiver, Sender};

/// Packets that are taken before other tasks have their turn.
const BATCH: usize = 64;

/// One connected server.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    server: Arc<str>,
    address: SocketAddr,
    since: Instant,
    authority: Authority,
    requests: SendRequest<Bytes>,
    activity: Arc<Activity>,
    outbound: Outbound,
    /// Whether connections have HTTP/2 streams of their own.
    has_streams: bool,
    /// The server has sent GOAWAY.
    is_leaving: AtomicBool,
    /// The connection is over. Written while `state` is locked.
    is_over: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last DIAL_REQ.
    last: i64,
    dials: HashMap<DialId, Dial>,
    /// Connections whose bytes share the stream.
    endpoints: HashMap<ConnectId, Arc<Endpoint>>,
}

/// A dial under way, or the connection that came of it.
#[derive(Debug)]
struct Dial {
    connection: ConnectId,
    task: AbortHandle,
    is_open: bool,
}

/// What comes from the server.
struct Incoming {
    receiver: Receiver,
    blocked: Option<Blocked>,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the server ended the stream")]
    ByServer,
    #[error(transparent)]
    Stream(#[from] grpc::Error),
    #[error("the connection is closed")]
    Closed,
    #[error("the connection broke: {}", cause(.0))]
    Connection(h2::Error),
    #[error("the server did not answer PING within {0:?}")]
    Silent(std::time::Duration),
    #[error("the server does not read the answers to what it asks")]
    Unread,
}

impl Ended {
    /// As gRPC has it.
    pub(super) fn code(&self) -> Code {
        match self {
            Self::ByServer => Code::OK,
            Self::Stream(error) => error.code(),
            Self::Unread => Code::RESOURCE_EXHAUSTED,
            Self::Closed | Self::Connection(_) | Self::Silent(_) => Code::UNAVAILABLE,
        }
    }
}

/// What a session begins with.
pub(super) struct Connected {
    pub(super) server: Arc<str>,
    pub(super) address: SocketAddr,
    pub(super) authority: Authority,
    pub(super) requests: SendRequest<Bytes>,
    pub(super) activity: Arc<Activity>,
    pub(super) has_streams: bool,
}

impl Session {
    pub(super) fn new(shared: &Arc<Shared>, connected: Connected) -> Self {
        let Connected { server, address, authority, requests, activity, has_streams } = connected;
        Self {
            shared: Arc::clone(shared),
            server,
            address,
            since: Instant::now(),
            authority,
            requests,
            activity,
            outbound: Outbound::new(&shared.settings.memory),
            has_streams,
            is_leaving: AtomicBool::new(false),
            is_over: Arc::default(),
            state: Mutex::default(),
        }
    }

    /// The host and port that it was asked for by.
    pub(super) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The server's id.
    pub fn server(&self) -> &Arc<str> {
        &self.server
    }

    /// Its address, or that of the proxy that leads to it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections that it asked for, and dials under way.
    pub fn connections(&self) -> usize {
        self.state().dials.len()
    }

    /// When it was connected.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Whether connections have HTTP/2 streams of their own: it is a server of ours.
    pub fn has_streams(&self) -> bool {
        self.has_streams
    }

    /// Whether the server takes no new streams, because it is about to stop.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving.load(Relaxed)
    }

    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    pub(super) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    pub(super) fn connection_buffer(&self) -> usize {
        self.shared.settings.connection_buffer
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the server to prefer other agents.
    pub(super) fn drain(&self) {
        self.outbound.control(Packet::Drain);
    }

    /// Notices GOAWAY, which h2 reports only to a caller that would send a request. True the first time.
    pub(super) fn poll_leaving(&self, cx: &mut Context<'_>) -> bool {
        let goes = matches!(self.requests.clone().poll_ready(cx), Poll::Ready(Err(_)));
        goes && !self.is_leaving.swap(true, Relaxed)
    }

    pub(super) fn close_response(&self, connection: ConnectId, error: String) {
        self.outbound.control(Packet::CloseResponse { connection, error });
    }

    /// Reads and writes the stream until it is over.
    pub(super) async fn exchange(self: &Arc<Self>, receiver: Receiver, mut sender: Sender) -> Ended {
        let mut incoming = Incoming { receiver, blocked: None };
        poll_fn(|cx| {
            if let Poll::Ready(ended) = self.poll_receive(&mut incoming, cx) {
                return Poll::Ready(ended);
            }
            self.poll_send(&mut sender, cx)
        })
        .await
    }

    fn poll_receive(self: &Arc<Self>, incoming: &mut Incoming, cx: &mut Context<'_>) -> Poll<Ended> {
        for _ in 0..BATCH {
            if let Some(blocked) = &mut incoming.blocked {
                ready!(blocked.poll(cx));
                incoming.blocked = None;
            }
            let message = match incoming.receiver.poll_message(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(Some(message))) => message,
                Poll::Ready(Ok(None)) => return Poll::Ready(Ended::ByServer),
                Poll::Ready(Err(error)) => return Poll::Ready(error.into()),
            };
            match Packet::decode(&message.bytes) {
                Ok(packet) => incoming.blocked = self.take(packet),
                Err(why) => return Poll::Ready(grpc::Error::from(why).into()),
            }
            // The queue of an endpoint has a bound of its own.
            incoming.receiver.release(message.window);
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_send(&self, sender: &mut Sender, cx: &mut Context<'_>) -> Poll<Ended> {
        loop {
            // First: a server that gives no window would never be found out below.
            if self.outbound.poll_full(cx).is_ready() {
                return Poll::Ready(Ended::Unread);
            }
            match sender.poll_ready(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(error.into()),
            }
            match self.outbound.next() {
                None => return Poll::Pending,
                Some(Next::Control(packet)) => {
                    self.shared.sent(&packet);
                    let mut message = BytesMut::new();
                    packet.encode(&mut message);
                    sender.send(&message, Bytes::new());
                }
                Some(Next::Data(chunk)) => {
                    self.shared.sent_data();
                    let head = DataHead::new(chunk.connection, chunk.payload.len());
                    sender.send_counted(head.as_bytes(), chunk.payload);
                }
            }
        }
    }

    /// Does what the packet says. Returns what the next one has to wait for.
    fn take(self: &Arc<Self>, packet: Packet) -> Option<Blocked> {
        self.shared.received(&packet);
        match packet {
            Packet::DialRequest { protocol, address, dial } => self.dial(protocol, address, dial),
            Packet::CloseDial(dial) => self.abandon(dial),
            Packet::Data { connection: ConnectId(0), .. } => {
                tracing::debug!(server = %self.server, "DATA of connection 0, which is none");
            }
            Packet::Data { connection, payload } => {
                let endpoint = self.state().endpoints.get(&connection).map(Arc::clone);
                match endpoint {
                    Some(endpoint) => return Blocked::push(endpoint, payload, self.connection_buffer()),
                    None => self.close_response(connection, "unrecognized connectID".to_owned()),
                }
            }
            Packet::CloseRequest(connection) => {
                let endpoint = self.state().endpoints.get(&connection).map(Arc::clone);
                match endpoint {
                    Some(endpoint) => endpoint.close(),
                    None => self.close_response(connection, "Unknown connectID".to_owned()),
                }
            }
            // Packets that only agents send, and those that later versions may.
            Packet::DialResponse { .. } | Packet::CloseResponse { .. } | Packet::Drain | Packet::Unknown => {}
        }
        None
    }

    fn dial(self: &Arc<Self>, protocol: String, address: String, dial: DialId) {
        let mut state = self.state();
        state.last += 1;
        let connection = ConnectId(state.last);
        if protocol.len() + address.len() > address::MAX {
            drop(state);
            // The answer has the text in it, and many answers may wait.
            let text = format!("dial: the address is longer than {} bytes", address::MAX);
            return self.refuse(dial, Refusal::unknown(text));
        }
        let Some(dialling) = self.shared.begin_dial() else {
            drop(state);
            let most = self.shared.settings.max_dials;
            return self.refuse(dial, Refusal::limit(most, "dials under way"));
        };
        let entry = Entry { session: Arc::clone(self), dial, connection };
        let task = tokio::spawn(entry.run(protocol, address, dialling));
        // The task removes it, and needs this lock for that.
        state.dials.insert(dial, Dial { connection, task: task.abort_handle(), is_open: false });
    }

    /// DIAL_CLS. Ends a dial under way, or the connection that has just come of it. Its server has forgotten
    /// it, and would never close it.
    fn abandon(&self, dial: DialId) {
        let abandoned = self.state().dials.remove(&dial);
        if let Some(dial) = abandoned {
            dial.task.abort();
            self.shared.counters.dials_abandoned.fetch_add(1, Relaxed);
        }
    }

    fn refuse(&self, dial: DialId, refusal: Refusal) {
        self.shared.dial_failed(refusal.failure);
        tracing::debug!(server = %self.server, error = refusal.text, "a dial failed");
        self.outbound.control(Packet::DialResponse { dial, result: Err(refusal.text) });
    }

    /// The connection to the server is over. Dials end. Connections end once their endpoints have the bytes
    /// that came for them.
    pub(super) fn over(&self) {
        let mut state = self.state();
        self.is_over.store(true, Relaxed);
        state.dials.retain(|_, dial| {
            if !dial.is_open {
                dial.task.abort();
            }
            dial.is_open
        });
        state.endpoints.values().for_each(|endpoint| endpoint.lost());
    }
}

/// A dial, and the connection that comes of it, in the tables of its session while it is held.
struct Entry {
    session: Arc<Session>,
    dial: DialId,
    connection: ConnectId,
}

impl Entry {
    async fn run(self, protocol: String, address: String, dialling: Dialling) {
        let session = &self.session;
        let shared = &session.shared;
        let begun = Instant::now();
        // Boxed: a connection at rest does not keep the memory that dialling needs.
        let dialled =
            Box::pin(dial(&shared.settings.to_endpoints, &shared.settings.policy, &protocol, &address)).await;
        drop(dialling);
        let socket = match dialled {
            Ok(socket) => socket,
            Err(refusal) => return session.refuse(self.dial, refusal),
        };
        let Session { server, is_over, has_streams, .. } = &**session;
        let Some(record) = Guard::list(shared, server, is_over, &address, *has_streams) else {
            let most = shared.settings.max_connections;
            return session.refuse(self.dial, Refusal::limit(most, "connections"));
        };
        shared.dialled(begun.elapsed());
        if session.has_streams {
            let (requests, authority) = (session.requests.clone(), session.authority.clone());
            match Box::pin(native::open(requests, authority, self.dial)).await {
                Ok(stream) if self.is_open() => {
                    native::carry(Arc::clone(&session.activity), stream, socket, record).await;
                }
                Ok(_) => {}
                Err(error) => {
                    // It was never asked for anything, and does not end in order.
                    linger::abort(&socket);
                    if error.is_abandoned() {
                        return;
                    }
                    let text = format!("dial {protocol} {address}: the agent cannot open a stream: {error}");
                    session.refuse(self.dial, Refusal { text, failure: DialFailure::Unknown });
                }
            }
            return;
        }
        let endpoint = Endpoint::new(&session.activity);
        if !self.is_open() {
            return;
        }
        session.state().endpoints.insert(self.connection, Arc::clone(&endpoint));
        // Before any DATA: it is a control packet.
        session.outbound.control(Packet::DialResponse { dial: self.dial, result: Ok(self.connection) });
        Carrier::new(endpoint, socket, Arc::clone(session), self.connection, record).run().await;
    }

    /// From now on the connection ends by itself. False if the session is over.
    fn is_open(&self) -> bool {
        let mut state = self.session.state();
        let is_over = self.session.is_over.load(Relaxed);
        if let Some(dial) = state.dials.get_mut(&self.dial) {
            dial.is_open = true;
        }
        !is_over
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut state = self.session.state();
        // Another dial may have the same number by now.
        if state.dials.get(&self.dial).is_some_and(|dial| dial.connection == self.connection) {
            state.dials.remove(&self.dial);
        }
        state.endpoints.remove(&self.connection);
        if state.dials.is_empty() {
            // A burst needs no memory afterwards.
            state.dials.shrink_to_fit();
            state.endpoints.shrink_to_fit();
        }
    }
}
