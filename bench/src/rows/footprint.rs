//! Memory: of a proxy that has just read its clusters, and of connections at rest.
//!
//! One proxy at a time and always a fresh process, as freed memory that a process keeps would hide what the
//! next connection costs. Memory of the process only (PSS); what the kernel holds for two sockets is the same
//! for all.

use anyhow::Result;

use super::{Bench, hellos};
use crate::hello::Order;
use crate::load::idle;
use crate::process;
use crate::report::{Bar, Row};

/// Idle connections held; each takes two descriptors of the proxy and two of the bench.
const CONNECTIONS: usize = 2000;
/// Connections opened and closed before the first look, so that what a proxy allocates once is not counted.
const WARM_UP: usize = 50;
/// Fresh processes each figure is taken from.
const REPEATS: usize = 3;

/// Bytes of process memory a connection at rest costs.
pub(crate) fn idle(bench: &Bench, clusters: usize) -> Result<Row> {
    let mut row = Row::new("idle connection", "bytes of process memory", Bar::AtMost(2048.0));
    for (number, proxy) in bench.proxies.iter().enumerate() {
        for repeat in 0..REPEATS {
            let one = bench.start(number, clusters, &format!("idle{repeat}"))?;
            let hellos = hellos(&one.site, Order::Answer, clusters);
            drop(idle::open(one.site.sni, &hellos, WARM_UP)?);
            let before = process::memory_bytes(one.pid())?;
            let resting = idle::open(one.site.sni, &hellos, CONNECTIONS)?;
            let after = process::memory_bytes(one.pid())?;
            drop(resting);
            row.add(proxy.name(), after.saturating_sub(before) as f64 / CONNECTIONS as f64);
        }
    }
    Ok(row)
}

/// Megabytes of a process that serves this many clusters and has carried a connection to two of them.
pub(crate) fn memory(bench: &Bench, scales: &[usize]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &clusters in scales {
        let bar = match clusters {
            100 => Bar::AtMost(12.0),
            2000 => Bar::AtMost(24.0),
            10_000 => Bar::AtMost(60.0),
            _ => Bar::Open,
        };
        let mut row = Row::new(format!("process memory, {clusters} clusters"), "MB", bar);
        for (number, proxy) in bench.proxies.iter().enumerate() {
            let one = bench.start(number, clusters, "memory")?;
            row.add(proxy.name(), process::memory_bytes(one.pid())? as f64 / 1e6);
        }
        rows.push(row);
    }
    Ok(rows)
}
