//! `/metrics` in the OpenMetrics text format. Names, labels and units are a promise, listed in
//! `docs/operations.md`.
//!
//! Nothing is counted here: at each scrape the counters of the data plane are read and written down. Per
//! cluster, reasons that never occurred are left out: with 10,000 clusters they would be most of the answer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use portico_admin::exposition::{Exposition, Families};
use portico_admin::process::Process;
use portico_api::listener::ListenerKind;
use portico_api::names::Tenant;
use portico_gateway::{
    Cluster, ClusterSnapshot, End, Gateway, HANDSHAKE_BUCKETS, Method, OUTCOMES, REVIEW_BUCKETS, Refusal,
};
use portico_source::kubernetes::WatchState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::status::Status;
use super::tunnel_files::{self, TunnelFile};

/// The metrics of one gateway.
pub(super) fn gateway_metrics(status: Arc<Status>) -> Exposition {
    Exposition::of(GatewayMetrics { status, bytes: Mutex::default() })
}

/// Bytes of one cluster, up and down.
#[derive(Debug, Clone, Copy, Default)]
struct Bytes {
    up: u64,
    down: u64,
}

#[derive(Debug)]
struct GatewayMetrics {
    status: Arc<Status>,
    /// The most that was ever reported. Open connections are added to those that ended. One that ends
    /// meanwhile may be seen in neither or in both. A counter that falls would look like a restart.
    bytes: Mutex<HashMap<Tenant, Bytes>>,
}

impl Collector for GatewayMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(encoder);
        self.write_process(&mut out)?;
        self.write_source(&mut out)?;
        let Some(gateway) = self.status.gateway() else { return Ok(()) };
        write_totals(gateway, &mut out)?;
        self.write_tunnel(gateway, &mut out)?;
        self.write_table(gateway, &mut out)?;
        self.write_clusters(gateway, &mut out)
    }
}

impl GatewayMetrics {
    fn write_process(&self, out: &mut Families<'_>) -> fmt::Result {
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        out.one_gauge(
            "ready",
            "1 if new connections are welcome: what /readyz says.",
            None,
            u64::from(self.status.is_ready()),
        )?;
        out.one_gauge("stopping", "1 from SIGTERM on.", None, u64::from(self.status.is_stopping()))?;
        Process::now().write(out)
    }

    /// How the watches of a Kubernetes API are. A gateway that drains has none any more.
    fn write_source(&self, out: &mut Families<'_>) -> fmt::Result {
        if self.status.is_stopping() {
            return Ok(());
        }
        let Some(source) = self.status.watches() else { return Ok(()) };
        let watches = || source.watches.iter().map(|(kind, watch)| (kind.name(), watch));
        out.gauge(
            "source_watch_age",
            "Time since the API server last sent anything of this kind; below 70 while all is well.",
            Some(&Unit::Seconds),
            watches().map(|(kind, watch)| ([("kind", kind)], watch.age().as_secs())),
        )?;
        let states = watches().flat_map(|(kind, watch)| {
            let of_kind = WatchState::ALL.into_iter();
            of_kind.map(move |state| {
                ([("kind", kind), ("state", state.as_str())], u64::from(watch.state == state))
            })
        });
        out.gauge("source_watch_state", "1 for the state of the watch of this kind.", None, states)?;
        out.counter(
            "source_watch_errors",
            "Requests to list or watch this kind that failed.",
            None,
            watches().map(|(kind, watch)| ([("kind", kind)], watch.errors)),
        )?;
        out.gauge(
            "source_clusters_from",
            "1 for where it comes from what a cluster allows; auto while that is not known.",
            None,
            [([("source", source.clusters_from.as_str())], 1u64)],
        )
    }

