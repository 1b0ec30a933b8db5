//! `/metrics` of a Konnectivity agent: the names of the upstream agent where it has them, and ours.
//!
//! Names, labels and units are a promise, listed in `docs/konnectivity-agent.md`. Where upstream's own tests
//! compare a family, its help is upstream's too.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use portico_admin::exposition::{Exposition, Families};
use portico_admin::process::Process;
use portico_konnectivity::agent::{Agent, Counters, DIAL_BUCKETS, DialFailure, EndpointEnd};
use portico_wire::konnectivity::Code;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use crate::verb::konnectivity::requests;

/// The metrics of one agent.
pub(super) fn metrics(agent: Arc<Agent>) -> Exposition {
    Exposition::with_names_of_another(Own(Arc::clone(&agent)), Upstream(agent))
}

#[derive(Debug)]
struct Own(Arc<Agent>);

#[derive(Debug)]
struct Upstream(Arc<Agent>);

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

/// What the upstream agent counts.
fn write_upstream(agent: &Agent, out: &mut Families<'_>) -> fmt::Result {
    const OPEN_SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";
    let counters = agent.counters();
    let servers = agent.staying_servers() as u64;
    out.one_gauge(OPEN_SERVERS, "Current number of open server connections.", None, servers)?;
    let help = "Current number of servers agent is trying to connect to.";
    let known = u64::from(agent.known_servers());
    out.one_gauge("konnectivity_network_proxy_agent_known_server_count", help, None, known)?;
    let open = agent.connections().len() as u64;
    let help = "Current number of open endpoint connections.";
    out.one_gauge("konnectivity_network_proxy_agent_open_endpoint_connections", help, None, open)?;
    let help = "Latency of dial to the remote endpoint in seconds";
    out.one_histogram(
        "konnectivity_network_proxy_agent_dial_duration",
        help,
        &Unit::Seconds,
        counters.dials.seconds(),
        &counters.dials.buckets(&DIAL_BUCKETS),
    )?;
    // Upstream shows a reason once it has happened, and its own tests compare the whole family.
    let failures = named(&DialFailure::ALL, &counters.dial_failures, "reason");
    let failures = failures.filter(|(_, count)| *count > 0);
    let help = "Number of failures dialing the remote endpoint, by reason (example: timeout).";
    out.counter("konnectivity_network_proxy_agent_endpoint_dial_failure", help, None, failures)?;
    write_packets(counters, out)?;
    let lost = counters.lost.load(Relaxed) + counters.silent.load(Relaxed);
    out.counter_as_named(
        "konnectivity_network_proxy_agent_server_connection_failure_count",
        "Connections to servers that were lost.",
        [([("direction", "from_server")], lost)],
    )?;
    write_leases(counters, out)
}

/// Requests about Leases, with `--count-server-leases`.
fn write_leases(counters: &Counters, out: &mut Families<'_>) -> fmt::Result {
    const CODE: &str = "http_response_code";
    let lists = requests::answers(&counters.lease_lists, CODE);
    let help = "Count of server lease list calls made by the agent to the k8s apiserver, labeled by HTTP \
                response code and reason";
    out.counter("konnectivity_network_proxy_agent_lease_lists", help, None, lists)?;
    let watches = requests::answers(&counters.lease_watches, CODE);
    let help = "Count of server lease watch calls made by the agent to the k8s apiserver, labeled by HTTP \
                response code and reason";
    out.counter("konnectivity_network_proxy_agent_lease_watches", help, None, watches)?;
    let times = requests::times(&counters.lease_lists, CODE, &DIAL_BUCKETS);
    let help = "Latency of server lease listing in seconds";
    out.histogram("konnectivity_network_proxy_agent_lease_list_latency", help, &Unit::Seconds, times)
}

fn write_packets(counters: &Counters, out: &mut Families<'_>) -> fmt::Result {
    let segments = [("to_agent", &counters.received), ("from_agent", &counters.sent)];
    let packets = segments.into_iter().flat_map(|(segment, counts)| {
        counts.all().map(move |(packet, count)| ([("segment", segment), ("packet_type", packet)], count))
    });
    let help = "Count of packets processed, by segment and packet type (example: from_client, DIAL_REQ)";
    out.counter("konnectivity_network_proxy_agent_stream_packets", help, None, packets)?;
    // The first is OK, which is no error.
    let errors = Code::all().zip(&counters.stream_errors).skip(1).map(|(code, count)| {
        let labels = [("segment", "to_agent"), ("code", code.name()), ("packet_type", "Unknown")];
        (labels, count.load(Relaxed))
    });
    let help = "Connect streams that ended with an error, by its code.";
    out.counter("konnectivity_network_proxy_agent_stream_errors", help, None, errors)
}

/// What only this agent counts.
fn write_own(agent: &Agent, out: &mut Families<'_>) -> fmt::Result {
    let counters = agent.counters();
    out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
    Process::now().write(out)?;
    let servers = agent.servers();
    let streams = servers.iter().filter(|session| session.has_streams()).count() as u64;
    for (name, help, value) in [
        ("konnectivity_agent_draining", "1 from the first SIGTERM on.", u64::from(agent.is_draining())),
        (
            "konnectivity_agent_servers_with_streams",
            "Servers connected that give each connection an HTTP/2 stream.",
            streams,
        ),
        ("konnectivity_agent_dials_in_progress", "Dials under way.", u64::from(agent.dialling())),
        (
            "konnectivity_agent_held_bytes",
            "Bytes held for peers that do not read; --max-held-bytes is the most.",
            agent.settings().memory.held() as u64,
        ),
    ] {
        out.one_gauge(name, help, None, value)?;
    }
    for (name, help, value) in [
        ("konnectivity_agent_servers_joined", "Connections to servers that came up.", &counters.joined),
        (
            "konnectivity_agent_server_duplicates",
            "Attempts that led to a server that is connected already.",
            &counters.duplicates,
        ),
        (
            "konnectivity_agent_server_failures",
            "Attempts to connect to a server that failed.",
            &counters.join_failures,
        ),
        ("konnectivity_agent_servers_silent", "Servers given up because they fell silent.", &counters.silent),
        (
            "konnectivity_agent_dials_abandoned",
            "Dials that the server abandoned before they were over.",
            &counters.dials_abandoned,
        ),
        (
            "konnectivity_agent_lease_failures",
            "Lists and watches of Leases that failed, with an answer of the API server or without.",
            &counters.lease_failures,
        ),
    ] {
        out.one_counter(name, help, value.load(Relaxed))?;
    }
    let ends = named(&EndpointEnd::ALL, &counters.ends, "reason");
    let help = "How connections to endpoints ended.";
    out.counter("konnectivity_agent_ended_connections", help, None, ends)?;
    let bytes = [("up", &counters.bytes_up), ("down", &counters.bytes_down)];
    let bytes = bytes.map(|(direction, count)| ([("direction", direction)], count.load(Relaxed)));
    let help = "Passed on; up is to endpoints.";
    out.counter("konnectivity_agent_transferred", help, Some(&Unit::Bytes), bytes)
}

/// Counters with their names as a label.
fn named<T>(
    names: &[(T, &'static str)],
    counters: &[AtomicU64],
    label: &'static str,
) -> impl Iterator<Item = ([(&'static str, &'static str); 1], u64)> {
    names.iter().zip(counters).map(move |((_, name), count)| ([(label, *name)], count.load(Relaxed)))
}
