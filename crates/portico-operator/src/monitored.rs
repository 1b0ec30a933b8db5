//! The control planes of a seed, as `portico metrics` sees them. [`Monitored`] knows where their programs
//! are, and the credentials by which each cluster lets its metrics be read. [`Scraper`] reads the metrics of
//! one program when somebody asks. Nothing is written.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::{StreamExt, future};
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::runtime::watcher::Event;
use kube::{Api, Client, ResourceExt};
use portico_api::meta::ObjectKey;
use portico_api::names::ClusterName;
use portico_hosting::monitoring::{PODS, SECRET, Source, Target, targets};
use portico_kube::cached::Cached;
use portico_kube::watch::{labelled, progress};
use portico_pki::Kubeconfig;
use portico_pki::inventory::KUBECONFIG;
use tracing::warn;

use crate::cache::api;
use crate::follow::recorded;
use crate::status::StatusHandle;

mod credentials;
mod scrape;

pub use credentials::Credentials;
pub use scrape::{ScrapeCounts, ScrapeError, Scraper};

/// What is known of all control planes.
#[derive(Debug)]
pub struct Monitored {
    pods: Listed<ObjectKey, Vec<Target>>,
    credentials: Listed<ClusterName, Arc<Credentials>>,
    status: StatusHandle,
}

impl Monitored {
    /// Returns the store, which is still empty, and the work that fills it. The work never ends.
    pub fn new(client: &Client) -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let status = StatusHandle::default();
        let this = Arc::new(Self { pods: Listed::default(), credentials: Listed::default(), status });
        let (pods, secrets) = (api::<Pod>(client, ""), Api::<Secret>::all(client.clone()));
        let pods = recorded(labelled(pods, PODS), Pod::KIND, this.status.clone());
        let secrets = recorded(progress(secrets, Some(SECRET)), Secret::KIND, this.status.clone());
        let known = Arc::clone(&this);
        let work = async move {
            let pods = pods.for_each(|event| {
                if let Ok(event) = event {
                    known.pods.learn(event, pod_key, |pod: &Cached<Pod>| {
                        Some(targets(&pod.value())).filter(|targets| !targets.is_empty())
                    });
                }
                future::ready(())
            });
            let secrets = secrets.for_each(|event| {
                if let Ok(event) = event {
                    known.credentials.learn(event, cluster, credentials);
                }
                future::ready(())
            });
            tokio::join!(pods, secrets);
        };
        (this, work)
    }

    /// Every target; of one cluster if it is named.
    pub fn targets(&self, cluster: Option<&str>) -> Vec<Target> {
        let pods = self.pods.lock();
        let all = pods.now.values().flatten();
        all.filter(|target| cluster.is_none_or(|name| target.cluster.as_str() == name)).cloned().collect()
    }

    /// The target in this pod of this cluster.
    pub fn target(&self, cluster: &ClusterName, pod: &str, source: Source) -> Option<Target> {
        let pods = self.pods.lock();
        let targets = pods.now.get(&ObjectKey::new(&cluster.namespace(), pod))?;
        targets.iter().find(|target| target.source == source).cloned()
    }

    /// The credentials for a client of this cluster. `None` if the cluster has no such kubeconfig, or a wrong
    /// one.
    pub fn credentials(&self, cluster: &ClusterName) -> Option<Arc<Credentials>> {
        self.credentials.lock().now.get(cluster).cloned()
    }

    /// The status of the watches.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// Whether everything has been listed once.
    pub fn is_known(&self) -> bool {
        self.pods.lock().listed && self.credentials.lock().listed
    }
}

fn pod_key(pod: &Cached<Pod>) -> Option<ObjectKey> {
    Some(ObjectKey::new(&pod.namespace()?, &pod.name_any()))
}

fn cluster(secret: &Secret) -> Option<ClusterName> {
    ClusterName::of_namespace(secret.metadata.namespace.as_deref()?)
}

fn credentials(secret: &Secret) -> Option<Arc<Credentials>> {
    let text = secret.data.as_ref()?.get(KUBECONFIG)?;
    let parsed = Kubeconfig::parse(&String::from_utf8_lossy(&text.0)).map_err(|error| error.to_string());
    match parsed.and_then(|kubeconfig| Credentials::of(&kubeconfig)) {
        Ok(credentials) => Some(Arc::new(credentials)),
        Err(error) => {
            let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
            warn!(namespace, secret = SECRET, error, "metrics of this cluster cannot be read with that");
            None
        }
    }
}

/// What is made of the objects of a watch.
#[derive(Debug)]
struct Listed<K, V>(Mutex<Lists<K, V>>);

#[derive(Debug)]
struct Lists<K, V> {
    now: HashMap<K, V>,
    /// What an unfinished list has brought so far.
    coming: HashMap<K, V>,
    listed: bool,
}

impl<K, V> Default for Listed<K, V> {
    fn default() -> Self {
        Self(Mutex::new(Lists { now: HashMap::new(), coming: HashMap::new(), listed: false }))
    }
}

impl<K: Hash + Eq, V> Listed<K, V> {
    fn learn<T>(&self, event: Event<T>, key: fn(&T) -> Option<K>, value: impl Fn(&T) -> Option<V>) {
        let mut lists = self.lock();
        let lists = &mut *lists;
        let put = |map: &mut HashMap<K, V>, object: T| {
            let Some(key) = key(&object) else { return };
            match value(&object) {
                Some(value) => drop(map.insert(key, value)),
                None => drop(map.remove(&key)),
            }
        };
        match event {
            Event::Init => lists.coming = HashMap::new(),
            Event::InitApply(object) => put(&mut lists.coming, object),
            Event::InitDone => {
                lists.now = std::mem::take(&mut lists.coming);
                lists.listed = true;
            }
            Event::Apply(object) => put(&mut lists.now, object),
            Event::Delete(object) => {
                if let Some(key) = key(&object) {
                    lists.now.remove(&key);
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lists<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_list_leaves_out_is_gone_only_once_the_list_is_whole() {
        let listed = Listed::<u32, u32>::default();
        let learn = |event| listed.learn(event, |number: &u32| Some(*number), |number| Some(*number));
        let known = || {
            let mut known: Vec<u32> = listed.lock().now.keys().copied().collect();
            known.sort_unstable();
            known
        };
        for event in [Event::Init, Event::InitApply(1), Event::InitApply(2)] {
            learn(event);
        }
        assert!(known().is_empty() && !listed.lock().listed);
        learn(Event::InitDone);
        assert_eq!(known(), [1, 2]);
        learn(Event::Apply(3));
        learn(Event::Delete(1));
        assert_eq!(known(), [2, 3]);
        for event in [Event::Init, Event::InitApply(3)] {
            learn(event);
        }
        assert_eq!(known(), [2, 3]);
        learn(Event::InitDone);
        assert_eq!(known(), [3]);
    }
}
