//! The agents' side: TLS, Connect streams, and the streams of connections that agents of ours open.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::USER_AGENT;
use http::{HeaderMap, HeaderValue, Request, Response};
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::{CONNECT_PATH, Code, DialId, Identifiers};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};

use super::authentication::Authentication;
use super::backend::{self, Backend, Introduction, Opened};
use super::counters::Counted;
use super::http2::{self, Limits, Peer};
use super::native::NativeStream;
use super::settings::{HELLO, MAX_PING, PING_TIMEOUT};
use super::shared::Shared;
use crate::grpc::{Call, Status};
use crate::streams::{DIAL, OFFER, STREAM_PATH, VERSION};

/// One connection of an agent.
struct Connection {
    shared: Arc<Shared>,
    authentication: Arc<Authentication>,
    address: SocketAddr,
    activity: Arc<Activity>,
    peer: Peer,
    /// Its Connect streams: one, as a rule.
    backends: Mutex<Vec<Arc<Backend>>>,
}

/// Serves an agent's connection. `unknown` is what it holds until it is accepted.
pub(crate) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    shared: Arc<Shared>,
    authentication: Arc<Authentication>,
    stream: S,
    address: SocketAddr,
    unknown: OwnedSemaphorePermit,
) {
    let window = u32::try_from(shared.settings.connection_buffer).unwrap_or(u32::MAX);
    let limits = Limits {
        stream_window: window.clamp(64 * 1024, 1 << 30),
        ping: (shared.settings.keepalive.min(MAX_PING), PING_TIMEOUT),
        deadline: Instant::now() + HELLO,
    };
    let connection = Arc::new(Connection {
        activity: Arc::new(Activity::new(&shared.memory)),
        shared: Arc::clone(&shared),
        authentication,
        address,
        peer: Peer::default(),
        backends: Mutex::default(),
    });
    let mut unknown = Some(Arc::new(unknown));
    let start = |request: Request<RecvStream>, respond: SendResponse<Bytes>| {
        if request.uri().path() == STREAM_PATH {
            return connection.take_stream(request, respond);
        }
        let Some(call) = Call::accept(request, respond) else { return };
        if call.path() != CONNECT_PATH {
            return call
                .refuse(&Status::new(Code::UNIMPLEMENTED, "only AgentService/Connect is served here"));
        }
        // The second of several holds nothing: one is enough.
        tokio::spawn(connect(Arc::clone(&connection), call, unknown.take()));
    };
    let (activity, peer) = (&connection.activity, &connection.peer);
    if let Err(error) = http2::serve(stream, limits, activity, peer, start, shared.agents_stopped()).await {
        tracing::info!(peer = %address, %error, "an agent's connection ended");
    }
}

impl Connection {
    fn backends(&self) -> MutexGuard<'_, Vec<Arc<Backend>>> {
        // A panic elsewhere leaves nothing half done here.
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the stream of a connection that an agent of ours has opened, if a dial on this connection waits
    /// for it.
    fn take_stream(&self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (head, from_agent) = request.into_parts();
        let number = head.headers.get(DIAL).and_then(|value| value.to_str().ok()?.parse().ok());
        let waits = number
            .and_then(|dial| self.backends().iter().find_map(|backend| backend.take_dial(DialId(dial))));
        let Some(waits) = waits else { return respond.send_reset(Reason::CANCEL) };
        // Fails only if the agent is gone; then the dial is lost with it.
        if let Ok(to_agent) = respond.send_response(Response::new(()), false) {
            let activity = Arc::clone(&self.activity);
            // A stream that nobody waits for any more is reset as it is dropped.
            let _ = waits.send(Ok(Opened::Native(NativeStream { to_agent, from_agent, activity })));
        }
    }

