//! A stand-in for the API server of one user cluster. Over real TLS, it is enough for `kubectl version`,
//! `kubectl get --raw /healthz` and `kubectl get namespaces --watch`. With [`Nodes`] it serves `kubectl logs`
//! as well.
//!
//! As a real one does, it answers `/version` and the health checks to every client, and the rest to one with
//! the bearer token. It serves HTTP/1.1 only. A watch is a chunked response that goes on until the time that
//! the client asked for is over, or the client leaves.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request, StatusCode};
use portico_pki::Pair;
use serde_json::{Value, json};

use super::nodes::{self, Nodes};
use super::stand_in::{Answer, StandIn, text, whole, with_type};

/// The pace of a watch.
const BETWEEN_EVENTS: Duration = Duration::from_secs(1);
/// What a stand-in calls its version: that of the Kubernetes API it imitates.
const VERSION: &str = "v1.34.4";

/// What a stand-in says about itself.
struct Site {
    cluster: String,
    token: String,
    started: jiff::Timestamp,
    /// Its way to worker nodes.
    nodes: Option<Nodes>,
}

/// Serves `cluster` under `identity` on a free port of loopback; `token` opens what is not public. With
/// `nodes`, it has a pod.
pub(super) async fn start(
    cluster: &str,
    identity: &Pair,
    token: &str,
    nodes: Option<Nodes>,
) -> anyhow::Result<StandIn> {
    let (cluster, token, started) = (cluster.into(), token.into(), jiff::Timestamp::now());
    let site = Arc::new(Site { cluster, token, started, nodes });
    let admits = |_: SocketAddr| true;
    StandIn::start(identity, admits, move |request| {
        let site = Arc::clone(&site);
        async move { answer(&site, &request).await }
    })
    .await
}

async fn answer(site: &Site, request: &Request<Incoming>) -> Answer {
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
        nodes::POD | nodes::POD_LOG => match &site.nodes {
            Some(_) if path == nodes::POD => document(&nodes::pod()),
            Some(nodes) => {
                nodes.log(request.uri().query().unwrap_or_default()).await.unwrap_or_else(|error| {
                    failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", &format!("{error:#}"))
                })
            }
            None => failure(StatusCode::NOT_FOUND, "NotFound", "this cluster of the demo has no pods"),
        },
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
        let site = Site { cluster: cluster.clone(), token: String::new(), started, nodes: None };
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
        }, {
            "name": "pods", "singularName": "pod", "namespaced": true, "kind": "Pod",
            "shortNames": ["po"], "verbs": ["get"],
        }, {
            "name": "pods/log", "singularName": "", "namespaced": true, "kind": "Pod", "verbs": ["get"],
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
