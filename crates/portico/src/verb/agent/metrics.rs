//! `/metrics` of an agent. Names, labels and units are a promise, listed in `docs/agent.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use portico_admin::exposition::{Exposition, Families};
use portico_admin::process::Process;
use portico_agent::{Agent, ENDS, OPEN_BUCKETS, Refusal};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::status::{Status, identity, state};

/// The metrics of one agent.
pub(super) fn agent_metrics(status: Arc<Status>) -> Exposition {
    Exposition::of(AgentMetrics(status))
}

#[derive(Debug)]
struct AgentMetrics(Arc<Status>);

impl Collector for AgentMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(encoder);
        let status = &*self.0;
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        Process::now().write(&mut out)?;
        let ready = status.checks().iter().all(|check| check.passed);
        out.one_gauge("agent_ready", "What /readyz says.", None, ready.into())?;
        out.one_gauge(
            "agent_stopping",
            "1 from SIGTERM, or from a take-over, on.",
            None,
            status.is_stopping().into(),
        )?;
        let help = "Gateways configured that are reached without TLS.";
        out.one_gauge("agent_plaintext_gateways", help, None, status.plaintext_gateways as u64)?;
        let help = "Files whose content cannot be used; what was read before is in force.";
        out.one_gauge("agent_unusable_files", help, None, status.file_problems().len() as u64)?;
        write_address(status, &mut out)?;
        let Some(agent) = status.agent() else { return Ok(()) };
        write_tunnels(agent, &mut out)?;
        write_forwards(agent, &mut out)?;
        write_connections(agent, &mut out)
    }
}

fn write_address(status: &Status, out: &mut Families<'_>) -> fmt::Result {
    let Some(held) = status.held() else { return Ok(()) };
    let placement = held.placement();
    let labels = [("kind", placement.kind.to_string()), ("interface", placement.interface.to_string())];
    out.gauge(
        "agent_address_held",
        "1 while the address is there.",
        None,
        [(labels, u64::from(held.is_held()))],
    )?;
    out.one_counter("agent_address_repairs", "Times the address had to be put back.", held.repairs())
}

fn write_tunnels(agent: &Agent, out: &mut Families<'_>) -> fmt::Result {
    let tunnels = agent.client().status();
    let mut states: BTreeMap<_, u64> = BTreeMap::new();
    let mut identities: BTreeMap<_, u64> = BTreeMap::new();
    for tunnel in &tunnels {
        let gateway = tunnel.gateway.as_deref().unwrap_or("none");
        *states.entry((gateway, state(tunnel))).or_default() += 1;
        if tunnel.state.is_some() {
            *identities.entry((gateway, identity(tunnel))).or_default() += 1;
        }
    }
    let states =
        states.into_iter().map(|((gateway, state), count)| ([("gateway", gateway), ("state", state)], count));
    out.gauge("agent_tunnels", "Connections to gateways, and attempts to have one.", None, states)?;
    let identities = identities
        .into_iter()
        .map(|((gateway, identity), count)| ([("gateway", gateway), ("identity", identity)], count));
    out.gauge(
        "agent_identities",
        "Whether gateways accept our identity: connections by their answer.",
        None,
        identities,
    )?;
    let streams: u64 = tunnels.iter().map(|tunnel| u64::from(tunnel.streams)).sum();
    out.one_gauge("agent_streams", "Streams open, or being opened.", None, streams)?;
    let totals = agent.client().totals();
    for (name, help, value) in [
        ("agent_tunnels_opened", "Connections to gateways that came up.", totals.tunnels_opened),
        (
            "agent_tunnel_failures",
            "Attempts at one that failed: TCP, proxy, TLS or HTTP/2.",
            totals.tunnel_failures,
        ),
        ("agent_tunnels_suspect", "Times a gateway fell silent.", totals.tunnels_unresponsive),
        ("agent_streams_opened", "Streams that gateways opened.", totals.streams_opened),
        ("agent_streams_refused", "Requests that gateways refused.", totals.streams_refused),
        ("agent_streams_retried", "Requests sent again on another connection.", totals.streams_retried),
    ] {
        out.one_counter(name, help, value)?;
    }
    Ok(())
}

fn write_forwards(agent: &Agent, out: &mut Families<'_>) -> fmt::Result {
    let forwards = &agent.shared().forwards;
    let each = || forwards.iter().map(|forward| (("forward", forward.listen.to_string()), forward));
    out.counter(
        "agent_accepted_connections",
        "Connections of pods accepted.",
        None,
        each().map(|(label, forward)| ([label], forward.accepted())),
    )?;
    out.counter(
        "agent_opened_connections",
        "Of these, the ones a gateway has opened.",
        None,
        each().map(|(label, forward)| ([label], forward.opened())),
    )?;
    let bytes = each().flat_map(|(label, forward)| {
        let way = |direction: &str| [label.clone(), ("direction", direction.to_owned())];
        [(way("up"), forward.bytes_up()), (way("down"), forward.bytes_down())]
    });
    out.counter("agent_transferred", "Passed on; up is to the gateway.", Some(&Unit::Bytes), bytes)
}

fn write_connections(agent: &Agent, out: &mut Families<'_>) -> fmt::Result {
    let totals = agent.shared().totals();
    out.one_gauge(
        "agent_connections",
        "Connections of pods, waiting ones included.",
        None,
        totals.open as u64,
    )?;
    let help = "Connections that wait for a gateway.";
    out.one_gauge("agent_waiting_connections", help, None, totals.waiting.into())?;
    let help = "Bytes held for receivers that have not taken them; --max-held-bytes is the most.";
    out.one_gauge("agent_held_bytes", help, None, agent.shared().memory.held() as u64)?;
    let refusals = Refusal::REASONS.iter().zip(totals.refusals);
    let refusals = refusals.map(|(&reason, count)| ([("reason", reason)], count));
    out.counter("agent_refusals", "Connections that were not carried.", None, refusals)?;
    let ends = ENDS.iter().zip(totals.ends);
    let ends = ends.map(|(&(reason, side), count)| ([("reason", reason), ("side", side)], count));
    out.counter("agent_ended_connections", "How connections ended that had been carried.", None, ends)?;
    out.one_counter("agent_accept_errors", "Failed attempts to accept.", totals.accept_errors)?;
    let buckets: [(f64, u64); OPEN_BUCKETS.len() + 1] = std::array::from_fn(|index| {
        (OPEN_BUCKETS.get(index).copied().unwrap_or(f64::INFINITY), totals.opening[index])
    });
    let help = "From accepted to opened by a gateway.";
    out.one_histogram("agent_open", help, &Unit::Seconds, totals.opening_seconds, &buckets)?;
    let help = "Access lines lost because standard output was not read.";
    out.one_counter("access_lines_dropped", help, agent.shared().access.dropped())
}
