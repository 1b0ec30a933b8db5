//! What stands above every Cluster: the Seeds and the KubermaticConfiguration, as they were last readable.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, future};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectKey};
use portico_api::seed::Seed;
use portico_kube::watch::progress;
use portico_source::Object;
use portico_source::served::{Served, ServedKind};
use thiserror::Error;
use tokio::sync::watch as channel;
use tokio::time::Instant;
use tracing::warn;

use crate::follow::{is_not_served, recorded};
use crate::outage::Outage;
use crate::status::StatusHandle;

/// Which configuration counts is not known.
#[derive(Debug, Error)]
#[error("there are several KubermaticConfigurations; keep one")]
pub(crate) struct SeveralConfigurations;

/// All objects of one kind.
pub(crate) struct Reflector<K: ServedKind> {
    store: Store<Served<K>>,
    /// They have been asked for: they are known, not served, or cannot be read now.
    asked: AtomicBool,
    /// All of them have been listed.
    listed: AtomicBool,
    /// Objects without any readable version.
    unreadable: Mutex<BTreeMap<ObjectKey, String>>,
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
            unreadable: Mutex::default(),
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
                .filter_map(move |event| future::ready(before.readable(event)))
                .reflect(writer)
                .for_each(|event| {
                    this.applied(event.as_ref());
                    future::ready(())
                })
                .await;
        };
        (reflector, work)
    }

    /// Leaves out objects that cannot be read: their last readable version stays.
    fn readable(
        &self,
        event: watcher::Result<watcher::Event<Served<K>>>,
    ) -> Option<watcher::Result<watcher::Event<Served<K>>>> {
        let mut unreadable = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        match &event {
            Ok(watcher::Event::Init) => unreadable.clear(),
            Ok(watcher::Event::Delete(served)) => _ = unreadable.remove(&served.reference.key),
            Ok(watcher::Event::Apply(served) | watcher::Event::InitApply(served)) => match &served.object {
                Ok(_) => _ = unreadable.remove(&served.reference.key),
                Err(error) => {
                    let object = &served.reference;
                    warn!(%object, %error, "cannot be read; its last readable version stays");
                    if self.store.get(&ObjectRef::from_obj(served)).is_none() {
                        let text = format!("{object} cannot be read: {error}; correct it");
                        unreadable.insert(served.reference.key.clone(), text);
                    }
                    self.tell(&unreadable);
                    return None;
                }
            },
            Ok(watcher::Event::InitDone) | Err(_) => {}
        }
        self.tell(&unreadable);
        Some(event)
    }

    /// Says what keeps everything waiting.
    fn tell(&self, unreadable: &BTreeMap<ObjectKey, String>) {
        let first = unreadable.values().next().cloned();
        self.status.update(|status| status.watches.entry(K::KIND.name()).or_default().unreadable = first);
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
        self.asked.store(true, Ordering::Release);
        self.changed.send_replace(());
    }

    /// Whether there was an answer to the question which ones there are, if only an error.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Whether all of them are known.
    pub(crate) fn is_known(&self) -> bool {
        self.listed.load(Ordering::Acquire)
            && self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
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
