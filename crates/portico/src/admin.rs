//! The admin listener: what this gateway is doing, for probes, Prometheus, people and scripts.
//!
//! [`health`] answers whether it lives and is ready, [`metrics`] counts, [`connections`] lists what is open; `/routes` is the
//! listing of `portico routes` ([`crate::listing`]). [`body`] sends long answers piece by piece.
//!
//! It serves whoever reaches it, so it is loopback unless told otherwise, only ever reads, and is bounded in every direction:
//! connections, time for a request, time for an answer, memory. One request a connection: a scrape every some seconds gains
//! nothing from keeping one open, and a bound on the life of a connection is a bound on everything.

mod body;
mod connections;
mod health;
mod metrics;
mod process;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use self::body::{Body, stream, whole};
use self::metrics::Metrics;
use crate::outcome::OutputFormat;
use crate::status::Status;

/// Requests served at once; more wait in the backlog. A few Prometheis, a few probes, a few people.
const MOST_CONNECTIONS: usize = 32;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one connection may take from its first to its last byte: a slow scrape of 10,000 clusters, and no more.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Rest after a failed accept(2), which nearly always means that descriptors are out: trying at once would burn the core.
const ACCEPT_REST: Duration = Duration::from_millis(100);

const INDEX: &str = "portico gateway\n\n\
    /healthz             is the process alive\n\
    /readyz              does it serve; ?verbose says what stands in the way, and what is wrong with objects\n\
    /metrics             for Prometheus\n\
    /routes              what is exposed, where, by which object; ?o=table for people, ?cluster=NAME for one\n\
    /connections         what is open; ?o=table for people, ?cluster=NAME for one\n";

type Answer = Response<Body>;

/// What answers are made from.
#[derive(Debug)]
struct Admin {
    status: Arc<Status>,
    metrics: Metrics,
}

/// Opens the listener that [`serve`] serves.
pub(crate) async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves until dropped.
pub(crate) async fn serve(listener: TcpListener, status: Arc<Status>) -> Infallible {
    let admin = Arc::new(Admin { metrics: Metrics::new(Arc::clone(&status)), status });
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let admin = Arc::clone(&admin);
                tokio::spawn(async move {
                    let _elapsed = timeout(CONNECTION_TIMEOUT, serve_connection(stream, admin)).await;
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

async fn serve_connection(stream: TcpStream, admin: Arc<Admin>) {
    let service = service_fn(move |request| {
        let answer = answer(&admin, &request);
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

fn answer(admin: &Arc<Admin>, request: &Request<Incoming>) -> Answer {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here\n".into());
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let query = Query(request.uri().query().unwrap_or_default());
    match request.uri().path() {
        "/" => text(StatusCode::OK, INDEX.into()),
        "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
        "/readyz" => {
            let readiness = health::readiness(&admin.status, query.has("verbose"));
            let code = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            text(code, readiness.text)
        }
        "/metrics" => {
            let admin = Arc::clone(admin);
            typed(metrics::CONTENT_TYPE, stream(move |out| admin.metrics.write(out)))
        }
        "/routes" => {
            let mut listing = admin.status.listing();
            if let Some(cluster) = query.get("cluster") {
                listing.keep_only(cluster);
            }
            list(request, query, move |format, out| listing.write(format, out))
        }
        "/connections" => {
            let connections =
                connections::list(admin.status.gateway().map(Arc::as_ref), query.get("cluster"));
            list(request, query, move |format, out| connections::write(&connections, format, out))
        }
        path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{INDEX}")),
    }
}

/// A listing in the form asked for: by `?o=table`, or by `Accept: text/plain`, or else JSON.
fn list(
    request: &Request<Incoming>,
    query: Query<'_>,
    write: impl FnOnce(OutputFormat, &mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> Answer {
    let wants_text = request
        .headers()
        .get(ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.starts_with("text/"));
    let format = match query.get("o") {
        None if wants_text => OutputFormat::Table,
        None | Some("json") => OutputFormat::Json,
        Some("table") => OutputFormat::Table,
        Some(other) => {
            return text(StatusCode::BAD_REQUEST, format!("o={other:?} is no format; give table or json\n"));
        }
    };
    let content_type = match format {
        OutputFormat::Table => "text/plain; charset=utf-8",
        OutputFormat::Json => "application/json",
    };
    typed(content_type, stream(move |out| write(format, out)))
}

fn text(code: StatusCode, text: String) -> Answer {
    let mut answer = typed("text/plain; charset=utf-8", whole(text));
    *answer.status_mut() = code;
    answer
}

fn typed(content_type: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

/// The query of a request. Names and values served here need no escapes, so none are undone.
#[derive(Debug, Clone, Copy)]
struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    fn pairs(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }

    fn has(self, name: &str) -> bool {
        self.pairs().any(|(key, _)| key == name)
    }

    fn get(self, name: &str) -> Option<&'a str> {
        self.pairs().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_with_and_without_values() {
        let query = Query("verbose&o=table");
        assert!(query.has("verbose"));
        assert_eq!(query.get("o"), Some("table"));
        assert_eq!(query.get("cluster"), None);
        assert!(!Query("").has("verbose"));
    }
}
