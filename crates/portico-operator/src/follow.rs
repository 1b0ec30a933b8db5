//! The base of controllers: watches of their objects, with the state of each watch on record, other triggers,
//! and the loop that reconciles.
//!
//! A watch that fails leaves everything as it was and is retried with back-off. The log has an error when a
//! failure begins and when it changes. The status has it until the watch works again.

use std::convert::Infallible;
use std::fmt::Debug;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt, ready};
use futures_util::stream::{self, Stream, StreamExt};
use kube::runtime::controller::{self, Action};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Resource};
use portico_kube::error::describe;
use portico_kube::watch::{Progress, progress};
use portico_source::served::{Served, ServedKind};
use serde::de::DeserializeOwned;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch as channel;
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::condition::shown;
use crate::status::{StatusHandle, WatchStatus};
use crate::work_counters::{Queue, WorkCounters};

/// HTTP status of a kind that is not served: KKP is absent, or is installed later.
const NOT_FOUND: u16 = 404;

/// Until an object at which a pass panicked is looked at again, unless something changes before.
const AFTER_A_PANIC: Duration = Duration::from_mins(10);

/// Replaces an object that cannot be read by its last readable version, and writes why it cannot.
pub(crate) fn keep_last_read<K: ServedKind>(event: &mut watcher::Event<Served<K>>, store: &Store<Served<K>>) {
    use watcher::Event::{Apply, InitApply};
    let (Apply(served) | InitApply(served)) = event else { return };
    let last = store.get(&ObjectRef::from_obj(served));
    served.keep_last_read(last.as_deref());
    if let Some(unread) = &served.unread {
        let (object, error) = (&served.reference, shown(&unread.why.to_string()));
        warn!(%object, error, "cannot be read; its last readable version stays");
    }
}

/// Lists and watches the objects of `api`, of this kind, for ever.
pub(crate) fn follow<T>(
    api: Api<T>,
    kind: &'static str,
    status: StatusHandle,
) -> impl Stream<Item = watcher::Result<watcher::Event<T>>> + Send + 'static
where
    T: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    recorded(progress(api, None), kind, status)
}

/// Yields the events of a watch of `kind`, and records its state in `status`.
pub(crate) fn recorded<T>(
    watched: impl Stream<Item = watcher::Result<Progress<T>>> + Send + 'static,
    kind: &'static str,
    status: StatusHandle,
) -> impl Stream<Item = watcher::Result<watcher::Event<T>>> + Send + 'static
where
    T: Send + 'static,
{
    status.watch(kind, |_| ());
    // The error of this watch: there may be several of a kind, and another one that works does not end it.
    let mut failing: Option<String> = None;
    watched.filter_map(move |progress| {
        let now = Instant::now();
        ready(match progress {
            // A listing that begins is no answer yet.
            Ok(Progress::Event(event @ watcher::Event::Init)) => Some(Ok(event)),
            Ok(progress) => {
                let listed = matches!(progress, Progress::Event(watcher::Event::InitDone));
                let healed = failing.take().is_some();
                status.watch(kind, |watch| watch.worked(listed, healed, now));
                if healed {
                    info!(kind, "the watch works again");
                }
                match progress {
                    Progress::Event(event) => Some(Ok(event)),
                    Progress::Alive => None,
                }
            }
            Err(error) => {
                if is_not_served(&error) {
                    let known = |watch: &mut WatchStatus| std::mem::replace(&mut watch.not_served, true);
                    if !status.watch(kind, known) {
                        info!(kind, "the API server does not serve this kind; asking again");
                    }
                } else {
                    let text = describe(&error);
                    let before = failing.replace(text.clone());
                    status.watch(kind, |watch| watch.failed(&text, before.is_none()));
                    if before.as_ref() != Some(&text) {
                        warn!(kind, error = text, "watch failed; what is known stays, and it is tried again");
                    }
                }
                Some(Err(error))
            }
        })
    })
}

/// Changes that a controller may be behind. One that is further behind looks at all objects.
const BEHIND: usize = 1_024;

/// What one watch tells to several controllers.
#[derive(Debug, Clone)]
pub(crate) struct Changes<T>(broadcast::Sender<T>);

