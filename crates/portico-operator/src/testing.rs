//! An API server in memory, for tests of controllers on a paused clock.
//!
//! It lists and watches the kinds in [`PLURALS`], merge-patches Services and the status of Clusters, applies
//! ExposedClusters, refuses Namespaces unless it is told to apply everything, keeps Leases and collects
//! Events. Tests beside a real API server are in `tests/`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, StreamExt};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use kube::Client;
use kube::client::Body;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tower::Service;

/// The kinds that are listed and watched.
const PLURALS: [&str; 8] = [
    "services",
    "namespaces",
    "endpointslices",
    "deployments",
    "seeds",
    "clusters",
    "kubermaticconfigurations",
    "exposedclusters",
];

/// The kinds of what is made for a cluster in its namespace, and that itself.
const MADE: [&str; 3] = ["namespaces", "services", "endpointslices"];

/// The Lease of the front Service of [`plan`].
const FRONT_LEASE: &str = "portico-front-portico";

type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// The front Service `portico` in the namespace `portico`, with a port for SNI and none for the tunnel.
pub(crate) fn plan() -> FrontSettings {
    FrontSettings {
        front: ObjectKey::new("portico", "portico"),
        sni_port: Some(6_443),
        tunnel_port: None,
        listener_limit: None,
        expose_annotation: portico_api::annotations::EXPOSE.into(),
        namespace: None,
    }
}

/// What becomes of a write of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Done,
    /// Done, while the answer says that nobody knows.
    Unknown,
    /// Another client was faster.
    Conflict,
}

/// The API server. Clones share one state.
#[derive(Clone, Default)]
pub(crate) struct FakeApi(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    version: u64,
    /// By `PLURAL/namespace/name`.
    objects: BTreeMap<String, Value>,
    /// Kinds that are not Kubernetes' own and are served all the same.
    installed: BTreeSet<String>,
    /// By name.
    leases: BTreeMap<String, Value>,
    events: Vec<Value>,
    watches: Vec<Watch>,
    writes: usize,
    /// Requests for Services get this status instead of an answer.
    refusal: Option<StatusCode>,
    /// Patches of Services and Clusters, except of their status, get this status instead of an answer.
    write_refusal: Option<StatusCode>,
    /// What becomes of the next writes of Services. Those after them are done.
    fates: VecDeque<Fate>,
    /// How many writes are accepted before they are refused.
    writes_left: Option<usize>,
    /// Changes each Service as it is written, as an admission webhook does.
    webhook: Option<fn(&mut Value)>,
    /// Whether the kinds in [`MADE`] are applied.
    applies: bool,
}

