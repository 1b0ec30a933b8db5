//! Decides which Service owns a key when several claim it. A Service planned for a Cluster comes first, then
//! one whose namespace is that of the Cluster with this host name, or the longest above it. Then comes one in
//! the namespace of any known Cluster, then the oldest.
//!
//! A Service in any namespace may claim any host name. The order of arrival must not decide: otherwise a
//! restart of the gateway could give the name of one cluster to another. The other claims wait, the oldest
//! first; when the owner gives the key up, the next claim owns it at once.
//!
//! A host name stays with its namespace while its Service is made anew. A claim that waits must not get the
//! clients of the other for that moment. Nor must it get them for ever because it is the older by then. Such
//! a name is *kept* until the Cluster goes or, without a Cluster, until another Service asks for it anew.
//!
//! A file may say anything of its age, or nothing. So in a directory the Service that has a key in force is
//! its *holder*: it comes before all of its rank that ask later. After a start, age and name decide.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use portico_api::meta::ObjectKey;
use portico_api::policy::ClusterPolicy;
use smallvec::SmallVec;

use crate::facts::{Age, ExposedPort, Origin, ServiceFacts};
use crate::route::RouteKey;

/// Most host names kept for one namespace: those of KKP have three. The name kept first goes first.
const MAX_KEPT: usize = 16;

/// A port of a Service, as the claimant of a key. The smaller of two claims owns the key.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) service: Arc<ServiceFacts>,
    pub(crate) rank: Rank,
    /// Index into the Service's exposed ports.
    port: u16,
}

/// By what a Service claims. The smaller comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// It is planned for a Cluster.
    Planned,
    /// By the host name of the Cluster that its namespace is of, or one below. A Service of another namespace
    /// cannot have this rank, whatever its age and its name.
    Named {
        /// How many characters the claimed name has before that of the Cluster. One Cluster may have a host
        /// name above that of another: the longer of the two comes first.
        before: u8,
    },
    /// Its namespace is that of a known Cluster.
    OfCluster,
    /// By nothing but its age.
    Other,
}

/// Every claimed key.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// The claims to each key in their order, never none: the first owns the key, unless it is kept. Nearly
    /// every key has one.
    by_key: BTreeMap<RouteKey, SmallVec<[Claim; 1]>>,
    /// For which namespace a key is kept.
    kept: HashMap<RouteKey, KeptFor>,
    /// The keys of `kept` by namespace, the one kept first at the front.
    kept_by: HashMap<Arc<str>, SmallVec<[RouteKey; 1]>>,
    /// The claim that holds a contested key, since it had the key in force when another asked for it. It is
    /// one of `by_key`.
    holders: HashMap<RouteKey, Claim>,
    /// The keys kept or let go since the last commit.
    kept_changes: BTreeSet<RouteKey>,
}

/// The namespace a key is kept for.
#[derive(Debug)]
struct KeptFor {
    namespace: Arc<str>,
    rank: Rank,
    /// The route table has it.
    is_published: bool,
}

/// The state of a claim that does not own its key.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    pub(crate) key: &'a RouteKey,
    pub(crate) claim: &'a Claim,
    pub(crate) because: Because<'a>,
}

