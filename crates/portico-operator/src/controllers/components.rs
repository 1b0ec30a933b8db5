//! The controller of the seed components: the gateway of a seed, made from its Seed.
//!
//! Deployment, Service, rights and the rest are decided by [`portico_expose::components`]; the certificate of
//! the tunnel listener is in `tunnel`. One pass is enough, and nothing is written that is as it should be. A
//! Seed that must not be used as written keeps the gateway it has. Each write stands for itself: a process
//! that is killed between two of them leaves the rest to the next one. Objects of somebody else are
//! reported and left alone, and where KKP's controllers run nothing is written at all.
//!
//! There is one gateway, whatever the number of Seeds. It belongs to the Seed that `--seed` names, or to the
//! only one.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Client;
use kube::runtime::controller::Action;
use portico_api::meta::ObjectKey;
use portico_api::seed::Seed;
use portico_expose::components::Part;
use portico_source::Object;
use portico_source::served::Served;
use tokio::time::Instant;
use tracing::info;

use crate::clock::{CLOCK_OFF, CLOCK_PERIOD};
use crate::condition::State;
use crate::follow::{drive, on_change, pause};
use crate::kkp::Kkp;
use crate::managed::{Managed, ManagedObject};
use crate::manager::Manager;
use crate::status::StatusHandle;
use crate::work_counters::WorkCounters;
use crate::write::WriteError;

mod clock;
mod context;
mod pass;
mod reports;
mod tunnel;
mod write;

pub use context::ComponentSettings;
use context::Context;

/// The first pause after a failed pass; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// How often everything is looked at without any change: certificates end, and clocks drift, by time alone.
const PERIOD: Duration = Duration::from_mins(10);

/// Seeds at a time. They share the gateway.
const CONCURRENCY: u16 = 1;

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-seed-components";

/// Watches and writes, for ever.
pub(crate) async fn run(manager: Manager, settings: ComponentSettings) {
    let events = manager.events(CONTROLLER);
    let Manager { client, installation, kkp, status, leads, .. } = manager;
    let front = settings.gateway.front.clone();
    let mut changes = Vec::new();
    let mut parts = Vec::new();
    for part in Part::ALL {
        let (held, changed) = part_slot(part, &client, part.key(&front), &status);
        parts.push((part, held));
        changes.push(changed);
    }
    let issued = tunnel::issued(&front.namespace);
    let (certificate, changed) = ManagedObject::new(&client, issued.certificate.clone(), &status);
    changes.push(changed);
    let (trusted, changed) = ManagedObject::new(&client, issued.authority.clone(), &status);
    changes.push(changed);
    let (authority, changed) = ManagedObject::new(&client, issued.authority.clone(), &status);
    changes.push(changed);
    let (seeds, installation_changes, kkp_changes) =
        (installation.seeds.store(), installation.changes(), kkp.changes());
    status.seeds(|_| ());
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Arc::new(Context {
        client,
        settings,
        seeds: seeds.clone(),
        parts,
        issued,
        certificate,
        authority,
        trusted,
        kkp,
        installation,
        leads: leads.clone(),
        events,
        status,
        counters: counters.clone(),
    });
    let all = Arc::clone(&context);
    let triggers = stream::select_all([
        stream::select_all(changes).map(move |()| all.all()).boxed(),
        on_change(kkp_changes, &context, Context::all).boxed(),
        on_change(installation_changes, &context, |context| {
            context.forget_gone();
            context.all()
        })
        .boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.forget();
            context.all()
        })
        .boxed(),
    ]);
    let retry = |seed: Arc<_>, _: &_, context: Arc<Context>| context.retry(&seed);
    drive(reconcile, retry, context, seeds, triggers, CONCURRENCY, counters).await;
}

