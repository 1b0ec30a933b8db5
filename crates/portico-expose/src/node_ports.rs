//! Which NodePort number belongs to which Service port: drawn once, never twice, the same after a restart.
//!
//! In a seed cluster the API server does this. Where objects come from a directory there is none, and this book takes its
//! place. Users have the numbers in their kubeconfigs, so a number once given stays until its owner is explicitly released.

use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::port_range::PortRange;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::draw::Draw;

/// Version of the document that [`NodePortBook::to_json`] writes.
const FORMAT: u32 = 1;

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

/// Why a stored book cannot be used.
#[derive(Debug, Error)]
pub enum BookError {
    /// Not the JSON document that was written.
    #[error(
        "the NodePort book is damaged ({0}); restore it, or remove it and let every NodePort be drawn anew"
    )]
    Damaged(#[from] serde_json::Error),
    /// Written by a later Portico.
    #[error("the NodePort book has format {0}, this program knows {FORMAT}; use the program that wrote it")]
    Format(u32),
    /// One port, two owners.
    #[error("the NodePort book gives port {port} to {} and to {}; remove one of the two lines", first.as_str(), second.as_str())]
    Twice {
        /// The port.
        port: u16,
        /// One owner.
        first: PortKey,
        /// The other.
        second: PortKey,
    },
}

/// The document: sorted, one line an entry when printed, so that people can read and mend it.
#[derive(Serialize, Deserialize)]
struct Document<Ports> {
    format: u32,
    #[serde(rename = "nodePorts")]
    node_ports: Ports,
}

/// Who owns which port.
#[derive(Debug, Clone, Default)]
pub struct NodePortBook {
    given: BTreeMap<PortKey, u16>,
    owners: BTreeMap<u16, PortKey>,
    /// Ports that Services fix themselves, and by how many; not stored, the Services say so again.
    fixed: BTreeMap<u16, u32>,
    taken: PortSet,
    revision: u64,
    freed: u64,
}

impl NodePortBook {
    /// Reads what [`Self::to_json`] wrote.
    pub fn from_json(text: &str) -> Result<Self, BookError> {
        let document: Document<BTreeMap<PortKey, u16>> = serde_json::from_str(text)?;
        if document.format != FORMAT {
            return Err(BookError::Format(document.format));
        }
        let mut book = Self::default();
        for (key, port) in document.node_ports {
            if let Some(first) = book.owners.get(&port) {
                return Err(BookError::Twice { port, first: first.clone(), second: key });
            }
            book.give(key, port);
        }
        book.revision = 0;
        Ok(book)
    }

    /// The book as it is to be stored.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(&Document { format: FORMAT, node_ports: &self.given })
    }

    /// Grows by every change that must be stored.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Grows by every port that becomes free: whoever waits for one may try again.
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// The port that was given to `key`.
    pub fn get(&self, key: &PortKey) -> Option<u16> {
        self.given.get(key).copied()
    }

    /// Whose `port` is.
    pub fn owner(&self, port: u16) -> Option<&PortKey> {
        self.owners.get(&port)
    }

    /// Sees to it that each of `keys` has a port; those without get one at random from `range`. All or none: a control plane
    /// with half its ports is of no use to anybody.
    pub fn allocate(&mut self, keys: &[PortKey], range: PortRange, draw: &mut Draw) -> Result<(), Exhausted> {
        let missing: Vec<&PortKey> = keys.iter().filter(|key| !self.given.contains_key(key)).collect();
        let used = self.taken.count(range);
        let needed = u32::try_from(missing.len()).unwrap_or(u32::MAX);
        if needed > range.size() - used {
            return Err(Exhausted { range, used, needed });
        }
        for key in missing {
            let free = range.size() - self.taken.count(range);
            if let Some(port) = self.taken.free(range, draw.below(free)) {
                self.give(key.clone(), port);
            }
        }
        Ok(())
    }

    /// Keeps `port` out of the draw until [`Self::unfix`] is called as often. A port that was given to anybody but `by` is
    /// theirs.
    pub fn fix(&mut self, by: &PortKey, port: u16) -> Result<(), Taken> {
        if let Some(owner) = self.owners.get(&port).filter(|&owner| owner != by) {
            return Err(Taken { port, owner: owner.clone() });
        }
        *self.fixed.entry(port).or_default() += 1;
        self.taken.insert(port);
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

    /// Frees the port of `key`.
    pub fn release(&mut self, key: &PortKey) {
        if let Some(port) = self.given.remove(key) {
            self.owners.remove(&port);
            self.settle(port);
            self.revision += 1;
        }
    }

    /// Frees every port that is not to be kept.
    pub fn retain(&mut self, keep: impl Fn(&PortKey, u16) -> bool) {
        let gone = self.given.iter().filter(|&(key, &port)| !keep(key, port));
        let gone: Vec<PortKey> = gone.map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.release(&key);
        }
    }

    /// The ports given to Services of `namespace`.
    pub fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&PortKey, u16)> {
        let from = PortKey(format!("{namespace}/").into());
        self.given
            .range(from.clone()..)
            .map(|(key, &port)| (key, port))
            .take_while(move |(key, _)| key.0.starts_with(&*from.0))
    }

    fn give(&mut self, key: PortKey, port: u16) {
        self.taken.insert(port);
        self.owners.insert(port, key.clone());
        self.given.insert(key, port);
        self.revision += 1;
    }

    /// Frees `port` unless somebody still holds it.
    fn settle(&mut self, port: u16) {
        if !self.owners.contains_key(&port) && !self.fixed.contains_key(&port) {
            self.taken.remove(port);
            self.freed += 1;
        }
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
    fn one_port_with_two_owners_is_no_book() {
        let text = r#"{"format": 1, "nodePorts": {"a/b/c": 30000, "a/b/d": 30000}}"#;
        assert!(matches!(NodePortBook::from_json(text), Err(BookError::Twice { port: 30_000, .. })));
        assert!(matches!(NodePortBook::from_json("{}"), Err(BookError::Damaged(_))));
        assert!(matches!(
            NodePortBook::from_json(r#"{"format": 2, "nodePorts": {}}"#),
            Err(BookError::Format(2))
        ));
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
            let mut fixed: Vec<u16> = Vec::new();
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
                                    prop_assert!(!fixed.contains(&port));
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
                            fixed.push(port);
                        }
                    }
                    Step::Unfix(index) => if index < fixed.len() {
                        book.unfix(fixed.swap_remove(index));
                    },
                    Step::Restart => {
                        book = NodePortBook::from_json(&book.to_json().unwrap()).unwrap();
                        for &port in &fixed {
                            // Whoever fixed it says so again, in the name of its present owner if it has one.
                            let by = book.owner(port).cloned().unwrap_or_else(|| key("x"));
                            book.fix(&by, port).unwrap();
                        }
                    }
                }
                let ports: BTreeSet<u16> = model.values().copied().collect();
                prop_assert_eq!(ports.len(), model.len());
                prop_assert_eq!(book.of_namespace("cluster-a").count(), model.len());
                let used: BTreeSet<u16> =
                    ports.iter().chain(&fixed).copied().filter(|&port| range.contains(port)).collect();
                prop_assert_eq!(book.taken.count(range) as usize, used.len());
            }
        }
    }
}
