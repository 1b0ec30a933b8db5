//! The problems of the objects that decide exposure, each with object, field, value and remedy.
//!
//! There are three degrees. *Refused*: the object would expose something as it was not meant, so the version
//! before stays in force. *Void*: one field does not count, the rest of the object does. *Warning*: it works,
//! probably not as meant.

mod cluster;
mod configuration;
mod fields;
mod seed;

pub(crate) use cluster::strategy_change;
pub use cluster::{Before, cluster};
pub use configuration::configuration;
pub(crate) use seed::GATEWAY_SETTING;
pub use seed::seed;

use portico_api::configuration::KubermaticConfiguration;
use portico_api::problem::Problem;
use portico_api::seed::Seed;

pub use crate::findings::Verdict;
use crate::inputs::Scope;
use crate::resolve::{self, seed_of};

/// Returns `cluster` with the objects above it: the one of `seeds` that hosts it, and the configuration.
///
/// # Errors
/// Everything wrong with the first of these objects that must not be used as written.
pub fn usable<'a, S: AsRef<Seed>>(
    cluster: &'a portico_api::cluster::Cluster,
    seeds: &'a [S],
    configuration: Option<&'a KubermaticConfiguration>,
) -> Result<Scope<'a>, Vec<Problem>> {
    let found = seed_of(cluster, seeds).map_err(|problem| vec![*problem])?.as_ref();
    let decision = resolve::strategy(cluster, found, configuration);
    let scope = Scope { cluster, decision, seed: found, configuration };
    let above = [Some(seed(found)), configuration.map(self::configuration)].into_iter().flatten();
    let refused = above.chain([self::cluster(&scope, None)]).find(|verdict| verdict.refused);
    refused.map_or(Ok(scope), |verdict| Err(verdict.problems))
}
