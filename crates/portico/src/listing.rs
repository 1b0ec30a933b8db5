//! The listing of clusters and routes, one for `portico routes` and `/routes`. It says what would be exposed
//! and where, by which object and to which endpoints, and what stands in the way.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use portico_admin::listing::OutputFormat;
use portico_admin::table::{self, bytes};
use portico_api::cluster::Address;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::names::{ClusterName, Tenant};
use portico_api::policy::Percent;
use portico_api::strategy::ExposeStrategy;
use portico_expose::plan::Plan;
use portico_expose::resolve::DecidedBy;
use portico_expose::strategy::{self, AnsweredBy};
use portico_gateway::{Cluster, Gateway, Upstream, Use};
use portico_routes::route::{BackendId, RouteKey};
use portico_routes::rows::{NoEndpoints, RouteRow, RouteState};
use portico_sync::Pipeline;
use serde::Serialize;

use crate::finding::Finding;

/// NodePorts listed in the note below the table; JSON has all.
const MOST_PORTS: usize = 8;
/// Endpoints shown in a cell of the table; JSON has all.
const MOST_ENDPOINTS: usize = 3;

const CLUSTER_HEADER: [&str; 6] = ["CLUSTER", "STRATEGY", "DECIDED BY", "SEED", "ADDRESS", "ANSWERED BY"];

const SHARE_HEADER: [&str; 7] =
    ["CLUSTER", "OPEN", "TUNNELS", "FAIR SHARE", "MEMORY", "DESCRIPTORS", "HELD BYTES"];

/// What is exposed. The names of the fields are stable.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Listing {
    /// By name. A user cluster without a `Cluster` object is known by its routes only.
    clusters: Vec<ClusterRow>,
    /// The use of a running gateway by each cluster with connections, by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shares: Vec<Share>,
    /// By Service, then in the order of its ports.
    routes: Vec<Row>,
    /// What is wrong, as `portico check` lists it.
    problems: Vec<Finding>,
    /// NodePorts in `routes` that no gateway has remembered yet.
    #[serde(rename = "drawnNodePorts", skip_serializing_if = "Vec::is_empty")]
    drawn: Vec<u16>,
}

/// A route, and what a running gateway knows of its endpoints.
#[derive(Debug, Clone, Serialize)]
struct Row {
    #[serde(flatten)]
    route: RouteRow,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failing: Vec<Failing>,
}

/// An endpoint that is ready by its EndpointSlice, and did not accept connections lately.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Failing {
    endpoint: SocketAddr,
    /// Attempts in a row.
    failures: u32,
    /// For so long it is tried only where there is no other; at 0 the next connection probes it.
    skipped_ms: u64,
}

/// The use of a running gateway by a cluster, and the most that it may take now.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Share {
    cluster: Tenant,
    /// Connections and tunnel streams.
    open_connections: u32,
    /// HTTP/2 connections of its node agents.
    tunnels: u32,
    /// The part of what all others leave that it may take, in percent.
    fair_share: Percent,
    memory_bytes: Use,
    descriptors: Use,
    held_bytes: Use,
}

/// A user cluster that is planned from its `Cluster` object.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClusterRow {
    cluster: ClusterName,
    strategy: ExposeStrategy,
    /// Absent where an ExposedCluster says it, which is resolved.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_by: Option<DecidedBy>,
    seed: Box<str>,
    /// Empty while it is not known.
    url: Box<str>,
    /// `status.address` as a whole.
    address: Address,
    answered_by: AnsweredBy,
    /// The seed's nodes, as far as known, where they answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    node_ips: Vec<IpAddr>,
}

impl Listing {
    /// Everything there is.
    pub(crate) fn of(pipeline: &Pipeline, problems: Vec<Finding>) -> Self {
        Self {
            clusters: pipeline
                .plans()
                .map(ClusterRow::of)
                .chain(pipeline.exposed().map(ClusterRow::of_exposed))
                .collect(),
            shares: Vec::new(),
            routes: pipeline.rows().map(Row::of).collect(),
            problems,
            drawn: Vec::new(),
        }
    }

    /// Says that the NodePorts `drawn` may be others where a gateway draws them.
    pub(crate) fn with_drawn(mut self, drawn: &[u16]) -> Self {
        let shown = |port: &&u16| self.routes.iter().any(|row| row.route.key == RouteKey::Port(**port));
        self.drawn = drawn.iter().filter(shown).copied().collect();
        self.drawn.sort_unstable();
        self
    }