    /// How the tunnel is open, and the results of authentication.
    fn write_tunnel(&self, gateway: &Gateway, out: &mut Families<'_>) -> fmt::Result {
        let shared = gateway.shared();
        let (config, identities) = (&shared.config, &shared.identities);
        let on = config.tunnel_listen.is_some();
        let plaintext = on && config.tunnel.plaintext;
        let open = plaintext || (on && config.tunnel.tls.is_some() && !identities.asks());
        out.one_gauge("tunnel_plaintext", "1 if CONNECT is served without TLS.", None, u64::from(plaintext))?;
        out.one_gauge(
            "tunnel_open_to_anyone",
            "1 if some clients of the tunnel are asked for no identity: by plain text, or by TLS without a \
             CA or tokens.",
            None,
            u64::from(open),
        )?;
        let help = "Bytes that tunnel streams hold for receivers that have not taken them.";
        out.one_gauge("tunnel_held_bytes", help, None, config.tunnel.memory.held() as u64)?;
        let help = "Tunnel connections that are asked for an identity and have shown none that is accepted.";
        out.one_gauge("tunnel_unproven_connections", help, None, u64::from(identities.unauthenticated()))?;
        let failed = self.status.tunnel_files();
        let files =
            TunnelFile::ALL.map(|file| ([("file", file.as_str())], u64::from(failed.contains_key(&file))));
        let help = "1 while a file of the tunnel listener cannot be used as it is; what was read before \
                    stays in force.";
        out.gauge("tunnel_files_failed", help, None, files)?;
        if let Some(validity) = config.tunnel.tls.as_ref().and_then(|tls| tls.certificate_validity()) {
            let second = |time: &Timestamp| u64::try_from(time.as_second()).unwrap_or_default();
            let help = "When the certificate of the tunnel listener begins, in seconds since 1970.";
            let start = second(validity.start());
            out.one_gauge("tunnel_certificate_start", help, Some(&Unit::Seconds), start)?;
            let help = "When the certificate of the tunnel listener ends, in seconds since 1970.";
            out.one_gauge("tunnel_certificate_end", help, Some(&Unit::Seconds), second(validity.end()))?;
        }
        let lists = tunnel_files::revocation_lists(gateway);
        let lists = || lists.iter().map(|(ca, list)| ([("issuer", &*list.issuer), ("ca", ca)], list));
        let issued = lists().map(|(labels, list)| (labels, list.this_update.as_second()));
        let help = "When its CA issued a revocation list in force, in seconds since 1970. It never falls \
                    while a gateway runs; from one to the next it does if an older list was brought back.";
        out.gauge("tunnel_revocation_list_this_update_seconds", help, None, issued)?;
        let promised = lists().map(|(labels, list)| (labels, list.next_update.as_second()));
        let help = "When the CA of a revocation list in force promised the next one, in seconds since 1970. \
                    A list that is past it still counts, and lacks what was revoked since.";
        out.gauge("tunnel_revocation_list_next_update_seconds", help, None, promised)?;
        let outcomes = identities.outcomes();
        let authentications = Method::ALL.into_iter().zip(outcomes).flat_map(|(method, counts)| {
            let label = ("method", method.as_str());
            OUTCOMES
                .into_iter()
                .zip(counts)
                .map(move |(outcome, count)| ([label, ("outcome", outcome)], count))
        });
        let help = "Requests of tunnel clients that must authenticate, by the credential shown and the \
                    outcome.";
        out.counter("tunnel_authentications", help, None, authentications)?;
        let Some(reviews) = identities.reviews() else { return Ok(()) };
        let results = [("yes", reviews.yes), ("no", reviews.no), ("failed", reviews.failed)];
        let help = "Token reviews by what the API server said; failed are those that could not be asked.";
        out.counter(
            "tunnel_token_reviews",
            help,
            None,
            results.map(|(result, count)| ([("result", result)], count)),
        )?;
        let help = "Requests that wait for a token review, and reviews that go on without their request.";
        out.one_gauge("tunnel_reviews_waiting", help, None, u64::from(reviews.waiting))?;
        let help = "What these are reckoned to take.";
        out.one_gauge("tunnel_reviews_waiting_bytes", help, None, reviews.waiting_bytes as u64)?;
        let help = "Tokens remembered with what was found out about them.";
        out.one_gauge("tunnel_tokens_remembered", help, None, reviews.remembered)?;
        let bounds = REVIEW_BUCKETS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<_> = bounds.zip(reviews.buckets).collect();
        out.one_histogram(
            "tunnel_token_review",
            "How long token reviews took, the connection to the API server included.",
            &Unit::Seconds,
            reviews.seconds,
            &buckets,
        )
    }

    fn write_table(&self, gateway: &Gateway, out: &mut Families<'_>) -> fmt::Result {
        let routes = gateway.shared().route_store.routes();
        let sizes = [
            ([("by", "port")], routes.ports.len() as u64),
            ([("by", "host")], (routes.hosts.len() + routes.wildcards.len()) as u64),
            ([("by", "authority")], routes.authorities.len() as u64),
        ];
        drop(routes);
        out.gauge("routes", "Routes in force.", None, sizes)?;
        let failed = gateway.failed_node_ports().len() as u64;
        out.one_gauge("node_ports_failed", "NodePort listeners that cannot be opened.", None, failed)?;
        let problems = self.status.count_problems();
        let problems = problems
            .iter()
            .map(|(&(severity, reason), &count)| ([("severity", severity), ("reason", reason)], count));
        out.gauge(
            "problems",
            "What is wrong with objects and manifests: what /readyz?verbose lists.",
            None,
            problems,
        )
    }

