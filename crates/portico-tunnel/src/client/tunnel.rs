//! One HTTP/2 connection to a gateway.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::client::SendRequest;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Method, Request, StatusCode, Uri, uri};
use thiserror::Error;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use super::candidates::Place;
use super::settings::ClientSettings;
use super::signals::Signals;
use super::stream::Stream;
use crate::activity::Activity;

/// The most that is read of why a request was refused.
const REASON: usize = 1024;

/// How long that may take to come.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// What a tunnel is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunnelState {
    /// New streams may go here.
    Live,
    /// The gateway has not answered in time: new streams go elsewhere, those that are here wait for it.
    Suspect,
    /// The gateway said GOAWAY, or a better tunnel has taken its place: new streams go elsewhere, those that are here finish.
    Draining,
    /// Gone.
    Closed,
}

/// What the gateway thinks of our identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityState {
    /// It has not said.
    Unknown,
    /// It opens our authorities to us.
    Accepted,
    /// It does not: status and reason as the gateway gave them.
    Refused {
        /// 401: no or no valid identity; 403: another cluster's.
        status: StatusCode,
        /// One sentence of the gateway.
        reason: Box<str>,
    },
}

/// Why a request on this tunnel gave no stream.
#[derive(Debug, Error)]
pub(crate) enum RequestError {
    /// The tunnel ended, or is about to: another one may do.
    #[error("{0}")]
    Broken(#[source] h2::Error),
    /// The tunnel became suspect, or drains.
    #[error("the gateway did not answer")]
    Silent,
    /// The gateway says no.
    #[error("{status}: {reason}")]
    Refused { status: StatusCode, reason: Box<str> },
    /// No HTTP request can be made of it: a token with line breaks, say.
    #[error("no request can be made of this authority or token: {0}")]
    Unsendable(#[from] http::Error),
}

impl RequestError {
    /// Whether the gateway broke off this stream, and not the tunnel.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(self, Self::Broken(error) if error.is_reset())
    }
}

/// A connection that is up, as the pool and its streams see it. All of them are on one thread.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) place: Place,
    pub(crate) since: Instant,
    /// Renewals of the certificate before it was opened.
    pub(crate) renewal: u64,
    pub(crate) activity: Arc<Activity>,
    state: watch::Sender<TunnelState>,
    /// Whether nothing more is to be waited for. Also a tunnel that drains may fall silent.
    silent: watch::Sender<bool>,
    /// `None` once nothing more is to be asked: h2 closes the connection when this and the last stream are gone.
    sender: Mutex<Option<SendRequest<Bytes>>>,
    streams: AtomicU32,
    most_streams: AtomicU32,
    identity: Mutex<IdentityState>,
    /// What the gateway said of us when it refused a stream, until it says otherwise.
    complaint: Mutex<Option<IdentityState>>,
    /// Our identity is to be shown anew: there is another.
    pub(crate) renewed: Notify,
    /// Or: what the gateway thinks of it has changed, to judge from how it answered a request.
    pub(crate) doubted: Notify,
    signals: Arc<Signals>,
}

/// Of the streams that the gateway allows one is kept for the question about our identity: a full tunnel, too, has to show a new token.
fn most_streams(settings: &ClientSettings, sender: &SendRequest<Bytes>) -> u32 {
    let allowed = u32::try_from(sender.current_max_send_streams()).unwrap_or(u32::MAX);
    allowed.saturating_sub(1).clamp(1, settings.max_streams.max(1))
}

impl Tunnel {
    pub(crate) fn new(
        place: Place,
        renewal: u64,
        sender: SendRequest<Bytes>,
        settings: &ClientSettings,
        signals: &Arc<Signals>,
        activity: Arc<Activity>,
    ) -> Self {
        Self {
            place,
            since: Instant::now(),
            renewal,
            state: watch::Sender::new(TunnelState::Live),
            silent: watch::Sender::new(false),
            most_streams: AtomicU32::new(most_streams(settings, &sender)),
            sender: Mutex::new(Some(sender)),
            streams: AtomicU32::new(0),
            identity: Mutex::new(IdentityState::Unknown),
            complaint: Mutex::new(None),
            renewed: Notify::new(),
            doubted: Notify::new(),
            signals: Arc::clone(signals),
            activity,
        }
    }

