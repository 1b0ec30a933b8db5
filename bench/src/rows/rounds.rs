//! The method: all proxies run at once, the load visits them in random order for a slice each, round after round.
//!
//! On a machine that others use too, absolute figures drift by tens of percent within minutes. The ratio of two
//! figures taken in the same round drifts far less, so that is what bars are about.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Result;

use super::{Bench, Participant};
use crate::load::Work;
use crate::process;
use crate::proxy::Running;
use crate::random::Random;
use crate::report::Row;

/// How often and how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// Visits to each proxy that count.
    pub(crate) count: usize,
    /// Length of a visit.
    pub(crate) slice: Duration,
}

/// Fills `row` with CPU seconds a unit of work times `scale`, from `load(proxy number, proxy, length)`. One short visit
/// to each proxy comes first and does not count: caches, pools, and lazily loaded code.
pub(crate) fn measure(
    bench: &Bench,
    row: &mut Row,
    participants: &[Participant],
    scale: f64,
    mut load: impl FnMut(usize, &Running, Duration) -> Result<Work>,
) -> Result<()> {
    let mut order: Vec<usize> = (0..participants.len()).collect();
    let mut random = Random::default();
    let mut failures = vec![0; participants.len()];
    for round in 0..=bench.rounds.count {
        let warm_up = round == 0;
        let slice = if warm_up { bench.rounds.slice / 4 } else { bench.rounds.slice };
        random.shuffle(&mut order);
        for &number in &order {
            let Participant { name, running } = &participants[number];
            let pid = running.pid();
            let before = process::cpu_nanoseconds(pid)?;
            let work = load(number, running, slice)?;
            let after = process::cpu_nanoseconds(pid)?;
            failures[number] += work.failures;
            if !warm_up {
                let seconds = after.saturating_sub(before) as f64 / 1e9;
                row.add(name, seconds / work.units as f64 * scale);
            }
        }
        if std::io::stderr().is_terminal() {
            eprint!("\r  {}: round {round} of {}", row.name, bench.rounds.count);
        }
    }
    eprintln!("\r  {}: {} rounds done  ", row.name, bench.rounds.count);
    for (number, &count) in failures.iter().enumerate().filter(|&(_, &count)| count > 0) {
        row.notes.insert(participants[number].name, format!("{count} failed"));
    }
    Ok(())
}
