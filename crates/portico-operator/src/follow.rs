//! Watches of the objects that controllers work from, with their state on record.
//!
//! A watch that fails leaves everything as it was and is retried with back-off. The log has an error when it
//! begins and when it changes, and the status has it until the watch works again.

use std::fmt::Debug;

use futures_util::future::ready;
use futures_util::{Stream, StreamExt};
use kube::runtime::watcher;
use kube::{Api, Resource};
use portico_kube::error::describe;
use portico_kube::watch::{Sign, signs};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::{info, warn};

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

fn is_not_served(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        _ => return false,
    };
    status.code == NOT_FOUND
}
