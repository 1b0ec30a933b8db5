//! The traffic that a role may have: clients that may connect to it, and servers that it connects to.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use ipnet::IpNet;
use portico_api::port_range::PortRange;

use crate::facts::Facts;
use crate::flow::Flow;
use crate::inventory::{Addresses, Inventory};
use crate::model::{self, End, Ports, Product, Protocol, Role, Row};
use crate::port_set::PortSet;

/// Which way a connection is opened, seen from the role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// To the role.
    Ingress,
    /// From the role.
    Egress,
}

/// Connections that are allowed. Answers to them go without saying: all rules here are stateful.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Which way they are opened.
    pub direction: Direction,
    /// The name of the other role in its table.
    pub peer_role: &'static str,
    /// Networks at the other end, all of one family.
    pub peers: Vec<IpNet>,
    /// By which protocol.
    pub protocol: Protocol,
    /// The ports of the end that accepts; none for IP-in-IP.
    pub ports: PortSet,
    /// The rows of the model that need it.
    pub rows: Vec<&'static Row>,
}

impl Rule {
    /// Whether its addresses are IPv6.
    pub fn is_ipv6(&self) -> bool {
        self.peers.iter().any(|peer| peer.addr().is_ipv6())
    }

    /// The ids of its rows: `kkp-2 kkp-3`.
    pub fn ids(&self) -> String {
        self.rows.iter().map(|row| row.id).collect::<Vec<_>>().join(" ")
    }

    /// What it is for.
    pub fn purpose(&self) -> String {
        let mut purposes: Vec<&str> = self.rows.iter().map(|row| row.purpose).collect();
        purposes.dedup();
        purposes.join("; ")
    }

    /// Its ranges of ports; one without end for IP-in-IP, so that writers need not tell it apart.
    pub(super) fn ranges(&self) -> Vec<Option<PortRange>> {
        match self.ports.ranges() {
            [] => vec![None],
            ranges => ranges.iter().copied().map(Some).collect(),
        }
    }
}

/// The traffic that machines of one role of a product may have, or of several roles. A firewall that refuses
/// the rest must know all roles of a machine.
#[derive(Debug, Clone)]
pub struct Ruleset {
    /// The product.
    pub product: &'static Product,
    /// The roles of these machines, in the order of the model.
    pub roles: Vec<&'static Role>,
    /// Their addresses, as far as they are known.
    pub own: Addresses,
    /// The allowed flows, in the order of the model.
    pub rules: Vec<Rule>,
}

impl Ruleset {
    /// The roles as part of a name: `seed-front`.
    pub fn name(&self) -> String {
        self.keys().join("-")
    }

    /// The roles as `--role` takes them: `seed,front`.
    pub fn words(&self) -> String {
        self.keys().join(",")
    }

    fn keys(&self) -> Vec<&'static str> {
        self.roles.iter().map(|role| role.key).collect()
    }

    /// The same, each rule of one network and one range. Rows may overlap, and clouds refuse to have the same
    /// twice: it becomes one rule.
    pub(super) fn split(&self) -> Self {
        let (mut rules, mut indexes) = (Vec::new(), HashMap::new());
        for rule in &self.rules {
            for &peer in &rule.peers {
                for range in rule.ranges() {
                    let key = (rule.direction, rule.protocol, peer, range);
                    let index = *indexes.entry(key).or_insert(rules.len());
                    if index == rules.len() {
                        let ports = range.into_iter().collect();
                        rules.push(Rule { peers: vec![peer], ports, rows: Vec::new(), ..*rule });
                    }
                    rules[index].rows.extend(&rule.rows);
                }
            }
        }
        Self { product: self.product, roles: self.roles.clone(), own: self.own.clone(), rules }
    }

    /// The rules of one direction.
    pub fn of(&self, direction: Direction) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.direction == direction)
    }
}

/// Something that must be known before rules can be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// A fact that decides whether a row is needed.
    Fact {
        /// The fact.
        fact: &'static str,
        /// Rows that depend on it.
        rows: Vec<&'static str>,
    },
    /// The addresses of a role.
    Addresses {
        /// The role.
        role: &'static Role,
        /// Rows that need them.
        rows: Vec<&'static str>,
        /// It has host names, which rules cannot hold.
        has_names: bool,
    },
    /// The port of a cloud provider's API.
    Provider {
        /// The row.
        row: &'static str,
    },
    /// Two roles without a common address family.
    Families {
        /// The row.
        row: &'static str,
        /// One role.
        source: &'static str,
        /// The other.
        destination: &'static str,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fact { fact, rows } => {
                let values = model::fact(fact).map(|fact| fact.values().join(", ")).unwrap_or_default();
                let flag = match *fact {
                    "strategy" | "cni" => format!("--{fact} VALUE"),
                    fact => format!("--set {fact}=VALUE"),
                };
                write!(f, "{fact} is not known ({}); say {flag}: {values}", rows.join(" "))
            }
            Self::Addresses { role, rows, has_names: false } => {
                let (key, rows) = (role.key, rows.join(" "));
                write!(f, "the role {key} has no address ({rows}); add it to the inventory: {}", role.meaning)
            }
            Self::Addresses { role, rows, has_names: true } => {
                let (key, rows) = (role.key, rows.join(" "));
                write!(f, "the role {key} has host names only ({rows}); rules hold addresses: add them")
            }
            Self::Provider { row } => {
                let what = "the port of the provider's API is not known";
                write!(f, "{what} ({row}); say --set provider=VALUE, one with a public API")
            }
            Self::Families { row, source, destination } => {
                let what = "have no common address family";
                write!(
                    f,
                    "{source} and {destination} {what} ({row}); give both IPv4, or both IPv6, addresses"
                )
            }
        }
    }
}

