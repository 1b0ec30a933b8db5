//! `/metrics` of a Konnectivity server: the names of the upstream server where it has them, and ours.
//!
//! Names, labels and units are a promise, listed in `docs/konnectivity-server.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use portico_admin::exposition::{Exposition, Families};
use portico_admin::process::Process;
use portico_konnectivity::server::counters::{CONNECTION_BUCKETS, DIAL_BUCKETS};
use portico_konnectivity::server::{Counters, LeaseCounters, REQUEST_BUCKETS, Status};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use crate::verb::konnectivity::requests;

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

/// What the upstream server counts. Help is upstream's: its tests, and others', compare whole families.
fn write_upstream(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let counters = status.counters();
    write_times(counters, out)?;
    let by_method = |[proxy, connect]: [&AtomicU64; 2]| {
        [("Proxy", proxy), ("Connect", connect)]
            .map(|(method, count)| ([("service_method", method)], count.load(Relaxed)))
    };
    let help = "Number of current grpc connections, partitioned by service method.";
    let streams = by_method([&counters.proxy_streams, &counters.agent_streams]);
    out.gauge("konnectivity_network_proxy_server_grpc_connections", help, None, streams)?;
    let help =
        "Number of current connections blocked by a full receive channel, partitioned by service method.";
    let full = by_method([&counters.full_frontends, &counters.full_agents]);
    out.gauge("konnectivity_network_proxy_server_full_receive_channels", help, None, full)?;
    for (name, help, value) in [
        (
            "konnectivity_network_proxy_server_http_connections",
            "Number of current HTTP CONNECT connections",
            &counters.http_connections,
        ),
        (
            "konnectivity_network_proxy_server_ready_backend_connections",
            "Number of konnectivity agent connected to the proxy server. DEPRECATED, please use \
             ready_backends",
            &counters.agent_streams,
        ),
        (
            "konnectivity_network_proxy_server_pending_backend_dials",
            "Current number of pending backend dial requests",
            &counters.pending,
        ),
        (
            "konnectivity_network_proxy_server_established_connections",
            "Current number of established end-to-end connections (post-dial).",
            &counters.established,
        ),
    ] {
        out.one_gauge(name, help, None, value.load(Relaxed))?;
    }
    let ready = status.agents_of();
    let ready =
        ready.iter().map(|(strategy, agents)| ([("proxy_strategy", strategy.name())], *agents as u64));
    let help = "Number of konnectivity agent connected to the proxy server";
    out.gauge("konnectivity_network_proxy_server_ready_backends", help, None, ready)?;
    let failures = counters.failures().filter(|(_, count)| *count > 0);
    let failures = failures.map(|(reason, count)| ([("reason", reason)], count));
    let help = "Number of dial failures observed. Multiple failures can occur for a single dial request.";
    out.counter_as_named("konnectivity_network_proxy_server_dial_failure_count", help, failures)?;
    write_streams(counters, out)?;
    write_leases(&counters.leases, out)
}

fn write_times(counters: &Counters, out: &mut Families<'_>) -> fmt::Result {
    for (name, help, times) in [
        (
            "konnectivity_network_proxy_server_dial_duration",
            "Latency of dial to the remote endpoint in seconds",
            counters.dials(),
        ),
        (
            "konnectivity_network_proxy_server_frontend_write_duration",
            "Latency of write to the frontend in seconds",
            &counters.frontend_writes,
        ),
    ] {
        out.one_histogram(name, help, &Unit::Seconds, times.seconds(), &times.buckets(&DIAL_BUCKETS))?;
    }
    let times = &counters.connections;
    let name = "konnectivity_network_proxy_server_connection_duration";
    // Younger than the release whose help is known.
    let help = "Duration of connections to endpoints in seconds";
    out.one_histogram(name, help, &Unit::Seconds, times.seconds(), &times.buckets(&CONNECTION_BUCKETS))
}

/// Packets, and streams that broke; what never was is not shown, as upstream's library has it.
fn write_streams(counters: &Counters, out: &mut Families<'_>) -> fmt::Result {
    let packets = counters.packets().filter(|(_, _, count)| *count > 0);
    let packets =
        packets.map(|(segment, kind, count)| ([("segment", segment.as_str()), ("packet_type", kind)], count));
    let help = "Count of packets processed, by segment and packet type (example: from_client, DIAL_REQ)";
    out.counter("konnectivity_network_proxy_server_stream_packets", help, None, packets)?;
    let errors = counters.stream_errors().filter(|(_, _, _, count)| *count > 0);
    let errors = errors.map(|(segment, code, kind, count)| {
        ([("segment", segment.as_str()), ("code", code), ("packet_type", kind)], count)
    });
    let help = "Count of gRPC stream errors, by segment, grpc Code, packet type. (example: from_agent, \
                Code.Unavailable, DIAL_RSP)";
    out.counter("konnectivity_network_proxy_server_stream_errors", help, None, errors)
}

