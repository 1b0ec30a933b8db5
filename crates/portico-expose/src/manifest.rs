//! The manifests of `deploy/` that controllers apply. They are compiled in, and are the one source of their
//! content.

use portico_yaml::Documents;
use serde_json::Value;

/// The objects of a manifest that was there when this was compiled; tests read all of them.
pub(crate) fn objects(manifest: &'static str) -> impl Iterator<Item = Value> {
    Documents::new(manifest).filter_map(|document| Some(document.ok()?.to_value()))
}
