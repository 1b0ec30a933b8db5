//! The front Service controller: the ports of LoadBalancer Services follow the Services that they publish.
//!
//! The one of the seed has the NodePorts of all clusters, and the settings of the Seed (`patch`). The one
//! of a cluster with the strategy LoadBalancer (`front-loadbalancer`, which KKP makes) has those of its
//! cluster.
//!
//! Every replica watches and plans: a new leader knows everything at once, and all replicas report the same
//! numbers. Only the leader writes, and only if something differs. Bursts of changes become one write
//! ([`Debounce`]), because cloud load balancers are slow. The reasons why a Service is not as wanted are in
//! the status, in Events and in a condition. Which ports there should be is decided by
//! [`portico_expose::front`]. Other writers are yielded to (`contention`).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::ready;
use futures_util::{Stream, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use kube::api::Patch;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use portico_api::annotations::EXPOSE_NAMESPACED;
use portico_api::meta::{Kind, ObjectKey};
use portico_api::names::ClusterName;
use portico_api::seed::Seed;
use portico_api::service::{Service, ServiceType};
use portico_expose::front::{FrontPlan, FrontSettings, plan_front_ports};
use portico_expose::load_balancer::{self, LoadBalancerSettings, SettingsError};
use portico_kube::apply::{applying, merging};
use portico_kube::conditions::{self, Observed};
use portico_kube::debounce::{DEFAULT_MAX_WAIT, DEFAULT_QUIET, Debounce};
use portico_kube::error::describe;
use portico_kube::events::{Events, Note};
use portico_kube::leader::Leads;
use portico_kube::leader::LeaseSettings;
use portico_source::Object;
use portico_source::served::Served;
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::contention::Contention;
use crate::follow::{drive, follow, keep_last_read, on_change};
use crate::installation::Reflector;
use crate::manager::Manager;
use crate::status::{ServiceStatus, StatusHandle};
use crate::work_counters::WorkCounters;

mod announce;
mod patch;

use announce::{Announced, Announcement, Trouble, Troubles, foreign_writer, troubles_of};
use patch::{Left, other_writer, ports_of, ports_patch, published, settings_patch};

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-front";

/// The condition of a front Service that says whether everything is published.
const CONDITION: &str = "portico.k8c.io/Published";

/// Time limit of a request. The API server may have done it all the same; the next pass will tell.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The first HTTP status of an API server that did not get to an end: etcd, say, did not answer it.
const SERVER_ERROR: u16 = 500;

/// Services that are reconciled at the same time. One that an admission webhook keeps waiting must not hold
/// the others up.
const CONCURRENCY: u16 = 8;

/// Why a request about a front Service failed.
#[derive(Debug, Error)]
enum RequestError {
    /// The API server refused it, or was not reached. Retried with back-off.
    #[error("{}", describe(.0))]
    Refused(#[from] kube::Error),
    /// The API server did not answer in time. Retried with back-off.
    #[error("no answer within {REQUEST_TIMEOUT:?}")]
    NoAnswer,
}

impl RequestError {
    /// The Service was written by another client between reading and writing: no failure, plan anew.
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused(kube::Error::Api(status)) if status.is_conflict())
    }

    /// The API server may have done it all the same: its answer is lost, or says that it does not know.
    fn may_be_done(&self) -> bool {
        !matches!(self, Self::Refused(kube::Error::Api(status)) if status.code < SERVER_ERROR)
    }
}

/// What the controller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The Service of the seed, and which ports it gets.
    pub plan: FrontSettings,
    /// Name of the load balancer Service in the namespace of each cluster; `None` leaves them alone.
    pub cluster_service: Option<String>,
    /// The Seed of this load balancer, where there are several.
    pub seed: Option<String>,
    /// Whether to write an ExposedCluster for each Cluster.
    pub exposed_clusters: bool,
    /// Name of this replica, that of its pod. Must differ from all others.
    pub identity: String,
    /// A pause of this length ends a burst of changes.
    pub quiet: Duration,
    /// The first change of a burst is written after this time, however long the burst.
    pub max_wait: Duration,
}

