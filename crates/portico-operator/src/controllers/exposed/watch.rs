//! The one watch of ExposedClusters, for all controllers that work from them.

use std::sync::Arc;

use futures_util::future::ready;
use futures_util::{Stream, StreamExt};
use kube::Client;
use kube::runtime::reflector::ObjectRef;
use portico_kube::cached::Cached;
use portico_kube::watch::progress;

use super::Written;
use crate::cache::{Cache, api};
use crate::follow::Changes;
use crate::status::StatusHandle;

/// An object that changed or is gone; `None` stands for all of them.
pub(crate) type Changed = Option<ObjectRef<Cached<Written>>>;

/// All ExposedClusters, and their changes.
#[derive(Clone)]
pub(crate) struct ExposedWatch {
    pub(crate) cache: Arc<Cache<Written>>,
    changed: Changes<Changed>,
}

impl ExposedWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (cache, writer) = Cache::new();
        let cache = Arc::new(cache);
        let changed = Changes::new();
        let watched = progress(api(client, ""), None);
        let (followed, tell, status) = (Arc::clone(&cache), changed.clone(), status.clone());
        let work = async move {
            let changes = followed.follow(watched, |_| true, writer, status);
            changes
                .for_each(|object| {
                    tell.tell(object);
                    ready(())
                })
                .await;
        };
        (Self { cache, changed }, work)
    }

    /// Tells of every change. Begins with all objects: some may be known by now.
    pub(crate) fn changes(&self) -> impl Stream<Item = Changed> + Send + use<> {
        self.changed.subscribe(None)
    }
}
