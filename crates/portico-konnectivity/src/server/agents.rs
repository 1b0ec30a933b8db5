//! The agents' side: TLS, Connect streams, and the streams of connections that agents of ours open.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::USER_AGENT;
use http::{HeaderMap, HeaderValue, Request};
use portico_net::ReadLimit;
use portico_net::slots::Source;
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::{CONNECT_PATH, Code, DialId, Identifiers};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::authentication::{Authentication, Refusal, only};
use super::backend::{self, Authenticated, Backend, Opened};
use super::counters::Counted;
use super::http2::{self, ConnectionError, Limits, Peer};
use super::native::NativeStream;
use super::settings::{HELLO, MAX_STREAMS, PING_TIMEOUT};
use super::shared::Shared;
use super::unauthenticated::Unauthenticated;
use crate::grpc::{Call, Status};
use crate::streams::{DIAL, LONGEST_NAME, OFFER, STREAM_PATH, VERSION};

/// The rest of the time of an agent that is refused, to read why.
const TO_READ_WHY: Duration = Duration::from_secs(1);

/// Longest text by which an agent names its program; the rest is left out.
const MAX_VERSION: usize = 128;

/// The peer of a connection, as far as TLS tells.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) address: SocketAddr,
    /// The names in its certificate, if it has one.
    pub(crate) names: Vec<String>,
    pub(crate) unauthenticated: Unauthenticated,
}

/// One connection of an agent.
struct Connection {
    shared: Arc<Shared>,
    authentication: Arc<Authentication>,
    address: SocketAddr,
    names: Vec<String>,
    activity: Arc<Activity>,
    peer: Peer,
    /// Limits what is read from the agent until it is accepted.
    limit: Arc<ReadLimit>,
    /// Until when it has to be accepted.
    deadline: Instant,
    /// Among those of all agents; held until the connection ends, or an agent could have any number of them.
    permit: OnceLock<OwnedSemaphorePermit>,
    /// Whether it has, or had, a Connect stream, accepted or not.
    connects: AtomicBool,
    /// Whether the agent is refused, which is counted and logged.
    is_refused: AtomicBool,
    /// Its Connect stream, once it is accepted.
    backend: Mutex<Option<Arc<Backend>>>,
}

/// Serves an agent's connection. True: it is one of upstream that was accepted and is silent.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    shared: Arc<Shared>,
    authentication: Arc<Authentication>,
    stream: S,
    caller: Caller,
) -> bool {
    let Caller { address, names, unauthenticated: Unauthenticated { slot, limit } } = caller;
    let window = u32::try_from(shared.settings.connection_buffer).unwrap_or(u32::MAX);
    let deadline = Instant::now() + HELLO;
    let limits = Limits {
        streams: MAX_STREAMS,
        stream_window: window.clamp(64 * 1024, 1 << 30),
        ping: (shared.settings.keepalive, PING_TIMEOUT),
        deadline,
        idle: None,
    };
    let connection = Arc::new(Connection {
        // One agent may have all connections of its cluster.
        activity: Arc::new(Activity::within(&shared.memory, shared.memory.limit()).in_slot()),
        shared: Arc::clone(&shared),
        authentication,
        address,
        names,
        peer: Peer::new(slot),
        limit,
        deadline,
        permit: OnceLock::new(),
        connects: AtomicBool::default(),
        is_refused: AtomicBool::default(),
        backend: Mutex::default(),
    });
    let start = |request: Request<RecvStream>, respond: SendResponse<Bytes>| {
        if request.uri().path() == STREAM_PATH {
            return connection.take_stream(request, respond);
        }
        // Unless it is the one Connect.
        connection.peer.refused.fetch_add(1, Relaxed);
        let Some(call) = Call::accept(request, respond) else { return };
        if call.path() != CONNECT_PATH {
            return call
                .refuse(&Status::new(Code::UNIMPLEMENTED, "only AgentService/Connect is served here"));
        }
        // Otherwise a stranger could have any number of tokens reviewed.
        if connection.connects.swap(true, Relaxed) {
            let why = "a connection has one Connect stream; open another connection for another";
            return call.refuse(&Status::new(Code::RESOURCE_EXHAUSTED, why));
        }
        tokio::spawn(connect(Arc::clone(&connection), call));
    };
    let (activity, peer) = (&connection.activity, &connection.peer);
    let stops = async {
        // Nobody waits for a stranger.
        shared.drained().await;
        if peer.is_known() {
            shared.agents_stopped().await;
        }
    };
    let ended = http2::serve(stream, limits, activity, peer, start, stops).await;
    let is_upstream = peer.is_known() && !peer.is_native.load(Relaxed);
    let is_away = is_upstream && matches!(ended, Err(ConnectionError::Silent));
    match ended {
        Ok(()) => {}
        Err(error) if peer.is_known() || connection.is_refused.load(Relaxed) => {
            tracing::debug!(peer = %address, %error, "an agent's connection ended");
        }
        Err(error) => shared.refused(error.reason(), address, &error),
    }
    is_away
}

