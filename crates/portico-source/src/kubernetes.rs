//! Objects from a Kubernetes API, watched.
//!
//! Services and EndpointSlices always. The policies of clusters come from ExposedClusters where the API
//! server serves them, else from KKP's own kinds, else from the Services alone ([`ClustersFrom`]).
//! [`progress`] lists and watches with deadlines and back-off; `reflector` turns watch events into changes.
//!
//! No step is complete before everything has been listed once. An answer that a kind is not served opens
//! nothing. A Service in the namespace of a cluster admits nobody, unless the operator says that there are no
//! clusters. While the API server is away, or refuses, everything stays as it was. An object that was deleted
//! meanwhile is gone after the next listing.

mod status;

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, BoxStream, SelectAll};
use futures_util::{FutureExt, Stream, StreamExt};
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use portico_api::annotations::ExposeKeys;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_api::names::ClusterName;
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_kube::error::describe;
use portico_kube::watch::{Progress, progress};
use serde::Serialize;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::{debug, info, warn};

pub use self::status::{KubernetesStatus, Lacking, WatchState, WatchStatus};
use crate::problem_log::ProblemLog;
use crate::problems::log_new;
use crate::reflector::{Received, Reflector};
use crate::served::{Served, ServedKind};
use crate::step::{MAX_CHANGES_PER_STEP, ManifestProblem, Step};

/// Pause between two discoveries of the kinds of KKP.
const DISCOVERY_PERIOD: Duration = Duration::from_secs(30);

/// Pause between two discoveries until it is known what clusters allow.
const DISCOVERY_RETRY: Duration = Duration::from_secs(2);

/// Time limit of a discovery.
const DISCOVERY_DEADLINE: Duration = Duration::from_secs(10);

/// Discoveries in a row that must find no ExposedClusters, and agree on whether there are Clusters, before
/// that is believed. For a moment after its start, an API server does not know some of the kinds that others
/// define.
const ABSENCES: u32 = 3;

/// HTTP status of a path that is not served.
const NOT_FOUND: u16 = 404;

/// Length of the queue of steps. One is applied, one waits; more would only hold memory.
const STEPS_AHEAD: usize = 2;

/// Where it comes from what a cluster allows and may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClustersFrom {
    /// From ExposedClusters as soon as the API server serves them; from Clusters where it goes on serving
    /// these and not those. Until then only Services outside the namespaces of clusters are served, and only
    /// where there are no others.
    #[default]
    Auto,
    /// From ExposedClusters, which hold no secrets.
    ExposedClusters,
    /// From KKP's Clusters, Seeds and KubermaticConfiguration.
    Clusters,
    /// From annotations of the Services: there are no clusters.
    Services,
}

/// The text names no [`ClustersFrom`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("give auto, exposed-clusters, clusters or services")]
pub struct UnknownClustersFrom;

impl ClustersFrom {
    /// Its name, as in the flag and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::ExposedClusters => "exposed-clusters",
            Self::Clusters => "clusters",
            Self::Services => "services",
        }
    }
}

impl FromStr for ClustersFrom {
    type Err = UnknownClustersFrom;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Auto, Self::ExposedClusters, Self::Clusters, Self::Services];
        all.into_iter().find(|from| from.as_str() == text).ok_or(UnknownClustersFrom)
    }
}

/// What to watch.
#[derive(Debug, Clone)]
pub struct KubernetesSettings {
    /// Watch only Services and EndpointSlices of this namespace and, if it is a cluster's, that cluster.
    pub namespace: Option<String>,
    /// Ignore Services without one of these annotations, but for their ClusterIPs, unless every node leads to
    /// them (NodePort, LoadBalancer). A seed has some fifteen Services per cluster, of which two or three are
    /// exposed.
    pub annotations: Option<ExposeKeys>,
    /// Where it comes from what a cluster allows.
    pub clusters: ClustersFrom,
    /// Longest pause between two discoveries of kinds that are not served yet.
    pub discovery_period: Duration,
}

