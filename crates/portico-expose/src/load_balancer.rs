//! The settings of a Seed for the load balancer Services in front of it, beside their ports.
//!
//! KKP's operator puts these fields of `Seed.spec.nodeportProxy` on the Service `nodeport-proxy`; `portico
//! front` puts them on its front Service. If there are several Seeds on one cluster, one must be named. They
//! share the load balancer, and the oldest Seed must not decide by its age which networks are admitted.

use ipnet::IpNet;
use portico_api::meta::Strings;
use portico_api::seed::Seed;
use portico_api::setting::Setting;
use thiserror::Error;

use crate::resolve::no_such_seed;
use crate::services::strings;

pub(crate) const AWS_TYPE: (&str, &str) = ("service.beta.kubernetes.io/aws-load-balancer-type", "nlb");
/// Watches are silent for hours. AWS cuts after a minute by default, and an hour is the most it accepts.
pub(crate) const AWS_IDLE: (&str, &str) =
    ("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout", "3600");

/// The settings of a load balancer Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadBalancerSettings {
    /// Its annotations; others stay.
    pub annotations: Strings,
    /// `spec.loadBalancerSourceRanges`, sorted; empty for every client.
    pub source_ranges: Vec<IpNet>,
    /// `spec.ipFamilyPolicy`; empty leaves it as it is.
    pub ip_family_policy: Box<str>,
    /// `spec.ipFamilies`; empty leaves them as they are.
    pub ip_families: Vec<Box<str>>,
}

/// Why the settings are not known. What the Service has stays.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// A range that is left out would shut clients out, or, if it is the only one, let everybody in.
    #[error(
        "Seed {seed}: spec.nodeportProxy.envoy.loadBalancerService.sourceRanges: {value:?}: {why}; until it \
         is corrected, the front Service keeps the settings it has"
    )]
    SourceRange {
        /// The Seed.
        seed: Box<str>,
        /// The range as written.
        value: Box<str>,
        /// What is wrong with it.
        why: Box<str>,
    },
    /// Which Seed the load balancer belongs to is not known.
    #[error(
        "there are several Seeds ({0}); name the one of this load balancer with --seed; until then the front \
         Service keeps the settings it has"
    )]
    SeveralSeeds(String),
    /// The Seed that was named does not exist.
    #[error("{0}; the front Service keeps the settings it has")]
    NoSuchSeed(String),
}

/// Returns what the Seed of the load balancer asks for: the Seed `named`, or the only one. `None` without any
/// Seed.
pub fn settings<'a>(
    seeds: impl IntoIterator<Item = &'a Seed>,
    named: Option<&str>,
) -> Result<Option<LoadBalancerSettings>, SettingsError> {
    let mut seeds: Vec<&Seed> = seeds.into_iter().collect();
    // In an order that does not depend on that of a list.
    seeds.sort_by_key(|seed| seed.metadata.key());
    let counts = |seed: &&&Seed| named.is_none_or(|named| *seed.metadata.name == *named);
    let counting: Vec<&Seed> = seeds.iter().filter(counts).copied().collect();
    match (&counting[..], named) {
        ([], Some(named)) => Err(SettingsError::NoSuchSeed(no_such_seed(named, &seeds))),
        ([], None) => Ok(None),
        ([seed], _) => of(seed).map(Some),
        (several, _) => {
            let names: Vec<String> = several.iter().map(|seed| seed.metadata.key().to_string()).collect();
            Err(SettingsError::SeveralSeeds(names.join(", ")))
        }
    }
}