    pub(crate) fn state(&self) -> TunnelState {
        *self.state.borrow()
    }

    pub(crate) fn is_live(&self) -> bool {
        self.state() == TunnelState::Live
    }

    /// Every change of state from now on.
    pub(crate) fn states(&self) -> watch::Receiver<TunnelState> {
        self.state.subscribe()
    }

    /// Returns once the connection is over.
    pub(crate) async fn closed(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == TunnelState::Closed).await;
    }

    /// Streams that are open or being opened.
    pub(crate) fn streams(&self) -> u32 {
        self.streams.load(Relaxed)
    }

    /// As many streams as the gateway and we allow.
    pub(crate) fn most_streams(&self) -> u32 {
        self.most_streams.load(Relaxed)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.streams() >= self.most_streams()
    }

    pub(crate) fn identity(&self) -> IdentityState {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the gateway does not accept our identity, as far as it has said.
    pub(crate) fn is_refused(&self) -> bool {
        let identity = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(*identity, IdentityState::Refused { .. })
    }

    fn set_identity(&self, identity: IdentityState) {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
    }

    fn complaint(&self) -> MutexGuard<'_, Option<IdentityState>> {
        self.complaint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No new streams; the connection closes when those it has are over. Until then a new token can be shown on it, for these to live on.
    pub(crate) fn retire(&self) {
        self.drains();
        self.close_if_done();
    }

    /// The gateway takes no request any more, so not even a token can be shown.
    fn went_away(&self) {
        self.drains();
        self.sender().take();
    }

    /// Whether a request can be sent, be it only to show who we are.
    pub(crate) fn takes_requests(&self) -> bool {
        self.sender().is_some()
    }

    /// Lets go of a connection that drains and has nothing more to carry.
    fn close_if_done(&self) {
        if self.state() == TunnelState::Draining && self.streams() == 0 {
            self.sender().take();
        }
    }

    fn drains(&self) {
        self.state.send_if_modified(|state| {
            let retires = matches!(state, TunnelState::Live | TunnelState::Suspect);
            if retires {
                *state = TunnelState::Draining;
            }
            retires
        });
    }

    /// The gateway has not answered in time.
    pub(crate) fn fell_silent(&self) {
        self.silent.send_replace(true);
        self.change(TunnelState::Live, TunnelState::Suspect);
    }

    /// It speaks again.
    pub(crate) fn heard(&self) {
        self.silent.send_replace(false);
        self.change(TunnelState::Suspect, TunnelState::Live);
    }

    /// The connection is over.
    pub(crate) fn close(&self) {
        self.silent.send_replace(true);
        self.state.send_replace(TunnelState::Closed);
        self.sender().take();
    }

    /// Drains after a GOAWAY, of which h2 tells only those who want to send.
    pub(crate) fn poll_goaway(&self, cx: &mut Context<'_>) {
        let mut sender = self.sender();
        let says = sender.as_mut().is_some_and(|sender| matches!(sender.poll_ready(cx), Poll::Ready(Err(_))));
        drop(sender);
        if says {
            self.went_away();
        }
    }

    fn change(&self, from: TunnelState, to: TunnelState) {
        self.state.send_if_modified(|state| {
            let changes = *state == from;
            if changes {
                *state = to;
            }
            changes
        });
    }

    fn sender(&self) -> MutexGuard<'_, Option<SendRequest<Bytes>>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a stream to `authority`. The gateway has until `deadline`, or until it is suspect.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        authority: uri::Authority,
        token: Option<&HeaderValue>,
        deadline: Instant,
        settings: &ClientSettings,
    ) -> Result<Stream, RequestError> {
        let uri = Uri::from(authority);
        let is_judged = uri.authority().is_some_and(|authority| *authority == *settings.authority);
        let request = request(Method::CONNECT, uri, token)?;
        let place = StreamGuard::take(self, settings);
        let mut sender = self.sender().clone().ok_or(RequestError::Silent)?;
        let (answer, to_gateway) = sender.send_request(request, false).map_err(RequestError::Broken)?;
        drop(sender);
        let answer = self.answer(answer, deadline).await?;
        let status = answer.status();
        let from_gateway = answer.into_body();
        if status != StatusCode::OK {
            let reason = reason(from_gateway).await;
            if is_refusal(status) {
                if is_judged {
                    *self.complaint() = Some(IdentityState::Refused { status, reason: reason.clone() });
                }
                self.doubted.notify_one();
            }
            return Err(RequestError::Refused { status, reason });
        }
        if is_judged && self.complaint().take().is_some() {
            self.doubted.notify_one();
        }
        Ok(Stream::new(to_gateway, from_gateway, Arc::clone(&self.activity), place, settings.stream_idle))
    }

    /// Has the gateway verify our identity, and remembers what it says.
    pub(crate) async fn refresh_identity(
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
        let request = request(Method::OPTIONS, uri, token)?;
        let _place = StreamGuard::take(self, settings);
        let mut sender = self.sender().clone().ok_or(RequestError::Silent)?;
        let (answer, _) = sender.send_request(request, true).map_err(RequestError::Broken)?;
        drop(sender);
        let answer = self.answer(answer, Instant::now() + settings.open_timeout).await?;
        let identity = match answer.status() {
            status if is_refusal(status) => {
                IdentityState::Refused { status, reason: reason(answer.into_body()).await }
            }
            StatusCode::NO_CONTENT => {
                // What it complained of is another matter: a name that we may not have.
                *self.complaint() = None;
                IdentityState::Accepted
            }
            // A gateway of another make, or one that does not know the cluster yet: what it does counts.
            _ => self.complaint().clone().unwrap_or(IdentityState::Unknown),
        };
        self.set_identity(identity);
        Ok(())
    }

    async fn answer(
        &self,
        answer: h2::client::ResponseFuture,
        deadline: Instant,
    ) -> Result<http::Response<RecvStream>, RequestError> {
        let mut silent = self.silent.subscribe();
        tokio::select! {
            biased;
            answer = answer => answer.map_err(RequestError::Broken),
            _ = silent.wait_for(|silent| *silent) => Err(RequestError::Silent),
            () = tokio::time::sleep_until(deadline) => Err(RequestError::Silent),
        }
    }
}

