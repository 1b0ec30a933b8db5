//! The route table as the workers see it: keys that lead to [`Upstream`]s, replaced as a whole, read without a lock.
//!
//! An [`Update`] from `portico-routes` says what changed; only that is touched. Endpoints change inside an [`Upstream`], so
//! a table is replaced only when a key comes, goes or leads elsewhere.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use portico_api::names::{Authority, ClusterName, HostName};
use portico_routes::route::{Backend, BackendId, RouteKey};
use portico_routes::table::{RouteChange, SharedMap, Update};

use crate::cluster::Cluster;
use crate::upstream::{Endpoint, Upstream};

/// Where keys lead, at one moment.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    /// By NodePort number.
    pub ports: SharedMap<u16, Arc<Upstream>>,
    /// By server name.
    pub hosts: SharedMap<HostName, Arc<Upstream>>,
    /// By CONNECT authority.
    pub authorities: SharedMap<Authority, Arc<Upstream>>,
}

/// The current [`Routes`], and everything that outlives one of them.
#[derive(Debug, Default)]
pub struct Live {
    routes: ArcSwap<Routes>,
    /// Locked by updates and by whoever lists everything; never on the way of a connection.
    book: Mutex<Book>,
}

/// Tables rather than maps: the keys stand in the values already.
#[derive(Debug, Default)]
struct Book {
    hasher: RandomState,
    /// By [`Upstream::id`].
    upstreams: HashTable<Arc<Upstream>>,
    /// By name.
    clusters: HashTable<Member>,
}

/// A cluster that has a route.
#[derive(Debug)]
struct Member {
    cluster: Arc<Cluster>,
    /// Number of upstreams that belong to it.
    upstreams: u32,
}

/// What an update means for the listeners and for connections that are open.
#[derive(Debug, Default)]
pub(crate) struct Applied {
    pub(crate) opened_ports: Vec<u16>,
    pub(crate) closed_ports: Vec<u16>,
    /// Endpoints that left their Service.
    pub(crate) departed: Vec<Arc<Endpoint>>,
}

impl Live {
    /// The routes of this moment. One atomic read: cheap enough for every connection.
    pub fn routes(&self) -> arc_swap::Guard<Arc<Routes>> {
        self.routes.load()
    }

    /// Every cluster that has a route.
    pub fn clusters(&self) -> Vec<Arc<Cluster>> {
        self.lock().clusters.iter().map(|member| Arc::clone(&member.cluster)).collect()
    }

    /// Every upstream a route leads to.
    pub fn upstreams(&self) -> Vec<Arc<Upstream>> {
        self.lock().upstreams.iter().cloned().collect()
    }

