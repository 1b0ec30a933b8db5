//! The planned Services that were handed out, so that only changed ones come out again.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::cluster::Cluster;
use portico_api::meta::{Kind, ObjectKey, ObjectRef};
use portico_api::service::Service;

use super::explicit::ExplicitServices;
use crate::change::Output;
use crate::services::Exposed;

/// A planned Service that was handed out. A digest says whether it changed, at an eightieth of its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Served {
    pub(super) name: &'static str,
    /// `None` if a Service that a user wrote replaces it.
    digest: Option<u64>,
}

impl Served {
    /// Whether the planned Service itself is served.
    pub(super) fn is_planned(&self) -> bool {
        self.digest.is_some()
    }

    /// The output that withdraws the Service, if it is served.
    pub(super) fn withdrawal(&self, namespace: &str) -> Option<Output> {
        let key = ObjectKey::new(namespace, self.name);
        self.is_planned().then_some(Output::PlannedService(Change::Delete(key)))
    }
}

/// Hands out the planned Services of a Cluster that differ from those `before`, and returns all that are
/// served now.
pub(super) fn serve(
    cluster: &Cluster,
    exposed: Vec<Exposed>,
    before: &[Served],
    explicit: &ExplicitServices,
    outputs: &mut Vec<Output>,
) -> Box<[Served]> {
    let mut served = Vec::with_capacity(exposed.len());
    for Exposed { entry, service } in exposed {
        let key = service.metadata.key();
        let replaced = explicit.contains(&key);
        let now = Served { name: entry.service, digest: (!replaced).then(|| digest(&service)) };
        let unchanged = before.contains(&now);
        served.push(now);
        if unchanged {
            continue;
        }
        if replaced {
            let text =
                format!("takes the place of the Service planned for Cluster {}", cluster.metadata.name);
            outputs.push(Output::Note(ObjectRef { kind: Kind::Service, key }, text));
        } else {
            outputs.push(Output::PlannedService(Change::Apply(Arc::new(service))));
        }
    }
    let namespace = cluster.name().namespace();
    let withdrawn = before.iter().filter(|old| !served.iter().any(|now| now.name == old.name));
    outputs.extend(withdrawn.filter_map(|old| old.withdrawal(&namespace)));
    served.into()
}

fn digest(service: &Service) -> u64 {
    let mut hasher = DefaultHasher::new();
    service.hash(&mut hasher);
    hasher.finish()
}
