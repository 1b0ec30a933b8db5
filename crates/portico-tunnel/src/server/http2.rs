//! One HTTP/2 connection: CONNECT requests become streams, streams become [`Bridge`]s (RFC 9113 section 8.5).
//!
//! One task drives the connection, one task each carries a stream, all on the thread that accepted it. The
//! connection's task also sends PING to a silent peer ([`KeepAlive`]), sends GOAWAY when the gateway drains,
//! and then lets the streams finish.
//!
//! [`Settings`] bound what an authenticated client can make the gateway hold. Until it has authenticated, it
//! has [`FIRST_REQUESTS`] under way at a time, and [`UNAUTHENTICATED`] of time. Its window is the 64 KiB that
//! the protocol gives to every connection. [`Inbound`], h2's own caps and [`RapidReset`] bound how fast any
//! client can make the gateway work for nothing. h2's caps are for resets before accept, resets for errors,
//! small frames and header lists.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Builder, Connection, SendResponse};
use h2::{RecvStream, SendStream};
use http::header::{ALLOW, AUTHORIZATION, CONTENT_LENGTH, PROXY_AUTHORIZATION, WWW_AUTHENTICATE};
use http::{Method, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep, timeout_at};

use super::caller::Caller;
use super::failure::{Failure, Finished};
use super::http1::{client_left, goodbye};
use crate::activity::{Activity, Unanswered};
use crate::bridge::Bridge;
use crate::handler::{BadRequest, Handler, Protocol, REASON, Refusal, Request, Side, Upstream};
use crate::inbound::Inbound;
use crate::keepalive::KeepAlive;
use crate::reset;
use crate::settings::{FIRST_REQUESTS, FRAME_SIZE, HEADER_LIST, LATE_FRAMES, SEND_BUFFER, Settings};
use crate::token::Token;
use crate::turn::{Batched, batched};
use crate::waiting::Waiting;

/// The memory of a request beside its authority and its token, while it waits.
const REQUEST: usize = 1024;

/// How long a client may stay unauthenticated. An agent with a wrong credential asks again a dozen times
/// before it has to connect anew.
const UNAUTHENTICATED: Duration = Duration::from_secs(120);

/// How long a frame may take from an authenticated client, at most twice: 120 KiB at 32 kbit/s.
const FRAME: Duration = Duration::from_secs(30);

/// Serves a connection until it ends. `drain` is ready when no new streams are wanted.
pub(crate) async fn serve<S, H>(
    stream: S,
    caller: &Caller,
    settings: &Settings,
    drain: impl Future<Output = ()>,
    deadline: Instant,
    handler: &Arc<H>,
) -> Result<Finished, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Handler,
{
    let activity = Arc::new(Activity::new(&settings.memory).unauthenticated());
    let (stream, mut turn) = batched(stream, Inbound::unauthenticated(), &activity);
    let handshake = builder(settings).handshake(stream);
    let mut connection = timeout_at(deadline, handshake).await.map_err(|_| Failure::TooSlow)??;
    caller.established(&**handler);
    let mut evicted = pin!(handler.evicted());
    let mut keep_alive =
        KeepAlive::new(connection.ping_pong(), settings.ping_interval, settings.ping_timeout);
    let mut unused = Unused::new(settings.connection_idle);
    let mut patience = Patience::new();
    let mut rapid_reset = RapidReset { since: Instant::now() };
    let mut drain = pin!(drain);
    let mut draining = false;
    let mut is_counted = false;
    loop {
        let step = async {
            poll_fn(|cx| {
                if !activity.is_authenticated() && handler.is_authenticated() {
                    turn.authenticate();
                    caller.trust();
                    connection.set_target_window_size(settings.connection_window());
                }
                if !is_counted && let Some(cluster) = handler.memory() {
                    activity.count_in(&cluster);
                    is_counted = true;
                }
                let accepted = turn.poll(cx, |cx| connection.poll_accept(cx));
                match turn.flood() {
                    Some(flood) => Poll::Ready(Err(flood)),
                    None => accepted.map(Ok),
                }
            })
            .await
        };
        tokio::select! {
            biased;
            // Before requests, or a client that sends them without a pause would stay.
            _ = &mut evicted => {
                dismiss(connection, handler).await;
                return Err(Failure::Evicted);
            }
            accepted = step => match accepted {
                Err(flood) => {
                    dismiss(connection, handler).await;
                    return Err(Failure::Flood(flood));
                }
                Ok(None) => return Ok(if draining { Finished::Drained } else { Finished::Closed }),
                Ok(Some(Err(error))) => {
                    // The memory that it held was needed.
                    let is_evicted = activity.is_evicted() && !handler.is_authenticated();
                    let failure = if is_evicted { Failure::Evicted } else { error.into() };
                    if matches!(failure, Failure::Evicted | Failure::Flood(_)) {
                        handler.dismissed();
                    }
                    return Err(failure);
                }
                Ok(Some(Ok((request, respond)))) => {
                    if rapid_reset.is_on(&activity, settings.max_streams) {
                        reject(respond, &BadRequest::TooManyCancelled, &**handler);
                        continue;
                    }
                    unused.had_stream |= request.method() == Method::CONNECT;
                    let tunnel = Tunnel { activity: Arc::clone(&activity), idle: settings.stream_idle };
                    start(request, respond, caller, handler, tunnel);
                }
            },
            impatient = patience.ended(&activity) => {
                dismiss(connection, handler).await;
                return Err(impatient);
            }
            () = &mut drain, if !draining => {
                draining = true;
                connection.graceful_shutdown();
            }
            () = keep_alive.silent(&activity) => return Err(Failure::Silent),
            () = unused.due(), if !draining => {
                if unused.is_over(connection.has_streams()) {
                    draining = true;
                    connection.graceful_shutdown();
                }
            }
        }
    }
}

