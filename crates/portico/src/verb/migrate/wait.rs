//! Until a migration is done, or time is over: each change of its condition on a line.

use std::time::Duration;

use anyhow::anyhow;
use portico_api::cluster::{Cluster, MIGRATING};
use portico_api::exposed_cluster::{ExposedClusterSpec, MigrationState};
use portico_api::migration::SETTLED;
use portico_api::strategy::ExposeStrategy;
use portico_api::text::one_line;
use portico_expose::migration::Now;
use portico_expose::migration::order::Until;
use portico_kube::Client;
use portico_reach::cluster::{NoCluster, read_cluster};
use portico_reach::doors::record;
use tokio::time::{Instant, sleep_until};

use crate::outcome::{Outcome, print};

/// How often the seed is asked. A state lasts seconds at least: each waits for something on the network.
const PAUSE: Duration = Duration::from_secs(1);

/// Says each change until it is done. The answer is "no" if that takes longer than `limit`, or somebody wants
/// something else meanwhile.
pub(super) async fn until(
    client: &Client,
    name: &str,
    until: &Until,
    limit: Duration,
) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + limit;
    let mut reported = Reported::default();
    loop {
        // An API server that is away for a moment is asked again.
        let found = match look(client, name).await {
            Ok((cluster, record)) => match reported.see(name, *until, &cluster, record.as_ref())? {
                Awaited::Done => return Ok(Outcome::Done),
                Awaited::Other(_) => return Ok(Outcome::No),
                Awaited::NotYet => Ok(()),
            },
            Err(error) if error.is::<NoCluster>() => return Err(error),
            Err(error) => {
                reported.not_seen(name, &error)?;
                Err(error)
            }
        };
        if Instant::now() >= deadline {
            found.map_err(|error| anyhow!("after {limit:?}: {error:#}"))?;
            let last = reported.last();
            let finish = if waits_for_people(last) {
                format!("; portico migrate {name} --finish waits for no node and no user")
            } else {
                String::new()
            };
            print(&format!("{name}  not done within {limit:?}: {last}{finish}\n"))?;
            return Ok(Outcome::No);
        }
        sleep_until(deadline.min(Instant::now() + PAUSE)).await;
    }
}

async fn look(client: &Client, name: &str) -> anyhow::Result<(Cluster, Option<ExposedClusterSpec>)> {
    let (_, cluster) = read_cluster(client, name).await?;
    let record = record(client, &cluster).await?;
    Ok((cluster, record))
}

/// How it stands with one cluster that is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// What is waited for is so.
    Done,
    /// Somebody else wants this strategy meanwhile.
    Other(ExposeStrategy),
    /// Neither.
    NotYet,
}

/// What was said last of one cluster, so that only changes are said.
#[derive(Debug, Default)]
pub(super) struct Reported {
    line: Option<String>,
    /// Why the last look showed nothing.
    error: Option<String>,
}

impl Reported {
    /// Says what has changed of the cluster.
    pub(super) fn see(
        &mut self,
        name: &str,
        until: Until,
        cluster: &Cluster,
        record: Option<&ExposedClusterSpec>,
    ) -> anyhow::Result<Awaited> {
        self.error = None;
        let wanted = cluster.spec.expose_strategy.get().copied();
        if let Some(other) = wanted.filter(|&wanted| wanted != until.wanted()) {
            print(&format!("{name}  somebody else has written {other}, which is wanted now\n"))?;
            return Ok(Awaited::Other(other));
        }
        let done = is_done(until, cluster, record);
        if let Some(line) = line(cluster).filter(|line| done || !line.starts_with(SETTLED))
            && self.line.as_ref() != Some(&line)
        {
            print(&format!("{name}  {line}\n"))?;
            self.line = Some(line);
        }
        Ok(if done { Awaited::Done } else { Awaited::NotYet })
    }

    /// Says of `what` that a look showed nothing, once for each reason.
    pub(super) fn not_seen(&mut self, what: &str, error: &anyhow::Error) -> anyhow::Result<()> {
        let error = format!("{error:#}");
        if self.error.as_ref() != Some(&error) {
            print(&format!("{what}  cannot be read, and is tried again: {error}\n"))?;
            self.error = Some(error);
        }
        Ok(())
    }

