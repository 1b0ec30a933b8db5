//! The objects read of a seed, and the chain of each of its clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED, ExposeKeys};
use portico_api::cluster::Cluster;
use portico_api::meta::{Kind, ObjectKey};
use portico_api::names::ClusterName;
use portico_api::problem::Problem;
use portico_api::strategy::ExposeStrategy;
use portico_expose::migration::Now;
use portico_expose::services::APISERVER;
use portico_expose::strategy::{self, FRONT};
use portico_kube::Client;
use portico_routes::route::RouteKey;
use portico_routes::rows::{RouteRow, RouteState};
use portico_source::{ManifestProblem, Object, list_objects};
use portico_sync::{Site, SiteSettings};

use crate::chain::Chain;
use crate::doors::{self, Doors, Migration};
use crate::gateways::{Answers, Gateways, LoadBalancers};
use crate::links::{self, Link};
use crate::orphans::{self, Orphan};
use crate::{inside, local_view};

/// Where the gateways of a seed are.
#[derive(Debug, Clone)]
pub struct Front {
    /// The Service of the load balancer in front of the gateways, which are in its namespace.
    pub service: ObjectKey,
    /// Port at which clients find the listener that routes by server name.
    pub sni_port: u16,
}

/// All that was read of a seed, once.
pub struct SeedSnapshot {
    client: Client,
    problems: Vec<Problem>,
    rows: BTreeMap<Box<str>, Vec<RouteRow>>,
    clusters: BTreeMap<Arc<str>, Cluster>,
    /// Clusters that cannot be read, each with the reason.
    unread: BTreeMap<Arc<str>, ManifestProblem>,
    doors: Doors,
    gateways: Gateways,
    load_balancers: LoadBalancers,
    front: Front,
}

impl SeedSnapshot {
    /// Reads the objects of a seed. All together that may take as long as `timeout`.
    pub async fn read(client: Client, front: Front, timeout: Duration) -> anyhow::Result<Self> {
        // As a gateway of `portico operator` does, which opens the ports of clusters with a balancer too.
        let expose_annotations = ExposeKeys::from_iter([EXPOSE, EXPOSE_NAMESPACED]);
        let settings = SiteSettings { expose_annotations, ..SiteSettings::default() };
        let site = Site::of_seed(list_objects(&client, None, timeout).await?, &settings);
        let clusters = site.originals.iter().filter_map(|object| match object {
            Object::Cluster(cluster) => Some((cluster.metadata.name.clone(), (**cluster).clone())),
            _ => None,
        });
        let clusters = clusters.collect();
        let unread = site.loaded.problems.iter().filter_map(|problem| {
            let object = problem.object.as_ref().filter(|object| object.kind == Kind::Cluster)?;
            Some((object.key.name.clone(), problem.clone()))
        });
        let mut rows = BTreeMap::<Box<str>, Vec<RouteRow>>::new();
        for row in site.pipeline.rows() {
            rows.entry((*row.backend.service.namespace).into()).or_default().push(row);
        }
        Ok(Self {
            doors: doors::recorded(&client, &site.originals, &site.loaded.problems, &clusters).await?,
            clusters,
            unread: unread.collect(),
            problems: site.pipeline.problems().into_iter().collect(),
            rows,
            gateways: Gateways::find(&client, &front.service.namespace).await?,
            load_balancers: LoadBalancers::read(&client).await?,
            front,
            client,
        })
    }

    /// The Clusters that can be read, by name.
    pub fn clusters(&self) -> &BTreeMap<Arc<str>, Cluster> {
        &self.clusters
    }

    /// The strategy in force for a cluster: that of the published door. Without a usable record it is the
    /// Cluster's own. `None` if the Cluster names none.
    pub fn in_force(&self, cluster: &Cluster) -> Option<ExposeStrategy> {
        self.recorded(cluster).map(|now| now.first).or_else(|| cluster.spec.expose_strategy.get().copied())
    }

    /// The migration under way between two doors of a cluster.
    pub fn migration(&self, cluster: &Cluster) -> Option<Migration> {
        doors::migration(cluster, self.recorded(cluster)?)
    }

    fn recorded(&self, cluster: &Cluster) -> Option<Now> {
        self.doors.get(&cluster.metadata.name)?.as_ref().ok().copied()
    }

    /// The objects that removed Clusters have left on the seed.
    pub async fn orphans(&self) -> anyhow::Result<Vec<Orphan>> {
        orphans::find(&self.client).await
    }

    /// The Service port that claims a host, or an authority.
    pub fn by_host(&self, host: &str) -> Option<&RouteRow> {
        self.rows.values().flatten().find(|row| match &row.key {
            RouteKey::Host(found) => *found.as_str() == *host,
            RouteKey::Authority(found) => *found.as_str() == *host,
            RouteKey::Port(_) => false,
        })
    }

    /// The gateways that are ready, and all of them.
    pub fn gateways(&self) -> (usize, usize) {
        self.gateways.count()
    }

    /// All Clusters by name, each with its links on the seed, up to the first that is broken.
    pub async fn chains(&self) -> Vec<(&str, Chain)> {
        let answers = self.gateways.ask(&self.client, None).await;
        let all: BTreeSet<&str> =
            self.clusters.keys().chain(self.unread.keys()).map(|name| &**name).collect();
        all.into_iter().map(|name| (name, self.chain(&ClusterName::new(name), &answers))).collect()
    }

