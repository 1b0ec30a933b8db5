//! Watches of the objects that controllers work from, with their state on record.
//!
//! A watch that fails leaves everything as it was and is retried with back-off. The log has an error when it
//! begins and when it changes, and the status has it until the watch works again.

use std::fmt::Debug;

use futures_util::{Stream, StreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource};
use portico_kube::error::describe;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::status::StatusHandle;

/// HTTP status of a kind that is not served: no KKP, or one that is installed later.
const NOT_FOUND: u16 = 404;

/// Lists and watches the objects of `api`, of this kind, for ever.
pub(crate) fn follow<T>(
    api: Api<T>,
    config: watcher::Config,
    kind: &'static str,
    status: StatusHandle,
) -> impl Stream<Item = watcher::Result<watcher::Event<T>>> + Send + 'static
where
    T: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    status.update(|status| _ = status.watches.entry(kind).or_default());
    watcher(api, config).default_backoff().inspect(move |event| match event {
        Ok(event) => {
            let listed = matches!(event, watcher::Event::InitDone);
            let recovered = status.update(|status| {
                let watch = status.watches.entry(kind).or_default();
                watch.listed |= listed;
                watch.worked()
            });
            if recovered {
                info!(kind, "the watch works again");
            }
        }
        Err(error) if is_not_served(error) => {
            let news = status.update(|status| {
                let watch = status.watches.entry(kind).or_default();
                !std::mem::replace(&mut watch.not_served, true)
            });
            if news {
                info!(kind, "the API server does not serve this kind; asking again");
            }
        }
        Err(error) => {
            let text = describe(error);
            let news = status.update(|status| {
                let watch = status.watches.entry(kind).or_default();
                watch.failed(text.clone(), Instant::now())
            });
            if news {
                warn!(kind, error = text, "watch failed; what is known stays, and it is tried again");
            }
        }
    })
}

fn is_not_served(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        _ => return false,
    };
    status.code == NOT_FOUND
}
