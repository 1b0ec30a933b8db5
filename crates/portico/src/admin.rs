//! The admin listener: what this process is doing, for probes, Prometheus, people and scripts.
//!
//! [`server`] answers requests within bounds and [`body`] sends long answers piece by piece, for any verb that has such a
//! listener. The rest is the gateway's: [`health`] says whether it is ready, [`metrics`] counts, [`connections`] lists what is open;
//! `/routes` is the listing of `portico routes` ([`crate::listing`]).
//!
//! It serves whoever reaches it, so it is loopback unless told otherwise, and it only ever reads.

pub(crate) mod body;
mod connections;
pub(crate) mod exposition;
mod health;
mod metrics;
pub(crate) mod process;
pub(crate) mod server;

use std::io;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::ACCEPT;
use hyper::{Request, StatusCode};

use self::body::stream;
use self::exposition::Exposition;
use self::metrics::gateway_metrics;
use self::server::{Answer, Pages, text, typed};
use crate::outcome::OutputFormat;
use crate::status::Status;

const INDEX: &str = "portico gateway\n\n\
    /healthz             is the process alive\n\
    /readyz              does it serve; ?verbose says what stands in the way, and what is wrong with objects\n\
    /metrics             for Prometheus\n\
    /routes              what is exposed, where, by which object; ?o=table for people, ?cluster=NAME for one\n\
    /connections         what is open; ?o=table for people, ?cluster=NAME for one\n";

/// What a gateway says about itself.
#[derive(Debug)]
pub(crate) struct GatewayPages {
    status: Arc<Status>,
    metrics: Arc<Exposition>,
}

impl GatewayPages {
    pub(crate) fn new(status: Arc<Status>) -> Self {
        Self { metrics: Arc::new(gateway_metrics(Arc::clone(&status))), status }
    }
}

impl Pages for GatewayPages {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        let query = Query(request.uri().query().unwrap_or_default());
        match request.uri().path() {
            "/" => text(StatusCode::OK, INDEX.into()),
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => {
                let readiness = health::readiness(&self.status, query.has("verbose"));
                let code = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                text(code, readiness.text)
            }
            "/metrics" => Arc::clone(&self.metrics).page(),
            "/routes" => {
                let mut listing = self.status.listing();
                if let Some(cluster) = query.get("cluster") {
                    listing.keep_only(cluster);
                    if listing.is_empty() {
                        let told = format!(
                            "no cluster {cluster:?} is exposed, planned or in conflict; /routes has those that are\n"
                        );
                        return text(StatusCode::NOT_FOUND, told);
                    }
                }
                list(request, query, move |format, out| listing.write(format, out))
            }
            "/connections" => {
                let connections =
                    connections::list(self.status.gateway().map(Arc::as_ref), query.get("cluster"));
                list(request, query, move |format, out| connections::write(&connections, format, out))
            }
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{INDEX}")),
        }
    }
}

/// A listing in the form asked for.
fn list(
    request: &Request<Incoming>,
    query: Query<'_>,
    write: impl FnOnce(OutputFormat, &mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> Answer {
    match format_of(request, query) {
        Ok(format) => typed(content_type(format), stream(move |out| write(format, out))),
        Err(told) => text(StatusCode::BAD_REQUEST, told),
    }
}

/// The form of a listing that is asked for, by `?o=table`, or by `Accept: text/plain`, or else JSON; a sentence if there is none such.
pub(crate) fn format_of(request: &Request<Incoming>, query: Query<'_>) -> Result<OutputFormat, String> {
    let wants_text = request
        .headers()
        .get(ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.starts_with("text/"));
    match query.get("o") {
        None if wants_text => Ok(OutputFormat::Table),
        None | Some("json") => Ok(OutputFormat::Json),
        Some("table") => Ok(OutputFormat::Table),
        Some(other) => Err(format!("o={other:?} is no format; give table or json\n")),
    }
}

/// The media type of a listing.
pub(crate) fn content_type(format: OutputFormat) -> &'static str {
    match format {
        OutputFormat::Table => "text/plain; charset=utf-8",
        OutputFormat::Json => "application/json",
    }
}

/// The query of a request. Names and values served here need no escapes, so none are undone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Query<'a>(pub(crate) &'a str);

impl<'a> Query<'a> {
    fn pairs(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }

    pub(crate) fn has(self, name: &str) -> bool {
        self.pairs().any(|(key, _)| key == name)
    }

    pub(crate) fn get(self, name: &str) -> Option<&'a str> {
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
