//! The controller: watch, plan, write.
//!
//! Every replica watches and plans, so that the one that comes to lead knows everything already and so that all of them report the same
//! numbers; only the leader writes. It writes when the ports differ from what they should be and not otherwise: a JSON merge patch of
//! `spec.ports` with the resourceVersion it was planned from, so that nothing else of the Service is touched and a change by somebody else in between
//! is noticed and not overwritten.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1 as core;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Event as Note, EventType, Recorder, Reporter};
use kube::runtime::watcher::{self, watch_object};
use kube::{Api, Client, Resource, ResourceExt};
use portico_api::meta::{Kind, ObjectKey};
use portico_api::service::{Service, ServicePort};
use portico_expose::front::{FrontPlan, FrontSettings, WhyWaiting, plan_front_ports};
use portico_source::{Event, KubernetesSettings, KubernetesSource, Object, Step};
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::lease::{self, LeaseSettings};
use crate::settle::{DEFAULT_MAX_WAIT, DEFAULT_SETTLE, Settle};
use crate::status::StatusHandle;

/// Who writes, in managed fields and on Events.
const FIELD_MANAGER: &str = "portico-front";

/// An API server that has not answered a write by then may or may not have done it; the watch will tell.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long giving the Lease back may take at the end.
const GIVE_BACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Waiting ports named in the log and on an Event; a thousand more would help nobody.
const NAMED: usize = 5;

/// Why the controller ended by itself.
#[derive(Debug, Error)]
pub enum FrontError {
    /// A watch ended, which only a defect can make it do.
    #[error("the watch of {0} has ended; restart this process and report what the log says")]
    WatchEnded(&'static str),
}

/// What the controller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Which Service, and which ports it gets.
    pub plan: FrontSettings,
    /// Name of this replica, different from all others: that of its pod.
    pub identity: String,
    /// A pause of this length ends a burst of changes.
    pub settle: Duration,
    /// However long the burst, its first change is written by then.
    pub max_wait: Duration,
}

impl Settings {
    /// Settings with the usual times.
    pub fn new(plan: FrontSettings, identity: &str) -> Self {
        Self { plan, identity: identity.to_owned(), settle: DEFAULT_SETTLE, max_wait: DEFAULT_MAX_WAIT }
    }

    /// The Lease by which replicas for the same Service agree: beside it, and named after it.
    pub fn lease(&self) -> LeaseSettings {
        LeaseSettings {
            namespace: self.plan.front.namespace.to_string(),
            name: format!("portico-front-{}", self.plan.front.name),
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
    /// A controller that has not begun.
    pub fn new(client: Client, settings: Settings) -> Self {
        Self { client, settings, status: StatusHandle::default() }
    }

    /// How it is, now and whenever asked.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// Works until `stop` is ready, then gives the Lease back.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), FrontError> {
        let (leading, leads) = watch::channel(false);
        let mut holder = tokio::spawn(lease::hold(self.client.clone(), self.settings.lease(), leading));
        let worker = Worker::new(self.client, self.settings, self.status);
        let ended = tokio::select! {
            ended = worker.run(leads) => ended,
            () = stop => Ok(()),
        };
        // The worker, and with it the receiver, is gone: the holder gives the Lease back.
        if timeout(GIVE_BACK_TIMEOUT, &mut holder).await.is_err() {
            holder.abort();
        }
        ended
    }
}

struct Worker {
    services: Api<core::Service>,
    source: KubernetesSource,
    recorder: Recorder,
    settings: Settings,
    status: StatusHandle,
    exposed: BTreeMap<ObjectKey, Service>,
    complete: bool,
    front: Option<core::Service>,
    settle: Settle,
    /// Whether the listener limit was reached when last planned by a leader.
    limited: bool,
}

impl Worker {
    fn new(client: Client, settings: Settings, status: StatusHandle) -> Self {
        let watched = KubernetesSettings {
            annotation: Some(settings.plan.expose_annotation.clone()),
            only_services: true,
            ..KubernetesSettings::default()
        };
        let reporter =
            Reporter { controller: FIELD_MANAGER.into(), instance: Some(settings.identity.clone()) };
        Self {
            services: Api::namespaced(client.clone(), &settings.plan.front.namespace),
            source: KubernetesSource::start(client.clone(), watched),
            recorder: Recorder::new(client, reporter),
            settle: Settle::new(settings.settle, settings.max_wait),
            settings,
            status,
            exposed: BTreeMap::new(),
            complete: false,
            front: None,
            limited: false,
        }
    }

    async fn run(mut self, mut leads: watch::Receiver<bool>) -> Result<(), FrontError> {
        let name = self.settings.plan.front.name.clone();
        let front = watch_object(self.services.clone(), &name).default_backoff();
        let mut front = std::pin::pin!(front);
        loop {
            let due = self.settle.due();
            tokio::select! {
                step = self.source.next() => self.apply(step.ok_or(FrontError::WatchEnded("Services"))?),
                word = front.next() => self.hear(word.ok_or(FrontError::WatchEnded("the front Service"))?),
                changed = leads.changed() => {
                    if changed.is_err() {
                        return Err(FrontError::WatchEnded("the Lease"));
                    }
                    let leader = *leads.borrow_and_update();
                    self.status.update(|status| status.leader = leader);
                    self.settle.changed(Instant::now());
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let leader = *leads.borrow();
                    self.reconcile(leader).await;
                }
            }
        }
    }