/// Sends GOAWAY. A client that does not read is not waited for long.
async fn dismiss<S, H>(mut connection: Connection<Batched<S>, Bytes>, handler: &Arc<H>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Handler,
{
    handler.dismissed();
    connection.abrupt_shutdown(reset::DISMISSED);
    goodbye(poll_fn(|cx| connection.poll_closed(cx))).await;
}

fn builder(settings: &Settings) -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(settings.stream_window)
        // One more stream, on which a client with a full tunnel sends a new token.
        .max_concurrent_streams(settings.max_streams.saturating_add(1))
        // Requests cancelled before they were accepted. A client that waited for a gateway that stood still
        // for some seconds cancels all of them. h2's limit of 20 would cost it its streams. `RapidReset`
        // stops attacks.
        .max_pending_accept_reset_streams(settings.max_streams as usize)
        // h2 remembers those that we have reset for a second, and so ignores what was under way for them. Of
        // more than fifty it would count it, and in the end cut the streams of all pods for what one sends.
        .max_concurrent_reset_streams(settings.max_streams as usize)
        .max_local_error_reset_streams(Some(LATE_FRAMES))
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}

/// What a stream needs of its connection.
struct Tunnel {
    activity: Arc<Activity>,
    idle: Option<Duration>,
}

/// Responds to what needs no upstream, and gives everything else a task of its own.
fn start<H: Handler>(
    request: http::Request<RecvStream>,
    respond: SendResponse<Bytes>,
    caller: &Caller,
    handler: &Arc<H>,
    tunnel: Tunnel,
) {
    let (head, from_client) = request.into_parts();
    let token = || {
        let headers =
            [AUTHORIZATION, PROXY_AUTHORIZATION].into_iter().filter_map(|name| head.headers.get(name));
        headers.filter_map(|value| Token::from_header(value.to_str().ok()?)).next()
    };
    // The path of a refresh is `*`, which some libraries leave out.
    let is_refresh = head.method == Method::OPTIONS && matches!(head.uri.path(), "*" | "");
    let bad_request = if head.method != Method::CONNECT && !is_refresh {
        BadRequest::Method
    } else if let Some(authority) = head.uri.authority() {
        let request = caller.request(authority.as_str(), token(), Protocol::Http2);
        match Waits::new(&request, &tunnel.activity) {
            Err(bad_request) => bad_request,
            Ok(waits) => {
                let handler = Arc::clone(handler);
                if is_refresh {
                    tokio::spawn(verify(handler, request, waits, respond, tunnel.activity));
                } else {
                    tokio::spawn(carry(handler, request, waits, respond, from_client, tunnel));
                }
                return;
            }
        }
    } else {
        BadRequest::Malformed("the request names no authority")
    };
    reject(respond, &bad_request, &**handler);
}

