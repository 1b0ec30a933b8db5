//! Clusters that Portico hosts, among the objects of a site, and what an installation says about all of them.

use clap::Args;
use ipnet::IpNet;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::problem::Problem;
use portico_api::seed::Seed;
use portico_expose::inputs::Scope;
use portico_expose::validate::usable;
use portico_hosting::Settings;
use portico_source::Object;

use crate::args::network;

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

    /// The problems of Clusters that ask to be hosted.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let found = |cluster| portico_hosting::judge(cluster, &self.seeds, self.configuration).problems;
        self.clusters.iter().copied().flat_map(found).collect()
    }
}

// What holds for all control planes of a seed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Control planes")]
pub(crate) struct Installation {
    /// What takes the place of registry.k8s.io, with a path or without; names and tags stay
    #[arg(long, value_name = "REGISTRY")]
    registry_mirror: Option<String>,
    /// Pull an image by its digest; may be repeated
    #[arg(long, value_name = "IMAGE=DIGEST", value_parser = image_digest)]
    image_digest: Vec<(String, String)>,
    /// Secret with credentials of registries, which the operator copies from its own namespace into that of
    /// each cluster; may be repeated
    #[arg(long, value_name = "NAME")]
    image_pull_secret: Vec<String>,
    /// Class of the volumes of etcd, where a Cluster names none [default: that of the seed]
    #[arg(long, value_name = "CLASS")]
    storage_class: Option<String>,
    /// Where pods of the seed reach `portico metrics`, for clusters with a Prometheus of their own
    #[arg(long, value_name = "URL", default_value = "http://portico-metrics.portico.svc:8007")]
    metrics_url: String,
    /// Networks of pods, Services and nodes of the seed; those of clusters must not overlap them
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = network)]
    seed_network: Vec<IpNet>,
}

impl Installation {
    /// The settings, with the image of Portico.
    pub(crate) fn settings(&self, image: &str) -> Settings {
        Settings {
            image: image.to_owned(),
            registry_mirror: self.registry_mirror.clone(),
            digests: self.image_digest.iter().cloned().collect(),
            pull_secrets: self.image_pull_secret.clone(),
            storage_class: self.storage_class.clone(),
            metrics_url: self.metrics_url.trim_end_matches('/').to_owned(),
            seed_networks: self.seed_network.clone(),
        }
    }
}

fn image_digest(text: &str) -> Result<(String, String), String> {
    let remedy = "write IMAGE=DIGEST, as in registry.k8s.io/etcd:3.6.5-0=sha256:… with 64 hex digits";
    let (image, digest) = text.split_once('=').ok_or(remedy)?;
    let hex = digest.strip_prefix("sha256:").ok_or(remedy)?;
    let is_digest = hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    if image.is_empty() || !is_digest {
        Err(remedy.to_owned())
    } else {
        Ok((image.to_owned(), digest.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_belongs_to_an_image() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let read = image_digest(&format!("registry.k8s.io/etcd:3.6.5-0={digest}"));
        assert_eq!(read, Ok(("registry.k8s.io/etcd:3.6.5-0".to_owned(), digest)));
        for text in ["", "etcd", "etcd=", "etcd=sha256:1", "=sha256:1", "etcd@sha256:1"] {
            assert!(image_digest(text).is_err(), "{text}");
        }
    }
}
