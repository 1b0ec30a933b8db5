//! The method: all proxies run at once, the load visits them in random order for a slice each, round after
//! round.
//!
//! On a machine that others use too, absolute figures drift by tens of percent within minutes. The ratio of
//! two figures taken in the same round drifts far less, so that is what bars are about.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Result;

use super::{Bench, Participant, Processes};
use crate::load::Work;
use crate::process;
use crate::random::Random;
use crate::report::{Row, quantile};

/// How often and how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// Visits to each proxy that count.
    pub(crate) count: usize,
    /// Length of a visit.
    pub(crate) slice: Duration,
}

/// Fills `row` with CPU seconds a unit of work times `scale`, from `load(proxy number, proxy, length)`. One
/// short visit to each proxy comes first and does not count: caches, pools, and lazily loaded code.
pub(crate) fn measure<T: Processes>(
    bench: &Bench,
    row: &mut Row,
    participants: &[Participant<T>],
    scale: f64,
    mut load: impl FnMut(usize, &T, Duration) -> Result<Work>,
) -> Result<()> {
    let mut used = vec![Vec::new(); participants.len()];
    let mut order: Vec<usize> = (0..participants.len()).collect();
    let mut random = Random::default();
    let mut failures = vec![0; participants.len()];
    for round in 0..=bench.rounds.count {
        let warm_up = round == 0;
        let slice = if warm_up { bench.rounds.slice / 4 } else { bench.rounds.slice };
        random.shuffle(&mut order);
        for &number in &order {
            let Participant { name, running } = &participants[number];
            let pids = running.pids();
            let before = cpu(&pids)?;
            let work = load(number, running, slice)?;
            let after = cpu(&pids)?;
            failures[number] += work.failures;
            if !warm_up {
                let parts: Vec<u64> =
                    after.iter().zip(before).map(|(after, before)| after.saturating_sub(before)).collect();
                let seconds = parts.iter().sum::<u64>() as f64 / 1e9;
                row.add(name, seconds / work.units as f64 * scale);
                used[number].push(parts);
            }
        }
        if std::io::stderr().is_terminal() {
            eprint!("\r  {}: round {round} of {}", row.name, bench.rounds.count);
        }
    }
    eprintln!("\r  {}: {} rounds done  ", row.name, bench.rounds.count);
    for ((participant, &count), used) in participants.iter().zip(&failures).zip(&used) {
        if let Some(share) = share_of_the_second(used) {
            row.note(participant.name, &share);
        }
        row.count_failures(participant.name, count);
    }
    Ok(())
}

fn cpu(pids: &[u32]) -> Result<Vec<u64>> {
    pids.iter().map(|&pid| process::cpu_nanoseconds(pid)).collect()
}

/// What part of the CPU was the agent's, where a gateway and an agent are measured together.
fn share_of_the_second(rounds: &[Vec<u64>]) -> Option<String> {
    let share = |parts: &Vec<u64>| {
        let &[gateway, agent] = parts.as_slice() else { return None };
        Some(agent as f64 / (gateway + agent) as f64)
    };
    let shares: Option<Vec<f64>> = rounds.iter().map(share).collect();
    Some(format!("agent {:.0} %", 100.0 * quantile(&shares?, 0.5)?))
}
