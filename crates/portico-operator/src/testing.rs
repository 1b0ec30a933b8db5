//! An API server in memory, for tests of controllers on a paused clock.
//!
//! It lists, watches and merge-patches Services, keeps one Lease and collects Events. Tests beside a real API
//! server are in `tests/`.

use std::collections::BTreeMap;
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
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tower::Service;

type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// The API server. Clones share one state.
#[derive(Clone, Default)]
pub(crate) struct FakeApi(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    version: u64,
    /// By `namespace/name`.
    services: BTreeMap<String, Value>,
    lease: Option<Value>,
    events: Vec<Value>,
    watches: Vec<Watch>,
    writes: usize,
    /// Requests for Services get this status instead of an answer.
    refusal: Option<StatusCode>,
}

struct Watch {
    /// The `namespace/name` of a watch of one object.
    only: Option<String>,
    lines: UnboundedSender<Bytes>,
}

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        Client::new(self.clone(), "default")
    }

    /// Creates or replaces a Service.
    pub(crate) fn put(&self, mut service: Value) {
        let mut state = self.state();
        state.version += 1;
        service["metadata"]["resourceVersion"] = state.version.to_string().into();
        let kind = if state.services.contains_key(&key(&service)) { "MODIFIED" } else { "ADDED" };
        state.services.insert(key(&service), service.clone());
        state.tell(kind, &service);
    }

    /// Deletes the Service `namespace/name`.
    pub(crate) fn delete(&self, name: &str) {
        let mut state = self.state();
        let service = state.services.remove(name).unwrap();
        state.tell("DELETED", &service);
    }

    /// Deletes the Service `namespace/name` while all watches are broken, so that only a new list shows it.
    pub(crate) fn delete_unseen(&self, name: &str) {
        let mut state = self.state();
        state.services.remove(name).unwrap();
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

    /// The Service `namespace/name`.
    pub(crate) fn service(&self, name: &str) -> Value {
        self.state().services[name].clone()
    }

    /// How many writes of Services were accepted.
    pub(crate) fn writes(&self) -> usize {
        self.state().writes
    }

    /// The reasons of all Events.
    pub(crate) fn reasons(&self) -> Vec<String> {
        self.state().events.iter().map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
    }

    /// The holder of the Lease.
    pub(crate) fn holder(&self) -> Option<String> {
        let state = self.state();
        let holder = state.lease.as_ref()?["spec"]["holderIdentity"].as_str()?;
        Some(holder.to_owned())
    }

    /// Gives the Lease to a replica that is not there.
    pub(crate) fn hold_lease(&self, holder: &str) {
        self.state().lease = Some(json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "portico-front-portico", "namespace": "portico", "resourceVersion": "1"},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15},
        }));
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
        let only = query.contains("fieldSelector=metadata.name").then(|| "portico/portico".to_owned());
        match (method.as_str(), path, body) {
            ("GET", path, _) if path.ends_with("/services") && query.contains("watch=true") => {
                let (lines, received) = unbounded_channel();
                state.watches.push(Watch { only, lines });
                let frames = futures_util::stream::unfold(received, |mut received| async {
                    let line = received.recv().await?;
                    Some((Ok(Frame::data(line)), received))
                });
                response(StatusCode::OK, frames.boxed())
            }
            ("GET", path, _) if path.ends_with("/services") => {
                let items =
                    state.services.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == *name));
                let items: Vec<_> = items.map(|(_, service)| service.clone()).collect();
                success(&json!({"apiVersion": "v1", "kind": "ServiceList",
                    "metadata": {"resourceVersion": state.version.to_string()}, "items": items}))
            }
            ("PATCH", path, Some(patch)) if path.contains("/services/") => {
                state.patch("portico/portico", &patch)
            }
            ("GET", path, _) if path.contains("/leases/") => match &state.lease {
                Some(lease) => success(lease),
                None => failure(StatusCode::NOT_FOUND),
            },
            ("POST" | "PUT", path, Some(mut lease)) if path.contains("/leases") => {
                state.version += 1;
                lease["metadata"]["resourceVersion"] = state.version.to_string().into();
                state.lease = Some(lease.clone());
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
    fn patch(&mut self, name: &str, patch: &Value) -> Response<ResponseBody> {
        let Some(mut service) = self.services.get(name).cloned() else {
            return failure(StatusCode::NOT_FOUND);
        };
        if service["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"] {
            return failure(StatusCode::CONFLICT);
        }
        self.version += 1;
        self.writes += 1;
        service["metadata"]["resourceVersion"] = self.version.to_string().into();
        service["spec"]["ports"] = patch["spec"]["ports"].clone();
        self.services.insert(name.to_owned(), service.clone());
        self.tell("MODIFIED", &service);
        success(&service)
    }

    fn tell(&mut self, kind: &str, service: &Value) {
        let key = key(service);
        let line = line(&json!({"type": kind, "object": service}));
        self.watches.retain(|watch| {
            let concerned = watch.only.as_ref().is_none_or(|only| *only == key);
            !concerned || watch.lines.send(line.clone()).is_ok()
        });
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

fn key(service: &Value) -> String {
    let field = |name| service["metadata"][name].as_str().unwrap();
    format!("{}/{}", field("namespace"), field("name"))
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
    let reason = match status {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::NOT_FOUND => "NotFound",
        _ => "Forbidden",
    };
    let value = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
        "message": "refused by the test", "code": status.as_u16()});
    let mut failure = success(&value);
    *failure.status_mut() = status;
    failure
}