impl Settings {
    /// Settings with the default times, for the Service of the seed alone.
    pub fn new(plan: FrontSettings, identity: &str) -> Self {
        Self {
            plan,
            cluster_service: None,
            seed: None,
            exposed_clusters: false,
            identity: identity.to_owned(),
            quiet: DEFAULT_QUIET,
            max_wait: DEFAULT_MAX_WAIT,
        }
    }

    /// The Lease by which the replicas for this Service elect a leader: in its namespace, and named after it.
    pub fn lease(&self) -> LeaseSettings {
        LeaseSettings {
            namespace: self.plan.front.namespace.to_string(),
            name: format!("{CONTROLLER}-{}", self.plan.front.name),
            identity: self.identity.clone(),
            says: None,
        }
    }

    /// The load balancer Service of the namespace, if the namespace is that of a cluster.
    fn front_of(&self, namespace: &str) -> Option<ObjectKey> {
        let name = self.cluster_service.as_ref()?;
        ClusterName::of_namespace(namespace).map(|_| ObjectKey::new(namespace, name))
    }

    /// The ports of the front Service `front`.
    fn plan_of(&self, front: &ObjectKey) -> FrontSettings {
        if *front == self.plan.front {
            return self.plan.clone();
        }
        FrontSettings {
            front: front.clone(),
            sni_port: None,
            tunnel_port: None,
            listener_limit: self.plan.listener_limit,
            expose_annotation: EXPOSE_NAMESPACED.to_owned(),
            namespace: Some(Arc::clone(&front.namespace)),
        }
    }

    /// Whether a front Service has, or publishes, this one.
    fn concerns(&self, service: &Service) -> bool {
        let has = |annotation| service.metadata.annotation(annotation).is_some();
        self.is_front(service) || has(&self.plan.expose_annotation) || has(EXPOSE_NAMESPACED)
    }

    fn is_front(&self, service: &Service) -> bool {
        let key = service.metadata.key();
        key == self.plan.front
            || (service.spec.service_type == ServiceType::LoadBalancer
                && self.front_of(&key.namespace) == Some(key))
    }
}

/// Whether the front Service of the seed should exist, and what makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It should, and an administrator makes it.
    Admin,
    /// It should if a Seed asks for a gateway, and an administrator makes it.
    AdminForSeed,
    /// It should if a Seed asks for a gateway, and this process makes it.
    Operator,
}

/// Watches, plans and writes.
pub(crate) async fn run(
    manager: Manager,
    settings: Settings,
    origin: Origin,
    services_writer: Writer<Served<Service>>,
) {
    let (events, changes) = (manager.events(CONTROLLER), manager.installation.changes());
    let Manager { client, installation, status, leads, .. } = manager;
    let services = services_writer.as_reader();
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Arc::new(Context {
        events,
        client: client.clone(),
        services: services.clone(),
        seeds: installation.seeds,
        leads: leads.clone(),
        fronts: Mutex::default(),
        settings,
        origin,
        status,
        counters: counters.clone(),
    });
    let triggers = stream::select_all([
        follow_services(client, services_writer, Arc::clone(&context)).boxed(),
        on_change(changes, &context, Context::seeds_changed).boxed(),
        on_change(leads, &context, Context::leadership_changed).boxed(),
    ]);
    let never = |_, never: &Infallible, _| match *never {};
    // A front Service that is missing is in the log already.
    drive(reconcile, never, context, services, triggers, CONCURRENCY, counters).await;
}

/// Everything that a reconciliation needs.
struct Context {
    settings: Settings,
    origin: Origin,
    client: Client,
    /// The front Services, and the Services that they publish.
    services: Store<Served<Service>>,
    seeds: Arc<Reflector<Seed>>,
    events: Events,
    leads: channel::Receiver<Leads>,
    status: StatusHandle,
    counters: WorkCounters,
    fronts: Mutex<BTreeMap<ObjectKey, State>>,
}

/// The state that one reconciliation of a front Service leaves for the next.
#[derive(Debug)]
struct State {
    debounce: Debounce,
    /// The result of the last write, while this replica leads.
    left: Option<Left>,
    contention: Contention,
    announced: Announced,
}

impl State {
    fn new(settings: &Settings) -> Self {
        Self {
            debounce: Debounce::new(settings.quiet, settings.max_wait),
            left: None,
            contention: Contention::default(),
            announced: Announced::default(),
        }
    }

