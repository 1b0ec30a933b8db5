//! The difference between two installations: the ports to open, and the ports that can be closed afterwards.

use std::collections::{BTreeMap, BTreeSet};

use portico_api::port_range::PortRange;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::flow::Flow;
use crate::model::{self, Ports};
use crate::port_set::PortSet;

/// The ports to open and those that can be closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Needed by the second, and not by the first.
    pub open: Vec<Way>,
    /// Needed by the first, and by no row of the second.
    pub close: Vec<Way>,
}

/// Ports from one role to another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Way {
    /// The product.
    pub product: String,
    /// The role that connects.
    pub source: String,
    /// The role that accepts.
    pub destination: String,
    /// `TCP`, `UDP` or `4`.
    pub protocol: String,
    /// The ports; none for IP-in-IP.
    pub ports: Vec<String>,
    /// The rows that need them.
    pub rows: Vec<String>,
    /// What they are needed for.
    pub purposes: Vec<String>,
}

/// A flow as `-o json` has it: of this version, or of another.
#[derive(Debug, Clone, Deserialize)]
pub struct Written {
    #[serde(default)]
    id: String,
    product: String,
    source: String,
    destination: String,
    protocol: OneOrMore,
    ports: Vec<String>,
    #[serde(default)]
    purpose: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// A flow that was written by a program other than `portico ports -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("flow {number}: {text:?} is no port and no range of ports")]
pub struct BadPorts {
    number: usize,
    text: String,
}

impl From<&Flow> for Written {
    fn from(flow: &Flow) -> Self {
        let row = flow.row;
        Self {
            id: row.id.to_owned(),
            product: row.product.to_owned(),
            source: row.source.name.to_owned(),
            destination: row.destination.name.to_owned(),
            protocol: OneOrMore::More(row.protocols.iter().map(ToString::to_string).collect()),
            ports: flow.ports.iter().map(ToString::to_string).collect(),
            purpose: row.purpose.to_owned(),
        }
    }
}

/// From which role to which, by which protocol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Lane {
    product: String,
    source: String,
    destination: String,
    protocol: String,
}

/// The open ports of a lane, and their purpose.
#[derive(Debug, Default)]
struct Open {
    /// The lane itself, which has no ports: IP-in-IP.
    whole: bool,
    ports: PortSet,
    /// Ports that only the cloud provider knows.
    provider: bool,
    /// `(row, purpose, its ports)`.
    rows: Vec<(String, String, PortSet)>,
}

/// The ports to open for `to` where `from` works, and those that can be closed afterwards.
///
/// # Errors
/// If a port is none.
pub fn difference(from: &[Written], to: &[Written]) -> Result<Difference, BadPorts> {
    let (from, to) = (lanes(from)?, lanes(to)?);
    Ok(Difference { open: beyond(&to, &from), close: beyond(&from, &to) })
}

fn lanes(flows: &[Written]) -> Result<BTreeMap<Lane, Open>, BadPorts> {
    let mut lanes: BTreeMap<Lane, Open> = BTreeMap::new();
    for (number, flow) in flows.iter().enumerate() {
        let protocols = match &flow.protocol {
            OneOrMore::One(one) => std::slice::from_ref(one),
            OneOrMore::More(more) => more,
        };
        let mut ports = PortSet::default();
        let provider = Ports::Provider.to_string();
        for text in flow.ports.iter().filter(|text| **text != provider) {
            let range: Result<PortRange, _> = text.parse();
            ports.add(range.map_err(|_| BadPorts { number: number + 1, text: text.clone() })?);
        }
        for protocol in protocols {
            let lane = Lane {
                product: flow.product.clone(),
                source: one_name(&flow.product, &flow.source),
                destination: one_name(&flow.product, &flow.destination),
                protocol: protocol.clone(),
            };
            let open = lanes.entry(lane).or_default();
            open.whole |= flow.ports.is_empty();
            open.provider |= flow.ports.contains(&provider);
            ports.ranges().iter().for_each(|&range| open.ports.add(range));
            open.rows.push((flow.id.clone(), flow.purpose.clone(), ports.clone()));
        }
    }
    Ok(lanes)
}

/// The first of the names that a role has in the tables.
fn one_name(product: &str, name: &str) -> String {
    let role = model::product(product).ok().and_then(|product| product.role(name));
    role.and_then(|role| role.names.first()).map_or(name, |first| *first).to_owned()
}