impl Connection {
    fn backend(&self) -> MutexGuard<'_, Option<Arc<Backend>>> {
        // A panic elsewhere leaves nothing half done here.
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The agent is accepted.
    fn accept(&self, authenticated: &Authenticated, permit: OwnedSemaphorePermit) {
        // A connection has one Connect.
        let _ = self.permit.set(permit);
        self.limit.lift();
        self.peer.accept();
        self.peer.is_native.fetch_or(authenticated.is_native, Relaxed);
    }

    /// Takes the stream of a connection that an agent of ours has opened, if a dial on this connection waits
    /// for it.
    fn take_stream(&self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (head, from_agent) = request.into_parts();
        let number = head.headers.get(DIAL).and_then(|value| value.to_str().ok()?.parse().ok());
        let waits = number.and_then(|dial| {
            let backend = self.backend();
            let backend = backend.as_ref()?;
            backend.take_dial(DialId(dial))
        });
        let Some(waits) = waits else {
            self.peer.refused.fetch_add(1, Relaxed);
            return respond.send_reset(Reason::CANCEL);
        };
        self.peer.refused.store(0, Relaxed);
        let activity = Arc::clone(&self.activity);
        // A stream that nobody waits for any more is reset as it is dropped.
        let _ = waits.send(Ok(Opened::Native(NativeStream { respond, from_agent, activity })));
    }

