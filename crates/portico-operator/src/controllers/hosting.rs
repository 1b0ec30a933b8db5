//! The hosting controller: the control plane of each Cluster that asks for one, on this seed.
//!
//! Secrets are decided on by [`portico_pki`], objects by [`portico_hosting`]. Secrets are first, because the
//! templates of pods have their digests. A workload is made once those before it serve. Nothing is written
//! that is as it should be. Authorities and data cannot be made anew, so they never are, and their loss is
//! reported. A Cluster that must not be used as written keeps what it has.
//!
//! The namespace is made by the exposure controller, and deleted here: a finalizer keeps the Cluster until
//! nothing of its control plane is left.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::controller::Action;
use portico_api::annotations::{LAYOUT, MAX_HOSTED};
use portico_api::cluster::Cluster;
use portico_expose::resolve::seed_of;
use portico_hosting::quota;
use portico_source::Object;
use portico_source::served::Served;
use tokio::time::Instant;

use crate::clusters::{LastWritten, known, unreadable};
use crate::condition::State;
use crate::controllers::exposed::follow_written;
use crate::follow::{drive, on_change, pause};
use crate::kkp::Kkp;
use crate::manager::Manager;
use crate::status::PartsStatus;
use crate::work_counters::WorkCounters;
use crate::write::WriteError;

mod alarms;
mod context;
mod deletion;
mod health;
mod kinds;
mod pass;
mod relists;
mod reports;
mod secrets;

use alarms::Alarms;
pub use context::{CONTROL_PLANES, HostingSettings};
use context::{Context, INVALID};
use pass::with_endings;
use relists::Relists;

/// The first pause after a failed pass; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// The longest time without a look. Timers do not count the time that a machine sleeps.
const PERIOD: Duration = Duration::from_hours(12);

/// How often a Cluster beyond the quota looks whether there is room, which costs no request.
const ROOM_PERIOD: Duration = Duration::from_secs(5);

/// Clusters that are reconciled at the same time. One that an admission webhook keeps waiting must not hold
/// the others up.
const CONCURRENCY: u16 = 32;

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-hosting";

/// Watches and writes, for ever.
pub(crate) async fn run(manager: Manager, settings: HostingSettings) {
    let events = manager.events(CONTROLLER);
    let Manager { client, clusters, exposed, installation, kkp, status, leads, .. } = manager;
    let relists = Relists::new();
    let (kinds, mut changed) = kinds::all(&client, &relists, &status);
    let (pods, pods_changed) = kinds::followed::<Pod>(&client, &relists, portico_hosting::CLUSTER, &status);
    changed.push(pods_changed);
    changed.extend(secrets::changes(&client, &relists, &status));
    let changes = installation.changes();
    let counters = WorkCounters::new(CONTROLLER, &status);
    status.part(CONTROL_PLANES, |_| ());
    let context = Arc::new(Context {
        client,
        settings,
        clusters: clusters.clone(),
        exposed: Arc::clone(&exposed.cache),
        kinds,
        pods,
        alarms: Alarms::default(),
        kkp: kkp.clone(),
        installation,
        leads: leads.clone(),
        events,
        status,
        counters: counters.clone(),
        backoffs: Mutex::default(),
        written: LastWritten::default(),
    });
    let (after_lists, knowing) = (Arc::clone(&context), Arc::clone(&context));
    let relisted = relists.work(move || after_lists.clusters.all(), move || knowing.is_known());
    let triggers = stream::select_all([
        clusters.changes(&context, Context::forget_gone).boxed(),
        follow_written(&exposed, &context, |context| context.clusters.all()).boxed(),
        stream::select_all(changed).boxed(),
        relisted.boxed(),
        alarms::changes(&context).boxed(),
        on_change(kkp.changes(), &context, |context| context.clusters.all()).boxed(),
        on_change(changes, &context, |context| context.clusters.all()).boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.all_backoffs().clear();
            context.alarms.retain(|_| false);
            context.status.part(CONTROL_PLANES, |planes| *planes = PartsStatus::default());
            context.clusters.all()
        })
        .boxed(),
    ]);
    let retry = |cluster: Arc<_>, _: &_, context: Arc<Context>| context.retry(&cluster);
    drive(reconcile, retry, context, clusters.store(), triggers, CONCURRENCY, counters).await;
}