/// The rules for machines of all these roles. Facts that are not known have their defaults; the strategy has
/// none.
///
/// # Errors
/// Everything that must be known first.
pub fn rules(
    product: &'static Product,
    roles: &[&'static Role],
    facts: &Facts,
    inventory: &Inventory,
) -> Result<Ruleset, Vec<Missing>> {
    let facts = facts.or_defaults(product);
    let mut builder = Builder {
        product,
        inventory,
        own: Addresses::default(),
        rules: Vec::new(),
        facts: BTreeMap::new(),
        addresses: BTreeMap::new(),
        others: Vec::new(),
    };
    let roles: Vec<&Role> = product.roles.iter().filter(|role| roles.contains(role)).collect();
    for addresses in roles.iter().filter_map(|role| inventory.addresses(role)) {
        builder.own.networks.extend(addresses.networks);
        builder.own.names.extend(addresses.names);
    }
    builder.own.networks.sort();
    builder.own.networks.dedup();
    for row in product.rows.iter().filter(|row| facts.allow(row)) {
        let ends = [(row.destination, Direction::Ingress), (row.source, Direction::Egress)];
        for (own, direction) in ends {
            if roles.iter().any(|role| product.concerns(own, role.key)) {
                builder.row(&Flow::of(row, &facts), direction, &facts);
            }
        }
    }
    builder.finish(roles)
}

struct Builder<'a> {
    product: &'static Product,
    inventory: &'a Inventory,
    own: Addresses,
    rules: Vec<Rule>,
    facts: BTreeMap<&'static str, Vec<&'static str>>,
    addresses: BTreeMap<&'static str, Vec<&'static str>>,
    others: Vec<Missing>,
}

impl Builder<'_> {
    fn row(&mut self, flow: &Flow, direction: Direction, facts: &Facts) {
        let row = flow.row;
        // The provider decides only what the hosts of its API are; that there is one is the safe answer.
        let undecided: Vec<&'static str> = facts.missing(row).map(|condition| condition.fact).collect();
        if let Some(fact) = undecided.iter().find(|fact| **fact != "provider") {
            return note(self.facts.entry(fact).or_default(), row.id);
        }
        if flow.ports.contains(&Ports::Provider) {
            let missing = Missing::Provider { row: row.id };
            if !self.others.contains(&missing) {
                self.others.push(missing);
            }
            return;
        }
        let peer = if direction == Direction::Ingress { row.source } else { row.destination };
        let Some(addresses) = self.peers(peer, row) else { return };
        let families = [false, true].into_iter().filter(|ipv6| {
            let own = self.own.networks.is_empty() || self.own.has_family(*ipv6);
            own && addresses.has_family(*ipv6)
        });
        let families: Vec<bool> = families.collect();
        if families.is_empty() {
            let (source, destination) = (row.source.role, row.destination.role);
            self.others.push(Missing::Families { row: row.id, source, destination });
        }
        for ipv6 in families {
            // Container networks carry IP-in-IP over IPv4 only.
            let carried = |protocol: &&Protocol| !(ipv6 && **protocol == Protocol::IpInIp);
            for &protocol in row.protocols.iter().filter(carried) {
                let ranges = flow.ports.iter().filter_map(|ports| match ports {
                    Ports::Range(range) => Some(*range),
                    Ports::Provider => None,
                });
                let peers = addresses.of_family(ipv6).collect();
                let ports = ranges.collect();
                let rule = Rule { direction, peer_role: peer.name, peers, protocol, ports, rows: vec![row] };
                self.add(rule);
            }
        }
    }

    /// The addresses at the other end, or a note that they are missing.
    fn peers(&mut self, peer: End, row: &'static Row) -> Option<Addresses> {
        let role = self.product.role_of(peer)?;
        let known = self.inventory.addresses(role).filter(|known| !known.networks.is_empty());
        if known.is_none() {
            note(self.addresses.entry(role.key).or_default(), row.id);
        }
        known
    }

    /// Two rows that allow the same become one rule.
    fn add(&mut self, rule: Rule) {
        let same = |other: &&mut Rule| {
            other.direction == rule.direction
                && other.protocol == rule.protocol
                && other.ports == rule.ports
                && other.peers == rule.peers
        };
        match self.rules.iter_mut().find(same) {
            Some(other) => other.rows.extend(
                rule.rows.iter().filter(|row| !other.rows.contains(row)).copied().collect::<Vec<_>>(),
            ),
            None => self.rules.push(rule),
        }
    }

    fn finish(self, roles: Vec<&'static Role>) -> Result<Ruleset, Vec<Missing>> {
        let mut missing: Vec<Missing> =
            self.facts.into_iter().map(|(fact, rows)| Missing::Fact { fact, rows }).collect();
        for (key, rows) in self.addresses {
            let has_names = self.inventory.role(key).is_some_and(|known| !known.names.is_empty());
            missing.extend(self.product.role(key).map(|role| Missing::Addresses { role, rows, has_names }));
        }
        missing.extend(self.others);
        if !missing.is_empty() {
            return Err(missing);
        }
        Ok(Ruleset { product: self.product, roles, own: self.own, rules: self.rules })
    }
}

fn note(rows: &mut Vec<&'static str>, row: &'static str) {
    if !rows.contains(&row) {
        rows.push(row);
    }
}
