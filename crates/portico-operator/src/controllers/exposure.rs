//! The exposure controller: what makes each Cluster reachable, where no other controller does that.
//!
//! For each Cluster it writes the strategy, if the Cluster names none, then namespace, Services and
//! EndpointSlices. It also writes the ExposedCluster, from which gateways work, `status.address`, and the
//! condition `PorticoExposed`. [`portico_expose::exposure`] decides on their content. One pass is enough:
//! objects that depend on NodePorts are planned again with those that the API server allocated. Nothing is
//! written that is as it should be.
//!
//! A Cluster that must not be used as written, or cannot be read, keeps what it has. Each write stands for
//! itself: a process that is killed between two of them leaves the rest to the next one. Where KKP's
//! controllers run, nothing is written but the ExposedCluster.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use portico_api::cluster::{Address, Cluster};
use portico_api::endpoint_slice::SERVICE_NAME_LABEL;
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_expose::exposure::{MANAGED_BY, Reachability};
use portico_expose::services::{APISERVER, EXPOSED};
use portico_expose::strategy::FRONT;
use portico_kube::cached::Cached;
use portico_kube::watch::{labelled, progress};
use portico_source::served::Served;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::info;

use crate::cache::{Cache, api};
use crate::clusters::{LastWritten, Work, known, unreadable};
use crate::contention::RepairBackoffs;
use crate::controllers::exposed::{NOT_USABLE, follow_written};
use crate::follow::{drive, on_change, pause};
use crate::kkp::Kkp;
use crate::manager::Manager;
use crate::observed::Observed;
use crate::work_counters::WorkCounters;
use crate::write::WriteError;

mod cluster_status;
mod context;
mod found;
mod gateways;
mod migration;
mod objects;
mod pass;
mod record;
mod reports;
mod resolver;
mod write;

use context::Context;
pub use context::ExposureSettings;
pub(crate) use objects::addresses_of;
pub(crate) use pass::belongs_to;
use pass::{Done, Outcome};
use reports::report;
use resolver::{PATIENCE, Resolver};
use write::reachability_after;

/// The first pause after a failed pass; doubled with every further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest pause between two attempts. Never given up: the cause may have been repaired.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Clusters that are reconciled at the same time. One that an admission webhook keeps waiting must not hold
/// the others up.
const CONCURRENCY: u16 = 32;

/// The name of the controller on Events.
pub(crate) const CONTROLLER: &str = "portico-exposure";

/// The reason of a Cluster that must not be used as written, or cannot be read.
const INVALID: &str = "InvalidConfiguration";

/// Why a Cluster stays as it is whose doors a newer operator has recorded.
const NEWER_RECORD: &str = "NewerRecord";