fn part_slot(
    part: Part,
    client: &Client,
    key: ObjectKey,
    status: &StatusHandle,
) -> (Box<dyn Managed>, BoxStream<'static, ()>) {
    fn boxed<K: k8s_openapi::Resource + Send + Sync + 'static>(
        (slot, changes): (ManagedObject<K>, BoxStream<'static, ()>),
    ) -> (Box<dyn Managed>, BoxStream<'static, ()>) {
        (Box::new(slot), changes)
    }
    match part {
        Part::ServiceAccount => boxed(ManagedObject::<ServiceAccount>::new(client, key, status)),
        Part::ClusterRole => boxed(ManagedObject::<ClusterRole>::new(client, key, status)),
        Part::ClusterRoleBinding => boxed(ManagedObject::<ClusterRoleBinding>::new(client, key, status)),
        Part::NetworkPolicy => boxed(ManagedObject::<NetworkPolicy>::new(client, key, status)),
        Part::PodDisruptionBudget => boxed(ManagedObject::<PodDisruptionBudget>::new(client, key, status)),
        Part::Deployment => boxed(ManagedObject::<Deployment>::new(client, key, status)),
        Part::Service => boxed(ManagedObject::<Service>::new(client, key, status)),
    }
}

/// Makes the gateway of one Seed, if it has one of its own.
async fn reconcile(served: Arc<Served<Seed>>, context: Arc<Context>) -> Result<Action, WriteError> {
    let Ok(Object::Seed(seed)) = &served.object else { return Ok(Action::await_change()) };
    if !context.is_ready() || seed.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    match context.kkp.now() {
        Kkp::Unknown => return Ok(Action::await_change()),
        Kkp::Present(deployment) => {
            context.observe(Some(deployment));
            return Ok(Action::await_change());
        }
        Kkp::Absent => context.observe(None),
    }
    let started = Instant::now();
    let outcome = match context.pass(seed).await {
        Ok(state) => {
            let before = context.status.seeds(|seeds| seeds.reports.get(&seed.metadata.key()).cloned());
            Ok(context.with_clock(state, before.as_ref()).await)
        }
        failed => failed,
    };
    context.counters.passed(started.elapsed());
    match outcome {
        Ok(state) => match context.report(seed, &state, false).await {
            Err(WriteError::NotLeading) => Ok(Action::await_change()),
            reported => reported.map(|()| context.next()),
        },
        // The new leader begins anew.
        Err(WriteError::NotLeading) => Ok(Action::await_change()),
        Err(error) => {
            context.counters.failed(error.reason());
            let state = State::bad(error.reason(), error.to_string());
            context.report(seed, &state, true).await.and(Err(error))
        }
    }
}

impl Context {
    /// Records whether KKP's controllers do this work.
    fn observe(&self, deployment: Option<String>) {
        let text = deployment.map(|deployment| {
            format!("KKP's controllers are here (Deployment {deployment}): the gateway is left as it is")
        });
        let before = self.status.seeds(|seeds| {
            if text.is_some() {
                seeds.reports.clear();
                seeds.certificate_ends = None;
            }
            std::mem::replace(&mut seeds.observing, text.clone())
        });
        match (before, text) {
            (None, Some(text)) => info!("{text}"),
            (Some(_), None) => info!("KKP's controllers are gone: the gateway is made from here now"),
            _ => {}
        }
    }

    /// When to look again without any change.
    fn next(&self) -> Action {
        let now = Instant::now();
        let due = self.held().filter_map(Managed::due).map(|due| due.saturating_duration_since(now));
        let address = self.address_wait().filter(|wait| wait.is_positive()).map(|wait| wait.unsigned_abs());
        let is_off =
            self.status.seeds(|seeds| seeds.reports.values().any(|report| report.reason == CLOCK_OFF));
        let clock = is_off.then_some(CLOCK_PERIOD);
        Action::requeue(due.chain(address).chain(clock).min().unwrap_or(PERIOD).clamp(FIRST_RETRY, PERIOD))
    }

    fn retry(&self, seed: &Served<Seed>) -> Action {
        let key = &seed.reference.key;
        let failures = self.status.seeds(|seeds| seeds.reports.get(key).map_or(1, |report| report.failures));
        Action::requeue(pause(failures, FIRST_RETRY, LAST_RETRY))
    }
}
