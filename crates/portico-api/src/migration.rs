//! The annotation by which people steer the migration of a Cluster between expose strategies.
//!
//! The order to migrate is `spec.exposeStrategy` itself. This says how nodes follow, and how the former way
//! in comes to its end: `quiet=10m,nodes=by-hand`. A text that cannot be read closes nothing and touches no
//! node: it may have asked for more time.

use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::duration::{DurationError, GoDuration};
use crate::strategy::{ExposeStrategy, UnknownStrategy};

/// On a Cluster: how it migrates, as [`MigrationSettings`].
pub const MIGRATION: &str = "portico.k8c.io/migration";

/// On a Cluster: the strategy to which `portico migrate --rollback` goes back, until that is over. The doors
/// on the way back are those on the way there, so nothing else tells the two from each other.
pub const ROLLBACK: &str = "portico.k8c.io/rollback";

/// The reason of the condition [`MIGRATING`](crate::cluster::MIGRATING) once one door is left.
pub const SETTLED: &str = "Settled";

/// Nearly every client that comes from time to time comes more often: kubelets each ten seconds, watches
/// that begin again, jobs of a CI.
const QUIET: Duration = Duration::from_mins(10);

/// What the annotation [`MIGRATION`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationSettings {
    /// The old way in closes after nobody has used it for this long.
    pub quiet: Duration,
    /// The way in by this strategy closes although it is in use, and although nodes still use it. It has a
    /// name so that an order of yesterday closes no other.
    pub close: Option<ExposeStrategy>,
    /// How kubelets come to the new address.
    pub nodes: NodeMoves,
    /// How many nodes may be moved at the same time.
    pub parallel: NonZeroU16,
}

/// How the kubelets of a cluster come to another address of its API server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeMoves {
    /// A pod on each node changes its files, and restarts its kubelet.
    #[default]
    InPlace,
    /// Like [`NodeMoves::InPlace`], after the node was drained.
    Drained,
    /// Somebody does it on each machine. A pod on each node only says whether that is done.
    ByHand,
}

/// Why the value of [`MIGRATION`] cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadMigrationSettings {
    /// Not `KEY=VALUE` with a key that is known.
    #[error(
        "{0:?} is none of quiet=TIME, close=STRATEGY, nodes=in-place, drained or by-hand, and parallel=NUMBER"
    )]
    Unknown(Box<str>),
    /// Which of the two would count?
    #[error("{0} is there twice")]
    Twice(&'static str),
    /// No duration.
    #[error("quiet: {value:?} is no time: {why}")]
    Quiet {
        /// The value as written.
        value: Box<str>,
        /// What is wrong with it.
        why: DurationError,
    },
    /// A time before now.
    #[error("quiet: {0:?} is negative")]
    Negative(Box<str>),
    /// No strategy.
    #[error("close: {0:?} is no strategy: {UnknownStrategy}")]
    Close(Box<str>),
    /// No way to move nodes.
    #[error("nodes: {0:?} is none of in-place, drained and by-hand")]
    Nodes(Box<str>),
    /// No number of nodes.
    #[error("parallel: {0:?} is no number from 1 to 9999")]
    Parallel(Box<str>),
}

impl MigrationSettings {
    /// The settings of a Cluster with this annotation, or without one.
    ///
    /// # Errors
    /// What is wrong with the first item that cannot be used.
    pub fn of(annotation: Option<&str>) -> Result<Self, BadMigrationSettings> {
        annotation.map_or(Ok(Self::default()), str::parse)
    }
}

impl FromStr for MigrationSettings {
    type Err = BadMigrationSettings;

    /// Reads a comma list of settings, with spaces around items ignored.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut quiet, mut close, mut nodes, mut parallel) = (None, None, None, None);
        for item in text.split(',').map(str::trim) {
            let unknown = || BadMigrationSettings::Unknown(item.into());
            let (key, value) = item.split_once('=').ok_or_else(unknown)?;
            let (key, twice) = match key {
                "quiet" => ("quiet", quiet.replace(time(value)?).is_some()),
                "close" => {
                    let strategy = value.parse().map_err(|_| BadMigrationSettings::Close(value.into()))?;
                    ("close", close.replace(strategy).is_some())
                }
                "nodes" => ("nodes", nodes.replace(moves(value)?).is_some()),
                "parallel" => ("parallel", parallel.replace(number(value)?).is_some()),
                _ => return Err(unknown()),
            };
            if twice {
                return Err(BadMigrationSettings::Twice(key));
            }
        }
        Ok(Self {
            quiet: quiet.unwrap_or(QUIET),
            close,
            nodes: nodes.unwrap_or_default(),
            parallel: parallel.unwrap_or(NonZeroU16::MIN),
        })
    }
}