/// Watches and writes, for ever.
pub(crate) async fn run(manager: Manager, settings: ExposureSettings) {
    let events = manager.events(CONTROLLER);
    let Manager { client, clusters, exposed, installation, kkp, observed, status, leads, .. } = manager;
    let (namespaces, namespaces_writer) = Cache::new();
    let (services, services_writer) = Cache::new();
    let (slices, slices_writer) = Cache::new();
    let (gateways, gateways_writer) = Cache::new();
    let (api_servers, api_servers_writer) = Cache::new();
    let (resolver, resolved) = Resolver::new(&settings.name_servers);
    let changes = installation.changes();
    let counters = WorkCounters::new(CONTROLLER, &status);
    let context = Arc::new(Context {
        client: client.clone(),
        settings,
        clusters: clusters.clone(),
        namespaces: Arc::new(namespaces),
        services: Arc::new(services),
        slices: Arc::new(slices),
        exposed: Arc::clone(&exposed.cache),
        gateways: Arc::new(gateways),
        api_servers: Arc::new(api_servers),
        kkp: kkp.clone(),
        resolver,
        observed: observed.clone(),
        watched: Mutex::default(),
        installation,
        leads: leads.clone(),
        events,
        status: status.clone(),
        counters: counters.clone(),
        backoffs: Mutex::default(),
        written: LastWritten::default(),
        outdated_until: Mutex::default(),
    });
    status.clusters(|_| ());
    let all = |context: &Arc<Context>| {
        let context = Arc::clone(context);
        move || context.all()
    };
    let front = context.settings.front.clone();
    let slices_of = |namespace: &str, service: &str| {
        labelled(api::<EndpointSlice>(&client, namespace), &format!("{SERVICE_NAME_LABEL}={service}"))
    };
    let gateway_slices = slices_of(&front.namespace, &front.name);
    let own_slices =
        labelled(api::<EndpointSlice>(&client, ""), &format!("{}={}", MANAGED_BY.0, MANAGED_BY.1));
    let triggers = stream::select_all([
        clusters.changes(&context, Context::forget_gone).boxed(),
        follow_written(&exposed, &context, Context::all).boxed(),
        context
            .namespaces
            .follow(progress(api(&client, ""), None), of_cluster, namespaces_writer, status.clone())
            .map(of_namespace(all(&context)))
            .boxed(),
        context
            .services
            .follow(
                progress(api(&client, ""), None),
                move |service| is_written(service) || is(service, &front),
                services_writer,
                status.clone(),
            )
            .map(of_namespace(all(&context)))
            .boxed(),
        context
            .slices
            .follow(own_slices, in_cluster, slices_writer, status.clone())
            .map(of_namespace(all(&context)))
            .boxed(),
        context
            .api_servers
            .follow(slices_of("", APISERVER), in_cluster, api_servers_writer, status.clone())
            .map(of_namespace(all(&context)))
            .boxed(),
        // Every change concerns all clusters.
        context
            .gateways
            .follow(gateway_slices, |_| true, gateways_writer, status)
            .map(to_all(all(&context)))
            .boxed(),
        on_change(kkp.changes(), &context, Context::all).boxed(),
        names(resolved).boxed(),
        seen_inside(&observed, &context).boxed(),
        on_change(changes, &context, Context::all).boxed(),
        // Another replica writes from now on, or has written until now.
        on_change(leads, &context, |context| {
            context.backoffs().clear();
            context.status.clusters(|clusters| {
                clusters.reports.clear();
                clusters.migrating.clear();
                clusters.observing = None;
            });
            context.all()
        })
        .boxed(),
    ]);
    let retry = |cluster: Arc<_>, _: &_, context: Arc<Context>| context.retry(&cluster);
    drive(reconcile, retry, context, clusters.store(), triggers, CONCURRENCY, counters).await;
}

/// Makes one cluster reachable.
async fn reconcile(served: Arc<Served<Cluster>>, context: Arc<Context>) -> Result<Action, WriteError> {
    let Some(cluster) = known(&served) else { return Ok(Action::await_change()) };
    let cluster = &*cluster;
    if !context.is_ready() || context.written.is_ahead_of(&served) {
        return Ok(Action::await_change());
    }
    match context.kkp.now() {
        Kkp::Unknown => return Ok(Action::await_change()),
        Kkp::Present(deployment) => {
            context.observe(Some(deployment));
            return beside_kkp(cluster, &served, &context).await;
        }
        Kkp::Absent => context.observe(None),
    }
    if cluster.metadata.deletion_timestamp.is_some() {
        // The namespace belongs to it, and goes with it.
        return Ok(Action::await_change());
    }
    if cluster.spec.pause {
        match context.follow_gateways(cluster).await {
            Ok(()) => {}
            Err(WriteError::NotLeading) => return Ok(Action::await_change()),
            Err(error) => return context.failed(cluster, None, error).await,
        }
        let paused = match unreadable(&served) {
            Some(message) => Reachability { exposed: false, reason: INVALID, message },
            None => {
                let message = "the Cluster is paused: everything stays as it is".to_owned();
                Reachability { exposed: true, reason: "Paused", message }
            }
        };
        report(cluster, &paused, false, &context.status, &context.events).await;
        return Ok(Action::await_change());
    }
    let started = Instant::now();
    let version = served.resource_version();
    let outcome = match context.pass_over(cluster, &served).await {
        done @ Ok(Outcome::Done(_)) => done,
        // Also when the pass waits, stopped or failed, the EndpointSlices of the cluster's own load balancer
        // must have the gateway's present pods only.
        other => context.follow_gateways(cluster).await.and(other),
    };
    context.counters.passed(started.elapsed());
    match outcome {
        Ok(Outcome::Waits) => Ok(Action::requeue(PATIENCE)),
        Ok(Outcome::Stopped(reachability)) => {
            context.mark(cluster, &reachability, None, false).await?;
            Ok(context.next(cluster))
        }
        Ok(Outcome::Done(done)) => context.conclude(cluster, version.as_deref(), &done).await,
        // The new leader begins anew.
        Err(WriteError::NotLeading) => Ok(Action::await_change()),
        Err(error) => context.failed(cluster, None, error).await,
    }
}