struct Watch {
    plural: String,
    lines: UnboundedSender<Bytes>,
}

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        Client::new(self.clone(), "default")
    }

    /// Creates or replaces a Service.
    pub(crate) fn put(&self, service: Value) {
        self.state().put("services", service);
    }

    /// From now on objects of this kind are served.
    pub(crate) fn install(&self, plural: &str) {
        self.state().installed.insert(plural.to_owned());
    }

    /// Creates or replaces a Seed, which is served from now on.
    pub(crate) fn put_seed(&self, seed: Value) {
        self.put_of("seeds", seed);
    }

    /// Creates or replaces an object of this kind, which is served from now on.
    pub(crate) fn put_of(&self, plural: &str, object: Value) {
        self.install(plural);
        self.state().put(plural, object);
    }

    /// From now on Services, and what else is made for a cluster, are applied.
    pub(crate) fn apply_all(&self) {
        self.state().applies = true;
    }

    /// Deletes `PLURAL/namespace/name`.
    pub(crate) fn delete_of(&self, plural: &str, name: &str) {
        let mut state = self.state();
        let object = state.objects.remove(&format!("{plural}/{name}")).unwrap();
        state.tell("DELETED", plural, &object);
    }

    /// The objects of this kind.
    pub(crate) fn all_of(&self, plural: &str) -> Vec<Value> {
        let start = format!("{plural}/");
        let state = self.state();
        let found = state.objects.iter().filter(|(name, _)| name.starts_with(&start));
        found.map(|(_, object)| object.clone()).collect()
    }

    /// Accepts this many further writes, and then refuses them.
    pub(crate) fn refuse_writes_after(&self, writes: usize) {
        self.state().writes_left = Some(writes);
    }

    /// Deletes the Service `namespace/name`.
    pub(crate) fn delete(&self, name: &str) {
        self.delete_of("services", name);
    }

    /// Deletes the Service `namespace/name` while all watches are broken, so that only a new list shows it.
    pub(crate) fn delete_unseen(&self, name: &str) {
        let mut state = self.state();
        state.objects.remove(&format!("services/{name}")).unwrap();
        let expired = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410,
            "reason": "Expired", "message": "too old resource version"});
        for watch in state.watches.drain(..) {
            let _ended = watch.lines.send(line(&json!({"type": "ERROR", "object": expired})));
        }
    }

    /// From now on requests for Services are refused, or answered again.
    pub(crate) fn refuse(&self, status: Option<StatusCode>) {
        self.state().refusal = status;
    }

    /// From now on writes of Services and Clusters are refused, or accepted again; their status can be
    /// written.
    pub(crate) fn refuse_writes(&self, status: Option<StatusCode>) {
        self.state().write_refusal = status;
    }

    /// This becomes of the next writes of Services.
    pub(crate) fn decide(&self, fates: impl IntoIterator<Item = Fate>) {
        self.state().fates.extend(fates);
    }

    /// From now on each Service is changed as it is written.
    pub(crate) fn alter(&self, webhook: fn(&mut Value)) {
        self.state().webhook = Some(webhook);
    }

    /// The Service `namespace/name`.
    pub(crate) fn service(&self, name: &str) -> Value {
        self.state().objects[&format!("services/{name}")].clone()
    }

    /// Status and reason of the condition of the Service `namespace/name`.
    pub(crate) fn condition(&self, name: &str) -> (String, String) {
        let condition = &self.service(name)["status"]["conditions"][0];
        let field = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (field("status"), field("reason"))
    }

    /// How many writes of Services and ExposedClusters were accepted.
    pub(crate) fn writes(&self) -> usize {
        self.state().writes
    }

    /// The reasons of all Events.
    pub(crate) fn reasons(&self) -> Vec<String> {
        self.state().events.iter().map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
    }

    /// The holder of the Lease of the front Service.
    pub(crate) fn holder(&self) -> Option<String> {
        let state = self.state();
        let holder = state.leases.get(FRONT_LEASE)?["spec"]["holderIdentity"].as_str()?;
        Some(holder.to_owned())
    }

    /// Gives that Lease to a replica that is not there.
    pub(crate) fn give_lease_to(&self, holder: &str) {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": FRONT_LEASE, "namespace": "portico", "resourceVersion": "1"},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15},
        });
        self.state().leases.insert(FRONT_LEASE.to_owned(), lease);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(
        &self,
        method: &Method,
        path: &str,
        query: &str,
        body: Option<Value>,
    ) -> Response<ResponseBody> {
        let mut state = self.state();
        if path.contains("/services")
            && let Some(status) = state.refusal
        {
            return failure(status);
        }
        let plural = PLURALS.into_iter().find(|plural| path.ends_with(&format!("/{plural}")));
        let is_served = |plural| plural == "services" || state.installed.contains(plural);
        match (method.as_str(), path, body) {
            ("GET", _, _) if plural.is_some_and(|plural| !is_served(plural)) => {
                failure(StatusCode::NOT_FOUND)
            }
            ("GET", _, _) if plural.is_some() && query.contains("watch=true") => {
                let (lines, received) = unbounded_channel();
                state.watches.push(Watch { plural: plural.unwrap().to_owned(), lines });
                let frames = futures_util::stream::unfold(received, |mut received| async {
                    let line = received.recv().await?;
                    Some((Ok(Frame::data(line)), received))
                });
                response(StatusCode::OK, frames.boxed())
            }
            ("GET", _, _) if plural.is_some() => {
                let start = format!("{}/", plural.unwrap());
                let items = state.objects.iter().filter(|(name, _)| name.starts_with(&start));
                let items: Vec<_> = items.map(|(_, object)| object.clone()).collect();
                success(&json!({"apiVersion": "v1", "kind": "List",
                    "metadata": {"resourceVersion": state.version.to_string()}, "items": items}))
            }
            ("GET", path, _) if path.contains("/services/") => match state.objects.get(&named(path)) {
                Some(service) => success(service),
                None => failure(StatusCode::NOT_FOUND),
            },
            ("PATCH", path, Some(_))
                if ["/services/", "/clusters/"].iter().any(|part| path.contains(part))
                    && !path.ends_with("/status")
                    && state.write_refusal.is_some() =>
            {
                failure(state.write_refusal.unwrap())
            }
            ("PATCH", path, Some(patch)) if state.applies && made(path).is_some() => {
                state.apply(made(path).unwrap(), patch)
            }
            ("PATCH", path, Some(patch)) if path.contains("/services/") => state.patch(&named(path), &patch),
            ("PATCH", path, Some(patch)) if path.contains("/exposedclusters/") => {
                match &mut state.writes_left {
                    Some(0) => return failure(StatusCode::FORBIDDEN),
                    Some(left) => *left -= 1,
                    None => {}
                }
                state.apply("exposedclusters", patch)
            }
            // As by a webhook whose connection breaks, which has another port each time. Not for ever: a test
            // ends although its controller tries again at once.
            ("PATCH", path, _) if path.rsplit('/').nth(1) == Some("namespaces") => {
                state.version += 1;
                let message = format!("connection reset by peer: port {}", state.version.min(1_000));
                refusal(StatusCode::INTERNAL_SERVER_ERROR, &message)
            }
            ("PATCH", path, Some(patch)) if path.contains("/clusters/") => {
                let key = format!("clusters/{}", last_of(path.trim_end_matches("/status")));
                let mut cluster = state.objects[&key].clone();
                merge(&mut cluster, &patch);
                state.put("clusters", cluster);
                success(&state.objects[&key])
            }
            ("GET", path, _) if path.contains("/leases/") => match state.leases.get(last_of(path)) {
                Some(lease) => success(lease),
                None => failure(StatusCode::NOT_FOUND),
            },
            ("POST" | "PUT", path, Some(mut lease)) if path.contains("/leases") => {
                state.version += 1;
                lease["metadata"]["resourceVersion"] = state.version.to_string().into();
                let name = lease["metadata"]["name"].as_str().unwrap().to_owned();
                state.leases.insert(name, lease.clone());
                success(&lease)
            }
            ("POST" | "PATCH", path, Some(event)) if path.contains("/events") => {
                state.events.push(event.clone());
                success(&event)
            }
            (method, path, _) => panic!("unexpected request: {method} {path}?{query}"),
        }
    }
}

