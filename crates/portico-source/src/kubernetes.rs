//! Objects from a Kubernetes API, watched.
//!
//! Services and EndpointSlices always; `Cluster`, `Seed` and `KubermaticConfiguration` when the API server serves them, which
//! is asked again now and then, for installations where KKP comes later. Listing in pages, watching with bookmarks and backing off
//! are `kube`'s ([`mod@kube::runtime::watcher`]); what follows from what the watches hear is decided in `mirror`.
//!
//! What is promised: no step is complete before everything has been listed once; while the API server is away everything stays as it
//! was; what was deleted meanwhile is gone after the next listing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::mirror::{Heard, Mirror};
use crate::served::{KKP_GROUP_VERSION, Served, ServedKind};
use crate::step::{MAX_EVENTS_PER_STEP, ManifestProblem, Step};

mod client;

pub use client::{ClientError, client};

/// Objects asked for at once. Bounds what one answer costs in memory; the same as client-go.
const PAGE: u32 = 500;

/// Length of one watch request in seconds. A connection that died without a word is noticed this long after at the latest; asking again costs
/// the API server next to nothing.
const WATCH_SECONDS: u32 = 60;

/// A failing watch tries again at least this often, so a watch without an error for longer has recovered.
const RECOVERED_AFTER: Duration = Duration::from_secs(90);

/// Between two questions for the kinds of KKP once there is an answer.
const ASK_AGAIN: Duration = Duration::from_secs(30);

/// The same after a question without an answer; twice as long after each further one, up to [`ASK_AGAIN`].
const ASK_AGAIN_SOON: Duration = Duration::from_secs(2);

/// HTTP status of a path that is not served.
const NOT_FOUND: u16 = 404;

/// What it answers where a person has to act (RFC 9110).
const UNAUTHORIZED: u16 = 401;
const FORBIDDEN: u16 = 403;

/// Steps on their way to the reader. One is being applied, one waits; more would only hold memory.
const STEPS_AHEAD: usize = 2;

/// What to watch.
#[derive(Debug, Clone)]
pub struct KubernetesSettings {
    /// Only Services and EndpointSlices in this namespace, and no other kind, since rights for one namespace end there.
    pub namespace: Option<String>,
    /// Pass over Services without this annotation. A seed has some fifteen Services a cluster, of which two or three are exposed.
    pub annotation: Option<String>,
    /// Services and nothing else, for whoever may read nothing else.
    pub only_services: bool,
    /// How often to ask for kinds that are not served yet.
    pub ask_again: Duration,
}

impl Default for KubernetesSettings {
    fn default() -> Self {
        Self { namespace: None, annotation: None, only_services: false, ask_again: ASK_AGAIN }
    }
}

/// How the watches are.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KubernetesStatus {
    /// Whether everything has been listed once.
    pub complete: bool,
    /// By kind. A kind that is not served is not here.
    pub watches: BTreeMap<Kind, WatchStatus>,
    /// Why it is not known which kinds of KKP are served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discovery_error: Option<String>,
}

/// How the watch of one kind is.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchStatus {
    /// Whether it has been listed once.
    pub listed: bool,
    /// What went wrong last, if that was lately. Objects stay as they were last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip)]
    failed_at: Option<Instant>,
}

/// Everything of interest in one API server.
#[derive(Debug)]
pub struct KubernetesSource {
    steps: mpsc::Receiver<Step>,
    status: Arc<Mutex<KubernetesStatus>>,
    task: JoinHandle<()>,
}

impl KubernetesSource {
    /// Begins to list and watch. Must be called in a tokio runtime.
    pub fn start(client: Client, settings: KubernetesSettings) -> Self {
        let (sender, steps) = mpsc::channel(STEPS_AHEAD);
        let status = Arc::<Mutex<KubernetesStatus>>::default();
        let worker = Worker {
            client,
            mirror: Mirror::new(settings.annotation.clone().map(Into::into)),
            settings,
            discovered: false,
            heard: SelectAll::new(),
            watches: BTreeMap::new(),
            missing: BTreeSet::new(),
            status: status.clone(),
            problems: Arc::default(),
            unfinished: true,
            complete: false,
        };
        Self { steps, status, task: tokio::spawn(worker.run(sender)) }
    }

