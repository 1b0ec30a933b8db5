//! One HTTP/2 connection to a gateway.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::header::AUTHORIZATION;
use http::{HeaderValue, Method, Request, StatusCode, Uri, uri};
use portico_api::text::one_line;
use portico_net::{Socket, random};
use thiserror::Error;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use super::endpoints::Endpoint;
use super::event::Signals;
use super::first_bytes::FirstBytes;
use super::settings::ClientSettings;
use crate::activity::Activity;
use crate::cause::cause;
use crate::handler;
use crate::settings::FIRST_REQUESTS;

/// Streams, beside the question about our identity, that a gateway takes before it has accepted it.
const FIRST_STREAMS: u32 = FIRST_REQUESTS - 1;

/// The most characters that are kept of the reason for a refusal.
const REASON: usize = 1024;

/// How long the reason may take.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// The state of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunnelState {
    /// Gets new streams.
    Live,
    /// The gateway did not answer a PING in time: new streams go elsewhere, those that are here wait for it.
    Unresponsive,
    /// The gateway sent GOAWAY, or the tunnel was replaced: new streams go elsewhere, those that are here
    /// finish.
    Draining,
    /// The connection has ended.
    Closed,
}

/// Whether the gateway accepts our identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityState {
    /// The gateway has not reported it yet.
    Unknown,
    /// It does.
    Accepted,
    /// It does not.
    Refused {
        /// 401: no or no valid identity; 403: another cluster's.
        status: StatusCode,
        /// The reason that the gateway gave.
        reason: Box<str>,
    },
}

/// Why a request on a tunnel failed.
#[derive(Debug, Error)]
pub(super) enum RequestError {
    /// The tunnel ended, or is about to. Another one may do.
    #[error("{}", cause(.0))]
    Broken(#[source] h2::Error),
    /// The tunnel became unresponsive, or takes no requests any more.
    #[error("the gateway did not answer")]
    Silent,
    /// The gateway refuses.
    #[error("{status}: {reason}")]
    Refused { status: StatusCode, reason: Box<str> },
    /// It is no valid HTTP request: a token with line breaks, say.
    #[error("no request can be made of this authority or token: {0}")]
    Unsendable(#[from] http::Error),
}

impl RequestError {
    /// Whether the gateway reset this stream, and not the tunnel.
    pub(super) fn is_reset(&self) -> bool {
        matches!(self, Self::Broken(error) if error.is_reset())
    }
}

/// How long a gateway that left a request unanswered comes after the others.
const UNANSWERED: Duration = Duration::from_secs(30);

/// Tells the tunnels of a client apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TunnelId(pub(super) u64);

/// Where a tunnel comes from.
#[derive(Debug, Clone, Copy)]
pub(super) struct TunnelOrigin {
    pub(super) id: TunnelId,
    pub(super) endpoint: Endpoint,
    /// Renewals of the certificate before it was opened.
    pub(super) renewals: u64,
}

/// A connection that is up, as the supervisor and its streams see it. All of them are on one thread.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) origin: TunnelOrigin,
    pub(super) since: Instant,
    /// If two tunnels in a group have room, the one with the lower rank gets the stream. Drawn at random:
    /// with age as rank, a gateway that came back would get no stream from any client.
    pub(super) rank: u64,
    pub(super) activity: Arc<Activity>,
    state: watch::Sender<TunnelState>,
    /// Whether no answer is to be expected. A draining tunnel may be unresponsive, too.
    silent: watch::Sender<bool>,
    /// `None` once no more requests are sent: h2 closes the connection when this and the last stream are
    /// dropped.
    sender: Mutex<Option<SendRequest<Bytes>>>,
    streams: AtomicU32,
    max_streams: AtomicU32,
    /// Whether the gateway has answered a request otherwise than by refusing our identity. Until then it
    /// takes few at a time.
    accepted: AtomicBool,
    identity: Mutex<IdentityState>,
    /// Whether the last answer to `OPTIONS *` was 401.
    unauthorized: AtomicBool,
    /// When a request was last given up for want of an answer; `None` once another is answered.
    unanswered: Mutex<Option<Instant>>,
    /// The gateway's report about our identity when it refused a stream, until it opens one.
    refusal: Mutex<Option<IdentityState>>,
    /// There is a new token to show.
    pub(super) token_renewed: Notify,
    /// The answer to a request contradicts what the gateway reported of our identity: that is stale.
    pub(super) identity_stale: Notify,
    signals: Arc<Signals>,
}

/// One of the streams that the gateway allows is kept free for `OPTIONS *`: a full tunnel must show a new
/// token, too.
fn max_streams(settings: &ClientSettings, sender: &SendRequest<Bytes>) -> u32 {
    let allowed = u32::try_from(sender.current_max_send_streams()).unwrap_or(u32::MAX);
    allowed.saturating_sub(1).clamp(1, settings.max_streams.max(1))
}

impl Tunnel {
    pub(super) fn new(
        origin: TunnelOrigin,
        sender: SendRequest<Bytes>,
        settings: &ClientSettings,
        signals: &Arc<Signals>,
        activity: Arc<Activity>,
    ) -> Self {
        Self {
            origin,
            since: Instant::now(),
            rank: random().to_bits(),
            state: watch::Sender::new(TunnelState::Live),
            silent: watch::Sender::new(false),
            max_streams: AtomicU32::new(max_streams(settings, &sender)),
            sender: Mutex::new(Some(sender)),
            streams: AtomicU32::new(0),
            accepted: AtomicBool::new(false),
            identity: Mutex::new(IdentityState::Unknown),
            unauthorized: AtomicBool::new(false),
            unanswered: Mutex::new(None),
            refusal: Mutex::new(None),
            token_renewed: Notify::new(),
            identity_stale: Notify::new(),
            signals: Arc::clone(signals),
            activity,
        }
    }

