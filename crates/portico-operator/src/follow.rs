//! What controllers run on: watches of the objects that they work from, with their state on record, other
//! triggers, and the loop that reconciles.
//!
//! A watch that fails leaves everything as it was and is retried with back-off. The log has an error when it
//! begins and when it changes, and the status has it until the watch works again.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;

use futures_util::future::{FutureExt, ready};
use futures_util::stream::{self, Stream, StreamExt};
use kube::runtime::controller::{self, Action};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Resource};
use portico_kube::error::describe;
use portico_kube::watch::{Sign, signs};
use serde::de::DeserializeOwned;
use tokio::sync::watch as channel;
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::status::{StatusHandle, WatchStatus};

/// HTTP status of a kind that is not served: no KKP, or one that is installed later.
const NOT_FOUND: u16 = 404;

/// Lists and watches the objects of `api`, of this kind, for ever.
pub(crate) fn follow<T>(
    api: Api<T>,
    kind: &'static str,
    status: StatusHandle,
) -> impl Stream<Item = watcher::Result<watcher::Event<T>>> + Send + 'static
where
    T: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    status.update(|status| _ = status.watches.entry(kind).or_default());
    signs(api, None).filter_map(move |sign| {
        let record = |change: &dyn Fn(&mut WatchStatus) -> bool| {
            status.update(|status| change(status.watches.entry(kind).or_default()))
        };
        ready(match sign {
            Ok(sign) => {
                let listed = matches!(sign, Sign::Event(watcher::Event::InitDone));
                if record(&|watch| watch.worked(listed, Instant::now())) {
                    info!(kind, "the watch works again");
                }
                match sign {
                    Sign::Event(event) => Some(Ok(event)),
                    Sign::Alive => None,
                }
            }
            Err(error) => {
                if is_not_served(&error) {
                    if record(&|watch| !std::mem::replace(&mut watch.not_served, true)) {
                        info!(kind, "the API server does not serve this kind; asking again");
                    }
                } else {
                    let text = describe(&error);
                    if record(&|watch| watch.failed(&text)) {
                        warn!(kind, error = text, "watch failed; what is known stays, and it is tried again");
                    }
                }
                Some(Err(error))
            }
        })
    })
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

/// Reconciles the objects of `store` that `triggers` name, for ever, so many at a time.
pub(crate) async fn drive<K, C, E, F>(
    reconcile: fn(Arc<K>, Arc<C>) -> F,
    retry: fn(Arc<K>, &E, Arc<C>) -> Action,
    context: Arc<C>,
    store: Store<K>,
    triggers: impl Stream<Item = Vec<ObjectRef<K>>>,
    concurrency: u16,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    C: Send + Sync + 'static,
    E: std::error::Error + Send + 'static,
    F: Future<Output = Result<Action, E>> + Send + 'static,
{
    let reconcile = |object, context| reconcile(object, context).boxed();
    let queue = triggers.flat_map(stream::iter).map(Ok::<_, Infallible>);
    let config = controller::Config::default().concurrency(concurrency);
    controller::applier(reconcile, retry, context, store, queue, config)
        .for_each(|result| {
            // Failed writes are on record, and an object that is gone needs nothing.
            if let Err(controller::Error::RunnerError(ended)) = &result {
                error!(error = describe(ended), "no longer reconciling");
            }
            ready(())
        })
        .await;
}

fn is_not_served(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        _ => return false,
    };
    status.code == NOT_FOUND
}
