//! The ExposedCluster controller: one ExposedCluster for each Cluster, so that gateways need no right to read
//! Clusters, which hold admin tokens.
//!
//! What an ExposedCluster says is decided by [`portico_expose::projection`]. It is written by server-side
//! apply, only if something differs, and only by the leader. It is owned by its Cluster and goes with it: the
//! garbage collector of the seed deletes it. A Cluster that must not be used as written keeps the
//! ExposedCluster it has. Every object is written by itself, so that a process that is killed between two
//! writes leaves the rest to the next one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::ready;
use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_expose::projection::exposed_cluster;
use portico_kube::apply::{Applied, ApplyError, apply};
use portico_kube::error::describe;
use portico_kube::events::{Events, Note, Severity};
use portico_source::Object;
use portico_source::served::{Served, ServedKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::above::Above;
use crate::follow::{drive, follow, on_change};
use crate::status::StatusHandle;

/// Time limit of a write. The API server may have done it all the same; the watch will tell.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The first pause after a failed write; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Objects that are written at the same time.
const CONCURRENCY: u16 = 4;

/// Clusters whose trouble is written to the log one by one; `/status` has all of them.
const MAX_LOGGED: usize = 5;

/// An ExposedCluster as the API server has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Written {
    metadata: ObjectMeta,
    /// Not typed: one that does not fit must not fail the list of all others.
    #[serde(default)]
    spec: Value,
}

impl Resource for Written {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        ExposedCluster::KIND.name().into()
    }

    fn group((): &()) -> Cow<'_, str> {
        ExposedCluster::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        ExposedCluster::VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        ExposedCluster::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Why an ExposedCluster was not written. Retried with back-off.
#[derive(Debug, Error)]
enum WriteError {
    #[error("{}", describe(.0))]
    Apply(#[from] ApplyError),
    #[error("no answer within {WRITE_TIMEOUT:?}")]
    NoAnswer,
}

/// How it stands with the ExposedCluster of one Cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// It is as it should be.
    Written,
    /// The Cluster must not be used as written; the ExposedCluster stays as it was, or absent.
    Refused(String),
    /// So many writes have failed in a row.
    Failed(u32, String),
}

/// Everything that a reconciliation needs.
struct Context {
    client: Client,
    clusters: Store<Served<Cluster>>,
    written: Store<Written>,
    /// Whether all ExposedClusters are known.
    written_known: Mutex<bool>,
    above: Above,
    leads: channel::Receiver<bool>,
    events: Events,
    status: StatusHandle,
    states: Mutex<BTreeMap<String, State>>,
}

/// What there is to reconcile.
type Work = Vec<ObjectRef<Served<Cluster>>>;

/// Watches and writes, for ever.
pub(crate) async fn run(
    client: Client,
    above: Above,
    events: Events,
    status: StatusHandle,
    leads: channel::Receiver<bool>,
) {
    let (clusters, clusters_writer) = reflector::store();
    let (written, written_writer) = reflector::store();
    let changes = above.changes();
    let context = Arc::new(Context {
        client: client.clone(),
        clusters: clusters.clone(),
        written,
        written_known: Mutex::new(false),
        above,
        leads: leads.clone(),
        events,
        status,
        states: Mutex::default(),
    });
    let triggers = stream::select_all([
        follow_clusters(&client, clusters_writer, &context).boxed(),
        follow_written(&client, written_writer, &context).boxed(),
        on_change(changes, &context, Context::all).boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.forget_all();
            context.all()
        })
        .boxed(),
    ]);
    drive(reconcile, |cluster, _, context| context.retry(&cluster), context, clusters, triggers, CONCURRENCY)
        .await;
}

