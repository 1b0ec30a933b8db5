//! Lists and watches one kind of objects for ever, whatever the API server does.
//!
//! Every request has a deadline, a silent watch counts as lost, and what fails is tried again with back-off.
//! `kube`'s own watcher has three flaws. It waits without limit for an accepted request that is never
//! answered. It watches again at once where a watch ends at once. It never gives up a resourceVersion that
//! the API server refuses, by 410 Gone as a status or after etcd was restored.
//!
//! The events are those of [`mod@kube::runtime::watcher`], so that its stores and controllers can use them.
//! Nothing is forgotten while requests fail. An object is gone once a watch, or a complete listing, says so.

use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::runtime::watcher::{Error, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use thiserror::Error as ThisError;
use tokio::time::{Instant, sleep, timeout};

use crate::page::{OBJECTS, TooLarge, page};

/// Length of one watch request in seconds; another one costs the API server next to nothing.
const WATCH_SECONDS: u32 = 60;

/// Time limit for one page of a list.
const LIST_DEADLINE: Duration = Duration::from_secs(60);

/// Time limit for the head of the response to a watch. An API server sends it at once.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// A watch that is silent for longer is lost: it should have ended, or sent a bookmark.
const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);

/// A watch that ends sooner has failed, whatever it sent. Another at once would be a busy loop.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// Failures in a row after which everything is listed anew. The resourceVersion itself may be refused, as by
/// an API server whose etcd was restored to an earlier state.
const FAILURES_BEFORE_LIST: u32 = 3;

/// Pause after the first failure; doubled with each further one, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A listing that lost more objects than this, and half of all, is made a second time before it is believed.
const DOUBTFUL_LOSS: usize = 8;

/// HTTP status of a resourceVersion, or of a page, that the API server no longer has.
const GONE: u16 = 410;

/// What a watch has to say.
#[derive(Debug)]
pub enum Progress<K> {
    /// An event. A listing is `Init`, the objects, and `InitDone`.
    Event(Event<K>),
    /// Nothing changed, and the API server answers.
    Alive,
}

/// Why the API server's silence counts as a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
enum Silent {
    #[error("the API server accepted a list and sent no answer within {LIST_DEADLINE:?}")]
    List,
    #[error("the API server accepted a watch and sent no answer within {START_DEADLINE:?}")]
    Start,
    #[error("the watch sent nothing for {SILENCE:?}")]
    Watch,
    #[error("the watch ended within {SHORTEST_WATCH:?}")]
    Short,
}

/// Why a listing is not believed at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
enum Doubt {
    #[error("a list has {now} objects where {before} were known; listing again before that is believed")]
    Loss { before: usize, now: usize },
    #[error("a list is of version {now}, older than {before}; listing again before that is believed")]
    Backwards { before: u64, now: u64 },
}

fn client_error(error: impl std::error::Error + Send + Sync + 'static) -> kube::Error {
    kube::Error::Service(Box::new(error))
}

/// Returns the events of all objects of `api`, or of the one named `only`, and every sign of life between
/// them. Ends never.
pub fn progress<K>(
    api: Api<K>,
    only: Option<&str>,
) -> impl Stream<Item = Result<Progress<K>, Error>> + Send + use<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    followed(api, Selection { fields: only.map(|name| format!("metadata.name={name}")), labels: None })
}

/// Returns [`progress`] of the objects whose labels a selector fits.
pub fn labelled<K>(
    api: Api<K>,
    selector: &str,
) -> impl Stream<Item = Result<Progress<K>, Error>> + Send + use<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    followed(api, Selection { fields: None, labels: Some(selector.to_owned()) })
}

/// The selectors for all objects of a kind.
struct Selection {
    fields: Option<String>,
    labels: Option<String>,
}

fn followed<K>(
    api: Api<K>,
    selection: Selection,
) -> impl Stream<Item = Result<Progress<K>, Error>> + Send + use<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let watch = Watch {
        api,
        selection,
        state: State::Unlisted,
        known: Known::default(),
        doubted: false,
        page: OBJECTS,
        failures: 0,
        pause: Duration::ZERO,
    };
    stream::unfold(watch, |mut watch| async move { Some((watch.next().await, watch)) })
}

