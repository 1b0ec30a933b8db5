//! The user cluster controller: the objects inside each cluster, and the kubeconfig for its people.
//!
//! For each ExposedCluster it writes Secret `admin-kubeconfig` on the seed (`issue`), and the objects of
//! [`portico_expose::user_cluster`] inside the user cluster (`inside`). It uses the kubeconfig in the Secret
//! `internal-admin-kubeconfig`. Nothing is kept of a user cluster between two passes: each has one when
//! something changes on the seed, and every ten minutes. A hosted cluster gets more (`hosted`), and is
//! watched for what its kubelets ask for (`approver`), which cannot wait. A cluster that migrates is looked
//! at all the time for the proofs that its migration waits for (`proofs`).
//!
//! User clusters are in other hands. A cluster that is away, slow or hostile takes one of [`CONCURRENCY`]
//! slots for a limited time. It waits longer and longer, whatever changes on the seed meanwhile (`backoff`).
//! `portico_kube::untrusted_api` bounds the rest. The leader alone writes, and nothing where KKP's
//! controllers run.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use portico_api::names::ClusterName;
use portico_kube::cached::Cached;
use portico_kube::leader::while_leading;
use portico_kube::watch::progress;
use portico_pki::inventory::INTERNAL_KUBECONFIG;
use portico_source::Object;
use tokio::time::Instant;

use crate::clusters::ClusterWatch;
use crate::controllers::exposed::{ExposedWatch, Written};
use crate::follow::{drive, on_change, pause, recorded};
use crate::kkp::Kkp;
use crate::manager::Manager;
use crate::work_counters::WorkCounters;

mod approver;
mod backoff;
mod context;
mod hosted;
mod inside;
mod issue;
mod nodes;
mod pass;
mod proofs;
mod reports;
mod subject;

use approver::Approvers;
use backoff::Backoffs;
use context::{Context, FIRST_RETRY, LAST_RETRY, Said, Work};
pub use context::{USER_CLUSTERS, UserClusterSettings};
use pass::Failed;

/// Passes at the same time, each over another cluster. More than may hang at once; each holds an answer of
/// 64 KiB at most.
const CONCURRENCY: u16 = 32;

/// Every cluster has a pass after this time, and the part of [`SPREAD`] that follows from its name.
const PERIOD: Duration = Duration::from_secs(480);

/// Keeps the passes of thousands of clusters from coming together for ever.
const SPREAD: Duration = Duration::from_secs(240);

/// Time between the passes over a cluster that migrates: people wait for it.
const MIGRATING: Duration = Duration::from_secs(10);

/// When to look again whether the Seeds are known, at the start.
const SEEDS_SOON: Duration = Duration::from_secs(1);

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-user-cluster";

/// Watches and writes, for ever.
pub(crate) async fn run(manager: Manager, settings: UserClusterSettings) {
    let events = manager.events(CONTROLLER);
    let Manager { client, clusters: written, exposed, installation, kkp, observed, status, leads, .. } =
        manager;
    let clusters = exposed.cache.store();
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Arc::new(Context {
        client,
        settings,
        installation,
        clusters: clusters.clone(),
        kkp: kkp.clone(),
        leads: leads.clone(),
        events,
        status: status.clone(),
        counters: counters.clone(),
        backoffs: Backoffs::default(),
        approvers: Approvers::default(),
        observed,
        seen: Mutex::default(),
    });
    status.part(USER_CLUSTERS, |_| ());
    let triggers = stream::select_all([
        changed_clusters(&context, &exposed).boxed(),
        changed_specs(&context, &written).boxed(),
        changed_kubeconfigs(&context).boxed(),
        on_change(kkp.changes(), &context, Context::all).boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.status.part(USER_CLUSTERS, |clusters| clusters.reports.clear());
            context.all()
        })
        .boxed(),
    ]);
    let retry = |cluster: Arc<_>, _: &_, context: Arc<Context>| context.retry(&cluster);
    drive(reconcile, retry, context, clusters, triggers, CONCURRENCY, counters).await;
}

