//! The HTTP server behind every admin listener: bounded in every direction, whatever it answers.
//!
//! One request a connection: a scrape every some seconds gains nothing from keeping one open, and a bound on
//! the life of a connection is a bound on everything.
//!
//! A probe must be answered whatever else is connected: a kubelet restarts what does not answer. So no
//! connection waits for a slot. A new one evicts another (`evicted_for`): first one of the client with the
//! most connections, and of those one that has sent no request.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle, yield_now};
use tokio::time::{sleep, timeout};

use crate::body::{Body, whole};

/// Connections held at once. A few Prometheis, a few probes, a few people; the rest is slack for clients that
/// say nothing.
const MOST_CONNECTIONS: usize = 64;
/// How long a client may take to send its request: one packet, sent once more if it got lost.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one connection may take from its first to its last byte: a slow scrape of 10,000 clusters, and no
/// more.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Rest after a failed accept(2), which nearly always means that descriptors are out: trying at once would
/// burn the core.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Between two attempts to bind the address while a predecessor still holds it.
const BIND_AGAIN: Duration = Duration::from_millis(200);

/// The admin address cannot be bound.
#[derive(Debug, Error)]
#[error("cannot listen on {address}; {remedy}")]
pub struct ListenError {
    /// The address asked for.
    pub address: SocketAddr,
    /// What to do.
    pub remedy: &'static str,
    /// What the system said.
    pub source: io::Error,
}

/// What a client gets.
pub type Answer = Response<Body>;

/// What an admin listener serves: the answer to a path and a query. Only GET and HEAD come this far.
pub trait Pages: Send + Sync + 'static {
    /// The answer to `request`.
    fn answer(&self, request: &Request<Incoming>) -> Answer;
}

/// Opens the listener that [`serve`] serves.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Which listener is meant, in logs and errors.
#[derive(Debug, Clone, Copy)]
pub struct Name {
    /// As logs name it.
    pub listener: &'static str,
    /// What to do where its address cannot be had.
    pub remedy: &'static str,
}

impl Name {
    /// The listener of `--admin-listen`.
    pub const ADMIN: Self =
        Self { listener: "admin", remedy: "choose another address with --admin-listen, or off" };
}

/// Serves `pages` at `address` from now on, if there is one. With `waits`, an address in use is one that a
/// predecessor will let go of.
pub async fn start(
    name: Name,
    address: Option<SocketAddr>,
    pages: Arc<impl Pages>,
    waits: bool,
) -> Result<JoinHandle<()>, ListenError> {
    let Some(address) = address else { return Ok(tokio::spawn(pending())) };
    match bind(address).await {
        Ok(listener) => {
            if let Ok(address) = listener.local_addr() {
                tracing::info!(listener = %name.listener, %address, "listening");
            }
            Ok(tokio::spawn(async move { match serve(listener, pages).await {} }))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && waits => {
            tracing::info!(%address, "the admin address is in use, probably by a predecessor; waiting");
            Ok(tokio::spawn(async move {
                loop {
                    sleep(BIND_AGAIN).await;
                    if let Ok(listener) = bind(address).await {
                        match serve(listener, Arc::clone(&pages)).await {}
                    }
                }
            }))
        }
        Err(source) => Err(ListenError { address, remedy: name.remedy, source }),
    }
}

/// A connection that is held.
#[derive(Debug)]
struct Held {
    client: IpAddr,
    /// Whether its request has come.
    answering: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, pages: Arc<impl Pages>) -> Infallible {
    // In the order they came.
    let mut held: Vec<Held> = Vec::with_capacity(MOST_CONNECTIONS);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                held.retain(|connection| !connection.task.is_finished());
                if held.len() >= MOST_CONNECTIONS
                    && let Some(index) = evicted_for(&held, peer.ip())
                {
                    held.remove(index).task.abort();
                }
                let answering = Arc::new(AtomicBool::new(false));
                let serving = serve_connection(stream, Arc::clone(&pages), Arc::clone(&answering));
                let task = tokio::spawn(async { drop(timeout(CONNECTION_TIMEOUT, serving).await) });
                held.push(Held { client: peer.ip(), answering, task: task.abort_handle() });
                // Requests that are there already are answered before the next connection takes a slot.
                yield_now().await;
            }
            Err(error) => {
                tracing::warn!(%error, "the admin listener cannot accept a connection");
                sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// The connection to end when a client connects and no slot is free: one of the client that would hold the
/// most; of those one without a request, if there is one; of these the oldest.
fn evicted_for(held: &[Held], client: IpAddr) -> Option<usize> {
    let of = |other: IpAddr| held.iter().filter(|connection| connection.client == other).count();
    let weight = |connection: &Held| {
        let more = usize::from(connection.client == client);
        (of(connection.client) + more, !connection.answering.load(Relaxed))
    };
    // The last of equals is the oldest, seen from the newest.
    held.iter().enumerate().rev().max_by_key(|(_, connection)| weight(connection)).map(|(index, _)| index)
}

async fn serve_connection(stream: TcpStream, pages: Arc<impl Pages>, answering: Arc<AtomicBool>) {
    let service = service_fn(move |request| {
        answering.store(true, Relaxed);
        let answer = answer(&*pages, &request);
        async move { Ok::<_, Infallible>(answer) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection to the admin listener ended");
    }
}

fn answer(pages: &impl Pages, request: &Request<Incoming>) -> Answer {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return pages.answer(request);
    }
    let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here\n".into());
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    refused
}

/// A page for people.
pub fn text(code: StatusCode, text: String) -> Answer {
    let mut answer = typed("text/plain; charset=utf-8", whole(text));
    *answer.status_mut() = code;
    answer
}

/// A page of a type.
pub fn typed(content_type: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections of clients in the order they came, with a question mark where the request is still
    /// awaited.
    async fn held(clients: &[&str]) -> Vec<Held> {
        let connection = |client: &&str| Held {
            client: client.trim_end_matches('?').parse().unwrap(),
            answering: Arc::new(AtomicBool::new(!client.ends_with('?'))),
            task: tokio::spawn(std::future::pending::<()>()).abort_handle(),
        };
        clients.iter().map(connection).collect()
    }

    async fn leaves(clients: &[&str], client: &str) -> Option<usize> {
        evicted_for(&held(clients).await, client.parse().unwrap())
    }

    #[tokio::test]
    async fn the_client_with_the_most_connections_loses_one_to_a_new_one() {
        assert_eq!(leaves(&["::1?", "::2", "::2", "::2"], "::9").await, Some(1));
        assert_eq!(leaves(&["::1?", "::1?", "::2", "::2"], "::2").await, Some(2), "a flood displaces itself");
    }

    #[tokio::test]
    async fn a_client_without_a_request_makes_room_first_and_the_oldest_of_them() {
        assert_eq!(leaves(&["::1", "::1?", "::1?"], "::1").await, Some(1));
        assert_eq!(leaves(&["::1", "::2", "::3?"], "::4").await, Some(2));
        assert_eq!(leaves(&["::1", "::2", "::3"], "::4").await, Some(0));
    }
}