impl<T: Clone + Send + 'static> Changes<T> {
    /// Nobody listens yet.
    pub(crate) fn new() -> Self {
        Self(broadcast::channel(BEHIND).0)
    }

    /// Tells of a change.
    pub(crate) fn tell(&self, change: T) {
        // Fails where no controller listens.
        _ = self.0.send(change);
    }

    /// Every change from now on. Begins with `all`, because some objects may be known by now, and has it
    /// again where the controller was too far behind.
    pub(crate) fn subscribe(&self, all: T) -> impl Stream<Item = T> + Send + use<T>
    where
        T: Sync,
    {
        let missed = all.clone();
        let later = stream::unfold(self.0.subscribe(), move |mut changed| {
            let missed = missed.clone();
            async move {
                match changed.recv().await {
                    Ok(change) => Some((change, changed)),
                    Err(RecvError::Lagged(_)) => Some((missed, changed)),
                    Err(RecvError::Closed) => None,
                }
            }
        });
        stream::once(ready(all)).chain(later)
    }
}

/// Yields what `work` returns, at each change of `receiver`.
pub(crate) fn on_change<T, C, W>(
    receiver: channel::Receiver<T>,
    context: &Arc<C>,
    work: fn(&C) -> W,
) -> impl Stream<Item = W> + Send + 'static
where
    T: Send + Sync + 'static,
    C: Send + Sync + 'static,
    W: Send + 'static,
{
    let context = Arc::clone(context);
    stream::unfold(receiver, move |mut receiver| {
        let context = Arc::clone(&context);
        async move {
            receiver.changed().await.ok()?;
            Some((work(&context), receiver))
        }
    })
}

/// The pause before the next attempt after so many failures in a row: the first one, doubled each time.
pub(crate) fn pause(failures: u32, first: Duration, last: Duration) -> Duration {
    first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(last)
}