    fn chain(&self, name: &ClusterName, answers: &Answers) -> Chain {
        let mut found = Chain::default();
        let cluster = self.clusters.get(name.as_str());
        found.push(links::object(name.as_str(), cluster, self.unread.get(name.as_str())));
        let Some(cluster) = cluster else { return found };
        if let Some(Err(why)) = self.doors.get(&cluster.metadata.name) {
            found.push(doors::unusable(why));
        }
        if let Some(migration) = self.migration(cluster) {
            found.push(migration.link());
        }
        let namespace = name.namespace();
        let rows = self.rows.get(&*namespace).map_or(&[][..], Vec::as_slice);
        let own = self.problems.iter().filter(|problem| {
            let object = &problem.object;
            let key = &object.key;
            (object.kind == Kind::Cluster && *key.name == *name.as_str()) || *key.namespace == *namespace
        });
        found.push(links::configuration(own));
        found.push(links::condition(cluster));
        found.push(links::service(cluster, &namespace, rows));
        found.push(links::endpoints(rows));
        let strategy = self.in_force(cluster).unwrap_or_default();
        let Some(row) = way_in(strategy, rows) else {
            let text = format!("the strategy is {strategy}, and no Service of {namespace} asks for that");
            let remedy = "see its annotation nodeport-proxy.k8s.io/expose and its type";
            found.push(Link::broken("Service", text, remedy));
            return found;
        };
        if row.state == RouteState::ListenersOff {
            found.push(links::nodes(&row.key));
            return found;
        }
        let kkp = self.load_balancers.of_kkp().filter(|_| self.gateways.count().1 == 0);
        found.push(match kkp {
            Some(proxy) => links::of_kkp(&proxy.to_string()),
            None => links::gateways(&row.key, &answers.with(&row.key)),
        });
        let shared = kkp.unwrap_or(&self.front.service).clone();
        let port = match row.key {
            RouteKey::Port(port) => port,
            RouteKey::Host(_) | RouteKey::Authority(_) => self.front.sni_port,
        };
        let has_own = strategy::of(strategy).has_load_balancer();
        let front = if has_own { ObjectKey::new(&namespace, FRONT) } else { shared };
        let balancer = self.load_balancers.get(&front);
        found.push(links::front(&front.to_string(), port, &balancer.ports, &balancer.addresses));
        found.front = balancer.addresses;
        found
    }

    /// The links on the seed, and what this machine sees of the name and of what answers there, up to the
    /// first that is broken.
    pub async fn whole_chain(&self, name: &ClusterName) -> Chain {
        let answers = match self.clusters.contains_key(name.as_str()) {
            true => self.gateways.ask(&self.client, Some(name.as_str())).await,
            false => Answers::default(),
        };
        let mut found = self.chain(name, &answers);
        if found.broken().is_none()
            && let Some(cluster) = self.clusters.get(name.as_str())
        {
            local_view::try_address(&mut found, cluster).await;
            if found.broken().is_none() {
                inside::try_api_server(&mut found, &self.client, cluster).await;
            }
            links::inside(cluster).into_iter().for_each(|link| found.push(link));
        }
        found
    }

    /// As [`Self::whole_chain`], and what the cluster's API server says of one of its nodes.
    pub async fn chain_to_node(&self, name: &ClusterName, node: &str) -> Chain {
        let mut found = self.whole_chain(name).await;
        if found.broken().is_none()
            && let Some(cluster) = self.clusters.get(name.as_str())
        {
            let door = self.in_force(cluster).unwrap_or_default();
            inside::try_node(&mut found, &self.client, cluster, node, door).await;
        }
        found
    }
}

/// The key by which users come: the API server's NodePort where the strategy has those, its host otherwise.
fn way_in(strategy: ExposeStrategy, rows: &[RouteRow]) -> Option<&RouteRow> {
    let by_port = strategy::of(strategy).has_node_ports();
    rows.iter().filter(|row| *row.backend.service.name == *APISERVER).find(|row| match row.key {
        RouteKey::Host(_) => !by_port,
        RouteKey::Port(_) => by_port,
        RouteKey::Authority(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use http_body_util::Full;
    use hyper::body::Bytes;
    use kube::client::Body;
    use serde_json::json;
    use tower::service_fn;

    use super::*;
    use crate::cluster::read_cluster;

    /// A seed of one Cluster, which cannot be read.
    fn seed() -> Client {
        let service = service_fn(|request: Request<Body>| async move {
            let misfit = json!({"metadata": {"name": "a"}, "spec": {"auditLogging": "yes"}});
            let answer = match request.uri().path() {
                "/apis/kubermatic.k8c.io/v1/clusters" => json!({"metadata": {}, "items": [misfit]}),
                "/apis/kubermatic.k8c.io/v1/clusters/a" => misfit,
                _ => json!({"metadata": {}, "items": []}),
            };
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(answer.to_string()))))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_cluster_that_cannot_be_read_is_there_and_its_field_is_named() {
        let front = Front { service: ObjectKey::new("portico", "portico"), sni_port: 6_443 };
        let snapshot = SeedSnapshot::read(seed(), front, Duration::from_secs(60)).await.unwrap();
        let (name, chain) = snapshot.chains().await.remove(0);
        let expected = "a cannot be read: spec.auditLogging: invalid type";
        assert_eq!(name, "a");
        let one = snapshot.whole_chain(&ClusterName::new("a")).await;
        for chain in [chain, one] {
            assert!(chain.broken().unwrap().evidence.starts_with(expected), "{chain:?}");
        }
        let error = read_cluster(&seed(), "a").await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("Cluster {expected}")), "{error}");
    }
}
