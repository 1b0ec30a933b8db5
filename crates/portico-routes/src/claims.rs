//! Who owns a key when several Services claim it: the eldest, after what follows from a Cluster object.
//!
//! A Service in any namespace may claim any host name, so the order must not depend on who is heard of first: else a restart
//! of the gateway could hand a cluster's name to somebody else. The other claims wait, the eldest first; when the owner goes, the next
//! owns the key at once.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use crate::route::{KeyKind, RouteKey};

/// One key of one exposed port of one Service, as the book numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    /// The Service's slot in the book.
    pub(crate) slot: u32,
    /// Index into the Service's exposed ports.
    pub(crate) port: u16,
    /// Which of the port's keys.
    pub(crate) kind: KeyKind,
}

/// Every claimed key. The keys themselves stand in the book, where `key_of` finds the one that a claim is for.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// The eldest claim to each key.
    owners: HashTable<Claim>,
    hasher: RandomState,
    /// The other claims to a key, the eldest first; never an empty list. Nearly every key has none.
    waiting: BTreeMap<RouteKey, Vec<Claim>>,
}

impl Claims {
    /// Adds a claim to `key`; `order` says which of two is the elder. Returns the claim that owned the key before, if any.
    pub(crate) fn add(
        &mut self,
        key: &RouteKey,
        mut claim: Claim,
        key_of: impl Fn(Claim) -> RouteKey,
        order: impl Fn(Claim, Claim) -> Ordering,
    ) -> Option<Claim> {
        let hash = self.hasher.hash_one(key);
        let Some(owner) = self.owners.find_mut(hash, |&other| key_of(other) == *key) else {
            self.owners.insert_unique(hash, claim, |&other| self.hasher.hash_one(key_of(other)));
            return None;
        };
        let before = *owner;
        if order(claim, before) == Ordering::Less {
            std::mem::swap(owner, &mut claim);
        }
        let waiting = self.waiting.entry(key.clone()).or_default();
        let place = waiting.partition_point(|&other| order(other, claim) == Ordering::Less);
        waiting.insert(place, claim);
        Some(before)
    }

    /// Takes a claim to `key` back. Returns who owns the key now.
    pub(crate) fn withdraw(
        &mut self,
        key: &RouteKey,
        claim: Claim,
        key_of: impl Fn(Claim) -> RouteKey,
    ) -> Option<Claim> {
        let hash = self.hasher.hash_one(key);
        let mut owner = self.owners.find_entry(hash, |&other| key_of(other) == *key).ok()?;
        let Some(waiting) = self.waiting.get_mut(key) else {
            if *owner.get() == claim {
                owner.remove();
                return None;
            }
            return Some(*owner.get());
        };
        if *owner.get() == claim {
            *owner.get_mut() = waiting.remove(0);
        } else {
            waiting.retain(|&other| other != claim);
        }
        if waiting.is_empty() {
            self.waiting.remove(key);
        }
        Some(*owner.get())
    }

    /// The claim that owns `key`.
    pub(crate) fn owner(&self, key: &RouteKey, key_of: impl Fn(Claim) -> RouteKey) -> Option<Claim> {
        self.owners.find(self.hasher.hash_one(key), |&other| key_of(other) == *key).copied()
    }

    /// Whether no key is claimed.
    pub(crate) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Every claim that waits for an elder one, with its key.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&RouteKey, Claim)> {
        self.waiting.iter().flat_map(|(key, claims)| claims.iter().map(move |&claim| (key, claim)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RouteKey = RouteKey::Port(30_001);

    /// Smaller slot, elder Service.
    fn claim(slot: u32) -> Claim {
        Claim { slot, port: 0, kind: KeyKind::Port }
    }

    fn key_of(_: Claim) -> RouteKey {
        KEY
    }

    fn claims(slots: &[u32]) -> Claims {
        let mut claims = Claims::default();
        for &slot in slots {
            claims.add(&KEY, claim(slot), key_of, |a, b| a.cmp(&b));
        }
        claims
    }

    #[test]
    fn the_eldest_owns_the_key_whoever_came_first() {
        assert_eq!(claims(&[2, 1, 3]).owner(&KEY, key_of), Some(claim(1)));
        assert_eq!(claims(&[3, 2, 1]).owner(&KEY, key_of), Some(claim(1)));
    }

    #[test]
    fn when_the_eldest_goes_the_next_in_age_owns_the_key() {
        let mut claims = claims(&[3, 1, 2]);
        assert_eq!(claims.withdraw(&KEY, claim(1), key_of), Some(claim(2)));
        assert_eq!(claims.withdraw(&KEY, claim(3), key_of), Some(claim(2)));
        assert_eq!(claims.withdraw(&KEY, claim(2), key_of), None);
        assert_eq!(claims.owner(&KEY, key_of), None);
    }

    #[test]
    fn all_but_the_eldest_wait() {
        let claims = claims(&[3, 1, 2]);
        let waiting: Vec<_> = claims.waiting().map(|(_, claim)| claim.slot).collect();
        assert_eq!(waiting, [2, 3]);
    }
}
