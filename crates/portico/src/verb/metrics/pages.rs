//! What `portico metrics` serves.

use std::sync::Arc;

use http::header::HOST;
use http::uri::Authority;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::body::{stream, whole};
use portico_admin::exposition::Exposition;
use portico_admin::listing::Query;
use portico_admin::server::{Answer, Pages, text, typed};
use portico_api::names::ClusterName;
use portico_hosting::monitoring::{Labels, Source, Target};
use portico_operator::monitored::{Monitored, Scraper};
use serde::Serialize;

use super::counts::exposition;
use super::readiness;

/// Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Where the metrics of programs are, as `/scrape/CLUSTER/POD/PROGRAM`.
const SCRAPE: &str = "/scrape/";

/// The pages, and what they are made of.
pub(super) struct MetricsPages {
    known: Arc<Monitored>,
    scraper: Scraper,
    metrics: Arc<Exposition>,
}

/// A target as Prometheus' `http_sd_configs` reads it.
#[derive(Serialize)]
struct Group<'a> {
    targets: [&'a str; 1],
    labels: PathAndLabels<'a>,
}

#[derive(Serialize)]
struct PathAndLabels<'a> {
    #[serde(rename = "__metrics_path__")]
    path: String,
    #[serde(flatten)]
    labels: Labels<'a>,
}

impl<'a> Group<'a> {
    fn of(target: &'a Target, host: &'a str) -> Self {
        let (cluster, program) = (target.cluster.as_str(), target.source.name());
        let path = format!("{SCRAPE}{cluster}/{}/{program}", target.pod);
        Self { targets: [host], labels: PathAndLabels { path, labels: target.labels() } }
    }
}

impl Pages for MetricsPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => readiness(&self.known, Query::of(request.uri()).has("verbose")).answer(),
            "/metrics" => Arc::clone(&self.metrics).page(),
            "/targets" => self.targets(request),
            path => match path.strip_prefix(SCRAPE) {
                Some(of) => self.scrape(of).await,
                None => text(
                    StatusCode::NOT_FOUND,
                    format!(
                        "nothing is served at {path:?}; there are /targets, /scrape/CLUSTER/POD/PROGRAM, \
                         /healthz, /readyz and /metrics\n"
                    ),
                ),
            },
        }
    }
}

impl MetricsPages {
    pub(super) fn new(known: Arc<Monitored>) -> Self {
        let scraper = Scraper::default();
        let metrics = Arc::new(exposition(Arc::clone(&known), scraper.counts()));
        Self { known, scraper, metrics }
    }

    /// The targets, each at the address by which this process was asked: what reaches this reaches them.
    fn targets(&self, request: &Request<Incoming>) -> Answer {
        if !self.known.is_known() {
            // After an empty list Prometheus would drop all targets; after an error it keeps what it has.
            let waits = "the list of pods is not there yet; /readyz?verbose says why\n";
            return text(StatusCode::SERVICE_UNAVAILABLE, waits.into());
        }
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let Some(host) = host.and_then(|host| host.parse::<Authority>().ok()) else {
            return text(StatusCode::BAD_REQUEST, "the header Host names no host\n".into());
        };
        let targets = self.known.targets(Query::of(request.uri()).get("cluster").as_deref());
        let write = move |out: &mut dyn std::io::Write| {
            let groups: Vec<_> = targets.iter().map(|target| Group::of(target, host.as_str())).collect();
            Ok(serde_json::to_writer(out, &groups)?)
        };
        typed("application/json", stream(write))
    }

    async fn scrape(&self, of: &str) -> Answer {
        let mut parts = of.split('/');
        let named = (parts.next(), parts.next(), parts.next().and_then(Source::named), parts.next());
        let (Some(cluster), Some(pod), Some(source), None) = named else {
            return text(StatusCode::NOT_FOUND, "this is no /scrape/CLUSTER/POD/PROGRAM\n".into());
        };
        let cluster = ClusterName::new(cluster);
        let Some(target) = self.known.target(&cluster, pod, source) else {
            return text(StatusCode::NOT_FOUND, "there is no such program; /targets lists them\n".into());
        };
        let credentials = self.known.credentials(&cluster);
        match self.scraper.scrape(&target, credentials.as_deref()).await {
            Ok(kept) => typed(TEXT, whole(kept)),
            Err(error) => {
                let (pod, program) = (&target.pod, source.name());
                text(
                    StatusCode::BAD_GATEWAY,
                    format!("{program} in {}/{pod}: {error}\n", cluster.namespace()),
                )
            }
        }
    }
}