    /// What was said last.
    pub(super) fn last(&self) -> &str {
        self.line.as_deref().unwrap_or(SILENCE)
    }
}

/// What is printed of a cluster of which the operator has said nothing.
pub(super) const SILENCE: &str = "the operator has not said anything (PorticoMigration)";

/// Whether a cluster waits for its nodes or its users, for which an order to finish does not wait.
pub(super) fn waits_for_people(line: &str) -> bool {
    [MigrationState::MovingNodes, MigrationState::Quieting].iter().any(|state| line.starts_with(state.name()))
}

/// What the operator says, if it has said something: on one line, for whoever may write the status of a
/// Cluster would else write lines about others.
pub(super) fn line(cluster: &Cluster) -> Option<String> {
    let condition = cluster.status.conditions.get(MIGRATING)?;
    let [reason, message] =
        [(&condition.reason, 40), (&condition.message, 2_000)].map(|(text, most)| one_line(text, most));
    Some(format!("{reason:<11}  {message}"))
}

/// Whether what is waited for is so. The condition alone may be that of an earlier migration.
fn is_done(until: Until, cluster: &Cluster, record: Option<&ExposedClusterSpec>) -> bool {
    let Some(now) = record.map(Now::of) else { return false };
    match until {
        Until::Settled(strategy) => {
            // A cluster that never migrated has no condition. It gets none by an order that is taken back
            // before it began.
            let condition = cluster.status.conditions.get(MIGRATING);
            let says_so = condition.is_none_or(|it| &*it.reason == SETTLED && &*it.status == "True");
            now == Now::settled(strategy) && says_so
        }
        Until::Closed { door, .. } => now.second.is_none_or(|second| second.strategy != door),
    }
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::ExposeStrategy::{LoadBalancer, NodePort, Tunneling};
    use serde_json::json;

    use super::*;

    fn cluster(status: &str, reason: &str) -> Cluster {
        serde_json::from_value(json!({"metadata": {"name": "a"}, "status": {"conditions":
            {MIGRATING: {"status": status, "reason": reason, "message": "text"}}}}))
        .unwrap()
    }

    fn record(first: &str, second: Option<&str>) -> ExposedClusterSpec {
        let mut spec = json!({"exposeStrategy": first, "seed": "north"});
        if let Some(second) = second {
            spec["migration"] = json!({"state": "Closing", "since": "2026-01-02T03:04:05Z",
                "second": {"exposeStrategy": second}});
        }
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn a_condition_of_before_is_not_the_end_and_neither_is_a_record_that_is_gone() {
        let settled = cluster("True", "Settled");
        let done = |cluster: &Cluster, record: Option<ExposedClusterSpec>| {
            is_done(Until::Settled(Tunneling), cluster, record.as_ref())
        };
        assert!(done(&settled, Some(record("Tunneling", None))));
        assert!(!done(&settled, Some(record("NodePort", None))));
        assert!(!done(&settled, Some(record("Tunneling", Some("NodePort")))));
        assert!(!done(&settled, None));
        assert!(!done(&cluster("False", "Closing"), Some(record("Tunneling", None))));
    }

    #[test]
    fn an_order_that_was_taken_back_before_it_began_is_done_without_a_condition() {
        let silent = Cluster::default();
        let done = |record| is_done(Until::Settled(NodePort), &silent, Some(&record));
        assert!(done(record("NodePort", None)));
        assert!(!done(record("Tunneling", None)));
        assert!(!done(record("NodePort", Some("Tunneling"))));
    }

    #[test]
    fn a_door_is_closed_whatever_comes_after_it() {
        let until = Until::Closed { door: NodePort, wanted: LoadBalancer };
        let any = cluster("False", "Opening");
        assert!(!is_done(until, &any, Some(&record("Tunneling", Some("NodePort")))));
        assert!(is_done(until, &any, Some(&record("Tunneling", Some("LoadBalancer")))));
        assert!(is_done(until, &any, Some(&record("Tunneling", None))));
    }

    #[test]
    fn a_line_is_what_the_operator_says() {
        assert_eq!(line(&cluster("False", "Moving")).unwrap(), "Moving       text");
        assert_eq!(line(&Cluster::default()), None);
        assert_eq!(line(&cluster("False", "Moving\nb  Settled")).unwrap(), "Moving b  Settled  text");
    }
}
