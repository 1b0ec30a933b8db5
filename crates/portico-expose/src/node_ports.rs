//! Which NodePort number belongs to which Service port: drawn once, never twice, the same after a restart.
//!
//! In a seed cluster the API server does this. Where objects come from a directory there is none, and this book takes its
//! place. Users have the numbers in their kubeconfigs, so a number that was released is still remembered: whoever had it gets
//! it back (a file that was away while a checkout was under way is no new cluster), and nobody else does while the range has
//! a number that was never given.

use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::port_range::PortRange;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::draw::Draw;

/// One port of one Service, written `namespace/service/port-name`. Ordered by namespace first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PortKey(Arc<str>);

impl PortKey {
    /// The key of a port; the name of an unnamed port is empty.
    pub fn new(namespace: &str, service: &str, port_name: &str) -> Self {
        Self(format!("{namespace}/{service}/{port_name}").into())
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        self.0.split('/').next().unwrap_or("")
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The range holds fewer free ports than are needed. Nothing was allocated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the NodePort range {range} is used up: {used} of {} ports are in use, {needed} more are needed", range.size())]
pub struct Exhausted {
    /// The range.
    pub range: PortRange,
    /// How many of its ports are given away or reserved.
    pub used: u32,
    /// How many more were asked for.
    pub needed: u32,
}

/// Somebody fixed a port that the book had given to somebody else.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("NodePort {port} belongs to {}", owner.as_str())]
pub struct Taken {
    /// The port.
    pub port: u16,
    /// Whose it is.
    pub owner: PortKey,
}

/// One port, two owners.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("gives port {port} to {} and to {}", first.as_str(), second.as_str())]
pub struct Twice {
    /// The port.
    pub port: u16,
    /// One owner.
    pub first: PortKey,
    /// The other.
    pub second: PortKey,
}

/// Who owns which port.
#[derive(Debug, Clone, Default)]
pub struct NodePortBook {
    given: BTreeMap<PortKey, Given>,
    owners: BTreeMap<u16, PortKey>,
    /// Ports that Services fix themselves, and by how many; not stored, the Services say so again.
    fixed: BTreeMap<u16, u32>,
    /// Ports in use or fixed.
    taken: PortSet,
    /// These, and the ones that are remembered for who had them.
    kept: PortSet,
    revision: u64,
    freed: u64,
}

/// A port and whether its owner is there.
#[derive(Debug, Clone, Copy)]
struct Given {
    port: u16,
    in_use: bool,
}

impl NodePortBook {
    /// A book that remembers `ports`. All count as in use until [`Self::retain`] says otherwise.
    pub fn remembering(ports: impl IntoIterator<Item = (PortKey, u16)>) -> Result<Self, Twice> {
        let mut book = Self::default();
        for (second, port) in ports {
            if let Some(first) = book.owners.get(&port) {
                return Err(Twice { port, first: first.clone(), second });
            }
            book.give(second, port);
        }
        book.revision = 0;
        Ok(book)
    }

    /// Every port that was ever given, in use or remembered.
    pub fn all(&self) -> impl Iterator<Item = (&PortKey, u16)> {
        self.given.iter().map(|(key, given)| (key, given.port))
    }

    /// Grows by every change that must be stored.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Grows by every port that becomes free: whoever waits for one may try again.
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// The port that `key` has.
    pub fn get(&self, key: &PortKey) -> Option<u16> {
        self.given.get(key).filter(|given| given.in_use).map(|given| given.port)
    }

    /// Sees to it that each of `keys` has a port: the one it had, else one at random from `range`. All or none: a control
    /// plane with half its ports is of no use to anybody.
    pub fn allocate(&mut self, keys: &[PortKey], range: PortRange, draw: &mut Draw) -> Result<(), Exhausted> {
        let (back, new): (Vec<&PortKey>, Vec<&PortKey>) =
            keys.iter().filter(|key| self.get(key).is_none()).partition(|key| self.given.contains_key(key));
        let from_range = back.iter().filter(|key| range.contains(self.given[key].port)).count() + new.len();
        let used = self.taken.count(range);
        let needed = u32::try_from(from_range).unwrap_or(u32::MAX);
        if needed > range.size() - used {
            return Err(Exhausted { range, used, needed });
        }
        for key in back {
            if let Some(given) = self.given.get_mut(key) {
                given.in_use = true;
                self.taken.insert(given.port);
            }
        }
        for key in new {
            // Numbers that nobody remembers first.
            let unknown = range.size() - self.kept.count(range);
            let free = range.size() - self.taken.count(range);
            let port = match unknown {
                0 => self.taken.free(range, draw.below(free)),
                _ => self.kept.free(range, draw.below(unknown)),
            };
            if let Some(port) = port {
                self.forget(port);
                self.give(key.clone(), port);
            }
        }
        Ok(())
    }

    /// Keeps `port` out of the draw until [`Self::unfix`] is called as often. A port that anybody but `by` uses is theirs.
    pub fn fix(&mut self, by: &PortKey, port: u16) -> Result<(), Taken> {
        match self.owners.get(&port) {
            Some(owner) if self.get(owner).is_none() => self.forget(port),
            Some(owner) if owner != by => return Err(Taken { port, owner: owner.clone() }),
            _ => {}
        }
        *self.fixed.entry(port).or_default() += 1;
        self.taken.insert(port);
        self.kept.insert(port);
        Ok(())
    }

    /// Takes one [`Self::fix`] back.
    pub fn unfix(&mut self, port: u16) {
        let Some(count) = self.fixed.get_mut(&port) else { return };
        *count -= 1;
        if *count == 0 {
            self.fixed.remove(&port);
            self.settle(port);
        }
    }

    /// Frees the port of `key`, and remembers that it was its.
    pub fn release(&mut self, key: &PortKey) {
        if let Some(given) = self.given.get_mut(key).filter(|given| given.in_use) {
            given.in_use = false;
            let port = given.port;
            self.settle(port);
        }
    }

    /// Releases every port that is not to be kept.
    pub fn retain(&mut self, keep: impl Fn(&PortKey, u16) -> bool) {
        let gone = self.given.iter().filter(|&(key, given)| !keep(key, given.port));
        let gone: Vec<PortKey> = gone.map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.release(&key);
        }
    }

    /// The ports that Services of `namespace` have.
    pub fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&PortKey, u16)> {
        let from = PortKey(format!("{namespace}/").into());
        self.given
            .range(from.clone()..)
            .take_while(move |(key, _)| key.0.starts_with(&*from.0))
            .filter(|(_, given)| given.in_use)
            .map(|(key, given)| (key, given.port))
    }

