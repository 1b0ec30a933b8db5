//! Who owns a key when several Services claim it: the eldest.
//!
//! A Service in any namespace may claim any host name, so the order must not depend on who is heard of first: else a restart
//! of the gateway could hand a cluster's name to somebody else. The younger claims wait; when the elder goes, the next in
//! age owns the key at once.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::route::RouteKey;

/// One exposed port of one Service, as the book numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    /// The Service's slot in the book.
    pub(crate) slot: u32,
    /// Index into the Service's exposed ports.
    pub(crate) port: u16,
}

/// All claims to one key, the eldest first; never empty. Nearly every key has one, which then costs no allocation.
#[derive(Debug)]
enum Claimants {
    One(Claim),
    Many(Vec<Claim>),
}

/// Every claimed key.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_key: HashMap<RouteKey, Claimants>,
}

impl Claims {
    /// Adds a claim; `order` says which of two is the elder. Returns the claim that owned the key before, if any.
    pub(crate) fn add(
        &mut self,
        key: RouteKey,
        claim: Claim,
        order: impl Fn(Claim, Claim) -> Ordering,
    ) -> Option<Claim> {
        match self.by_key.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Claimants::One(claim));
                None
            }
            Entry::Occupied(mut entry) => {
                let mut all = entry.get().as_slice().to_vec();
                let owner = all.first().copied();
                let place = all.partition_point(|&other| order(other, claim) == Ordering::Less);
                all.insert(place, claim);
                entry.insert(Claimants::Many(all));
                owner
            }
        }
    }

    /// Takes a claim back. Returns who owns the key now.
    pub(crate) fn withdraw(&mut self, key: &RouteKey, claim: Claim) -> Option<Claim> {
        let claimants = self.by_key.get_mut(key)?;
        let left: Vec<Claim> = claimants.as_slice().iter().copied().filter(|&other| other != claim).collect();
        match left[..] {
            [] => {
                self.by_key.remove(key);
                return None;
            }
            [only] => *claimants = Claimants::One(only),
            _ => *claimants = Claimants::Many(left),
        }
        self.owner(key)
    }

    /// The claim that owns `key`.
    pub(crate) fn owner(&self, key: &RouteKey) -> Option<Claim> {
        self.by_key.get(key)?.as_slice().first().copied()
    }

    /// Whether no key is claimed.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Every claim that waits for an elder one: the key, the owner, the one that waits.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&RouteKey, Claim, Claim)> {
        self.by_key.iter().flat_map(|(key, claimants)| {
            let (owner, waiting) = match claimants.as_slice() {
                [owner, waiting @ ..] => (Some(*owner), waiting),
                [] => (None, &[][..]),
            };
            owner.into_iter().flat_map(move |owner| waiting.iter().map(move |&claim| (key, owner, claim)))
        })
    }
}

impl Claimants {
    fn as_slice(&self) -> &[Claim] {
        match self {
            Self::One(claim) => std::slice::from_ref(claim),
            Self::Many(claims) => claims,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RouteKey = RouteKey::Port(30_001);

    /// Smaller slot, elder Service.
    fn claim(slot: u32) -> Claim {
        Claim { slot, port: 0 }
    }

    fn claims(slots: &[u32]) -> Claims {
        let mut claims = Claims::default();
        for &slot in slots {
            claims.add(KEY, claim(slot), |a, b| a.cmp(&b));
        }
        claims
    }

    #[test]
    fn the_eldest_owns_the_key_whoever_came_first() {
        assert_eq!(claims(&[2, 1, 3]).owner(&KEY), Some(claim(1)));
        assert_eq!(claims(&[3, 2, 1]).owner(&KEY), Some(claim(1)));
    }

    #[test]
    fn when_the_eldest_goes_the_next_in_age_owns_the_key() {
        let mut claims = claims(&[3, 1, 2]);
        assert_eq!(claims.withdraw(&KEY, claim(1)), Some(claim(2)));
        assert_eq!(claims.withdraw(&KEY, claim(3)), Some(claim(2)));
        assert_eq!(claims.withdraw(&KEY, claim(2)), None);
        assert_eq!(claims.owner(&KEY), None);
    }

    #[test]
    fn all_but_the_eldest_wait() {
        let claims = claims(&[3, 1, 2]);
        let waiting: Vec<_> =
            claims.waiting().map(|(_, owner, waiting)| (owner.slot, waiting.slot)).collect();
        assert_eq!(waiting, [(1, 2), (1, 3)]);
    }
}
