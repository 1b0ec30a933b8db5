//! Objects from a Kubernetes API, watched.
//!
//! Services and EndpointSlices always; `Cluster`, `Seed` and `KubermaticConfiguration` while the API server
//! serves them, which is checked again and again, for installations where KKP comes later. Listing in pages,
//! watching with bookmarks and backing off are `kube`'s ([`mod@kube::runtime::watcher`]); `reflector` turns
//! watch events into changes.
//!
//! What is promised: no step is complete before everything has been listed once; while the API server is away
//! everything stays as it was; an object that was deleted meanwhile is gone after the next listing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, AbortHandle, BoxStream, SelectAll};
use futures_util::{FutureExt, Stream, StreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::meta::Kind;
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_kube::error::describe;
use portico_kube::watch;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::reflector::{Received, Reflector};
use crate::served::{KKP_GROUP_VERSION, Served, ServedKind};
use crate::step::{MAX_CHANGES_PER_STEP, ManifestProblem, Step};

/// A failing watch tries again at least this often, so a watch without an error for longer has recovered.
const RECOVERED_AFTER: Duration = Duration::from_secs(90);

/// Pause between two discoveries of the kinds of KKP.
const DISCOVERY_PERIOD: Duration = Duration::from_secs(30);

/// The same after a discovery that failed; doubled with each further failure, up to [`DISCOVERY_PERIOD`].
const DISCOVERY_RETRY: Duration = Duration::from_secs(2);

/// HTTP status of a path that is not served.
const NOT_FOUND: u16 = 404;

/// Length of the queue of steps. One is applied, one waits; more would only hold memory.
const STEPS_AHEAD: usize = 2;

/// What to watch.
#[derive(Debug, Clone)]
pub struct KubernetesSettings {
    /// Watch only Services and EndpointSlices of this namespace: rights for one namespace include no
    /// cluster-wide kind.
    pub namespace: Option<String>,
    /// Ignore Services without this annotation. A seed has some fifteen Services per cluster, of which two or
    /// three are exposed.
    pub annotation: Option<String>,
    /// Pause between two discoveries of kinds that are not served yet.
    pub discovery_period: Duration,
}

impl Default for KubernetesSettings {
    fn default() -> Self {
        Self { namespace: None, annotation: None, discovery_period: DISCOVERY_PERIOD }
    }
}

/// The state of all watches.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubernetesStatus {
    /// Whether everything has been listed once.
    pub complete: bool,
    /// By kind. A kind that is not served is not here.
    pub watches: BTreeMap<Kind, WatchStatus>,
    /// Why the last discovery of the kinds of KKP failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discovery_error: Option<String>,
}

/// The state of the watch of one kind.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchStatus {
    /// Whether the kind has been listed once.
    pub listed: bool,
    /// The last error, if it is recent. Objects stay as they were last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip)]
    failed_at: Option<Instant>,
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
        let status = Arc::<Mutex<KubernetesStatus>>::default();
        let worker = Worker {
            client,
            reflector: Reflector::new(settings.annotation.clone().map(Into::into)),
            settings,
            discovered: false,
            messages: SelectAll::new(),
            watches: BTreeMap::new(),
            missing: BTreeSet::new(),
            status: status.clone(),
            problems: Arc::default(),
            unfinished: true,
            complete: false,
        };
        Self { steps, status, task: tokio::spawn(worker.run(sender)) }
    }

    /// Returns the next step; waits for it. The first complete one ends the initial sync. Cancel-safe.
    ///
    /// `None` means that the task has ended, which only a defect can cause; what was delivered stays valid.
    pub async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }

    /// Returns a function that tells the state of the watches at the time of its call.
    pub fn status(&self) -> impl Fn() -> KubernetesStatus + Send + Sync + use<> {
        let status = self.status.clone();
        move || {
            let mut status = status.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for watch in status.watches.values_mut() {
                if watch.failed_at.is_some_and(|at| at.elapsed() > RECOVERED_AFTER) {
                    watch.error = None;
                }
            }
            status
        }
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
    Watch(Kind, watcher::Event<Received>),
    /// The watch of a kind failed, and is retried by `kube`.
    WatchFailed(Kind, String),
    /// The kinds of KKP that the API server serves, or why they are not known.
    Discovered(Result<Vec<Kind>, String>),
}

struct Worker {
    client: Client,
    settings: KubernetesSettings,
    reflector: Reflector,
    /// Whether it is known which kinds are served.
    discovered: bool,
    messages: SelectAll<BoxStream<'static, Message>>,
    watches: BTreeMap<Kind, AbortHandle>,
    /// Watched kinds that the last discovery did not have.
    missing: BTreeSet<Kind>,
    status: Arc<Mutex<KubernetesStatus>>,
    problems: Arc<[ManifestProblem]>,
    /// Whether the last step was not complete, so that a complete one must follow even if it is empty.
    unfinished: bool,
    /// Whether a complete step was sent.
    complete: bool,
}

