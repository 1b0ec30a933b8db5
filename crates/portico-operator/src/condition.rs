//! One of `status.conditions` of a Cluster or a Seed, as controllers here write it.

use jiff::Timestamp;
use kube::api::Patch;
use kube::{Api, Client};
use portico_api::cluster::{Cluster, ClusterCondition};
use portico_api::problem::Problem;
use portico_api::text::one_line;
use portico_kube::apply::merging;
use portico_source::served::Served;
use serde_json::{Value, json};

use crate::write::{RequestError, has_condition, request};

/// Characters of a message. It may quote what somebody else has written.
const LONGEST: usize = 2_000;

/// The content of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) ready: bool,
    /// One word, in CamelCase.
    pub(crate) reason: &'static str,
    /// A sentence: what was found, and what to do about it.
    pub(crate) message: String,
}

impl State {
    pub(crate) fn good(reason: &'static str, message: String) -> Self {
        Self { ready: true, reason, message }
    }

    pub(crate) fn bad(reason: &'static str, message: String) -> Self {
        Self { ready: false, reason, message }
    }
}

/// What is wrong: the first problem, and how many more there are.
pub(crate) fn one_text(problems: &[Problem]) -> String {
    let first = problems.first().map(ToString::to_string).unwrap_or_default();
    match problems.len().saturating_sub(1) {
        0 => first,
        more => format!("{first} (and {more} more: portico check --kubeconfig names them)"),
    }
}

/// What a condition is to say, after `before`, and whether that is something else.
///
/// As in KKP, whose schema asks for its version too.
pub(crate) fn condition(
    before: Option<&ClusterCondition>,
    holds: bool,
    reason: &str,
    message: &str,
) -> (Value, bool) {
    let message = one_line(message, LONGEST);
    let status = if holds { "True" } else { "False" };
    let same = before.is_some_and(|before| {
        &*before.status == status && &*before.reason == reason && *before.message == *message
    });
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let since = before.filter(|before| &*before.status == status);
    let since = since.map_or(now.clone(), |before| before.last_transition_time.to_string());
    let condition = json!({"status": status, "reason": reason, "message": message,
        "lastTransitionTime": since, "lastHeartbeatTime": now, "kubermaticVersion": ""});
    (condition, !same)
}

/// Writes what the condition `name` of a Cluster is to say, and no other part of its status. Returns the
/// Cluster as it was written; `None`, without a request, if it says that already.
pub(crate) async fn write_condition(
    client: &Client,
    cluster: &Cluster,
    name: &str,
    (holds, reason, message): (bool, &str, &str),
) -> Result<Option<Served<Cluster>>, RequestError> {
    let (condition, changed) = condition(cluster.status.conditions.get(name), holds, reason, message);
    if !changed {
        return Ok(None);
    }
    // A merge patch: an apply by the same manager would remove the address and the condition
    // `PorticoExposed`, which another controller applies.
    let patch = json!({"status": {"conditions": {name: condition}}});
    let clusters = Api::<Served<Cluster>>::all_with(client.clone(), &());
    let (params, patch) = (merging(), Patch::Merge(&patch));
    let written = clusters.patch_status(&cluster.metadata.name, &params, &patch);
    let written = request("status of the Cluster", written).await?;
    has_condition(&written, name)?;
    Ok(Some(written))
}