/// Refuses a request that the handler is not asked about.
fn reject<H: Handler>(respond: SendResponse<Bytes>, request: &BadRequest, handler: &H) {
    let status = handler.refused(request);
    refuse(respond, &Refusal::new(status, request.reason()));
}

/// A request that has no answer yet. It counts while the client has not authenticated.
struct Waits {
    _counted: Option<Unanswered>,
}

impl Waits {
    fn new(request: &Request, activity: &Arc<Activity>) -> Result<Self, BadRequest> {
        if activity.is_authenticated() {
            return Ok(Self { _counted: None });
        }
        let token = request.token.as_ref().map_or(0, |token| token.secret().len());
        let counted = activity.request(REQUEST + request.authority.len() + token, FIRST_REQUESTS);
        Ok(Self { _counted: Some(counted.ok_or(BadRequest::TooManyWait)?) })
    }
}

/// The task of one identity refresh.
async fn verify<H: Handler>(
    handler: Arc<H>,
    request: Request,
    waits: Waits,
    mut respond: SendResponse<Bytes>,
    activity: Arc<Activity>,
) {
    let verified = unless_reset(&mut respond, pin!(handler.verify(&request))).await;
    drop(waits);
    match verified {
        None => drop(activity.cancelled.fetch_add(1, Relaxed)),
        Some(Err(refusal)) => refuse(respond, &refusal),
        Some(Ok(())) => {
            let mut answer = Response::new(());
            *answer.status_mut() = StatusCode::NO_CONTENT;
            // Fails only if the client is gone.
            let _ = respond.send_response(answer, true);
        }
    }
}

