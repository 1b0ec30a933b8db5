//! The agent at rest: what it costs a worker node whose pods ask for nothing.

use std::time::Duration;

use anyhow::Result;

use super::Bench;
use crate::process;
use crate::proxy::agent::Pair;
use crate::report::{Bar, Row};

/// From the first answered connection until the agent is taken to rest: it gives memory of its start back.
const SETTLE: Duration = Duration::from_secs(3);
/// How long wake-ups are counted: several keep-alives of either make would fit.
const WATCH: Duration = Duration::from_secs(10);
/// As many as make a gateway; the agent knows nothing of them.
const CLUSTERS: usize = 1;

/// Memory, threads and wake-ups of an agent that has carried one connection.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let mut memory = Row::new("agent at rest", "MB of process memory", Bar::AtMost(8.0));
    let mut resident = Row::new("agent at rest, shared pages in full", "MB of VmRSS", Bar::AtMost(8.0));
    let mut threads = Row::new("agent at rest: threads", "number", Bar::AtMost(2.0));
    let mut wake_ups = Row::new("agent at rest: wake-ups", "a second", Bar::Open);
    let mut cpu = Row::new("agent at rest: CPU", "µs a second", Bar::Open);
    for (number, proxy, program) in bench.tunnelling() {
        let gateway = bench.start_proxy(proxy, number, bench.clusters(CLUSTERS), "agent")?;
        let pair = Pair::start(program, gateway)?;
        std::thread::sleep(SETTLE);
        let (before, used) = (process::resting(pair.agent())?, process::cpu_nanoseconds(pair.agent())?);
        std::thread::sleep(WATCH);
        let (after, used_then) = (process::resting(pair.agent())?, process::cpu_nanoseconds(pair.agent())?);
        let seconds = WATCH.as_secs_f64();
        memory.add(proxy.name(), process::memory_bytes(pair.agent())? as f64 / 1e6);
        resident.add(proxy.name(), after.resident as f64 / 1e6);
        threads.add(proxy.name(), after.threads as f64);
        wake_ups.add(proxy.name(), (after.wake_ups - before.wake_ups) as f64 / seconds);
        cpu.add(proxy.name(), (used_then - used) as f64 / 1e3 / seconds);
    }
    Ok(vec![memory, resident, threads, wake_ups, cpu])
}