impl State {
    fn put(&mut self, plural: &str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let key = format!("{plural}/{}", key(&object));
        let kind = if self.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        self.objects.insert(key, object.clone());
        self.tell(kind, plural, &object);
    }

    fn patch(&mut self, name: &str, patch: &Value) -> Response<ResponseBody> {
        let Some(mut service) = self.objects.get(name).cloned() else {
            return failure(StatusCode::NOT_FOUND);
        };
        let is_status = patch.get("status").is_some();
        let version = &patch["metadata"]["resourceVersion"];
        let next = if is_status { None } else { self.fates.pop_front() };
        let fate = next.unwrap_or(Fate::Done);
        let is_outdated = !is_status && service["metadata"]["resourceVersion"] != *version;
        if is_outdated || fate == Fate::Conflict {
            return failure(StatusCode::CONFLICT);
        }
        merge(&mut service, patch);
        if !is_status {
            self.writes += 1;
            if let Some(webhook) = self.webhook {
                webhook(&mut service);
            }
        }
        self.put("services", service);
        if fate == Fate::Unknown {
            return failure(StatusCode::GATEWAY_TIMEOUT);
        }
        success(&self.objects[name])
    }

    /// A server-side apply by the only manager there is.
    fn apply(&mut self, plural: &str, mut object: Value) -> Response<ResponseBody> {
        self.writes += 1;
        let mut fields = fields(&object);
        for (part, name) in [("", "f:apiVersion"), ("", "f:kind"), ("/f:metadata", "f:name")] {
            fields.pointer_mut(part).unwrap().as_object_mut().unwrap().remove(name);
        }
        fields["f:metadata"].as_object_mut().unwrap().remove("f:namespace");
        if let Some(webhook) = self.webhook.filter(|_| plural == "services") {
            webhook(&mut object);
        }
        object["metadata"]["managedFields"] =
            json!([{"manager": "portico", "operation": "Apply", "fieldsV1": fields}]);
        let key = format!("{plural}/{}", key(&object));
        self.put(plural, object);
        success(&self.objects[&key])
    }

    fn tell(&mut self, kind: &str, plural: &str, object: &Value) {
        let line = line(&json!({"type": kind, "object": object}));
        self.watches.retain(|watch| watch.plural != plural || watch.lines.send(line.clone()).is_ok());
    }
}

/// A JSON merge patch (RFC 7396).
fn merge(object: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut object[key], value);
        }
    }
}

impl Service<Request<Body>> for FakeApi {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<ResponseBody>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&body).ok();
            Ok(api.answer(&head.method, head.uri.path(), head.uri.query().unwrap_or_default(), body))
        })
    }
}

/// The fields of a map as `FieldsV1` has them; lists are atomic.
fn fields(value: &Value) -> Value {
    let map = value.as_object().into_iter().flatten();
    Value::Object(map.map(|(key, value)| (format!("f:{key}"), fields(value))).collect())
}

/// `services/namespace/name` of a path.
fn named(path: &str) -> String {
    let parts: Vec<_> = path.trim_end_matches("/status").rsplit('/').collect();
    format!("services/{}/{}", parts[2], parts[0])
}

/// The kind of what is made for a cluster, by the path of one.
fn made(path: &str) -> Option<&'static str> {
    let plural = path.rsplit('/').nth(1)?;
    MADE.into_iter().find(|made| *made == plural)
}

/// The name at the end of a path.
fn last_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap()
}

/// `namespace/name`, or `name`.
fn key(object: &Value) -> String {
    let name = object["metadata"]["name"].as_str().unwrap();
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
}

fn response(
    status: StatusCode,
    frames: BoxStream<'static, Result<Frame<Bytes>, Infallible>>,
) -> Response<ResponseBody> {
    let mut response = Response::new(StreamBody::new(frames));
    *response.status_mut() = status;
    response
}

fn success(value: &Value) -> Response<ResponseBody> {
    let frame = Ok(Frame::data(line(value)));
    response(StatusCode::OK, futures_util::stream::iter([frame]).boxed())
}

fn failure(status: StatusCode) -> Response<ResponseBody> {
    refusal(status, "refused by the test")
}

fn refusal(status: StatusCode, message: &str) -> Response<ResponseBody> {
    let reason = match status {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::NOT_FOUND => "NotFound",
        _ => "Forbidden",
    };
    let value = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
        "message": message, "code": status.as_u16()});
    let mut failure = success(&value);
    *failure.status_mut() = status;
    failure
}