    pub(super) fn state(&self) -> TunnelState {
        *self.state.borrow()
    }

    pub(super) fn is_live(&self) -> bool {
        self.state() == TunnelState::Live
    }

    /// Whether the gateway has lately left a request unanswered, and has answered none since. It may answer
    /// PING all the same.
    pub(super) fn is_unanswering(&self) -> bool {
        self.unanswered().is_some_and(|since| since.elapsed() < UNANSWERED)
    }

    fn unanswered(&self) -> MutexGuard<'_, Option<Instant>> {
        // A panic elsewhere cannot leave it half changed.
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once the connection is over.
    pub(super) async fn closed(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == TunnelState::Closed).await;
    }

    /// Streams that are open or being opened.
    pub(super) fn streams(&self) -> u32 {
        self.streams.load(Relaxed)
    }

    /// The most streams: what the gateway and our settings allow, once our identity is accepted.
    pub(super) fn max_streams(&self) -> u32 {
        self.max_streams.load(Relaxed)
    }

    /// Whether it takes no stream more for now.
    pub(super) fn is_full(&self) -> bool {
        let most = if self.accepted.load(Relaxed) { u32::MAX } else { FIRST_STREAMS };
        self.streams() >= self.max_streams().min(most)
    }

    /// The gateway has answered. Streams that waited for it may open.
    fn note_answer(&self, status: StatusCode) {
        let refuses = is_refusal(status) || status == StatusCode::TOO_MANY_REQUESTS;
        if !refuses && !self.accepted.swap(true, Relaxed) {
            self.signals.available.notify_waiters();
        }
    }