    /// Starts to reconcile: `None`. Or returns what to wait for.
    fn start(&mut self, now: Instant) -> Option<Action> {
        // A burst that waits is not put off.
        if self.debounce.due().is_none() && self.contention.due().is_some_and(|due| due <= now) {
            self.debounce.changed(now);
        }
        (!self.debounce.start(now)).then(|| self.next(now))
    }

    /// When to reconcile again: once the changes that wait are due. Without any, a change triggers it.
    fn next(&self, now: Instant) -> Action {
        let due = self.debounce.due().or_else(|| self.contention.due());
        due.map_or_else(Action::await_change, |due| Action::requeue(due.saturating_duration_since(now)))
    }
}

/// Compares one front Service with what it should be and, as leader, makes it so.
async fn reconcile(front: Arc<Served<Service>>, context: Arc<Context>) -> Result<Action, Infallible> {
    let key = front.reference.key.clone();
    if let Some(wait) = context.state(&key, |state| state.start(Instant::now())) {
        return Ok(wait);
    }
    let started = Instant::now();
    let outcome = context.pass(&key).await;
    let now = Instant::now();
    context.counters.passed(now - started);
    Ok(context.state(&key, |state| {
        match outcome {
            Pass::Done => state.debounce.succeeded(),
            Pass::Again => state.debounce.changed(now),
            Pass::Failed => state.debounce.failed(now),
        }
        state.next(now)
    }))
}

/// How a pass over one front Service ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// The Service is as it should be, or nothing can be done about it now.
    Done,
    /// Another client wrote it meanwhile.
    Again,
    /// A request failed.
    Failed,
}

impl Context {
    /// Reads one front Service, plans, writes, and says what is in the way.
    async fn pass(&self, key: &ObjectKey) -> Pass {
        // A load balancer is restricted before it has ports.
        if !self.seeds.is_asked() {
            return Pass::Done;
        }
        let api: Api<core::Service> = Api::namespaced(self.client.clone(), &key.namespace);
        // From the API server and not from the watch: a write of our own a moment ago must be in it.
        let mut front = match request(api.get_opt(&key.name)).await {
            Ok(Some(front)) => front,
            // The watch will tell.
            Ok(None) => return Pass::Done,
            Err(error) => return self.failed(key, "read it", &error),
        };
        let plan = self.plan(key, &front);
        let mut troubles = troubles_of(&plan);
        let wanted = self.wanted_settings(key).unwrap_or_else(|error| {
            troubles.insert(Trouble::SettingsNotCarried, error.to_string());
            None
        });
        let mut outcome = Pass::Done;
        if self.leads.borrow().now() && self.may_write(key, &front) {
            outcome = self.write(&api, key, &mut front, &plan, wanted.as_ref(), &mut troubles).await;
        }
        let yielded_to = self.state(key, |state| state.contention.yielded_to().map(str::to_owned));
        if let Some(writer) = &yielded_to {
            troubles.insert(Trouble::ForeignWriter, foreign_writer(writer));
        }
        let has = published(&front, &plan.ports);
        let error = troubles.get(&Trouble::WriteRefused).cloned();
        self.status.service(key, |status| {
            status.found = true;
            (status.used, status.limit) = (plan.used, plan.limit);
            status.published = if plan.nothing_to_publish { 0 } else { has };
            status.waiting = plan.waiting;
            status.error = error;
            status.yielded_to = yielded_to;
            status.troubles =
                troubles.iter().map(|(trouble, text)| (trouble.reason(), text.clone())).collect();
        });
        if self.leads.borrow().now() {
            if !self.set_condition(&api, key, &front, &troubles).await {
                outcome = Pass::Failed;
            }
            self.announce(key, &front, &troubles).await;
        }
        outcome
    }

    fn plan(&self, key: &ObjectKey, front: &core::Service) -> FrontPlan {
        let served = self.services.state();
        let services = served.iter().filter_map(|served| service_of(served));
        plan_front_ports(&ports_of(front), services, &self.settings.plan_of(key))
    }

