//! CPU of a running proxy: connections, round trips, bytes, and how the first two grow with the number of
//! clusters.

use anyhow::Result;

use super::rounds::measure;
use super::{Bench, Participant, hellos};
use crate::hello::Order;
use crate::load::bulk::{self, Direction};
use crate::load::churn::{self, Ending};
use crate::load::pingpong::{self, MESSAGE_BYTES, PingPong};
use crate::report::{Bar, Row};

/// The number of clusters the main rows are measured with.
pub(crate) const CLUSTERS: usize = 100;
/// Different names a load uses at most, more than any proxy's caches hold by chance.
const NAMES: usize = 4096;

const MICROSECONDS: f64 = 1e6;
const SECONDS_PER_GB: f64 = 1e9;

/// Connections that come and go.
pub(crate) fn connection(bench: &Bench, participants: &[Participant], ending: Ending) -> Result<Row> {
    let (name, bar) = match ending {
        Ending::Orderly => ("new SNI connection", Bar::Times { peer: "nginx", factor: 1.0 }),
        Ending::Abort => ("new SNI connection, ended by reset", Bar::Open),
        Ending::Close => {
            ("new SNI connection, closed after one byte", Bar::Times { peer: "nginx", factor: 1.0 })
        }
    };
    churn_row(bench, participants, Row::new(name, "CPU µs", bar), ending)
}

fn churn_row(bench: &Bench, participants: &[Participant], mut row: Row, ending: Ending) -> Result<Row> {
    let order = if ending == Ending::Close { Order::AnswerOneByte } else { Order::Answer };
    let hellos: Vec<_> = participants.iter().map(|one| hellos(&one.running.site, order, NAMES)).collect();
    measure(bench, &mut row, participants, MICROSECONDS, |number, one, slice| {
        churn::run(one.site.sni, &hellos[number], ending, churn::AT_ONCE, slice)
    })?;
    Ok(row)
}

/// Messages over connections that stay.
pub(crate) fn round_trip(bench: &Bench, participants: &[Participant]) -> Result<Row> {
    let bar = Bar::Times { peer: "nginx", factor: 1.0 };
    round_trip_row(bench, participants, Row::new("ping-pong round trip", "CPU µs", bar))
}

fn round_trip_row(bench: &Bench, participants: &[Participant], mut row: Row) -> Result<Row> {
    let mut established = participants
        .iter()
        .map(|one| {
            let site = &one.running.site;
            let hellos = hellos(site, Order::Echo, pingpong::CONNECTIONS);
            let hellos: Vec<_> = hellos.iter().cycle().take(pingpong::CONNECTIONS).cloned().collect();
            PingPong::connect(site.sni, &hellos, MESSAGE_BYTES)
        })
        .collect::<Result<Vec<_>>>()?;
    measure(bench, &mut row, participants, MICROSECONDS, |number, _, slice| established[number].run(slice))?;
    Ok(row)
}

/// Many bytes one way.
pub(crate) fn bulk(bench: &Bench, participants: &[Participant], direction: Direction) -> Result<Row> {
    let name = match direction {
        Direction::Download => "bulk download",
        Direction::Upload => "bulk upload",
    };
    let mut row = Row::new(name, "CPU s per GB", Bar::Times { peer: "HAProxy", factor: 0.7 });
    measure(bench, &mut row, participants, SECONDS_PER_GB, |_, one, slice| {
        let hosts: Vec<_> = one.site.clusters.iter().map(|cluster| cluster.host.clone()).collect();
        bulk::run(one.site.sni, &hosts, direction, slice)
    })?;
    Ok(row)
}

/// Connections and round trips beside ever more clusters.
pub(crate) fn scale(bench: &Bench, scales: &[usize]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &clusters in scales {
        let participants = bench.start_all(clusters, "scale")?;
        let row = Row::new(format!("new SNI connection, {clusters} clusters"), "CPU µs", Bar::Open);
        rows.push(churn_row(bench, &participants, row, Ending::Orderly)?);
        let row = Row::new(format!("round trip, {clusters} clusters"), "CPU µs", Bar::Open);
        rows.push(round_trip_row(bench, &participants, row)?);
    }
    Ok(rows)
}
