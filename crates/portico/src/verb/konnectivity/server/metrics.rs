//! `/metrics` of a Konnectivity server: the names of the upstream server where it has them, and ours.
//!
//! Names, labels and units are a promise, listed in `docs/konnectivity-server.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use portico_admin::exposition::{Exposition, Families};
use portico_admin::process::Process;
use portico_konnectivity::server::counters::{CONNECTION_BUCKETS, DIAL_BUCKETS, Histogram};
use portico_konnectivity::server::{Status, Strategy};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

/// The metrics of one server.
pub(super) fn metrics(status: Status) -> Exposition {
    Exposition::with_names_of_another(Own(status.clone()), Upstream(status))
}

#[derive(Debug)]
struct Own(Status);

#[derive(Debug)]
struct Upstream(Status);

impl Collector for Own {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write_own(&self.0, &mut Families(encoder))
    }
}

impl Collector for Upstream {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write_upstream(&self.0, &mut Families(encoder))
    }
}

fn buckets<const N: usize>(bounds: &[f64; N], histogram: &Histogram<N>) -> Vec<(f64, u64)> {
    bounds.iter().copied().chain([f64::INFINITY]).zip(histogram.counts()).collect()
}

/// What the upstream server counts.
fn write_upstream(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let counters = status.counters();
    let (dials, lives) = (&counters.dials, &counters.connections);
    let (of_dials, of_lives) = (buckets(&DIAL_BUCKETS, dials), buckets(&CONNECTION_BUCKETS, lives));
    let name = "konnectivity_network_proxy_server_dial_duration";
    out.one_histogram(name, "Time of dials that succeeded.", &Unit::Seconds, dials.seconds(), &of_dials)?;
    let name = "konnectivity_network_proxy_server_connection_duration";
    out.one_histogram(name, "Time of connections that ended.", &Unit::Seconds, lives.seconds(), &of_lives)?;
    let streams = [
        ([("service_method", "Proxy")], counters.proxy_streams.load(Relaxed)),
        ([("service_method", "Connect")], counters.agent_streams.load(Relaxed)),
    ];
    out.gauge("konnectivity_network_proxy_server_grpc_connections", "Streams that are open.", None, streams)?;
    for (name, help, value) in [
        (
            "konnectivity_network_proxy_server_http_connections",
            "HTTP CONNECT connections that are open.",
            counters.http_connections.load(Relaxed),
        ),
        (
            "konnectivity_network_proxy_server_ready_backend_connections",
            "Agents that are connected.",
            counters.agent_streams.load(Relaxed),
        ),
        (
            "konnectivity_network_proxy_server_pending_backend_dials",
            "Dials under way.",
            counters.pending.load(Relaxed),
        ),
        (
            "konnectivity_network_proxy_server_established_connections",
            "Connections to endpoints that are open.",
            counters.established.load(Relaxed),
        ),
    ] {
        out.one_gauge(name, help, None, value)?;
    }
    let ready = status.agents_of();
    let ready =
        ready.iter().map(|(strategy, agents)| ([("proxy_strategy", label(*strategy))], *agents as u64));
    let help = "Agents that a strategy can choose.";
    out.gauge("konnectivity_network_proxy_server_ready_backends", help, None, ready)?;
    // A counter without the suffix of counters: upstream's name.
    let failures = counters
        .failures()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| ([("reason", reason)], count));
    out.gauge("konnectivity_network_proxy_server_dial_failure_count", "Dials that failed.", None, failures)?;
    let packets = counters.packets().filter(|(_, _, count)| *count > 0);
    let packets =
        packets.map(|(segment, kind, count)| ([("segment", segment.word()), ("packet_type", kind)], count));
    out.counter("konnectivity_network_proxy_server_stream_packets", "Packets.", None, packets)
}

fn label(strategy: Strategy) -> &'static str {
    strategy.name()
}

/// What only this server counts.
fn write_own(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let counters = status.counters();
    out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
    Process::now().write(out)?;
    let [up, down] = counters.bytes();
    let bytes = [([("direction", "to_endpoint")], up), ([("direction", "from_endpoint")], down)];
    out.counter("konnectivity_server_carried", "Bytes of connections.", Some(&Unit::Bytes), bytes)?;
    let ends = counters.ends().map(|(reason, count)| ([("reason", reason)], count));
    out.counter("konnectivity_server_connections_ended", "Connections that ended.", None, ends)?;
    let (held, limit) = status.memory();
    for (name, help, value) in [
        (
            "konnectivity_server_held_bytes",
            "Bytes held for peers that do not read; --max-held-bytes is the most.",
            held as u64,
        ),
        ("konnectivity_server_max_held_bytes", "--max-held-bytes.", limit as u64),
        ("konnectivity_server_draining", "1 from the first SIGTERM on.", u64::from(status.is_draining())),
    ] {
        out.one_gauge(name, help, None, value)?;
    }
    let help = "Connections to the agent port that were no agent, or not accepted as one.";
    out.one_counter("konnectivity_server_agents_refused", help, counters.agents_refused.load(Relaxed))?;
    let help = "Connections that could not be accepted, mostly for want of file descriptors.";
    out.one_counter("konnectivity_server_accept_errors", help, counters.accept_errors.load(Relaxed))?;
    write_agents(status, out)
}

/// Agents by version, and when the quietest of them was last seen.
fn write_agents(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let agents = status.agents();
    let mut versions: BTreeMap<&str, u64> = BTreeMap::new();
    for agent in &agents {
        *versions.entry(&agent.version).or_default() += 1;
    }
    let versions = versions.into_iter().map(|(version, count)| ([("version", version)], count));
    out.gauge("konnectivity_server_agents", "Agents that are connected, by version.", None, versions)?;
    let quiet = agents.iter().map(|agent| agent.last_seen.as_secs_f64()).fold(0.0, f64::max);
    let help = "How long ago the quietest agent last sent a packet.";
    out.gauge(
        "konnectivity_server_agent_last_seen",
        help,
        Some(&Unit::Seconds),
        [([("agent", "quietest")], quiet)],
    )
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn every_metric_is_in_the_manual() {
        let status = Status::default();
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Upstream(status.clone())));
        registry.sub_registry_with_prefix("portico").register_collector(Box::new(Own(status)));
        let mut metrics = String::new();
        text::encode(&mut metrics, &registry).unwrap();
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/konnectivity-server.md"));
        let types: Vec<_> = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert!(types.len() > 15, "{metrics}");
        for line in types {
            let (name, kind) = line.split_once(' ').unwrap();
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert!(manual.contains(&format!("`{name}{suffix}`")), "{name}{suffix} is not in the manual");
        }
    }
}
