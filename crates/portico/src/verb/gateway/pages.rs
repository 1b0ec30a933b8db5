//! What the admin listener of a gateway serves.

use std::borrow::Cow;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::exposition::Exposition;
use portico_admin::listing::{self, Query};
use portico_admin::recent::Recent;
use portico_admin::server::{Answer, Pages, text};

use super::connections::Connection;
use super::doors::Doors;
use super::metrics::gateway_metrics;
use super::status::Status;
use super::{connections, doors, health};
use crate::listing::Listing;

const INDEX: &str = "portico gateway

/healthz             is the process alive
/readyz              does it serve; ?verbose says what stands in the way, and what is wrong with objects
/metrics             for Prometheus
/routes              what is exposed, where, by which object; ?o=table for people, ?cluster=NAME for one
/connections         what is open; ?o=table for people, ?cluster=NAME for one
/doors               clients by kind of listener; ?o=table for people, ?cluster=NAME for one
";

/// What a gateway says about itself.
#[derive(Debug)]
pub(crate) struct GatewayPages {
    status: Arc<Status>,
    metrics: Arc<Exposition>,
    routes: Recent<Listing>,
    connections: Recent<Vec<Connection>>,
    doors: Recent<Vec<Doors>>,
}

impl GatewayPages {
    pub(crate) fn new(status: Arc<Status>) -> Self {
        let metrics = Arc::new(gateway_metrics(Arc::clone(&status)));
        let (routes, connections, doors) = (Recent::default(), Recent::default(), Recent::default());
        Self { status, metrics, routes, connections, doors }
    }
}

impl Pages for GatewayPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        let query = Query::of(request.uri());
        match request.uri().path() {
            "/" => text(StatusCode::OK, INDEX.into()),
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => health::readiness(&self.status, query.has("verbose")).answer(),
            "/metrics" => Arc::clone(&self.metrics).page(),
            "/routes" => {
                let mut routes = self.routes.get(|| self.status.listing());
                if let Some(cluster) = query.get("cluster") {
                    routes = Arc::new(routes.only(&cluster));
                    if routes.is_empty() {
                        let message = format!(
                            "no cluster {cluster:?} is exposed, planned or in conflict; /routes has those \
                             that are\n"
                        );
                        return text(StatusCode::NOT_FOUND, message);
                    }
                }
                listing::answer(query, request.headers(), move |format, out| routes.write(format, out))
            }
            "/connections" => {
                let gateway = self.status.gateway();
                let connections = self.connections.get(|| connections::list(gateway.map(Arc::as_ref)));
                let cluster = query.get("cluster").map(Cow::into_owned);
                listing::answer(query, request.headers(), move |format, out| {
                    connections::write(&connections, cluster.as_deref(), format, out)
                })
            }
            "/doors" => {
                let gateway = self.status.gateway();
                let doors = self.doors.get(|| doors::list(gateway.map(Arc::as_ref)));
                let cluster = query.get("cluster").map(Cow::into_owned);
                listing::answer(query, request.headers(), move |format, out| {
                    doors::write(&doors, cluster.as_deref(), format, out)
                })
            }
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{INDEX}")),
        }
    }
}