/// Makes one control plane.
async fn reconcile(served: Arc<Served<Cluster>>, context: Arc<Context>) -> Result<Action, WriteError> {
    let Some(cluster) = known(&served) else { return Ok(Action::await_change()) };
    let cluster = &*cluster;
    if !context.is_ready() || context.written.is_ahead_of(&served) {
        return Ok(Action::await_change());
    }
    let ends = cluster.metadata.deletion_timestamp.is_some();
    match context.kkp.now() {
        Kkp::Absent => {}
        // An object that waits for this process to let it go would wait for ever.
        Kkp::Present(_) if ends && deletion::is_held(cluster) => {}
        Kkp::Present(_) => {
            context.forget(&cluster.metadata.name);
            return Ok(Action::await_change());
        }
        Kkp::Unknown => return Ok(Action::await_change()),
    }
    let hosted = cluster.has_layout();
    if !hosted && !deletion::is_held(cluster) {
        context.forget(&cluster.metadata.name);
        return Ok(Action::await_change());
    }
    let started = Instant::now();
    let done = match (ends, hosted) {
        (true, _) => context.delete(cluster, &served).await,
        (false, _) if cluster.spec.pause => context.paused(cluster).await,
        (false, _) if served.object.is_err() => context.never_read(cluster, &served).await,
        (false, true) => context.reconcile(cluster, &served).await,
        (false, false) => context.no_longer(cluster, &served).await,
    };
    context.counters.passed(started.elapsed());
    match done {
        Ok(due) => Ok(Action::requeue(due.unwrap_or(PERIOD).clamp(FIRST_RETRY, PERIOD))),
        // The new leader begins anew.
        Err(WriteError::NotLeading) => Ok(Action::await_change()),
        // The watch is behind, and brings a newer Cluster at once.
        Err(error) if error.is_conflict() => Ok(Action::requeue(FIRST_RETRY)),
        Err(error) => {
            context.counters.failed(error.reason());
            let state = State::bad(error.reason(), error.to_string());
            // The first failure is the one that counts.
            if served.unread.is_some() || (cluster.spec.pause && !ends) {
                context.record(cluster, &state, true).await;
            } else {
                let health = context.health_now(cluster);
                drop(context.report(cluster, &state, health.as_ref(), true).await);
            }
            Err(error)
        }
    }
}

/// Status of a Cluster that cannot be read. It gets no condition here: `PorticoExposed` says it.
fn unread(served: &Served<Cluster>) -> Option<State> {
    unreadable(served).map(|why| State::bad("Unreadable", why))
}

