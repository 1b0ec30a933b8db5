//! The pages of an agent: probes and metrics on its health port, as upstream, and lists on its admin port.

use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{HeaderValue, LOCATION};
use hyper::{Request, StatusCode};
use portico_admin::exposition::Exposition;
use portico_admin::listing::{Query, Row, list};
use portico_admin::server::{Answer, Pages, text};
use portico_admin::table::{age, bytes};
use portico_konnectivity::agent::{Agent, Record, Session};
use portico_net::access::millis;
use serde::Serialize;

use super::metrics::metrics;

const HEALTH_INDEX: &str = "portico konnectivity agent\n\n\
    /healthz             is the process alive\n\
    /readyz              is a server connected; ?verbose says more\n\
    /metrics             for Prometheus\n";

const ADMIN_INDEX: &str = "portico konnectivity agent\n\n\
    /connections         what is open; ?o=table for people\n\
    /servers             the servers that are connected; ?o=table for people\n\
    /metrics             moved to the health port\n";

/// The health port.
#[derive(Debug)]
pub(super) struct HealthPages {
    agent: Arc<Agent>,
    metrics: Exposition,
}

impl HealthPages {
    pub(super) fn new(agent: Arc<Agent>) -> Self {
        Self { metrics: metrics(Arc::clone(&agent)), agent }
    }
}

impl Pages for HealthPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        match request.uri().path() {
            "/" => text(StatusCode::OK, HEALTH_INDEX.into()),
            "/healthz" | "/livez" => text(StatusCode::OK, "ok".into()),
            "/readyz" | "/ready" => readiness(&self.agent, Query::of(request.uri()).has("verbose")),
            "/metrics" => self.metrics.older_page(),
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{HEALTH_INDEX}")),
        }
    }
}

/// The words are upstream's. One server is enough, however many there are; a draining agent is not ready.
fn readiness(agent: &Agent, verbose: bool) -> Answer {
    let problem = if agent.is_draining() {
        Some("the agent drains")
    } else if agent.staying_servers() == 0 {
        Some("no servers connected")
    } else {
        None
    };
    match problem {
        None if verbose => {
            text(StatusCode::OK, "[+]ping ok\n[+]server-connected ok\ncheck passed\n".to_owned())
        }
        None => text(StatusCode::OK, "ok".to_owned()),
        Some(why) => {
            let lines = format!("[+]ping ok\n[-]server-connected failed: {why}\ncheck failed\n");
            text(StatusCode::SERVICE_UNAVAILABLE, lines)
        }
    }
}

/// The admin port.
#[derive(Debug)]
pub(super) struct AdminPages {
    agent: Arc<Agent>,
    health: Option<SocketAddr>,
}

impl AdminPages {
    pub(super) fn new(agent: Arc<Agent>, health: Option<SocketAddr>) -> Self {
        Self { agent, health }
    }

    /// Metrics are on the health port, on the host by which this one was reached.
    fn moved(&self, request: &Request<Incoming>) -> Answer {
        let mut answer = text(StatusCode::MOVED_PERMANENTLY, "metrics are on the health port\n".into());
        let host = request.headers().get("host").and_then(|host| host.to_str().ok()).unwrap_or("localhost");
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        let port = self.health.map_or(0, |address| address.port());
        if let Ok(location) = HeaderValue::try_from(format!("http://{host}:{port}/metrics")) {
            answer.headers_mut().insert(LOCATION, location);
        }
        answer
    }
}

impl Pages for AdminPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        let query = Query::of(request.uri());
        match request.uri().path() {
            "/" => text(StatusCode::OK, ADMIN_INDEX.into()),
            "/metrics" => self.moved(request),
            "/connections" => list(request, query, &connections(&self.agent)),
            "/servers" => list(request, query, &servers(&self.agent)),
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{ADMIN_INDEX}")),
        }
    }
}

/// One connection to an endpoint.
#[derive(Debug, Serialize)]
struct Connection {
    server: Arc<str>,
    address: Box<str>,
    /// Whether it has an HTTP/2 stream of its own.
    stream: bool,
    bytes_up: u64,
    bytes_down: u64,
    duration_ms: u64,
}

impl From<&Record> for Connection {
    fn from(record: &Record) -> Self {
        Self {
            server: Arc::clone(&record.server),
            address: record.address.clone(),
            stream: record.has_stream,
            bytes_up: record.bytes_up(),
            bytes_down: record.bytes_down(),
            duration_ms: millis(record.since.elapsed()),
        }
    }
}

impl Row<6> for Connection {
    const HEADER: [&'static str; 6] = ["SERVER", "STREAM", "UP", "DOWN", "AGE", "ENDPOINT"];

    fn row(&self) -> [String; 6] {
        [
            self.server.to_string(),
            if self.stream { "own" } else { "shared" }.to_owned(),
            bytes(self.bytes_up),
            bytes(self.bytes_down),
            age(self.duration_ms),
            self.address.to_string(),
        ]
    }
}

/// What is open now, the oldest first.
fn connections(agent: &Agent) -> Vec<Connection> {
    let mut records = agent.connections();
    records.sort_unstable_by_key(|record| record.since);
    records.iter().map(|record| Connection::from(&**record)).collect()
}

/// One connection to a server.
#[derive(Debug, Serialize)]
struct Server {
    server: Arc<str>,
    upstream: SocketAddr,
    /// Whether connections have HTTP/2 streams of their own.
    streams: bool,
    /// Whether it takes no new connections.
    leaving: bool,
    connections: usize,
    duration_ms: u64,
}

impl From<&Session> for Server {
    fn from(session: &Session) -> Self {
        Self {
            server: Arc::clone(session.server()),
            upstream: session.address(),
            streams: session.has_streams(),
            leaving: session.is_leaving(),
            connections: session.connections(),
            duration_ms: millis(session.since().elapsed()),
        }
    }
}

impl Row<6> for Server {
    const HEADER: [&'static str; 6] = ["SERVER", "UPSTREAM", "STREAMS", "STATE", "CONNECTIONS", "AGE"];

    fn row(&self) -> [String; 6] {
        [
            self.server.to_string(),
            self.upstream.to_string(),
            if self.streams { "own" } else { "shared" }.to_owned(),
            if self.leaving { "leaving" } else { "connected" }.to_owned(),
            self.connections.to_string(),
            age(self.duration_ms),
        ]
    }
}

fn servers(agent: &Agent) -> Vec<Server> {
    agent.servers().iter().map(|session| Server::from(&**session)).collect()
}
