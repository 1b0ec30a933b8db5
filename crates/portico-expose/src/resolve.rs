//! Which seed hosts a cluster, and which strategy exposes it.

use std::fmt;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::strategy::ExposeStrategy;
use serde::Serialize;

/// A strategy and the level that decided on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// The strategy.
    pub strategy: ExposeStrategy,
    /// The level that decided.
    pub decided_by: DecidedBy,
}

/// The level that decided on a strategy, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum DecidedBy {
    /// `Cluster.spec.exposeStrategy`.
    Cluster,
    /// The strategy before Seed or configuration changed: they do not move existing clusters.
    Before,
    /// `Seed.spec.exposeStrategy`.
    Seed,
    /// `KubermaticConfiguration.spec.exposeStrategy`.
    Configuration,
    /// No level names one.
    Default,
}

impl fmt::Display for DecidedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cluster => "Cluster",
            Self::Before => "before",
            Self::Seed => "Seed",
            Self::Configuration => "KubermaticConfiguration",
            Self::Default => "default",
        })
    }
}

/// Returns the strategy of the Cluster, else of the Seed, else of the configuration, else `NodePort`. A text
/// that is no strategy counts as unset here; validation refuses its object.
pub fn strategy(cluster: &Cluster, seed: &Seed, configuration: Option<&KubermaticConfiguration>) -> Decision {
    let levels = [
        (Some(&cluster.spec.expose_strategy), DecidedBy::Cluster),
        (Some(&seed.spec.expose_strategy), DecidedBy::Seed),
        (configuration.map(|found| &found.spec.expose_strategy), DecidedBy::Configuration),
    ];
    levels
        .into_iter()
        .find_map(|(setting, decided_by)| setting?.get().map(|&strategy| Decision { strategy, decided_by }))
        .unwrap_or(Decision { strategy: ExposeStrategy::default(), decided_by: DecidedBy::Default })
}

/// Returns the seed that lists the cluster's datacenter, else the only seed there is.
///
/// # Errors
/// The problem to report on the Cluster if there is no such seed.
pub fn seed_of<'a, S: AsRef<Seed>>(cluster: &Cluster, seeds: &'a [S]) -> Result<&'a S, Box<Problem>> {
    let dc = &cluster.spec.cloud.dc;
    let lists_it = |seed: &&S| seed.as_ref().spec.datacenters.contains_key(dc);
    if let Some(seed) = seeds.iter().find(lists_it) {
        return Ok(seed);
    }
    let names = || seeds.iter().map(|seed| &*seed.as_ref().metadata.name).collect::<Vec<_>>().join(", ");
    match seeds {
        [seed] => Ok(seed),
        [] => Err(which_seed(cluster, "there is no Seed that could host this cluster".into(), "add a Seed")),
        _ if dc.is_empty() => Err(which_seed(
            cluster,
            format!("it is empty, and there are several seeds: {}", names()),
            "name a datacenter that one of them lists in spec.datacenters",
        )),
        _ => Err(which_seed(
            cluster,
            format!("no Seed lists the datacenter {dc:?} (there are: {})", names()),
            "add it to spec.datacenters of the Seed that hosts this cluster, or name one that is there",
        )),
    }
}

/// That `--seed` names none of `seeds`.
pub fn no_such_seed<S: AsRef<Seed>>(named: &str, seeds: &[S]) -> String {
    let there: Vec<&str> = seeds.iter().map(|seed| &*seed.as_ref().metadata.name).collect();
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    format!("no Seed is called {named:?}, as --seed says; there are: {there}")
}

/// The problem of a Cluster whose Seed is not known.
pub(crate) fn which_seed(cluster: &Cluster, message: String, remedy: &str) -> Box<Problem> {
    Box::new(Problem {
        severity: Severity::Error,
        reason: "which-seed",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: "spec.cloud.dc".into(),
        message,
        remedy: remedy.into(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{cluster, configuration, seed};

    fn setting() -> impl Strategy<Value = Option<ExposeStrategy>> {
        prop::option::of(prop::sample::select(ExposeStrategy::ALL.to_vec()))
    }

    fn spec(strategy: Option<ExposeStrategy>) -> String {
        strategy.map_or("{}".into(), |strategy| format!(r#"{{"exposeStrategy": "{strategy}"}}"#))
    }

    proptest! {
        #[test]
        fn the_nearest_level_that_says_something_decides(
            on_cluster in setting(), on_seed in setting(), global in setting(),
        ) {
            let decision = strategy(
                &cluster("a", &spec(on_cluster)),
                &seed("s", &spec(on_seed)),
                Some(&configuration(&spec(global))),
            );
            let expected = on_cluster.or(on_seed).or(global).unwrap_or(ExposeStrategy::NodePort);
            prop_assert_eq!(decision.strategy, expected);
            let by = match (on_cluster, on_seed, global) {
                (Some(_), _, _) => DecidedBy::Cluster,
                (None, Some(_), _) => DecidedBy::Seed,
                (None, None, Some(_)) => DecidedBy::Configuration,
                (None, None, None) => DecidedBy::Default,
            };
            prop_assert_eq!(decision.decided_by, by);
        }
    }

    #[test]
    fn a_cluster_belongs_to_the_seed_that_lists_its_datacenter() {
        let north = Box::new(seed("north", r#"{"datacenters": {"lab-1": {}}}"#));
        let south = Box::new(seed("south", r#"{"datacenters": {"lab-2": {}}}"#));
        let seeds = [north, south];
        let found = seed_of(&cluster("a", r#"{"cloud": {"dc": "lab-2"}}"#), &seeds).unwrap();
        assert_eq!(&*found.metadata.name, "south");
        let lost = |spec: &str| seed_of(&cluster("a", spec), &seeds).unwrap_err().to_string();
        assert_eq!(
            lost(r#"{"cloud": {"dc": "lab-3"}}"#),
            "Cluster a: spec.cloud.dc: no Seed lists the datacenter \"lab-3\" (there are: north, south); add \
             it to spec.datacenters of the Seed that hosts this cluster, or name one that is there"
        );
        assert_eq!(
            lost("{}"),
            "Cluster a: spec.cloud.dc: it is empty, and there are several seeds: north, south; name a \
             datacenter that one of them lists in spec.datacenters"
        );
    }

    #[test]
    fn the_only_seed_hosts_every_cluster() {
        let seeds = [Box::new(seed("north", "{}"))];
        assert!(seed_of(&cluster("a", r#"{"cloud": {"dc": "lab-9"}}"#), &seeds).is_ok());
        let none: [Box<Seed>; 0] = [];
        assert_eq!(
            seed_of(&cluster("a", "{}"), &none).unwrap_err().to_string(),
            "Cluster a: spec.cloud.dc: there is no Seed that could host this cluster; add a Seed"
        );
    }
}