    fn give(&mut self, key: PortKey, port: u16) {
        self.taken.insert(port);
        self.kept.insert(port);
        self.owners.insert(port, key.clone());
        self.given.insert(key, Given { port, in_use: true });
        self.revision += 1;
    }

    /// Forgets who had `port`.
    fn forget(&mut self, port: u16) {
        if let Some(owner) = self.owners.remove(&port) {
            self.given.remove(&owner);
            self.revision += 1;
        }
    }

    /// Frees `port` unless somebody still holds it.
    fn settle(&mut self, port: u16) {
        if self.fixed.contains_key(&port) {
            return;
        }
        match self.owners.get(&port) {
            Some(owner) if self.get(owner).is_some() => return,
            Some(_) => {}
            None => self.kept.remove(port),
        }
        self.taken.remove(port);
        self.freed += 1;
    }
}

/// A set of ports as one bit each: 8 KiB, and the n-th free port is found in 1,024 steps at most, however full it is.
#[derive(Debug, Clone)]
struct PortSet(Box<[u64]>);

impl Default for PortSet {
    fn default() -> Self {
        Self(vec![0; 1_024].into())
    }
}

impl PortSet {
    fn insert(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
    }

    fn remove(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] &= !(1 << (port & 63));
    }

    fn count(&self, range: PortRange) -> u32 {
        words(range).map(|(index, mask)| (self.0[index] & mask).count_ones()).sum()
    }

    /// The free port of `range` that has `skip` free ones before it.
    fn free(&self, range: PortRange, mut skip: u32) -> Option<u16> {
        for (index, mask) in words(range) {
            let mut free = !self.0[index] & mask;
            if skip >= free.count_ones() {
                skip -= free.count_ones();
                continue;
            }
            for _ in 0..skip {
                free &= free - 1;
            }
            return u16::try_from(index * 64).ok()?.checked_add(u16::try_from(free.trailing_zeros()).ok()?);
        }
        None
    }
}