/// Writes the one object that is not KKP's. A condition would be a write beside KKP.
async fn beside_kkp(
    cluster: &Cluster,
    served: &Served<Cluster>,
    context: &Context,
) -> Result<Action, WriteError> {
    let not_usable = async |message| {
        let not_usable = Reachability { exposed: false, reason: NOT_USABLE, message };
        report(cluster, &not_usable, false, &context.status, &context.events).await;
        Ok(Action::await_change())
    };
    let unreadable = unreadable(served);
    if let (Err(_), Some(why)) = (&served.object, &unreadable) {
        return not_usable(why.clone()).await;
    }
    // A migration stays on record: when KKP is gone, it goes on.
    let migrating = match context.recorded(cluster) {
        Ok(doors) => doors.filter(|doors| doors.now.second.is_some()),
        Err(message) => {
            let newer = Reachability { exposed: true, reason: NEWER_RECORD, message };
            report(cluster, &newer, false, &context.status, &context.events).await;
            return Ok(Action::await_change());
        }
    };
    match context.write_exposed(cluster, migrating.as_ref()).await.map(|refused| unreadable.or(refused)) {
        Ok(None) => {
            context.status.clusters(|clusters| clusters.reports.remove(&*cluster.metadata.name));
            Ok(Action::await_change())
        }
        Ok(Some(message)) => not_usable(message).await,
        Err(error) => {
            // On record, so that the pauses grow.
            let reachability = reachability_after(&error);
            context.counters.failed(reachability.reason);
            report(cluster, &reachability, true, &context.status, &context.events).await;
            Err(error)
        }
    }
}

impl Context {
    /// Records whether KKP's controllers do this work.
    fn observe(&self, deployment: Option<String>) {
        let text = deployment.map(|deployment| {
            format!(
                "KKP's controllers are here (Deployment {deployment}): they expose clusters, and only \
                 ExposedClusters and the front Service are written beside them"
            )
        });
        let before =
            self.status.clusters(|clusters| std::mem::replace(&mut clusters.observing, text.clone()));
        match (before, text) {
            (None, Some(text)) => info!("{text}"),
            (Some(_), None) => info!("KKP's controllers are gone: clusters are exposed from here now"),
            _ => {}
        }
    }

    /// Takes the next step of the migration, and then writes the status of a cluster after a pass. In this
    /// order a step that fails writes one condition: two by turns would each trigger the next pass at once.
    /// No step follows from a pass that left something out.
    async fn conclude(
        &self,
        cluster: &Cluster,
        version: Option<&str>,
        done: &Done,
    ) -> Result<Action, WriteError> {
        let address = Some(&done.exposure.plan.address);
        if !done.whole {
            self.mark(cluster, &done.reachability, address, false).await?;
            return Ok(self.next(cluster));
        }
        let step = match self.migrate(cluster, version, done).await {
            Err(WriteError::NotLeading) => return Ok(Action::await_change()),
            Err(error) if !error.is_conflict() => return self.failed(cluster, address, error).await,
            step => step,
        };
        self.mark(cluster, &done.reachability, address, false).await?;
        Ok(match step {
            Ok(Some(soon)) => Action::requeue(soon),
            Ok(None) => self.next(cluster),
            // A change by another client in between is looked at anew.
            Err(_) => Action::requeue(FIRST_RETRY),
        })
    }

    /// Says that a pass did not end, which is tried again. The `address` is known if only a step of a
    /// migration is missing.
    async fn failed(
        &self,
        cluster: &Cluster,
        address: Option<&Address>,
        error: WriteError,
    ) -> Result<Action, WriteError> {
        let reachability = reachability_after(&error);
        self.counters.failed(reachability.reason);
        // The first failure is the one that counts.
        drop(self.mark(cluster, &reachability, address, true).await);
        Err(error)
    }