    /// The next step; the first complete one comes when everything has been listed. Nothing is lost if the future is dropped.
    ///
    /// `None` means that the task has ended, which only a defect can make it do; what was delivered stays valid.
    pub async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }

    /// How the watches are, now and whenever asked.
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

/// What one of the streams says.
enum Word {
    Heard(Kind, Heard),
    Failed(Kind, String),
    /// Which kinds of KKP the API server serves.
    Served(Result<Vec<Kind>, String>),
}

struct Worker {
    client: Client,
    settings: KubernetesSettings,
    mirror: Mirror,
    /// Whether it is known which kinds are served.
    discovered: bool,
    heard: SelectAll<BoxStream<'static, Word>>,
    watches: BTreeMap<Kind, AbortHandle>,
    /// Kinds that were missing from the last answer though they are watched.
    missing: BTreeSet<Kind>,
    status: Arc<Mutex<KubernetesStatus>>,
    problems: Arc<[ManifestProblem]>,
    /// Whether the last step was not complete, so that a complete one has to follow even if it is empty.
    unfinished: bool,
    /// Whether a complete step was sent.
    complete: bool,
}

impl Worker {
    async fn run(mut self, sender: mpsc::Sender<Step>) {
        self.watch::<Service>();
        if !self.settings.only_services {
            self.watch::<EndpointSlice>();
        }
        if self.settings.only_services || self.settings.namespace.is_some() {
            self.discovered = true;
        } else {
            self.heard.push(served_kinds(self.client.clone(), self.settings.ask_again).boxed());
        }
        while let Some(word) = self.heard.next().await {
            self.take(word);
            // Whatever else has arrived belongs to the same burst.
            let mut more = true;
            while more {
                more = self.take_what_is_ready();
                if let Some(step) = self.step(more)
                    && sender.send(step).await.is_err()
                {
                    return;
                }
            }
        }
    }

    /// Takes in words without waiting. Answers whether it stopped because there are enough for a step.
    fn take_what_is_ready(&mut self) -> bool {
        while self.mirror.waiting() < MAX_EVENTS_PER_STEP {
            match self.heard.next().now_or_never() {
                Some(Some(word)) => self.take(word),
                _ => return false,
            }
        }
        true
    }

    fn watch<K: ServedKind>(&mut self) {
        self.mirror.watch(K::KIND);
        let (words, abort) =
            stream::abortable(words::<K>(self.client.clone(), self.settings.namespace.as_deref()));
        self.watches.insert(K::KIND, abort);
        self.heard.push(words.boxed());
        self.with_status(|status| status.watches.insert(K::KIND, WatchStatus::default()));
    }

    fn take(&mut self, word: Word) {
        match word {
            Word::Heard(kind, heard) => {
                let listed = matches!(heard, Heard::Listed);
                self.mirror.hear(kind, heard);
                self.with_status(|status| {
                    if let Some(watch) = status.watches.get_mut(&kind) {
                        watch.listed |= listed;
                        (watch.error, watch.failed_at) = (None, None);
                    }
                });
            }
            Word::Failed(kind, error) => {
                warn!(%kind, error, "watch failed; what is known stays, and it is tried again");
                self.with_status(|status| {
                    if let Some(watch) = status.watches.get_mut(&kind) {
                        (watch.error, watch.failed_at) = (Some(error), Some(Instant::now()));
                    }
                });
            }
            Word::Served(Err(error)) => {
                warn!(error, "cannot ask which kinds of KKP are served; asking again");
                self.with_status(|status| status.discovery_error = Some(error));
            }
            Word::Served(Ok(kinds)) => {
                self.discovered = true;
                self.with_status(|status| status.discovery_error = None);
                self.serve(&kinds);
            }
        }
    }