/// Makes the ExposedCluster of one Cluster as it should be.
async fn reconcile(served: Arc<Served<Cluster>>, context: Arc<Context>) -> Result<Action, WriteError> {
    let Ok(Object::Cluster(cluster)) = &served.object else { return Ok(Action::await_change()) };
    let Some(wanted) = context.wanted(cluster).await else { return Ok(Action::await_change()) };
    let name = wanted.name_any();
    let current = context.written.get(&ObjectRef::new(&name));
    let api = Api::<Written>::all(context.client.clone());
    let written = match timeout(WRITE_TIMEOUT, apply(&api, &wanted, current.as_deref())).await {
        Ok(written) => written.map_err(WriteError::from),
        Err(_) => Err(WriteError::NoAnswer),
    };
    match written {
        Ok(applied) => {
            if matches!(applied, Applied::Changed(_)) {
                debug!(cluster = name, "ExposedCluster written");
                context.status.update(|status| status.exposed_clusters.writes += 1);
            }
            context.set(cluster, State::Written).await;
            Ok(Action::await_change())
        }
        Err(error) => {
            context.status.update(|status| status.exposed_clusters.failed_writes += 1);
            let failures = match context.states().get(&name) {
                Some(State::Failed(failures, _)) => failures.saturating_add(1),
                _ => 1,
            };
            context.set(cluster, State::Failed(failures, error.to_string())).await;
            Err(error)
        }
    }
}

impl Context {
    /// The ExposedCluster as it should be; `None` while that is not known, or this replica does not write.
    async fn wanted(&self, cluster: &Cluster) -> Option<Written> {
        let known = self.above.seeds.is_known() && self.above.configurations.is_known();
        let written_known = *self.written_known.lock().unwrap_or_else(PoisonError::into_inner);
        if !*self.leads.borrow() || !known || !written_known {
            return None;
        }
        let configurations = self.above.configurations.configurations();
        if configurations.len() > 1 {
            let text = "there are several KubermaticConfigurations; keep one".to_owned();
            self.set(cluster, State::Refused(text)).await;
            return None;
        }
        let seeds = self.above.seeds.seeds();
        let configuration = configurations.first().map(|configuration| &**configuration);
        match exposed_cluster(cluster, &seeds, configuration) {
            Ok(exposed) => written(cluster, &exposed),
            Err(problems) => {
                let first = problems.first().map(ToString::to_string).unwrap_or_default();
                self.set(cluster, State::Refused(first)).await;
                None
            }
        }
    }

    fn retry(&self, cluster: &Served<Cluster>) -> Action {
        let failures = match self.states().get(&*cluster.reference.key.name) {
            Some(State::Failed(failures, _)) => *failures,
            _ => 1,
        };
        Action::requeue(FIRST_RETRY.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LAST_RETRY))
    }

    /// Records how it stands with one Cluster, and says so if that is news.
    async fn set(&self, cluster: &Cluster, state: State) {
        let name = cluster.metadata.name.to_string();
        let text = match &state {
            State::Written => None,
            State::Refused(text) => Some((text.clone(), "ClusterNotUsable", Severity::Warning)),
            State::Failed(_, text) => Some((text.clone(), "WriteRefused", Severity::Warning)),
        };
        let before = self.states().insert(name.clone(), state.clone());
        self.report();
        let same = matches!(
            (&before, &state),
            (None | Some(State::Written), State::Written)
                | (Some(State::Failed(..)), State::Failed(..))
                | (Some(State::Refused(_)), State::Refused(_))
        );
        if same {
            return;
        }
        let (text, reason, severity) = text.unwrap_or_else(|| {
            ("The ExposedCluster is as it should be".to_owned(), "ExposedClusterWritten", Severity::Normal)
        });
        let troubled = self.status.update(|status| status.exposed_clusters.troubles.len());
        match severity {
            Severity::Warning if troubled <= MAX_LOGGED => warn!(cluster = name, reason, "{text}"),
            Severity::Warning if troubled == MAX_LOGGED + 1 => {
                warn!(reason, "more Clusters have this trouble; /status names them all");
            }
            _ => debug!(cluster = name, reason, "{text}"),
        }
        let object = ObjectReference {
            api_version: Some(format!("{}/{}", Cluster::GROUP, Cluster::VERSION)),
            kind: Some(Kind::Cluster.name().to_owned()),
            name: Some(name),
            uid: Some(cluster.metadata.uid.to_string()),
            ..ObjectReference::default()
        };
        let note = Note { severity, reason, action: "ExposeCluster", text: &text };
        self.events.publish(&object, note).await;
    }

    /// Drops what is recorded about Clusters that are gone.
    fn forget_gone(&self) {
        self.states().retain(|name, _| self.clusters.get(&ObjectRef::new(name)).is_some());
        self.report();
    }

    fn forget_all(&self) {
        self.states().clear();
        self.report();
    }

    fn report(&self) {
        let states = self.states().clone();
        self.status.update(|status| {
            let report = &mut status.exposed_clusters;
            report.written = states.values().filter(|state| **state == State::Written).count();
            report.refused = states.values().filter(|state| matches!(state, State::Refused(_))).count();
            report.failed = states.values().filter(|state| matches!(state, State::Failed(..))).count();
            report.troubles = states
                .into_iter()
                .filter_map(|(name, state)| match state {
                    State::Written => None,
                    State::Refused(text) | State::Failed(_, text) => Some((name, text)),
                })
                .collect();
        });
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<String, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Work {
        self.clusters.state().iter().map(|served| ObjectRef::from_obj(&**served)).collect()
    }
}

