//! Which Service owns a key when several claim it: one planned for a Cluster first, then the oldest.
//!
//! A Service in any namespace may claim any host name. The order of arrival must not decide: otherwise a
//! restart of the gateway could give the name of one cluster to another. The other claims wait, the oldest
//! first; when the owner withdraws, the next claim owns the key at once.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::meta::ObjectKey;
use smallvec::SmallVec;

use crate::facts::{Age, ExposedPort, Origin, ServiceFacts};
use crate::route::RouteKey;

/// A port of a Service, as the claimant of a key. The smaller of two claims owns the key.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) service: Arc<ServiceFacts>,
    /// Index into the Service's exposed ports.
    port: u16,
}

/// Every claimed key.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// The claims to each key in their order, never none: the first owns the key. Nearly every key has one.
    by_key: BTreeMap<RouteKey, SmallVec<[Claim; 1]>>,
}

impl Claim {
    /// A claimant for each exposed port of `service`.
    pub(crate) fn of_each_port(service: &Arc<ServiceFacts>) -> impl Iterator<Item = Self> {
        let ports = 0u16..u16::try_from(service.ports.len()).unwrap_or(u16::MAX);
        ports.map(|port| Self { service: Arc::clone(service), port })
    }

    /// The port that claims.
    pub(crate) fn port(&self) -> &ExposedPort {
        &self.service.ports[usize::from(self.port)]
    }

    /// What decides between two claims: the origin of their Services, their age, their names, the order of
    /// ports.
    fn rank(&self) -> (Origin, &Age, &ObjectKey, u16) {
        (self.service.origin, &self.service.age, &self.service.key, self.port)
    }
}

impl Claims {
    /// Adds a claim to `key`. Returns the claim that owned the key before, if any.
    pub(crate) fn add(&mut self, key: RouteKey, claim: Claim) -> Option<Claim> {
        let claims = self.by_key.entry(key).or_default();
        let owner = claims.first().cloned();
        let position = claims.partition_point(|other| *other < claim);
        claims.insert(position, claim);
        owner
    }

    /// Removes a claim to `key`. Returns the claim that owns the key now, if any.
    pub(crate) fn withdraw(&mut self, key: &RouteKey, claim: &Claim) -> Option<&Claim> {
        let claims = self.by_key.get_mut(key)?;
        claims.retain(|other| other != claim);
        if claims.is_empty() {
            self.by_key.remove(key);
            return None;
        }
        self.owner(key)
    }

    /// The claim that owns `key`.
    pub(crate) fn owner(&self, key: &RouteKey) -> Option<&Claim> {
        self.by_key.get(key)?.first()
    }

    /// Whether no key is claimed.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Every claim that waits: the key, the claim that owns it, the claim that waits.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&RouteKey, &Claim, &Claim)> {
        self.by_key
            .iter()
            .flat_map(|(key, claims)| claims.iter().skip(1).map(move |waiting| (key, &claims[0], waiting)))
    }
}

// === Claim ===

impl Ord for Claim {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for Claim {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Claim {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for Claim {}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RouteKey = RouteKey::Port(30_001);

    /// The claim of a Service created in this second.
    fn claim(second: i64) -> Claim {
        let created = jiff::Timestamp::from_second(second).unwrap();
        let service = ServiceFacts {
            key: ObjectKey::new("cluster-a", "api"),
            origin: Origin::Written,
            age: Age::new(Some(created), ""),
            types: None,
            ports: Box::default(),
            own_policy: None,
            send_proxy: false,
            api_server_ca: None,
            problems: Box::default(),
        };
        Claim { service: Arc::new(service), port: 0 }
    }

    fn claims(seconds: &[i64]) -> Claims {
        let mut claims = Claims::default();
        for &second in seconds {
            claims.add(KEY, claim(second));
        }
        claims
    }

    #[test]
    fn the_oldest_owns_the_key_in_whatever_order_they_arrive() {
        assert_eq!(claims(&[2, 1, 3]).owner(&KEY), Some(&claim(1)));
        assert_eq!(claims(&[3, 2, 1]).owner(&KEY), Some(&claim(1)));
    }

    #[test]
    fn when_the_oldest_withdraws_the_next_in_age_owns_the_key() {
        let mut claims = claims(&[3, 1, 2]);
        assert_eq!(claims.withdraw(&KEY, &claim(1)), Some(&claim(2)));
        assert_eq!(claims.withdraw(&KEY, &claim(3)), Some(&claim(2)));
        assert_eq!(claims.withdraw(&KEY, &claim(2)), None);
        assert_eq!(claims.owner(&KEY), None);
        assert!(claims.is_empty());
    }

    #[test]
    fn all_but_the_oldest_wait() {
        let claims = claims(&[3, 1, 2]);
        let waiting: Vec<_> = claims.waiting().map(|(_, owner, waiting)| (owner, waiting)).collect();
        assert_eq!(waiting, [(&claim(1), &claim(2)), (&claim(1), &claim(3))]);
    }
}
