//! The ExposedCluster controller: one ExposedCluster for each Cluster. So gateways need no right to read
//! Clusters, which hold admin tokens.
//!
//! What an ExposedCluster says is decided by [`portico_expose::projection`]. It is written by server-side
//! apply, only if something differs, and only by the leader. It is owned by its Cluster and goes with it: the
//! garbage collector of the seed deletes it. A Cluster that must not be used as written keeps the
//! ExposedCluster it has. So does one that an operator migrates. Every object is written by itself, so that a
//! process that is killed between two writes leaves the rest to the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use portico_api::cluster::{Cluster, EXPOSED};
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_expose::doors::Doors;
use portico_expose::exposure::owner;
use portico_expose::projection::exposed_cluster;
use portico_kube::apply::{Applied, ApplyError, apply};
use portico_kube::error::describe;
use portico_kube::events::{Events, Note, Severity};
use portico_kube::leader::Leads;
use portico_source::served::{Served, ServedKind};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout};
use tracing::debug;

use crate::cache::{Cache, api};
use crate::clusters::{ClusterWatch, Work, known, unreadable};
use crate::condition::shown;
use crate::follow::{drive, on_change, pause};
use crate::installation::Installation;
use crate::manager::Manager;
use crate::news::News;
use crate::status::{ExposedClustersStatus, StatusHandle};
use crate::work_counters::WorkCounters;
use crate::write::WRITE_REFUSED;

mod watch;

pub(crate) use watch::ExposedWatch;

/// The reason of a Cluster that must not be used as written.
pub(crate) const NOT_USABLE: &str = "ClusterNotUsable";

/// The reason of a Cluster whose ExposedCluster is the record of a migration.
const MIGRATION_RECORDED: &str = "MigrationRecorded";

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

/// Status of the ExposedCluster of one Cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// It is as it should be.
    Written,
    /// For this reason, and as this text says, the ExposedCluster stays as it was, or absent.
    Refused(&'static str, String),
    /// So many writes have failed in a row.
    Failed(u32, String),
}

