//! The way to each cluster of a seed as a chain of links, up to the first that is broken: for `portico why`
//! and `portico status`.
//!
//! Objects are read from the seed's API; gateways are asked by their admin listener through that API, so that
//! a kubeconfig is all that is needed; name, TLS and answer are tried from the machine this runs on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use portico_admin::table;
use portico_api::cluster::Cluster;
use portico_api::meta::{Kind, ObjectKey};
use portico_api::names::ClusterName;
use portico_api::problem::Problem;
use portico_api::strategy::ExposeStrategy;
use portico_expose::front::SNI_PORT;
use portico_expose::services::APISERVER;
use portico_expose::strategy::{self, FRONT};
use portico_kube::{Client, read};
use portico_routes::route::RouteKey;
use portico_routes::rows::{RouteRow, RouteState};
use portico_source::Object;
use serde::Deserialize;
use serde_json::Value;

use crate::args::{duration, kubeconfig, object_key};
use crate::offline::live_site;

pub(crate) mod doors;
mod gateways;
mod here;
mod inside;
mod links;
mod orphans;

use doors::{Doors, Migration};
use gateways::{Gateways, LoadBalancers};
pub(crate) use links::Link;
use links::State;
pub(crate) use orphans::Orphan;

/// The seed that is asked, and where its gateways are.
#[derive(Debug, Args)]
pub(crate) struct SeedFlags {
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, the pod's own, or ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The Service of the load balancer in front of the gateways; they are in its namespace
    #[arg(long, value_name = "NS/NAME", default_value = "portico/portico", value_parser = object_key)]
    service: ObjectKey,
    /// Port at which clients find the listener that routes by server name
    #[arg(long, value_name = "PORT", default_value_t = SNI_PORT)]
    sni_port: u16,
    /// How long reading the seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    timeout: Duration,
}

/// All that was read of a seed, once.
pub(crate) struct Seed {
    client: Client,
    problems: Vec<Problem>,
    rows: BTreeMap<Box<str>, Vec<RouteRow>>,
    clusters: BTreeMap<Arc<str>, Cluster>,
    doors: Doors,
    gateways: Gateways,
    load_balancers: LoadBalancers,
    front: ObjectKey,
    sni_port: u16,
}

impl Seed {
    /// Reads the objects of a seed, and what its gateways say.
    pub(crate) async fn read(flags: &SeedFlags) -> anyhow::Result<Self> {
        let kubeconfig = kubeconfig(flags.kubeconfig.as_deref());
        let client = portico_kube::client(kubeconfig.as_deref()).await?;
        let site = live_site(&client, flags.timeout).await?;
        let clusters = site.originals.iter().filter_map(|object| match object {
            Object::Cluster(cluster) => Some((cluster.metadata.name.clone(), (**cluster).clone())),
            _ => None,
        });
        let clusters = clusters.collect();
        let mut rows = BTreeMap::<Box<str>, Vec<RouteRow>>::new();
        for row in site.pipeline.rows() {
            rows.entry((*row.backend.service.namespace).into()).or_default().push(row);
        }
        Ok(Self {
            doors: doors::recorded(&client, &site.originals, &clusters).await?,
            clusters,
            problems: site.pipeline.problems().into_iter().collect(),
            rows,
            gateways: Gateways::ask(&client, &flags.service.namespace).await?,
            load_balancers: LoadBalancers::read(&client).await?,
            front: flags.service.clone(),
            sni_port: flags.sni_port,
            client,
        })
    }

    /// The Clusters by name.
    pub(crate) fn clusters(&self) -> &BTreeMap<Arc<str>, Cluster> {
        &self.clusters
    }

    /// The strategy in force for a cluster: that of the door that users have been told of. Where nothing is
    /// recorded, the Cluster's own; `None` if that names none.
    pub(crate) fn in_force(&self, cluster: &Cluster) -> Option<ExposeStrategy> {
        let recorded = self.doors.get(&cluster.metadata.name).map(|now| now.first);
        recorded.or_else(|| cluster.spec.expose_strategy.get().copied())
    }

    /// What is under way between two doors of a cluster.
    pub(crate) fn migration(&self, cluster: &Cluster) -> Option<Migration> {
        doors::migration(cluster, *self.doors.get(&cluster.metadata.name)?)
    }

    /// What Clusters that are gone have left on the seed.
    pub(crate) async fn orphans(&self) -> anyhow::Result<Vec<Orphan>> {
        orphans::find(&self.client).await
    }