    /// Watches the kinds that are served now. One that is missing from two answers in a row is watched no longer: what a Cluster allows must not
    /// be forgotten over one answer of an API server that is just starting.
    fn serve(&mut self, kinds: &[Kind]) {
        for &kind in kinds {
            if self.watches.contains_key(&kind) {
                continue;
            }
            info!(%kind, "served; watching it");
            match kind {
                Kind::Cluster => self.watch::<Cluster>(),
                Kind::Seed => self.watch::<Seed>(),
                Kind::KubermaticConfiguration => self.watch::<KubermaticConfiguration>(),
                Kind::Service | Kind::EndpointSlice => {}
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
            self.mirror.unwatch(kind);
            if let Some(abort) = self.watches.remove(&kind) {
                abort.abort();
            }
            self.with_status(|status| status.watches.remove(&kind));
        }
        self.missing = missing;
    }

    /// The step that follows from what was taken, if it says anything; `more` of the same burst is to come.
    fn step(&mut self, more: bool) -> Option<Step> {
        // Until it is known what is served, it cannot be known that all of it was listed.
        let (events, listed) =
            if self.discovered { self.mirror.take() } else { (self.mirror.take_part(), false) };
        let complete = listed && !more;
        let problems_changed = self.mirror.problems_changed();
        if problems_changed {
            self.problems = self.mirror.problems().cloned().collect();
            for problem in self.problems.iter() {
                warn!(reason = problem.reason, "{problem}");
            }
        }
        if events.is_empty() && !problems_changed && !(complete && self.unfinished) {
            return None;
        }
        self.unfinished = !complete;
        if complete && !self.complete {
            self.complete = true;
            info!("everything is listed");
            self.with_status(|status| status.complete = true);
        }
        Some(Step { events, complete, problems: self.problems.clone() })
    }

    fn with_status<T>(&self, change: impl FnOnce(&mut KubernetesStatus) -> T) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Lists and watches one kind for ever.
fn words<K: ServedKind>(
    client: Client,
    namespace: Option<&str>,
) -> impl Stream<Item = Word> + Send + 'static {
    let api: Api<Served<K>> = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &()),
        None => Api::all_with(client, &()),
    };
    let config = watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS);
    watcher(api, config).default_backoff().map(|event| {
        let heard = match event {
            Ok(watcher::Event::Init) => Heard::Listing,
            Ok(watcher::Event::InitApply(served) | watcher::Event::Apply(served)) => {
                Heard::Present(served.reference, served.object)
            }
            Ok(watcher::Event::Delete(served)) => Heard::Gone(served.reference),
            Ok(watcher::Event::InitDone) => Heard::Listed,
            Err(error) => return Word::Failed(K::KIND, with_causes(&error)),
        };
        Word::Heard(K::KIND, heard)
    })
}

/// Asks now and then which kinds of KKP are served. Every authenticated user may ask that.
fn served_kinds(client: Client, ask_again: Duration) -> impl Stream<Item = Word> + Send + 'static {
    stream::unfold((Duration::ZERO, ASK_AGAIN_SOON), move |(pause, soon)| {
        let client = client.clone();
        async move {
            tokio::time::sleep(pause).await;
            let served = match client.list_api_group_resources(KKP_GROUP_VERSION).await {
                Ok(list) => {
                    Ok(list.resources.iter().filter_map(|resource| kkp_kind(&resource.name)).collect())
                }
                // A group that is not served is answered by the HTTP server, in plain text and without a reason.
                Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(Vec::new()),
                Err(error) => Err(with_causes(&error)),
            };
            let next = match served {
                Ok(_) => (ask_again, ASK_AGAIN_SOON),
                Err(_) => (soon, ASK_AGAIN.min(soon * 2)),
            };
            Some((Word::Served(served), next))
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

/// The error and what caused it, which `kube` leaves to its reader. What the API server itself answered is given in its words.
fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    if let Some(kube::Error::Api(status)) = causes.find_map(|cause| cause.downcast_ref()) {
        let answer = format!("the API server answered {}: {}", status.code, status.message);
        return match status.code {
            FORBIDDEN => format!("{answer}; grant it, the rules are in deploy/"),
            UNAUTHORIZED => format!("{answer}; the token or certificate is not valid here, or has expired"),
            _ => answer,
        };
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_that_is_missing_is_told_in_the_words_of_the_api_server() {
        let status = serde_json::from_str(
            r#"{"status": "Failure", "code": 403, "reason": "Forbidden",
                "message": "services is forbidden: User \"portico\" cannot list resource \"services\""}"#,
        );
        let error = watcher::Error::InitialListFailed(kube::Error::Api(status.unwrap()));
        assert_eq!(
            with_causes(&error),
            "the API server answered 403: services is forbidden: User \"portico\" cannot list resource \"services\"; \
             grant it, the rules are in deploy/"
        );
    }
}
