//! An index, and a route table that follows what it says has changed: what a gateway knows.

use std::collections::{BTreeMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;

use portico_api::change::Change;
use portico_api::names::HostName;
use portico_routes::index::{IndexChange, RouteIndex, Settings};
use portico_routes::route::{Backend, BackendId, Route, RouteKey};
use portico_routes::table::{RouteChange, RouteTable};

#[derive(Debug)]
pub(crate) struct Follower {
    index: RouteIndex,
    pub(crate) backends: BTreeMap<Arc<BackendId>, Arc<Backend>>,
    pub(crate) table: RouteTable<Arc<BackendId>>,
}

/// An index of a directory, with `changes` applied and committed.
pub(crate) fn index(changes: impl IntoIterator<Item = IndexChange>) -> Follower {
    let mut follower = Follower::new(Settings::default());
    follower.apply(changes);
    follower
}

/// An index of a seed cluster, with `changes` applied and committed.
pub(crate) fn seed_index(changes: impl IntoIterator<Item = IndexChange>) -> Follower {
    let mut follower = Follower::new(Settings { in_kubernetes: true, ..Settings::default() });
    follower.apply(changes);
    follower
}

impl Follower {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { index: RouteIndex::new(settings), backends: BTreeMap::new(), table: RouteTable::default() }
    }

    /// Applies `changes` and commits. Returns what the commit says has changed, which the table has followed.
    pub(crate) fn apply(&mut self, changes: impl IntoIterator<Item = IndexChange>) -> Vec<RouteChange> {
        let before = (self.index.problems_version(), self.problem_lines());
        changes.into_iter().for_each(|change| self.index.apply(change));
        let update = self.index.commit();
        if self.index.problems_version() == before.0 {
            assert_eq!(self.problem_lines(), before.1, "problems changed, and their version did not");
        }
        let Some(update) = update else { return Vec::new() };
        assert!(!update.changes.is_empty());
        self.follow(&update.changes);
        update.changes
    }

    /// Applies what a commit says, and checks that each part of it is needed, possible and said once.
    fn follow(&mut self, changes: &[RouteChange]) {
        let (mut keys, mut backends) = (HashSet::new(), HashSet::new());
        for change in changes {
            match change {
                RouteChange::Backend(change) => {
                    assert!(backends.insert(change.key()), "{} twice", change.key());
                    self.follow_backend(change);
                }
                RouteChange::Front(front) => assert_eq!(front.as_ref(), self.index.front()),
                RouteChange::Kept(Change::Apply(name)) => drop(self.table.keep(name.clone())),
                RouteChange::Kept(Change::Delete(name)) => assert!(self.table.let_go(name)),
                RouteChange::Route(change) => {
                    assert!(keys.insert(change.key()), "{} twice", change.key());
                    self.follow_route(change);
                }
            }
        }
    }

    fn follow_backend(&mut self, change: &Change<Arc<Backend>>) {
        match change {
            Change::Apply(new) => {
                let before = self.backends.insert(new.id.clone(), Arc::clone(new));
                assert_ne!(before.as_ref(), Some(new), "{} did not change", new.id);
            }
            Change::Delete(id) => {
                assert!(self.backends.remove(id).is_some(), "{id} was not there");
                assert!(!self.routes().values().any(|to| *to == **id), "a route still leads to {id}");
            }
        }
    }

    fn follow_route(&mut self, change: &Change<Route>) {
        match change {
            Change::Apply(Route { key, to }) => {
                assert!(self.backends.contains_key(to), "{key} leads to {to}, which is not known");
                assert_ne!(self.table.insert(key.clone(), to.clone()).as_ref(), Some(to));
            }
            Change::Delete(key) => {
                assert!(self.table.remove(key).is_some(), "{key} led nowhere already");
            }
        }
    }

    /// Where every key leads.
    pub(crate) fn routes(&self) -> BTreeMap<RouteKey, BackendId> {
        let table = self.table.clone();
        let ports = table.ports.into_iter().map(|(port, to)| (RouteKey::Port(port), to));
        let hosts = table.hosts.into_iter().map(|(host, to)| (RouteKey::Host(host), to));
        let authorities = table.authorities.into_iter().map(|(name, to)| (RouteKey::Authority(name), to));
        let wildcard = |parent| RouteKey::Host(HostName::parse_pattern(&format!("*.{parent}")).unwrap());
        let wildcards = table.wildcards.into_iter().map(|(parent, to)| (wildcard(parent), to));
        let all = ports.chain(hosts).chain(wildcards).chain(authorities);
        all.map(|(key, to)| (key, BackendId::clone(&to))).collect()
    }

    /// Where `key` leads.
    pub(crate) fn lead(&self, key: &RouteKey) -> Option<&Arc<Backend>> {
        let to = match key {
            RouteKey::Port(port) => self.table.ports.get(port),
            RouteKey::Host(host) => self.table.host(host).map(|(_, to)| to),
            RouteKey::Authority(authority) => self.table.authorities.get(authority),
        };
        to.map(|to| &self.backends[to])
    }

    /// The Service that `key` leads to.
    pub(crate) fn owner(&self, key: &RouteKey) -> Option<String> {
        Some(self.lead(key)?.id.service.to_string())
    }

    /// The endpoints behind `key`, as text; panics without a route.
    pub(crate) fn endpoints(&self, key: &RouteKey) -> Vec<String> {
        let backend = self.lead(key).expect("the key has a route");
        backend.endpoints.iter().map(ToString::to_string).collect()
    }

    /// The reasons of all problems, sorted.
    pub(crate) fn reasons(&self) -> Vec<&'static str> {
        let mut reasons: Vec<_> = self.problems().map(|problem| problem.reason).collect();
        reasons.sort_unstable();
        reasons
    }

    /// All problems, each in one line, sorted.
    pub(crate) fn problem_lines(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.problems().map(|problem| problem.to_string()).collect();
        problems.sort_unstable();
        problems
    }
}

impl Deref for Follower {
    type Target = RouteIndex;

    fn deref(&self) -> &RouteIndex {
        &self.index
    }
}
