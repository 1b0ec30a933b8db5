//! The one watch of Clusters, for all controllers that work from them.

use std::sync::Arc;

use futures_util::future::ready;
use futures_util::{Stream, StreamExt, stream};
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use portico_api::cluster::Cluster;
use portico_api::meta::Kind;
use portico_source::served::Served;
use tokio::sync::broadcast::{self, error::RecvError};

use crate::follow::follow;
use crate::status::StatusHandle;

/// Changes that a controller may be behind. One that is further behind looks at all objects.
const BEHIND: usize = 1_024;

/// What there is to reconcile.
pub(crate) type Work = Vec<ObjectRef<Served<Cluster>>>;

/// What happened.
#[derive(Debug, Clone)]
enum Changed {
    One(ObjectRef<Served<Cluster>>),
    /// One is gone.
    Gone,
    /// All of them may be others.
    All,
}

/// All Clusters, and their changes.
#[derive(Clone)]
pub(crate) struct ClusterWatch {
    store: Store<Served<Cluster>>,
    changed: broadcast::Sender<Changed>,
}

impl ClusterWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let writer = Writer::default();
        let (changed, _) = broadcast::channel(BEHIND);
        let watch = Self { store: writer.as_reader(), changed: changed.clone() };
        let api = Api::<Served<Cluster>>::all_with(client.clone(), &());
        let status = status.clone();
        let work = async move {
            follow(api, Kind::Cluster.name(), status)
                // Of one that cannot be read the last readable version stays.
                .filter(|event| {
                    use watcher::Event::{Apply, InitApply};
                    let unreadable =
                        matches!(event, Ok(Apply(served) | InitApply(served)) if served.object.is_err());
                    ready(!unreadable)
                })
                .reflect(writer)
                .for_each(|event| {
                    let change = match event.ok() {
                        None | Some(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
                        Some(watcher::Event::InitDone) => Some(Changed::All),
                        Some(watcher::Event::Apply(served)) => {
                            Some(Changed::One(ObjectRef::from_obj(&served)))
                        }
                        Some(watcher::Event::Delete(_)) => Some(Changed::Gone),
                    };
                    // Fails where no controller listens.
                    _ = change.map(|change| changed.send(change));
                    ready(())
                })
                .await;
        };
        (watch, work)
    }

    /// Where they are kept.
    pub(crate) fn store(&self) -> Store<Served<Cluster>> {
        self.store.clone()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Work {
        self.store.state().iter().map(|served| ObjectRef::from_obj(&**served)).collect()
    }

    /// Whether there is one of this name.
    pub(crate) fn exists(&self, name: &str) -> bool {
        self.store.get(&ObjectRef::new(name)).is_some()
    }

    /// Yields the Clusters that changed: all of them after a list, and nothing for one that is gone, of which
    /// `forget` drops what is recorded. Begins with all: some may be known by now.
    pub(crate) fn changes<C: Send + Sync + 'static>(
        &self,
        context: &Arc<C>,
        forget: fn(&C),
    ) -> impl Stream<Item = Work> + Send + use<C> {
        let later = stream::unfold(self.changed.subscribe(), |mut changed| async {
            match changed.recv().await {
                Ok(change) => Some((change, changed)),
                Err(RecvError::Lagged(_)) => Some((Changed::All, changed)),
                Err(RecvError::Closed) => None,
            }
        });
        let (context, this) = (Arc::clone(context), self.clone());
        stream::once(ready(Changed::All)).chain(later).filter_map(move |change| {
            ready(match change {
                Changed::One(cluster) => Some(vec![cluster]),
                Changed::Gone => {
                    forget(&context);
                    None
                }
                Changed::All => {
                    forget(&context);
                    Some(this.all())
                }
            })
        })
    }
}
