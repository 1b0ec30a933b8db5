//! One object that the controller keeps, as it was last seen, and the fate of each write.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{BoxStream, StreamExt};
use k8s_openapi::Resource;
use kube::Client;
use kube::core::Status;
use portico_api::meta::ObjectKey;
use portico_expose::exposure::MANAGED_BY;
use portico_kube::apply::{Applied, apply, make_once};
use portico_kube::cached::Cached;
use portico_kube::watch::progress;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use crate::cache::{Cache, api};
use crate::contention::RepairBackoff;
use crate::status::StatusHandle;
use crate::write::{REQUEST_TIMEOUT, RequestError, WriteError, is_terminating, only_this, request};

/// What is under the name of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    Absent,
    /// Portico has applied it, or an administrator has handed it over.
    Ours,
    /// Somebody else's.
    Foreign,
}

/// What applying an object did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Put {
    /// It was as wanted.
    Unchanged,
    Changed,
    /// It was changed because somebody else had changed or deleted what was written before, as this says.
    Back(String),
}

/// An object of any kind that the controller keeps.
pub(crate) trait Managed: Send + Sync {
    /// The kind of the object.
    fn kind(&self) -> &'static str;
    /// Namespace and name.
    fn key(&self) -> &ObjectKey;
    /// Whether it is known if it exists.
    fn is_known(&self) -> bool;
    /// The object as it is.
    fn value(&self) -> Option<Value>;
    /// Whose it is.
    fn presence(&self) -> Presence;
    /// Applies it.
    fn put<'a>(&'a self, client: &'a Client, wanted: &'a Value) -> BoxFuture<'a, Result<Put, WriteError>>;
    /// Deletes it if Portico has applied it. One that is only handed over stays. Returns whether its deletion
    /// began by that.
    fn remove<'a>(&'a self, client: &'a Client) -> BoxFuture<'a, Result<bool, WriteError>>;
    /// The other writer that this object is left to now.
    fn yielded_to(&self, now: Instant) -> Option<String>;
    /// When time alone changes that.
    fn due(&self) -> Option<Instant>;
    /// Forgets what was written: another replica may have since.
    fn forget(&self);
}

/// The object of one kind and name.
pub(crate) struct ManagedObject<K: Resource + 'static> {
    cache: Arc<Cache<K>>,
    key: ObjectKey,
    backoff: Mutex<RepairBackoff>,
}

impl<K: Resource + Send + Sync + 'static> ManagedObject<K> {
    /// Knows nothing yet. The stream follows the object, and yields at every change.
    pub(crate) fn new(
        client: &Client,
        key: ObjectKey,
        status: &StatusHandle,
    ) -> (Self, BoxStream<'static, ()>) {
        let (cache, writer) = Cache::new();
        let cache = Arc::new(cache);
        let watched = progress(api::<K>(client, &key.namespace), Some(&key.name));
        let changes = cache.follow(watched, |_| true, writer, status.clone()).map(drop).boxed();
        (Self { cache, key, backoff: Mutex::default() }, changes)
    }

    /// The object as the API server has it now, for the one decision that must not rest on an old view.
    pub(crate) async fn read(&self, client: &Client) -> Result<Option<Value>, WriteError> {
        let api = api::<K>(client, &self.key.namespace);
        let found =
            request(&format!("reading {} {}", K::KIND, self.key), api.get_opt(&self.key.name)).await?;
        Ok(found.map(|seen| seen.value()))
    }

    fn seen(&self) -> Option<Arc<Cached<K>>> {
        self.cache.get(&self.key.namespace, &self.key.name)
    }

    fn backoff(&self) -> MutexGuard<'_, RepairBackoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn apply(&self, client: &Client, wanted: &Value) -> Result<Put, WriteError> {
        put(client, &self.cache, &self.key, wanted, |record| record(&mut self.backoff())).await
    }

    async fn delete(&self, client: &Client) -> Result<bool, WriteError> {
        let Some(seen) = self.seen().filter(|seen| seen.is_ours()) else { return Ok(false) };
        let deleted = delete(client, &self.cache, &self.key, &seen.value()).await?;
        self.backoff().deleted();
        Ok(deleted)
    }
}

/// Applies an object, and lets `record` note what became of it.
pub(crate) async fn put<K: Resource + Send + Sync + 'static>(
    client: &Client,
    cache: &Cache<K>,
    key: &ObjectKey,
    wanted: &Value,
    record: impl FnOnce(&dyn Fn(&mut RepairBackoff) -> Option<String>) -> Option<String>,
) -> Result<Put, WriteError> {
    let current = cache.get(&key.namespace, &key.name);
    let applied = applied(client, key, wanted, current.as_deref()).await?;
    let changed = matches!(applied, Applied::Changed(_));
    let back = record(&|backoff| backoff.applied(wanted, current.as_deref(), changed, Instant::now()));
    let Applied::Changed(object) = applied else { return Ok(Put::Unchanged) };
    cache.written(object);
    Ok(back.map_or(Put::Changed, |done| Put::Back(format!("{} {key} {done}", K::KIND))))
}