/// What `seed` asks for.
pub(crate) fn of(seed: &Seed) -> Result<LoadBalancerSettings, SettingsError> {
    let proxy = &seed.spec.nodeport_proxy;
    let mut source_ranges = Vec::new();
    for range in &proxy.envoy.load_balancer_service.source_ranges {
        match range {
            Setting::Good(network) => source_ranges.push(IpNet::from(*network).trunc()),
            Setting::Unset => {}
            Setting::Bad(bad) => {
                let (seed, value, why) = (&*seed.metadata.name, bad.value.clone(), bad.why.clone());
                return Err(SettingsError::SourceRange { seed: seed.into(), value, why });
            }
        }
    }
    source_ranges.sort_unstable();
    source_ranges.dedup();
    Ok(LoadBalancerSettings {
        annotations: annotations(seed),
        source_ranges,
        ip_family_policy: proxy.ip_family_policy.clone(),
        ip_families: proxy.ip_families.clone(),
    })
}

/// The annotations of every load balancer Service of the seed.
pub(crate) fn annotations(seed: &Seed) -> Strings {
    let proxy = &seed.spec.nodeport_proxy;
    let mut annotations = proxy.annotations.clone();
    match &proxy.envoy.load_balancer_service.annotations {
        Some(written) => annotations.extend(written.clone()),
        None => annotations.extend(strings([AWS_TYPE, AWS_IDLE])),
    }
    annotations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::read;

    fn seed(namespace: &str, name: &str, proxy: &str) -> Seed {
        read(&format!(
            r#"{{"metadata": {{"namespace": "{namespace}", "name": "{name}"}},
                "spec": {{"nodeportProxy": {proxy}}}}}"#
        ))
    }

    #[test]
    fn ranges_annotations_and_families_are_those_of_the_seed() {
        let seed = seed(
            "kubermatic",
            "north",
            r#"{"annotations": {"old": "1", "both": "1"}, "ipFamilyPolicy": "PreferDualStack",
                "ipFamilies": ["IPv4", "IPv6"],
                "envoy": {"loadBalancerService": {"annotations": {"both": "2"},
                    "sourceRanges": ["203.0.113.9/24", "198.51.100.0/24", "203.0.113.0/24"]}}}"#,
        );
        let wanted = settings([&seed], None).unwrap().unwrap();
        let ranges: Vec<_> = wanted.source_ranges.iter().map(ToString::to_string).collect();
        assert_eq!(ranges, ["198.51.100.0/24", "203.0.113.0/24"]);
        assert_eq!(wanted.annotations, strings([("both", "2"), ("old", "1")]));
        assert_eq!(&*wanted.ip_family_policy, "PreferDualStack");
        assert_eq!(wanted.ip_families.len(), 2);
    }

    #[test]
    fn a_seed_that_names_no_annotations_gets_those_of_kkp() {
        let wanted = settings([&seed("kubermatic", "north", "{}")], None).unwrap().unwrap();
        assert_eq!(wanted.annotations, strings([AWS_TYPE, AWS_IDLE]));
        let none = seed("kubermatic", "n", r#"{"envoy": {"loadBalancerService": {"annotations": {}}}}"#);
        assert_eq!(settings([&none], None).unwrap().unwrap(), LoadBalancerSettings::default());
    }

    #[test]
    fn a_range_that_cannot_be_read_changes_nothing() {
        let ranges =
            r#"{"envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24", "nonsense"]}}}"#;
        let error = settings([&seed("kubermatic", "north", ranges)], None).unwrap_err().to_string();
        assert!(error.contains("nonsense") && error.contains("keeps the settings"), "{error}");
    }

    #[test]
    fn of_several_seeds_the_one_that_is_named_counts_and_never_the_elder() {
        let (north, south) = (seed("kubermatic", "north", "{}"), seed("kubermatic", "south", "{}"));
        let error = settings([&south, &north], None).unwrap_err().to_string();
        assert!(error.contains("kubermatic/north, kubermatic/south") && error.contains("--seed"), "{error}");
        assert!(settings([&south, &north], Some("south")).unwrap().is_some());
        let unknown = "no Seed is called \"east\", as --seed says; there are: north, south".to_owned();
        assert_eq!(settings([&south, &north], Some("east")), Err(SettingsError::NoSuchSeed(unknown)));
        assert_eq!(settings([], None), Ok(None));
    }
}