/// Why a claim does not own its key.
#[derive(Debug)]
pub(crate) enum Because<'a> {
    /// Another comes first.
    Owned(&'a Claim),
    /// Another comes first, since it had the key in force when others asked for it.
    Held(&'a Claim),
    /// Another comes first, since its namespace had the key before.
    Returned(&'a Claim),
    /// It is kept for this namespace, which has no claim now.
    Kept(&'a str),
}

impl Claim {
    /// A claimant for each exposed port of `service`, by what holds for all of its keys.
    pub(crate) fn of_each_port(
        service: &Arc<ServiceFacts>,
        cluster_is_known: bool,
    ) -> impl Iterator<Item = Self> {
        let rank = match service.origin {
            Origin::Planned => Rank::Planned,
            Origin::Written if cluster_is_known => Rank::OfCluster,
            Origin::Written => Rank::Other,
        };
        let ports = 0u16..u16::try_from(service.ports.len()).unwrap_or(u16::MAX);
        ports.map(move |port| Self { service: Arc::clone(service), rank, port })
    }

    /// The claim of this port to `key`. `policy` is that of the Cluster of its namespace.
    pub(crate) fn to(&self, key: &RouteKey, policy: Option<&ClusterPolicy>) -> Self {
        let named = policy.and_then(|policy| Rank::named(key, policy));
        Self { rank: named.map_or(self.rank, |named| self.rank.min(named)), ..self.clone() }
    }

    /// The port that claims.
    pub(crate) fn port(&self) -> &ExposedPort {
        &self.service.ports[usize::from(self.port)]
    }

    /// Whether it is of the same port as `other`, a claim of the same Service.
    pub(crate) fn is_of_port_of(&self, other: &Self) -> bool {
        self.port == other.port
    }

    /// The order between two claims: the rank of their Services, their age, their names, the order of ports.
    fn order(&self) -> (Rank, &Age, &ObjectKey, u16) {
        (self.rank, &self.service.age, &self.service.key, self.port)
    }
}

impl Rank {
    /// The rank of a claim to `key` by the host name of the Cluster with this policy.
    fn named(key: &RouteKey, policy: &ClusterPolicy) -> Option<Self> {
        let (RouteKey::Host(host), Some(own)) = (key, policy.host()) else { return None };
        let before = host.as_str().len().checked_sub(own.as_str().len())?;
        host.is_within(own).then(|| Self::Named { before: u8::try_from(before).unwrap_or(u8::MAX) })
    }
}

impl Claims {
    /// Adds a claim to `key`, which `holder` has in force. If the owner changes by that, returns the one
    /// before and the one now.
    pub(crate) fn add(&mut self, key: RouteKey, claim: Claim, holder: Option<Claim>) -> [Option<Claim>; 2] {
        let before = self.owner(&key).cloned();
        if let Some(holder) = holder {
            self.hold(&key, holder, &claim);
        }
        let namespace = Arc::clone(&claim.service.key.namespace);
        let claims = self.by_key.entry(key.clone()).or_default();
        let position = claims.partition_point(|other| *other < claim);
        claims.insert(position, claim);
        if let Some(kept) = self.kept.get(&key) {
            let is_back = self.claims_from(&key, &kept.namespace).next().is_some();
            let is_asked_for_anew = kept.rank == Rank::Other && kept.namespace != namespace;
            if (is_back && !self.has_rivals(&key)) || (!is_back && is_asked_for_anew) {
                self.let_go(&key);
            }
        }
        self.if_changed(before, &key)
    }

    /// Removes a claim to `key`, which is kept for its namespace if `keep` says so. If the owner changes
    /// by that, returns the one before and the one now.
    pub(crate) fn withdraw(&mut self, key: &RouteKey, claim: &Claim, keep: bool) -> [Option<Claim>; 2] {
        let before = self.owner(key).cloned();
        let Some(claims) = self.by_key.get_mut(key) else { return [None, None] };
        claims.retain(|other| other != claim);
        if claims.is_empty() {
            self.by_key.remove(key);
        }
        if self.holders.get(key) == Some(claim) {
            self.holders.remove(key);
        }
        if keep && before.as_ref() == Some(claim) && matches!(key, RouteKey::Host(_)) {
            self.keep(key, claim);
        }
        // Lets go of a key that no other namespace claims, if its own claims it or it is not kept for a
        // Cluster.
        let is_of_no_use = self.kept.get(key).is_some_and(|kept| {
            let has_own_claim = self.claims_from(key, &kept.namespace).next().is_some();
            !self.has_rivals(key) && (has_own_claim || kept.rank == Rank::Other)
        });
        if is_of_no_use {
            self.let_go(key);
        }
        self.if_changed(before, key)
    }

    /// Lets go of the key kept first for `namespace`, if there is one too many. Then returns the owner before
    /// and the one now, if that changed.
    pub(crate) fn make_room(&mut self, namespace: &str) -> Option<[Option<Claim>; 2]> {
        let keys = self.kept_by.get(namespace).filter(|keys| keys.len() > MAX_KEPT)?;
        let first = keys[0].clone();
        let before = self.owner(&first).cloned();
        self.let_go(&first);
        Some(self.if_changed(before, &first))
    }

    /// The claim that owns `key`.
    pub(crate) fn owner(&self, key: &RouteKey) -> Option<&Claim> {
        let first = self.by_key.get(key)?.first()?;
        let returned = match self.kept.get(key) {
            Some(kept) => {
                let returned = self.claims_from(key, &kept.namespace).next();
                if returned.is_none() && kept.rank <= first.rank {
                    return None;
                }
                returned
            }
            None => None,
        };
        let mut before_the_first = self.holders.get(key).into_iter().chain(returned);
        before_the_first.find(|claim| claim.rank == first.rank).or(Some(first))
    }

    /// Whether one of `services` claims `key`.
    pub(crate) fn is_claimed_by(&self, key: &RouteKey, services: &BTreeSet<ObjectKey>) -> bool {
        let mut claims = self.by_key.get(key).into_iter().flatten();
        claims.any(|claim| services.contains(&claim.service.key))
    }

    /// The namespace that `key` is kept for.
    pub(crate) fn kept_for(&self, key: &RouteKey) -> Option<&str> {
        Some(&*self.kept.get(key)?.namespace)
    }

    /// The Cluster of `namespace` has this policy now, or is gone. A name that was kept for one that has gone
    /// is free. Returns the owner before and the one now of each key where that changes.
    pub(crate) fn set_policy(
        &mut self,
        namespace: &str,
        policy: Option<&ClusterPolicy>,
    ) -> Vec<[Option<Claim>; 2]> {
        let keys = self.kept_by.get(namespace).cloned().unwrap_or_default();
        let mut changes = Vec::new();
        for key in keys {
            let before = self.owner(&key).cloned();
            match (self.kept.get_mut(&key), policy) {
                (Some(kept), Some(policy)) if before.is_none() => {
                    kept.rank = Rank::named(&key, policy).unwrap_or(Rank::OfCluster);
                }
                // What another has by now is not taken from it.
                _ => self.let_go(&key),
            }
            changes.push(self.if_changed(before, &key));
        }
        changes
    }

    /// The keys that are kept, or no longer, since the last call.
    pub(crate) fn take_kept_changes(&mut self) -> Vec<(RouteKey, bool)> {
        let changed = std::mem::take(&mut self.kept_changes);
        let changes = changed.into_iter().map(|key| {
            let kept = self.kept.get_mut(&key);
            let is_kept = kept.is_some();
            if let Some(kept) = kept {
                kept.is_published = true;
            }
            (key, is_kept)
        });
        changes.collect()
    }

    /// Forgets the holders of the keys that one Service alone claims by now.
    pub(crate) fn forget_holders(&mut self) {
        let by_key = &self.by_key;
        self.holders.retain(|key, _| by_key.get(key).is_some_and(|claims| claims.len() > 1));
    }

    /// Whether no key is claimed, held or kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_key.is_empty() && self.holders.is_empty() && self.kept.is_empty() && self.kept_by.is_empty()
    }

    /// Whether a claim to `key` may wait: for another, or since it is kept.
    pub(crate) fn is_contested(&self, key: &RouteKey) -> bool {
        self.by_key.get(key).is_some_and(|claims| self.may_wait(key, claims))
    }

    /// Every claim that waits.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        let contested = self.by_key.iter().filter(|(key, claims)| self.may_wait(key, claims));
        contested.flat_map(move |(key, claims)| {
            let (owner, first, holder) = (self.owner(key), claims.first(), self.holders.get(key));
            let waiting = claims.iter().filter(move |claim| owner != Some(*claim));
            waiting.filter_map(move |claim| {
                let because = match owner {
                    Some(owner) if first == Some(owner) => Because::Owned(owner),
                    Some(owner) if holder == Some(owner) => Because::Held(owner),
                    Some(owner) => Because::Returned(owner),
                    None => Because::Kept(self.kept_for(key)?),
                };
                Some(Waiting { key, claim, because })
            })
        })
    }

    fn may_wait(&self, key: &RouteKey, claims: &[Claim]) -> bool {
        claims.len() > 1 || self.kept.contains_key(key)
    }

    /// Notes that `holder` has `key` in force while `claim` asks for it.
    fn hold(&mut self, key: &RouteKey, holder: Claim, claim: &Claim) {
        if holder == *claim {
            // It asks anew, since something about it changed. Another may hold the key, which it took by its
            // rank.
            self.holders.entry(key.clone()).or_insert(holder);
        } else {
            self.holders.insert(key.clone(), holder);
        }
    }

    fn keep(&mut self, key: &RouteKey, claim: &Claim) {
        let namespace = Arc::clone(&claim.service.key.namespace);
        if self.kept.get(key).is_some_and(|kept| kept.namespace == namespace) {
            return;
        }
        self.let_go(key);
        self.kept_by.entry(Arc::clone(&namespace)).or_default().push(key.clone());
        // A Service planned for a Cluster stays with the Cluster: without one it is like any other.
        let rank = match claim.rank {
            Rank::Named { .. } | Rank::OfCluster => claim.rank,
            Rank::Planned | Rank::Other => Rank::Other,
        };
        // If a change is still to be published, the table has an earlier one.
        let is_published = !self.kept_changes.insert(key.clone());
        self.kept.insert(key.clone(), KeptFor { namespace, rank, is_published });
    }

    fn let_go(&mut self, key: &RouteKey) {
        let Some(kept) = self.kept.remove(key) else { return };
        if kept.is_published {
            self.kept_changes.insert(key.clone());
        } else {
            self.kept_changes.remove(key);
        }
        if let Some(keys) = self.kept_by.get_mut(&kept.namespace) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.kept_by.remove(&kept.namespace);
            }
        }
    }

    fn claims_from<'a>(&'a self, key: &RouteKey, namespace: &'a str) -> impl Iterator<Item = &'a Claim> {
        let claims = self.by_key.get(key).into_iter().flatten();
        claims.filter(move |claim| *claim.service.key.namespace == *namespace)
    }

    /// Whether another namespace claims `key` than the one it is kept for.
    fn has_rivals(&self, key: &RouteKey) -> bool {
        let Some(kept) = self.kept.get(key) else { return false };
        let mut claims = self.by_key.get(key).into_iter().flatten();
        claims.any(|claim| claim.service.key.namespace != kept.namespace)
    }

    fn if_changed(&self, before: Option<Claim>, key: &RouteKey) -> [Option<Claim>; 2] {
        let after = self.owner(key);
        if before.as_ref() == after { [None, None] } else { [before, after.cloned()] }
    }
}

// === Claim ===

impl Ord for Claim {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Claim {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Claim {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
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
            send_proxy: false,
            rare: None,
        };
        Claim { service: Arc::new(service), rank: Rank::Other, port: 0 }
    }

    fn claims(seconds: &[i64]) -> Claims {
        let mut claims = Claims::default();
        for &second in seconds {
            claims.add(KEY, claim(second), None);
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
        let mut withdraw = |second| claims.withdraw(&KEY, &claim(second), true);
        assert_eq!(withdraw(1), [Some(claim(1)), Some(claim(2))]);
        assert_eq!(withdraw(3), [None, None]);
        assert_eq!(withdraw(2), [Some(claim(2)), None]);
        assert_eq!(claims.owner(&KEY), None);
        assert!(claims.is_empty());
    }

    #[test]
    fn all_but_the_oldest_wait() {
        let claims = claims(&[3, 1, 2]);
        let waiting: Vec<_> = claims.waiting().map(|waiting| waiting.claim).collect();
        assert_eq!(waiting, [&claim(2), &claim(3)]);
    }
}
