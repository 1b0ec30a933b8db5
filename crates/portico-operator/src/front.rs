//! The front Service controller: the ports of one LoadBalancer Service follow the Services exposed by
//! NodePort.
//!
//! Every replica watches and plans, so that a new leader knows everything at once and all replicas report the
//! same numbers; only the leader writes, and only if the ports differ. Bursts of changes become one write
//! ([`Debounce`]), because cloud load balancers are slow. What waits, and why, is in the [`FrontStatus`] and
//! in Events on the Service. Which ports there should be is decided by [`portico_expose::front`].
//!
//! The write is a JSON merge patch of `spec.ports` and not a server-side apply: apply removes only what the
//! same manager applied, and ports written by kubectl, or by KKP's updater before, must go too. The patch has
//! the resourceVersion that was planned from, so that a write of another client in between is noticed and not
//! overwritten.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::ready;
use futures_util::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::api::core::v1 as core;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::{Action, Controller, Error as ControllerError};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use portico_api::service::{Service, ServicePort};
use portico_expose::front::{FrontSettings, plan_front_ports};
use portico_kube::debounce::{DEFAULT_MAX_WAIT, DEFAULT_QUIET, Debounce};
use portico_kube::error::describe;
use portico_kube::events::{Events, Note};
use portico_kube::leader::{self, LeaseSettings};
use portico_kube::{FIELD_MANAGER, watch};
use portico_source::Object;
use portico_source::served::Served;
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout};
use tracing::{error, info, warn};

mod announce;
mod status;

use announce::Announced;
pub use status::{FrontStatus, StatusHandle};

/// The name of the controller on Events.
const CONTROLLER: &str = "portico-front";

/// Time limit of a write. The API server may have done it all the same; the watch will tell.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit of releasing the Lease at the end.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the controller ended by itself.
#[derive(Debug, Error)]
pub enum FrontError {
    /// A part of it ended, which only a defect can cause.
    #[error("{0} has ended; restart this process and report what the log says")]
    Ended(&'static str),
}

/// Why the front Service was not written. Retried with back-off.
#[derive(Debug, Error)]
enum WriteError {
    /// The API server refused the write, or was not reached.
    #[error("{}", describe(.0))]
    Refused(#[from] kube::Error),
    /// The API server did not answer in time.
    #[error("no answer within {WRITE_TIMEOUT:?}")]
    NoAnswer,
}

/// What the controller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Which Service, and which ports it gets.
    pub plan: FrontSettings,
    /// Name of this replica, that of its pod. Must differ from all others.
    pub identity: String,
    /// A pause of this length ends a burst of changes.
    pub quiet: Duration,
    /// The first change of a burst is written after this time, however long the burst.
    pub max_wait: Duration,
}

impl Settings {
    /// Settings with the default times.
    pub fn new(plan: FrontSettings, identity: &str) -> Self {
        Self { plan, identity: identity.to_owned(), quiet: DEFAULT_QUIET, max_wait: DEFAULT_MAX_WAIT }
    }

    /// The Lease by which the replicas for this Service elect a leader: in its namespace, and named after it.
    pub fn lease(&self) -> LeaseSettings {
        LeaseSettings {
            namespace: self.plan.front.namespace.to_string(),
            name: format!("{CONTROLLER}-{}", self.plan.front.name),
            identity: self.identity.clone(),
        }
    }
}

/// The controller of one front Service.
pub struct Front {
    client: Client,
    settings: Settings,
    status: StatusHandle,
}

impl Front {
    /// A controller that has not started.
    pub fn new(client: Client, settings: Settings) -> Self {
        Self { client, settings, status: StatusHandle::default() }
    }

    /// A view of its status, also while it runs.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// Runs until `stop` is ready, then releases the Lease.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), FrontError> {
        let (leading, leads) = channel::channel(false);
        let mut election = tokio::spawn(leader::elect(self.client.clone(), self.settings.lease(), leading));
        let ended = {
            let mut controller = std::pin::pin!(run(self.client, self.settings, self.status, leads));
            tokio::select! {
                () = &mut controller => Err(FrontError::Ended("the controller")),
                _ = &mut election => Err(FrontError::Ended("the leader election")),
                () = stop => Ok(()),
            }
        };
        // The controller, and with it every receiver of `leading`, is gone: the Lease is released.
        if !election.is_finished() && timeout(RELEASE_TIMEOUT, &mut election).await.is_err() {
            election.abort();
        }
        ended
    }
}