struct Watch<K> {
    api: Api<K>,
    selection: Selection,
    state: State<K>,
    known: Known,
    /// Whether the last listing was not believed; the next one is.
    doubted: bool,
    /// Objects asked for at a time.
    page: u32,
    /// In a row.
    failures: u32,
    /// Before the next request.
    pause: Duration,
}

/// The known state of the objects, to compare a listing with.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    objects: usize,
    version: u64,
}

enum State<K> {
    /// Everything is to be listed.
    Unlisted,
    /// A listing is under way.
    Listing {
        /// The rest of a page.
        objects: std::vec::IntoIter<K>,
        /// Names the next page.
        next: NextPage,
        /// Objects in all pages so far.
        count: usize,
    },
    /// All is listed as of this version; a watch is to be started.
    Listed { version: String },
    /// A watch is open.
    Watching { version: String, started: Instant, events: BoxStream<'static, kube::Result<WatchEvent<K>>> },
}

enum NextPage {
    First,
    Continue(String),
    /// There is none: the listing is complete, as of this version.
    End(String),
}

impl<K> Watch<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    async fn next(&mut self) -> Result<Progress<K>, Error> {
        sleep(std::mem::take(&mut self.pause)).await;
        match std::mem::replace(&mut self.state, State::Unlisted) {
            State::Unlisted => {
                self.page = OBJECTS;
                self.state =
                    State::Listing { objects: Vec::new().into_iter(), next: NextPage::First, count: 0 };
                Ok(Progress::Event(Event::Init))
            }
            State::Listing { mut objects, next, count } => match (objects.next(), next) {
                (Some(object), next) => {
                    self.state = State::Listing { objects, next, count };
                    Ok(Progress::Event(Event::InitApply(object)))
                }
                (None, NextPage::End(version)) => self.listed(version, count),
                (None, NextPage::First) => self.list(None, count).await,
                (None, NextPage::Continue(token)) => self.list(Some(token), count).await,
            },
            State::Listed { version } => self.start(version).await,
            State::Watching { version, started, events } => self.read(version, started, events).await,
        }
    }

    async fn list(&mut self, token: Option<String>, count: usize) -> Result<Progress<K>, Error> {
        let params = ListParams {
            limit: Some(self.page),
            continue_token: token.clone(),
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            ..ListParams::default()
        };
        let page = match timeout(LIST_DEADLINE, page(&self.api, &params)).await {
            Ok(Ok(Some(page))) => page,
            Ok(Ok(None)) if self.page > 1 => {
                self.page /= 2;
                let next = token.map_or(NextPage::First, NextPage::Continue);
                self.state = State::Listing { objects: Vec::new().into_iter(), next, count };
                return Ok(Progress::Alive);
            }
            Ok(Ok(None)) => return self.failed(Error::InitialListFailed(client_error(TooLarge)), None),
            Ok(Err(error)) => return self.failed(Error::InitialListFailed(error), None),
            Err(_) => return self.failed(Error::InitialListFailed(client_error(Silent::List)), None),
        };
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let next = match (given(page.metadata.continue_), given(page.metadata.resource_version)) {
            (Some(token), _) => NextPage::Continue(token),
            (None, Some(version)) => NextPage::End(version),
            (None, None) => return self.failed(Error::NoResourceVersion, None),
        };
        let count = count + page.items.len();
        self.state = State::Listing { objects: page.items.into_iter(), next, count };
        Ok(Progress::Alive)
    }

    /// Ends a listing, or has it made a second time if it is doubtful. An API server whose etcd is not whole
    /// yet, or is another one, must not take every object away by one answer.
    fn listed(&mut self, version: String, count: usize) -> Result<Progress<K>, Error> {
        let now = Known { objects: count, version: number(&version) };
        if let Some(doubt) = self.known.doubt(now).filter(|_| !self.doubted) {
            self.doubted = true;
            return self.failed(Error::InitialListFailed(client_error(doubt)), None);
        }
        self.doubted = false;
        self.known = now;
        self.state = State::Listed { version };
        Ok(Progress::Event(Event::InitDone))
    }

