//! A stand-in for the API server of one user cluster: enough for `kubectl version`, `kubectl get --raw
//! /healthz` and `kubectl get namespaces --watch`, over real TLS.
//!
//! As a real one does, it answers `/version` and the health checks to every client, and the rest to one with
//! the bearer token. It serves HTTP/1.1 only: a watch is a chunked response that goes on until the client
//! asked it to end, or leaves.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::pki::Identity;

/// Connections served at once; more wait. It is a demo: a few terminals, each with a few commands.
const MOST_CONNECTIONS: usize = 256;
/// How long a client may take for its TLS handshake, and for each request head.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pace of a watch.
const BETWEEN_EVENTS: Duration = Duration::from_secs(1);
/// What a stand-in calls its version: that of the Kubernetes API it imitates.
const VERSION: &str = "v1.34.4";

/// A stand-in that serves until it is dropped.
pub(super) struct ApiServer {
    /// Where it listens: the endpoint of its cluster.
    pub(super) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

/// What a stand-in says about itself.
struct Site {
    cluster: String,
    token: String,
    started: jiff::Timestamp,
}

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

impl ApiServer {
    /// Serves `cluster` under `identity` on a free port of loopback; `token` opens what is not public.
    pub(super) async fn start(cluster: &str, identity: &Identity, token: &str) -> anyhow::Result<Self> {
        let acceptor = TlsAcceptor::from(Arc::new(tls(identity)?));
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("opening a port on 127.0.0.1")?;
        let address = listener.local_addr().context("asking for the port that was opened")?;
        let site = Site { cluster: cluster.into(), token: token.into(), started: jiff::Timestamp::now() };
        let task = tokio::spawn(accept(listener, acceptor, Arc::new(site)));
        Ok(Self { address, task })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn tls(identity: &Identity) -> anyhow::Result<ServerConfig> {
    let chain =
        CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder.with_no_client_auth().with_single_cert(
                chain.map_err(|error| rustls::Error::General(error.to_string()))?,
                key.map_err(|error| rustls::Error::General(error.to_string()))?,
            )
        })
        .context("making the TLS configuration of a stand-in API server")?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, site: Arc<Site>) {
    let slots = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (acceptor, site) = (acceptor.clone(), Arc::clone(&site));
                tokio::spawn(async move {
                    serve(stream, acceptor, site).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a stand-in API server cannot accept a connection");
                // Out of descriptors: trying again at once would only burn CPU.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, acceptor: TlsAcceptor, site: Arc<Site>) {
    let Ok(Ok(tls)) = timeout(PATIENCE, acceptor.accept(stream)).await else { return };
    let service = service_fn(move |request| {
        let answer = answer(&site, &request);
        async move { Ok::<_, Infallible>(answer) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(tls), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection to a stand-in API server ended");
    }
}

fn answer(site: &Site, request: &Request<Incoming>) -> Answer {
    let path = request.uri().path();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return failure(
            StatusCode::METHOD_NOT_ALLOWED,
            "MethodNotAllowed",
            "the demo's API servers are read-only",
        );
    }
    match path {
        "/healthz" | "/livez" | "/readyz" => return text("ok"),
        "/version" | "/version/" => return document(&version()),
        _ => {}
    }
    let expected = format!("Bearer {}", site.token);
    if request.headers().get(AUTHORIZATION).is_none_or(|shown| shown.as_bytes() != expected.as_bytes()) {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    }
    match path {
        "/api" => document(&json!({"kind": "APIVersions", "versions": ["v1"]})),
        "/apis" => document(&json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})),
        "/api/v1" => document(&resources()),
        "/api/v1/namespaces" => match Watch::of(request.uri().query().unwrap_or_default()) {
            Some(wanted) => watch(site, &wanted),
            None => document(&site.namespaces()),
        },
        _ => match path.strip_prefix("/api/v1/namespaces/").and_then(|name| site.find(name)) {
            Some(namespace) => document(&namespace),
            None => {
                failure(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource")
            }
        },
    }
}

/// What a request wants to watch.
struct Watch {
    /// From now on, rather than with what there is already: it names the version of the list it has.
    continues: bool,
    seconds: u64,
}

impl Watch {
    /// `None` if the request does not ask for a watch at all.
    fn of(query: &str) -> Option<Self> {
        let get = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        if !matches!(get("watch"), Some("true" | "1")) {
            return None;
        }
        let seconds = get("timeoutSeconds").and_then(|seconds| seconds.parse().ok());
        Some(Self {
            continues: get("resourceVersion").is_some_and(|version| !matches!(version, "" | "0")),
            // As a real API server: a watch without a limit ends by itself after half an hour to an hour.
            seconds: seconds.unwrap_or(2_700),
        })
    }
}

/// A watch of namespaces: at first what there is, then a sign of life on `default` at each tick.
fn watch(site: &Site, wanted: &Watch) -> Answer {
    let seconds = wanted.seconds;
    let mut first: String = site
        .names()
        .iter()
        .filter(|_| !wanted.continues)
        .map(|name| event("ADDED", &site.namespace(name, 1)))
        .collect();
    let (cluster, started) = (site.cluster.clone(), site.started);
    let ticks = stream::unfold(0_u64, move |tick| {
        let first = std::mem::take(&mut first);
        let site = Site { cluster: cluster.clone(), token: String::new(), started };
        async move {
            if tick > seconds {
                return None;
            }
            let text = if tick == 0 {
                first
            } else {
                tokio::time::sleep(BETWEEN_EVENTS).await;
                event("MODIFIED", &site.namespace("default", tick + 1))
            };
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(text))), tick + 1))
        }
    });
    with_type("application/json", StreamBody::new(ticks).boxed_unsync())
}

