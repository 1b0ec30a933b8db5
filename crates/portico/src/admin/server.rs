//! The HTTP server behind every admin listener: bounded in every direction, whatever it answers.
//!
//! One request a connection: a scrape every some seconds gains nothing from keeping one open, and a bound on the life of a
//! connection is a bound on everything.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::body::{Body, whole};

/// Requests served at once; more wait in the backlog. A few Prometheis, a few probes, a few people.
const MOST_CONNECTIONS: usize = 32;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one connection may take from its first to its last byte: a slow scrape of 10,000 clusters, and no more.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Rest after a failed accept(2), which nearly always means that descriptors are out: trying at once would burn the core.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// What a client gets.
pub(crate) type Answer = Response<Body>;

/// What an admin listener serves: the answer to a path and a query. Only GET and HEAD come this far.
pub(crate) trait Pages: Send + Sync + 'static {
    /// The answer to `request`.
    fn answer(&self, request: &Request<Incoming>) -> Answer;
}

/// Opens the listener that [`serve`] serves.
pub(crate) async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves until dropped.
pub(crate) async fn serve(listener: TcpListener, pages: Arc<impl Pages>) -> Infallible {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let pages = Arc::clone(&pages);
                tokio::spawn(async move {
                    let _elapsed = timeout(CONNECTION_TIMEOUT, serve_connection(stream, pages)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the admin listener cannot accept a connection");
                sleep(ACCEPT_REST).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, pages: Arc<impl Pages>) {
    let service = service_fn(move |request| {
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
pub(crate) fn text(code: StatusCode, text: String) -> Answer {
    let mut answer = typed("text/plain; charset=utf-8", whole(text));
    *answer.status_mut() = code;
    answer
}

/// A page of a type.
pub(crate) fn typed(content_type: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
