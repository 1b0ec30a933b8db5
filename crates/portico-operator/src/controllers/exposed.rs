//! The ExposedCluster controller: one ExposedCluster for each Cluster, so that gateways need no right to read
//! Clusters, which hold admin tokens.
//!
//! What an ExposedCluster says is decided by [`portico_expose::projection`]. It is written by server-side
//! apply, only if something differs, and only by the leader. It is owned by its Cluster and goes with it: the
//! garbage collector of the seed deletes it. A Cluster that must not be used as written keeps the
//! ExposedCluster it has. Every object is written by itself, so that a process that is killed between two
//! writes leaves the rest to the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_expose::doors::Doors;
use portico_expose::exposure::owner;
use portico_expose::projection::exposed_cluster;
use portico_kube::apply::{Applied, ApplyError, apply};
use portico_kube::error::describe;
use portico_kube::events::{Events, Note, Severity};
use portico_kube::leader::Leads;
use portico_source::Object;
use portico_source::served::{Served, ServedKind};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::cache::{Cache, api};
use crate::clusters::{ClusterWatch, Work};
use crate::follow::{drive, on_change, pause};
use crate::installation::Installation;
use crate::manager::Manager;
use crate::status::StatusHandle;
use crate::work_counters::WorkCounters;
use crate::write::WRITE_REFUSED;

mod watch;

pub(crate) use watch::ExposedWatch;

/// Time limit of a write. The API server may have done it all the same; the watch will tell.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The first pause after a failed write; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// The name of the controller. Its Events are under that of front Services, whose process it shares.
pub(crate) const CONTROLLER: &str = "portico-exposed-clusters";

/// Objects that are written at the same time.
const CONCURRENCY: u16 = 4;

/// Clusters whose trouble is written to the log one by one; `/status` has all of them.
const MAX_LOGGED: usize = 5;

/// ExposedClusters as a kind of the API. They are kept as text: one that does not fit must not fail the list
/// of all others.
pub(crate) struct Written;

impl Resource for Written {
    const API_VERSION: &'static str = "portico.k8c.io/v1alpha1";
    const GROUP: &'static str = ExposedCluster::GROUP;
    const KIND: &'static str = "ExposedCluster";
    const VERSION: &'static str = ExposedCluster::VERSION;
    const URL_PATH_SEGMENT: &'static str = ExposedCluster::PLURAL;
    type Scope = k8s_openapi::ClusterResourceScope;
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
    clusters: ClusterWatch,
    written: Arc<Cache<Written>>,
    installation: Installation,
    leads: channel::Receiver<Leads>,
    events: Events,
    status: StatusHandle,
    counters: WorkCounters,
    states: Mutex<BTreeMap<String, State>>,
}

/// Watches and writes, for ever.
pub(crate) async fn run(manager: Manager, events: Events) {
    let Manager { client, clusters, exposed, installation, status, leads, .. } = manager;
    let changes = installation.changes();
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Arc::new(Context {
        client,
        clusters: clusters.clone(),
        written: Arc::clone(&exposed.cache),
        installation,
        leads: leads.clone(),
        events,
        status,
        counters: counters.clone(),
        states: Mutex::default(),
    });
    let triggers = stream::select_all([
        clusters.changes(&context, Context::forget_gone).boxed(),
        follow_written(&exposed, &context, Context::all).boxed(),
        on_change(changes, &context, Context::all).boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.forget_all();
            context.all()
        })
        .boxed(),
    ]);
    let retry = |cluster: Arc<_>, _: &_, context: Arc<Context>| context.retry(&cluster);
    drive(reconcile, retry, context, clusters.store(), triggers, CONCURRENCY, counters).await;
}

