//! Bounds work that peers cause, in all and for each key. So a peer that causes much leaves others their
//! share. A key is what separates peers: a cluster, or an address.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A bounded number of permits.
#[derive(Debug)]
pub struct Permits<K> {
    all: Arc<Semaphore>,
    most: usize,
    of_each: usize,
    /// The keys with work under way or waiting, and the permits of each.
    keys: Mutex<HashMap<K, Weak<Semaphore>>>,
}

/// One permit or several at once, given back on drop.
#[derive(Debug)]
#[must_use]
pub struct Permit {
    _key: Option<OwnedSemaphorePermit>,
    _all: Option<OwnedSemaphorePermit>,
}

impl<K: Clone + Eq + Hash> Permits<K> {
    /// So many permits, and so many of each key.
    #[must_use]
    pub fn new(all: usize, of_each: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), most: all, of_each, keys: Mutex::default() }
    }

    /// Waits for a permit of the key first: what waits for it takes none of the others' permits. In the order
    /// of the calls.
    pub async fn acquire(&self, key: &K) -> Permit {
        // No semaphore is ever closed.
        let of_key = self.of_key(key).acquire_owned().await.ok();
        Permit { _key: of_key, _all: Arc::clone(&self.all).acquire_owned().await.ok() }
    }

    /// Returns a permit if there is one.
    pub fn try_acquire(&self, key: &K) -> Option<Permit> {
        self.try_acquire_many(key, 1)
    }

    /// Returns so many at once, or none.
    pub fn try_acquire_many(&self, key: &K, many: u32) -> Option<Permit> {
        let of_key = self.of_key(key).try_acquire_many_owned(many).ok()?;
        let all = Arc::clone(&self.all).try_acquire_many_owned(many).ok()?;
        Some(Permit { _key: Some(of_key), _all: Some(all) })
    }

    /// How many are given out now.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.most - self.all.available_permits()
    }

    fn of_key(&self, key: &K) -> Arc<Semaphore> {
        // Nothing in here can be left half done by a panic elsewhere.
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = keys.get(key).and_then(Weak::upgrade) {
            return known;
        }
        keys.retain(|_, semaphore| semaphore.strong_count() > 0);
        let semaphore = Arc::new(Semaphore::new(self.of_each));
        keys.insert(key.clone(), Arc::downgrade(&semaphore));
        semaphore
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_key_that_has_its_share_leaves_the_rest_to_others() {
        let permits = Permits::new(3, 2);
        let mut held: Vec<_> = (0..2).map(|_| permits.try_acquire(&"busy").unwrap()).collect();
        let waits = permits.acquire(&"busy");
        let mut waits = std::pin::pin!(waits);
        assert!(permits.try_acquire(&"busy").is_none() && waits.as_mut().now_or_never().is_none());
        held.push(permits.acquire(&"other").now_or_never().unwrap());
        assert!(permits.try_acquire(&"third").is_none(), "all are taken");
        drop(held.remove(0));
        assert!(permits.try_acquire(&"busy").is_none(), "it belongs to the one that waits");
        assert!(waits.now_or_never().is_some());
        assert!(permits.try_acquire(&"third").is_some());
    }

    #[test]
    fn several_at_once_are_given_whole_or_not_at_all() {
        let permits = Permits::new(5, 3);
        let held = permits.try_acquire_many(&"busy", 2).unwrap();
        assert!(permits.try_acquire_many(&"busy", 2).is_none(), "its share has one left");
        let other = permits.try_acquire_many(&"other", 2).unwrap();
        assert!(permits.try_acquire_many(&"third", 2).is_none(), "one is left in all");
        assert_eq!(permits.in_use(), 4, "what was refused took none");
        drop((held, other));
        assert!(permits.in_use() == 0 && permits.try_acquire_many(&"busy", 3).is_some());
    }

    #[test]
    fn keys_without_work_are_forgotten() {
        let permits = Permits::new(1, 1);
        for key in 0..100 {
            drop(permits.try_acquire(&key));
        }
        assert_eq!(permits.keys.lock().unwrap().len(), 1);
    }
}
