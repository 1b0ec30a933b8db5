//! One of `status.conditions` of a Cluster or a Seed, as controllers here write it.

use jiff::{SignedDuration, Timestamp};
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

/// How long the text of a failed pass stays, as long as the longest pause between two attempts.
const SAME_TEXT: SignedDuration = SignedDuration::from_mins(1);

/// The content of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) ready: bool,
    /// One word, in CamelCase.
    pub(crate) reason: &'static str,
    /// A sentence with the finding and the remedy.
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

/// The first problem, and the number of further ones.
pub(crate) fn one_text(problems: &[Problem]) -> String {
    let first = problems.first().map(ToString::to_string).unwrap_or_default();
    match problems.len().saturating_sub(1) {
        0 => first,
        more => format!("{first} (and {more} more: portico check --kubeconfig names them)"),
    }
}

/// A message as it is shown, also in the log: on one line, and of bounded length.
pub(crate) fn shown(message: &str) -> String {
    one_line(message, LONGEST)
}

/// Whether a condition says this.
pub(crate) fn says(
    condition: Option<&ClusterCondition>,
    (holds, reason, message): (bool, &str, &str),
) -> bool {
    condition.is_some_and(|condition| {
        &*condition.status == status(holds)
            && &*condition.reason == reason
            && *condition.message == *shown(message)
    })
}

fn status(holds: bool) -> &'static str {
    if holds { "True" } else { "False" }
}

/// The new condition after `before`, and whether it differs.
///
/// As in KKP, whose schema asks for its version too.
pub(crate) fn condition(
    before: Option<&ClusterCondition>,
    holds: bool,
    reason: &str,
    message: &str,
) -> (Value, bool) {
    let same = says(before, (holds, reason, message));
    let (message, status) = (shown(message), status(holds));
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let since = before.filter(|before| &*before.status == status);
    let since = since.map_or(now.clone(), |before| before.last_transition_time.to_string());
    let condition = json!({"status": status, "reason": reason, "message": message,
        "lastTransitionTime": since, "lastHeartbeatTime": now, "kubermaticVersion": ""});
    (condition, !same)
}

/// What a condition is to say after a pass, as [`condition`] has it. A pass that `failed` leaves another text
/// alone for [`SAME_TEXT`]. The API server may word each refusal in another way, with the port of a
/// connection in it. Each write triggers the next pass at once. No pause between attempts would be kept.
pub(crate) fn condition_after(
    before: Option<&ClusterCondition>,
    (holds, reason, message): (bool, &str, &str),
    failed: bool,
) -> (Value, bool) {
    let (now, changed) = condition(before, holds, reason, message);
    let says_so = before.is_some_and(|before| {
        now["status"] == *before.status && now["reason"] == *before.reason && is_recent(before)
    });
    (now, changed && !(failed && says_so))
}

/// Whether a condition was written less than [`SAME_TEXT`] ago.
fn is_recent(condition: &ClusterCondition) -> bool {
    let written = condition.last_heartbeat_time.parse::<Timestamp>();
    let age = written.map(|written| Timestamp::now().duration_since(written));
    // A clock that was ahead has written into the future, which is no time to wait for.
    age.is_ok_and(|age| !age.is_negative() && age < SAME_TEXT)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_text_of_the_same_failure_is_written_once_a_minute_and_any_other_news_at_once() {
        let written = |ago: i64| {
            let (value, _) = condition(None, false, "WriteRefused", "from port 53422");
            let mut before: ClusterCondition = serde_json::from_value(value).unwrap();
            let at = Timestamp::now() - SignedDuration::from_secs(ago);
            before.last_heartbeat_time = at.to_string().into();
            before
        };
        let is_news = |ago, says, failed| condition_after(Some(&written(ago)), says, failed).1;
        let other_text = (false, "WriteRefused", "from port 53423");
        assert!(!is_news(0, other_text, true) && !is_news(50, other_text, true));
        assert!(is_news(61, other_text, true));
        assert!(is_news(-3_600, other_text, true), "by a clock that was ahead");
        assert!(is_news(0, other_text, false), "the pass went well");
        assert!(is_news(0, (false, "NodePortsExhausted", "from port 53422"), true));
        assert!(is_news(0, (true, "WriteRefused", "from port 53422"), true));
        assert!(!is_news(61, (false, "WriteRefused", "from port 53422"), true));
    }
}
