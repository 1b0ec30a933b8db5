//! The route table, and how it changes.
//!
//! A gateway keeps one [`RouteTable`] and replaces it as a whole: a clone with the changes of one [`Update`].
//! `cargo bench -p portico-routes` measures what that costs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::names::{Authority, HostName};

use crate::route::{Backend, Front, Route, RouteKey};

/// Where every key leads at one moment. A look-up goes to the map of its kind of key.
///
/// Server names come from unauthenticated clients. The standard library's hasher has a new random key in
/// every process, so that a client cannot choose names that collide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTable<T> {
    /// By NodePort number.
    pub ports: HashMap<u16, T>,
    /// By server name.
    pub hosts: HashMap<HostName, T>,
    /// By the name below which a wildcard stands for every server name.
    pub wildcards: HashMap<HostName, T>,
    /// Server names that lead nowhere: they are kept while their Service is made anew.
    kept: HashSet<HostName>,
    /// The names below which a wildcard that is kept stands for every server name.
    kept_wildcards: HashSet<HostName>,
    /// By CONNECT authority.
    pub authorities: HashMap<Authority, T>,
}

impl<T> RouteTable<T> {
    /// Where a server name leads, and the name that says so. That is the name itself, or else the parent of
    /// the longest wildcard, as in Envoy.
    pub fn host(&self, name: &HostName) -> Option<(&HostName, &T)> {
        if let Some(exact) = self.hosts.get_key_value(name) {
            return Some(exact);
        }
        if self.wildcards.is_empty() || self.kept.contains(name) {
            return None;
        }
        for parent in name.parents() {
            let found = self.wildcards.get_key_value(parent);
            if found.is_some() || self.kept_wildcards.contains(parent) {
                return found;
            }
        }
        None
    }

    /// Keeps a server name, or a wildcard, from every wildcard that is shorter. Returns whether it was not
    /// kept before.
    pub fn keep(&mut self, host: HostName) -> bool {
        match host.parent_of_wildcard() {
            Some(parent) => self.kept_wildcards.insert(parent),
            None => self.kept.insert(host),
        }
    }

    /// Ends that. Returns whether it was kept.
    pub fn let_go(&mut self, host: &HostName) -> bool {
        match host.parent_of_wildcard() {
            Some(parent) => self.kept_wildcards.remove(&parent),
            None => self.kept.remove(host),
        }
    }

    /// Makes `key` lead to `target`. Returns where it led before.
    pub fn insert(&mut self, key: RouteKey, target: T) -> Option<T> {
        match key {
            RouteKey::Port(port) => self.ports.insert(port, target),
            RouteKey::Host(host) => match host.parent_of_wildcard() {
                Some(parent) => self.wildcards.insert(parent, target),
                None => self.hosts.insert(host, target),
            },
            RouteKey::Authority(authority) => self.authorities.insert(authority, target),
        }
    }

    /// Removes `key`. Returns where it led.
    pub fn remove(&mut self, key: &RouteKey) -> Option<T> {
        match key {
            RouteKey::Port(port) => self.ports.remove(port),
            RouteKey::Host(host) => match host.parent_of_wildcard() {
                Some(parent) => self.wildcards.remove(&parent),
                None => self.hosts.remove(host),
            },
            RouteKey::Authority(authority) => self.authorities.remove(authority),
        }
    }

    /// The targets of all keys, in no order.
    pub fn targets_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let hosts = self.hosts.values_mut().chain(self.wildcards.values_mut());
        self.ports.values_mut().chain(hosts).chain(self.authorities.values_mut())
    }
}

impl<T> Default for RouteTable<T> {
    fn default() -> Self {
        Self {
            ports: HashMap::new(),
            hosts: HashMap::new(),
            wildcards: HashMap::new(),
            kept: HashSet::new(),
            kept_wildcards: HashSet::new(),
            authorities: HashMap::new(),
        }
    }
}

/// How one commit changes the routes. Never empty.
#[derive(Debug, Clone)]
pub struct Update {
    /// In the order in which they are to be applied; each key and each backend at most once.
    pub changes: Vec<RouteChange>,
}

/// One change to the routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteChange {
    /// A backend, or its endpoints, policy or settings. It is applied before the first route that leads to
    /// it, and deleted after the last.
    Backend(Change<Arc<Backend>>),
    /// A key that leads elsewhere than before, or nowhere any more.
    Route(Change<Route>),
    /// A server name that is kept for a Service that may be made anew: no shorter wildcard stands for it.
    Kept(Change<HostName>),
    /// How clients from outside reach the gateway, as far as Services say.
    Front(Option<Front>),
}