impl Default for KubernetesSettings {
    fn default() -> Self {
        Self {
            namespace: None,
            annotations: None,
            clusters: ClustersFrom::Auto,
            discovery_period: DISCOVERY_PERIOD,
        }
    }
}

/// A watched Kubernetes API.
#[derive(Debug)]
pub struct KubernetesSource {
    steps: mpsc::Receiver<Step>,
    status: Arc<Mutex<KubernetesStatus>>,
    task: JoinHandle<()>,
}

impl KubernetesSource {
    /// Starts to list and watch. Must be called in a tokio runtime.
    pub fn start(client: Client, settings: KubernetesSettings) -> Self {
        let (sender, steps) = mpsc::channel(STEPS_AHEAD);
        let worker = Worker::new(client, settings);
        let status = worker.status.clone();
        Self { steps, status, task: tokio::spawn(worker.run(sender)) }
    }

    /// Returns the next step; waits for it. The first complete one ends the initial sync. Cancel-safe.
    ///
    /// `None` means that the task has ended, which only a defect can cause. The objects delivered before stay
    /// valid.
    pub async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }

    /// Returns a function that tells the state of the watches at the time of its call.
    pub fn status(&self) -> impl Fn() -> KubernetesStatus + Send + Sync + use<> {
        let status = self.status.clone();
        move || status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for KubernetesSource {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What arrives from the watches and from discovery.
enum Message {
    /// The watch of a kind has an event.
    Watch(Kind, Event<Received>),
    /// The watch of a kind is alive, and nothing changed.
    Alive(Kind),
    /// The watch of a kind failed, and is retried.
    WatchFailed(Kind, String),
    /// The kinds that tell of clusters and are served, or why they are not known.
    Discovered(Result<Vec<Kind>, String>),
}

struct Worker {
    client: Client,
    settings: KubernetesSettings,
    reflector: Reflector,
    /// Where the policies of clusters come from; `Auto` until that is known. It never changes back: a
    /// restricted cluster is not opened because a kind seems to be gone.
    clusters: ClustersFrom,
    /// Discoveries in a row that found no ExposedClusters, and agree on whether there are Clusters.
    absences: u32,
    /// Whether these found Clusters.
    has_clusters: bool,
    messages: SelectAll<BoxStream<'static, Message>>,
    status: Arc<Mutex<KubernetesStatus>>,
    problems: Arc<[ManifestProblem]>,
    problem_log: ProblemLog,
    /// Whether the last step was not complete. Then a complete one must follow even if it is empty.
    unfinished: bool,
    /// Whether a complete step was sent.
    complete: bool,
}

impl Worker {
    fn new(client: Client, settings: KubernetesSettings) -> Self {
        Self {
            client,
            reflector: Reflector::new(settings.annotations.clone()),
            clusters: ClustersFrom::Auto,
            absences: 0,
            has_clusters: false,
            settings,
            messages: SelectAll::new(),
            status: Arc::new(Mutex::new(KubernetesStatus {
                complete: false,
                clusters_from: ClustersFrom::Auto,
                watches: BTreeMap::new(),
                discovery_error: None,
                lacks: None,
            })),
            problems: Arc::default(),
            problem_log: ProblemLog::default(),
            unfinished: true,
            complete: false,
        }
    }

    async fn run(mut self, sender: mpsc::Sender<Step>) {
        let namespace = self.settings.namespace.clone();
        self.watch::<Service>(namespace.as_deref(), None);
        self.watch::<EndpointSlice>(namespace.as_deref(), None);
        let of_no_cluster = |namespace: &String| ClusterName::of_namespace(namespace).is_none();
        match self.settings.clusters {
            _ if namespace.as_ref().is_some_and(of_no_cluster) => self.take_from(ClustersFrom::Services),
            ClustersFrom::Auto => self.discover(Duration::ZERO),
            ClustersFrom::Clusters => {
                self.take_from(ClustersFrom::Clusters);
                KKP_KINDS.into_iter().for_each(|kind| self.watch_kkp(kind));
            }
            named => self.take_from(named),
        }
        while let Some(message) = self.messages.next().await {
            self.receive(message);
            // All other messages that have arrived belong to the same burst.
            let mut more = true;
            while more {
                more = self.receive_ready();
                if let Some(step) = self.step(more)
                    && sender.send(step).await.is_err()
                {
                    return;
                }
            }
        }
    }

    /// Receives messages without waiting. Returns true if it stopped because there are enough changes for a
    /// step.
    fn receive_ready(&mut self) -> bool {
        while self.reflector.waiting() < MAX_CHANGES_PER_STEP {
            match self.messages.next().now_or_never() {
                Some(Some(message)) => self.receive(message),
                _ => return false,
            }
        }
        true
    }

    /// Watches a kind in one namespace or in all, and of it one object or all.
    fn watch<K: ServedKind>(&mut self, namespace: Option<&str>, only: Option<&str>) {
        if self.reflector.watches(K::KIND) {
            return;
        }
        self.reflector.watch(K::KIND);
        self.messages.push(watch_kind::<K>(self.client.clone(), namespace, only).boxed());
        self.with_status(|status| status.watches.insert(K::KIND, WatchStatus::new()));
    }

    /// Asks after a pause which of the kinds that tell of clusters are served.
    fn discover(&mut self, pause: Duration) {
        self.messages.push(stream::once(discovery(self.client.clone(), pause)).boxed());
    }

    /// From now on clusters are known by `source`.
    fn take_from(&mut self, source: ClustersFrom) {
        self.clusters = source;
        self.with_status(|status| status.clusters_from = source);
        match source {
            ClustersFrom::ExposedClusters => {
                let name = self.cluster();
                self.watch::<ExposedCluster>(None, name.as_ref().map(ClusterName::as_str));
                info!("what clusters allow is read from ExposedClusters");
            }
            ClustersFrom::Clusters => warn!(
                "what clusters allow is read from Clusters, which hold admin tokens: apply deploy/crds.yaml, \
                 run portico front, and take this right from the gateway"
            ),
            ClustersFrom::Services if self.settings.clusters == ClustersFrom::Services => {
                info!("there are no clusters: the Services say what they allow");
            }
            ClustersFrom::Services => warn!(
                "the API server serves neither ExposedClusters nor Clusters, so the Services say what they \
                 allow; one in a namespace cluster-NAME admits nobody until it does, and that is looked for; \
                 name the source with --clusters-from"
            ),
            ClustersFrom::Auto => {}
        }
    }

    /// The one cluster in use, if there is one.
    fn cluster(&self) -> Option<ClusterName> {
        ClusterName::of_namespace(self.settings.namespace.as_deref()?)
    }

    fn watch_kkp(&mut self, kind: Kind) {
        let name = self.cluster();
        match kind {
            Kind::Cluster => self.watch::<Cluster>(None, name.as_ref().map(ClusterName::as_str)),
            Kind::Seed => self.watch::<Seed>(None, None),
            Kind::KubermaticConfiguration => self.watch::<KubermaticConfiguration>(None, None),
            Kind::Service | Kind::EndpointSlice | Kind::ExposedCluster => {}
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Watch(kind, event) => {
                // The beginning of a listing is no progress of the API server.
                let is_activity = !matches!(event, Event::Init);
                self.reflector.apply(kind, event);
                if is_activity {
                    self.alive(kind);
                }
            }
            Message::Alive(kind) => self.alive(kind),
            Message::WatchFailed(kind, error) => {
                let new = self.with_watch(kind, |watch| watch.failed(&error));
                if new == Some(true) {
                    warn!(%kind, error, "watch failed; what is known stays, and it is tried again");
                } else {
                    debug!(%kind, error, "watch failed again");
                }
            }
            Message::Discovered(found) => {
                self.discovered(found);
                let period = self.settings.discovery_period;
                self.discover(if self.is_decided() { period } else { period.min(DISCOVERY_RETRY) });
            }
        }
    }

    /// Whether it is known for good where it comes from what a cluster allows.
    fn is_decided(&self) -> bool {
        matches!(self.clusters, ClustersFrom::ExposedClusters | ClustersFrom::Clusters)
    }

    /// Decides, if that is still to be done. Watches the kinds of KKP that have come since.
    fn discovered(&mut self, found: Result<Vec<Kind>, String>) {
        let kinds = match found {
            Ok(kinds) => kinds,
            Err(error) => {
                self.absences = 0;
                warn!(error, "cannot ask which kinds are served; asking again");
                return self.with_status(|status| status.discovery_error = Some(error));
            }
        };
        self.with_status(|status| status.discovery_error = None);
        if !self.is_decided() {
            self.decide(&kinds);
        }
        if self.clusters == ClustersFrom::Clusters {
            kinds.into_iter().for_each(|kind| self.watch_kkp(kind));
        }
    }

    /// Decides by which kinds clusters are known, if that is certain.
    fn decide(&mut self, kinds: &[Kind]) {
        if kinds.contains(&Kind::ExposedCluster) {
            return self.take_from(ClustersFrom::ExposedClusters);
        }
        let has_clusters = kinds.contains(&Kind::Cluster);
        self.absences = if has_clusters == self.has_clusters { self.absences + 1 } else { 1 };
        self.has_clusters = has_clusters;
        if self.absences < ABSENCES {
            return;
        }
        // A missing kind cannot be served as if it were there: Services of clusters wait for their kind.
        let may_serve =
            self.reflector.has_listed(Kind::Service) && !self.reflector.has_services_of_clusters();
        if has_clusters {
            self.take_from(ClustersFrom::Clusters);
        } else if self.clusters == ClustersFrom::Auto && may_serve {
            self.take_from(ClustersFrom::Services);
        }
    }

    fn alive(&mut self, kind: Kind) {
        let listed = self.reflector.has_listed(kind);
        let recovered = self.with_watch(kind, |watch| {
            let recovered = watch.error.is_some();
            watch.alive(listed);
            recovered
        });
        if recovered == Some(true) {
            debug!(%kind, "the watch goes on");
        }
    }

    /// The next step, if there is something to say. `more` changes of the same burst are to come.
    fn step(&mut self, more: bool) -> Option<Step> {
        // Until it is known which kinds are served, it cannot be known that all of them were listed.
        let lacking = self.lacking();
        let ready = self.complete || (self.clusters != ClustersFrom::Auto && lacking.is_none());
        let (changes, listed) =
            if ready { self.reflector.take() } else { (self.reflector.take_part(), false) };
        let complete = listed && !more;
        let problems_changed = self.reflector.problems_changed();
        if problems_changed {
            let mut problems: Vec<_> = self.reflector.problems().cloned().collect();
            problems.sort();
            log_new(&self.problem_log, &self.problems, &problems);
            self.problems = problems.into();
        }
        let cluster_ips = self.reflector.take_cluster_ips();
        let nothing_new = changes.is_empty() && cluster_ips.is_empty() && !problems_changed;
        if nothing_new && !(complete && self.unfinished) {
            return None;
        }
        self.unfinished = !complete;
        if complete && !self.complete {
            self.complete = true;
            info!("everything is listed");
            self.with_status(|status| status.complete = true);
        }
        // The operator's word is believed. An API server's word about a missing kind is not.
        let policies_required = self.settings.clusters != ClustersFrom::Services;
        Some(Step { changes, complete, policies_required, problems: self.problems.clone(), cluster_ips })
    }

    /// The kind or the objects that are missing although there are Services of clusters. A gateway that has
    /// just started must not replace one that serves them.
    fn lacking(&mut self) -> Option<Lacking> {
        let lacks_objects = || {
            self.reflector.has_listed(Kind::ExposedCluster) && !self.reflector.has_any(Kind::ExposedCluster)
        };
        let lacking = match self.clusters {
            ClustersFrom::Auto if self.absences >= ABSENCES => Some(Lacking::Kind),
            ClustersFrom::ExposedClusters if lacks_objects() => Some(Lacking::ExposedClusters),
            _ => None,
        };
        let lacking = lacking.filter(|_| self.reflector.has_services_of_clusters());
        let before = self.with_status(|status| std::mem::replace(&mut status.lacks, lacking));
        if let Some(lacking) = lacking.filter(|_| before != lacking) {
            warn!("not ready: {}", lacking.remedy());
        }
        lacking
    }

    fn with_watch<T>(&self, kind: Kind, change: impl FnOnce(&mut WatchStatus) -> T) -> Option<T> {
        self.with_status(|status| status.watches.get_mut(&kind).map(change))
    }

    fn with_status<T>(&self, change: impl FnOnce(&mut KubernetesStatus) -> T) -> T {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Lists and watches one kind for ever.
fn watch_kind<K: ServedKind>(
    client: Client,
    namespace: Option<&str>,
    only: Option<&str>,
) -> impl Stream<Item = Message> + Send + use<K> {
    let api: Api<Served<K>> = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &()),
        None => Api::all_with(client, &()),
    };
    progress(api, only).map(|progress| {
        let event = match progress {
            Ok(Progress::Alive) => return Message::Alive(K::KIND),
            Ok(Progress::Event(event)) => event,
            Err(error) => return Message::WatchFailed(K::KIND, describe(&error)),
        };
        let event = match event {
            Event::Init => Event::Init,
            Event::InitApply(served) => Event::InitApply(served.into()),
            Event::InitDone => Event::InitDone,
            Event::Apply(served) => Event::Apply(served.into()),
            Event::Delete(served) => Event::Delete(served.into()),
        };
        Message::Watch(K::KIND, event)
    })
}

/// Asks after a pause which of the kinds that tell of clusters are served. Every authenticated user may ask
/// that.
async fn discovery(client: Client, pause: Duration) -> Message {
    tokio::time::sleep(pause).await;
    Message::Discovered(match timeout(DISCOVERY_DEADLINE, served_kinds(&client)).await {
        Ok(served) => served.map_err(|error| describe(&error)),
        Err(_) => Err(format!("no answer within {DISCOVERY_DEADLINE:?}")),
    })
}

async fn served_kinds(client: &Client) -> kube::Result<Vec<Kind>> {
    let mut kinds = Vec::new();
    for group_version in [EXPOSED_GROUP_VERSION, KKP_GROUP_VERSION] {
        match client.list_api_group_resources(group_version).await {
            Ok(list) => kinds.extend(list.resources.iter().filter_map(|found| of_clusters(&found.name))),
            // For a group that is not served, the HTTP server returns plain text and no reason.
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => {}
            Err(error) => return Err(error),
        }
    }
    Ok(kinds)
}

/// Group and version of ExposedClusters, in the spelling of discovery.
const EXPOSED_GROUP_VERSION: &str = portico_api::exposed_cluster::API_VERSION;

/// Group and version of the KKP kinds.
const KKP_GROUP_VERSION: &str = "kubermatic.k8c.io/v1";

/// The kinds of KKP that tell of clusters.
const KKP_KINDS: [Kind; 3] = [Kind::Cluster, Kind::Seed, Kind::KubermaticConfiguration];

fn of_clusters(plural: &str) -> Option<Kind> {
    [
        (ExposedCluster::PLURAL, Kind::ExposedCluster),
        (Cluster::PLURAL, Kind::Cluster),
        (Seed::PLURAL, Kind::Seed),
        (KubermaticConfiguration::PLURAL, Kind::KubermaticConfiguration),
    ]
    .into_iter()
    .find_map(|(name, kind)| (name == plural).then_some(kind))
}

#[cfg(test)]
#[path = "kubernetes/tests.rs"]
mod tests;