    /// Reads what the agent says of itself, and has its token reviewed.
    async fn introduce(&self, metadata: &HeaderMap) -> Result<Introduction, String> {
        let agent = only(metadata, "agentid")?.ok_or("missing or empty agentID in the context")?;
        if agent.is_empty() {
            return Err("missing or empty agentID in the context".to_owned());
        }
        let identifiers = only(metadata, "agentidentifiers")?.unwrap_or_default();
        let identifiers = Identifiers::parse(identifiers)
            .map_err(|error| format!("fail to parse url encoded string: {error}"))?;
        self.authentication.check(metadata).await?;
        let version = metadata.get(USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        Ok(Introduction {
            agent: agent.into(),
            identifiers,
            peer: self.address,
            version: version.into(),
            is_native: metadata.get(OFFER).is_some_and(|version| version == VERSION),
        })
    }
}

/// The task of one Connect stream.
async fn connect(connection: Arc<Connection>, call: Call, unknown: Option<Arc<OwnedSemaphorePermit>>) {
    let shared = &connection.shared;
    let introduced = match timeout(HELLO, connection.introduce(call.metadata())).await {
        Ok(introduced) => introduced,
        Err(_) => Err("the agent's token was not reviewed in time".to_owned()),
    };
    let introduction = match introduced {
        Ok(introduction) => introduction,
        Err(why) => {
            shared.counters.agents_refused.fetch_add(1, Relaxed);
            tracing::warn!(peer = %connection.address, %why, "refused an agent");
            // As upstream: an agent reacts to every error alike.
            return call.refuse(&Status::new(Code::UNKNOWN, why));
        }
    };
    drop(unknown);
    let Some(answer) = answer(shared, &introduction) else { return };
    let memory = [shared.memory.clone()];
    let Ok((sender, mut receiver)) = call.start(answer, &connection.activity, &memory) else { return };
    connection.peer.is_known.store(true, Relaxed);
    connection.peer.is_native.fetch_or(introduction.is_native, Relaxed);
    let (backend, outgoing) = Backend::new(introduction, &mut receiver, shared);
    let _registered = Registered::new(&connection, &backend);
    let _counted = Counted::new(&shared.counters.agent_streams);
    let (agent, peer, version) = (&*backend.agent, connection.address, &*backend.version);
    tracing::info!(agent, %peer, version, native = backend.is_native, "agent connected");
    match backend::serve(&backend, outgoing, sender, &mut receiver).await {
        Ok(()) => tracing::info!(agent, %peer, "agent left"),
        Err(error) => tracing::info!(agent, %peer, %error, "agent lost"),
    }
}

/// The metadata for an agent. `None` if the server's name is none that a header carries.
fn answer(shared: &Shared, introduction: &Introduction) -> Option<HeaderMap> {
    let mut answer = HeaderMap::new();
    answer.insert("serverid", HeaderValue::try_from(&shared.settings.id).ok()?);
    answer.insert("servercount", HeaderValue::from(shared.settings.count));
    if introduction.is_native {
        answer.insert(OFFER, HeaderValue::from_static(VERSION));
    }
    Some(answer)
}

/// The one value of a header, if there is one.
pub(super) fn only<'a>(metadata: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, String> {
    let mut values = metadata.get_all(name).iter();
    let value = values.next();
    if values.next().is_some() {
        return Err(format!("multiple values for {name} in the context"));
    }
    let text = |value: &'a HeaderValue| value.to_str().map_err(|_| format!("{name} is not text"));
    value.map(text).transpose()
}

/// An agent that gets dials, until this is dropped. What rests on its stream ends then.
struct Registered<'a> {
    connection: &'a Connection,
    backend: &'a Arc<Backend>,
}

impl<'a> Registered<'a> {
    fn new(connection: &'a Connection, backend: &'a Arc<Backend>) -> Self {
        connection.shared.registry().add(backend);
        connection.backends().push(Arc::clone(backend));
        Self { connection, backend }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.connection.shared.registry().remove(self.backend);
        self.connection.backends().retain(|backend| !Arc::ptr_eq(backend, self.backend));
        self.backend.end();
    }
}
