//! The pages of a server: probes and metrics on its health port, as upstream, and lists on its admin port.

use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::exposition::Exposition;
use portico_admin::listing::{Query, Row, list};
use portico_admin::server::{Answer, Pages, text};
use portico_admin::table::{age, bytes};
use portico_konnectivity::server::{AgentRow, ConnectionRow, Status};
use portico_net::access::millis;
use serde::Serialize;

const HEALTH_INDEX: &str = "portico konnectivity server\n\n\
    /healthz             is the process alive\n\
    /readyz              has the first of --proxy-strategies an agent\n\
    /metrics             for Prometheus\n";

const ADMIN_INDEX: &str = "portico konnectivity server\n\n\
    /connections         what is open; ?o=table for people\n\
    /agents              the agents that are connected; ?o=table for people\n\
    /metrics             for Prometheus\n";

/// The health port.
#[derive(Debug)]
pub(super) struct HealthPages {
    status: Status,
    metrics: Arc<Exposition>,
}

impl HealthPages {
    pub(super) fn new(status: Status, metrics: Arc<Exposition>) -> Self {
        Self { status, metrics }
    }
}

impl Pages for HealthPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/" => text(StatusCode::OK, HEALTH_INDEX.into()),
            "/healthz" | "/livez" => text(StatusCode::OK, "ok".into()),
            "/readyz" | "/ready" => readiness(&self.status),
            "/metrics" => self.metrics.older_page(),
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{HEALTH_INDEX}")),
        }
    }
}

/// Status and words are upstream's: 500 without an agent of the first strategy.
fn readiness(status: &Status) -> Answer {
    if status.is_draining() {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "the server is about to stop".into());
    }
    if status.is_ready() {
        return text(StatusCode::OK, "ok".into());
    }
    text(StatusCode::INTERNAL_SERVER_ERROR, "no connection to any proxy agent".into())
}

/// The admin port.
#[derive(Debug)]
pub(super) struct AdminPages {
    status: Status,
    metrics: Arc<Exposition>,
}

impl AdminPages {
    pub(super) fn new(status: Status, metrics: Arc<Exposition>) -> Self {
        Self { status, metrics }
    }
}

impl Pages for AdminPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        let query = Query::of(request.uri());
        match request.uri().path() {
            "/" => text(StatusCode::OK, ADMIN_INDEX.into()),
            "/metrics" => self.metrics.older_page(),
            "/connections" => {
                let rows = self.status.connections();
                list(request, query, &rows.into_iter().map(Connection::from).collect::<Vec<_>>())
            }
            "/agents" => {
                list(request, query, &self.status.agents().into_iter().map(Agent::from).collect::<Vec<_>>())
            }
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{ADMIN_INDEX}")),
        }
    }
}

/// One connection to an endpoint.
#[derive(Debug, Serialize)]
struct Connection {
    address: String,
    agent: String,
    bytes_up: u64,
    bytes_down: u64,
    duration_ms: u64,
}

impl From<ConnectionRow> for Connection {
    fn from(row: ConnectionRow) -> Self {
        let ConnectionRow { address, agent, age, up, down } = row;
        Self { address, agent, bytes_up: up, bytes_down: down, duration_ms: millis(age) }
    }
}

impl Row<5> for Connection {
    const HEADER: [&'static str; 5] = ["AGENT", "UP", "DOWN", "AGE", "ENDPOINT"];

    fn row(&self) -> [String; 5] {
        let (up, down) = (bytes(self.bytes_up), bytes(self.bytes_down));
        [self.agent.clone(), up, down, age(self.duration_ms), self.address.clone()]
    }
}

/// One stream of an agent.
#[derive(Debug, Serialize)]
struct Agent {
    agent: String,
    downstream: SocketAddr,
    version: String,
    /// Whether connections have HTTP/2 streams of their own.
    streams: bool,
    draining: bool,
    dials: usize,
    last_seen_ms: u64,
    duration_ms: u64,
}

impl From<AgentRow> for Agent {
    fn from(row: AgentRow) -> Self {
        let AgentRow { agent, peer, version, native, draining, age, last_seen, dials } = row;
        Self {
            agent,
            downstream: peer,
            version,
            streams: native,
            draining,
            dials,
            last_seen_ms: millis(last_seen),
            duration_ms: millis(age),
        }
    }
}

impl Row<8> for Agent {
    const HEADER: [&'static str; 8] =
        ["AGENT", "DOWNSTREAM", "VERSION", "STREAMS", "STATE", "DIALS", "SEEN", "AGE"];

    fn row(&self) -> [String; 8] {
        [
            self.agent.clone(),
            self.downstream.to_string(),
            self.version.clone(),
            if self.streams { "own" } else { "shared" }.to_owned(),
            if self.draining { "draining" } else { "connected" }.to_owned(),
            self.dials.to_string(),
            age(self.last_seen_ms),
            age(self.duration_ms),
        ]
    }
}
