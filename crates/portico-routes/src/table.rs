//! The route table: immutable, shared, and as cheap to copy as three pointers.
//!
//! A lookup does not grow with the number of routes in any way that can be measured, and a changed table shares nearly all that did
//! not change with the one before it.

use std::sync::Arc;

use portico_api::names::{Authority, HostName};

use crate::route::{Backend, BackendId, RouteKey};
pub use crate::shared_map::SharedMap;

/// Every route at one moment.
#[derive(Debug, Clone, Default)]
pub struct RouteTable {
    /// By NodePort number.
    pub ports: SharedMap<u16, Arc<Backend>>,
    /// By server name.
    pub hosts: SharedMap<HostName, Arc<Backend>>,
    /// By CONNECT authority.
    pub authorities: SharedMap<Authority, Arc<Backend>>,
}

impl RouteTable {
    /// Where `key` leads. A gateway that holds the key in its own type looks into the map of that type instead.
    pub fn get(&self, key: &RouteKey) -> Option<&Arc<Backend>> {
        match key {
            RouteKey::Port(port) => self.ports.get(port),
            RouteKey::Host(host) => self.hosts.get(host),
            RouteKey::Authority(authority) => self.authorities.get(authority),
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.ports.len() + self.hosts.len() + self.authorities.len()
    }

    /// Whether no key leads anywhere.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes `key` lead to `backend`. Returns whether it led elsewhere, or nowhere, before: another version of the same
    /// backend is not elsewhere.
    pub(crate) fn lead(&mut self, key: &RouteKey, backend: &Arc<Backend>) -> bool {
        let before = self.get(key);
        if before.is_some_and(|before| Arc::ptr_eq(before, backend)) {
            return false;
        }
        let elsewhere = before.is_none_or(|before| before.id != backend.id);
        let backend = Arc::clone(backend);
        match key {
            RouteKey::Port(port) => self.ports.insert(*port, backend),
            RouteKey::Host(host) => self.hosts.insert(host.clone(), backend),
            RouteKey::Authority(authority) => self.authorities.insert(authority.clone(), backend),
        };
        elsewhere
    }

    /// Makes `key` lead nowhere. Returns whether it led anywhere before.
    pub(crate) fn remove(&mut self, key: &RouteKey) -> bool {
        match key {
            RouteKey::Port(port) => self.ports.remove(port),
            RouteKey::Host(host) => self.hosts.remove(host),
            RouteKey::Authority(authority) => self.authorities.remove(authority),
        }
        .is_some()
    }
}

/// A table and how it differs from the one before it.
#[derive(Debug, Clone)]
pub struct Update {
    /// The table as it is now.
    pub table: RouteTable,
    /// What changed; each key and each backend at most once.
    pub changes: Vec<RouteChange>,
}

/// One difference between two tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteChange {
    /// A backend that is new, or whose endpoints, policy or settings changed. Comes before the routes that lead to it.
    Backend(Arc<Backend>),
    /// A key that leads to `to`, and did not before.
    Route {
        /// The key.
        key: RouteKey,
        /// Where it leads now.
        to: BackendId,
    },
    /// A key that leads nowhere any more.
    NoRoute(RouteKey),
    /// A backend that no route leads to any more. Comes after the routes that led to it.
    NoBackend(BackendId),
}
