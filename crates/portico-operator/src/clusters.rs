//! The one watch of Clusters, for all controllers that work from them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::ready;
use futures_util::{Stream, StreamExt};
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use portico_api::cluster::Cluster;
use portico_api::meta::Kind;
use portico_source::Object;
use portico_source::served::Served;

use crate::cache::version;
use crate::follow::{Changes, follow};
use crate::status::StatusHandle;

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
    changed: Changes<Changed>,
}

impl ClusterWatch {
    /// Returns what is known, and the work that keeps it so.
    pub(crate) fn new(
        client: &Client,
        status: &StatusHandle,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let writer = Writer::default();
        let changed = Changes::new();
        let watch = Self { store: writer.as_reader(), changed: changed.clone() };
        let api = Api::<Served<Cluster>>::all_with(client.clone(), &());
        let (status, store) = (status.clone(), watch.store());
        let work = async move {
            follow(api, Kind::Cluster.name(), status)
                .map(move |mut event| {
                    use watcher::Event::{Apply, InitApply};
                    if let Ok(Apply(served) | InitApply(served)) = &mut event {
                        keep_last_read(served, store.get(&ObjectRef::from_obj(served)).as_deref());
                    }
                    event
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
                    if let Some(change) = change {
                        changed.tell(change);
                    }
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

    /// Yields the Clusters that changed, and all of them after a list. For one that is gone it yields
    /// nothing, and `forget` drops its record.
    pub(crate) fn changes<C: Send + Sync + 'static>(
        &self,
        context: &Arc<C>,
        forget: fn(&C),
    ) -> impl Stream<Item = Work> + Send + use<C> {
        let (context, this) = (Arc::clone(context), self.clone());
        self.changed.subscribe(Changed::All).filter_map(move |change| {
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

/// Replaces an unreadable Cluster by its last readable version, with the new finalizers. Not if it is being
/// deleted: then its metadata is all that counts.
fn keep_last_read(served: &mut Served<Cluster>, last: Option<&Served<Cluster>>) {
    let unread = served.unread.as_ref();
    if unread.is_some_and(|unread| unread.metadata.deletion_timestamp.is_none()) {
        served.keep_last_read(last);
    }
}

/// The Cluster to work from. Of one that was never read, metadata and status are all that is known.
pub(crate) fn known(served: &Served<Cluster>) -> Option<Cow<'_, Cluster>> {
    match (&served.object, &served.unread) {
        (Ok(Object::Cluster(cluster)), _) => Some(Cow::Borrowed(cluster)),
        (Err(_), Some(unread)) => {
            let mut cluster = Cluster::with_metadata(unread.metadata.clone());
            unread.read_status(&mut cluster.status);
            Some(Cow::Owned(cluster))
        }
        _ => None,
    }
}

/// Why a Cluster cannot be read as it is now, and the remedy.
pub(crate) fn unreadable(served: &Served<Cluster>) -> Option<String> {
    let why = &served.unread.as_ref()?.why;
    let field = if why.field.is_empty() { "the object" } else { &why.field };
    Some(format!(
        "{}: {field} cannot be read ({why}): what was made for it stays as it is. Mend the field, or \
         delete the Cluster",
        served.reference
    ))
}

/// The version of each Cluster that a controller wrote last, since the last list: no pass works from an older
/// one.
#[derive(Debug, Default)]
pub(crate) struct LastWritten(Mutex<HashMap<String, u64>>);

impl LastWritten {
    /// The Cluster as it was written.
    pub(crate) fn wrote(&self, written: &Served<Cluster>) {
        self.all().insert(written.name_any(), version(written));
    }

    /// Whether the watch has not brought yet what was written last. It will, and that triggers another pass.
    pub(crate) fn is_ahead_of(&self, cluster: &Served<Cluster>) -> bool {
        self.all().get(&cluster.name_any()).is_some_and(|&written| version(cluster) < written)
    }

    /// Versions may begin anew, where etcd was restored.
    pub(crate) fn forget(&self) {
        self.all().clear();
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn of_a_cluster_that_cannot_be_read_the_last_reading_stays_until_it_is_deleted() {
        let served = |metadata: Value, pause: Value| -> Served<Cluster> {
            serde_json::from_value(json!({"metadata": metadata, "spec": {"pause": pause}})).unwrap()
        };
        let last = served(json!({"name": "a", "uid": "1"}), json!(true));
        let mut unread = served(json!({"name": "a", "uid": "1", "finalizers": ["x"]}), json!("no"));
        keep_last_read(&mut unread, Some(&last));
        let Ok(Object::Cluster(kept)) = &unread.object else { panic!("{:?}", unread.object) };
        assert!(kept.spec.pause && &*kept.metadata.finalizers[0] == "x");
        let deleted = json!({"name": "a", "uid": "1", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        for metadata in [deleted, json!({"name": "a", "uid": "2"})] {
            let mut unread = served(metadata, json!("no"));
            keep_last_read(&mut unread, Some(&last));
            assert!(unread.object.is_err());
        }
    }
}