/// Applies an object that was last seen as `current`.
pub(crate) async fn applied<K: Resource + Send + Sync + 'static>(
    client: &Client,
    key: &ObjectKey,
    wanted: &Value,
    current: Option<&Cached<K>>,
) -> Result<Applied<Cached<K>>, WriteError> {
    let api = api::<K>(client, &key.namespace);
    let applied = timeout(REQUEST_TIMEOUT, apply(&api, wanted, current)).await;
    let applied = applied.map_err(|_| RequestError::NoAnswer(format!("applying {} {key}", K::KIND)))?;
    applied.map_err(|source| WriteError::Apply { kind: K::KIND, source })
}

/// Makes an object of which there must never be a second version.
pub(crate) async fn made_once<K: Resource + Send + Sync + 'static>(
    client: &Client,
    key: &ObjectKey,
    wanted: &Value,
) -> Result<Cached<K>, WriteError> {
    let api = api::<K>(client, &key.namespace);
    let made = timeout(REQUEST_TIMEOUT, make_once(&api, wanted)).await;
    let made = made.map_err(|_| RequestError::NoAnswer(format!("making {} {key}", K::KIND)))?;
    made.map_err(|source| WriteError::Apply { kind: K::KIND, source })
}

/// Deletes `object`, and none that somebody made anew under its name. Returns whether its deletion began by
/// that. An object that is being deleted is left to end.
pub(crate) async fn delete<K: Resource + Send + Sync + 'static>(
    client: &Client,
    cache: &Cache<K>,
    key: &ObjectKey,
    object: &Value,
) -> Result<bool, RequestError> {
    if is_terminating(object) {
        return Ok(false);
    }
    let params = only_this(object);
    let api = api::<K>(client, &key.namespace);
    let deleted = match request(&format!("deleting {} {key}", K::KIND), api.delete(&key.name, &params)).await
    {
        Ok(_) => true,
        Err(error) if error.status().is_some_and(Status::is_not_found) => false,
        Err(error) => return Err(error),
    };
    cache.gone(&key.namespace, &key.name);
    Ok(deleted)
}

impl<K: Resource + Send + Sync + 'static> Managed for ManagedObject<K> {
    fn kind(&self) -> &'static str {
        K::KIND
    }

    fn key(&self) -> &ObjectKey {
        &self.key
    }

    fn is_known(&self) -> bool {
        self.cache.is_known()
    }

    fn value(&self) -> Option<Value> {
        self.seen().map(|seen| seen.value())
    }

    fn presence(&self) -> Presence {
        let Some(seen) = self.seen() else { return Presence::Absent };
        let value = seen.value();
        let labels = value.pointer("/metadata/labels").and_then(|labels| labels.get(MANAGED_BY.0));
        let labelled = labels.and_then(Value::as_str) == Some(MANAGED_BY.1);
        if labelled || seen.is_ours() { Presence::Ours } else { Presence::Foreign }
    }

    fn put<'a>(&'a self, client: &'a Client, wanted: &'a Value) -> BoxFuture<'a, Result<Put, WriteError>> {
        self.apply(client, wanted).boxed()
    }

    fn remove<'a>(&'a self, client: &'a Client) -> BoxFuture<'a, Result<bool, WriteError>> {
        self.delete(client).boxed()
    }

    fn yielded_to(&self, now: Instant) -> Option<String> {
        let mut backoff = self.backoff();
        if backoff.may_write(now) { None } else { backoff.yielded_to().map(str::to_owned) }
    }

    fn due(&self) -> Option<Instant> {
        self.backoff().due()
    }

    fn forget(&self) {
        *self.backoff() = RepairBackoff::default();
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use serde_json::json;

    use super::*;
    use crate::testing::FakeApi;

    #[tokio::test]
    async fn what_is_being_deleted_is_not_deleted_again() {
        let (cache, _writer) = Cache::<Service>::new();
        let key = ObjectKey::new("cluster-a", "front-loadbalancer");
        let held = json!({"metadata": {"namespace": key.namespace, "name": key.name, "uid": "1",
            "finalizers": ["service.kubernetes.io/load-balancer-cleanup"],
            "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        // It panics at any DELETE.
        let api = FakeApi::default();
        assert!(!delete(&api.client(), &cache, &key, &held).await.unwrap());
    }
}
