//! A map whose copies share what did not change between them: how a route table stays immutable, cheap to replace and small.
//!
//! Entries are spread by their hash over [`SHARDS`] small hash tables. A copy of the map shares all of them; the first change after that
//! copies the list of shards and the one shard it changes, both a matter of microseconds. A hash trie copies less,
//! but many of its nodes are mostly room for entries that never come: 60 to 150 bytes a route, where this takes 40 to 50.

use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Parts of a map. With 30,000 routes a shard holds 120: a change copies 3 KB of entries and 2 KB of pointers to shards.
const SHARDS: usize = 256;

type Shard<K, V> = HashTable<(K, V)>;

/// A map that is cheap to copy and cheap to change after that.
pub struct SharedMap<K, V> {
    shards: Arc<[Arc<Shard<K, V>>; SHARDS]>,
    len: usize,
    /// Keyed anew in every process: server names come from strangers, who could otherwise choose names that collide.
    hasher: RandomState,
}

impl<K, V> SharedMap<K, V> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter()).map(|(key, value)| (key, value))
    }

    /// All keys, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }
}

impl<K: Hash + Eq, V> SharedMap<K, V> {
    /// The value of `key`.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.get_key_value(key).map(|(_, value)| value)
    }

    /// The value of `key`, and the key as it stands in the map.
    pub fn get_key_value(&self, key: &K) -> Option<(&K, &V)> {
        let hash = self.hasher.hash_one(key);
        let (key, value) = self.shards[shard_of(hash)].find(hash, |(other, _)| other == key)?;
        Some((key, value))
    }
}

impl<K: Hash + Eq + Clone, V: Clone> SharedMap<K, V> {
    /// Sets the value of `key`. Returns the one before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let Self { shards, len, hasher } = self;
        let hash = hasher.hash_one(&key);
        let shard = Arc::make_mut(&mut Arc::make_mut(shards)[shard_of(hash)]);
        match shard.entry(hash, |(other, _)| *other == key, |(other, _)| hasher.hash_one(other)) {
            Entry::Occupied(mut entry) => Some(std::mem::replace(&mut entry.get_mut().1, value)),
            Entry::Vacant(entry) => {
                entry.insert((key, value));
                *len += 1;
                None
            }
        }
    }

    /// Removes `key`. Returns its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        // Looks first: what is not there is no reason to copy anything.
        self.get(key)?;
        let Self { shards, len, hasher } = self;
        let hash = hasher.hash_one(key);
        let shard = Arc::make_mut(&mut Arc::make_mut(shards)[shard_of(hash)]);
        let ((_, value), _) = shard.find_entry(hash, |(other, _)| other == key).ok()?.remove();
        *len -= 1;
        if shard.len() < shard.capacity() / 4 {
            shard.shrink_to(2 * shard.len(), |(other, _)| hasher.hash_one(other));
        }
        Some(value)
    }
}

/// The hash tables use the highest and the lowest bits of a hash; these are in between.
fn shard_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        let empty = Arc::new(Shard::new());
        let shards = Arc::new(std::array::from_fn(|_| Arc::clone(&empty)));
        Self { shards, len: 0, hasher: RandomState::new() }
    }
}

// Written out, because derive would ask for keys and values that can be cloned.
impl<K, V> Clone for SharedMap<K, V> {
    fn clone(&self) -> Self {
        Self { shards: Arc::clone(&self.shards), len: self.len, hasher: self.hasher.clone() }
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn contents(map: &SharedMap<u16, u8>) -> BTreeMap<u16, u8> {
        map.iter().map(|(&key, &value)| (key, value)).collect()
    }

    proptest! {
        #[test]
        fn it_holds_what_a_map_of_the_standard_library_holds(
            changes in prop::collection::vec((0..500u16, prop::option::of(any::<u8>())), 0..500),
        ) {
            let (mut map, mut model) = (SharedMap::default(), BTreeMap::new());
            for (key, value) in changes {
                match value {
                    Some(value) => prop_assert_eq!(map.insert(key, value), model.insert(key, value)),
                    None => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                }
                prop_assert_eq!(map.get(&key), model.get(&key));
                prop_assert_eq!(map.len(), model.len());
            }
            prop_assert_eq!(contents(&map), model);
        }
    }

    #[test]
    fn a_copy_does_not_see_later_changes() {
        let mut map = SharedMap::default();
        map.insert(1u16, 1u8);
        let copy = map.clone();
        map.insert(1, 2);
        map.insert(2, 2);
        assert_eq!(contents(&copy), BTreeMap::from([(1, 1)]));
        assert_eq!(contents(&map), BTreeMap::from([(1, 2), (2, 2)]));
    }

    #[test]
    fn a_change_copies_one_shard_and_shares_the_others() {
        let mut map = SharedMap::default();
        for key in 0..10_000u16 {
            map.insert(key, 0u8);
        }
        let copy = map.clone();
        map.insert(7, 1);
        let shared = map.shards.iter().zip(&*copy.shards).filter(|(a, b)| Arc::ptr_eq(a, b)).count();
        assert_eq!(shared, SHARDS - 1);
    }

    #[test]
    fn entries_that_are_gone_leave_no_room_behind() {
        let mut map = SharedMap::default();
        let room = |map: &SharedMap<u16, u8>| map.shards.iter().map(|shard| shard.capacity()).sum::<usize>();
        for key in 0..10_000u16 {
            map.insert(key, 0u8);
        }
        let full = room(&map);
        for key in 0..10_000u16 {
            map.remove(&key);
        }
        assert!(room(&map) * 10 < full, "{} of {full}", room(&map));
    }
}
