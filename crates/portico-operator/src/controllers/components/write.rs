//! Single writes of the controller of seed components: by the leader alone, and counted.

use portico_api::seed::Seed;
use portico_kube::events::{Note, Severity};
use serde_json::Value;
use tracing::info;

use super::context::Context;
use crate::installation::reference;
use crate::managed::{Managed, Put};
use crate::write::{PUT_BACK, WriteError, must_lead, part};

impl Context {
    /// Applies an object, and counts it if that changed anything. One put back is an Event of the Seed.
    pub(super) async fn write(
        &self,
        seed: &Seed,
        held: &dyn Managed,
        wanted: &Value,
    ) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let put = held.put(&self.client, wanted).await?;
        self.count(put != Put::Unchanged, held.kind());
        match put {
            Put::Unchanged => {}
            Put::Changed => info!(object = %held.key(), kind = held.kind(), "written"),
            Put::Back(text) => {
                info!(object = %held.key(), kind = held.kind(), "{text}");
                let note =
                    Note { severity: Severity::Normal, reason: PUT_BACK, action: "KeepGateway", text: &text };
                self.events.publish_about(&reference(seed), part(held.kind(), held.key()), note).await;
            }
        }
        Ok(())
    }

    /// Deletes an object that is not wanted, if Portico has applied it.
    pub(super) async fn remove(&self, held: &dyn Managed) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let removed = held.remove(&self.client).await?;
        self.count(removed, held.kind());
        if removed {
            info!(object = %held.key(), kind = held.kind(), "deleted");
        }
        Ok(())
    }
}
