//! Which versions of Kubernetes can be hosted, and from which images: `versions.yaml`.

use std::sync::LazyLock;

use portico_api::hosting::Version;
use portico_yaml::Documents;
use serde::Deserialize;

/// The file, read once; a test reads it too.
static VERSIONS: LazyLock<Versions> = LazyLock::new(|| {
    let document = Documents::new(include_str!("../versions.yaml")).next();
    document.and_then(Result::ok).and_then(|document| document.typed().ok()).unwrap_or_default()
});

/// What `versions.yaml` says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// The registry of all images.
    pub registry: String,
    /// The image of a cluster's own Prometheus, where it asks for one.
    pub prometheus: String,
    /// The minor versions, oldest first.
    pub minors: Vec<Minor>,
}

/// One minor version of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Minor {
    /// Its number.
    pub minor: u16,
    /// Tag of the image of etcd.
    pub etcd: String,
    /// Tag of the image of CoreDNS.
    pub coredns: String,
    /// Tag of the image of metrics-server.
    pub metrics_server: String,
}

impl Versions {
    /// The versions that this build knows.
    pub fn known() -> &'static Self {
        &VERSIONS
    }

    /// What belongs to `version`.
    pub fn of(&self, version: Version) -> Option<&Minor> {
        self.minors.iter().find(|known| known.minor == version.minor)
    }

    /// The minor versions, as in `1.33, 1.34`.
    pub fn listed(&self) -> String {
        let minors: Vec<String> = self.minors.iter().map(|known| format!("1.{}", known.minor)).collect();
        minors.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_readable_and_in_order() {
        let known = Versions::known();
        assert_eq!(known.registry, "registry.k8s.io");
        assert!(known.minors.len() >= 4 && known.minors.is_sorted_by_key(|minor| minor.minor));
        assert!(known.of("1.34.4".parse().unwrap()).is_some());
        assert!(known.of("1.20.0".parse().unwrap()).is_none());
    }
}