    fn write_clusters(&self, gateway: &Gateway, out: &mut Families<'_>) -> fmt::Result {
        let clusters = self.snapshots(gateway);
        let each = || clusters.iter().map(|(cluster, now)| ([("cluster", cluster.name.as_str())], now));
        out.gauge(
            "cluster_open_connections",
            "Connections and tunnel streams open.",
            None,
            each().map(|(labels, now)| (labels, u64::from(now.open))),
        )?;
        out.gauge(
            "cluster_connecting",
            "Of these, the ones that wait for an endpoint to accept.",
            None,
            each().map(|(labels, now)| (labels, u64::from(now.connecting))),
        )?;
        out.gauge(
            "cluster_tunnels",
            "HTTP/2 connections of its node agents.",
            None,
            each().map(|(labels, now)| (labels, u64::from(now.tunnels))),
        )?;
        let in_use = clusters.iter().map(|(cluster, _)| (cluster, cluster.share_use()));
        let in_use = in_use.filter(|(_, used)| !used.is_idle());
        let in_use = in_use.map(|(cluster, used)| ([("cluster", cluster.name.as_str())], used.ratio()));
        out.gauge(
            "cluster_fair_share_used_ratio",
            "What the cluster takes of its fair share, of memory, descriptors or held bytes, whichever is \
             scarcest; 1 is all of it.",
            None,
            in_use,
        )?;
        out.counter(
            "cluster_connections",
            "Connections and tunnel streams that reached an endpoint.",
            None,
            each().map(|(labels, now)| (labels, now.total)),
        )?;
        let doors = each().flat_map(|([cluster], now)| {
            // A kind by which nothing ever came is left out, as are reasons below.
            let used = ListenerKind::ALL.into_iter().zip(now.doors).filter(|(_, door)| door.opened > 0);
            used.map(move |(listener, door)| ([cluster, ("listener", listener.as_str())], door))
        });
        let doors: Vec<_> = doors.collect();
        out.gauge(
            "cluster_door_open_connections",
            "Connections and tunnel streams open, by the kind of listener they came by.",
            None,
            doors.iter().map(|(labels, door)| (*labels, door.open)),
        )?;
        out.counter(
            "cluster_door_connections",
            "Connections and tunnel streams that reached an endpoint, by the kind of listener.",
            None,
            doors.iter().map(|(labels, door)| (*labels, door.opened)),
        )?;
        let bytes = each().flat_map(|([cluster], now)| {
            [
                ([cluster, ("direction", "up")], now.bytes_up),
                ([cluster, ("direction", "down")], now.bytes_down),
            ]
        });
        out.counter("cluster_transferred", "Passed on; up is to the endpoint.", Some(&Unit::Bytes), bytes)?;
        let refusals = each().flat_map(|([cluster], now)| {
            Refusal::ALL
                .iter()
                .zip(now.refusals)
                .filter(|(_, count)| *count > 0)
                .map(move |(refusal, count)| ([cluster, ("reason", refusal.reason())], count))
        });
        out.counter("cluster_refusals", "Clients of a known cluster refused.", None, refusals)?;
        out.counter(
            "cluster_connect_failures",
            "Single attempts to connect that failed; the next endpoint may have served the client.",
            None,
            each().map(|(labels, now)| (labels, now.connect_failures)),
        )?;
        // A cluster without connections has no handshake times.
        let used = each().filter(|(_, now)| now.total > 0);
        out.histogram(
            "cluster_handshake",
            "From accepted to connected to an endpoint; the client's hello is part of it.",
            &Unit::Seconds,
            used.map(|(labels, now)| (labels, now.handshake_seconds, buckets(now))),
        )
    }

    /// The counters of every cluster, by name, with the bytes of open connections.
    fn snapshots(&self, gateway: &Gateway) -> Vec<(Arc<Cluster>, ClusterSnapshot)> {
        let mut open: HashMap<Tenant, Bytes> = HashMap::new();
        for record in gateway.connections() {
            let bytes = open.entry(record.upstream.cluster.name.clone()).or_default();
            bytes.up += record.bytes_up();
            bytes.down += record.bytes_down();
        }
        let mut clusters: Vec<_> = gateway.shared().route_store.clusters();
        clusters.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut most = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *most);
        let snapshots = clusters.into_iter().map(|cluster| {
            let mut now = cluster.snapshot();
            let open = open.get(&cluster.name).copied().unwrap_or_default();
            let before = before.get(&cluster.name).copied().unwrap_or_default();
            now.bytes_up = (now.bytes_up + open.up).max(before.up);
            now.bytes_down = (now.bytes_down + open.down).max(before.down);
            if now.bytes_up + now.bytes_down > 0 {
                most.insert(cluster.name.clone(), Bytes { up: now.bytes_up, down: now.bytes_down });
            }
            (cluster, now)
        });
        snapshots.collect()
    }
}