    fn apply(&mut self, step: Step) {
        for event in step.events {
            match event {
                Event::Apply(Object::Service(service)) => {
                    self.exposed.insert(service.metadata.key(), *service);
                }
                Event::Delete(object) if object.kind == Kind::Service => {
                    self.exposed.remove(&object.key);
                }
                Event::Apply(_) | Event::Delete(_) => {}
            }
        }
        if step.complete {
            self.complete = true;
            self.status.update(|status| status.complete = true);
            self.settle.changed(Instant::now());
        }
    }

    fn hear(&mut self, word: watcher::Result<Option<core::Service>>) {
        match word {
            Ok(service) => {
                if service.is_none() {
                    warn!(service = %self.settings.plan.front, "the front Service does not exist; create it, as in deploy/gateway.yaml");
                }
                self.status.update(|status| status.found = service.is_some());
                self.front = service;
                self.settle.changed(Instant::now());
            }
            Err(error) => {
                warn!(service = %self.settings.plan.front, %error, "watch failed; trying again");
            }
        }
    }

    /// Compares the ports with what they should be and, as leader, makes them so.
    async fn reconcile(&mut self, leader: bool) {
        let Some(front) = self.front.as_ref().filter(|_| self.complete) else {
            return self.settle.written();
        };
        let plan = plan_front_ports(&ports_of(front), self.exposed.values(), &self.settings.plan);
        self.status.update(|status| {
            (status.used, status.limit) = (plan.used, plan.limit);
            status.waiting.clone_from(&plan.waiting);
        });
        if !leader {
            return self.settle.written();
        }
        if plan.changed {
            let written = timeout(WRITE_TIMEOUT, self.write(front, &plan.ports)).await;
            let error = match written {
                Ok(Ok(front)) => {
                    info!(
                        used = plan.used,
                        limit = plan.limit,
                        waiting = plan.waiting.len(),
                        "front Service updated"
                    );
                    self.status.update(|status| {
                        status.writes += 1;
                        status.error = None;
                    });
                    self.front = Some(front);
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("no answer".to_owned()),
            };
            if let Some(error) = error {
                warn!(service = %self.settings.plan.front, error, "cannot update the front Service; trying again");
                self.status.update(|status| {
                    status.failed_writes += 1;
                    status.error = Some(error);
                });
                return self.settle.failed(Instant::now());
            }
        }
        self.settle.written();
        self.tell_about_limit(&plan).await;
    }

    async fn write(&self, front: &core::Service, ports: &[ServicePort]) -> kube::Result<core::Service> {
        let patch = json!({
            "metadata": { "resourceVersion": front.resource_version() },
            "spec": { "ports": ports },
        });
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        self.services.patch(&self.settings.plan.front.name, &parameters, &Patch::Merge(&patch)).await
    }

    /// Says, when it changes, whether ports wait for the listener limit: in the log and on the Service.
    async fn tell_about_limit(&mut self, plan: &FrontPlan) {
        let waiting: Vec<String> = plan
            .waiting
            .iter()
            .filter(|waiting| waiting.why == WhyWaiting::ListenerLimit)
            .map(|waiting| format!("{} ({})", waiting.service, waiting.node_port))
            .collect();
        let limited = !waiting.is_empty();
        if limited == std::mem::replace(&mut self.limited, limited) {
            return;
        }
        let limit = plan.limit.unwrap_or_default();
        let (kind, reason, text) = if limited {
            let named = waiting[..waiting.len().min(NAMED)].join(", ");
            let more = if waiting.len() > NAMED { ", ..." } else { "" };
            let text = format!(
                "All {limit} listeners are in use; {} ports wait for one: {named}{more}. Raise --listener-limit if the load balancer allows it, or expose clusters by SNI",
                waiting.len()
            );
            warn!(used = plan.used, limit, waiting = waiting.len(), "{text}");
            (EventType::Warning, "ListenerLimitReached", text)
        } else {
            let text = format!("{} of {limit} listeners are in use and nobody waits any more", plan.used);
            info!(used = plan.used, limit, "{text}");
            (EventType::Normal, "ListenerLimitLeft", text)
        };
        let Some(front) = &self.front else { return };
        let note = Note {
            type_: kind,
            reason: reason.into(),
            note: Some(text),
            action: "PublishPorts".into(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&note, &front.object_ref(&())).await {
            warn!(%error, "cannot put an Event on the front Service");
        }
    }
}

/// The ports of the Service as Portico knows them. One that it cannot read counts as absent, and so is replaced.
fn ports_of(service: &core::Service) -> Vec<ServicePort> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let read = |port| serde_json::to_value(port).and_then(serde_json::from_value).ok();
    ports.iter().filter_map(read).collect()
}