    async fn start(&mut self, version: String) -> Result<Progress<K>, Error> {
        let params = WatchParams {
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        let started = match timeout(START_DEADLINE, self.api.watch(&params, &version)).await {
            Ok(Ok(events)) => Ok(events.boxed()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(client_error(Silent::Start)),
        };
        match started {
            Ok(events) => {
                self.state = State::Watching { version, started: Instant::now(), events };
                Ok(Progress::Alive)
            }
            Err(kube::Error::Api(status)) if status.code == GONE => {
                self.failed(Error::WatchStartFailed(kube::Error::Api(status)), None)
            }
            Err(error) => self.failed(Error::WatchStartFailed(error), Some(version)),
        }
    }

    async fn read(
        &mut self,
        version: String,
        started: Instant,
        mut events: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    ) -> Result<Progress<K>, Error> {
        let Ok(event) = timeout(SILENCE, events.next()).await else {
            return self.failed(Error::WatchFailed(client_error(Silent::Watch)), Some(version));
        };
        if started.elapsed() >= SHORTEST_WATCH {
            self.failures = 0;
        }
        match &event {
            Some(Ok(WatchEvent::Added(_))) => self.known.objects += 1,
            Some(Ok(WatchEvent::Deleted(_))) => self.known.objects = self.known.objects.saturating_sub(1),
            _ => {}
        }
        let (version, progress) = match event {
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                (object.resource_version(), Progress::Event(Event::Apply(object)))
            }
            Some(Ok(WatchEvent::Deleted(object))) => {
                (object.resource_version(), Progress::Event(Event::Delete(object)))
            }
            Some(Ok(WatchEvent::Bookmark(bookmark))) => {
                (Some(bookmark.metadata.resource_version), Progress::Alive)
            }
            Some(Ok(WatchEvent::Error(status))) => return self.refused(status.boxed(), version),
            Some(Err(error)) => return self.failed(Error::WatchFailed(error), Some(version)),
            None if started.elapsed() < SHORTEST_WATCH => {
                return self.failed(Error::WatchFailed(client_error(Silent::Short)), Some(version));
            }
            None => {
                self.state = State::Listed { version };
                return Ok(Progress::Alive);
            }
        };
        let Some(version) = version.filter(|version| !version.is_empty()) else {
            return self.failed(Error::NoResourceVersion, None);
        };
        self.known.version = number(&version);
        self.state = State::Watching { version, started, events };
        Ok(progress)
    }

    fn refused(&mut self, status: Box<Status>, version: String) -> Result<Progress<K>, Error> {
        let version = (status.code != GONE).then_some(version);
        self.failed(Error::WatchError(status), version)
    }

    /// Goes on after a pause: with a watch from `version`, else with a list.
    fn failed(&mut self, error: Error, version: Option<String>) -> Result<Progress<K>, Error> {
        self.failures = self.failures.saturating_add(1);
        self.pause = pause(self.failures);
        self.state = match version {
            Some(version) if !self.failures.is_multiple_of(FAILURES_BEFORE_LIST) => State::Listed { version },
            _ => State::Unlisted,
        };
        Err(error)
    }
}

impl Known {
    /// What speaks against a listing that says `now`.
    fn doubt(self, now: Self) -> Option<Doubt> {
        if now.version < self.version {
            return Some(Doubt::Backwards { before: self.version, now: now.version });
        }
        let lost = self.objects.saturating_sub(now.objects);
        let doubtful = lost > DOUBTFUL_LOSS && lost > now.objects;
        doubtful.then_some(Doubt::Loss { before: self.objects, now: now.objects })
    }
}

/// A resourceVersion as a number; 0 if it is none. Since Kubernetes 1.35 it must be a number, and before it
/// was one.
fn number(version: &str) -> u64 {
    version.parse().unwrap_or_default()
}

/// The pause after so many failures, spread by a quarter: the gateways of a seed must not come back as one.
fn pause(failures: u32) -> Duration {
    let doubled = FIRST_PAUSE * (1 << failures.saturating_sub(1).min(5));
    let spread = RandomState::new().hash_one(failures) % 256;
    doubled.min(LONGEST_PAUSE).mul_f64(0.75 + spread as f64 / 1024.0)
}

#[cfg(test)]
#[path = "watch/tests.rs"]
mod tests;