/// What `one` has open beyond `other`.
fn beyond(one: &BTreeMap<Lane, Open>, other: &BTreeMap<Lane, Open>) -> Vec<Way> {
    let nothing = Open::default();
    let mut ways = Vec::new();
    for (lane, open) in one {
        let there = other.get(lane).unwrap_or(&nothing);
        let left = open.ports.without(&there.ports);
        let (whole, provider) = (open.whole && !there.whole, open.provider && !there.provider);
        if left.is_empty() && !whole && !provider {
            continue;
        }
        let concerns = |(_, _, ports): &&(String, String, PortSet)| {
            ports.without(&there.ports) != PortSet::default() || (ports.is_empty() && (whole || provider))
        };
        let rows: Vec<_> = open.rows.iter().filter(concerns).collect();
        let texts = left.ranges().iter().map(|&range| crate::port_set::text(range));
        let purposes: BTreeSet<String> = rows.iter().map(|(_, purpose, _)| purpose.clone()).collect();
        ways.push(Way {
            product: lane.product.clone(),
            source: lane.source.clone(),
            destination: lane.destination.clone(),
            protocol: lane.protocol.clone(),
            ports: texts.chain(provider.then(|| Ports::Provider.to_string())).collect(),
            rows: rows.iter().map(|(id, ..)| id.clone()).collect(),
            purposes: purposes.into_iter().collect(),
        });
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Query;

    fn flows(product: &str, facts: &[&str]) -> Vec<Written> {
        let product = model::product(product).unwrap();
        let mut query = Query { products: vec![product], ..Query::default() };
        facts.iter().for_each(|fact| query.facts.assign(fact).unwrap());
        query.facts = query.facts.or_defaults(product);
        query.flows().unwrap().iter().map(Written::from).collect()
    }

    fn texts(ways: &[Way]) -> Vec<String> {
        let text = |way: &Way| {
            format!("{} -> {} {} {}", way.source, way.destination, way.protocol, way.ports.join(","))
        };
        ways.iter().map(text).collect()
    }

    #[test]
    fn from_node_port_to_tunneling_two_ports_open_and_the_range_closes() {
        let (from, to) = (flows("kkp", &["strategy=NodePort"]), flows("kkp", &["strategy=Tunneling"]));
        let difference = difference(&from, &to).unwrap();
        assert_eq!(
            texts(&difference.open),
            [
                "KKP Users -> Seed cluster nodeport-proxy TCP 6443",
                "Master Cluster nodes -> Seed cluster nodeport-proxy TCP 6443",
                "User cluster nodes -> Seed cluster nodeport-proxy TCP 6443,8088",
            ]
        );
        assert_eq!(difference.close.len(), 3);
        assert!(difference.close.iter().all(|way| way.ports == ["30000-32767"]), "{difference:?}");
        assert_eq!(difference.open[2].rows, ["kkp-8"]);
    }

    #[test]
    fn a_port_that_another_row_needs_is_not_closed() {
        let (from, to) = (flows("kublr", &["cni=Calico"]), flows("kublr", &["cni=Canal"]));
        let difference = difference(&from, &to).unwrap();
        assert_eq!(difference.open, []);
        assert_eq!(texts(&difference.close), ["Node -> Node 4 ", "Node -> Node TCP 179"]);
    }

    #[test]
    fn the_same_installation_changes_nothing() {
        let flows = flows("kkp", &["strategy=LoadBalancer", "provider=aws"]);
        assert_eq!(difference(&flows, &flows).unwrap(), Difference { open: Vec::new(), close: Vec::new() });
    }

    #[test]
    fn flows_of_another_version_are_read_from_their_json() {
        let text = serde_json::to_string(&Query::default().flows().unwrap()).unwrap();
        let read: Vec<Written> = serde_json::from_str(&text).unwrap();
        let own: Vec<Written> = Query::default().flows().unwrap().iter().map(Written::from).collect();
        assert_eq!(difference(&read, &own).unwrap(), Difference { open: Vec::new(), close: Vec::new() });
        let bad =
            r#"[{"product": "kkp", "source": "a", "destination": "b", "protocol": "TCP", "ports": ["x"]}]"#;
        let bad: Vec<Written> = serde_json::from_str(bad).unwrap();
        assert!(difference(&bad, &own).unwrap_err().to_string().contains("\"x\" is no port"));
    }
}
