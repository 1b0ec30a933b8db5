//! The ExposedCluster: from it gateways work, and it is the record of a migration.

use kube::api::Patch;
use portico_api::cluster::Cluster;
use portico_expose::doors::Doors;
use portico_expose::exposure::Wanted;
use portico_kube::apply::merging;
use serde_json::json;

use super::context::Context;
use crate::cache::api;
use crate::controllers::exposed::{Written, projection};
use crate::write::WriteError;

impl Context {
    /// Writes what gateways must know of the cluster, with these doors, or else the one that the Cluster asks
    /// for. Returns why the Cluster cannot be used as written, if so: everything stays as it was then.
    pub(super) async fn write_exposed(
        &self,
        cluster: &Cluster,
        doors: Option<&Doors>,
    ) -> Result<Option<String>, WriteError> {
        let fields = match projection(cluster, &self.installation, doors) {
            Ok(fields) => fields,
            Err(why) => return Ok(Some(why)),
        };
        let wanted = Wanted { name: cluster.metadata.name.to_string(), fields };
        self.put(cluster, &self.exposed, "", &wanted).await?;
        let settled = doors.is_some_and(|doors| doors.now.second.is_none());
        if settled {
            self.end_record(&wanted.name).await?;
        }
        Ok(None)
    }

    /// Ends a record that applying could not: another manager has its fields too.
    async fn end_record(&self, name: &str) -> Result<(), WriteError> {
        let left = self.exposed.get("", name).map(|seen| seen.value());
        if left.is_none_or(|exposed| exposed.pointer("/spec/migration").is_none()) {
            return Ok(());
        }
        let patch = json!({"spec": {"migration": null}});
        let exposed = api::<Written>(&self.client, "");
        let (params, patch) = (merging(), Patch::Merge(&patch));
        let what = format!("spec.migration of ExposedCluster {name}");
        let written = self.request(&what, exposed.patch(name, &params, &patch)).await?;
        self.exposed.written(written);
        self.counters.wrote("ExposedCluster");
        Ok(())
    }
}