fn moves(value: &str) -> Result<NodeMoves, BadMigrationSettings> {
    match value {
        "in-place" => Ok(NodeMoves::InPlace),
        "drained" => Ok(NodeMoves::Drained),
        "by-hand" => Ok(NodeMoves::ByHand),
        _ => Err(BadMigrationSettings::Nodes(value.into())),
    }
}

/// Digits alone, and four at most, as admission reads it.
fn number(value: &str) -> Result<NonZeroU16, BadMigrationSettings> {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|_| digits && !value.starts_with('0') && value.len() <= 4);
    number.ok_or_else(|| BadMigrationSettings::Parallel(value.into()))
}

fn time(value: &str) -> Result<Duration, BadMigrationSettings> {
    let duration: GoDuration =
        value.parse().map_err(|why| BadMigrationSettings::Quiet { value: value.into(), why })?;
    duration.get().ok_or_else(|| BadMigrationSettings::Negative(value.into()))
}

impl Default for MigrationSettings {
    /// Ten quiet minutes, no order, and nodes are moved one after the other.
    fn default() -> Self {
        Self { quiet: QUIET, close: None, nodes: NodeMoves::default(), parallel: NonZeroU16::MIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        text.parse::<MigrationSettings>().unwrap_err().to_string()
    }

    #[test]
    fn settings_count_in_any_order_and_those_that_are_not_there_have_a_default() {
        let (minute, none) = (Duration::from_mins(1), MigrationSettings::default());
        let close = Some(ExposeStrategy::LoadBalancer);
        let (nodes, parallel) = (NodeMoves::ByHand, NonZeroU16::new(20).unwrap());
        for (text, expected) in [
            ("quiet=1m", MigrationSettings { quiet: minute, ..none }),
            ("close=LoadBalancer", MigrationSettings { close, ..none }),
            (" close=LoadBalancer , quiet=60s ", MigrationSettings { quiet: minute, close, ..none }),
            ("quiet=0", MigrationSettings { quiet: Duration::ZERO, ..none }),
            ("parallel=20,nodes=by-hand", MigrationSettings { nodes, parallel, ..none }),
            ("nodes=in-place", none),
            ("nodes=drained", MigrationSettings { nodes: NodeMoves::Drained, ..none }),
        ] {
            assert_eq!(MigrationSettings::of(Some(text)), Ok(expected), "{text}");
        }
        assert_eq!(MigrationSettings::of(None), Ok(none));
    }

    #[test]
    fn what_cannot_be_read_voids_the_whole_value_and_says_why() {
        let none =
            "is none of quiet=TIME, close=STRATEGY, nodes=in-place, drained or by-hand, and parallel=NUMBER";
        for (text, expected) in [
            ("", format!("\"\" {none}")),
            ("quiet=1m,", format!("\"\" {none}")),
            ("quiet", format!("\"quiet\" {none}")),
            ("Quiet=1m", format!("\"Quiet=1m\" {none}")),
            ("quiet =1m", format!("\"quiet =1m\" {none}")),
            ("quiet=10h,drain=true", format!("\"drain=true\" {none}")),
            ("nodes=away", "nodes: \"away\" is none of in-place, drained and by-hand".to_owned()),
            ("nodes=by-hand,nodes=by-hand", "nodes is there twice".to_owned()),
            ("parallel=0", "parallel: \"0\" is no number from 1 to 9999".to_owned()),
            ("parallel=+1", "parallel: \"+1\" is no number from 1 to 9999".to_owned()),
            ("parallel=10%", "parallel: \"10%\" is no number from 1 to 9999".to_owned()),
            ("quiet=1m,quiet=1m", "quiet is there twice".to_owned()),
            ("close=NodePort,close=Tunneling", "close is there twice".to_owned()),
            ("quiet=10", "quiet: \"10\" is no time: a unit is missing or unknown, as in 90s or 1m30s".into()),
            ("quiet=", "quiet: \"\" is no time: a number is missing, as in 90s or 1m30s".to_owned()),
            ("quiet=-1m", "quiet: \"-1m\" is negative".to_owned()),
            ("close=nodeport", format!("close: \"nodeport\" is no strategy: {UnknownStrategy}")),
        ] {
            assert_eq!(problem(text), expected, "{text}");
        }
    }
}