/// The words that hold `range`, each with a mask of the bits that belong to it.
fn words(range: PortRange) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (usize::from(range.first()), usize::from(range.last()));
    (first / 64..=last / 64).map(move |index| {
        let mut mask = u64::MAX;
        if index == first / 64 {
            mask &= u64::MAX << (first % 64);
        }
        if index == last / 64 {
            mask &= u64::MAX >> (63 - last % 64);
        }
        (index, mask)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn key(name: &str) -> PortKey {
        PortKey::new("cluster-a", name, "secure")
    }

    /// The book after a restart.
    fn again(book: &NodePortBook) -> NodePortBook {
        NodePortBook::remembering(book.all().map(|(key, port)| (key.clone(), port))).unwrap()
    }

    fn keys(count: usize) -> Vec<PortKey> {
        (0..count).map(|index| key(&format!("s{index}"))).collect()
    }

    #[test]
    fn a_range_that_is_used_up_says_range_used_and_needed() {
        let mut book = NodePortBook::default();
        let mut draw = Draw::new(1);
        let range = PortRange::new(30_000, 30_002).unwrap();
        book.allocate(&keys(2), range, &mut draw).unwrap();
        let error = book.allocate(&keys(4), range, &mut draw).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the NodePort range 30000-30002 is used up: 2 of 3 ports are in use, 2 more are needed"
        );
        assert_eq!(book.get(&key("s2")), None, "all or none");
    }

    #[test]
    fn a_port_that_a_service_fixes_itself_is_not_drawn_until_it_goes() {
        let mut book = NodePortBook::default();
        let range = PortRange::new(30_000, 30_001).unwrap();
        book.fix(&key("mine"), 30_000).unwrap();
        book.allocate(&keys(1), range, &mut Draw::new(7)).unwrap();
        assert_eq!(book.get(&key("s0")), Some(30_001));
        book.unfix(30_000);
        book.allocate(&keys(2), range, &mut Draw::new(7)).unwrap();
        assert_eq!(book.get(&key("s1")), Some(30_000));
    }

    #[test]
    fn a_port_that_was_given_cannot_be_fixed_by_another() {
        let mut book = NodePortBook::default();
        book.allocate(&keys(1), PortRange::new(30_000, 30_000).unwrap(), &mut Draw::new(7)).unwrap();
        assert_eq!(
            book.fix(&key("mine"), 30_000).unwrap_err().to_string(),
            "NodePort 30000 belongs to cluster-a/s0/secure"
        );
        book.fix(&key("s0"), 30_000).expect("its owner may name it");
    }

    #[test]
    fn who_comes_back_gets_the_port_it_had_also_after_a_restart() {
        let (mut book, mut draw) = (NodePortBook::default(), Draw::new(1));
        book.allocate(&keys(2), PortRange::NODE_PORTS, &mut draw).unwrap();
        let had = book.get(&key("s0"));
        book.release(&key("s0"));
        assert_eq!(book.get(&key("s0")), None);
        let mut book = again(&book);
        book.retain(|key, _| *key == self::key("s1"));
        book.allocate(&keys(400), PortRange::NODE_PORTS, &mut draw).unwrap();
        assert_eq!(book.get(&key("s0")), had);
    }

    #[test]
    fn a_port_that_is_remembered_goes_to_others_only_when_no_other_is_left() {
        let (mut book, mut draw) = (NodePortBook::default(), Draw::new(1));
        let range = PortRange::new(30_000, 30_002).unwrap();
        book.allocate(&[key("old")], range, &mut draw).unwrap();
        let had = book.get(&key("old")).unwrap();
        book.release(&key("old"));
        book.allocate(&keys(2), range, &mut draw).unwrap();
        assert!(keys(2).iter().all(|key| book.get(key) != Some(had)));
        book.allocate(&keys(3), range, &mut draw).unwrap();
        assert_eq!(book.get(&key("s2")), Some(had));
        book.release(&key("s0"));
        let free = range.size() - book.taken.count(range);
        book.allocate(&[key("old")], range, &mut draw).unwrap();
        assert_eq!((free, book.get(&key("s0"))), (1, None), "it had to be drawn anew");
    }

    #[test]
    fn a_service_may_fix_a_port_whose_owner_is_gone() {
        let mut book = NodePortBook::default();
        let range = PortRange::new(30_000, 30_000).unwrap();
        book.allocate(&keys(1), range, &mut Draw::new(7)).unwrap();
        book.release(&key("s0"));
        book.fix(&key("mine"), 30_000).unwrap();
        let error = book.allocate(&keys(1), range, &mut Draw::new(7)).unwrap_err();
        assert_eq!((error.used, error.needed), (1, 1));
    }

    #[test]
    fn ports_are_spread_over_the_whole_range() {
        let mut book = NodePortBook::default();
        book.allocate(&keys(400), PortRange::NODE_PORTS, &mut Draw::new(3)).unwrap();
        let quarter = PortRange::NODE_PORTS.size() / 4;
        for part in 0..4 {
            let first = 30_000 + u16::try_from(part * quarter).unwrap();
            let range = PortRange::new(first, first + u16::try_from(quarter).unwrap() - 1).unwrap();
            assert!(book.taken.count(range) > 60, "{range}: {}", book.taken.count(range));
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate(u8),
        Release(u8),
        Fix(u8, u16),
        Unfix(usize),
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..60_u8).prop_map(Step::Allocate),
            2 => (0..60_u8).prop_map(Step::Release),
            1 => (0..60_u8, 30_000..30_040_u16).prop_map(|(key, port)| Step::Fix(key, port)),
            1 => (0..8_usize).prop_map(Step::Unfix),
            1 => Just(Step::Restart),
        ]
    }

    proptest! {
        #[test]
        fn a_port_is_never_given_twice_and_never_moves_until_released(
            steps in prop::collection::vec(step(), 1..200),
            seed: u64,
        ) {
            let range = PortRange::new(30_000, 30_031).unwrap();
            let mut draw = Draw::new(seed);
            let mut book = NodePortBook::default();
            let mut model: BTreeMap<u8, u16> = BTreeMap::new();
            let mut fixed: Vec<(u8, u16)> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate(owner) => {
                        let key = key(&owner.to_string());
                        match book.allocate(std::slice::from_ref(&key), range, &mut draw) {
                            Ok(()) => {
                                let port = book.get(&key).unwrap();
                                prop_assert!(range.contains(port));
                                if let Some(before) = model.insert(owner, port) {
                                    prop_assert_eq!(before, port);
                                } else {
                                    let by_other = fixed.iter().any(|&(by, held)| by != owner && held == port);
                                    prop_assert!(!by_other, "{port} is somebody else's");
                                }
                            }
                            Err(error) => {
                                prop_assert_eq!(error.used, range.size());
                                prop_assert!(!model.contains_key(&owner));
                            }
                        }
                    }
                    Step::Release(owner) => {
                        model.remove(&owner);
                        book.release(&key(&owner.to_string()));
                    }
                    Step::Fix(owner, port) => {
                        let held = model.iter().any(|(&other, &held)| other != owner && held == port);
                        let result = book.fix(&key(&owner.to_string()), port);
                        prop_assert_eq!(result.is_err(), held);
                        if result.is_ok() {
                            fixed.push((owner, port));
                        }
                    }
                    Step::Unfix(index) => if index < fixed.len() {
                        book.unfix(fixed.swap_remove(index).1);
                    },
                    Step::Restart => {
                        book = again(&book);
                        for &(_, port) in &fixed {
                            // Whoever fixed it says so again, in the name of its present owner if it has one.
                            let by = book.owners.get(&port).cloned().unwrap_or_else(|| key("x"));
                            book.fix(&by, port).unwrap();
                        }
                        book.retain(|key, port| model.iter().any(|(owner, held)| {
                            *held == port && *key == self::key(&owner.to_string())
                        }));
                    }
                }
                let ports: BTreeSet<u16> = model.values().copied().collect();
                prop_assert_eq!(ports.len(), model.len());
                prop_assert_eq!(book.of_namespace("cluster-a").count(), model.len());
                let used: BTreeSet<u16> =
                    ports.iter().copied().chain(fixed.iter().map(|&(_, port)| port)).filter(|&port| range.contains(port)).collect();
                prop_assert_eq!(book.taken.count(range) as usize, used.len());
            }
        }
    }
}
