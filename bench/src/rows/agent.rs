//! The agent at rest: what it costs a worker node whose pods ask for nothing.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use super::pair::{self, Tunnel};
use crate::process;
use crate::proxy::Proxy;
use crate::report::{Bar, Row};

/// From the first answered connection until the agent is taken to rest: it gives memory of its start back.
const REST: Duration = Duration::from_secs(3);
/// How long wake-ups are counted: several keep-alives of either make would fit.
const WATCH: Duration = Duration::from_secs(10);
/// As many as make a gateway; the agent knows nothing of them.
const CLUSTERS: usize = 1;

/// Memory, threads and wake-ups of agents that have carried one connection: without TLS as Envoy's, and with.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let mut table = table("agent at rest");
    for (number, proxy, _) in bench.tunnelling() {
        watch(bench, proxy, number, "agent", &mut table)?;
    }
    let mut rows = Vec::from(table);
    let mut table = self::table("agent at rest, with TLS");
    for (number, plain, _) in bench.tunnelling() {
        if let Some(proxy) = Tunnel::Tls.secure(bench, plain)? {
            watch(bench, proxy.as_ref(), number, "agent-tls", &mut table)?;
        }
    }
    rows.extend(table);
    Ok(rows)
}

fn table(name: &str) -> [Row; 5] {
    [
        ("memory", "MB of process memory", Bar::AtMost(12.0)),
        ("memory, shared pages in full", "MB of VmRSS", Bar::AtMost(12.0)),
        ("threads", "number", Bar::AtMost(2.0)),
        ("wake-ups", "a second", Bar::Open),
        ("CPU", "µs a second", Bar::Open),
    ]
    .map(|(what, unit, bar)| Row::new(format!("{name}: {what}"), unit, bar))
}

fn watch(bench: &Bench, proxy: &dyn Proxy, number: usize, row: &str, table: &mut [Row; 5]) -> Result<()> {
    let pair = pair::start(bench, proxy, number, CLUSTERS, row)?;
    let agent = pair.agent();
    std::thread::sleep(REST);
    let (before, used_before) = (process::resting(agent)?, process::cpu_nanoseconds(agent)?);
    std::thread::sleep(WATCH);
    let (after, used_after) = (process::resting(agent)?, process::cpu_nanoseconds(agent)?);
    let seconds = WATCH.as_secs_f64();
    let figures = [
        process::memory_bytes(agent)? as f64 / 1e6,
        after.resident as f64 / 1e6,
        after.threads as f64,
        (after.wake_ups - before.wake_ups) as f64 / seconds,
        (used_after - used_before) as f64 / 1e3 / seconds,
    ];
    for (row, figure) in table.iter_mut().zip(figures) {
        row.add(proxy.name(), figure);
    }
    Ok(())
}
