//! The HTTPS listener that an API server asks: bounded in every direction, since anybody in the pod network
//! can connect.
//!
//! An API server keeps a connection for each request that it makes at a time. If there are too many
//! connections, the oldest are closed; a question over a bound gets a clear refusal at once. The API server
//! admits what it could not ask about.

use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use portico_net::slots::{Slots, Source};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit, watch as channel};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tracing::{debug, warn};

use super::reviewer::Reviewer;

/// Where questions are asked.
pub(super) const PATH: &str = "/review";

/// Connections held at once: one for each change that an API server admits at a time, of three of them. The
/// oldest gives way to the next, so that nobody keeps an API server out by holding them all.
const MOST_CONNECTIONS: u32 = 192;

/// Time limit of a TLS handshake: the API server gives up after three seconds.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a request's head, and for how long a connection may be idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit of a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection lives. The next question opens another.
const LIFETIME: Duration = Duration::from_secs(300);

/// What an open answer may take then.
const GRACE: Duration = Duration::from_secs(5);

/// Most bytes of a question: both versions of an object, of which an API server takes 1.5 MiB.
const LARGEST: u64 = 4 << 20;

/// Bytes of a request's head, and of a body that are read at a time.
const LONGEST_HEAD: usize = 16 * 1_024;

/// Bytes of all questions that are read at a time, in units of [`UNIT`].
const BUDGET: usize = 16 * 1_024;
const UNIT: usize = 1_024;

/// Rest after a failed accept(2), which nearly always means that descriptors are out.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// What every connection needs.
struct Shared {
    reviewer: Reviewer,
    budget: Semaphore,
}

/// Serves until dropped. Without a certificate, connections are closed.
pub(super) async fn serve(
    listener: TcpListener,
    certificate: channel::Receiver<Option<Arc<ServerConfig>>>,
    reviewer: Reviewer,
) -> Infallible {
    let connections = Slots::new(MOST_CONNECTIONS, "connections to the webhook");
    let shared = Arc::new(Shared { reviewer, budget: Semaphore::new(BUDGET) });
    let mut tasks = tokio::task::JoinSet::new();
    let mut is_failing = false;
    loop {
        while tasks.try_join_next().is_some() {}
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    warn!(%error, "the webhook's listener cannot accept a connection");
                }
                sleep(ACCEPT_REST).await;
                continue;
            }
        };
        is_failing = false;
        let Some(config) = certificate.borrow().clone() else { continue };
        let slot = connections.enter(Some(Source::of(peer.ip())));
        let shared = Arc::clone(&shared);
        tasks.spawn(async move {
            tokio::select! {
                () = serve_connection(stream, config, &shared) => {}
                // It may have been the API server's, in the middle of a question, which it admits then.
                () = poll_fn(|cx| slot.poll_evicted(cx)) => shared.reviewer.count("other", "evicted"),
            }
        });
        // The one that gave way is closed before the next takes a descriptor.
        yield_now().await;
    }
}

async fn serve_connection(stream: TcpStream, config: Arc<ServerConfig>, shared: &Shared) {
    let accepting = TlsAcceptor::from(config).accept(stream);
    let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, accepting).await else {
        debug!("a client of the webhook did not end its TLS handshake");
        return;
    };
    let service = service_fn(|request| async { Ok::<_, Infallible>(answer(request, shared).await) });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = match timeout(LIFETIME, connection.as_mut()).await {
        Ok(ended) => ended,
        Err(_) => {
            connection.as_mut().graceful_shutdown();
            timeout(GRACE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        debug!(%error, "a connection to the webhook ended");
    }
}

async fn answer(request: Request<Incoming>, shared: &Shared) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return refused(StatusCode::NOT_FOUND, "questions are asked at /review\n");
    }
    if request.method() != Method::POST {
        let mut answer = refused(StatusCode::METHOD_NOT_ALLOWED, "only POST is served here\n");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
        return answer;
    }
    let malformed = |code, text| {
        shared.reviewer.count("other", "malformed");
        refused(code, text)
    };
    let body = request.into_body();
    // Every API server says how long it is.
    let Some(length) = body.size_hint().exact() else {
        return malformed(StatusCode::LENGTH_REQUIRED, "Content-Length is missing\n");
    };
    if length > LARGEST {
        return malformed(StatusCode::PAYLOAD_TOO_LARGE, "no AdmissionReview is longer than 4 MiB\n");
    }
    let length = usize::try_from(length).unwrap_or_default();
    let (body, _held) = match timeout(BODY_TIMEOUT, read(body, length, &shared.budget)).await {
        Ok(Ok(read)) => read,
        Ok(Err(Unread::Overloaded)) => {
            shared.reviewer.count("other", "overloaded");
            return refused(StatusCode::SERVICE_UNAVAILABLE, "too much is asked at once\n");
        }
        Ok(Err(Unread::Ended)) => return malformed(StatusCode::BAD_REQUEST, "the body ended early\n"),
        Err(_) => return malformed(StatusCode::REQUEST_TIMEOUT, "the body takes too long\n"),
    };
    match shared.reviewer.answer(body).await {
        Ok(text) => {
            let mut answer = Response::new(Full::from(text));
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            answer
        }
        Err(error) => {
            debug!(%error, "a question to the webhook cannot be read");
            refused(StatusCode::BAD_REQUEST, "this is no AdmissionReview of admission.k8s.io/v1\n")
        }
    }
}

/// Why a question was not read.
enum Unread {
    /// The memory for questions that are read at the same time is used up.
    Overloaded,
    /// The client left before its end.
    Ended,
}

/// Reads a question of `length` bytes, and takes its share of `budget` as they come. A client that announces
/// much and sends nothing takes nothing from the others.
async fn read<'a>(
    mut body: Incoming,
    length: usize,
    budget: &'a Semaphore,
) -> Result<(Bytes, SemaphorePermit<'a>), Unread> {
    let take = |units| budget.try_acquire_many(units).map_err(|_| Unread::Overloaded);
    let mut held = take(0)?;
    // Pages that nothing is written to take no memory.
    let mut text = Vec::with_capacity(length);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Unread::Ended)?.into_data() else { continue };
        text.extend_from_slice(&data);
        let lacks = text.len().div_ceil(UNIT) - held.num_permits();
        held.merge(take(u32::try_from(lacks).unwrap_or(u32::MAX))?);
    }
    Ok((text.into(), held))
}

fn refused(code: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::from(text));
    *answer.status_mut() = code;
    answer
}
