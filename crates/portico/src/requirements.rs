//! The common parts of verbs that ask the port model: their product, facts and installation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow};
use clap::Args;
use portico_api::cluster::{Address, Cluster};
use portico_api::names::ClusterName;
use portico_api::service::{Service, ServiceType};
use portico_api::strategy::ExposeStrategy;
use portico_expose::doors::Doors;
use portico_expose::migration::Now;
use portico_expose::plan::Plan;
use portico_expose::services::{EXPOSED, Entry};
use portico_expose::strategy;
use portico_ports::model::{self, Product};
use portico_ports::site::{Site as Needs, SiteCluster, SiteDatacenter};
use portico_ports::{Facts, Query};
use portico_routes::route::RouteKey;
use portico_routes::rows::RouteState;
use portico_source::Object;
use portico_sync::{ReadAs, Site};
use portico_yaml::{Content, Documents, Node};

// What is known of an installation.
#[derive(Debug, Args)]
pub(crate) struct Known {
    #[arg(long, value_name = "STRATEGY")]
    #[arg(help = format!("The expose strategy: {}", ExposeStrategy::one_of(ExposeStrategy::ALL)))]
    strategy: Option<String>,
    /// The network plugin: Canal, Calico, Cilium, Flannel or Weave
    #[arg(long, value_name = "CNI")]
    cni: Option<String>,
    /// Another fact, such as air-gap=true or node-port-range=31000-31999; may be repeated. docs/ports.md
    /// lists the keys
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Known {
    /// The facts.
    pub(crate) fn facts(&self) -> anyhow::Result<Facts> {
        let mut facts = Facts::default();
        for (key, value) in [("strategy", &self.strategy), ("cni", &self.cni)] {
            if let Some(value) = value {
                facts.set(key, value)?;
            }
        }
        self.set.iter().try_for_each(|assignment| facts.assign(assignment))?;
        Ok(facts)
    }
}

// Which requirements are asked for.
#[derive(Debug, Args)]
pub(crate) struct Asked {
    /// Only those of this product: kkp, kublr or portico; may be repeated
    #[arg(long, value_name = "PRODUCT")]
    product: Vec<String>,
    /// Only those with this role at one end, by its word or its name in a table
    #[arg(long, value_name = "ROLE")]
    role: Option<String>,
    #[command(flatten)]
    known: Known,
}

impl Asked {
    /// The question.
    pub(crate) fn query(&self) -> anyhow::Result<Query> {
        let products: Result<Vec<&Product>, _> =
            self.product.iter().map(|word| model::product(word)).collect();
        Ok(Query { products: products?, role: self.role.clone(), facts: self.known.facts()? })
    }
}

/// The facts for the port model from the objects of an installation.
pub(crate) fn needs(site: &Site, kubeconfig: Option<&Path>) -> anyhow::Result<Needs> {
    let mut needs = Needs { seed_api: kubeconfig.map(server).transpose()?, ..Needs::default() };
    let mut clusters: BTreeMap<ClusterName, &Cluster> = BTreeMap::new();
    let mut recorded: BTreeMap<ClusterName, Doors> = BTreeMap::new();
    let mut services: Vec<&Service> = Vec::new();
    for object in &site.originals {
        match object {
            Object::KubermaticConfiguration(configuration) => {
                needs.domain = configuration.spec.ingress.domain.to_string();
                needs.node_port_range = configuration.spec.user_cluster.node_port_range.get().copied();
            }
            Object::Seed(seed) => {
                needs.datacenters.extend(seed.spec.datacenters.iter().flat_map(|(name, datacenter)| {
                    let clouds = datacenter.iter().flat_map(|datacenter| &datacenter.spec.clouds);
                    clouds.map(|(provider, fields)| SiteDatacenter {
                        name: name.to_string(),
                        provider,
                        fields: fields
                            .iter()
                            .map(|(key, value)| (key.to_string(), value.to_string()))
                            .collect(),
                    })
                }))
            }
            Object::Cluster(cluster) => drop(clusters.insert(cluster.name(), cluster)),
            Object::Service(service) => services.push(service),
            Object::ExposedCluster(exposed) => {
                recorded.insert(exposed.name(), Doors::of(&exposed.spec));
            }
            Object::EndpointSlice(_) => {}
        }
    }
    let plans: Vec<Plan> = site.pipeline.plans().collect();
    if site.read_as == ReadAs::Directory {
        services.extend(plans.iter().flat_map(|plan| &plan.services));
    }
    for service in &services {
        let in_seed = !service.metadata.namespace.starts_with("cluster-");
        needs.has_front_service |= in_seed && service.spec.service_type == ServiceType::LoadBalancer;
        for (port, name) in node_ports(service) {
            needs.node_ports.insert(port, format!("{}/{name}", service.metadata.namespace));
        }
    }
    for plan in &plans {
        let object = clusters.get(&plan.cluster);
        let planned = cluster(plan, object, &services);
        match recorded.get(&plan.cluster) {
            Some(doors) if doors.now != Now::settled(plan.decision.strategy) => {
                needs.clusters.extend(in_force(doors, &planned, &services));
            }
            _ => needs.clusters.push(planned),
        }
    }
    needs.clusters.extend(without_cluster(site, &plans));
    Ok(needs)
}

/// Tenants of which annotated Services alone tell: an entry for each of the two ways in that they have.
fn without_cluster(site: &Site, plans: &[Plan]) -> impl Iterator<Item = SiteCluster> {
    let planned: BTreeSet<_> = plans.iter().map(|plan| plan.cluster.namespace()).collect();
    let mut found: BTreeMap<(String, &str), SiteCluster> = BTreeMap::new();
    for row in site.pipeline.rows() {
        let is_served = matches!(row.state, RouteState::Ready | RouteState::NotReady);
        if !is_served || planned.contains(&*row.backend.service.namespace) {
            continue;
        }
        // No Cluster names one: the model has these two for the two ways in.
        let strategy = match &row.key {
            RouteKey::Port(_) => ExposeStrategy::NodePort.name(),
            RouteKey::Host(_) | RouteKey::Authority(_) => ExposeStrategy::Tunneling.name(),
        };
        let name = row.tenant.to_string();
        let tenant = found.entry((name.clone(), strategy)).or_default();
        (tenant.name, tenant.strategy) = (name, strategy);
        match &row.key {
            RouteKey::Port(port) => tenant.node_ports.push((*port, row.backend.service.name.to_string())),
            RouteKey::Host(host) if tenant.address.is_empty() && !host.as_str().starts_with('*') => {
                host.as_str().clone_into(&mut tenant.address);
            }
            RouteKey::Host(_) | RouteKey::Authority(_) => {}
        }
    }
    found.into_values()
}

fn cluster(plan: &Plan, object: Option<&&Cluster>, services: &[&Service]) -> SiteCluster {
    let namespace = plan.cluster.namespace();
    let by_port = plan.entries.iter().filter_map(|entry| {
        // In a seed it is Kubernetes that allocates them.
        let port = entry.node_port.or_else(|| allocated(services, &namespace, entry))?;
        Some((port, entry.service.to_owned()))
    });
    SiteCluster {
        name: plan.cluster.to_string(),
        strategy: plan.decision.strategy.name(),
        cni: match object.map_or("", |cluster| &*cluster.spec.cni_plugin.kind) {
            "" | "cilium" => Some("Cilium"),
            "canal" => Some("Canal"),
            _ => None,
        },
        address: reached_at(&plan.address),
        node_ports: by_port.collect(),
    }
}

/// An entry for each door that is open, of a cluster whose Cluster says only which one is wanted.
fn in_force(doors: &Doors, planned: &SiteCluster, services: &[&Service]) -> Vec<SiteCluster> {
    let namespace = ClusterName::new(&planned.name).namespace();
    let of_cluster = services.iter().filter(|service| {
        let meta = &service.metadata;
        *meta.namespace == *namespace && EXPOSED.contains(&&*meta.name)
    });
    let node_ports: Vec<(u16, String)> = of_cluster.flat_map(|service| node_ports(service)).collect();
    let door = |strategy: ExposeStrategy| SiteCluster {
        strategy: strategy.name(),
        address: reached_at(if strategy == doors.now.first { &doors.first } else { &doors.second }),
        node_ports: if strategy::of(strategy).has_node_ports() { node_ports.clone() } else { Vec::new() },
        ..planned.clone()
    };
    doors.now.open().map(door).collect()
}

/// Where users find a cluster: a name, or else an address.
fn reached_at(address: &Address) -> String {
    match (&*address.external_name, address.ip) {
        ("", Some(ip)) => ip.to_string(),
        (name, _) => name.to_owned(),
    }
}

/// The NodePort of a Service that is there.
fn allocated(services: &[&Service], namespace: &str, entry: &Entry) -> Option<u16> {
    let is_it = |service: &&&Service| {
        *service.metadata.namespace == *namespace && *service.metadata.name == *entry.service
    };
    let ports = &services.iter().find(is_it)?.spec.ports;
    ports.iter().find(|port| port.port == entry.port)?.node_port
}

/// The NodePorts of a Service, and the Service's name.
fn node_ports(service: &Service) -> impl Iterator<Item = (u16, String)> {
    let ports = service.spec.ports.iter().filter_map(|port| port.node_port);
    ports.map(|port| (port, service.metadata.name.to_string()))
}

/// Where a kubeconfig leads: host and port of its current context.
fn server(kubeconfig: &Path) -> anyhow::Result<(String, u16)> {
    let text = fs::read_to_string(kubeconfig).with_context(|| format!("reading {}", kubeconfig.display()))?;
    let root = Documents::new(&text).next().and_then(Result::ok);
    let server = root
        .as_ref()
        .and_then(current_server)
        .with_context(|| format!("{} has no server for its current context", kubeconfig.display()))?;
    let url: hyper::Uri = server.parse().map_err(|error| anyhow!("{server:?} is no URL: {error}"))?;
    let host = url.host().with_context(|| format!("{server:?} has no host"))?;
    let default = if url.scheme_str() == Some("http") { 80 } else { 443 };
    Ok((host.trim_matches(['[', ']']).to_owned(), url.port_u16().unwrap_or(default)))
}

fn current_server(root: &Node) -> Option<&str> {
    let named = |list: &str, name: &str| match &root.get(list)?.content {
        Content::List(items) => {
            items.iter().find(|item| item.get("name").and_then(Node::as_str) == Some(name))
        }
        _ => None,
    };
    let context = named("contexts", root.get("current-context")?.as_str()?)?.get("context")?;
    named("clusters", context.get("cluster")?.as_str()?)?.get("cluster")?.get("server")?.as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The clusters of a seed where NodePort is wanted of cluster `a`, and this is recorded.
    fn clusters(record: &Value) -> Vec<(String, &'static str, String, Vec<u16>)> {
        let read = |object: Value| -> Service { serde_json::from_value(object).unwrap() };
        let service = |name: &str, port: u16| {
            read(json!({"metadata": {"name": name, "namespace": "cluster-a"},
                "spec": {"type": "NodePort", "ports": [{"name": "secure", "port": 443, "nodePort": port}]}}))
        };
        let services = [service("apiserver-external", 31_001), service("front-loadbalancer", 31_009)];
        let services: Vec<&Service> = services.iter().collect();
        let doors = Doors::of(&serde_json::from_value(record.clone()).unwrap());
        let planned = SiteCluster { name: "a".into(), strategy: "NodePort", ..SiteCluster::default() };
        let found = in_force(&doors, &planned, &services).into_iter();
        found
            .map(|it| {
                (it.name, it.strategy, it.address, it.node_ports.iter().map(|(port, _)| *port).collect())
            })
            .collect()
    }

    #[test]
    fn a_cluster_that_migrates_needs_what_both_open_doors_need_and_not_what_is_wanted() {
        let tunneling = json!({"exposeStrategy": "Tunneling", "seed": "north",
            "address": {"externalName": "a.example.com"}});
        let first = || ("a".to_owned(), "Tunneling", "a.example.com".to_owned(), Vec::new());
        assert_eq!(clusters(&tunneling), [first()], "what is wanted did not begin yet");
        let mut migrating = tunneling;
        migrating["migration"] = json!({"state": "Quieting", "since": "2026-01-02T03:04:05Z",
            "second": {"exposeStrategy": "LoadBalancer", "address": {"ip": "203.0.113.9"}}});
        let second = ("a".to_owned(), "LoadBalancer", "203.0.113.9".to_owned(), vec![31_001]);
        assert_eq!(clusters(&migrating), [first(), second]);
        migrating["migration"]["state"] = "Closing".into();
        assert_eq!(clusters(&migrating), [first()]);
    }
}
