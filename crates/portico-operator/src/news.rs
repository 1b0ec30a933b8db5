//! What is new of a Cluster, in the log and as an Event: the course of every controller of Clusters.

use portico_api::cluster::Cluster;
use portico_kube::events::{Events, Note, Severity};
use tracing::{debug, warn};

use crate::condition::says;
use crate::controllers::exposed::reference;

/// Clusters whose trouble is written to the log; `/status` has all of them.
const MAX_LOGGED: usize = 10;

/// The status of a cluster is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct News {
    /// Clusters with trouble.
    pub(crate) troubled: usize,
    /// None was known before. A replica that begins to lead knows none, and conditions may say it already.
    pub(crate) first: bool,
}

impl News {
    /// Writes a line to the log, and an Event on `cluster`. There is no Event if this is the first news, and
    /// `condition` says already that it `holds`, with the reason and the text of `note`.
    pub(crate) async fn publish(
        self,
        cluster: &Cluster,
        (condition, holds): (&str, bool),
        note: Note<'_>,
        events: &Events,
    ) {
        self.log(&cluster.metadata.name, !holds, &note);
        let condition = cluster.status.conditions.get(condition);
        if !(self.first && says(condition, (holds, note.reason, note.text))) {
            events.publish(&reference(cluster), note).await;
        }
    }

    /// Writes a line to the log: of trouble for all to read, of the rest for debugging.
    pub(crate) fn log(
        self,
        cluster: &str,
        is_trouble: bool,
        &Note { severity, reason, text, .. }: &Note<'_>,
    ) {
        match (severity, self.troubled) {
            (Severity::Warning, ..=MAX_LOGGED) if is_trouble => warn!(cluster, reason, "{text}"),
            _ => debug!(cluster, reason, "{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::log_lines::LogLines;
    use serde_json::json;
    use tracing::Level;

    use super::*;
    use crate::condition::condition;
    use crate::testing::FakeApi;

    const NAME: &str = "SomethingReady";

    /// Publishes what is new of a Cluster whose condition says `said`. Returns the reasons of the Events.
    async fn published(news: News, said: &str) -> Vec<String> {
        let (before, _) = condition(None, false, "QuotaExceeded", said);
        let cluster = json!({"metadata": {"name": "a"}, "status": {"conditions": {NAME: before}}});
        let cluster = serde_json::from_value(cluster).unwrap_or_default();
        let api = FakeApi::default();
        let events = Events::new(api.client(), "controller", "this");
        let (reason, text) = ("QuotaExceeded", "the seed has enough");
        let note = Note { severity: Severity::Warning, reason, action: "Host", text };
        news.publish(&cluster, (NAME, false), note, &events).await;
        api.reasons()
    }

    #[tokio::test]
    async fn a_new_leader_writes_no_event_of_what_the_condition_says() {
        let news = |first| News { troubled: 1, first };
        assert_eq!(published(news(true), "the seed has enough").await, [""; 0]);
        assert_eq!(published(news(true), "another limit").await, ["QuotaExceeded"]);
        assert_eq!(published(news(false), "the seed has enough").await, ["QuotaExceeded"]);
    }

    #[tokio::test]
    async fn the_log_has_the_first_clusters_with_trouble() {
        let (lines, _collects) = LogLines::collect(|line| *line.level() == Level::WARN);
        for troubled in 1..=2 * MAX_LOGGED {
            published(News { troubled, first: false }, "").await;
        }
        assert_eq!(lines.messages().len(), MAX_LOGGED);
    }
}