/// Waits for `future`, unless the client resets the stream. By reference: an async function that takes a
/// future has room for two of them.
async fn unless_reset<T>(
    respond: &mut SendResponse<Bytes>,
    mut future: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    poll_fn(|cx| {
        if respond.poll_reset(cx).is_ready() {
            return Poll::Ready(None);
        }
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// The task of one stream.
async fn carry<H: Handler>(
    handler: Arc<H>,
    request: Request,
    waits: Waits,
    respond: SendResponse<Bytes>,
    from_client: RecvStream,
    tunnel: Tunnel,
) {
    // Boxed: a tunnel at rest does not keep the memory that connecting needs.
    let opened = Box::pin(open(handler, request, waits, respond, from_client, &tunnel.activity)).await;
    if let Some(Opened { stream, early, upstream }) = opened {
        let Upstream { stream: socket, meter } = upstream;
        Bridge::new(Side::Downstream, stream, socket, meter, tunnel.activity, early, tunnel.idle).run().await;
    }
}

/// A stream whose client has got its 200.
struct Opened<M> {
    stream: (SendStream<Bytes>, RecvStream),
    /// What came before that.
    early: Option<Box<Waiting>>,
    upstream: Upstream<M>,
}

/// Connects and responds. `None` if the client was refused, or left meanwhile.
async fn open<H: Handler>(
    handler: Arc<H>,
    mut request: Request,
    waits: Waits,
    mut respond: SendResponse<Bytes>,
    mut from_client: RecvStream,
    activity: &Activity,
) -> Option<Opened<H::Meter>> {
    let mut early = None;
    request.client_first = poll_fn(|cx| {
        take_early(&mut from_client, &mut early, activity, cx);
        Poll::Ready(early.is_some())
    })
    .await;
    let connected = {
        let connect = pin!(handler.connect(&request));
        let connect = pin!(unless_reset(&mut respond, connect));
        unless_too_much(&mut from_client, &mut early, activity, connect).await
    };
    drop(waits);
    match connected {
        None => respond.send_reset(reset::MEMORY),
        Some(None) => drop(activity.cancelled.fetch_add(1, Relaxed)),
        Some(Some(Err(refusal))) => refuse(respond, &refusal),
        Some(Some(Ok(upstream))) => match respond.send_response(Response::new(()), false) {
            Ok(to_client) => return Some(Opened { stream: (to_client, from_client), early, upstream }),
            Err(_) => client_left(upstream),
        },
    }
    None
}

/// Waits for `future`, and takes what the client sends meanwhile. `None` if others need that memory.
async fn unless_too_much<T>(
    from_client: &mut RecvStream,
    early: &mut Option<Box<Waiting>>,
    activity: &Activity,
    mut future: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    poll_fn(|cx| {
        take_early(from_client, early, activity, cx);
        if early.as_ref().is_some_and(|early| early.poll_evicted(cx).is_ready()) {
            return Poll::Ready(None);
        }
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// Takes what the client has sent, so that it is counted.
fn take_early(
    from_client: &mut RecvStream,
    early: &mut Option<Box<Waiting>>,
    activity: &Activity,
    cx: &mut Context<'_>,
) {
    while let Poll::Ready(Some(Ok(bytes))) = from_client.poll_data(cx) {
        // The frame of an END_STREAM may be empty.
        if !bytes.is_empty() {
            early.get_or_insert_with(|| Box::new(Waiting::new(activity, None))).push(bytes);
        }
    }
}

/// Responds with a status and a reason. Without a body, which would wait for a window that the client may
/// never give. Fails only if the client is gone, so silently.
fn refuse(mut respond: SendResponse<Bytes>, refusal: &Refusal) {
    let mut answer = Response::new(());
    *answer.status_mut() = refusal.status;
    let headers = answer.headers_mut();
    headers.insert(REASON, refusal.header());
    headers.insert(CONTENT_LENGTH, 0.into());
    if refusal.status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, http::HeaderValue::from_static("CONNECT"));
    }
    if refusal.status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer"));
    }
    let _ = respond.send_response(answer, true);
}

/// Closes a connection that has had no stream for one to two intervals: it looks once an interval.
struct Unused {
    timer: Option<(Pin<Box<Sleep>>, Duration)>,
    /// There was a stream at the last look, or has been since.
    had_stream: bool,
}

impl Unused {
    fn new(limit: Option<Duration>) -> Self {
        Self { timer: limit.map(|limit| (Box::pin(sleep(limit)), limit)), had_stream: false }
    }

    /// Returns when it is time for a look.
    async fn due(&mut self) {
        match &mut self.timer {
            None => std::future::pending().await,
            Some((timer, limit)) => {
                timer.as_mut().await;
                timer.as_mut().reset(Instant::now() + *limit);
            }
        }
    }

    /// The look, at a connection that has streams now or not.
    fn is_over(&mut self, has_streams: bool) -> bool {
        !std::mem::replace(&mut self.had_stream, has_streams) && !has_streams
    }
}

/// Ends a connection that stays unauthenticated for too long, or one of whose frames stays unfinished.
struct Patience {
    /// What has to happen in time: the client authenticates, or this frame is finished.
    frame: Option<u64>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    fn new() -> Self {
        Self { frame: None, timer: Some(Box::pin(sleep(UNAUTHENTICATED))) }
    }

    async fn ended(&mut self, activity: &Activity) -> Failure {
        poll_fn(|cx| self.poll(cx, activity)).await
    }

    /// While frames keep coming there is a look every [`FRAME`], and none at rest.
    fn poll(&mut self, cx: &mut Context<'_>, activity: &Activity) -> Poll<Failure> {
        loop {
            let Some(timer) = &mut self.timer else {
                self.frame = activity.unfinished_frame();
                if self.frame.is_none() {
                    return Poll::Pending;
                }
                self.timer = Some(Box::pin(sleep(FRAME)));
                continue;
            };
            if self.frame.is_none() && activity.is_authenticated() {
                self.timer = None;
                continue;
            }
            ready!(timer.as_mut().poll(cx));
            self.timer = None;
            match self.frame {
                None => return Poll::Ready(Failure::Unauthenticated),
                frame if frame == activity.unfinished_frame() => return Poll::Ready(Failure::Unfinished),
                Some(_) => {}
            }
        }
    }
}

/// Bounds what a client begins that keeps cancelling requests before their response (CVE-2023-44487, "rapid
/// reset"). Each costs a route look-up and the start of a connect. h2 counts only requests that are cancelled
/// before they are accepted, and they are accepted at once.
///
/// The connection stays: an agent passes on what the pods of its node do, and the streams of the others are
/// on it too.
struct RapidReset {
    since: Instant,
}

impl RapidReset {
    /// Whether more than `most` were cancelled in a second that is not over. All streams of a connection at
    /// once are no attack: an agent whose API server hangs cancels them.
    fn is_on(&mut self, activity: &Activity, most: u32) -> bool {
        if activity.cancelled.load(Relaxed) <= most {
            return false;
        }
        let now = Instant::now();
        let is_on = now.duration_since(self.since) < Duration::from_secs(1);
        if !is_on {
            self.since = now;
            activity.cancelled.store(0, Relaxed);
        }
        is_on
    }
}