/// What the upstream server counts with `--enable-lease-controller`.
fn write_leases(leases: &LeaseCounters, out: &mut Families<'_>) -> fmt::Result {
    let help = "Count of expired leases that the lease garbage collection controller has culled.";
    let culled = leases.culled.load(Relaxed);
    out.one_counter_as_named("konnectivity_network_proxy_server_culled_leases_count", help, culled)?;
    // Help in the words of upstream, slips included.
    for (requests, total, help, latency, latency_help) in [
        (
            &leases.deletes,
            "konnectivity_network_proxy_server_lease_delete",
            "Count of lease delection calls by the garbage collection controller. Labeled by HTTP status \
             code and reason.",
            "konnectivity_network_proxy_server_lease_delete_latency",
            "Latency of lease deletion calls by the garbage collection controller in seconds.",
        ),
        (
            &leases.lists,
            "konnectivity_network_proxy_server_lease_list",
            "Count of lease deletion calls by the garbage collection controller. Labeled by HTTP status \
             code and reason.",
            "konnectivity_network_proxy_server_lease_list_latency",
            "Latency of lease list calls by the garbage collection controller in seconds.",
        ),
    ] {
        let answers = requests::answers(requests, "http_status_code");
        out.counter(total, help, None, answers)?;
        let times = requests::times(requests, "http_status_code", &REQUEST_BUCKETS);
        out.histogram(latency, latency_help, &Unit::Seconds, times)?;
    }
    Ok(())
}

/// What only this server counts.
fn write_own(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let counters = status.counters();
    out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
    Process::now().write(out)?;
    let [up, down] = counters.bytes();
    let bytes = [([("direction", "to_endpoint")], up), ([("direction", "from_endpoint")], down)];
    out.counter("konnectivity_server_carried", "Bytes of connections.", Some(&Unit::Bytes), bytes)?;
    let dials = counters
        .dial_results()
        .map(|(result, times)| ([("result", result)], times.seconds(), times.buckets(&DIAL_BUCKETS)));
    out.histogram("konnectivity_server_dial_result", "Times of dials, by result.", &Unit::Seconds, dials)?;
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
        (
            "konnectivity_server_unauthenticated_connections",
            "Connections to the agent port that have not shown an identity.",
            u64::from(status.unauthenticated()),
        ),
        // Its former name. Goes with the release after the first one.
        (
            "konnectivity_server_unproven_connections",
            "The same as konnectivity_server_unauthenticated_connections.",
            u64::from(status.unauthenticated()),
        ),
        (
            "konnectivity_server_reviews_waiting",
            "Agents that wait for the review of their token.",
            counters.reviews_waiting.load(Relaxed),
        ),
    ] {
        out.one_gauge(name, help, None, value)?;
    }
    let help = "Connections to the agent port that became no agent's, by reason.";
    let refused = counters.agents_refused().map(|(reason, count)| ([("reason", reason)], count));
    out.counter("konnectivity_server_agents_refused", help, None, refused)?;
    let help = "Connections that could not be accepted, mostly for want of file descriptors.";
    out.one_counter("konnectivity_server_accept_errors", help, counters.accept_errors.load(Relaxed))?;
    let help = "Steps of --enable-lease-controller that failed: renewals, lists, removals.";
    let failed = counters.leases.failed.load(Relaxed);
    out.one_counter("konnectivity_server_lease_failures", help, failed)?;
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
    let help = "How long ago the quietest agent was last seen to answer.";
    out.gauge(
        "konnectivity_server_agent_last_seen",
        help,
        Some(&Unit::Seconds),
        [([("agent", "quietest")], quiet)],
    )
}

#[cfg(test)]
mod tests {
    use portico_lab::metrics::names;
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
        let names = names(&metrics);
        assert!(names.len() > 15, "{metrics}");
        for name in names {
            assert!(manual.contains(&format!("`{name}`")), "{name} is not in the manual");
        }
    }
}