/// Makes the ExposedCluster of one Cluster as it should be.
async fn reconcile(served: Arc<Served<Cluster>>, context: Arc<Context>) -> Result<Action, WriteError> {
    let Ok(Object::Cluster(cluster)) = &served.object else { return Ok(Action::await_change()) };
    let Some(wanted) = context.wanted(cluster).await else { return Ok(Action::await_change()) };
    let (name, started) = (cluster.metadata.name.to_string(), Instant::now());
    let current = context.written.get("", &name);
    let api = api::<Written>(&context.client, "");
    let written = match timeout(WRITE_TIMEOUT, apply(&api, &wanted, current.as_deref())).await {
        Ok(written) => written.map_err(WriteError::from),
        Err(_) => Err(WriteError::NoAnswer),
    };
    context.counters.passed(started.elapsed());
    match written {
        Ok(applied) => {
            if let Applied::Changed(object) = applied {
                debug!(cluster = name, "ExposedCluster written");
                context.written.written(object);
                context.counters.wrote(Written::KIND);
            }
            context.set(cluster, State::Written).await;
            Ok(Action::await_change())
        }
        Err(error) => {
            context.counters.failed(WRITE_REFUSED);
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
    async fn wanted(&self, cluster: &Cluster) -> Option<Value> {
        let known = self.installation.seeds.is_known() && self.installation.configurations.is_known();
        if !self.leads.borrow().now() || !known || !self.written.is_known() {
            return None;
        }
        match projection(cluster, &self.installation, None) {
            Ok(wanted) => Some(wanted),
            Err(why) => {
                self.set(cluster, State::Refused(why)).await;
                None
            }
        }
    }

    fn retry(&self, cluster: &Served<Cluster>) -> Action {
        let failures = match self.states().get(&*cluster.reference.key.name) {
            Some(State::Failed(failures, _)) => *failures,
            _ => 1,
        };
        Action::requeue(pause(failures, FIRST_RETRY, LAST_RETRY))
    }

    /// Records how it stands with one Cluster, and says so if that is news.
    async fn set(&self, cluster: &Cluster, state: State) {
        let name = cluster.metadata.name.to_string();
        let text = match &state {
            State::Written => None,
            State::Refused(text) => Some((text.clone(), "ClusterNotUsable", Severity::Warning)),
            State::Failed(_, text) => Some((text.clone(), WRITE_REFUSED, Severity::Warning)),
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
        let object = reference(cluster);
        let note = Note { severity, reason, action: "ExposeCluster", text: &text };
        self.events.publish(&object, note).await;
    }

    /// Drops what is recorded about Clusters that are gone.
    fn forget_gone(&self) {
        self.states().retain(|name, _| self.clusters.exists(name));
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
        self.clusters.all()
    }
}

/// The Cluster as Events name it.
pub(crate) fn reference(cluster: &Cluster) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{}/{}", Cluster::GROUP, Cluster::VERSION)),
        kind: Some(Kind::Cluster.name().to_owned()),
        name: Some(cluster.metadata.name.to_string()),
        uid: Some(cluster.metadata.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// The ExposedCluster of `cluster` as it is applied, with these doors, or else the one that the Cluster asks
/// for, at the address that it has.
///
/// # Errors
/// Why the Cluster, or what stands above it, must not be used as written. What was written before stays.
pub(crate) fn projection(
    cluster: &Cluster,
    installation: &Installation,
    doors: Option<&Doors>,
) -> Result<Value, String> {
    let configuration = installation.configurations.one().map_err(|error| error.to_string())?;
    let exposed = exposed_cluster(cluster, &installation.seeds.seeds(), configuration.as_ref(), doors)
        .map_err(|problems| problems.first().map(ToString::to_string).unwrap_or_default())?;
    let metadata = json!({"name": cluster.metadata.name, "labels": exposed.metadata.labels,
        "ownerReferences": [owner(cluster)]});
    let spec = serde_json::to_value(&exposed.spec).map_err(|error| error.to_string())?;
    Ok(json!({"metadata": metadata, "spec": spec}))
}

/// Yields the Clusters of the ExposedClusters that changed; `all` of them after a list.
pub(crate) fn follow_written<C: Send + Sync + 'static>(
    exposed: &ExposedWatch,
    context: &Arc<C>,
    all: fn(&C) -> Work,
) -> impl Stream<Item = Work> + Send + use<C> {
    let context = Arc::clone(context);
    exposed.changes().map(move |changed| match changed {
        Some(object) => vec![ObjectRef::new(&object.name)],
        None => all(&context),
    })
}

#[cfg(test)]
mod tests;
