//! The alarms of members of etcd: the database is full, or data differs.
//!
//! Nothing else tells of a full database: all programs run, reads are answered, only writes are refused. A
//! member tells anybody on its port of probes, without TLS, a right or a write. Where the operator cannot
//! reach pods, what was known before counts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::stream::{self, Stream, StreamExt};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use portico_api::cluster::{CONTROL_PLANE_READY, Cluster};
use portico_api::names::ClusterName;
use portico_source::Object;
use serde_json::Value;
use tokio::time::sleep;

use super::context::Context;
use crate::ask;
use crate::clusters::Work;
use crate::condition::State;
use crate::kkp::Kkp;

/// Without asking the other members: each is asked.
const QUESTION: &str = "/health?serializable=true";

/// Asks for the worse alarm. Without this, etcd names one of several, each time another.
const BUT_FULL: &str = "/health?serializable=true&exclude=NOSPACE";

/// Longest answer read: it has one sentence.
const MAX_ANSWER: usize = 4 * 1_024;

/// Members that are asked at the same time.
const CONCURRENCY: usize = 16;

/// An alarm of etcd, the worse one last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Alarm {
    /// NOSPACE.
    Full,
    /// CORRUPT.
    Corrupt,
}

/// The known alarms of each cluster's members, by its name.
#[derive(Debug, Default)]
pub(super) struct Alarms(Mutex<BTreeMap<String, Option<Alarm>>>);

impl Alarms {
    /// Before a member has answered to this process, the condition of the Cluster counts. A new leader must
    /// not say that all is well, and take it back.
    pub(super) fn of(&self, cluster: &Cluster) -> Option<Alarm> {
        let known = self.all().get(&*cluster.metadata.name).copied();
        known.unwrap_or_else(|| {
            let condition = cluster.status.conditions.get(CONTROL_PLANE_READY)?;
            [Alarm::Full, Alarm::Corrupt].into_iter().find(|alarm| alarm.reason() == &*condition.reason)
        })
    }

    /// Takes what the members of `cluster` have answered. Returns whether that is news.
    fn learn(&self, cluster: &Cluster, answered: Option<Alarm>) -> bool {
        let before = self.of(cluster);
        self.all().insert(cluster.metadata.name.to_string(), answered);
        before != answered
    }