/// Watches, plans and writes.
async fn run(client: Client, settings: Settings, status: StatusHandle, leads: channel::Receiver<bool>) {
    let front = &settings.plan.front;
    let services: Api<core::Service> = Api::namespaced(client.clone(), &front.namespace);
    let this_one = watch::config().fields(&format!("metadata.name={}", front.name));
    let (exposed, writer) = reflector::store();
    let context = Arc::new(Context {
        events: Events::new(client.clone(), CONTROLLER, &settings.identity),
        services: services.clone(),
        exposed,
        leads: leads.clone(),
        state: Mutex::new(State::new(Debounce::new(settings.quiet, settings.max_wait))),
        settings,
        status,
    });
    let triggers = stream::select(
        follow_services(client, writer, Arc::clone(&context)),
        follow_leadership(leads, Arc::clone(&context)),
    );
    Controller::new(services, this_one)
        .reconcile_all_on(triggers)
        .run(reconcile, |_, _, context| context.state().next(Instant::now()), context)
        .for_each(|result| {
            match result {
                // A write that failed is in the log already; a front Service that is missing, too.
                Ok(_) | Err(ControllerError::ReconcilerFailed(..) | ControllerError::ObjectNotFound(_)) => {}
                Err(ControllerError::QueueError(watch)) => {
                    warn!(error = describe(&watch), "the watch of the front Service failed; trying again");
                }
                Err(ControllerError::RunnerError(ended)) => {
                    error!(error = describe(&ended), "no longer reconciling")
                }
            }
            ready(())
        })
        .await;
}

/// Everything that a reconciliation needs.
struct Context {
    settings: Settings,
    /// The Services of the namespace of the front Service.
    services: Api<core::Service>,
    /// The exposed Services of the seed.
    exposed: Store<Served<Service>>,
    events: Events,
    leads: channel::Receiver<bool>,
    status: StatusHandle,
    state: Mutex<State>,
}

/// What one reconciliation leaves for the next.
#[derive(Debug)]
struct State {
    debounce: Debounce,
    /// The resourceVersion of the front Service that was reconciled last.
    seen: Option<String>,
    /// The resourceVersion that the last write replaced: until the watch has a newer one, its ports are out
    /// of date.
    replaced: Option<String>,
    announced: Announced,
}

impl State {
    fn new(debounce: Debounce) -> Self {
        Self { debounce, seen: None, replaced: None, announced: Announced::default() }
    }

    /// Starts to reconcile the front Service of this version: `None`. Or returns what to wait for.
    fn start(&mut self, version: Option<String>, now: Instant) -> Option<Action> {
        if version.is_some() && version == self.replaced {
            return Some(Action::await_change());
        }
        if self.seen != version {
            self.seen = version;
            self.debounce.changed(now);
        }
        (!self.debounce.start(now)).then(|| self.next(now))
    }

    /// When to reconcile again: once the changes that wait are due. Without any, a change triggers it.
    fn next(&self, now: Instant) -> Action {
        let due = self.debounce.due();
        due.map_or_else(Action::await_change, |due| Action::requeue(due.saturating_duration_since(now)))
    }
}

/// Compares the ports of the front Service with what they should be and, as leader, makes them so.
async fn reconcile(front: Arc<core::Service>, context: Arc<Context>) -> Result<Action, WriteError> {
    // Ports of Services that are not listed yet must not be removed; the end of the initial sync triggers
    // again.
    if !context.status.get().complete {
        return Ok(Action::await_change());
    }
    if let Some(wait) = context.state().start(front.resource_version(), Instant::now()) {
        return Ok(wait);
    }
    let exposed = context.exposed.state();
    let services = exposed.iter().filter_map(|served| service_of(served));
    let plan = plan_front_ports(&ports_of(&front), services, &context.settings.plan);
    context.status.update(|status| {
        (status.used, status.limit) = (plan.used, plan.limit);
        status.waiting.clone_from(&plan.waiting);
    });
    if *context.leads.borrow() {
        if plan.changed {
            context.write(&front, &plan.ports).await?;
            let waiting = plan.waiting.len();
            info!(used = plan.used, limit = plan.limit, waiting, "front Service updated");
        }
        let announcements = context.state().announced.update(&plan);
        for announcement in announcements {
            let note = Note {
                severity: announcement.severity,
                reason: announcement.reason,
                action: "PublishPorts",
                text: &announcement.text,
            };
            context.events.publish(&front.object_ref(&()), note).await;
        }
    }
    let mut state = context.state();
    state.debounce.succeeded();
    Ok(state.next(Instant::now()))
}