impl Context {
    /// One pass. Returns when to look again without any change.
    async fn reconcile(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<Option<Duration>, WriteError> {
        // One that was begun and has lost its finalizer gets it again whatever is refused by now: by that its
        // Services lead to it.
        let is_there = || !self.ours_in(StatefulSet::KIND, &cluster.name().namespace()).is_empty();
        if !deletion::is_held(cluster) && !is_there() {
            // Checked before the finalizer is set: a Cluster with it counts towards the quota.
            if let Some(message) = self.refusal(cluster) {
                self.report(cluster, &State::bad(INVALID, message), None, false).await?;
                return Ok(None);
            }
            if let Some(state) = self.no_room(cluster) {
                self.report(cluster, &state, None, false).await?;
                return Ok(Some(ROOM_PERIOD));
            }
        }
        self.add_finalizer(cluster, served).await?;
        let outcome = self.pass(cluster).await?;
        if let Some(state) = unread(served) {
            self.record(cluster, &state, false).await;
            return Ok(outcome.due);
        }
        let health = outcome.health.or_else(|| self.health_now(cluster));
        self.report(cluster, &outcome.state, health.as_ref(), false).await?;
        Ok(outcome.due)
    }

    /// One pass over a Cluster that this process has never read: what it should be is not known.
    async fn never_read(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<Option<Duration>, WriteError> {
        let due = self.renew(cluster).await?;
        if let Some(state) = unread(served) {
            self.record(cluster, &state, false).await;
        }
        Ok(due)
    }

    /// One pass over a paused Cluster. Nothing of it is written, so somebody must know in time what ends.
    async fn paused(&self, cluster: &Cluster) -> Result<Option<Duration>, WriteError> {
        let message = "the Cluster is paused: everything stays as it is";
        let (certificate, authorities) = self.first_endings(cluster).await?;
        let state = match certificate {
            None => State::good("Paused", message.to_owned()),
            Some(ending) => {
                let message = format!("{message}, and nothing is renewed. {ending}. End the pause before");
                State::bad("CertificatesEnd", message)
            }
        };
        self.record(cluster, &with_endings(state, authorities), false).await;
        Ok(None)
    }

    /// Why the control plane of `cluster`, which is not begun, must not be begun on its seed now.
    fn no_room(&self, cluster: &Cluster) -> Option<State> {
        let seeds = self.installation.seeds.seeds();
        // If none can be found, the pass reports that.
        let seed = seed_of(cluster, &seeds).ok()?;
        let name = &*seed.metadata.name;
        let limit = match seed.max_hosted() {
            Ok(limit) => limit?,
            Err(value) => {
                let message = format!(
                    "Seed {name}: metadata.annotations[{MAX_HOSTED}]: {value:?} is no number of clusters; \
                     write one, or leave the annotation out"
                );
                return Some(State::bad(INVALID, message));
            }
        };
        let all = self.clusters.store().state();
        let read = all.iter().filter_map(|served| match &served.object {
            Ok(Object::Cluster(cluster)) => Some(&**cluster),
            _ => None,
        });
        let (begun, others): (Vec<&Cluster>, Vec<&Cluster>) = read
            .filter(|other| {
                seed_of(other, &seeds).is_ok_and(|other| *other.metadata.name == *seed.metadata.name)
            })
            .partition(|other| deletion::is_held(other));
        // Which seed has one that cannot be read is not known: it counts everywhere.
        let unread = all.iter().filter(|served| served.object.is_err());
        let unread = unread.filter_map(|served| served.unread.as_ref());
        let held = unread.filter(|unread| deletion::has_finalizer(&unread.metadata));
        let begun = begun.len() + held.count();
        let usable = |other: &Cluster| self.refusal(other).is_none();
        let admitted = quota::admits(limit, cluster, begun, others, usable);
        (!admitted).then(|| State::bad("QuotaExceeded", quota::exceeded(name, limit)))
    }

    /// One pass over a Cluster that no longer asks for a control plane.
    async fn no_longer(
        &self,
        cluster: &Cluster,
        served: &Served<Cluster>,
    ) -> Result<Option<Duration>, WriteError> {
        let namespace = cluster.name().namespace();
        let Some(set) = self.ours_in(StatefulSet::KIND, &namespace).into_iter().next() else {
            self.release(cluster, served).await?;
            self.forget(&cluster.metadata.name);
            return Ok(None);
        };
        let message = format!(
            "the annotation {LAYOUT} is gone, and StatefulSet {namespace}/{set} is here: the control plane \
             stays as it is, and of it certificates alone are kept. Set the annotation again, or delete the \
             Cluster"
        );
        let due = self.renew(cluster).await?;
        self.report(cluster, &State::bad("LayoutRemoved", message), None, false).await?;
        Ok(due)
    }

    fn retry(&self, cluster: &Served<Cluster>) -> Action {
        let name = &*cluster.reference.key.name;
        let failures = self
            .status
            .part(CONTROL_PLANES, |planes| planes.reports.get(name).map_or(1, |report| report.failures));
        Action::requeue(pause(failures, FIRST_RETRY, LAST_RETRY))
    }
}
