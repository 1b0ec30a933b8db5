//! The objects above every Cluster: the Seeds and the KubermaticConfiguration, as they were last readable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, future};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::Kind;
use portico_api::seed::Seed;
use portico_kube::watch::progress;
use portico_source::Object;
use portico_source::served::{Served, ServedKind};
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::Instant;

use crate::follow::{is_not_served, keep_last_read, recorded};
use crate::outage::Outage;
use crate::status::StatusHandle;

/// Which configuration counts is not known.
#[derive(Debug, Error)]
#[error("there are several KubermaticConfigurations; keep one")]
pub(crate) struct SeveralConfigurations;

/// All objects of one kind.
pub(crate) struct Reflector<K: ServedKind> {
    /// Objects that cannot be read and have no earlier version are in it too.
    store: Store<Served<K>>,
    /// They have been asked for: they are known, not served, or cannot be read now.
    asked: AtomicBool,
    /// All of them have been listed.
    listed: AtomicBool,
    status: StatusHandle,
    changed: channel::Sender<()>,
}

/// Both levels.
#[derive(Clone)]
pub(crate) struct Installation {
    pub(crate) seeds: Arc<Reflector<Seed>>,
    pub(crate) configurations: Arc<Reflector<KubermaticConfiguration>>,
    changes: channel::Receiver<()>,
    outages: channel::Receiver<Duration>,
}

impl Installation {
    /// Returns what is known, and the work that keeps it so. Configurations are only watched if `both`.
    pub(crate) fn new(
        client: &Client,
        status: &StatusHandle,
        both: bool,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (changed, changes) = channel::channel(());
        let (outage, outages) = Outage::new();
        let (seeds, seeds_work) = Reflector::new(client, status, changed.clone(), Some(outage));
        let (configurations, configurations_work) = Reflector::new(client, status, changed, None);
        let work = async move {
            // Neither ends.
            future::select(
                Box::pin(seeds_work),
                Box::pin(async move {
                    if both {
                        configurations_work.await;
                    }
                    future::pending::<()>().await;
                }),
            )
            .await;
        };
        (Self { seeds, configurations, changes, outages }, work)
    }

    /// Tells of every change.
    pub(crate) fn changes(&self) -> channel::Receiver<()> {
        self.changes.clone()
    }

    /// Tells of every time that the API server was away for, once it is back.
    pub(crate) fn outages(&self) -> channel::Receiver<Duration> {
        self.outages.clone()
    }
}

impl<K: ServedKind> Reflector<K> {
    fn new(
        client: &Client,
        status: &StatusHandle,
        changed: channel::Sender<()>,
        mut outage: Option<Outage>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + 'static) {
        let (store, writer) = reflector::store();
        let reflector = Arc::new(Self {
            store,
            asked: AtomicBool::new(false),
            listed: AtomicBool::new(false),
            status: status.clone(),
            changed,
        });
        let (this, client, status) = (Arc::clone(&reflector), client.clone(), status.clone());
        let work = async move {
            let api = Api::<Served<K>>::all_with(client, &());
            let before = Arc::clone(&this);
            let watched = progress(api, None).inspect(move |sign| {
                let answers = sign.as_ref().map_or_else(is_not_served, |_| true);
                if let Some(outage) = &mut outage {
                    outage.sign(answers, Instant::now());
                }
            });
            recorded(watched, K::KIND.name(), status)
                .map(move |mut event| {
                    if let Ok(event) = &mut event {
                        keep_last_read(event, &before.store);
                    }
                    event
                })
                .reflect(writer)
                .for_each(|event| {
                    this.applied(event.as_ref());
                    future::ready(())
                })
                .await;
        };
        (reflector, work)
    }

    /// Says what keeps everything waiting.
    fn tell(&self) {
        let objects = self.objects();
        let unreadable = objects.iter().filter_map(|served| {
            let error = served.object.as_ref().err()?;
            Some(format!("{} cannot be read: {error}; correct it", served.reference))
        });
        let first = unreadable.min();
        self.status.watch(K::KIND.name(), |watch| watch.unreadable = first);
    }

    fn applied(&self, event: Result<&watcher::Event<Served<K>>, &watcher::Error>) {
        match event {
            Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => return,
            Ok(watcher::Event::InitDone) => self.listed.store(true, Ordering::Release),
            Ok(watcher::Event::Apply(_) | watcher::Event::Delete(_)) => {}
            // What was known before stays.
            Err(_) if self.asked.load(Ordering::Acquire) => return,
            Err(_) => {}
        }
        self.tell();
        self.asked.store(true, Ordering::Release);
        self.changed.send_replace(());
    }

    /// Whether there was an answer to the question which ones there are, if only an error.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Whether all of them are known.
    pub(crate) fn is_known(&self) -> bool {
        self.listed.load(Ordering::Acquire) && self.store.find(|served| served.object.is_err()).is_none()
    }

