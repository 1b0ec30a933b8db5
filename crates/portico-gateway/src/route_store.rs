//! The routes in force: one table that workers read without a lock, and the state that outlives a table.
//!
//! An [`Update`] from `portico-routes` says what changed, and only that is touched. Endpoints change inside
//! an [`Upstream`]; the table is replaced by a changed clone if a key is added, removed or
//! leads elsewhere.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arc_swap::ArcSwap;
use portico_api::change::Change;
use portico_api::names::Tenant;
use portico_routes::route::{Backend, BackendId, Endpoints, Front, RouteKey};
use portico_routes::table::{RouteChange, RouteTable, Update};

use crate::cluster::Cluster;
use crate::fair_share::FairShare;
use crate::upstream::{Endpoint, Upstream};

/// Where every key leads, at one moment.
pub type Routes = RouteTable<Arc<Upstream>>;

/// The current [`Routes`], and the upstreams and clusters behind them.
#[derive(Debug)]
pub struct RouteStore {
    routes: ArcSwap<Routes>,
    fair_share: Arc<FairShare>,
    /// What keys lead to. The upstreams stay the same objects while tables are replaced, because they count
    /// connections. Locked by updates and listings, never on the path of a connection.
    upstreams: Mutex<Upstreams>,
    /// Locked for one look-up or change: a tunnel connection with a certificate looks its cluster up.
    clusters: Mutex<Clusters>,
}

/// Upstreams by the Service port that they are.
#[derive(Debug, Default)]
struct Upstreams {
    members: HashMap<Arc<BackendId>, Arc<Upstream>>,
    /// Upstreams of Services that are gone, with endpoints that have connections open. A Service that is made
    /// anew finds its endpoints known.
    unrouted: HashMap<Arc<BackendId>, Arc<Upstream>>,
}

/// The clusters of the upstreams, by name.
#[derive(Debug, Default)]
struct Clusters {
    members: HashMap<Tenant, Member>,
    /// Clusters without a route: those with connections open are still listed, and a Service that is made
    /// anew finds these counted.
    unrouted: HashMap<Tenant, Weak<Cluster>>,
}

/// A cluster with at least one upstream.
#[derive(Debug)]
struct Member {
    cluster: Arc<Cluster>,
    /// Number of upstreams that belong to it.
    upstreams: u32,
}

/// The effect of an update on listeners and open connections.
#[derive(Debug, Default)]
pub(crate) struct Applied {
    pub(crate) opened_ports: Vec<u16>,
    pub(crate) closed_ports: Vec<u16>,
    /// Endpoints that are no longer ready endpoints of their Service.
    pub(crate) removed_endpoints: Vec<Arc<Endpoint>>,
    /// How clients reach the gateway, if that changed.
    pub(crate) front: Option<Option<Front>>,
}

impl RouteStore {
    pub(crate) fn new(fair_share: FairShare) -> Self {
        Self {
            routes: ArcSwap::default(),
            fair_share: Arc::new(fair_share),
            upstreams: Mutex::default(),
            clusters: Mutex::default(),
        }
    }

    pub(crate) fn fair_share(&self) -> &FairShare {
        &self.fair_share
    }

    /// The routes of this moment. One atomic read: cheap enough for every connection.
    pub fn routes(&self) -> arc_swap::Guard<Arc<Routes>> {
        self.routes.load()
    }

    /// Every cluster that has a route, or had one and has connections still open.
    pub fn clusters(&self) -> Vec<Arc<Cluster>> {
        let clusters = lock(&self.clusters);
        let unrouted = clusters.unrouted.values().filter_map(Weak::upgrade);
        let unrouted = unrouted.filter(|cluster| cluster.is_in_use());
        clusters.members.values().map(|member| Arc::clone(&member.cluster)).chain(unrouted).collect()
    }

    /// The cluster of this name, if it has a route.
    pub(crate) fn cluster(&self, name: &Tenant) -> Option<Arc<Cluster>> {
        lock(&self.clusters).members.get(name).map(|member| Arc::clone(&member.cluster))
    }

    /// Every upstream that a route leads to.
    pub fn upstreams(&self) -> Vec<Arc<Upstream>> {
        lock(&self.upstreams).members.values().cloned().collect()
    }

