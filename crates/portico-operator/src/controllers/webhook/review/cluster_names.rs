//! Host names of a Service that follow from a Cluster, or will from one to come: only Services in the
//! namespace of that Cluster may claim them.
//!
//! The gateway gives such a name to that namespace as soon as it knows the Cluster. Until then whoever claims
//! the name would have its clients, and so would a wildcard while the Cluster has no Service of that name.

use std::collections::BTreeSet;
use std::sync::Arc;

use portico_api::annotations::PORT_MAPPING;
use portico_api::cluster::Cluster;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::names::{ClusterName, HostName};
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_expose::hosts::{HostSuffix, host_of_seed};
use portico_expose::resolve::seed_of;
use portico_source::Object;

use super::{World, readable};

/// Whose a host name is. The `HostName` is that of the Seed, `<seed>.<domain>`.
enum Owner {
    /// It is the name of this Cluster, or lies below.
    Cluster(ClusterName, HostName),
    /// It is the name of the Seed itself.
    Seed(HostName),
    /// It is a wildcard that stands for the names of all Clusters of the Seed.
    EveryCluster(HostName),
}

impl World {
    /// The problems of `service`, which claims `hosts`.
    pub(super) fn foreign_names(&self, service: &Service, hosts: &BTreeSet<HostName>) -> Vec<Problem> {
        let (seeds, configuration) = (self.seeds(), self.configuration());
        let of_seeds: Vec<HostName> =
            seeds.iter().filter_map(|seed| host_of_seed(seed, configuration)).collect();
        let tenant = ClusterName::of_namespace(&service.metadata.namespace);
        let problem = |host: &HostName| {
            let message = match (owner(host, &of_seeds)?, &tenant) {
                (Owner::Cluster(cluster, _), Some(tenant)) if cluster == *tenant => return None,
                (Owner::Cluster(cluster, of_seed), tenant)
                    if tenant.is_some() || self.has_name(&seeds, host, Some(&cluster)) =>
                {
                    format!(
                        "host {host} belongs to the Cluster {cluster}, now or when it is made: below \
                         {of_seed}, names follow from Clusters"
                    )
                }
                (Owner::Seed(of_seed), Some(_)) => {
                    format!(
                        "host {host} is that of the Seed, and names below it follow from Clusters ({of_seed})"
                    )
                }
                (Owner::EveryCluster(of_seed), tenant)
                    if tenant.is_some() || self.has_name(&seeds, host, None) =>
                {
                    format!("host {host} stands for the names of Clusters too, which are below {of_seed}")
                }
                _ => return None,
            };
            Some(Problem {
                severity: Severity::Error,
                reason: "host-of-a-cluster",
                object: ObjectRef::new(Kind::Service, &service.metadata),
                field: format!("metadata.annotations[{PORT_MAPPING}]"),
                message,
                remedy: "choose another host name".into(),
            })
        };
        hosts.iter().filter_map(problem).collect()
    }

    /// Whether there is a Cluster whose name is `host` or above it, or that the wildcard `host` stands for.
    /// With `only` it is that Cluster.
    fn has_name(&self, seeds: &[Arc<Seed>], host: &HostName, only: Option<&ClusterName>) -> bool {
        let configuration = self.configuration();
        let name = |cluster: &Cluster| {
            let suffix = HostSuffix::of(&cluster.name(), seed_of(cluster, seeds).ok()?, configuration)?;
            suffix.host("").ok()
        };
        readable(&self.clusters).any(|object| match object {
            Object::Cluster(cluster) if only.is_none_or(|only| cluster.name() == *only) => name(cluster)
                .is_some_and(|name| {
                    let covers = host.parent_of_wildcard().is_some_and(|above| name.is_within(&above));
                    covers || host.is_within(&name)
                }),
            _ => false,
        })
    }
}

/// Whose `host` is, if it is that of a Seed with the name `of_seeds`, below one or a wildcard above one. The
/// name of a Seed may lie below that of another.
fn owner(host: &HostName, of_seeds: &[HostName]) -> Option<Owner> {
    let around = of_seeds.iter().filter(|of_seed| host.is_within(of_seed));
    let Some(of_seed) = around.max_by_key(|of_seed| of_seed.as_str().len()) else {
        let above = host.parent_of_wildcard()?;
        let of_seed = of_seeds.iter().find(|of_seed| of_seed.is_within(&above))?;
        return Some(Owner::EveryCluster(of_seed.clone()));
    };
    let parent = host.parent_of_wildcard();
    let name = parent.as_ref().unwrap_or(host).as_str();
    let below = name.strip_suffix(of_seed.as_str()).unwrap_or_default().trim_end_matches('.');
    let owner = match below.rsplit('.').next().filter(|label| !label.is_empty()) {
        Some(label) => Owner::Cluster(ClusterName::new(label), of_seed.clone()),
        None if parent.is_some() => Owner::EveryCluster(of_seed.clone()),
        None => Owner::Seed(of_seed.clone()),
    };
    Some(owner)
}