    /// The Service port that claims a host, or an authority.
    pub(crate) fn by_host(&self, host: &str) -> Option<&RouteRow> {
        self.rows.values().flatten().find(|row| match &row.key {
            RouteKey::Host(found) => *found.as_str() == *host,
            RouteKey::Authority(found) => *found.as_str() == *host,
            RouteKey::Port(_) => false,
        })
    }

    /// The gateways that are ready, and all of them.
    pub(crate) fn gateways(&self) -> (usize, usize) {
        self.gateways.count()
    }

    /// The links on the seed, up to the first that is broken.
    pub(crate) fn chain(&self, name: &ClusterName) -> Chain {
        let mut found = Chain::default();
        let cluster = self.clusters.get(name.as_str());
        found.push(links::object(name.as_str(), cluster));
        let Some(cluster) = cluster else { return found };
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
        found.push(links::service(&namespace, rows));
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
            None => links::gateways(&row.key, &self.gateways.with(&row.key)),
        });
        let shared = kkp.unwrap_or(&self.front).clone();
        let port = match row.key {
            RouteKey::Port(port) => port,
            RouteKey::Host(_) | RouteKey::Authority(_) => self.sni_port,
        };
        let has_own = strategy::of(strategy).has_load_balancer();
        let front = if has_own { ObjectKey::new(&namespace, FRONT) } else { shared };
        let balancer = self.load_balancers.get(&front);
        found.push(links::front(&front.to_string(), port, &balancer.ports, &balancer.addresses));
        found.front = balancer.addresses;
        found
    }

    /// The same, and what this machine sees of the name and of what answers there.
    pub(crate) async fn whole_chain(&self, name: &ClusterName) -> Chain {
        let mut found = self.chain(name);
        if found.broken().is_none()
            && let Some(cluster) = self.clusters.get(name.as_str())
        {
            here::try_address(&mut found, cluster).await;
            if found.broken().is_none() {
                inside::try_api_server(&mut found, &self.client, cluster).await;
            }
            links::inside(cluster).into_iter().for_each(|link| found.push(link));
        }
        found
    }

    /// The same, and what the cluster's API server says of one of its nodes.
    pub(crate) async fn chain_to_node(&self, name: &ClusterName, node: &str) -> Chain {
        let mut found = self.whole_chain(name).await;
        if found.broken().is_none()
            && let Some(cluster) = self.clusters.get(name.as_str())
        {
            let has_agents = self.in_force(cluster).is_some_and(|door| strategy::of(door).has_agent());
            inside::try_node(&mut found, &self.client, cluster, node, has_agents).await;
        }
        found
    }
}

/// The objects of a list of the seed's API; none where that kind is not known.
async fn items(client: &Client, path: &str, what: &str) -> anyhow::Result<Vec<Value>> {
    #[derive(Deserialize)]
    struct List {
        items: Vec<Value>,
    }
    let list: Option<List> = read(client, path, what).await?;
    Ok(list.map(|list| list.items).unwrap_or_default())
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

/// Links, until one is broken.
#[derive(Default)]
pub(crate) struct Chain {
    /// In the order in which each depends on those before it.
    pub(crate) links: Vec<Link>,
    /// Addresses of the load balancer in front.
    front: Vec<String>,
}

impl Chain {
    /// Adds a link, unless one before it is broken.
    fn push(&mut self, link: Link) {
        if self.broken().is_none() {
            self.links.push(link);
        }
    }

    /// The link that is broken, if one is.
    pub(crate) fn broken(&self) -> Option<&Link> {
        self.links.iter().find(|link| link.is_broken())
    }

    /// The chain as a table, and what follows from it.
    pub(crate) fn text(&self, name: &str) -> String {
        let row = |link: &Link| [link.link.to_owned(), link.state.to_string(), link.evidence.clone()];
        let rows: Vec<[String; 3]> = self.links.iter().map(row).collect();
        let mut text = table::render(["LINK", "STATE", "FOUND"], &rows);
        let open = self.links.iter().filter(|link| link.state != State::Holds && !link.remedy.is_empty());
        for link in open {
            text.push_str(&format!("\n{}: {}\n", link.link, link.remedy));
        }
        if self.broken().is_none() {
            text.push_str(&format!("\ncluster {name} can be reached\n"));
        }
        text
    }
}