fn write_totals(gateway: &Gateway, out: &mut Families<'_>) -> fmt::Result {
    let shared = gateway.shared();
    let totals = shared.totals();
    out.one_counter("accepted_connections", "Connections accepted, on all listeners.", totals.accepted)?;
    out.one_counter(
        "accept_errors",
        "Failed attempts to accept; clients that gave up while they waited, nearly always.",
        totals.accept_errors,
    )?;
    out.one_gauge(
        "accepting",
        "0 while accepting rests, on any listener, for want of descriptors.",
        None,
        u64::from(!totals.accept_rests_now),
    )?;
    out.one_counter(
        "accept_rests",
        "Times accepting began to rest for want of descriptors.",
        totals.accept_rests,
    )?;
    let handshakes = u64::from(totals.handshakes);
    out.one_gauge(
        "handshakes",
        "Connections that have not yet said where they want to go.",
        None,
        handshakes,
    )?;
    out.one_gauge(
        "connection_memory_bytes",
        "What the connections, streams and tunnels of all clusters are reckoned to take.",
        None,
        totals.connection_memory as u64,
    )?;
    out.one_gauge(
        "connection_descriptors",
        "Descriptors of the connections, streams and tunnels of all clusters.",
        None,
        u64::from(totals.connection_descriptors),
    )?;
    let config = &shared.config;
    let limits = [
        ("memory_bytes", config.memory_limit),
        ("handshakes", config.max_handshakes as usize),
        ("tunnel_unproven_connections", config.max_unauthenticated as usize),
        ("tunnel_held_bytes", config.tunnel.memory.limit()),
        ("tunnel_reviews_waiting_bytes", config.review_memory),
        ("connection_memory_bytes", config.connection_memory),
        ("connection_descriptors", config.connection_descriptors as usize),
    ];
    let limits = limits.map(|(what, limit)| ([("of", what)], limit as u64));
    out.gauge(
        "limit",
        "The most that the gauge of this name may be; memory_bytes is all of them.",
        None,
        limits,
    )?;
    let refusals = Refusal::ALL
        .iter()
        .zip(totals.refusals)
        .map(|(refusal, count)| ([("reason", refusal.reason()), ("side", refusal.side().as_str())], count));
    out.counter("refusals", "Clients refused, whether or not their cluster is known.", None, refusals)?;
    let ends = End::ALL.iter().zip(totals.ends);
    let ends = ends.map(|(end, count)| ([("reason", end.reason()), ("side", end.side().as_str())], count));
    out.counter(
        "ended_connections",
        "Connections and tunnel streams that ended, by reason and side.",
        None,
        ends,
    )?;
    out.one_counter(
        "access_lines_left_out",
        "Access lines of refused clients beyond 20 a second of their cluster, or of none.",
        totals.lines_left_out,
    )?;
    out.one_counter(
        "access_lines_dropped",
        "Access lines lost because standard output was not read.",
        shared.access.dropped(),
    )
}

fn buckets(now: &ClusterSnapshot) -> [(f64, u64); HANDSHAKE_BUCKETS.len() + 1] {
    std::array::from_fn(|index| {
        (HANDSHAKE_BUCKETS.get(index).copied().unwrap_or(f64::INFINITY), now.handshakes[index])
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use portico_source::kubernetes::{ClustersFrom, KubernetesStatus};
    use portico_sync::{Source, SourceSettings};
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::super::status::Watches;
    use super::*;

    const ALERTS: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/alerts.yaml"));

    #[tokio::test]
    async fn a_gateway_that_drains_tells_of_no_watches() {
        let folder = tempfile::tempdir().unwrap();
        let folder = Some(folder.path().to_owned());
        let settings =
            SourceSettings { manifests: folder.clone(), state_dir: folder, ..SourceSettings::default() };
        let (_, pipeline) = Source::open(&settings).await.unwrap();
        let watches = || KubernetesStatus {
            complete: true,
            clusters_from: ClustersFrom::Auto,
            watches: BTreeMap::new(),
            discovery_error: None,
            lacks: None,
        };
        let status = Arc::new(Status::new(pipeline, Some(Watches(Box::new(watches)))));
        let mut registry = Registry::with_prefix("portico");
        let collector = GatewayMetrics { status: Arc::clone(&status), bytes: Mutex::default() };
        registry.register_collector(Box::new(collector));
        let page = || {
            let mut page = String::new();
            text::encode(&mut page, &registry).unwrap();
            page
        };
        assert!(page().contains("portico_source_"));
        status.set_stopping();
        let page = page();
        assert!(page.contains("portico_stopping 1") && !page.contains("portico_source_"), "{page}");
    }

    #[test]
    fn no_alert_takes_a_gateway_that_drains_for_one_that_is_not_ready() {
        let mut asks = ALERTS.lines().filter(|line| line.contains("(portico_ready")).peekable();
        assert!(asks.peek().is_some());
        for expression in asks {
            assert!(expression.contains("(portico_ready unless portico_stopping == 1)"), "{expression}");
        }
    }
}