    /// Drops what is known of those that `stays` does not keep.
    pub(super) fn retain(&self, stays: impl Fn(&str) -> bool) {
        self.all().retain(|cluster, _| stays(cluster));
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Option<Alarm>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Alarm {
    fn reason(self) -> &'static str {
        match self {
            Self::Full => "EtcdFull",
            Self::Corrupt => "EtcdCorrupt",
        }
    }

    /// Status of the control plane `what` with this alarm; `rest` is what is not ready.
    pub(super) fn state(self, what: &str, rest: &str) -> State {
        let text = match self {
            Self::Full => {
                "etcd refuses every write: its database is as large as its quota allows (NOSPACE). Delete \
                 objects of the cluster that nobody needs, or raise \
                 spec.componentsOverride.etcd.quotaBackendGb; it takes writes again by itself then"
            }
            Self::Corrupt => {
                "a member of etcd has other data than the rest, so etcd refuses everything (CORRUPT). Of \
                 several members the log of that one says so: delete its PersistentVolumeClaim and its pod, \
                 and it gets all data from the others. The only one: restore its volume from a backup"
            }
        };
        let rest = if rest.is_empty() { String::new() } else { format!("; not ready: {rest}") };
        State::bad(self.reason(), format!("{what}: {text}{rest}"))
    }

    /// The content of an answer, if it is one of etcd.
    fn read(answer: &[u8]) -> Option<Option<Self>> {
        let answer: Value = serde_json::from_slice(answer).ok()?;
        answer["health"].as_str()?;
        let reason = answer["reason"].as_str().unwrap_or_default();
        Some(match reason {
            _ if reason.contains("CORRUPT") => Some(Self::Corrupt),
            _ if reason.contains("NOSPACE") => Some(Self::Full),
            _ => None,
        })
    }
}

/// Asks all members again and again. Yields the clusters of which something else is known then.
pub(super) fn changes(context: &Arc<Context>) -> impl Stream<Item = Work> + Send + use<> {
    stream::unfold(Arc::clone(context), |context| async {
        loop {
            sleep(context.settings.alarm_period).await;
            let news = context.ask_for_alarms().await;
            if !news.is_empty() {
                return Some((news, context));
            }
        }
    })
}

impl Context {
    async fn ask_for_alarms(&self) -> Work {
        if !self.is_ready() || self.kkp.now() != Kkp::Absent {
            return Vec::new();
        }
        let pods = self.pods.all();
        let pods = pods.iter().filter(|pod| portico_hosting::has_etcd(&pod.name_any()));
        let members: BTreeSet<(String, IpAddr)> = pods
            .filter_map(|pod| {
                let cluster = ClusterName::of_namespace(&pod.namespace()?)?.to_string();
                Some((cluster, address(&pod.value())?))
            })
            .collect();
        let asked = stream::iter(members)
            .map(|(cluster, address)| async move { Some((cluster, alarm_of(address).await?)) });
        let answers = asked.buffer_unordered(CONCURRENCY).filter_map(std::future::ready);
        let known = answers
            .fold(BTreeMap::<String, Option<Alarm>>::new(), |mut known, (cluster, alarm)| {
                let worst = known.entry(cluster).or_default();
                *worst = alarm.max(*worst);
                std::future::ready(known)
            })
            .await;
        let news = known.into_iter().filter_map(|(name, alarm)| {
            let name = ObjectRef::new(&name);
            let served = self.clusters.store().get(&name)?;
            let Ok(Object::Cluster(cluster)) = &served.object else { return None };
            self.alarms.learn(cluster, alarm).then_some(name)
        });
        news.collect()
    }
}

/// Where a pod is reached. Not of one that has ended: its address may be another's by now.
fn address(pod: &Value) -> Option<IpAddr> {
    let status = &pod["status"];
    let ended = status["phase"] == "Failed" || status["phase"] == "Succeeded";
    status["podIP"].as_str().filter(|_| !ended)?.parse().ok()
}

/// The alarm of a member. Nothing from one that does not answer as etcd does.
async fn alarm_of(address: IpAddr) -> Option<Option<Alarm>> {
    let alarm = get(address, QUESTION).await?;
    if alarm == Some(Alarm::Full) {
        return Some(alarm.max(get(address, BUT_FULL).await?));
    }
    Some(alarm)
}

async fn get(address: IpAddr, path: &str) -> Option<Option<Alarm>> {
    let address = SocketAddr::new(address, portico_hosting::ETCD_PROBES);
    // An alarm is reported with the status of a failure.
    let (_, answer) = ask::get(address, path, MAX_ANSWER).await.ok()?;
    Alarm::read(&answer)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_alarm_is_read_from_what_etcd_answers() {
        for (answer, alarm) in [
            (r#"{"health":"true","reason":""}"#, Some(None)),
            (r#"{"health":"false","reason":"ALARM NOSPACE"}"#, Some(Some(Alarm::Full))),
            (r#"{"health":"false","reason":"ALARM CORRUPT"}"#, Some(Some(Alarm::Corrupt))),
            (r#"{"health":"false","reason":"RAFT NO LEADER"}"#, Some(None)),
            ("{}", None),
            ("404 page not found", None),
        ] {
            assert_eq!(Alarm::read(answer.as_bytes()), alarm, "{answer}");
        }
    }

    #[test]
    fn news_is_what_differs_from_the_last_answer_or_before_one_from_the_condition() {
        let cluster = |reason: &str| -> Cluster {
            let condition = json!({"status": "False", "reason": reason});
            serde_json::from_value(json!({"metadata": {"name": "a"},
                "status": {"conditions": {CONTROL_PLANE_READY: condition}}}))
            .unwrap()
        };
        let (ready, full, alarms) = (cluster("Ready"), cluster("EtcdFull"), Alarms::default());
        assert_eq!(alarms.of(&full), Some(Alarm::Full));
        assert!(!alarms.learn(&full, Some(Alarm::Full)));
        assert!(alarms.learn(&full, None));
        assert_eq!(alarms.of(&full), None);
        alarms.retain(|_| false);
        assert!(!alarms.learn(&ready, None));
        assert!(alarms.learn(&ready, Some(Alarm::Corrupt)));
        assert_eq!(alarms.of(&ready), Some(Alarm::Corrupt));
    }

    #[test]
    fn a_pod_that_has_ended_is_asked_nothing() {
        let pod = |phase| json!({"status": {"podIP": "10.0.0.7", "phase": phase}});
        // A member that does not get ready keeps its pod at that.
        assert_eq!(address(&pod("Pending")), Some(IpAddr::from([10, 0, 0, 7])));
        assert_eq!(address(&pod("Failed")), None);
        assert_eq!(address(&json!({"status": {}})), None);
    }
}
