//! Accepted credentials. The streams of a connection to one cluster depend on one, and lose it together.
//!
//! A connection has one [`Credential`] per cluster and issuer (client CA, token file, API server), in
//! [`Credentials`]. A stream depends on one. It ends when that issuer revokes, even if another would accept.
//! The [`Registry`] lists those of all connections, so that a revocation finds them.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portico_api::names::Tenant;
use portico_tunnel::Presented;
use slab::Slab;
use smallvec::SmallVec;

use super::changes::Affected;
use super::hash::Hash;
use super::review::ReviewedToken;
use super::tokens::StaticTokens;

/// Permission of one connection to open authorities of one cluster, vouched for by one party. Once revoked,
/// it stays revoked.
#[derive(Debug)]
pub(crate) struct Credential {
    cluster: Tenant,
    issuer: Issuer,
    /// The latest that was accepted: with a new token, streams opened with an older one live on.
    evidence: Mutex<Evidence>,
    revoked: AtomicBool,
    registry: Arc<Registry>,
    slot: usize,
}

/// What was shown and accepted.
#[derive(Debug, Clone)]
pub(super) enum Evidence {
    /// The certificate of the connection.
    Certificate(Arc<Presented>),
    /// A token of the static file.
    StaticToken(Hash),
    /// A token that the API server of the cluster accepted.
    ReviewedToken(ReviewedToken),
}

/// The party that vouches for evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Issuer {
    /// A CA of the files.
    ClientCa,
    /// The file of tokens.
    TokenFile,
    /// The API server of this id. A cluster may have Services with different ones.
    ApiServer(Hash),
}

impl Evidence {
    fn issuer(&self) -> Issuer {
        match self {
            Self::Certificate(_) => Issuer::ClientCa,
            Self::StaticToken(_) => Issuer::TokenFile,
            Self::ReviewedToken(reviewed) => Issuer::ApiServer(*reviewed.reviewer.id()),
        }
    }
}

impl Credential {
    /// Whether the streams that rest on it must end.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(SeqCst)
    }

    pub(super) fn cluster(&self) -> &Tenant {
        &self.cluster
    }

    /// Whether it may not hold any more.
    pub(super) fn is_affected(&self, affected: Affected) -> bool {
        match affected {
            Affected::All => true,
            Affected::ReviewedTokens => matches!(self.issuer, Issuer::ApiServer(_)),
        }
    }

    /// Why its evidence does not hold any more.
    pub(super) fn why_invalid(&self, tokens: Option<&StaticTokens>) -> Option<String> {
        let evidence = lock(&self.evidence).clone();
        match evidence {
            Evidence::Certificate(certificate) => {
                certificate.still_identifies(&self.cluster).err().map(|invalid| invalid.to_string())
            }
            Evidence::StaticToken(hash) => {
                let owner = tokens.and_then(|tokens| tokens.owner(&hash));
                (owner.as_ref() != Some(&self.cluster)).then(|| "the token is gone from the file".to_owned())
            }
            Evidence::ReviewedToken(reviewed) => reviewed.state.why_refused(),
        }
    }

    /// Revokes it if its evidence does not hold any more. Returns why, to the call that revoked it.
    pub(super) fn revoke_if_invalid(&self, tokens: Option<&StaticTokens>) -> Option<String> {
        let why = self.why_invalid(tokens)?;
        (!self.revoked.swap(true, SeqCst)).then_some(why)
    }

    /// The token it rests on, if that is to be reviewed again now.
    pub(super) fn due_token(&self) -> Option<ReviewedToken> {
        match &*lock(&self.evidence) {
            Evidence::ReviewedToken(reviewed) if reviewed.state.is_due() => Some(reviewed.clone()),
            _ => None,
        }
    }
}

impl Drop for Credential {
    fn drop(&mut self) {
        lock(&self.registry.0).try_remove(self.slot);
    }
}

/// The credentials of one connection, by cluster and issuer. Nearly always one.
#[derive(Debug, Default)]
pub(crate) struct Credentials {
    held: Mutex<SmallVec<[Arc<Credential>; 1]>>,
}

impl Credentials {
    /// Notes that the connection may open `cluster`, because of `evidence`.
    pub(super) fn accept(
        &self,
        registry: &Arc<Registry>,
        cluster: &Tenant,
        evidence: &Evidence,
    ) -> Arc<Credential> {
        let mut held = lock(&self.held);
        held.retain(|credential| !credential.is_revoked());
        let issuer = evidence.issuer();
        let same = |held: &&Arc<Credential>| held.cluster == *cluster && held.issuer == issuer;
        if let Some(credential) = held.iter().find(same) {
            *lock(&credential.evidence) = evidence.clone();
            return Arc::clone(credential);
        }
        let credential = registry.register(cluster.clone(), issuer, evidence.clone());
        held.push(Arc::clone(&credential));
        credential
    }
}

/// The credentials of all connections.
#[derive(Debug, Default)]
pub(super) struct Registry(Mutex<Slab<Weak<Credential>>>);

impl Registry {
    fn register(self: &Arc<Self>, cluster: Tenant, issuer: Issuer, evidence: Evidence) -> Arc<Credential> {
        let mut all = lock(&self.0);
        let entry = all.vacant_entry();
        let credential = Arc::new(Credential {
            cluster,
            issuer,
            evidence: Mutex::new(evidence),
            revoked: AtomicBool::default(),
            registry: Arc::clone(self),
            slot: entry.key(),
        });
        entry.insert(Arc::downgrade(&credential));
        credential
    }

    /// Returns those in use at this moment.
    pub(super) fn all(&self) -> Vec<Arc<Credential>> {
        lock(&self.0).iter().filter_map(|(_, credential)| credential.upgrade()).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can be left half done by a panic elsewhere.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
