//! CONNECT requests: the bridge to `portico-tunnel`, which speaks HTTP and TLS and knows nothing of routes.
//!
//! Each request is learned, admitted and connected by itself. A connection of a node agent carries many
//! streams. Each stream has its own access line, its own slot in the cluster's budget and its own end. Only
//! what fails before there is a request is a refusal of the connection as a whole.

use std::future::{pending, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use portico_net::slots::Slot;
use portico_net::{MemoryBudget, Meter, copy};
use portico_tunnel::{
    BadRequest, Failure, Finished, Handler, Presented, Protocol, Request, Served, Settings, StatusCode,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::yield_now;

use super::open;
use crate::admission::{Arrival, Learned};
use crate::api_server::reviewer_of;
use crate::auth::{Credential, Credentials, Denied, Wanted};
use crate::cluster::OpenGuard;
use crate::descriptors::Promise;
use crate::fair_share::Cost;
use crate::outcome::{End, Refusal};
use crate::record::Listener;
use crate::session::Session;
use crate::worker::Worker;

/// The answer to an unauthenticated client whose slot is needed.
const EVICTED: &str =
    "the gateway needs the slot for others; show an identity that is accepted, or try again";

/// The response to an authority that cannot be parsed.
const AUTHORITY_FORM: &str =
    "the authority must be HOST:PORT, such as apiserver-external.cluster-a.svc.cluster.local:443";

/// A connection for the tunnel whose real client is known.
pub(crate) struct Welcomed {
    pub(crate) arrival: Arrival,
    /// Its slot among those that have not yet sent what they want.
    pub(crate) slot: Slot,
    /// What was read of it already.
    pub(crate) first: Vec<u8>,
}

/// Serves a connection to the tunnel port until it ends.
pub(crate) async fn serve(worker: Arc<Worker>, stream: TcpStream, mut arrival: Arrival) {
    let mut first = Vec::new();
    let mode = worker.shared.config.proxy_protocol.tunnel;
    match arrival.learn_client(&worker.shared, &stream, mode, &mut first).await {
        Ok(slot) => serve_welcomed(worker, stream, Welcomed { arrival, slot, first }).await,
        Err(refusal) => arrival.learned.refuse(&worker.shared, refusal),
    }
}

/// Serves a connection that is for the tunnel, however that was found out.
pub(crate) async fn serve_welcomed(worker: Arc<Worker>, stream: TcpStream, welcomed: Welcomed) {
    let config = &worker.shared.config;
    let settings = Settings {
        hello_timeout: config.hello_timeout,
        stream_idle: config.idle.tunnel_stream,
        ..config.tunnel.clone()
    };
    let Welcomed { arrival: Arrival { mut learned, promise }, slot, first } = welcomed;
    learned.listener = Listener::Tunnel;
    let client = learned.client;
    let handler = Arc::new(Connection {
        worker: Arc::clone(&worker),
        client,
        client_is_real: learned.client_is_real,
        // Fails only for a client that is gone, and then no one reads the header.
        local: stream.local_addr().unwrap_or(client),
        pending: Mutex::new(Pending { handshake: Some((slot, promise)), ..Pending::default() }),
        credentials: Credentials::default(),
    });
    let mut draining = worker.shared.draining().subscribe();
    // An error says that the gateway was dropped, and with it soon this task.
    let drain = async move { drop(draining.wait_for(|draining| *draining).await) };
    // Boxed: HTTP/1.1 tunnels need none of it while they rest.
    let serving = Box::pin(portico_tunnel::serve(stream, first.into(), &settings, drain, &handler));
    let served = unless_evicted(&handler, serving).await;
    match served {
        Ok(Served::Finished(Finished::Closed)) if handler.has_said_nothing() => {
            learned.refuse(&worker.shared, Refusal::ClosedEarly);
        }
        Ok(Served::Finished(_)) => {}
        Ok(Served::Carry { downstream, early, upstream }) => {
            drop(handler);
            let (downstream, mut session) = (downstream.into(), upstream.meter);
            let upstream = upstream.stream.into();
            let end = copy(&downstream, &upstream, early.into(), &mut session, settings.stream_idle).await;
            session.ended(end);
        }
        Err(failure) => {
            let client = handler.client;
            tracing::debug!(%client, %failure, "tunnel connection failed");
            if matches!(failure, Failure::Flood(_) | Failure::Unfinished)
                && let Some(left_out) = worker.shared.identities.log().admit(None)
            {
                tracing::warn!(%client, %failure, left_out, "a tunnel connection was ended");
            }
            if let Some(refusal) = handler.refusal_of(&failure) {
                learned.refuse(&worker.shared, refusal);
            }
        }
    }
}

/// Serves, unless others need the slot before the client has shown what it speaks.
async fn unless_evicted<M>(
    connection: &Connection,
    mut serving: Pin<Box<impl Future<Output = Result<Served<M>, Failure>>>>,
) -> Result<Served<M>, Failure> {
    let mut established = false;
    let served = poll_fn(|cx| {
        if let Poll::Ready(served) = serving.as_mut().poll(cx) {
            return Poll::Ready(Some(served));
        }
        if established {
            return Poll::Pending;
        }
        match &connection.pending().handshake {
            Some((slot, _)) => slot.poll_evicted(cx).map(|()| None),
            None => {
                established = true;
                Poll::Pending
            }
        }
    });
    if let Some(served) = served.await {
        return served;
    }
    // The event that says there is something to read may not have reached tokio yet.
    yield_now().await;
    match poll_fn(|cx| Poll::Ready(serving.as_mut().poll(cx))).await {
        Poll::Ready(served) => served,
        Poll::Pending if connection.pending().handshake.is_some() => Err(Failure::Evicted),
        Poll::Pending => serving.await,
    }
}

/// One connection to the tunnel port: what its requests have in common.
struct Connection {
    worker: Arc<Worker>,
    /// Where a trusted hop sent a PROXY header, the address in it.
    client: SocketAddr,
    client_is_real: bool,
    local: SocketAddr,
    pending: Mutex<Pending>,
    /// What was accepted of it, by cluster.
    credentials: Credentials,
}

/// The state of a connection beside that of its streams.
#[derive(Default)]
struct Pending {
    /// Slot and promise, until the protocol is known.
    handshake: Option<(Slot, Promise)>,
    /// Slot among unauthenticated connections, until it authenticates.
    unauthenticated: Option<Slot>,
    /// What it counts for in its cluster: that of the certificate, else of its first request.
    tunnel: Option<OpenGuard>,
    /// The cluster of its certificate takes as much as is left for all others.
    is_refused: bool,
    /// It has made a request.
    has_asked: bool,
    /// The gateway ends it: its slot was needed, or it sent too much.
    is_dismissed: bool,
}

impl Handler for Connection {
    type Meter = Session;

    async fn connect(
        &self,
        request: &Request,
    ) -> Result<portico_tunnel::Upstream<Session>, portico_tunnel::Refusal> {
        let mut attempt = Attempt::new(self);
        match attempt.connect(request).await {
            Ok(upstream) => {
                attempt.open = false;
                Ok(upstream)
            }
            Err(denied) => Err(attempt.deny(denied)),
        }
    }

    async fn verify(&self, request: &Request) -> Result<(), portico_tunnel::Refusal> {
        let mut attempt = Attempt::new(self);
        match attempt.learn(request).await {
            Ok(_) => {
                attempt.open = false;
                Ok(())
            }
            Err(denied) => Err(attempt.deny(denied)),
        }
    }

    fn established(&self, tls: bool, certificate: Option<&Presented>) {
        let shared = &self.worker.shared;
        let asks = tls && shared.identities.asks();
        let tenant = certificate.filter(|_| asks).and_then(|certificate| certificate.identity().ok());
        let mut now = Pending::default();
        match tenant.and_then(|tenant| shared.route_store.cluster(&tenant)) {
            Some(cluster) => match cluster.admit_tunnel() {
                Ok(tunnel) => now.tunnel = Some(tunnel),
                Err(_) => now.is_refused = true,
            },
            None if asks => now.unauthenticated = Some(shared.identities.enter(self.client.ip())),
            None => {}
        }
        *self.pending() = now;
    }

    fn is_authenticated(&self) -> bool {
        self.pending().unauthenticated.is_none()
    }

    fn memory(&self) -> Option<MemoryBudget> {
        self.pending().tunnel.as_ref().map(|tunnel| tunnel.cluster().memory().clone())
    }

    async fn evicted(&self) -> portico_tunnel::Refusal {
        let is_evicted = poll_fn(|cx| match &*self.pending() {
            Pending { unauthenticated: Some(slot), .. } => slot.poll_evicted(cx).map(|()| true),
            Pending { is_refused, .. } => Poll::Ready(*is_refused),
        });
        if !is_evicted.await {
            // It has authenticated, and its cluster has room for it; or it need not.
            return pending().await;
        }
        let mut pending = self.pending();
        pending.is_dismissed = true;
        let (refusal, reason) = if pending.is_refused {
            (Refusal::FairShare, Refusal::FairShare.message())
        } else {
            (Refusal::MaxUnauthenticated, EVICTED)
        };
        portico_tunnel::Refusal::new(status(refusal), reason)
    }

    fn dismissed(&self) {
        self.pending().is_dismissed = true;
    }

    fn refused(&self, request: &BadRequest) -> StatusCode {
        let refusal = match request {
            BadRequest::Method => Refusal::Method,
            BadRequest::Malformed(_) => Refusal::Malformed,
            BadRequest::TooSlow => Refusal::TooSlow,
            BadRequest::TooManyWait => Refusal::MaxUnauthenticated,
            BadRequest::TooManyCancelled => Refusal::Flood,
        };
        Attempt::new(self).refuse(refusal);
        status(refusal)
    }

    fn plaintext_status(&self) -> StatusCode {
        status(Refusal::NotAuthorized)
    }
}

impl Connection {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the handshake is done, an identity is required and missing, and no request came. A connection
    /// with an accepted certificate is exempt: it may be an idle agent's.
    fn has_said_nothing(&self) -> bool {
        let Pending { handshake, unauthenticated, has_asked, .. } = &*self.pending();
        handshake.is_none() && unauthenticated.is_some() && !has_asked
    }

    /// The refusal to count for a connection that failed before it was served. `None` for one that got
    /// further.
    fn refusal_of(&self, failure: &Failure) -> Option<Refusal> {
        let says_nothing = self.has_said_nothing();
        let Pending { handshake, is_refused, .. } = &*self.pending();
        let established = handshake.is_none();
        Some(match failure {
            Failure::Evicted if *is_refused => Refusal::FairShare,
            Failure::Evicted if established => Refusal::MaxUnauthenticated,
            Failure::Unauthenticated => Refusal::MaxUnauthenticated,
            Failure::Flood(_) | Failure::Unfinished => Refusal::Flood,
            _ if established && !says_nothing => return None,
            Failure::Evicted => Refusal::MaxHandshakes,
            failure if failure.is_gone() => Refusal::ClosedEarly,
            Failure::TooSlow => Refusal::TooSlow,
            Failure::PlaintextNotServed | Failure::Untrusted(_) => Refusal::NotAuthorized,
            _ => Refusal::Malformed,
        })
    }
}

/// The status of the response to a request that is refused.
fn status(refusal: Refusal) -> StatusCode {
    let status = refusal.status().and_then(|status| StatusCode::from_u16(status).ok());
    status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// One request on its way to an upstream. If it is dropped while it is `open`, the client has given up first.
struct Attempt<'a> {
    connection: &'a Connection,
    learned: Learned,
    open: bool,
}

impl<'a> Attempt<'a> {
    fn new(connection: &'a Connection) -> Self {
        let shared = &connection.worker.shared;
        let mut learned = Learned::new(shared, Listener::Tunnel, connection.client);
        learned.client_is_real = connection.client_is_real;
        connection.pending().has_asked = true;
        Self { connection, learned, open: true }
    }

    /// Looks up where the request leads, and authenticates the client for it.
    async fn learn(&mut self, request: &Request) -> Result<Option<Arc<Credential>>, Denied> {
        let shared = &self.connection.worker.shared;
        self.learned.cost = match request.protocol {
            Protocol::Http1 => Cost::HTTP1,
            Protocol::Http2 => Cost::STREAM,
        };
        if let Err(refusal) = self.learned.look_up_authority(shared, &request.authority) {
            return Err(match refusal {
                // By now it is a request, and the rest of it was well formed.
                Refusal::Malformed => Denied::new(refusal, AUTHORITY_FORM),
                refusal => refusal.into(),
            });
        }
        let Learned { upstream, name, client, client_is_real, .. } = &self.learned;
        let wanted = Wanted {
            cluster: upstream.as_ref().map(|upstream| &upstream.cluster.name),
            client_admitted: upstream
                .as_ref()
                .is_some_and(|upstream| upstream.backend().policy.admits(client.ip(), *client_is_real)),
            reviewer: &|| reviewer_of(shared, upstream.as_ref()?, name.as_deref()?),
        };
        let credential =
            shared.identities.authenticate(&self.connection.credentials, request, &wanted).await?;
        let Some(upstream) = upstream else { return Err(Refusal::Unknown.into()) };
        let mut pending = self.connection.pending();
        match request.protocol {
            // The stream counts for all of it.
            Protocol::Http1 => pending.tunnel = None,
            Protocol::Http2 if pending.tunnel.is_none() => {
                pending.tunnel = Some(upstream.cluster.admit_tunnel()?);
            }
            Protocol::Http2 => {}
        }
        if credential.is_some() {
            pending.unauthenticated = None;
        }
        Ok(credential)
    }

    async fn connect(&mut self, request: &Request) -> Result<portico_tunnel::Upstream<Session>, Denied> {
        let credential = self.learn(request).await?;
        // Boxed: a request that waits for a token review does not keep the memory that connecting needs.
        Box::pin(self.establish(credential, request.client_first)).await
    }

    async fn establish(
        &self,
        credential: Option<Arc<Credential>>,
        client_first: bool,
    ) -> Result<portico_tunnel::Upstream<Session>, Denied> {
        let Connection { worker, local, .. } = self.connection;
        let mut header = Vec::new();
        let (mut session, mut stream) =
            open(worker, &self.learned, || *local, client_first, &mut header, credential.clone()).await?;
        // Empty unless a new socket does not take a hundred bytes.
        stream.write_all(&header).await.map_err(|_| Refusal::ConnectFailed)?;
        session.set_alive(worker.shared.alive());
        // The credential may have been revoked during the connect, before this stream was listed.
        if credential.is_some_and(|credential| credential.is_revoked()) {
            session.record().cancel(End::Revoked);
        }
        Ok(portico_tunnel::Upstream { stream, meter: session })
    }

    /// Counts and logs why the request is not served. Returns the response.
    fn deny(&mut self, denied: Denied) -> portico_tunnel::Refusal {
        let Denied { refusal, shown, reason, detail } = denied;
        self.refuse(refusal);
        let shared = &self.connection.worker.shared;
        let Learned { client, name, upstream, .. } = &self.learned;
        let of_identity = matches!(
            shown,
            Refusal::Unauthenticated
                | Refusal::NotAuthorized
                | Refusal::ReviewFailed
                | Refusal::MaxReviewsWaiting
        );
        let tenant = upstream.as_ref().map(|upstream| &upstream.cluster.name);
        if of_identity && let Some(left_out) = shared.identities.log().admit(tenant) {
            let cluster = tenant.map(|tenant| tenant.as_str());
            let (name, why) = (name.as_deref(), &*reason);
            let detail = (!detail.is_empty()).then_some(detail);
            tracing::warn!(
                %client, name, cluster, reason = refusal.reason(), why, detail, left_out,
                "a tunnel client was turned away"
            );
        }
        portico_tunnel::Refusal { status: status(shown), reason }
    }

    fn refuse(&mut self, refusal: Refusal) {
        self.open = false;
        self.learned.refuse(&self.connection.worker.shared, refusal);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // A connection that the gateway ends is counted once, and not for each attempt.
        if self.open && !self.connection.pending().is_dismissed {
            self.refuse(Refusal::ClosedEarly);
        }
    }
}