    /// Applies what changed.
    pub(crate) fn apply(&self, update: &Update) -> Applied {
        let mut upstreams = lock(&self.upstreams);
        let mut routes = self.routes.load_full();
        let mut applied = Applied::default();
        for change in &update.changes {
            match change {
                RouteChange::Backend(Change::Apply(backend)) => {
                    let removed = self.put(&mut upstreams, backend, &mut routes);
                    applied.removed_endpoints.extend(removed);
                }
                RouteChange::Backend(Change::Delete(id)) => {
                    applied.removed_endpoints.extend(self.remove(&mut upstreams, id));
                }
                RouteChange::Route(Change::Apply(route)) => {
                    let Some(upstream) = upstreams.members.get(&route.to) else {
                        let (key, backend) = (&route.key, &route.to);
                        tracing::error!(%key, %backend, "a route leads to an unknown backend; skipped");
                        continue;
                    };
                    // Workers read the current table: the first change of an update clones it.
                    let before = Arc::make_mut(&mut routes).insert(route.key.clone(), Arc::clone(upstream));
                    if let (RouteKey::Port(port), None) = (&route.key, before) {
                        applied.opened_ports.push(*port);
                    }
                }
                RouteChange::Kept(change) => {
                    let routes = Arc::make_mut(&mut routes);
                    match change {
                        Change::Apply(name) => routes.keep(name.clone()),
                        Change::Delete(name) => routes.let_go(name),
                    };
                }
                RouteChange::Front(front) => applied.front = Some(front.clone()),
                RouteChange::Route(Change::Delete(key)) => {
                    Arc::make_mut(&mut routes).remove(key);
                    if let RouteKey::Port(port) = key {
                        applied.closed_ports.push(*port);
                    }
                }
            }
        }
        upstreams.unrouted.retain(|_, upstream| upstream.has_removed_endpoints());
        lock(&self.clusters).unrouted.retain(|_, cluster| cluster.strong_count() > 0);
        self.routes.store(routes);
        applied
    }

    /// Adds or updates an upstream. Returns the endpoints it no longer has.
    fn put(
        &self,
        upstreams: &mut Upstreams,
        backend: &Arc<Backend>,
        routes: &mut Arc<Routes>,
    ) -> Vec<Arc<Endpoint>> {
        let old = upstreams.members.get(&backend.id).cloned();
        if let Some(upstream) = &old
            && upstream.cluster.name == backend.policy.tenant
        {
            upstream.cluster.set_fair_share(backend.policy.budget.fair_share);
            return upstream.update(Arc::clone(backend));
        }
        let cluster = lock(&self.clusters).join(&backend.policy.tenant, &self.fair_share);
        cluster.set_fair_share(backend.policy.budget.fair_share);
        let known = upstreams.unrouted.remove(&backend.id);
        let new = match known.filter(|known| Arc::ptr_eq(&known.cluster, &cluster)) {
            Some(known) => {
                known.update(Arc::clone(backend));
                known
            }
            None => Arc::new(Upstream::new(Arc::clone(backend), cluster)),
        };
        // The Service belongs to another cluster now: rare enough to look at every route.
        let removed = old.map(|old| {
            let targets = Arc::make_mut(routes).targets_mut();
            for target in targets.filter(|target| Arc::ptr_eq(target, &old)) {
                *target = Arc::clone(&new);
            }
            self.remove(upstreams, &backend.id)
        });
        upstreams.members.insert(Arc::clone(&backend.id), new);
        removed.unwrap_or_default()
    }

