//! Which NodePort number belongs to which Service port. A number is allocated once, never twice, and is the
//! same after a restart.
//!
//! In a seed cluster the API server does this. Where objects come from a directory, this allocator takes its
//! place. Users have the numbers in their kubeconfigs, so a released number stays reserved for its last
//! owner. An owner that returns gets its number back. No other owner gets it while the range has a number
//! that was never allocated.

mod port_set;

use std::collections::BTreeMap;
use std::sync::Arc;

use portico_api::port_range::PortRange;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use self::port_set::PortSet;
use crate::random::Random;

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
#[error(
    "the NodePort range {range} is used up: {used} of {} ports are in use, {needed} more are needed",
    range.size()
)]
pub struct Exhausted {
    /// The range.
    pub range: PortRange,
    /// How many of its ports are in use.
    pub used: u32,
    /// How many more were asked for.
    pub needed: u32,
}

/// A Service fixes a port that is allocated to another.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("NodePort {port} belongs to {}", owner.as_str())]
pub struct Taken {
    /// The port.
    pub port: u16,
    /// Its owner.
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

/// The owner of each NodePort.
#[derive(Debug, Clone, Default)]
pub struct NodePortAllocator {
    allocated: BTreeMap<PortKey, Allocated>,
    owners: BTreeMap<u16, PortKey>,
    /// Ports that Services fix themselves, and by how many. Not stored: the Services fix them again after a
    /// restart.
    fixed: BTreeMap<u16, u32>,
    /// Ports in use: allocated to an owner that exists, or fixed.
    used: PortSet,
    /// Ports in use, and those reserved for an owner that may return.
    reserved: PortSet,
    revision: u64,
    freed: u64,
}

/// A port, and whether its owner exists.
#[derive(Debug, Clone, Copy)]
struct Allocated {
    port: u16,
    in_use: bool,
}

impl NodePortAllocator {
    /// An allocator with the `ports` of an earlier run. All count as in use until [`Self::retain`] says
    /// otherwise.
    ///
    /// # Errors
    /// If a port has two owners.
    pub fn restored(ports: impl IntoIterator<Item = (PortKey, u16)>) -> Result<Self, Twice> {
        let mut allocator = Self::default();
        for (second, port) in ports {
            if let Some(first) = allocator.owners.get(&port) {
                return Err(Twice { port, first: first.clone(), second });
            }
            allocator.assign(second, port);
        }
        allocator.revision = 0;
        Ok(allocator)
    }

    /// Every port that has an owner, in use or reserved.
    pub fn all(&self) -> impl Iterator<Item = (&PortKey, u16)> {
        self.allocated.iter().map(|(key, allocated)| (key, allocated.port))
    }

    /// Grows by every change that must be stored.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Grows by every port that becomes free: an owner that waits for one may try again.
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// The port of `key`.
    pub fn get(&self, key: &PortKey) -> Option<u16> {
        self.allocated.get(key).filter(|allocated| allocated.in_use).map(|allocated| allocated.port)
    }

    /// Allocates a port for each of `keys`: the one it had, else one at random from `range`. All or none,
    /// because a control plane with half its ports is of no use.
    ///
    /// # Errors
    /// If the range has too few free ports. Nothing is allocated then.
    pub fn allocate(
        &mut self,
        keys: &[PortKey],
        range: PortRange,
        random: &mut Random,
    ) -> Result<(), Exhausted> {
        let without_port = keys.iter().filter(|key| self.get(key).is_none());
        let (returning, new): (Vec<&PortKey>, Vec<&PortKey>) =
            without_port.partition(|key| self.allocated.contains_key(key));
        let from_range =
            returning.iter().filter(|key| range.contains(self.allocated[key].port)).count() + new.len();
        let used = self.used.count(range);
        let needed = u32::try_from(from_range).unwrap_or(u32::MAX);
        if needed > range.size() - used {
            return Err(Exhausted { range, used, needed });
        }
        for key in returning {
            if let Some(allocated) = self.allocated.get_mut(key) {
                allocated.in_use = true;
                self.used.insert(allocated.port);
            }
        }
        for key in new {
            if let Some(port) = self.free_port(range, random) {
                self.forget(port);
                self.assign(key.clone(), port);
            }
        }
        Ok(())
    }