    /// Takes over what changed.
    pub(crate) fn apply(&self, update: &Update) -> Applied {
        let mut book = self.lock();
        let mut routes = Routes::clone(&self.routes.load());
        let mut applied = Applied::default();
        for change in &update.changes {
            match change {
                RouteChange::Backend(backend) => applied.departed.extend(book.put(backend, &mut routes)),
                RouteChange::Route { key, to } => {
                    let Some(upstream) = book.upstream(to).cloned() else {
                        tracing::error!(%key, backend = %to, "route to a backend that was never announced; skipped");
                        continue;
                    };
                    match key {
                        RouteKey::Port(port) => {
                            if routes.ports.insert(*port, upstream).is_none() {
                                applied.opened_ports.push(*port);
                            }
                        }
                        RouteKey::Host(host) => drop(routes.hosts.insert(host.clone(), upstream)),
                        RouteKey::Authority(name) => drop(routes.authorities.insert(name.clone(), upstream)),
                    }
                }
                RouteChange::NoRoute(key) => match key {
                    RouteKey::Port(port) => {
                        routes.ports.remove(port);
                        applied.closed_ports.push(*port);
                    }
                    RouteKey::Host(host) => drop(routes.hosts.remove(host)),
                    RouteKey::Authority(authority) => drop(routes.authorities.remove(authority)),
                },
                RouteChange::NoBackend(id) => applied.departed.extend(book.remove(id)),
            }
        }
        self.routes.store(Arc::new(routes));
        applied
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Book> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn upstream(&self, id: &BackendId) -> Option<&Arc<Upstream>> {
        self.upstreams.find(self.hasher.hash_one(id), |upstream| upstream.is(id))
    }

    /// Adds or updates an upstream; returns the endpoints that left it.
    fn put(&mut self, backend: &Arc<Backend>, routes: &mut Routes) -> Vec<Arc<Endpoint>> {
        let old = self.upstream(&backend.id).cloned();
        if let Some(upstream) = &old
            && upstream.cluster.name == backend.policy.cluster
        {
            return upstream.update(Arc::clone(backend));
        }
        let cluster = self.join(&backend.policy.cluster);
        let new = Arc::new(Upstream::new(Arc::clone(backend), cluster));
        // The Service changed hands: rare enough to look at every route for it.
        let departed = old.map(|old| {
            self.remove(&backend.id);
            replace(&mut routes.ports, &old, &new);
            replace(&mut routes.hosts, &old, &new);
            replace(&mut routes.authorities, &old, &new);
            old.endpoints()
        });
        let hasher = &self.hasher;
        let hash = hasher.hash_one(&backend.id);
        self.upstreams.insert_unique(hash, new, |other| hasher.hash_one(other.id()));
        departed.unwrap_or_default()
    }

    fn remove(&mut self, id: &BackendId) -> Vec<Arc<Endpoint>> {
        let hash = self.hasher.hash_one(id);
        let Ok(entry) = self.upstreams.find_entry(hash, |upstream| upstream.is(id)) else {
            return Vec::new();
        };
        let (upstream, _) = entry.remove();
        self.leave(&upstream.cluster.name);
        upstream.endpoints()
    }

    fn join(&mut self, name: &ClusterName) -> Arc<Cluster> {
        let hasher = &self.hasher;
        let is = |member: &Member| member.cluster.name == *name;
        let entry =
            self.clusters.entry(hasher.hash_one(name), is, |other| hasher.hash_one(&other.cluster.name));
        let mut entry = match entry {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => {
                entry.insert(Member { cluster: Arc::new(Cluster::new(name.clone())), upstreams: 0 })
            }
        };
        entry.get_mut().upstreams += 1;
        Arc::clone(&entry.get().cluster)
    }

    fn leave(&mut self, name: &ClusterName) {
        let hash = self.hasher.hash_one(name);
        let Ok(mut entry) = self.clusters.find_entry(hash, |member| member.cluster.name == *name) else {
            return;
        };
        entry.get_mut().upstreams -= 1;
        if entry.get().upstreams == 0 {
            entry.remove();
        }
    }
}

fn replace<K: Clone + Eq + std::hash::Hash>(
    map: &mut SharedMap<K, Arc<Upstream>>,
    old: &Arc<Upstream>,
    new: &Arc<Upstream>,
) {
    let keys: Vec<K> =
        map.iter().filter(|(_, upstream)| Arc::ptr_eq(upstream, old)).map(|(key, _)| key.clone()).collect();
    for key in keys {
        map.insert(key, Arc::clone(new));
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use portico_api::meta::ObjectKey;
    use portico_api::policy::ClusterPolicy;
    use portico_routes::table::RouteTable;

    use super::*;

    fn backend(cluster: &str, endpoints: &[&str]) -> Arc<Backend> {
        Arc::new(Backend {
            id: BackendId {
                service: ObjectKey::new("cluster-a", "api"),
                port_name: "secure".into(),
                port: 443,
            },
            endpoints: endpoints.iter().map(|text| text.parse::<SocketAddr>().unwrap()).collect(),
            policy: Arc::new(ClusterPolicy::open(ClusterName::new(cluster))),
            send_proxy: false,
            api_server_ca: None,
        })
    }

    fn apply(live: &Live, changes: Vec<RouteChange>) -> Applied {
        live.apply(&Update { table: RouteTable::default(), changes })
    }

    fn host(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn expose(live: &Live) -> Arc<Backend> {
        let backend = backend("a", &["192.0.2.1:6443", "192.0.2.2:6443"]);
        let routes = [RouteKey::Host(host("a.example.com")), RouteKey::Port(31000)];
        let mut changes = vec![RouteChange::Backend(Arc::clone(&backend))];
        changes.extend(routes.map(|key| RouteChange::Route { key, to: backend.id.clone() }));
        assert_eq!(apply(live, changes).opened_ports, [31000]);
        backend
    }

    #[test]
    fn new_endpoints_reach_an_upstream_whose_identity_and_knowledge_stay() {
        let live = Live::default();
        expose(&live);
        let before = Arc::clone(live.routes().hosts.get(&host("a.example.com")).unwrap());
        let kept = Arc::clone(&before.endpoints()[1]);
        let applied = apply(&live, vec![RouteChange::Backend(backend("a", &["192.0.2.2:6443"]))]);
        let after = Arc::clone(live.routes().hosts.get(&host("a.example.com")).unwrap());
        assert!(Arc::ptr_eq(&before, &after));
        assert!(Arc::ptr_eq(&kept, &after.endpoints()[0]));
        assert_eq!(applied.departed[0].address, "192.0.2.1:6443".parse().unwrap());
    }

    #[test]
    fn a_removed_service_leaves_no_route_no_upstream_and_no_cluster() {
        let live = Live::default();
        let backend = expose(&live);
        let gone = [RouteKey::Host(host("a.example.com")), RouteKey::Port(31000)].map(RouteChange::NoRoute);
        let mut changes = Vec::from(gone);
        changes.push(RouteChange::NoBackend(backend.id.clone()));
        let applied = apply(&live, changes);
        assert_eq!(applied.closed_ports, [31000]);
        assert_eq!(applied.departed.len(), 2);
        assert!(live.routes().hosts.is_empty() && live.upstreams().is_empty() && live.clusters().is_empty());
    }

    #[test]
    fn a_service_that_changes_hands_takes_its_routes_to_the_new_cluster() {
        let live = Live::default();
        expose(&live);
        apply(&live, vec![RouteChange::Backend(backend("b", &["192.0.2.1:6443"]))]);
        let routes = live.routes();
        assert_eq!(routes.hosts.get(&host("a.example.com")).unwrap().cluster.name.as_str(), "b");
        assert_eq!(routes.ports.get(&31000).unwrap().cluster.name.as_str(), "b");
        assert_eq!(live.clusters().len(), 1);
    }
}