/// Reconciles the objects of `store` that `triggers` name, for ever, so many at a time.
pub(crate) async fn drive<K, C, E, F>(
    reconcile: fn(Arc<K>, Arc<C>) -> F,
    retry: fn(Arc<K>, &E, Arc<C>) -> Action,
    context: Arc<C>,
    store: Store<K>,
    triggers: impl Stream<Item = Vec<ObjectRef<K>>>,
    concurrency: u16,
    counters: WorkCounters,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    C: Send + Sync + 'static,
    E: std::error::Error + Send + 'static,
    F: Future<Output = Result<Action, E>> + Send + 'static,
{
    let queue = Queue::new(counters.clone());
    let (begins, gone) = (queue.clone(), queue.clone());
    let reconcile = move |object: Arc<K>, context| {
        let reference = ObjectRef::from_obj(&*object);
        begins.take(&reference);
        let counters = counters.clone();
        // A defect that one object brings to light stops no other. The state that passes share is behind
        // locks that outlive a panic, and each pass compares anew.
        let pass = AssertUnwindSafe(reconcile(object, context)).catch_unwind();
        pass.map(move |done| {
            done.unwrap_or_else(|_| {
                error!(object = %reference, "a pass panicked: a defect, please report it; tried again later");
                counters.failed("Panicked");
                Ok(Action::requeue(AFTER_A_PANIC))
            })
        })
        .boxed()
    };
    let queue = triggers.inspect(move |objects| queue.add(objects));
    let queue = queue.flat_map(stream::iter).map(Ok::<_, Infallible>);
    let config = controller::Config::default().concurrency(concurrency);
    // `runtime::Controller`, which runs this inside, is not used. The watches that it makes have no
    // deadlines, and one watch here feeds several controllers. Its variants for streams are features that
    // kube calls unstable. It also makes a task of each pass. Here a replica that no longer leads drops this
    // future, and with it every pass at once.
    controller::applier(reconcile, retry, context, store, queue, config)
        .for_each(|result| {
            match &result {
                Err(controller::Error::RunnerError(ended)) => {
                    error!(error = describe(ended), "no longer reconciling");
                }
                Err(controller::Error::ObjectNotFound(object)) => gone.take(object),
                // Failed writes are on record.
                Ok(_) | Err(_) => {}
            }
            ready(())
        })
        .await;
}

/// The API server answers, and has no such kind.
pub(crate) fn is_not_served(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        _ => return false,
    };
    status.code == NOT_FOUND
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Mutex;

    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::reflector::{self, store::Writer};
    use thiserror::Error;
    use tokio::sync::{Semaphore, mpsc};
    use tokio::time::sleep;

    use super::*;

    #[derive(Debug, Error)]
    #[error("never")]
    struct Never;

    /// Hangs until there is a permit.
    async fn reconcile(_: Arc<ConfigMap>, permits: Arc<Semaphore>) -> Result<Action, Never> {
        permits.acquire().await.map_err(|_| Never)?.forget();
        Ok(Action::await_change())
    }

    /// A store of these objects.
    fn known(names: &[&str]) -> (Store<ConfigMap>, Writer<ConfigMap>) {
        let (store, mut writer) = reflector::store();
        writer.apply_watcher_event(&watcher::Event::Init);
        for &name in names {
            let mut map = ConfigMap::default();
            map.metadata.name = Some(name.to_owned());
            writer.apply_watcher_event(&watcher::Event::InitApply(map));
        }
        writer.apply_watcher_event(&watcher::Event::InitDone);
        (store, writer)
    }

    #[tokio::test]
    async fn a_watch_whose_every_listing_is_refused_never_counts_as_one_that_works() {
        let refused = || Err(watcher::Error::NoResourceVersion);
        let begins = || Ok(Progress::Event(watcher::Event::<ConfigMap>::Init));
        let watched = stream::iter([refused(), begins(), refused(), begins()]);
        let status = StatusHandle::default();
        recorded(watched, "ConfigMap", status.clone()).for_each(|_| ready(())).await;
        let watch = &status.get().watches["ConfigMap"];
        assert!(watch.error.is_some() && watch.age().is_none(), "{watch:?}");
    }

    #[tokio::test]
    async fn of_two_watches_of_a_kind_one_that_works_does_not_end_the_error_of_the_other() {
        let status = StatusHandle::default();
        let error = || status.get().watches["ConfigMap"].error.clone();
        let watch = |watched| recorded(stream::iter::<Vec<_>>(watched), "ConfigMap", status.clone());
        let fails = || Err(watcher::Error::NoResourceVersion);
        let mut one = pin!(watch(vec![fails(), Ok(Progress::Event(watcher::Event::<ConfigMap>::InitDone))]));
        one.next().await;
        watch(vec![Ok(Progress::Event(watcher::Event::InitDone))]).for_each(|_| ready(())).await;
        assert!(error().is_some());
        one.next().await;
        assert_eq!(error(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn objects_that_wait_behind_one_that_hangs_are_counted_once_each_and_no_others() {
        let (store, _writer) = known(&["a", "b", "c"]);
        let (permits, status) = (Arc::new(Semaphore::new(0)), StatusHandle::default());
        let (changes, received) = mpsc::channel(8);
        let triggers = stream::unfold(received, |mut received| async {
            let work: Vec<ObjectRef<ConfigMap>> = received.recv().await?;
            Some((work, received))
        });
        let (counters, retry) =
            (WorkCounters::new("maps", &status), |_, _: &Never, _| Action::await_change());
        let driven = drive(reconcile, retry, Arc::clone(&permits), store, triggers, 1, counters);
        let driven = tokio::spawn(driven);
        let change = async |names: &[&str]| {
            changes.send(names.iter().map(|name| ObjectRef::new(name)).collect()).await.unwrap();
            sleep(Duration::from_secs(1)).await;
            status.get().controllers["maps"].queued
        };
        assert_eq!(change(&["a"]).await, 0, "it has begun");
        assert_eq!(change(&["b", "c", "gone"]).await, 3);
        assert_eq!(change(&["b"]).await, 3);
        permits.add_permits(3);
        assert_eq!(change(&[]).await, 0);
        driven.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_pass_that_panics_stops_no_other_and_is_made_again() {
        let (store, _writer) = known(&["a", "b"]);
        let passes = Arc::new(Mutex::new(Vec::new()));
        let panics_at_a = |map: Arc<ConfigMap>, passes: Arc<Mutex<Vec<String>>>| async move {
            let name = map.metadata.name.clone().unwrap_or_default();
            passes.lock().unwrap().push(name.clone());
            assert_ne!(name, "a", "a defect");
            Ok(Action::await_change())
        };
        let status = StatusHandle::default();
        let (counters, retry) =
            (WorkCounters::new("maps", &status), |_, _: &Never, _| Action::await_change());
        let both = vec![ObjectRef::new("a"), ObjectRef::new("b")];
        let triggers = stream::once(ready(both)).chain(stream::pending());
        let driven = drive(panics_at_a, retry, Arc::clone(&passes), store, triggers, 1, counters);
        let driven = tokio::spawn(driven);
        sleep(AFTER_A_PANIC + Duration::from_secs(1)).await;
        let mut made = std::mem::take(&mut *passes.lock().unwrap());
        made.sort();
        assert_eq!(made, ["a", "a", "b"]);
        assert_eq!(status.get().controllers["maps"].errors["Panicked"], 2);
        driven.abort();
    }
}