impl Site {
    /// The namespaces of a new cluster, and one that tells the clusters of the demo apart.
    fn names(&self) -> [&str; 3] {
        ["default", "kube-system", &self.cluster]
    }

    fn namespaces(&self) -> Value {
        let items: Vec<Value> = self.names().iter().map(|name| self.namespace(name, 1)).collect();
        json!({
            "kind": "NamespaceList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items,
        })
    }

    fn find(&self, name: &str) -> Option<Value> {
        self.names().contains(&name).then(|| self.namespace(name, 1))
    }

    fn namespace(&self, name: &str, version: u64) -> Value {
        json!({
            "kind": "Namespace",
            "apiVersion": "v1",
            "metadata": {
                "name": name,
                "uid": format!("00000000-0000-4000-8000-{:012x}", name.len()),
                "resourceVersion": version.to_string(),
                "creationTimestamp": self.started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
                "labels": {"kubernetes.io/metadata.name": name, "demo.portico/cluster": self.cluster},
            },
            "spec": {"finalizers": ["kubernetes"]},
            "status": {"phase": "Active"},
        })
    }
}

fn event(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

fn version() -> Value {
    json!({
        "major": "1", "minor": "34", "gitVersion": VERSION, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "portico/demo",
    })
}

fn resources() -> Value {
    json!({
        "kind": "APIResourceList", "groupVersion": "v1", "resources": [{
            "name": "namespaces", "singularName": "namespace", "namespaced": false, "kind": "Namespace",
            "shortNames": ["ns"], "verbs": ["get", "list", "watch"],
        }],
    })
}

fn failure(code: StatusCode, reason: &str, message: &str) -> Answer {
    let mut answer = document(&json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    }));
    *answer.status_mut() = code;
    answer
}

fn document(value: &Value) -> Answer {
    with_type("application/json", whole(value.to_string()))
}

fn text(text: &str) -> Answer {
    with_type("text/plain; charset=utf-8", whole(text.to_owned()))
}

fn whole(text: String) -> UnsyncBoxBody<Bytes, Infallible> {
    Full::new(Bytes::from(text)).boxed_unsync()
}

fn with_type(content_type: &'static str, body: UnsyncBoxBody<Bytes, Infallible>) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