    /// Removes an upstream. Returns the endpoints it had.
    fn remove(&self, upstreams: &mut Upstreams, id: &BackendId) -> Vec<Arc<Endpoint>> {
        let Some(upstream) = upstreams.members.remove(id) else { return Vec::new() };
        lock(&self.clusters).leave(&upstream.cluster.name);
        let without = Backend { endpoints: Endpoints::default(), ..Backend::clone(&upstream.backend()) };
        let removed = upstream.update(Arc::new(without));
        upstreams.unrouted.insert(Arc::clone(&upstream.backend().id), upstream);
        removed
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change to the maps is complete when a panic can occur.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clusters {
    fn join(&mut self, name: &Tenant, fair_share: &Arc<FairShare>) -> Arc<Cluster> {
        let unrouted = &mut self.unrouted;
        let member = self.members.entry(name.clone()).or_insert_with(|| {
            let known = unrouted.remove(name).and_then(|cluster| cluster.upgrade());
            let new = || Arc::new(Cluster::new(name.clone(), Arc::clone(fair_share)));
            Member { cluster: known.unwrap_or_else(new), upstreams: 0 }
        });
        member.upstreams += 1;
        Arc::clone(&member.cluster)
    }

    fn leave(&mut self, name: &Tenant) {
        let Some(member) = self.members.get_mut(name) else { return };
        member.upstreams -= 1;
        if member.upstreams == 0
            && let Some((name, Member { cluster, .. })) = self.members.remove_entry(name)
        {
            // Forgotten by the end of the update, unless a connection or an upstream has it.
            self.unrouted.insert(name, Arc::downgrade(&cluster));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use portico_api::meta::ObjectKey;
    use portico_api::names::HostName;
    use portico_api::policy::{Budget, ClusterPolicy};
    use portico_routes::route::Route;

    use super::*;

    fn store() -> RouteStore {
        RouteStore::new(FairShare::unlimited())
    }

    fn backend(cluster: &str, endpoints: &[&str]) -> Arc<Backend> {
        Arc::new(Backend {
            id: Arc::new(BackendId {
                service: ObjectKey::new("cluster-a", "api"),
                port_name: "secure".into(),
                port: 443,
            }),
            endpoints: endpoints.iter().map(|text| text.parse::<SocketAddr>().unwrap()).collect(),
            policy: Arc::new(ClusterPolicy::open(Tenant::of_text(cluster))),
            send_proxy: false,
            api_server_ca: None,
        })
    }

    fn applied(backend: &Arc<Backend>) -> RouteChange {
        RouteChange::Backend(Change::Apply(Arc::clone(backend)))
    }

    fn apply(store: &RouteStore, changes: Vec<RouteChange>) -> Applied {
        store.apply(&Update { changes })
    }

    fn host(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn keys() -> [RouteKey; 2] {
        [RouteKey::Host(host("a.example.com")), RouteKey::Port(31000)]
    }

    fn expose(store: &RouteStore) -> Arc<Backend> {
        let backend = backend("a", &["192.0.2.1:6443", "192.0.2.2:6443"]);
        let mut changes = vec![applied(&backend)];
        changes.extend(
            keys().map(|key| RouteChange::Route(Change::Apply(Route { key, to: backend.id.clone() }))),
        );
        assert_eq!(apply(store, changes).opened_ports, [31000]);
        backend
    }

    #[test]
    fn new_endpoints_reach_an_upstream_whose_identity_and_knowledge_stay() {
        let store = store();
        expose(&store);
        let before = Arc::clone(store.routes().hosts.get(&host("a.example.com")).unwrap());
        let kept = Arc::clone(&before.endpoints()[1]);
        let applied = apply(&store, vec![applied(&backend("a", &["192.0.2.2:6443"]))]);
        let after = Arc::clone(store.routes().hosts.get(&host("a.example.com")).unwrap());
        assert!(Arc::ptr_eq(&before, &after));
        assert!(Arc::ptr_eq(&kept, &after.endpoints()[0]));
        assert_eq!(applied.removed_endpoints[0].address, "192.0.2.1:6443".parse().unwrap());
    }

    #[test]
    fn the_fair_share_of_a_cluster_is_that_of_its_policy() {
        let store = store();
        for part in [Some(80), None, Some(20)] {
            let fair_share = part.map(|part: u8| part.try_into().unwrap());
            let open = ClusterPolicy::open(Tenant::of_text("a"));
            let policy = ClusterPolicy { budget: Budget { fair_share, ..Budget::default() }, ..open };
            let backend = Backend { policy: Arc::new(policy), ..(*backend("a", &[])).clone() };
            apply(&store, vec![applied(&Arc::new(backend))]);
            assert_eq!(store.clusters()[0].share_use().part.get(), part.unwrap_or(50));
        }
    }

    #[test]
    fn a_table_in_use_never_changes_and_new_endpoints_need_no_other() {
        let store = store();
        let empty = store.routes.load_full();
        expose(&store);
        assert!(empty.hosts.is_empty());
        let in_use = store.routes.load_full();
        apply(&store, vec![applied(&backend("a", &["192.0.2.3:6443"]))]);
        assert!(Arc::ptr_eq(&in_use, &store.routes.load_full()));
    }

    #[test]
    fn a_deleted_service_leaves_no_route_no_upstream_and_no_cluster() {
        let store = store();
        let backend = expose(&store);
        let mut changes = Vec::from(keys().map(|key| RouteChange::Route(Change::Delete(key))));
        changes.push(RouteChange::Backend(Change::Delete(Arc::clone(&backend.id))));
        let applied = apply(&store, changes);
        assert_eq!(applied.closed_ports, [31000]);
        assert_eq!(applied.removed_endpoints.len(), 2);
        assert!(
            store.routes().hosts.is_empty() && store.upstreams().is_empty() && store.clusters().is_empty()
        );
    }

    #[test]
    fn a_service_that_is_made_anew_finds_the_endpoints_of_its_connections_and_no_others() {
        let store = store();
        let backend = expose(&store);
        let upstream = Arc::clone(store.routes().ports.get(&31000).unwrap());
        let cluster = Arc::clone(&upstream.cluster);
        let in_use = Arc::clone(&upstream.endpoints()[0]);
        drop(upstream);
        let moves = in_use.moves();
        apply(&store, vec![RouteChange::Backend(Change::Delete(Arc::clone(&backend.id)))]);
        assert_ne!(in_use.moves(), moves, "it left");
        let left = in_use.moves();
        apply(&store, vec![applied(&backend)]);
        let again = store.upstreams()[0].endpoints();
        assert!(Arc::ptr_eq(&again[0], &in_use) && again.len() == 2);
        assert_ne!(in_use.moves(), left, "it is back, so that its connections stay");
        assert!(Arc::ptr_eq(&store.clusters()[0], &cluster));
        apply(&store, vec![RouteChange::Backend(Change::Delete(Arc::clone(&backend.id)))]);
        drop((again, in_use));
        apply(&store, Vec::new());
        assert!(lock(&store.upstreams).unrouted.is_empty());
    }

    #[test]
    fn a_service_that_changes_its_cluster_takes_its_routes_along() {
        let store = store();
        expose(&store);
        apply(&store, vec![applied(&backend("b", &["192.0.2.1:6443"]))]);
        let routes = store.routes();
        assert_eq!(routes.hosts.get(&host("a.example.com")).unwrap().cluster.name.as_str(), "b");
        assert_eq!(routes.ports.get(&31000).unwrap().cluster.name.as_str(), "b");
        assert_eq!(store.clusters().len(), 1);
    }
}
