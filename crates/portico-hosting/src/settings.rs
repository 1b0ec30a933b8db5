//! What an installation says about all control planes.

use std::collections::BTreeMap;

use ipnet::IpNet;

use crate::versions::Versions;

/// Settings of all control planes of a seed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The image of Portico, for the Konnectivity server.
    pub image: String,
    /// What takes the place of the registry of upstream's images, with a path or without.
    pub registry_mirror: Option<String>,
    /// Digests of images (`sha256:…`), by their name and tag as they are pulled.
    pub digests: BTreeMap<String, String>,
    /// Secrets in the namespace of each cluster with credentials of registries.
    pub pull_secrets: Vec<String>,
    /// Class of the volumes of etcd, where a Cluster names none; `None` for the seed's default.
    pub storage_class: Option<String>,
    /// Where `portico metrics` is reached from the pods of the seed, as `http://HOST:PORT`.
    pub metrics_url: String,
    /// Networks of the seed: of its pods, Services and nodes. Those of a user cluster must not overlap them.
    pub seed_networks: Vec<IpNet>,
}

impl Settings {
    /// An image of upstream.
    pub(crate) fn upstream(&self, name: &str, tag: &str) -> String {
        let registry = self.registry_mirror.as_deref().unwrap_or(&Versions::known().registry);
        self.pinned(format!("{}/{name}:{tag}", registry.trim_end_matches('/')))
    }

    /// An image of another registry, by its whole name.
    pub(crate) fn image(&self, image: &str) -> String {
        let name = |mirror: &String| {
            let path = image.split_once('/').map_or(image, |(_, path)| path);
            format!("{}/{path}", mirror.trim_end_matches('/'))
        };
        self.pinned(self.registry_mirror.as_ref().map_or_else(|| image.to_owned(), name))
    }

    /// The image of Portico.
    pub(crate) fn own(&self) -> String {
        self.pinned(self.image.clone())
    }

    fn pinned(&self, image: String) -> String {
        match self.digests.get(&image) {
            Some(digest) => format!("{image}@{digest}"),
            None => image,
        }
    }
}