    pub(super) fn identity(&self) -> IdentityState {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the gateway refuses our identity.
    pub(super) fn is_refused(&self) -> bool {
        let identity = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(*identity, IdentityState::Refused { .. })
    }

    /// Whether it answered 401 when it was last asked about it: on another connection it may not.
    pub(super) fn is_unauthorized(&self) -> bool {
        self.unauthorized.load(Relaxed)
    }

    fn set_identity(&self, identity: IdentityState) {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
    }

    fn refusal(&self) -> MutexGuard<'_, Option<IdentityState>> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drains the tunnel: no new streams, and the connection closes after the last one. New tokens are shown
    /// until then.
    pub(super) fn retire(&self) {
        self.drains();
        self.close_if_done();
    }

    /// The gateway sent GOAWAY: it takes no request any more.
    fn went_away(&self) {
        self.drains();
        self.sender().take();
    }

    /// Whether a request can be sent, if only to show a token.
    pub(super) fn takes_requests(&self) -> bool {
        self.sender().is_some()
    }

    /// Closes the connection of a draining tunnel without streams.
    fn close_if_done(&self) {
        if self.state() == TunnelState::Draining && self.streams() == 0 {
            self.sender().take();
        }
    }

    fn drains(&self) {
        self.change(&[TunnelState::Live, TunnelState::Unresponsive], TunnelState::Draining);
    }

    /// The gateway did not answer in time.
    pub(super) fn unresponsive(&self) {
        self.silent.send_replace(true);
        self.change(&[TunnelState::Live], TunnelState::Unresponsive);
    }

    /// The gateway answers again.
    pub(super) fn responsive(&self) {
        self.silent.send_replace(false);
        self.change(&[TunnelState::Unresponsive], TunnelState::Live);
    }

    /// The connection has ended.
    pub(super) fn close(&self) {
        self.silent.send_replace(true);
        self.state.send_replace(TunnelState::Closed);
        self.sender().take();
    }

    /// Drains after a GOAWAY, which h2 reports only to senders.
    pub(super) fn poll_goaway(&self, cx: &mut Context<'_>) {
        let mut sender = self.sender();
        let is_going =
            sender.as_mut().is_some_and(|sender| matches!(sender.poll_ready(cx), Poll::Ready(Err(_))));
        drop(sender);
        if is_going {
            self.went_away();
        }
    }

    /// Changes the state, if it is one of `from`, and wakes the supervisor.
    fn change(&self, from: &[TunnelState], to: TunnelState) {
        let changed = self.state.send_if_modified(|state| {
            let changes = from.contains(state);
            if changes {
                *state = to;
            }
            changes
        });
        if changed {
            self.signals.changed();
        }
    }

    fn sender(&self) -> MutexGuard<'_, Option<SendRequest<Bytes>>> {
        // A panic elsewhere cannot leave it half changed.
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream to `authority` and sends the client's first bytes, if there are any by then. Fails at
    /// `deadline`, and once the tunnel is unresponsive.
    pub(super) async fn connect<S: Socket>(
        self: &Arc<Self>,
        authority: uri::Authority,
        token: Option<&HeaderValue>,
        first: &mut FirstBytes<'_, S>,
        deadline: Instant,
        settings: &ClientSettings,
    ) -> Result<(SendStream<Bytes>, RecvStream, StreamGuard), RequestError> {
        let uri = Uri::from(authority);
        let is_own = uri.authority().is_some_and(|authority| *authority == *settings.authority);
        let (answer, mut to_gateway, guard) = self.send(Method::CONNECT, uri, token, settings)?;
        // Fails only for a stream that was reset, which the answer reports.
        let mut send = |bytes| drop(to_gateway.send_data(self.activity.counted(bytes), false));
        let mut early = first.early();
        let mut is_sent = early.is_some();
        let mut answer = pin!(self.answered(answer, deadline));
        let answer = poll_fn(|cx| {
            if let Some(bytes) = early.take() {
                send(bytes);
            } else if let Poll::Ready(bytes) = first.poll_early(cx) {
                is_sent = true;
                send(bytes);
            }
            answer.as_mut().poll(cx)
        })
        .await?;
        let status = answer.status();
        if status != StatusCode::OK {
            let reason = reason(answer).await;
            if is_refusal(status) {
                if is_own {
                    *self.refusal() = Some(IdentityState::Refused { status, reason: reason.clone() });
                }
                self.identity_stale.notify_one();
            }
            return Err(RequestError::Refused { status, reason });
        }
        if is_own && self.refusal().take().is_some() {
            self.identity_stale.notify_one();
        }
        if !is_sent && !first.is_empty() {
            send(first.bytes());
        }
        Ok((to_gateway, answer.into_body(), guard))
    }

    /// Asks the gateway about our identity with `OPTIONS *`, and keeps its answer.
    pub(super) async fn refresh_identity(
        self: &Arc<Self>,
        authority: uri::Authority,
        token: Option<&HeaderValue>,
        settings: &ClientSettings,
    ) -> Result<(), RequestError> {
        let mut parts = uri::Parts::default();
        parts.scheme = Some(uri::Scheme::HTTPS);
        parts.authority = Some(authority);
        parts.path_and_query = Some(uri::PathAndQuery::from_static("*"));
        let uri = Uri::from_parts(parts).map_err(http::Error::from)?;
        let deadline = Instant::now() + settings.open_timeout;
        let (answer, _, _guard) = self.send(Method::OPTIONS, uri, token, settings)?;
        let answer = self.answered(answer, deadline).await?;
        let unauthorized = answer.status() == StatusCode::UNAUTHORIZED;
        if self.unauthorized.swap(unauthorized, Relaxed) != unauthorized {
            self.signals.changed();
        }
        let identity = match answer.status() {
            status if is_refusal(status) => IdentityState::Refused { status, reason: reason(answer).await },
            StatusCode::NO_CONTENT => {
                // A refusal was about the name that was asked for.
                *self.refusal() = None;
                IdentityState::Accepted
            }
            // It has no time to say, or cannot ask its API server.
            status @ (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                return Err(RequestError::Refused { status, reason: reason(answer).await });
            }
            // A gateway of another make, or one that does not know the cluster yet: its refusals count.
            _ => self.refusal().clone().unwrap_or(IdentityState::Unknown),
        };
        self.set_identity(identity);
        Ok(())
    }

    /// Sends a request, which counts as a stream while the guard is held. Only CONNECT has a body.
    fn send(
        self: &Arc<Self>,
        method: Method,
        uri: Uri,
        token: Option<&HeaderValue>,
        settings: &ClientSettings,
    ) -> Result<(ResponseFuture, SendStream<Bytes>, StreamGuard), RequestError> {
        let is_whole = method != Method::CONNECT;
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.body(())?;
        let guard = StreamGuard::take(self, settings);
        let mut sender = self.sender().clone().ok_or(RequestError::Silent)?;
        let (answer, body) = sender.send_request(request, is_whole).map_err(RequestError::Broken)?;
        Ok((answer, body, guard))
    }

    /// Waits for an answer. Fails at `deadline`, and once the tunnel is unresponsive.
    async fn answered(
        &self,
        answer: ResponseFuture,
        deadline: Instant,
    ) -> Result<http::Response<RecvStream>, RequestError> {
        let mut silent = self.silent.subscribe();
        tokio::select! {
            biased;
            answer = answer => {
                let answer = answer.map_err(RequestError::Broken)?;
                *self.unanswered() = None;
                self.note_answer(answer.status());
                Ok(answer)
            }
            _ = silent.wait_for(|silent| *silent) => Err(RequestError::Silent),
            () = tokio::time::sleep_until(deadline) => {
                *self.unanswered() = Some(Instant::now());
                Err(RequestError::Silent)
            }
        }
    }
}

/// 401: no valid identity; 403: the identity of another cluster.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// The reason of a refusal: a header, or of other gateways the first line of the body, fit for a log.
async fn reason(answer: http::Response<RecvStream>) -> Box<str> {
    let text = match answer.headers().get(handler::REASON) {
        Some(reason) => reason.as_bytes().to_vec(),
        None => body(answer.into_body()).await,
    };
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().next().unwrap_or_default().trim();
    let shown = one_line(line, REASON);
    if shown.trim().is_empty() { "the gateway gave no reason".into() } else { shown.into() }
}

/// The part of a body that comes in time, up to a bound.
async fn body(mut body: RecvStream) -> Vec<u8> {
    let mut text = Vec::new();
    let read = async {
        while let Some(Ok(part)) = body.data().await {
            // Fails only for a stream that has ended, which the next read reports.
            let _ = body.flow_control().release_capacity(part.len());
            let room = REASON.saturating_sub(text.len());
            text.extend_from_slice(&part[..part.len().min(room)]);
            if room == 0 {
                break;
            }
        }
    };
    // What came until then will do.
    let _ = timeout(REASON_TIMEOUT, read).await;
    text
}

/// A stream counted on its tunnel, for as long as this is held.
#[derive(Debug)]
pub(super) struct StreamGuard(Arc<Tunnel>);

impl StreamGuard {
    fn take(tunnel: &Arc<Tunnel>, settings: &ClientSettings) -> Self {
        if let Some(sender) = tunnel.sender().as_ref() {
            // SETTINGS may have changed it.
            tunnel.max_streams.store(max_streams(settings, sender), Relaxed);
        }
        tunnel.streams.fetch_add(1, Relaxed);
        if tunnel.is_full() {
            tunnel.signals.changed();
        }
        Self(Arc::clone(tunnel))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let was_full = self.0.is_full();
        self.0.streams.fetch_sub(1, Relaxed);
        if was_full {
            self.0.signals.available.notify_waiters();
        }
        self.0.close_if_done();
    }
}

impl StreamGuard {
    pub(super) fn endpoint(&self) -> Endpoint {
        self.0.origin.endpoint
    }
}