    /// The settings that the Service of the seed should have; `None` leaves it as it is. Those of clusters
    /// have theirs from the controller that makes them.
    fn wanted_settings(&self, key: &ObjectKey) -> Result<Option<LoadBalancerSettings>, SettingsError> {
        if *key != self.settings.plan.front || !self.seeds.is_known() {
            return Ok(None);
        }
        let seeds = self.seeds.seeds();
        load_balancer::settings(seeds.iter().map(|seed| &**seed), self.settings.seed.as_deref())
    }

    /// Looks whether the last write still stands. Returns whether another one is allowed.
    fn may_write(&self, key: &ObjectKey, front: &core::Service) -> bool {
        let now = Instant::now();
        let reverted = self.state(key, |state| {
            let reverted = state.left.as_ref().is_some_and(|left| !left.is_in(front));
            if reverted {
                state.left = None;
                state.contention.reverted(other_writer(front), now);
            }
            reverted
        });
        if reverted {
            self.status.service(key, |status| status.reverts += 1);
        }
        self.state(key, |state| state.contention.may_write(now))
    }

    /// Makes the settings, then the ports as planned. `front` is then as written.
    async fn write(
        &self,
        api: &Api<core::Service>,
        key: &ObjectKey,
        front: &mut core::Service,
        plan: &FrontPlan,
        wanted: Option<&LoadBalancerSettings>,
        troubles: &mut Troubles,
    ) -> Pass {
        let mut outcome = Pass::Done;
        let (mut wrote, mut in_doubt) = (false, false);
        let mut patches = Vec::new();
        if let Some(wanted) = wanted {
            let carried = settings_patch(front, wanted);
            if let Some(problem) = carried.problem {
                troubles.insert(Trouble::SettingsNotCarried, problem);
            }
            patches.extend(carried.patch.map(|patch| ("settings", patch)));
        }
        if plan.changed {
            patches.push(("ports", ports_patch(front, &plan.ports)));
        }
        for (what, mut patch) in patches {
            patch["metadata"]["resourceVersion"] = json!(front.resource_version());
            match request(api.patch(&key.name, &merging(), &Patch::Merge(&patch))).await {
                Ok(written) => {
                    *front = written;
                    // A request before it was for the same version. It was not done, and cannot be any more.
                    (wrote, in_doubt) = (true, false);
                    self.status.service(key, |status| status.writes += 1);
                    self.counters.wrote(Kind::Service.name());
                    info!(service = %key, what, ports = plan.ports.len(), "front Service updated");
                }
                Err(error) if error.is_conflict() => {
                    outcome = Pass::Again;
                    break;
                }
                Err(error) => {
                    outcome = Pass::Failed;
                    in_doubt |= error.may_be_done();
                    self.status.service(key, |status| status.failed_writes += 1);
                    self.counters.failed(Trouble::WriteRefused.reason());
                    troubles.insert(Trouble::WriteRefused, format!("Cannot write the {what}: {error}"));
                }
            }
        }
        if in_doubt {
            // What the next pass finds may be of this one, and is nobody's revert.
            self.state(key, |state| state.left = None);
        } else if wrote {
            let no_settings = LoadBalancerSettings::default();
            let carried = wanted.unwrap_or(&no_settings).annotations.keys();
            let left = Left::of(front, carried);
            // The API server returned other values than were written, so something changes them on the way.
            // This counts as a revert, because writing again would never end.
            let altered = outcome == Pass::Done
                && (self.plan(key, front).changed
                    || wanted.is_some_and(|wanted| settings_patch(front, wanted).patch.is_some()));
            self.state(key, |state| {
                state.left = Some(left);
                if altered {
                    let writer = "an admission webhook or the API server itself".to_owned();
                    state.contention.reverted(writer, Instant::now());
                }
            });
            if altered {
                self.status.service(key, |status| status.reverts += 1);
                return Pass::Again;
            }
        }
        outcome
    }

    /// Records that a request failed which is no write of ports or settings.
    fn failed(&self, key: &ObjectKey, what: &str, error: &RequestError) -> Pass {
        let text = format!("Cannot {what}: {error}");
        self.counters.failed("SeedUnavailable");
        let news = self.status.service(key, |status| {
            status.failed_writes += 1;
            status.error.replace(text.clone()).is_none_or(|before| before != text)
        });
        if news {
            warn!(service = %key, "{text}; trying again");
        }
        Pass::Failed
    }