    /// When to look again without any change. By then the name is to be looked up again, another writer may
    /// be gone, or the definitions may be newer.
    fn next(&self, cluster: &Cluster) -> Action {
        let (name, now) = (&*cluster.metadata.name, Instant::now());
        let dns = self.resolver.fresh_for(name, now);
        let backoff = self.backoffs().get(name).and_then(RepairBackoffs::due);
        let backoff = backoff.map(|due| due.saturating_duration_since(now));
        let failures = self.failures(name);
        let failed = (failures > 0).then(|| pause(failures, FIRST_RETRY, LAST_RETRY));
        match dns.into_iter().chain(backoff).chain(failed).min() {
            Some(pause) => Action::requeue(pause.max(FIRST_RETRY)),
            None => Action::await_change(),
        }
    }

    fn retry(&self, cluster: &Served<Cluster>) -> Action {
        let failures = self.failures(&cluster.reference.key.name);
        Action::requeue(pause(failures, FIRST_RETRY, LAST_RETRY))
    }
}

/// Whether a Namespace is that of a cluster.
fn of_cluster(namespace: &Cached<Namespace>) -> bool {
    ClusterName::of_namespace(&namespace.name_any()).is_some()
}

pub(crate) fn in_cluster<K: k8s_openapi::Resource>(object: &Cached<K>) -> bool {
    object.namespace().is_some_and(|namespace| ClusterName::of_namespace(&namespace).is_some())
}

/// Whether a Service is one that is written for a cluster. There may be any number of others.
fn is_written(service: &Cached<Service>) -> bool {
    let name = service.name_any();
    in_cluster(service) && EXPOSED.into_iter().chain([FRONT]).any(|written| written == name)
}

fn is<K: k8s_openapi::Resource>(object: &Cached<K>, key: &ObjectKey) -> bool {
    object.name_any() == *key.name && object.namespace().as_deref() == Some(&*key.namespace)
}

/// The cluster of the namespace of an object, or all clusters.
pub(crate) fn of_namespace<K: k8s_openapi::Resource>(
    all: impl Fn() -> Work,
) -> impl FnMut(Option<ObjectRef<Cached<K>>>) -> Work {
    move |object| {
        let Some(object) = object else { return all() };
        let namespace = object.namespace.as_deref().unwrap_or(&object.name);
        match ClusterName::of_namespace(namespace) {
            Some(cluster) => vec![ObjectRef::new(cluster.as_str())],
            None => all(),
        }
    }
}

fn to_all<T>(all: impl Fn() -> Work) -> impl FnMut(T) -> Work {
    move |_| all()
}

/// The clusters that migrate and of whose inside something else is known.
fn seen_inside(observed: &Observed, context: &Arc<Context>) -> impl Stream<Item = Work> + Send + use<> {
    let context = Arc::clone(context);
    observed.changes().map(move |cluster| match cluster {
        Some(cluster) => vec![ObjectRef::new(&cluster)],
        None => context.all(),
    })
}

/// The clusters whose names have another answer.
fn names(resolved: mpsc::Receiver<String>) -> impl Stream<Item = Work> + Send {
    stream::unfold(resolved, |mut resolved| async {
        let cluster = resolved.recv().await?;
        Some((vec![ObjectRef::new(&cluster)], resolved))
    })
}

#[cfg(test)]
mod tests {
    use portico_api::cluster::EXPOSED;
    use portico_lab::log_lines::LogLines;
    use serde_json::{Value, json};
    use tokio::time::sleep;
    use tracing::Level;

    use super::*;
    use crate::status::StatusHandle;
    use crate::testing::{FakeApi, plan};
    use crate::{Operator, Settings};

    fn allowing(range: &str) -> Value {
        json!({"metadata": {"name": "a", "uid": "1"},
            "spec": {"exposeStrategy": "NodePort", "cloud": {"dc": "lab-1"},
                "apiServerAllowedIPRanges": {"cidrBlocks": [range]}}})
    }

    fn named(name: &str) -> Value {
        json!({"namespace": "kubermatic", "name": name})
    }

