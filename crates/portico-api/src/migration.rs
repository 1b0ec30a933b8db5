//! The annotation by which people steer the migration of a Cluster between expose strategies.
//!
//! The order to migrate is `spec.exposeStrategy` itself. This says how the former way in comes to its end:
//! `quiet=10m,close=NodePort`. A text that cannot be read closes nothing: it may have asked for more time.

use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::duration::{DurationError, GoDuration};
use crate::strategy::{ExposeStrategy, UnknownStrategy};

/// On a Cluster: how it migrates, as [`MigrationSettings`].
pub const MIGRATION: &str = "portico.k8c.io/migration";

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
}

/// Why the value of [`MIGRATION`] cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadMigrationSettings {
    /// Not `KEY=VALUE` with a key that is known.
    #[error("{0:?} is none of quiet=TIME and close=STRATEGY")]
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
}

impl MigrationSettings {
    /// Those of a Cluster with this annotation, or without one.
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
        let (mut quiet, mut close) = (None, None);
        for item in text.split(',').map(str::trim) {
            let (key, twice) = match item.split_once('=') {
                Some(("quiet", value)) => ("quiet", quiet.replace(time(value)?).is_some()),
                Some(("close", value)) => {
                    let strategy = value.parse().map_err(|_| BadMigrationSettings::Close(value.into()))?;
                    ("close", close.replace(strategy).is_some())
                }
                _ => return Err(BadMigrationSettings::Unknown(item.into())),
            };
            if twice {
                return Err(BadMigrationSettings::Twice(key));
            }
        }
        Ok(Self { quiet: quiet.unwrap_or(QUIET), close })
    }
}

fn time(value: &str) -> Result<Duration, BadMigrationSettings> {
    let duration: GoDuration =
        value.parse().map_err(|why| BadMigrationSettings::Quiet { value: value.into(), why })?;
    duration.get().ok_or_else(|| BadMigrationSettings::Negative(value.into()))
}

impl Default for MigrationSettings {
    /// Ten quiet minutes, and no order.
    fn default() -> Self {
        Self { quiet: QUIET, close: None }
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
        let minute = Duration::from_mins(1);
        for (text, quiet, close) in [
            ("quiet=1m", minute, None),
            ("close=LoadBalancer", QUIET, Some(ExposeStrategy::LoadBalancer)),
            (" close=Tunneling , quiet=60s ", minute, Some(ExposeStrategy::Tunneling)),
            ("quiet=0", Duration::ZERO, None),
        ] {
            assert_eq!(MigrationSettings::of(Some(text)), Ok(MigrationSettings { quiet, close }), "{text}");
        }
        assert_eq!(MigrationSettings::of(None), Ok(MigrationSettings { quiet: QUIET, close: None }));
    }

    #[test]
    fn what_cannot_be_read_voids_the_whole_value_and_says_why() {
        let none = "is none of quiet=TIME and close=STRATEGY";
        for (text, expected) in [
            ("", format!("\"\" {none}")),
            ("quiet=1m,", format!("\"\" {none}")),
            ("quiet", format!("\"quiet\" {none}")),
            ("Quiet=1m", format!("\"Quiet=1m\" {none}")),
            ("quiet =1m", format!("\"quiet =1m\" {none}")),
            ("quiet=10h,nodes=by-hand", format!("\"nodes=by-hand\" {none}")),
            ("quiet=1m,quiet=1m", "quiet is there twice".to_owned()),
            ("close=NodePort,close=Tunneling", "close is there twice".to_owned()),
            ("quiet=10", "quiet: \"10\" is no time: a unit is missing or unknown, as in 90s or 1m30s".into()),
            ("quiet=", "quiet: \"\" is no time: a number is missing, as in 90s or 1m30s".to_owned()),
            ("quiet=-1m", "quiet: \"-1m\" is negative".to_owned()),
            (
                "close=nodeport",
                "close: \"nodeport\" is no strategy: it is none of NodePort, LoadBalancer, Tunneling (upper \
                 and lower case matter)"
                    .to_owned(),
            ),
        ] {
            assert_eq!(problem(text), expected, "{text}");
        }
    }
}
