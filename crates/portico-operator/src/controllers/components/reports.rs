//! Status of every Seed: as a condition, in the log and as an Event when it changes, and in `/status`.

use k8s_openapi::{NamespaceResourceScope, Resource};
use kube::api::Patch;
use kube::core::Status;
use portico_api::cluster::ClusterCondition;
use portico_api::seed::Seed;
use portico_kube::apply::merging;
use portico_kube::events::{Note, Severity};
use portico_source::served::ServedKind;
use serde_json::{Value, json};
use tracing::{info, warn};

use super::context::Context;
use crate::cache::api;
use crate::condition::{State, condition_after, shown};
use crate::installation::reference;
use crate::status::SeedReport;
use crate::write::{DEFINITION_OUTDATED, RequestError, WriteError, must_lead, request};

/// The condition of a Seed with the status of its gateway.
pub(super) const CONDITION: &str = "PorticoSeedReady";

/// Seeds as they are, status included.
struct Written;

impl Resource for Written {
    const API_VERSION: &'static str = "kubermatic.k8c.io/v1";
    const GROUP: &'static str = Seed::GROUP;
    const KIND: &'static str = "Seed";
    const VERSION: &'static str = Seed::VERSION;
    const URL_PATH_SEGMENT: &'static str = Seed::PLURAL;
    type Scope = NamespaceResourceScope;
}

impl Context {
    /// Records the status of `seed`, and reports it if it changed. `failed` counts a failed pass.
    ///
    /// # Errors
    /// The condition could not be written. That counts as a failure too.
    pub(super) async fn report(&self, seed: &Seed, state: &State, failed: bool) -> Result<(), WriteError> {
        let key = seed.metadata.key();
        let State { ready, reason, message } = state;
        let before = self.status.seeds(|seeds| seeds.reports.get(&key).cloned());
        let known = before.as_ref().filter(|before| before.condition_written);
        // The text of a failed pass may not have been written yet.
        let same =
            !failed && known.is_some_and(|b| (b.ready, b.reason, &b.message) == (*ready, *reason, message));
        let written = if same { Ok(false) } else { self.write_condition(seed, state, failed).await };
        match &written {
            Ok(_) => {}
            Err(WriteError::NotLeading) => return written.map(drop),
            Err(error) => {
                self.counters.failed(error.reason());
                warn!(seed = %key, %error, "cannot write the condition of the Seed");
                let news = before.as_ref().is_none_or(|before| before.condition_written);
                if news && error.reason() == DEFINITION_OUTDATED {
                    // Nothing but an Event can say it.
                    self.tell(seed, Severity::Warning, DEFINITION_OUTDATED, &error.to_string()).await;
                }
            }
        }
        let is_first = before.is_none();
        let failures = before.as_ref().map_or(0, |before| before.failures);
        let report = SeedReport {
            ready: *ready,
            reason,
            message: message.clone(),
            failures: if failed || written.is_err() { failures.saturating_add(1) } else { 0 },
            condition_written: written.is_ok(),
        };
        self.status.seeds(|seeds| seeds.reports.insert(key, report));
        if before.is_none_or(|before| (before.ready, before.reason) != (*ready, *reason)) {
            let severity = if *ready { Severity::Normal } else { Severity::Warning };
            let says_so = is_first && matches!(written, Ok(false));
            if says_so {
                log(seed, severity, reason, message);
            } else {
                self.tell(seed, severity, reason, message).await;
            }
        }
        written.map(drop)
    }

    /// An Event on the Seed, and a line in the log.
    pub(super) async fn tell(&self, seed: &Seed, severity: Severity, reason: &str, text: &str) {
        let text = &*shown(text);
        log(seed, severity, reason, text);
        self.events.publish(&reference(seed), Note { severity, reason, action: "KeepGateway", text }).await;
    }

    /// Writes the condition, if it says something else than before. Returns whether it did.
    async fn write_condition(&self, seed: &Seed, state: &State, failed: bool) -> Result<bool, WriteError> {
        let api = api::<Written>(&self.client, &seed.metadata.namespace);
        let name = &seed.metadata.name;
        let Some(found) = request("reading the Seed", api.get_opt(name)).await? else { return Ok(false) };
        let found = found.value();
        let before = found.pointer("/status/conditions").and_then(|all| all.get(CONDITION));
        let before: Option<ClusterCondition> =
            before.and_then(|before| serde_json::from_value(before.clone()).ok());
        let says = (state.ready, state.reason, &*state.message);
        let (condition, changed) = condition_after(before.as_ref(), says, failed);
        if !changed {
            return Ok(false);
        }
        must_lead(&self.leads)?;
        let mut patch = json!({"status": {"conditions": {CONDITION: condition}}});
        let write = async |patch: &Value| {
            let patch = Patch::Merge(patch);
            request("writing the condition of the Seed", api.patch_status(name, &merging(), &patch)).await
        };
        let written = match write(&patch).await {
            // The schema of KKP asks for a number that its controllers, which are not here, keep.
            Err(error)
                if error.status().is_some_and(Status::is_invalid)
                    && found.pointer("/status/clusters").is_none() =>
            {
                patch["status"]["clusters"] = json!(0);
                write(&patch).await?
            }
            other => other?,
        };
        if written.value().pointer("/status/conditions").and_then(|all| all.get(CONDITION)).is_none() {
            return Err(RequestError::Dropped { kind: "Seeds", field: "status.conditions" }.into());
        }
        self.count(true, Written::KIND);
        Ok(true)
    }
}

fn log(seed: &Seed, severity: Severity, reason: &str, text: &str) {
    let key = seed.metadata.key();
    match severity {
        Severity::Normal => info!(seed = %key, reason, "{text}"),
        Severity::Warning => warn!(seed = %key, reason, "{text}"),
    }
}