    /// Reads what the agent says of itself, and has its token reviewed.
    async fn authenticate(&self, metadata: &HeaderMap) -> Result<Authenticated, Refusal> {
        let missing = || Refusal::Metadata("missing or empty agentID in the context".to_owned());
        let agent = only(metadata, "agentid")?.filter(|agent| !agent.is_empty()).ok_or_else(missing)?;
        if agent.len() > LONGEST_NAME {
            return Err(Refusal::Metadata(format!("the agentID is longer than {LONGEST_NAME} bytes")));
        }
        let identifiers = only(metadata, "agentidentifiers")?.unwrap_or_default();
        let identifiers = Identifiers::parse(identifiers)
            .map_err(|error| Refusal::Metadata(format!("fail to parse url encoded string: {error}")))?;
        let (source, names) = (Source::of(self.address.ip()), self.names.clone());
        let shared = Arc::clone(&self.shared);
        let reviewed = move |answered| shared.reviews_are_answered(answered);
        let counters = &self.shared.counters;
        let check = self.authentication.check(source, metadata, names, &identifiers, counters, reviewed);
        check.await?;
        let version = metadata.get(USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        Ok(Authenticated {
            agent: agent.into(),
            identifiers,
            peer: self.address,
            version: version[..version.floor_char_boundary(MAX_VERSION)].into(),
            is_native: metadata.get(OFFER).is_some_and(|version| version == VERSION),
        })
    }
}

/// The task of one Connect stream.
async fn connect(connection: Arc<Connection>, mut call: Call) {
    let _connects = Connects(&connection.peer);
    let shared = &connection.shared;
    let metadata = call.take_metadata();
    let too_late = || Refusal::Review("the agent's token was not reviewed in time".to_owned());
    let authenticated = tokio::select! {
        checked = timeout_at(connection.deadline - TO_READ_WHY, connection.authenticate(&metadata)) => {
            checked.unwrap_or_else(|_| Err(too_late()))
        }
        // Otherwise the token of an agent that left would wait for a review in the place of another.
        () = call.abandoned() => return,
    };
    drop(metadata);
    let permitted = authenticated.and_then(|authenticated| Ok((authenticated, shared.agent_permit()?)));
    let (authenticated, permit) = match permitted {
        Ok(permitted) => permitted,
        Err(why) => {
            connection.is_refused.store(true, Relaxed);
            shared.refused(why.reason(), connection.address, &why);
            return call.refuse(&Status::new(why.code(), why.to_string()));
        }
    };
    connection.accept(&authenticated, permit);
    let Some(answer) = answer(shared, &authenticated) else { return };
    let memory = [shared.memory.clone()];
    let Ok((mut sender, mut receiver)) = call.start(answer, &connection.activity, &memory) else { return };
    let (backend, outgoing) = Backend::new(authenticated, &mut receiver, &connection.activity, shared);
    let is_known = shared.registry().has(&backend.agent);
    let registered = Registered::new(&connection, &backend);
    let counted = Counted::new(&shared.counters.agent_streams);
    let (agent, peer, version) = (&*backend.agent, connection.address, &*backend.version);
    // An agent looks again and again for servers that it has not found, and leaves those that it has.
    if is_known {
        tracing::debug!(agent, %peer, "a further connection of an agent");
    } else if let Some(left_out) = shared.admits_coming() {
        tracing::info!(agent, %peer, version, native = backend.is_native, left_out, "agent connected");
    }
    let ended = backend::serve(&backend, outgoing, &mut sender, &mut receiver).await;
    if ended.is_err() {
        // Dropped, the stream would last for as long as a connection does that came of it.
        sender.reset(Reason::CANCEL);
    }
    drop((registered, counted));
    let is_there = shared.registry().has(agent);
    match ended {
        ended if is_there => {
            let error = ended.err().map(|error| error.to_string());
            tracing::debug!(agent, %peer, error, "one of several connections of an agent ended");
        }
        ended => {
            let Some(left_out) = shared.admits_coming() else { return };
            match ended {
                Ok(()) => tracing::info!(agent, %peer, left_out, "agent left"),
                Err(error) if shared.is_draining() => {
                    tracing::info!(agent, %peer, %error, left_out, "agent gone, while this server stops");
                }
                Err(error) => tracing::info!(agent, %peer, %error, left_out, "agent lost"),
            }
        }
    }
}

/// The metadata for an agent. `None` if the server's name is none that a header carries.
fn answer(shared: &Shared, authenticated: &Authenticated) -> Option<HeaderMap> {
    let mut answer = HeaderMap::new();
    answer.insert("serverid", HeaderValue::try_from(&shared.settings.id).ok()?);
    answer.insert("servercount", HeaderValue::from(shared.settings.count));
    if authenticated.is_native {
        answer.insert(OFFER, HeaderValue::from_static(VERSION));
    }
    Some(answer)
}

/// A Connect stream. As this is dropped, the connection of one that was accepted ends soon.
struct Connects<'a>(&'a Peer);

impl Drop for Connects<'_> {
    fn drop(&mut self) {
        // An agent connects anew. One that was refused has until its deadline to read why.
        if self.0.is_known() {
            self.0.end();
        }
    }
}

/// An agent that gets dials, until this is dropped. What rests on its stream ends then.
struct Registered<'a> {
    connection: &'a Connection,
    backend: &'a Arc<Backend>,
}

impl<'a> Registered<'a> {
    fn new(connection: &'a Connection, backend: &'a Arc<Backend>) -> Self {
        connection.shared.register(backend);
        *connection.backend() = Some(Arc::clone(backend));
        Self { connection, backend }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.connection.shared.unregister(self.backend);
        *self.connection.backend() = None;
        self.backend.end();
    }
}
