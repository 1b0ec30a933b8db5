//! The needs of a running installation: the rows of the model with its own ports, addresses and reasons.

use std::collections::BTreeMap;

use portico_api::port_range::PortRange;

use crate::facts::Facts;
use crate::flow::{Flow, Query};
use crate::model::{self, Ports, Row};
use crate::nearest::UnknownWord;

/// What the objects of an installation tell.
#[derive(Debug, Clone, Default)]
pub struct Site {
    /// The base domain; empty if it is not known.
    pub domain: String,
    /// The NodePort range of the seed.
    pub node_port_range: Option<PortRange>,
    /// The user clusters.
    pub clusters: Vec<SiteCluster>,
    /// Every NodePort that is taken, and by which port of which Service.
    pub node_ports: BTreeMap<u16, String>,
    /// A Service of type LoadBalancer publishes the clusters of the whole seed.
    pub has_front_service: bool,
    /// The datacenters.
    pub datacenters: Vec<SiteDatacenter>,
    /// Where the seed's Kubernetes API is, `HOST:PORT`, if a kubeconfig says so.
    pub seed_api: Option<(String, u16)>,
}

/// A user cluster.
#[derive(Debug, Clone, Default)]
pub struct SiteCluster {
    /// Its name.
    pub name: String,
    /// Its strategy, as the model spells it.
    pub strategy: &'static str,
    /// Its network plugin, as the model spells it; `None` for one that the model does not have.
    pub cni: Option<&'static str>,
    /// Where it is reached: a host name or an address.
    pub address: String,
    /// The NodePorts by which it is reached, and their Services.
    pub node_ports: Vec<(u16, String)>,
}

/// A datacenter.
#[derive(Debug, Clone, Default)]
pub struct SiteDatacenter {
    /// Its name.
    pub name: String,
    /// The key of its provider.
    pub provider: &'static str,
    /// The fields of its spec.
    pub fields: BTreeMap<String, String>,
}

/// Whether rows of NodePorts have the ports that are taken, or all that may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodePorts {
    /// The NodePorts that clusters have now.
    Allocated,
    /// The range that new clusters will get theirs from.
    WholeRange,
}

impl Site {
    /// The flows that this installation needs. The facts of `query` come before those of objects.
    ///
    /// # Errors
    /// If there is no such role.
    pub fn flows(&self, query: &Query, node_ports: NodePorts) -> Result<Vec<Flow>, UnknownWord> {
        let mut facts = query.facts.clone();
        let known = |facts: &Facts, setting: &str| facts.ports(setting).is_some();
        if let Some(range) = self.node_port_range.filter(|_| !known(&facts, "node-port-range")) {
            // The setting is in the model, and a range is what it takes.
            facts.set_ports("node-port-range", range);
        }
        if let Some((_, port)) = &self.seed_api
            && !known(&facts, "seed-api-port")
            && let Ok(port) = PortRange::new(*port, *port)
        {
            facts.set_ports("seed-api-port", port);
        }
        let query = Query { facts, ..query.clone() };
        let mut flows = Vec::new();
        for flow in query.flows()? {
            let facts = &query.facts;
            if flow.row.ports.contains(&Ports::Provider) {
                flows.extend(self.provider_flows(&flow, facts));
            } else if flow
                .row
                .conditions
                .iter()
                .any(|condition| ["strategy", "cni"].contains(&condition.fact))
            {
                flows.extend(self.cluster_flows(&flow, facts, node_ports));
            } else {
                flows.push(self.general(flow));
            }
        }
        Ok(flows)
    }

    /// A row that does not depend on clusters.
    fn general(&self, mut flow: Flow) -> Flow {
        match flow.row.destination.role {
            "master-ingress" if !self.domain.is_empty() => {
                flow.hosts = vec![self.domain.clone()];
                flow.reasons.push(format!("the domain of the installation is {}", self.domain));
            }
            "seed-api" => {
                if let Some((host, port)) = &self.seed_api {
                    flow.hosts = vec![host.clone()];
                    flow.reasons.push(format!("the kubeconfig leads to {host}:{port}"));
                }
            }
            _ => {}
        }
        flow
    }