impl State {
    /// The reason of what is wrong, and a sentence.
    fn trouble(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::Written => None,
            Self::Refused(reason, text) => Some((reason, text)),
            Self::Failed(_, text) => Some((WRITE_REFUSED, text)),
        }
    }

    /// Where the report counts this state.
    fn count<'a>(&self, report: &'a mut ExposedClustersStatus) -> &'a mut usize {
        match self {
            Self::Written => &mut report.written,
            Self::Refused(..) => &mut report.refused,
            Self::Failed(..) => &mut report.failed,
        }
    }
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
    let Some(cluster) = known(&served) else { return Ok(Action::await_change()) };
    let cluster = &*cluster;
    let Some(wanted) = context.wanted(cluster, &served).await else { return Ok(Action::await_change()) };
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
            // As far as it was read.
            let state = unreadable(&served).map_or(State::Written, |why| State::Refused(NOT_USABLE, why));
            context.set(cluster, state).await;
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
    /// The ExposedCluster as it should be. `None` while that is not known, or this replica does not write.
    async fn wanted(&self, cluster: &Cluster, served: &Served<Cluster>) -> Option<Value> {
        let known = self.installation.seeds.is_known() && self.installation.configurations.is_known();
        if !self.leads.borrow().now() || !known || !self.written.is_known() {
            return None;
        }
        let never_read = served.object.as_ref().err().and_then(|_| unreadable(served));
        let wanted = never_read.map_or_else(|| projection(cluster, &self.installation, None), Err);
        let wanted = wanted.map_err(|why| State::Refused(NOT_USABLE, why)).and_then(|wanted| {
            let recorded = self.written.get("", &cluster.metadata.name);
            match recorded.and_then(|seen| migration(cluster, &seen.value(), &wanted)) {
                Some(why) => Err(State::Refused(MIGRATION_RECORDED, why)),
                None => Ok(wanted),
            }
        });
        match wanted {
            Ok(wanted) => Some(wanted),
            Err(refused) => {
                self.set(cluster, refused).await;
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

    /// Records the status of one Cluster's ExposedCluster, and reports it if it changed.
    async fn set(&self, cluster: &Cluster, state: State) {
        let name = cluster.metadata.name.to_string();
        let before = {
            let mut states = self.states();
            let before = states.insert(name.clone(), state.clone());
            self.report(&name, before.as_ref(), Some(&state));
            before
        };
        let reason = |state: &State| state.trouble().map(|(reason, _)| reason);
        if before.as_ref().and_then(reason) == reason(&state) {
            return;
        }
        let (reason, text, severity) = match state.trouble() {
            Some((reason, text)) => (reason, text, Severity::Warning),
            None => ("ExposedClusterWritten", "The ExposedCluster is as it should be", Severity::Normal),
        };
        let text = &*shown(text);
        let troubled = self.status.update(|status| status.exposed_clusters.troubles.len());
        let note = Note { severity, reason, action: "ExposeCluster", text };
        News { troubled, first: false }.log(&name, severity == Severity::Warning, &note);
        self.events.publish(&reference(cluster), note).await;
    }

    /// Drops what is recorded about Clusters that are gone.
    fn forget_gone(&self) {
        self.states().retain(|name, state| {
            let exists = self.clusters.exists(name);
            if !exists {
                self.report(name, Some(state), None);
            }
            exists
        });
    }

    fn forget_all(&self) {
        let mut states = self.states();
        states.clear();
        self.status.update(|status| status.exposed_clusters = ExposedClustersStatus::default());
    }

    /// Brings the change of one Cluster into the report, while `states` is locked.
    fn report(&self, name: &str, before: Option<&State>, now: Option<&State>) {
        self.status.update(|status| update(&mut status.exposed_clusters, name, before, now));
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<String, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Work {
        self.clusters.all()
    }
}

/// Brings the change of one Cluster into the report. All of them are not counted anew: a start with 10,000
/// Clusters has as many changes.
fn update(report: &mut ExposedClustersStatus, name: &str, before: Option<&State>, now: Option<&State>) {
    if let Some(before) = before {
        *before.count(report) -= 1;
    }
    if let Some(now) = now {
        *now.count(report) += 1;
    }
    match now.and_then(State::trouble) {
        Some((_, text)) => _ = report.troubles.insert(name.to_owned(), text.to_owned()),
        None => _ = report.troubles.remove(name),
    }
}

/// Why the ExposedCluster of `cluster` stays as it was `recorded`: an operator migrates the cluster by it.
/// `wanted` knows of one door alone, and the operator would then close the one that users know.
fn migration(cluster: &Cluster, recorded: &Value, wanted: &Value) -> Option<String> {
    let owner = recorded.pointer("/metadata/ownerReferences/0/uid").and_then(Value::as_str);
    // One of a Cluster of the same name before says nothing.
    let is_its = owner == Some(&cluster.metadata.uid);
    let has_two_doors = recorded.pointer("/spec/migration").is_some();
    // Only an operator writes the condition. Without one, another strategy is in force at once.
    let moves = cluster.status.conditions.contains_key(EXPOSED)
        && recorded.pointer("/spec/exposeStrategy") != wanted.pointer("/spec/exposeStrategy");
    let name = &*cluster.metadata.name;
    (is_its && (has_two_doors || moves)).then(|| {
        format!(
            "ExposedCluster {name} records a migration, which only portico operator takes further: it stays \
             as it is. Run the operator, and portico front with --without-exposed-clusters. If there is to \
             be no operator any more: kubectl delete exposedcluster {name}, and it is made anew without the \
             migration"
        )
    })
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

/// The ExposedCluster of `cluster` as it is applied, with these doors. Without them it has the door that the
/// Cluster asks for, at the address that it has.
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
