//! Objects for tests, from the JSON of their `spec`.

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::Seed;
use serde::de::DeserializeOwned;

pub(crate) fn read<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).expect("test documents are valid JSON")
}

pub(crate) fn cluster(name: &str, spec: &str) -> Cluster {
    read(&format!(r#"{{"metadata": {{"name": "{name}"}}, "spec": {spec}}}"#))
}

/// A Cluster whose expose strategy may be changed.
pub(crate) fn migrating(name: &str, spec: &str) -> Cluster {
    read(&format!(
        r#"{{"metadata": {{"name": "{name}", "labels": {{"unsafe-expose-strategy-migration": ""}}}},
            "spec": {spec}}}"#
    ))
}

pub(crate) fn seed(name: &str, spec: &str) -> Seed {
    read(&format!(r#"{{"metadata": {{"name": "{name}", "namespace": "kubermatic"}}, "spec": {spec}}}"#))
}

pub(crate) fn configuration(spec: &str) -> KubermaticConfiguration {
    read(&format!(r#"{{"metadata": {{"name": "kubermatic", "namespace": "kubermatic"}}, "spec": {spec}}}"#))
}