    /// One flow for each address at which clusters that need the row are reached.
    fn cluster_flows(&self, flow: &Flow, facts: &Facts, node_ports: NodePorts) -> Vec<Flow> {
        let mut by_address: BTreeMap<&str, Flow> = BTreeMap::new();
        for cluster in self.clusters.iter().filter(|cluster| cluster.needs(flow.row, facts)) {
            let is_way_in = flow.row.destination.role == "front";
            let address = if is_way_in { cluster.address.as_str() } else { "" };
            let by_port = is_way_in && flow.row.setting == Some("node-port-range");
            let flow = by_address.entry(address).or_insert_with(|| {
                let mut flow = flow.clone();
                flow.addresses.extend((!address.is_empty()).then(|| address.to_owned()));
                if by_port && node_ports == NodePorts::Allocated {
                    flow.ports.clear();
                }
                flow
            });
            let mut reason = format!("cluster {} ({})", cluster.name, cluster.strategy);
            if by_port {
                let services: Vec<String> =
                    cluster.node_ports.iter().map(|(port, service)| format!("{service} {port}")).collect();
                if !services.is_empty() {
                    reason.push_str(&format!(": {}", services.join(", ")));
                }
                if node_ports == NodePorts::Allocated {
                    flow.ports.extend(cluster.node_ports.iter().map(|(port, _)| Ports::from(*port)));
                }
            }
            flow.reasons.push(reason);
        }
        // A cluster whose NodePorts are not allocated yet needs nothing that could be named.
        by_address.into_values().filter(|flow| !flow.ports.is_empty() || flow.row.ports.is_empty()).collect()
    }

    /// One flow for each datacenter whose provider has an API.
    fn provider_flows(&self, flow: &Flow, facts: &Facts) -> Vec<Flow> {
        let wanted = |datacenter: &&SiteDatacenter| {
            let mut facts = facts.clone();
            let given = facts.get("provider");
            given.is_none_or(|given| given == datacenter.provider)
                && facts.set("provider", datacenter.provider).is_ok()
                && facts.allow(flow.row)
        };
        self.datacenters.iter().filter(wanted).map(|datacenter| datacenter.flow(flow)).collect()
    }
}

impl SiteCluster {
    /// Whether the row is needed by this cluster. A fact that is given comes before what the cluster says.
    fn needs(&self, row: &Row, facts: &Facts) -> bool {
        let mut own = Facts::default();
        // Strategies and plugins are the model's own words.
        let _ = own.set("strategy", self.strategy);
        let plugin = self.cni.map(|cni| own.set("cni", cni));
        row.conditions.iter().all(|condition| {
            let by_cluster = own.judge(condition);
            let no_plugin = condition.fact == "cni" && plugin.is_none();
            !no_plugin && by_cluster != Some(false) && facts.judge(condition) != Some(false)
        })
    }
}

impl SiteDatacenter {
    /// Where its provider's API is, with the reason.
    fn flow(&self, flow: &Flow) -> Flow {
        let mut flow = flow.clone();
        flow.hosts.clear();
        let mut reason = format!("datacenter {} ({})", self.name, self.provider);
        let Some(provider) = model::providers().iter().find(|provider| provider.key == self.provider) else {
            return flow;
        };
        flow.ports = vec![Ports::from(provider.port)];
        let field = |name: Option<&str>| name.and_then(|name| self.fields.get(name));
        if let Some(name) = provider.field {
            match field(Some(name)).map(|text| host_and_port(text)) {
                Some((host, port)) => {
                    let by_field = field(provider.port_field).and_then(|port| port.parse().ok());
                    flow.ports = vec![Ports::from(port.or(by_field).unwrap_or(provider.port))];
                    flow.hosts = vec![host];
                }
                None if provider.secret => {
                    reason.push_str(": its address is in a Secret, which is not read");
                    flow.ports = vec![Ports::Provider];
                }
                None => {
                    reason.push_str(&format!(": its field {name} is empty"));
                    flow.ports = vec![Ports::Provider];
                }
            }
        } else {
            let region = field(provider.region).map_or("*", String::as_str);
            flow.hosts = provider.hosts.iter().map(|host| host.replace("{region}", region)).collect();
        }
        flow.reasons.push(reason);
        flow
    }
}

