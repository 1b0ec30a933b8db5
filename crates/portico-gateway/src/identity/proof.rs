//! What a connection has proven, for each cluster: the thing its streams rest on, and that falls as a whole.
//!
//! A stream keeps one word: its proof. A connection keeps its few proofs. And the gateway keeps a list of all proofs, so that a
//! revocation finds them; which streams rest on a fallen one is found by looking at all streams, which is rare and cheap.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portico_api::names::ClusterName;
use portico_tunnel::Presented;
use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::Semaphore;

use super::places::MOST_PER_CONNECTION;
use super::reviewed::Reviewed;
use super::{Hash, StaticTokens};

/// That a connection may open the authorities of one cluster.
#[derive(Debug)]
pub(crate) struct Proof {
    cluster: ClusterName,
    /// The latest that was verified: with a new token, streams opened with an older one live on.
    basis: Mutex<Basis>,
    fallen: AtomicBool,
    registry: Arc<Registry>,
    slot: usize,
}

/// What was shown and verified.
#[derive(Debug, Clone)]
pub(crate) enum Basis {
    /// The certificate of the connection.
    Certificate(Arc<Presented>),
    /// A token of the static file.
    Token(Hash),
    /// A token that the API server of the cluster was asked about.
    Reviewed(Arc<Reviewed>),
}

impl Proof {
    /// Whether nothing rests on it any more.
    pub(crate) fn has_fallen(&self) -> bool {
        self.fallen.load(SeqCst)
    }

    /// For whom it stands.
    pub(super) fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// Looks whether it still stands; if not, why not. Only the first to see it fall is told.
    pub(super) fn falls(&self, tokens: Option<&StaticTokens>) -> Option<String> {
        let basis = lock(&self.basis).clone();
        let why = match basis {
            Basis::Certificate(certificate) => {
                certificate.still_identifies(self.cluster.as_str()).err()?.to_string()
            }
            Basis::Token(hash) => {
                if tokens.and_then(|tokens| tokens.owner(&hash)).is_some_and(|owner| owner == self.cluster) {
                    return None;
                }
                "the token is gone from the file".to_owned()
            }
            Basis::Reviewed(reviewed) => reviewed.why_not()?,
        };
        (!self.fallen.swap(true, SeqCst)).then_some(why)
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        lock(&self.registry.0).try_remove(self.slot);
    }
}

/// The proofs of one connection.
#[derive(Debug)]
pub(crate) struct Held {
    proofs: Mutex<SmallVec<[Arc<Proof>; 1]>>,
    /// Reviews of tokens of this connection that were never accepted.
    pub(super) newcomers: Semaphore,
}

impl Default for Held {
    fn default() -> Self {
        Self { proofs: Mutex::default(), newcomers: Semaphore::new(MOST_PER_CONNECTION) }
    }
}

impl Held {
    /// Notes that the connection may open `cluster`, because of `basis`.
    pub(super) fn rest_on(
        &self,
        registry: &Arc<Registry>,
        cluster: &ClusterName,
        basis: &Basis,
    ) -> Arc<Proof> {
        let mut held = lock(&self.proofs);
        held.retain(|proof| !proof.has_fallen());
        if let Some(proof) = held.iter().find(|proof| proof.cluster == *cluster) {
            *lock(&proof.basis) = basis.clone();
            return Arc::clone(proof);
        }
        let proof = registry.register(cluster.clone(), basis.clone());
        held.push(Arc::clone(&proof));
        proof
    }
}

/// Every proof there is.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<Slab<Weak<Proof>>>);

impl Registry {
    fn register(self: &Arc<Self>, cluster: ClusterName, basis: Basis) -> Arc<Proof> {
        let mut all = lock(&self.0);
        let entry = all.vacant_entry();
        let (slot, registry) = (entry.key(), Arc::clone(self));
        let (basis, fallen) = (Mutex::new(basis), AtomicBool::default());
        let proof = Arc::new(Proof { cluster, basis, fallen, registry, slot });
        entry.insert(Arc::downgrade(&proof));
        proof
    }

    /// Those in use at this moment.
    pub(super) fn all(&self) -> Vec<Arc<Proof>> {
        lock(&self.0).iter().filter_map(|(_, proof)| proof.upgrade()).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can be left half done by a panic elsewhere.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
