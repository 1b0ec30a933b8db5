//! A look at this machine from where its kubelet is, once or again and again. The pods of a migration do that
//! on each node, in their log and for their readiness.

use std::time::Duration;

use tokio::time::sleep;

use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::{Outcome, print};

/// What was seen of one thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Observation {
    /// For a person, without an end of line.
    pub(super) line: String,
    /// Whether it is as it should be.
    pub(super) good: bool,
}

/// Looks once: the answer is "no" if something is not as it should be. Or goes on until it is told to stop,
/// with that time between two looks, and prints what has changed. Each look sees the same things, in the same
/// order.
pub(super) fn run(
    every: Option<Duration>,
    observe: impl AsyncFn() -> anyhow::Result<Vec<Observation>>,
) -> anyhow::Result<Outcome> {
    daemon::run(async {
        let Some(pause) = every else {
            let seen = observe().await?;
            tell(&seen, &[])?;
            return Ok(if seen.iter().all(|seen| seen.good) { Outcome::Done } else { Outcome::No });
        };
        let mut daemon = Daemon::start(Hangup::of_terminal())?;
        let repeat = async {
            let mut before = Vec::new();
            loop {
                let seen = observe().await?;
                tell(&seen, &before)?;
                before = seen;
                sleep(pause).await;
            }
        };
        tokio::select! {
            ended = repeat => ended,
            _ = daemon.asked_to_stop() => Ok(Outcome::Done),
        }
    })
}

/// Prints what is not as `before`.
fn tell(seen: &[Observation], before: &[Observation]) -> anyhow::Result<()> {
    for (number, seen) in seen.iter().enumerate() {
        if before.get(number) != Some(seen) {
            print(&format!("{}\n", seen.line))?;
        }
    }
    Ok(())
}