    /// A free port of `range` at random: one that is reserved for no owner, as long as there is one.
    fn free_port(&self, range: PortRange, random: &mut Random) -> Option<u16> {
        let unreserved = range.size() - self.reserved.count(range);
        if unreserved > 0 {
            return self.reserved.free(range, random.below(unreserved));
        }
        let unused = range.size() - self.used.count(range);
        self.used.free(range, random.below(unused))
    }

    /// Excludes `port` from allocation until [`Self::unfix`] is called as often.
    ///
    /// # Errors
    /// If the port is in use by an owner other than `by`.
    pub fn fix(&mut self, by: &PortKey, port: u16) -> Result<(), Taken> {
        match self.owners.get(&port) {
            Some(owner) if self.get(owner).is_none() => self.forget(port),
            Some(owner) if owner != by => return Err(Taken { port, owner: owner.clone() }),
            _ => {}
        }
        *self.fixed.entry(port).or_default() += 1;
        self.used.insert(port);
        self.reserved.insert(port);
        Ok(())
    }

    /// Takes one [`Self::fix`] back.
    pub fn unfix(&mut self, port: u16) {
        let Some(count) = self.fixed.get_mut(&port) else { return };
        *count -= 1;
        if *count == 0 {
            self.fixed.remove(&port);
            self.free_unless_held(port);
        }
    }

    /// Frees the port of `key`, and reserves it in case `key` returns.
    pub fn release(&mut self, key: &PortKey) {
        if let Some(allocated) = self.allocated.get_mut(key).filter(|allocated| allocated.in_use) {
            allocated.in_use = false;
            let port = allocated.port;
            self.free_unless_held(port);
        }
    }

    /// Releases every port for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&PortKey, u16) -> bool) {
        let released = self.all().filter(|&(key, port)| !keep(key, port));
        let released: Vec<PortKey> = released.map(|(key, _)| key.clone()).collect();
        for key in released {
            self.release(&key);
        }
    }

    /// Releases every port of `namespace` for which `keep` returns false.
    pub fn retain_in(&mut self, namespace: &str, keep: impl Fn(&PortKey, u16) -> bool) {
        let released = self.of_namespace(namespace).filter(|&(key, port)| !keep(key, port));
        let released: Vec<PortKey> = released.map(|(key, _)| key.clone()).collect();
        for key in released {
            self.release(&key);
        }
    }

    /// The ports that Services of `namespace` use.
    pub fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&PortKey, u16)> {
        let from = PortKey(format!("{namespace}/").into());
        self.allocated
            .range(from.clone()..)
            .take_while(move |(key, _)| key.0.starts_with(&*from.0))
            .filter(|(_, allocated)| allocated.in_use)
            .map(|(key, allocated)| (key, allocated.port))
    }

    fn assign(&mut self, key: PortKey, port: u16) {
        self.used.insert(port);
        self.reserved.insert(port);
        self.owners.insert(port, key.clone());
        self.allocated.insert(key, Allocated { port, in_use: true });
        self.revision += 1;
    }

    /// Forgets the owner of `port`.
    fn forget(&mut self, port: u16) {
        if let Some(owner) = self.owners.remove(&port) {
            self.allocated.remove(&owner);
            self.revision += 1;
        }
    }

    /// Frees `port` unless a Service fixes it or its owner uses it.
    fn free_unless_held(&mut self, port: u16) {
        if self.fixed.contains_key(&port) {
            return;
        }
        match self.owners.get(&port) {
            Some(owner) if self.get(owner).is_some() => return,
            Some(_) => {}
            None => self.reserved.remove(port),
        }
        self.used.remove(port);
        self.freed += 1;
    }
}

#[cfg(test)]
mod tests;