impl Worker {
    async fn run(mut self, sender: mpsc::Sender<Step>) {
        self.watch::<Service>();
        self.watch::<EndpointSlice>();
        if self.settings.namespace.is_some() {
            self.discovered = true;
        } else {
            self.messages.push(discover(self.client.clone(), self.settings.discovery_period).boxed());
        }
        while let Some(message) = self.messages.next().await {
            self.receive(message);
            // Whatever else has arrived belongs to the same burst.
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

    fn watch<K: ServedKind>(&mut self) {
        self.reflector.watch(K::KIND);
        let (messages, abort) =
            stream::abortable(watch_kind::<K>(self.client.clone(), self.settings.namespace.as_deref()));
        self.watches.insert(K::KIND, abort);
        self.messages.push(messages.boxed());
        self.with_status(|status| status.watches.insert(K::KIND, WatchStatus::default()));
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Watch(kind, event) => {
                let listed = matches!(event, watcher::Event::InitDone);
                self.reflector.apply(kind, event);
                self.with_status(|status| {
                    if let Some(watch) = status.watches.get_mut(&kind) {
                        watch.listed |= listed;
                        (watch.error, watch.failed_at) = (None, None);
                    }
                });
            }
            Message::WatchFailed(kind, error) => {
                warn!(%kind, error, "watch failed; what is known stays, and it is tried again");
                self.with_status(|status| {
                    if let Some(watch) = status.watches.get_mut(&kind) {
                        (watch.error, watch.failed_at) = (Some(error), Some(Instant::now()));
                    }
                });
            }
            Message::Discovered(Err(error)) => {
                warn!(error, "cannot ask which kinds of KKP are served; asking again");
                self.with_status(|status| status.discovery_error = Some(error));
            }
            Message::Discovered(Ok(kinds)) => {
                self.discovered = true;
                self.with_status(|status| status.discovery_error = None);
                self.watch_served(&kinds);
            }
        }
    }

    /// Watches the kinds that are served now. A kind that is missing from two discoveries in a row is
    /// unwatched. One is not enough: an API server that is just starting must not make Portico forget what a
    /// Cluster allows.
    fn watch_served(&mut self, kinds: &[Kind]) {
        for &kind in kinds {
            if self.watches.contains_key(&kind) {
                continue;
            }
            info!(%kind, "served; watching it");
            match kind {
                Kind::Cluster => self.watch::<Cluster>(),
                Kind::Seed => self.watch::<Seed>(),
                Kind::KubermaticConfiguration => self.watch::<KubermaticConfiguration>(),
                Kind::Service | Kind::EndpointSlice | Kind::ExposedCluster => {}
            }
        }
        let missing: BTreeSet<Kind> = self
            .watches
            .keys()
            .copied()
            .filter(|kind| !matches!(kind, Kind::Service | Kind::EndpointSlice) && !kinds.contains(kind))
            .collect();
        for &kind in missing.intersection(&self.missing) {
            info!(%kind, "no longer served");
            self.reflector.unwatch(kind);
            if let Some(abort) = self.watches.remove(&kind) {
                abort.abort();
            }
            self.with_status(|status| status.watches.remove(&kind));
        }
        self.missing = missing;
    }

    /// The next step, if there is something to say. `more` changes of the same burst are to come.
    fn step(&mut self, more: bool) -> Option<Step> {
        // Until it is known which kinds are served, it cannot be known that all of them were listed.
        let (changes, listed) =
            if self.discovered { self.reflector.take() } else { (self.reflector.take_part(), false) };
        let complete = listed && !more;
        let problems_changed = self.reflector.problems_changed();
        if problems_changed {
            self.problems = self.reflector.problems().cloned().collect();
            for problem in self.problems.iter() {
                warn!(reason = problem.reason, "{problem}");
            }
        }
        if changes.is_empty() && !problems_changed && !(complete && self.unfinished) {
            return None;
        }
        self.unfinished = !complete;
        if complete && !self.complete {
            self.complete = true;
            info!("everything is listed");
            self.with_status(|status| status.complete = true);
        }
        Some(Step { changes, complete, problems: self.problems.clone() })
    }

    fn with_status<T>(&self, change: impl FnOnce(&mut KubernetesStatus) -> T) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Lists and watches one kind for ever.
fn watch_kind<K: ServedKind>(
    client: Client,
    namespace: Option<&str>,
) -> impl Stream<Item = Message> + Send + 'static {
    let api: Api<Served<K>> = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &()),
        None => Api::all_with(client, &()),
    };
    watcher(api, watch::config()).default_backoff().map(|event| {
        let event = match event {
            Ok(watcher::Event::Init) => watcher::Event::Init,
            Ok(watcher::Event::InitApply(served)) => watcher::Event::InitApply(served.into()),
            Ok(watcher::Event::InitDone) => watcher::Event::InitDone,
            Ok(watcher::Event::Apply(served)) => watcher::Event::Apply(served.into()),
            Ok(watcher::Event::Delete(served)) => watcher::Event::Delete(served.into()),
            Err(error) => return Message::WatchFailed(K::KIND, describe(&error)),
        };
        Message::Watch(K::KIND, event)
    })
}

/// Asks again and again which kinds of KKP are served. Every authenticated user may ask that.
fn discover(client: Client, period: Duration) -> impl Stream<Item = Message> + Send + 'static {
    stream::unfold((Duration::ZERO, DISCOVERY_RETRY), move |(pause, retry)| {
        let client = client.clone();
        async move {
            tokio::time::sleep(pause).await;
            let served = match client.list_api_group_resources(KKP_GROUP_VERSION).await {
                Ok(list) => {
                    Ok(list.resources.iter().filter_map(|resource| kkp_kind(&resource.name)).collect())
                }
                // For a group that is not served, the HTTP server returns plain text and no reason.
                Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(Vec::new()),
                Err(error) => Err(describe(&error)),
            };
            let next = match served {
                Ok(_) => (period, DISCOVERY_RETRY),
                Err(_) => (retry, DISCOVERY_PERIOD.min(retry * 2)),
            };
            Some((Message::Discovered(served), next))
        }
    })
}

fn kkp_kind(plural: &str) -> Option<Kind> {
    [
        (Cluster::PLURAL, Kind::Cluster),
        (Seed::PLURAL, Kind::Seed),
        (KubermaticConfiguration::PLURAL, Kind::KubermaticConfiguration),
    ]
    .into_iter()
    .find_map(|(name, kind)| (name == plural).then_some(kind))
}