    /// A seed with one Cluster.
    fn seed() -> FakeApi {
        let api = FakeApi::default();
        for plural in ["namespaces", "endpointslices", "exposedclusters", "deployments"] {
            api.install(plural);
        }
        let datacenters = json!({"lab-1": {}});
        api.put_seed(json!({"metadata": named("north"), "spec": {"datacenters": datacenters}}));
        // No name server is asked for names under `invalid`: RFC 6761.
        let ingress = json!({"domain": "kkp.invalid"});
        let configuration = json!({"metadata": named("kkp"), "spec": {"ingress": ingress}});
        api.put_of("kubermaticconfigurations", configuration);
        api.put_of("clusters", allowing("203.0.113.0/24"));
        api
    }

    fn operator(api: &FakeApi) -> Operator {
        let exposure = ExposureSettings {
            front: plan().front,
            sni_port: 6_443,
            node_ips: Vec::new(),
            name_servers: Vec::new(),
        };
        Operator::new(api.client(), Settings::new(plan(), "this"), exposure)
    }

    fn start(api: &FakeApi) -> StatusHandle {
        let operator = operator(api);
        let status = operator.status();
        tokio::spawn(operator.run(std::future::pending()));
        status
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_fails_with_another_text_each_time_is_tried_with_growing_pauses() {
        let api = seed();
        let status = start(&api);
        sleep(Duration::from_mins(5)).await;
        let work = status.get().controllers[CONTROLLER].clone();
        // Watches are silent here, and are begun again after a minute: that triggers passes too.
        assert!((5..=30).contains(&work.passes), "{work:?}");
        assert_eq!(work.errors["WriteRefused"], work.passes);
        assert_eq!(work.writes["Cluster"], 1);
    }

    #[tokio::test(start_paused = true)]
    async fn beside_kkp_a_cluster_that_cannot_be_used_is_told_of_until_it_can() {
        let (api, kkp) = (seed(), portico_api::kkp::DEPLOYMENT);
        let selector = json!({"matchLabels": {"app.kubernetes.io/name": kkp}});
        api.put_of("deployments", json!({"metadata": named(kkp), "spec": {"selector": selector}}));
        let status = start(&api);
        let until = async |what: &str, holds: &dyn Fn() -> bool| {
            let give_up = Instant::now() + Duration::from_mins(5);
            while !holds() {
                assert!(Instant::now() < give_up, "{what}: {:?}", status.get());
                sleep(Duration::from_millis(10)).await;
            }
        };
        let reports = || status.get().clusters.unwrap_or_default().reports;
        until("the ExposedCluster", &|| api.all_of("exposedclusters").len() == 1).await;
        api.put_of("clusters", allowing("nonsense"));
        until("the Event", &|| api.reasons() == ["ClusterNotUsable"]).await;
        let report = reports().remove("a").unwrap();
        assert!(!report.exposed && report.message.contains("nonsense"), "{report:?}");
        api.put_of("clusters", allowing("198.51.100.0/24"));
        until("the end of the trouble", &|| reports().is_empty()).await;
    }

    /// Cluster `a` with a field of a type that no Cluster has.
    fn misfit() -> Value {
        let mut cluster = allowing("203.0.113.0/24");
        cluster["spec"]["auditLogging"] = "yes".into();
        cluster
    }

    /// The condition of the one Cluster: status, reason and message.
    fn said(api: &FakeApi) -> [String; 3] {
        let condition = &api.all_of("clusters")[0]["status"]["conditions"][EXPOSED];
        ["status", "reason", "message"].map(|field| condition[field].as_str().unwrap_or_default().to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_that_was_never_read_has_a_condition_an_event_and_a_place_in_the_metrics() {
        let api = seed();
        api.put_of("clusters", misfit());
        let status = start(&api);
        sleep(Duration::from_mins(5)).await;
        let [holds, reason, message] = said(&api);
        assert_eq!((&*holds, &*reason), ("False", "InvalidConfiguration"));
        assert!(message.starts_with("Cluster a: spec.auditLogging cannot be read"), "{message}");
        assert_eq!(api.reasons(), ["InvalidConfiguration"]);
        let status = status.get();
        let report = &status.clusters.unwrap().reports["a"];
        assert!(!report.exposed && report.reason == "InvalidConfiguration", "{report:?}");
        assert_eq!(status.controllers[CONTROLLER].writes["Cluster"], 1, "each triggers a pass");
    }

    #[tokio::test(start_paused = true)]
    async fn an_operator_that_is_started_again_writes_no_event_of_what_the_condition_says() {
        let api = seed();
        api.put_of("clusters", misfit());
        for _ in 0..2 {
            operator(&api).run(sleep(Duration::from_mins(1))).await.unwrap();
        }
        assert_eq!(api.reasons(), ["InvalidConfiguration"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_log_has_no_more_of_what_somebody_wrote_than_the_condition() {
        let (lines, _collects) = LogLines::collect(|line| *line.level() == Level::WARN);
        let api = seed();
        let mut cluster = allowing("203.0.113.0/24");
        cluster["spec"]["pause"] = "x".repeat(25 * 1_024).into();
        api.put_of("clusters", cluster);
        let _status = start(&api);
        sleep(Duration::from_mins(1)).await;
        let longest = lines.messages().iter().map(String::len).max();
        assert!(longest.is_some_and(|longest| (2_000..2_100).contains(&longest)), "{longest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_that_cannot_be_read_any_more_is_kept_as_it_was_read_and_its_condition_says_why() {
        let api = seed();
        api.apply_all();
        let status = start(&api);
        sleep(Duration::from_mins(1)).await;
        let [_, before, _] = said(&api);
        let services = api.all_of("services").len();
        assert!(before == "NodePortPending" && services > 0, "{before}: {:?}", api.reasons());
        let mut cluster = api.all_of("clusters").remove(0);
        let readable = cluster.clone();
        cluster["spec"] = misfit()["spec"].clone();
        api.put_of("clusters", cluster);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(said(&api)[1], "InvalidConfiguration");
        api.delete("cluster-a/apiserver-external");
        sleep(Duration::from_mins(5)).await;
        assert_eq!(api.all_of("services").len(), services, "it is made anew");
        let [holds, reason, message] = said(&api);
        assert_eq!((&*holds, &*reason), ("False", "InvalidConfiguration"));
        assert!(message.contains("spec.auditLogging"), "{message}");
        assert_eq!(status.get().controllers[CONTROLLER].writes["Cluster"], 2);
        api.put_of("clusters", readable);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(said(&api)[1], before);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_that_is_left_to_another_client_is_exposed_for_as_long_as_its_services_are_there() {
        let api = seed();
        api.apply_all();
        start(&api);
        sleep(Duration::from_mins(1)).await;
        for _ in 0..4 {
            let mut namespace = api.all_of("namespaces").remove(0);
            namespace["metadata"]["labels"].as_object_mut().unwrap().remove(MANAGED_BY.0);
            api.put_of("namespaces", namespace);
            sleep(Duration::from_secs(10)).await;
        }
        let [holds, reason, message] = said(&api);
        assert_eq!((&*holds, &*reason), ("True", "ForeignWriter"), "{message}");
        api.delete("cluster-a/apiserver-external");
        sleep(Duration::from_mins(1)).await;
        let [holds, reason, message] = said(&api);
        assert_eq!((&*holds, &*reason), ("False", "ForeignWriter"), "{message}");
        assert!(message.contains("Service apiserver-external is not made meanwhile"), "{message}");
    }

    #[tokio::test(start_paused = true)]
    async fn beside_kkp_a_cluster_that_cannot_be_read_is_told_of() {
        let (api, kkp) = (seed(), portico_api::kkp::DEPLOYMENT);
        let selector = json!({"matchLabels": {"app.kubernetes.io/name": kkp}});
        api.put_of("deployments", json!({"metadata": named(kkp), "spec": {"selector": selector}}));
        api.put_of("clusters", misfit());
        let status = start(&api);
        sleep(Duration::from_mins(1)).await;
        let report = status.get().clusters.unwrap().reports.remove("a").unwrap();
        assert!(report.reason == "ClusterNotUsable" && report.message.contains("auditLogging"), "{report:?}");
    }

    #[test]
    fn of_services_in_the_namespace_of_a_cluster_those_are_held_that_are_written_there() {
        let service = |namespace: &str, name: &str| -> Cached<Service> {
            serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}})).unwrap()
        };
        for name in ["apiserver-external", "konnectivity-server", "front-loadbalancer"] {
            assert!(is_written(&service("cluster-a", name)), "{name}");
            assert!(!is_written(&service("other", name)), "{name}");
        }
        assert!(!is_written(&service("cluster-a", "of-a-tenant")));
    }
}