    /// Puts the worst trouble into the condition of the Service. Returns whether that worked.
    async fn set_condition(
        &self,
        api: &Api<core::Service>,
        key: &ObjectKey,
        front: &core::Service,
        troubles: &Troubles,
    ) -> bool {
        let status = front.status.as_ref();
        let mut conditions = status.and_then(|status| status.conditions.clone()).unwrap_or_default();
        let worst = troubles.iter().next();
        let observed = Observed {
            kind: CONDITION,
            holds: Some(worst.is_none()),
            reason: worst.map_or("AsWanted", |(trouble, _)| trouble.reason()),
            message: worst.map_or_else(|| "Everything is published".to_owned(), |(_, text)| text.clone()),
            generation: None,
        };
        if !conditions::set(&mut conditions, observed, Timestamp::now()) {
            return true;
        }
        conditions.retain(|condition| condition.type_ == CONDITION);
        let applied = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": &*key.name },
            "status": { "conditions": conditions },
        });
        match request(api.patch_status(&key.name, &applying(), &Patch::Apply(&applied))).await {
            Ok(_) => {
                self.counters.wrote(Kind::Service.name());
                true
            }
            Err(error) => {
                self.failed(key, "write its condition", &error);
                false
            }
        }
    }

    /// Puts what began and what ended on the Service as Events. What a new leader finds is none if the
    /// condition of `front` says it already.
    async fn announce(&self, key: &ObjectKey, front: &core::Service, troubles: &Troubles) {
        let (is_new, announcements) =
            self.state(key, |state| (state.announced.is_new(), state.announced.update(key, troubles)));
        let conditions = front.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let said = conditions.filter(|condition| is_new && condition.type_ == CONDITION).collect::<Vec<_>>();
        let is_said = |announcement: &Announcement| {
            said.iter()
                .any(|said| (&*said.reason, &said.message) == (announcement.reason, &announcement.text))
        };
        for announcement in announcements.into_iter().filter(|announcement| !is_said(announcement)) {
            let note = Note {
                severity: announcement.severity,
                reason: announcement.reason,
                action: "PublishPorts",
                text: &announcement.text,
            };
            self.events.publish(&front.object_ref(&()), note).await;
        }
    }

    /// Calls `change` with the state of a front Service.
    fn state<T>(&self, key: &ObjectKey, change: impl FnOnce(&mut State) -> T) -> T {
        let mut fronts = self.fronts();
        change(fronts.entry(key.clone()).or_insert_with(|| State::new(&self.settings)))
    }

    fn fronts(&self) -> MutexGuard<'_, BTreeMap<ObjectKey, State>> {
        self.fronts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The front Services that exist.
    fn existing(&self) -> Vec<ObjectKey> {
        let is_front = |served: &&Arc<Served<Service>>| {
            service_of(served).is_some_and(|service| self.settings.is_front(service))
        };
        self.services.state().iter().filter(is_front).map(|served| served.reference.key.clone()).collect()
    }

    /// Something that these front Services follow from has changed. Returns what to reconcile.
    fn changed(&self, fronts: Vec<ObjectKey>) -> Vec<ObjectRef<Served<Service>>> {
        let now = Instant::now();
        for key in &fronts {
            self.state(key, |state| state.debounce.changed(now));
        }
        fronts.iter().map(|key| ObjectRef::new(&key.name).within(&key.namespace)).collect()
    }

    /// This replica has become the leader, or is it no longer. Returns what to reconcile.
    fn leadership_changed(&self) -> Vec<ObjectRef<Served<Service>>> {
        let leader = self.leads.borrow().now();
        self.status.update(|status| status.leader = leader);
        // What another leader writes meanwhile is no revert.
        for state in self.fronts().values_mut() {
            (state.left, state.contention) = (None, Contention::default());
        }
        self.changed(self.existing())
    }

    /// A Seed has changed, or the configuration. Returns what to reconcile.
    fn seeds_changed(&self) -> Vec<ObjectRef<Served<Service>>> {
        let existing = self.existing();
        if self.status.get().complete {
            self.forget_all_but(&existing);
        }
        self.changed(existing)
    }

    /// Whether the front Service of the seed should exist.
    fn is_wanted(&self) -> bool {
        let named = self.settings.seed.as_deref();
        self.origin == Origin::Admin
            || self.seeds.seeds().iter().any(|seed| {
                named.is_none_or(|named| *seed.metadata.name == *named) && !seed.spec.nodeport_proxy.disable
            })
    }

    /// Drops the records of front Services that are gone. That of the seed has one while it should exist.
    fn forget_all_but(&self, existing: &[ObjectKey]) {
        self.fronts().retain(|key, _| existing.contains(key));
        let (seed, wanted) = (&self.settings.plan.front, self.is_wanted());
        let (exists, is_ours) = (existing.contains(seed), self.origin == Origin::Operator);
        let begins_to_miss = self.status.update(|status| {
            status.services.retain(|key, _| (key == seed && wanted) || existing.contains(key));
            if !exists && !wanted {
                return false;
            }
            let was_missing = status.services.get(seed).is_some_and(|service| !service.found);
            let status = status.services.entry(seed.clone()).or_default();
            if status.found && !exists {
                let counted = (status.writes, status.failed_writes, status.reverts);
                *status = ServiceStatus::default();
                (status.writes, status.failed_writes, status.reverts) = counted;
            }
            status.found = exists;
            !exists && !was_missing
        });
        // What this process does not get made is in the condition of the Seed.
        if begins_to_miss && !is_ours {
            warn!(service = %seed, "the front Service does not exist; create it, as in deploy/gateway.yaml");
        }
    }

    /// Returns an event of the seed's Services as an event of the ones that concern front Services; `None`
    /// for others.
    fn only_concerned(
        &self,
        mut event: watcher::Event<Served<Service>>,
    ) -> Option<watcher::Event<Served<Service>>> {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        keep_last_read(&mut event, &self.services);
        let concerns = |served: &Served<Service>| {
            service_of(served).is_some_and(|service| self.settings.concerns(service))
        };
        match event {
            Init | InitDone => Some(event),
            InitApply(served) => concerns(&served).then_some(InitApply(served)),
            Apply(served) if concerns(&served) => Some(Apply(served)),
            // No longer, or never: most of the Services of a seed.
            Apply(served) | Delete(served) => {
                self.services.get(&ObjectRef::from_obj(&served)).map(|_| Delete(served))
            }
        }
    }

    /// The front Services to look at after an event.
    fn concerned_by(&self, event: &watcher::Event<Served<Service>>) -> Vec<ObjectKey> {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let existing = self.existing();
        match event {
            Init | InitApply(_) => Vec::new(),
            InitDone => {
                self.forget_all_but(&existing);
                self.status.update(|status| status.complete = true);
                existing
            }
            Apply(served) | Delete(served) => {
                if matches!(event, Delete(_)) {
                    self.forget_all_but(&existing);
                }
                let key = &served.reference.key;
                let mut concerned = vec![self.settings.plan.front.clone()];
                concerned.extend(self.settings.front_of(&key.namespace));
                concerned.retain(|front| existing.contains(front));
                concerned
            }
        }
    }
}

/// A request with a time limit.
async fn request<T>(work: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
    Ok(timeout(REQUEST_TIMEOUT, work).await.map_err(|_| RequestError::NoAnswer)??)
}

/// Watches the Services of the seed. Keeps those that concern front Services in the store of `writer`, and
/// yields the front Services to reconcile.
///
/// Not `Controller::watches`: it does not yield when a relist shows that a Service vanished.
fn follow_services(
    client: Client,
    writer: Writer<Served<Service>>,
    context: Arc<Context>,
) -> impl Stream<Item = Vec<ObjectRef<Served<Service>>>> + Send + 'static {
    let after = Arc::clone(&context);
    let api = Api::<Served<Service>>::all_with(client, &());
    follow(api, Kind::Service.name(), context.status.clone())
        .filter_map(move |event| {
            ready(match event {
                Ok(event) => context.only_concerned(event).map(Ok),
                Err(error) => Some(Err(error)),
            })
        })
        .reflect(writer)
        .filter_map(move |event| {
            // Errors are on record.
            ready(event.ok().map(|event| after.changed(after.concerned_by(&event))))
        })
}

fn service_of(served: &Served<Service>) -> Option<&Service> {
    match &served.object {
        Ok(Object::Service(service)) => Some(service),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