/// Makes the inside of one cluster as it should be.
async fn reconcile(exposed: Arc<Cached<Written>>, context: Arc<Context>) -> Result<Action, Failed> {
    let name = exposed.name_any();
    if !context.leads.borrow().now() || context.kkp.now() != Kkp::Absent {
        context.status.part(USER_CLUSTERS, |clusters| clusters.reports.remove(&name));
        context.approvers.end(&name);
        context.observed.forget(&name);
        return Ok(Action::await_change());
    }
    // The objects of a hosted cluster follow from its Seed too. They must not be taken for a mistake before
    // that is known.
    if context.settings.hosted.is_some() && !context.installation.seeds.is_asked() {
        return Ok(Action::requeue(SEEDS_SOON));
    }
    let (started, leads) = (Instant::now(), context.leads.clone());
    if let Some(left) = context.backoffs.left(&name, started) {
        return Ok(Action::requeue(left));
    }
    // Another replica does it by then.
    let Some(outcome) = while_leading(leads, context.pass(&name, &exposed)).await else {
        context.observed.forget(&name);
        return Ok(Action::await_change());
    };
    context.counters.passed(started.elapsed());
    context.backoffs.passed(&name, started, Instant::now());
    let migrates = exposed.value().pointer("/spec/migration").is_some();
    outcome.map(|()| Action::requeue(if migrates { MIGRATING } else { period(&name) }))
}

/// The ExposedClusters that changed; all of them after a list.
fn changed_clusters(
    context: &Arc<Context>,
    exposed: &ExposedWatch,
) -> impl Stream<Item = Work> + Send + use<> {
    let context = Arc::clone(context);
    exposed.changes().map(move |changed| match changed {
        Some(object) if context.clusters.get(&object).is_some() => vec![object],
        Some(_gone) => {
            context.forget_gone();
            Vec::new()
        }
        None => {
            context.forget_gone();
            context.all()
        }
    })
}

/// The clusters whose Cluster has changed, or whose control plane has come up. Passes before have failed, and
/// the next would be late. Other changes of its status do not count: controllers write that all the time.
fn changed_specs(context: &Arc<Context>, written: &ClusterWatch) -> impl Stream<Item = Work> + Send + use<> {
    let (context, store) = (Arc::clone(context), written.store());
    written.changes(&Arc::clone(&context), Context::forget_gone).map(move |changed| {
        let mut seen = context.seen();
        let changed = changed.into_iter().filter_map(|cluster| {
            let served = store.get(&cluster)?;
            let Ok(Object::Cluster(written)) = &served.object else { return None };
            let now = Said::of(written, served.meta().generation);
            // A Cluster seen for the first time is left out: its ExposedCluster triggers the pass.
            let before = seen.insert(cluster.name.clone(), now.clone())?;
            // Services lead to a control plane that has come up a moment later: this pass may fail too.
            (before != now).then(|| {
                context.status.part(USER_CLUSTERS, |clusters| clusters.begin_anew(&cluster.name));
                ObjectRef::new(&cluster.name)
            })
        });
        changed.collect()
    })
}

/// The clusters whose kubeconfig changed. Its content is not kept: it is read in each pass.
fn changed_kubeconfigs(context: &Arc<Context>) -> impl Stream<Item = Work> + Send + use<> {
    let secrets = Api::<PartialObjectMeta<Secret>>::all(context.client.clone());
    let watched = progress(secrets, Some(INTERNAL_KUBECONFIG));
    recorded(watched, "Secret", context.status.clone()).map(|event| {
        let Ok(watcher::Event::Apply(secret) | watcher::Event::Delete(secret)) = event else {
            return Vec::new();
        };
        let cluster = ClusterName::of_namespace(&secret.namespace().unwrap_or_default());
        cluster.map(|cluster| ObjectRef::new(cluster.as_str())).into_iter().collect()
    })
}

impl Context {
    fn retry(&self, cluster: &Cached<Written>) -> Action {
        let name = cluster.name_any();
        let failures = self
            .status
            .part(USER_CLUSTERS, |clusters| clusters.reports.get(&name).map_or(1, |report| report.failures));
        let pause = pause(failures, FIRST_RETRY, LAST_RETRY);
        // Not all at once, where the cause was one and the same.
        Action::requeue(pause + pause.mul_f64(share(&name) / 4.0))
    }
}

/// Time until the next pass over a cluster that is as it should be.
fn period(name: &str) -> Duration {
    PERIOD + SPREAD.mul_f64(share(name))
}

/// A number from 0 to 1 that follows from a name.
fn share(name: &str) -> f64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    f64::from((hasher.finish() >> 40) as u16) / f64::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_of_many_clusters_are_spread_over_minutes() {
        let periods: Vec<Duration> = (0..1_000).map(|number| period(&format!("c{number}"))).collect();
        let early = periods.iter().filter(|&&period| period < PERIOD + SPREAD / 4).count();
        assert!((150..350).contains(&early), "{early} of 1,000 in the first quarter");
        assert!(periods.iter().all(|period| (PERIOD..=PERIOD + SPREAD).contains(period)));
        assert_eq!(period("a"), period("a"));
    }
}