    /// Adds the facts of a running gateway: listeners that cannot be opened, endpoints that fail, and the
    /// clusters' shares of it.
    pub(crate) fn observe(&mut self, gateway: &Gateway) {
        self.shares =
            gateway.shared().route_store.clusters().iter().filter_map(|cluster| Share::of(cluster)).collect();
        self.shares.sort_unstable_by(|a, b| a.cluster.cmp(&b.cluster));
        for failed in gateway.failed_node_ports() {
            let of_it = |row: &&mut Row| {
                row.route.key == RouteKey::Port(failed.port) && row.route.backend == failed.backend
            };
            if let Some(row) = self.routes.iter_mut().find(of_it) {
                row.route.state = RouteState::ListenerFailed { error: failed.error };
            }
        }
        let now = gateway.shared().now();
        let upstreams = gateway.shared().route_store.upstreams();
        let failing = upstreams.iter().filter_map(|upstream| {
            let failing = Failing::of(upstream, now);
            (!failing.is_empty()).then(|| (upstream.id(), failing))
        });
        let failing: HashMap<BackendId, Vec<Failing>> = failing.collect();
        for row in &mut self.routes {
            if let Some(endpoints) = failing.get(&row.route.backend) {
                row.failing.clone_from(endpoints);
            }
        }
    }

    /// The rows of the tenant that reads as `name`.
    pub(crate) fn only(&self, name: &str) -> Self {
        fn of<T: Clone>(rows: &[T], is_of: impl Fn(&T) -> bool) -> Vec<T> {
            rows.iter().filter(|row| is_of(row)).cloned().collect()
        }
        let tenant = Tenant::of_text(name);
        Self {
            clusters: of(&self.clusters, |row| row.cluster.as_str() == name),
            shares: of(&self.shares, |share| share.cluster == tenant),
            routes: of(&self.routes, |row| row.route.tenant == tenant),
            problems: of(&self.problems, |problem| problem.is_of(&tenant)),
            drawn: self.drawn.clone(),
        }
    }

    /// Whether nothing is listed.
    pub(crate) fn is_empty(&self) -> bool {
        self.clusters.is_empty() && self.routes.is_empty() && self.problems.is_empty()
    }

    /// Writes the listing.
    pub(crate) fn write(&self, format: OutputFormat, out: &mut dyn Write) -> io::Result<()> {
        match format {
            OutputFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, self)?;
                out.write_all(b"\n")
            }
            OutputFormat::Table => {
                if !self.clusters.is_empty() {
                    let rows: Vec<_> = self.clusters.iter().map(ClusterRow::cells).collect();
                    let text = table::render(CLUSTER_HEADER, &rows);
                    out.write_all(text.as_bytes())?;
                    out.write_all(b"\n")?;
                }
                if !self.shares.is_empty() {
                    let rows: Vec<_> = self.shares.iter().map(Share::cells).collect();
                    let text = table::render(SHARE_HEADER, &rows);
                    out.write_all(text.as_bytes())?;
                    out.write_all(b"\n")?;
                }
                let header = ["CLUSTER", "BY", "KEY", "SERVICE PORT", "STATE", "ALLOWED", "ENDPOINTS"];
                let rows: Vec<_> = self.routes.iter().map(row).collect();
                out.write_all(table::render(header, &rows).as_bytes())?;
                if !self.drawn.is_empty() {
                    out.write_all(drawn_note(&self.drawn).as_bytes())?;
                }
                if !self.problems.is_empty() {
                    out.write_all(b"\nPROBLEMS\n")?;
                }
                self.problems.iter().try_for_each(|problem| out.write_all(problem.to_line().as_bytes()))
            }
        }
    }
}

impl Row {
    fn of(route: RouteRow) -> Self {
        Self { route, failing: Vec::new() }
    }
}

impl Failing {
    fn of(upstream: &Upstream, now: Duration) -> Vec<Self> {
        let endpoints = upstream.endpoints();
        let failing = endpoints.iter().filter(|endpoint| endpoint.is_failing()).map(|endpoint| Self {
            endpoint: endpoint.address,
            failures: endpoint.failures(),
            skipped_ms: endpoint
                .skipped_for(now)
                .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        });
        failing.collect()
    }
}

impl Share {
    /// `None` for one that takes nothing.
    fn of(cluster: &Cluster) -> Option<Self> {
        let (used, now) = (cluster.share_use(), cluster.snapshot());
        (!used.is_idle()).then(|| Self {
            cluster: cluster.name.clone(),
            open_connections: now.open,
            tunnels: now.tunnels,
            fair_share: used.part,
            memory_bytes: used.memory,
            descriptors: used.descriptors,
            held_bytes: used.held,
        })
    }

    fn cells(&self) -> [String; 7] {
        let of = |used: Use| format!("{} of {}", bytes(used.taken as u64), bytes(used.most as u64));
        [
            self.cluster.to_string(),
            self.open_connections.to_string(),
            self.tunnels.to_string(),
            format!("{} %", self.fair_share),
            of(self.memory_bytes),
            format!("{} of {}", self.descriptors.taken, self.descriptors.most),
            of(self.held_bytes),
        ]
    }
}

