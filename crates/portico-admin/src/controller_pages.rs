//! The pages of a process that is a controller: probes, metrics, and its status as JSON.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde::Serialize;

use crate::body::stream;
use crate::exposition::Exposition;
use crate::listing::Query;
use crate::readiness::Readiness;
use crate::server::{Answer, Pages, text, typed};

/// `/healthz`, `/livez`, `/readyz`, `/metrics` and `/status` of a controller.
pub struct ControllerPages<F, S> {
    /// Returns what it is doing now.
    pub status: F,
    /// Whether that is ready; verbose on request.
    pub readiness: fn(&S, bool) -> Readiness,
    /// What `/metrics` has.
    pub metrics: Arc<Exposition>,
}

impl<F, S> Pages for ControllerPages<F, S>
where
    F: Fn() -> S + Send + Sync + 'static,
    S: Serialize + Send + 'static,
{
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => (self.readiness)(&(self.status)(), Query::of(request.uri()).has("verbose")).answer(),
            "/metrics" => Arc::clone(&self.metrics).page(),
            "/status" => {
                let status = (self.status)();
                typed("application/json", stream(move |out| Ok(serde_json::to_writer_pretty(out, &status)?)))
            }
            path => text(
                StatusCode::NOT_FOUND,
                format!("nothing is served at {path:?}; there are /healthz, /readyz, /metrics and /status\n"),
            ),
        }
    }
}