/// 401: no or no valid identity; 403: one that may not.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

fn request(method: Method, uri: Uri, token: Option<&HeaderValue>) -> Result<Request<()>, http::Error> {
    let mut request = Request::builder().method(method).uri(uri);
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, token);
    }
    request.body(())
}

/// The sentence that comes with a refusal, as far as it can be shown.
async fn reason(mut body: RecvStream) -> Box<str> {
    let mut text = BytesMut::new();
    let read = async {
        while let Some(Ok(part)) = body.data().await {
            // Fails only for a stream that is gone, which the next read says.
            let _ = body.flow_control().release_capacity(part.len());
            let room = REASON.saturating_sub(text.len());
            text.extend_from_slice(&part[..part.len().min(room)]);
            if room == 0 {
                break;
            }
        }
    };
    // What has come by then will do.
    let _ = timeout(REASON_TIMEOUT, read).await;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().next().unwrap_or_default().trim();
    let shown: String = line.chars().filter(|character| !character.is_control()).collect();
    if shown.is_empty() { "the gateway gave no reason".into() } else { shown.into() }
}

/// A stream counted on its tunnel, for as long as this is held.
#[derive(Debug)]
pub(crate) struct StreamGuard(Arc<Tunnel>);

impl StreamGuard {
    fn take(tunnel: &Arc<Tunnel>, settings: &ClientSettings) -> Self {
        if let Some(sender) = tunnel.sender().as_ref() {
            // The gateway may have said meanwhile how many it allows.
            tunnel.most_streams.store(most_streams(settings, sender), Relaxed);
        }
        tunnel.streams.fetch_add(1, Relaxed);
        if tunnel.is_full() {
            tunnel.signals.left.notify_waiters();
        }
        Self(Arc::clone(tunnel))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let was_full = self.0.is_full();
        self.0.streams.fetch_sub(1, Relaxed);
        if was_full {
            self.0.signals.freed.notify_one();
        }
        self.0.close_if_done();
    }
}

impl StreamGuard {
    pub(crate) fn place(&self) -> Place {
        self.0.place
    }
}
