//! Clusters that Portico hosts, among the objects of a site.

use portico_api::annotations::LAYOUT;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::problem::Problem;
use portico_api::seed::Seed;
use portico_expose::inputs::Scope;
use portico_expose::validate::usable;
use portico_hosting::{Settings, validate};
use portico_source::Object;

/// The objects that decide what a control plane is made of.
pub(crate) struct Hosted<'a> {
    pub(crate) clusters: Vec<&'a Cluster>,
    seeds: Vec<&'a Seed>,
    configuration: Option<&'a KubermaticConfiguration>,
}

impl<'a> Hosted<'a> {
    /// Those among `objects`. Every Cluster is one of them, hosted or not.
    pub(crate) fn among(objects: &'a [Object]) -> Self {
        let mut found = Self { clusters: Vec::new(), seeds: Vec::new(), configuration: None };
        for object in objects {
            match object {
                Object::Cluster(cluster) => found.clusters.push(cluster),
                Object::Seed(seed) => found.seeds.push(seed),
                Object::KubermaticConfiguration(configuration) => {
                    found.configuration.get_or_insert(configuration);
                }
                _ => {}
            }
        }
        found
    }

    /// What `cluster` stands in.
    ///
    /// # Errors
    /// Everything wrong with it, or with what stands above it, as far as exposure goes.
    pub(crate) fn scope<'b>(&'b self, cluster: &'b Cluster) -> Result<Scope<'b>, Vec<Problem>> {
        usable(cluster, &self.seeds, self.configuration)
    }

    /// What keeps Clusters that ask for it from being hosted. What keeps them from being exposed is found by
    /// others.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let asking = self.clusters.iter().filter(|cluster| cluster.metadata.annotation(LAYOUT).is_some());
        let found =
            asking.filter_map(|cluster| Some(validate(&self.scope(cluster).ok()?, &Settings::default())));
        found.flat_map(|verdict| verdict.problems).collect()
    }
}
