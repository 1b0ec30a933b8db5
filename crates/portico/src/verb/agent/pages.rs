//! The pages of an agent's admin listener: readiness, metrics, connections, tunnels. Each page is short and
//! made at once, so that no thread is started for it.

use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use portico_admin::exposition::Exposition;
use portico_admin::listing::{Query, Row, list};
use portico_admin::readiness::Readiness;
use portico_admin::server::{Answer, Pages, text};
use portico_admin::table::{age, bytes};
use portico_agent::{Agent, Record};
use portico_net::ConnectionId;
use portico_net::access::millis;
use portico_tunnel::client::{IdentityState, TunnelStatus};
use serde::Serialize;

use super::metrics::agent_metrics;
use super::status::{Status, identity, state};

const INDEX: &str = "portico agent\n\n\
    /healthz             is the process alive\n\
    /readyz              does it carry connections; ?verbose says what stands in the way; \
                         ?instance=NAME only counts if that is its name\n\
    /metrics             for Prometheus\n\
    /connections         what is open, or waits for a gateway; ?o=table for people\n\
    /tunnels             the connections to gateways; ?o=table for people\n";

/// What an agent says about itself.
#[derive(Debug)]
pub(crate) struct AgentPages {
    status: Arc<Status>,
    metrics: Exposition,
}

impl AgentPages {
    pub(crate) fn new(status: Arc<Status>) -> Self {
        Self { metrics: agent_metrics(Arc::clone(&status)), status }
    }
}

impl Pages for AgentPages {
    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        let query = Query::of(request.uri());
        match request.uri().path() {
            "/" => text(StatusCode::OK, INDEX.into()),
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n".into()),
            "/readyz" => readiness(&self.status, query),
            "/metrics" => self.metrics.whole_page(),
            "/connections" => list(request, query, &connections(&self.status)),
            "/tunnels" => list(request, query, &tunnels(&self.status)),
            path => text(StatusCode::NOT_FOUND, format!("nothing is served at {path:?}\n\n{INDEX}")),
        }
    }
}

fn readiness(status: &Status, query: Query<'_>) -> Answer {
    let asked = query.get("instance");
    if let Some(asked) = asked.as_deref()
        && status.instance.as_deref() != Some(asked)
    {
        let own = status.instance.as_deref().unwrap_or("without a name");
        let message = format!("not ready: asked for the agent {asked:?}, and this is the agent {own:?}\n");
        return text(StatusCode::SERVICE_UNAVAILABLE, message);
    }
    let verbose = query.has("verbose");
    let mut readiness = Readiness::new(true);
    // A probe that fails says why: `portico agent ready` prints it.
    for check in status.checks().iter().filter(|check| verbose || !check.passed) {
        readiness.check(check.name, check.passed, &check.detail);
    }
    if verbose {
        for problem in status.file_problems() {
            readiness.warn(format_args!("{problem}; the old one stays in force"));
        }
        if status.plaintext_gateways > 0 {
            readiness.warn(format_args!("{} gateways are reached without TLS", status.plaintext_gateways));
        }
    }
    readiness.answer()
}

/// One connection. Field names are those of the access line.
#[derive(Debug, Serialize)]
struct Connection {
    connection: ConnectionId,
    forward: SocketAddr,
    client: SocketAddr,
    name: Box<str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<SocketAddr>,
    bytes_up: u64,
    bytes_down: u64,
    duration_ms: u64,
}

impl Connection {
    fn new(agent: &Agent, record: &Record) -> Self {
        let (shared, upstream) = (agent.shared(), record.upstream());
        Self {
            connection: record.id,
            forward: record.forward().listen,
            client: record.client,
            name: record.forward().authority.clone(),
            gateway: upstream.and_then(|upstream| shared.gateway_name(upstream)).map(Into::into),
            upstream: upstream.map(|upstream| upstream.address),
            bytes_up: record.bytes_up(),
            bytes_down: record.bytes_down(),
            duration_ms: millis(shared.now().saturating_sub(record.accepted)),
        }
    }
}

impl Row<7> for Connection {
    const HEADER: [&'static str; 7] = ["FORWARD", "CLIENT", "UPSTREAM", "UP", "DOWN", "AGE", "NAME"];

    fn row(&self) -> [String; 7] {
        [
            self.forward.to_string(),
            self.client.to_string(),
            self.upstream.map_or_else(|| "waiting".to_owned(), |address| address.to_string()),
            bytes(self.bytes_up),
            bytes(self.bytes_down),
            age(self.duration_ms),
            self.name.to_string(),
        ]
    }
}

/// What is open now, the oldest first.
fn connections(status: &Status) -> Vec<Connection> {
    let Some(agent) = status.agent() else { return Vec::new() };
    let mut records = agent.shared().connections();
    records.sort_unstable_by_key(|record| record.accepted);
    records.iter().map(|record| Connection::new(agent, record)).collect()
}

/// One tunnel, or the attempt to have one.
#[derive(Debug, Serialize)]
struct Tunnel {
    gateway: Option<String>,
    upstream: Option<SocketAddr>,
    state: &'static str,
    streams: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
    identity: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn tunnels(status: &Status) -> Vec<Tunnel> {
    status.tunnels().into_iter().map(Tunnel::from).collect()
}

impl From<TunnelStatus> for Tunnel {
    fn from(tunnel: TunnelStatus) -> Self {
        let refused = match &tunnel.identity {
            IdentityState::Refused { status, reason } => Some(format!("{status}: {reason}")),
            IdentityState::Accepted | IdentityState::Unknown => None,
        };
        Self {
            state: state(&tunnel),
            identity: identity(&tunnel),
            upstream: tunnel.address,
            streams: tunnel.streams,
            duration_ms: tunnel.age.map(millis),
            error: tunnel.error.or(refused),
            gateway: tunnel.gateway,
        }
    }
}

impl Row<7> for Tunnel {
    const HEADER: [&'static str; 7] = ["GATEWAY", "UPSTREAM", "STATE", "STREAMS", "AGE", "IDENTITY", "ERROR"];

    fn row(&self) -> [String; 7] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            or_dash(self.gateway.clone()),
            or_dash(self.upstream.map(|address| address.to_string())),
            self.state.to_owned(),
            self.streams.to_string(),
            or_dash(self.duration_ms.map(age)),
            self.identity.to_owned(),
            or_dash(self.error.clone()),
        ]
    }
}