impl ClusterRow {
    fn of(plan: Plan) -> Self {
        Self {
            cluster: plan.cluster,
            strategy: plan.decision.strategy,
            decided_by: Some(plan.decision.decided_by),
            seed: plan.seed,
            url: plan.address.url.clone(),
            address: plan.address,
            answered_by: plan.answered_by,
            node_ips: plan.node_ips,
        }
    }

    fn of_exposed(cluster: &ExposedCluster) -> Self {
        let spec = &cluster.spec;
        Self {
            cluster: cluster.name(),
            strategy: spec.expose_strategy,
            decided_by: None,
            seed: spec.seed.clone(),
            url: spec.address.url.clone(),
            address: spec.address.clone(),
            answered_by: strategy::of(spec.expose_strategy).answered_by(spec),
            node_ips: Vec::new(),
        }
    }

    fn cells(&self) -> [String; 6] {
        let address = if self.url.is_empty() { "not known yet" } else { &self.url };
        [
            self.cluster.to_string(),
            self.strategy.to_string(),
            self.decided_by.map_or_else(|| "ExposedCluster".to_owned(), |level| level.to_string()),
            self.seed.to_string(),
            address.to_owned(),
            self.reached_on(),
        ]
    }

    /// Where the name in the address must lead.
    fn reached_on(&self) -> String {
        let nodes: Vec<String> = self.node_ips.iter().map(ToString::to_string).collect();
        match self.answered_by {
            AnsweredBy::SeedNodes if nodes.is_empty() => "seed nodes; --node-address is not given".to_owned(),
            AnsweredBy::SeedNodes => format!("seed nodes {}", nodes.join(",")),
            other => other.to_string(),
        }
    }
}

fn row(Row { route: row, failing }: &Row) -> [String; 7] {
    let (by, key) = match &row.key {
        RouteKey::Port(port) => ("port", port.to_string()),
        RouteKey::Host(host) => ("host", host.to_string()),
        RouteKey::Authority(authority) => ("authority", authority.to_string()),
    };
    [
        row.tenant.to_string(),
        by.to_owned(),
        key,
        row.backend.to_string(),
        state(row),
        row.policy.allow.to_string(),
        endpoints(row, failing.len()),
    ]
}

fn drawn_note(ports: &[u16]) -> String {
    let shown: Vec<String> = ports.iter().take(MOST_PORTS).map(ToString::to_string).collect();
    let more = match ports.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "\nNodePorts drawn for this answer, as no gateway has remembered any for these Services; one may \
         draw others: {}{more}\n",
        shown.join(", ")
    )
}

fn state(row: &RouteRow) -> String {
    match &row.state {
        RouteState::Ready => "ready".to_owned(),
        RouteState::NotReady => "not ready".to_owned(),
        RouteState::Conflict { winner } => format!("conflict: {winner} has it"),
        RouteState::Kept { tenant } => format!("kept for {tenant}, which had it"),
        RouteState::ListenersOff => "off: nodeport-proxy is disabled".to_owned(),
        RouteState::ListenerFailed { error } => format!("cannot be opened: {error}"),
    }
}

fn no_endpoints(why: &NoEndpoints, port: &str) -> String {
    match why {
        NoEndpoints::NoSlice => "no EndpointSlice names this Service".to_owned(),
        NoEndpoints::NoPort { found } if found.is_empty() => {
            format!("no EndpointSlice has TCP port {port:?}, nor any other")
        }
        NoEndpoints::NoPort { found } => {
            let found: Vec<String> = found.iter().map(|name| format!("{name:?}")).collect();
            format!("no EndpointSlice has TCP port {port:?}, only {}", found.join(", "))
        }
        NoEndpoints::Empty => "its EndpointSlices are empty".to_owned(),
        NoEndpoints::Refused => "no address in its EndpointSlices may be an endpoint".to_owned(),
    }
}

fn endpoints(row: &RouteRow, failing: usize) -> String {
    let shown: Vec<String> = row.endpoints.iter().take(MOST_ENDPOINTS).map(ToString::to_string).collect();
    let hidden = row.endpoints.len() - shown.len();
    let not_ready = row.endpoints_total - row.endpoints.len();
    let mut text = match &row.no_endpoints {
        Some(why) => format!("none: {}", no_endpoints(why, &row.backend.port_name)),
        None if shown.is_empty() => "none ready".to_owned(),
        None => shown.join(","),
    };
    if hidden > 0 {
        text.push_str(&format!(" +{hidden}"));
    }
    if failing > 0 {
        text.push_str(&format!(" ({failing} failing)"));
    }
    if not_ready > 0 {
        text.push_str(&format!(" ({not_ready} not ready)"));
    }
    text
}