impl Context {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.state().debounce.changed(Instant::now());
    }

    async fn write(&self, front: &core::Service, ports: &[ServicePort]) -> Result<(), WriteError> {
        let version = front.resource_version();
        let patch = json!({ "metadata": { "resourceVersion": version }, "spec": { "ports": ports } });
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let patch = Patch::Merge(&patch);
        let name = &self.settings.plan.front.name;
        let error = match timeout(WRITE_TIMEOUT, self.services.patch(name, &parameters, &patch)).await {
            Ok(Ok(written)) => {
                // A patch that changes nothing keeps the version.
                self.state().replaced =
                    version.filter(|_| written.resource_version() != front.resource_version());
                self.status.update(|status| {
                    status.writes += 1;
                    status.error = None;
                });
                return Ok(());
            }
            Ok(Err(error)) => WriteError::Refused(error),
            Err(_) => WriteError::NoAnswer,
        };
        warn!(service = %self.settings.plan.front, %error, "cannot update the front Service; trying again");
        self.status.update(|status| {
            status.failed_writes += 1;
            status.error = Some(error.to_string());
        });
        self.state().debounce.failed(Instant::now());
        Err(error)
    }

    /// Returns an event of the seed's Services as an event of its exposed Services; `None` if it does not
    /// concern them.
    fn exposed_only(
        &self,
        event: watcher::Event<Served<Service>>,
    ) -> Option<watcher::Event<Served<Service>>> {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        match event {
            Init | InitDone => Some(event),
            InitApply(ref served) | Apply(ref served) if served.object.is_err() => {
                // Its last good version stays in the store.
                if let Err(error) = &served.object {
                    warn!(service = %served.reference, %error, "cannot read a Service; it stays as it was");
                }
                None
            }
            InitApply(served) => self.is_exposed(&served).then_some(InitApply(served)),
            Apply(served) if self.is_exposed(&served) => Some(Apply(served)),
            // No longer exposed, or never: most of the Services of a seed.
            Apply(served) | Delete(served) => {
                self.exposed.get(&ObjectRef::from_obj(&served)).map(|_| Delete(served))
            }
        }
    }

    fn is_exposed(&self, served: &Served<Service>) -> bool {
        let annotation = &self.settings.plan.expose_annotation;
        service_of(served).is_some_and(|service| service.metadata.annotation(annotation).is_some())
    }

    /// Follows whether the front Service exists. `listed` says whether the present listing had it.
    fn follow_front(&self, event: &watcher::Event<Served<Service>>, listed: &mut bool) {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let front = &self.settings.plan.front;
        let found = match event {
            Init => {
                *listed = false;
                return;
            }
            InitApply(served) => {
                *listed |= served.reference.key == *front;
                return;
            }
            InitDone => *listed,
            Apply(served) if served.reference.key == *front => true,
            Delete(served) if served.reference.key == *front => false,
            Apply(_) | Delete(_) => return,
        };
        if !found {
            warn!(service = %front, "the front Service does not exist; create it, as in deploy/gateway.yaml");
        }
        self.status.update(|status| status.found = found);
    }
}

/// Watches the Services of the seed. Keeps those that are exposed in the store of `writer`, and yields when
/// they change.
///
/// Not [`Controller::watches`]: it does not yield when a relist shows that a Service vanished.
fn follow_services(
    client: Client,
    writer: reflector::store::Writer<Served<Service>>,
    context: Arc<Context>,
) -> impl Stream<Item = ()> + Send + 'static {
    let after = Arc::clone(&context);
    let mut listed = false;
    watcher(Api::<Served<Service>>::all_with(client, &()), watch::config())
        .default_backoff()
        .filter_map(move |event| {
            ready(match event {
                Ok(event) => {
                    context.follow_front(&event, &mut listed);
                    context.exposed_only(event).map(Ok)
                }
                Err(error) => Some(Err(error)),
            })
        })
        .reflect(writer)
        .filter_map(move |event| {
            ready(match event {
                Ok(watcher::Event::Init) => None,
                Ok(event) => {
                    if matches!(event, watcher::Event::InitDone) {
                        after.status.update(|status| status.complete = true);
                    }
                    after.changed();
                    Some(())
                }
                Err(error) => {
                    warn!(error = describe(&error), "the watch of Services failed; trying again");
                    None
                }
            })
        })
}

/// Yields when this replica becomes or stops being the leader.
fn follow_leadership(
    leads: channel::Receiver<bool>,
    context: Arc<Context>,
) -> impl Stream<Item = ()> + Send + 'static {
    stream::unfold(leads, move |mut leads| {
        let context = Arc::clone(&context);
        async move {
            leads.changed().await.ok()?;
            let leader = *leads.borrow_and_update();
            context.status.update(|status| status.leader = leader);
            context.changed();
            Some(((), leads))
        }
        .boxed()
    })
}

fn service_of(served: &Served<Service>) -> Option<&Service> {
    match &served.object {
        Ok(Object::Service(service)) => Some(service),
        _ => None,
    }
}

/// The ports of the Service as Portico reads them. A port that it cannot read counts as absent, and so is
/// replaced.
fn ports_of(service: &core::Service) -> Vec<ServicePort> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let read = |port| serde_json::to_value(port).and_then(serde_json::from_value).ok();
    ports.iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests;
