//! The kinds of objects that a control plane is made of: as they are on the seed, and how they are written.
//!
//! Only objects with the labels of a control plane are watched. One that is not among them is asked for
//! before it is first written: what somebody else made under its name is left alone.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{BoxStream, StreamExt};
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Client, ResourceExt};
use portico_api::meta::ObjectKey;
use portico_expose::exposure::MANAGED_BY;
use portico_kube::watch::labelled;
use serde_json::Value;

use super::relists::Relists;
use crate::cache::{Cache, api};
use crate::clusters::Work;
use crate::contention::RepairBackoffs;
use crate::controllers::exposure::{in_cluster, of_namespace};
use crate::managed::{Put, delete, put};
use crate::status::StatusHandle;
use crate::write::{WriteError, request};

/// The backoffs of the objects of one cluster.
pub(super) type Shared = Arc<Mutex<RepairBackoffs>>;

/// The objects of one kind.
pub(super) trait Kind: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;
    /// Whether all objects are known.
    fn is_known(&self) -> bool;
    /// One object.
    fn get(&self, key: &ObjectKey) -> Option<Value>;
    /// The names of all objects with Portico's labels in a namespace.
    fn names_in(&self, namespace: &str) -> Vec<String>;
    /// The names of those that Portico has applied.
    fn ours_in(&self, namespace: &str) -> Vec<String>;
    /// Applies an object.
    fn put<'a>(
        &'a self,
        client: &'a Client,
        key: &'a ObjectKey,
        wanted: &'a Value,
        backoffs: &'a Shared,
    ) -> BoxFuture<'a, Result<Put, WriteError>>;
    /// Deletes an object. Returns whether its deletion began by that.
    fn remove<'a>(
        &'a self,
        client: &'a Client,
        key: &'a ObjectKey,
        backoffs: &'a Shared,
    ) -> BoxFuture<'a, Result<bool, WriteError>>;
}

/// Every kind, and the clusters in whose namespaces something changes.
pub(super) fn all(
    client: &Client,
    relists: &Relists,
    status: &StatusHandle,
) -> (Vec<Box<dyn Kind>>, Vec<BoxStream<'static, Work>>) {
    let kinds = [
        kind::<ConfigMap>(client, relists, status),
        kind::<NetworkPolicy>(client, relists, status),
        kind::<PodDisruptionBudget>(client, relists, status),
        kind::<Service>(client, relists, status),
        kind::<PersistentVolumeClaim>(client, relists, status),
        kind::<StatefulSet>(client, relists, status),
        kind::<Deployment>(client, relists, status),
    ];
    kinds.into_iter().unzip()
}

fn kind<K: Resource + Send + Sync + 'static>(
    client: &Client,
    relists: &Relists,
    status: &StatusHandle,
) -> (Box<dyn Kind>, BoxStream<'static, Work>) {
    let selector = format!("{}={},{}", MANAGED_BY.0, MANAGED_BY.1, portico_hosting::CLUSTER);
    let (objects, changes) = followed::<K>(client, relists, &selector, status);
    (Box::new(Objects(objects)), changes)
}

/// The objects that a selector fits, in namespaces of clusters, and the clusters where they change.
pub(super) fn followed<K: Resource + Send + Sync + 'static>(
    client: &Client,
    relists: &Relists,
    selector: &str,
    status: &StatusHandle,
) -> (Arc<Cache<K>>, BoxStream<'static, Work>) {
    let (cache, writer) = Cache::new();
    let cache = Arc::new(cache);
    let watched = labelled(api::<K>(client, ""), selector);
    let changes = cache.follow(watched, in_cluster, writer, status.clone());
    let relists = relists.clone();
    (cache, changes.map(of_namespace(move || relists.note())).boxed())
}

struct Objects<K: Resource + 'static>(Arc<Cache<K>>);

impl<K: Resource + Send + Sync + 'static> Objects<K> {
    async fn apply(
        &self,
        client: &Client,
        key: &ObjectKey,
        wanted: &Value,
        backoffs: &Shared,
    ) -> Result<Put, WriteError> {
        if self.0.get(&key.namespace, &key.name).is_none() {
            let api = api::<K>(client, &key.namespace);
            let found = request(&format!("reading {} {key}", K::KIND), api.get_opt(&key.name)).await?;
            if found.is_some_and(|found| !found.is_ours()) {
                return Err(WriteError::Foreign { kind: K::KIND, key: key.clone() });
            }
        }
        put(client, &self.0, key, wanted, |record| {
            let mut backoffs = backoffs.lock().unwrap_or_else(PoisonError::into_inner);
            record(backoffs.of(K::KIND, &key.name))
        })
        .await
    }

    async fn delete(&self, client: &Client, key: &ObjectKey, backoffs: &Shared) -> Result<bool, WriteError> {
        let Some(value) = self.get(key) else { return Ok(false) };
        let deleted = delete(client, &self.0, key, &value).await?;
        backoffs.lock().unwrap_or_else(PoisonError::into_inner).of(K::KIND, &key.name).deleted();
        Ok(deleted)
    }
}

impl<K: Resource + Send + Sync + 'static> Kind for Objects<K> {
    fn name(&self) -> &'static str {
        K::KIND
    }

    fn is_known(&self) -> bool {
        self.0.is_known()
    }

    fn get(&self, key: &ObjectKey) -> Option<Value> {
        self.0.get(&key.namespace, &key.name).map(|seen| seen.value())
    }

    fn names_in(&self, namespace: &str) -> Vec<String> {
        self.0.in_namespace(namespace).iter().map(|seen| seen.name_any()).collect()
    }

    fn ours_in(&self, namespace: &str) -> Vec<String> {
        let objects = self.0.in_namespace(namespace);
        objects.iter().filter(|seen| seen.is_ours()).map(|seen| seen.name_any()).collect()
    }

    fn put<'a>(
        &'a self,
        client: &'a Client,
        key: &'a ObjectKey,
        wanted: &'a Value,
        backoffs: &'a Shared,
    ) -> BoxFuture<'a, Result<Put, WriteError>> {
        self.apply(client, key, wanted, backoffs).boxed()
    }

    fn remove<'a>(
        &'a self,
        client: &'a Client,
        key: &'a ObjectKey,
        backoffs: &'a Shared,
    ) -> BoxFuture<'a, Result<bool, WriteError>> {
        self.delete(client, key, backoffs).boxed()
    }
}
