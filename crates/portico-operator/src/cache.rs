//! All objects of one kind as a controller last saw them, its own writes included.
//!
//! A watch is a little behind. A pass must not compare with the object before its own last write: it would
//! write again. So the object that the API server returned counts until the watch has it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::{Stream, StreamExt, future::ready};
use k8s_openapi::Resource;
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource as _, ResourceExt};
use portico_kube::cached::Cached;
use portico_kube::watch::Progress;

use crate::follow::recorded;
use crate::status::StatusHandle;

type Objects<K> = HashMap<ObjectRef<Cached<K>>, Arc<Cached<K>>>;

/// The objects of kind `K`.
pub(crate) struct Cache<K: Resource + 'static> {
    store: Store<Cached<K>>,
    ahead: Mutex<Ahead<K>>,
    listed: AtomicBool,
}

/// What this process knows before the watch.
struct Ahead<K: Resource + 'static> {
    /// Written by this process.
    written: Objects<K>,
    /// The newest version of any object that the watch has brought, since the last list.
    watched: u64,
}

impl<K: Resource + Send + Sync + 'static> Cache<K> {
    /// A cache that knows nothing, and what [`Self::follow`] fills it with.
    pub(crate) fn new() -> (Self, Writer<Cached<K>>) {
        let (store, writer) = reflector::store();
        let ahead = Mutex::new(Ahead { written: HashMap::new(), watched: 0 });
        (Self { store, ahead, listed: AtomicBool::new(false) }, writer)
    }

    /// The objects as the watch brought them, without own writes that it has not brought yet.
    pub(crate) fn store(&self) -> Store<Cached<K>> {
        self.store.clone()
    }

    /// Whether all objects are known.
    pub(crate) fn is_known(&self) -> bool {
        self.listed.load(Ordering::Acquire)
    }

    /// One object; `namespace` is empty for those without.
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<Arc<Cached<K>>> {
        let key = key(namespace, name);
        self.ahead().written.get(&key).cloned().or_else(|| self.store.get(&key))
    }

    /// All objects.
    pub(crate) fn all(&self) -> Vec<Arc<Cached<K>>> {
        self.store.state()
    }

    /// The objects of one namespace.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Vec<Arc<Cached<K>>> {
        let all = self.store.state();
        all.into_iter().filter(|seen| seen.meta().namespace.as_deref() == Some(namespace)).collect()
    }

    /// This process has written an object, which the API server returned.
    pub(crate) fn written(&self, object: Cached<K>) {
        let mut ahead = self.ahead();
        // The watch may be past it by now: the object may be another, or gone.
        if version(&object) > ahead.watched {
            ahead.written.insert(ObjectRef::from_obj(&object), Arc::new(object));
        }
    }

    /// An object is gone, or its deletion has begun.
    pub(crate) fn gone(&self, namespace: &str, name: &str) {
        self.ahead().written.remove(&key(namespace, name));
    }

    /// The watch has brought an object, and the store has it.
    fn watched(&self, seen: &Cached<K>) {
        let mut ahead = self.ahead();
        ahead.watched = ahead.watched.max(version(seen));
        let object = ObjectRef::from_obj(seen);
        if ahead.written.get(&object).is_some_and(|written| version(&**written) <= version(seen)) {
            ahead.written.remove(&object);
        }
    }

    /// The watch has brought all objects, and the store has them and no others.
    fn listed_anew(&self) {
        let versions = self.store.state();
        let newest = versions.iter().map(|seen| version(&**seen)).max();
        let mut ahead = self.ahead();
        // A list does not name deleted objects, so all remembered writes are dropped. A write made during the
        // list may be applied again.
        ahead.written.clear();
        // Versions may begin anew, where etcd was restored.
        ahead.watched = newest.unwrap_or_default();
    }

    /// Watches, and yields the object of each change; `None` stands for all of them.
    pub(crate) fn follow<S, F>(
        self: &Arc<Self>,
        watched: S,
        keep: F,
        writer: Writer<Cached<K>>,
        status: StatusHandle,
    ) -> impl Stream<Item = Option<ObjectRef<Cached<K>>>> + Send + use<K, S, F>
    where
        S: Stream<Item = watcher::Result<Progress<Cached<K>>>> + Send + 'static,
        F: Fn(&Cached<K>) -> bool + Send + Sync + 'static,
    {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let this = Arc::clone(self);
        recorded(watched, K::KIND, status)
            .filter(move |event| {
                let dropped =
                    matches!(event, Ok(Apply(seen) | InitApply(seen) | Delete(seen)) if !keep(seen));
                ready(!dropped)
            })
            .reflect(writer)
            .filter_map(move |event| {
                ready(match event {
                    Ok(InitDone) => {
                        this.listed_anew();
                        this.listed.store(true, Ordering::Release);
                        Some(None)
                    }
                    Ok(Apply(seen) | Delete(seen)) => {
                        this.watched(&seen);
                        Some(Some(ObjectRef::from_obj(&seen)))
                    }
                    Ok(Init | InitApply(_)) | Err(_) => None,
                })
            })
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead<K>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The API of one namespace, or, if it is empty, of objects without.
pub(crate) fn api<K: Resource + 'static>(client: &kube::Client, namespace: &str) -> Api<Cached<K>> {
    if namespace.is_empty() {
        Api::all_with(client.clone(), &())
    } else {
        Api::namespaced_with(client.clone(), namespace, &())
    }
}

fn key<K: Resource + 'static>(namespace: &str, name: &str) -> ObjectRef<Cached<K>> {
    let key = ObjectRef::new(name);
    if namespace.is_empty() { key } else { key.within(namespace) }
}

/// Versions can be compared since Kubernetes 1.35 says so, and are numbers in all releases before.
pub(crate) fn version(object: &impl ResourceExt) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::watcher::Event::{Apply, Init, InitApply, InitDone};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn own_writes_count_after_etcd_was_restored_to_an_earlier_version() {
        let object = |version: &str| -> Cached<ConfigMap> {
            let metadata = json!({"namespace": "n", "name": "a", "resourceVersion": version});
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        let (cache, writer) = Cache::new();
        let cache = Arc::new(cache);
        let events = [Init, InitDone, Apply(object("900")), Init, InitApply(object("7")), InitDone];
        let watched = stream::iter(events.map(|event| Ok(Progress::Event(event))));
        let followed = cache.follow(watched, |_| true, writer, StatusHandle::default());
        followed.for_each(|_| ready(())).await;
        let known = || version(&*cache.get("n", "a").unwrap());
        cache.written(object("6"));
        assert_eq!(known(), 7, "the list is past it");
        cache.written(object("8"));
        assert_eq!(known(), 8);
    }
}