    /// Whether there is one in this namespace.
    pub(crate) fn are_in(&self, namespace: &str) -> bool {
        self.objects().iter().any(|served| *served.reference.key.namespace == *namespace)
    }

    /// Where they are kept.
    pub(crate) fn store(&self) -> Store<Served<K>> {
        self.store.clone()
    }

    /// Their present state, in no order.
    pub(crate) fn objects(&self) -> Vec<Arc<Served<K>>> {
        self.store.state()
    }
}

/// The Seed as Events name it.
pub(crate) fn reference(seed: &Seed) -> ObjectReference {
    let meta = &seed.metadata;
    ObjectReference {
        api_version: Some(format!("{}/{}", Seed::GROUP, Seed::VERSION)),
        kind: Some(Kind::Seed.name().to_owned()),
        namespace: Some(meta.namespace.to_string()),
        name: Some(meta.name.to_string()),
        uid: Some(meta.uid.to_string()),
        ..ObjectReference::default()
    }
}

impl Reflector<Seed> {
    /// The Seeds, in an order that does not depend on that of a list.
    pub(crate) fn seeds(&self) -> Vec<Arc<Seed>> {
        let mut seeds: Vec<Arc<Seed>> = self
            .objects()
            .iter()
            .filter_map(|served| match &served.object {
                Ok(Object::Seed(seed)) => Some(Arc::new((**seed).clone())),
                _ => None,
            })
            .collect();
        seeds.sort_by_key(|seed| seed.metadata.key());
        seeds
    }
}

impl Reflector<KubermaticConfiguration> {
    /// The configuration of the installation, if there is one.
    ///
    /// # Errors
    /// There are several: which one counts is not known.
    pub(crate) fn one(&self) -> Result<Option<KubermaticConfiguration>, SeveralConfigurations> {
        let objects = self.objects();
        let mut found = objects.iter().filter_map(|served| match &served.object {
            Ok(Object::KubermaticConfiguration(configuration)) => Some((**configuration).clone()),
            _ => None,
        });
        let first = found.next();
        if found.next().is_some() { Err(SeveralConfigurations) } else { Ok(first) }
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector::store::Writer;
    use kube::runtime::watcher::Event::{self, Apply, Init, InitApply, InitDone};
    use serde_json::{Value, json};

    use super::*;

    /// What is known of Seeds.
    struct Watched {
        seeds: Arc<Reflector<Seed>>,
        writer: Writer<Served<Seed>>,
    }

    impl Watched {
        fn new() -> Self {
            let (store, writer) = reflector::store();
            let seeds = Arc::new(Reflector {
                store,
                asked: AtomicBool::new(false),
                listed: AtomicBool::new(false),
                status: StatusHandle::default(),
                changed: channel::channel(()).0,
            });
            Self { seeds, writer }
        }

        fn bring(&mut self, events: Vec<Event<Served<Seed>>>) {
            for mut event in events {
                keep_last_read(&mut event, &self.seeds.store);
                self.writer.apply_watcher_event(&event);
                self.seeds.applied(Ok(&event));
            }
        }
    }

    fn seed(name: &str, datacenters: Value) -> Served<Seed> {
        let metadata = json!({"namespace": "kubermatic", "name": name, "uid": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"datacenters": datacenters}})).unwrap()
    }

    fn readable(name: &str) -> Served<Seed> {
        seed(name, json!({name: {}}))
    }

    fn unreadable(name: &str) -> Served<Seed> {
        seed(name, json!("nonsense"))
    }

    #[test]
    fn a_seed_that_cannot_be_read_keeps_its_last_reading_through_relists() {
        let mut watched = Watched::new();
        watched.bring(vec![Init, InitApply(readable("north")), InitApply(readable("south")), InitDone]);
        watched.bring(vec![Apply(unreadable("north"))]);
        for _ in 0..2 {
            watched.bring(vec![Init, InitApply(unreadable("north")), InitApply(readable("south")), InitDone]);
            let known = watched.seeds.seeds();
            assert!(watched.seeds.is_known() && known.len() == 2, "{known:?}");
            assert!(known[0].spec.datacenters.contains_key("north"), "{known:?}");
        }
    }

    #[test]
    fn a_seed_without_any_reading_keeps_everything_waiting_until_a_relist_is_complete() {
        let mut watched = Watched::new();
        watched.bring(vec![Init, InitApply(unreadable("north")), InitDone]);
        for event in [Init, InitApply(readable("north"))] {
            watched.bring(vec![event]);
            assert!(!watched.seeds.is_known());
        }
        watched.bring(vec![InitDone]);
        assert!(watched.seeds.is_known() && watched.seeds.seeds().len() == 1);
    }
}