/// The ExposedCluster as it is applied. `None` cannot happen: it is plain data.
fn written(cluster: &Cluster, exposed: &ExposedCluster) -> Option<Written> {
    let owner = OwnerReference {
        api_version: format!("{}/{}", Cluster::GROUP, Cluster::VERSION),
        kind: Kind::Cluster.name().to_owned(),
        name: cluster.metadata.name.to_string(),
        uid: cluster.metadata.uid.to_string(),
        ..OwnerReference::default()
    };
    let labels = exposed.metadata.labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    Some(Written {
        metadata: ObjectMeta {
            name: Some(cluster.metadata.name.to_string()),
            labels: Some(labels.collect()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: serde_json::to_value(&exposed.spec).ok()?,
    })
}

/// Watches the Clusters, and yields those that changed.
fn follow_clusters(
    client: &Client,
    writer: reflector::store::Writer<Served<Cluster>>,
    context: &Arc<Context>,
) -> impl Stream<Item = Work> + Send + 'static {
    let context = Arc::clone(context);
    let api = Api::<Served<Cluster>>::all_with(client.clone(), &());
    follow(api, Kind::Cluster.name(), context.status.clone())
        // Of one that cannot be read the last readable version stays.
        .filter(|event| {
            use watcher::Event::{Apply, InitApply};
            let unreadable = matches!(event, Ok(Apply(served) | InitApply(served)) if served.object.is_err());
            ready(!unreadable)
        })
        .reflect(writer)
        .filter_map(move |event| {
            ready(match event.ok() {
                None | Some(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
                Some(watcher::Event::InitDone) => {
                    context.forget_gone();
                    Some(context.all())
                }
                Some(watcher::Event::Apply(served)) => Some(vec![ObjectRef::from_obj(&served)]),
                Some(watcher::Event::Delete(_)) => {
                    context.forget_gone();
                    None
                }
            })
        })
}

/// Watches the ExposedClusters, and yields the Clusters of those that changed.
fn follow_written(
    client: &Client,
    writer: reflector::store::Writer<Written>,
    context: &Arc<Context>,
) -> impl Stream<Item = Work> + Send + 'static {
    let context = Arc::clone(context);
    let api = Api::<Written>::all(client.clone());
    follow(api, Kind::ExposedCluster.name(), context.status.clone()).reflect(writer).filter_map(
        move |event| {
            ready(match event.ok() {
                None | Some(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
                Some(watcher::Event::InitDone) => {
                    *context.written_known.lock().unwrap_or_else(PoisonError::into_inner) = true;
                    Some(context.all())
                }
                Some(watcher::Event::Apply(object) | watcher::Event::Delete(object)) => {
                    Some(vec![ObjectRef::new(&object.name_any())])
                }
            })
        },
    )
}

#[cfg(test)]
mod tests;