/// The host of a URL, `HOST:PORT` or `HOST`, and the port that it names or that its scheme has.
fn host_and_port(text: &str) -> (String, Option<u16>) {
    let (scheme, rest) = text.split_once("://").map_or(("", text), |(scheme, rest)| (scheme, rest));
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let authority = authority.rsplit('@').next().unwrap_or_default();
    let of_scheme = match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    };
    if let Some((host, rest)) = authority.strip_prefix('[').and_then(|text| text.split_once(']')) {
        return (host.to_owned(), rest.strip_prefix(':').and_then(|port| port.parse().ok()).or(of_scheme));
    }
    match authority.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') => (host.to_owned(), port.parse().ok().or(of_scheme)),
        _ => (authority.to_owned(), of_scheme),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(name: &str, strategy: &'static str, address: &str, ports: &[u16]) -> SiteCluster {
        SiteCluster {
            name: name.into(),
            strategy,
            cni: Some("Cilium"),
            address: address.into(),
            node_ports: ports.iter().map(|&port| (port, "apiserver-external".to_owned())).collect(),
        }
    }

    fn query() -> Query {
        Query { products: vec![model::product("kkp").unwrap()], ..Query::default() }
    }

    fn of<'a>(flows: &'a [Flow], id: &str) -> Vec<&'a Flow> {
        flows.iter().filter(|flow| flow.row.id == id).collect()
    }

    #[test]
    fn only_strategies_in_use_are_listed_with_their_ports_addresses_and_reasons() {
        let site = Site {
            domain: "kkp.example.com".into(),
            clusters: vec![
                cluster("a", "NodePort", "a.north.kkp.example.com", &[30_001, 30_002]),
                cluster("b", "LoadBalancer", "203.0.113.9", &[30_003]),
            ],
            ..Site::default()
        };
        let flows = site.flows(&query(), NodePorts::Allocated).unwrap();
        let workers = of(&flows, "kkp-9");
        assert_eq!(workers.len(), 1);
        assert_eq!(workers[0].ports, [Ports::from(30_001), Ports::from(30_002)]);
        assert_eq!(workers[0].addresses, ["a.north.kkp.example.com"]);
        assert!(workers[0].reasons[0].starts_with("cluster a (NodePort): apiserver-external 30001"));
        assert_eq!(of(&flows, "kkp-10")[0].addresses, ["203.0.113.9"]);
        assert!(of(&flows, "kkp-8").is_empty());
        assert_eq!(of(&flows, "kkp-1")[0].hosts, ["kkp.example.com"]);
        assert!(of(&flows, "kkp-canal-vxlan").is_empty());
        assert_eq!(of(&flows, "kkp-cilium-vxlan").len(), 1);
    }

    #[test]
    fn the_range_of_the_seed_replaces_the_default_one() {
        let site = Site {
            node_port_range: "31000-31999".parse().ok(),
            clusters: vec![cluster("a", "NodePort", "a.example.com", &[31_001])],
            ..Site::default()
        };
        let flows = site.flows(&query(), NodePorts::WholeRange).unwrap();
        assert_eq!(of(&flows, "kkp-12")[0].ports, [Ports::Range("31000-31999".parse().unwrap())]);
    }

    #[test]
    fn the_api_of_a_provider_is_found_by_the_datacenter() {
        let datacenter = |provider, fields: &[(&str, &str)]| SiteDatacenter {
            name: "lab".into(),
            provider,
            fields: fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        };
        let flow = |datacenter| {
            let site = Site { datacenters: vec![datacenter], ..Site::default() };
            let flows = site.flows(&query(), NodePorts::Allocated).unwrap();
            of(&flows, "kkp-7").first().map(|flow| (flow.hosts.clone(), flow.ports.clone()))
        };
        let one = |host: &str, port| Some((vec![host.to_owned()], vec![Ports::from(port)]));
        assert_eq!(flow(datacenter("hetzner", &[])), one("api.hetzner.cloud", 443));
        let openstack = |url| flow(datacenter("openstack", &[("authURL", url)]));
        assert_eq!(openstack("https://keystone.example.com:5000/v3"), one("keystone.example.com", 5000));
        assert_eq!(openstack("https://[2001:db8::1]/v3"), one("2001:db8::1", 443));
        assert_eq!(
            flow(datacenter("nutanix", &[("endpoint", "10.0.0.1"), ("port", "9441")])),
            one("10.0.0.1", 9441)
        );
        let aws = flow(datacenter("aws", &[("region", "eu-central-1")])).unwrap();
        assert_eq!(aws.0[0], "ec2.eu-central-1.amazonaws.com");
        for provider in ["fake", "edge", "bringyourown"] {
            assert_eq!(flow(datacenter(provider, &[])), None, "{provider}");
        }
        assert_eq!(flow(datacenter("vsphere", &[])), Some((Vec::new(), vec![Ports::Provider])));
    }
}
