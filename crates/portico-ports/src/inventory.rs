//! An inventory: which addresses have which role. A YAML file that people keep, role by role:
//!
//! ```yaml
//! worker: [10.0.1.0/24, "2001:db8:1::/64"]
//! front: [203.0.113.9, gateway.example.com]
//! user: [any]
//! ```
//!
//! Everything that is wrong with it is reported at once, each with its line and what to do.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use portico_api::network::Special;
use portico_yaml::{Content, Documents, Entry, Node};
use serde_json::Value;

use crate::facts::Facts;
use crate::model::{self, AddressKind, Role};

/// The keyword for every address, of both families. Nothing else stands for all of them, and nothing is
/// assumed to be.
const ANY: &str = "any";

/// Most addresses of one inventory: a site of hundreds of clusters lists networks, not every machine.
const MAX_ADDRESSES: usize = 20_000;

/// Most problems that are reported: a file of another format would otherwise be reported line by line.
const MAX_PROBLEMS: usize = 100;

/// Which addresses have which role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    roles: BTreeMap<&'static str, Addresses>,
}

/// The addresses of a role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Networks; one address is a network of one.
    pub networks: Vec<IpNet>,
    /// Host names, for what resolves them. Rules of a firewall cannot hold them.
    pub names: Vec<Box<str>>,
}

impl Addresses {
    /// Whether it has an address of this family.
    pub fn has_family(&self, ipv6: bool) -> bool {
        self.networks.iter().any(|network| network.addr().is_ipv6() == ipv6)
    }

    /// The networks of one family.
    pub fn of_family(&self, ipv6: bool) -> impl Iterator<Item = IpNet> {
        self.networks.iter().copied().filter(move |network| network.addr().is_ipv6() == ipv6)
    }

    /// Those of its networks that are one address, as addresses.
    pub fn hosts(&self) -> impl Iterator<Item = IpAddr> {
        let is_host = |network: &&IpNet| network.prefix_len() == network.max_prefix_len();
        self.networks.iter().filter(is_host).map(IpNet::addr)
    }
}

/// Something wrong with an inventory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct InventoryProblem {
    /// Counted from 1.
    pub line: u32,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for InventoryProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.line, self.message, self.remedy)
    }
}

impl Inventory {
    /// Reads an inventory. `facts` say whether the seed is the master, whose machines may then have both
    /// roles.
    ///
    /// # Errors
    /// Everything that is wrong with it, in the order of lines.
    pub fn read(text: &str, facts: &Facts) -> Result<Self, Vec<InventoryProblem>> {
        let mut reader = Reader::default();
        match Documents::new(text).collect::<Vec<_>>().as_slice() {
            [Ok(Node { content: Content::Map(entries), .. })] => {
                entries.iter().for_each(|entry| reader.role(entry));
            }
            documents => reader.no_inventory(documents),
        }
        reader.overlaps(facts);
        let Reader { roles, mut problems, .. } = reader;
        if problems.is_empty() {
            return Ok(Self { roles });
        }
        problems.sort();
        problems.truncate(MAX_PROBLEMS);
        Err(problems)
    }

    /// The addresses of a role, if it is there.
    pub fn role(&self, key: &str) -> Option<&Addresses> {
        self.roles.get(key)
    }

    /// The roles that it has, and their addresses.
    pub fn roles(&self) -> impl Iterator<Item = (&'static str, &Addresses)> {
        self.roles.iter().map(|(role, addresses)| (*role, addresses))
    }

    /// The addresses of `role`, or of the roles that it includes. `None` if there are none.
    pub fn addresses(&self, role: &Role) -> Option<Addresses> {
        let keys = std::iter::once(&role.key).chain(role.includes);
        let mut all = Addresses::default();
        for addresses in keys.filter_map(|key| self.roles.get(key)) {
            all.networks.extend(&addresses.networks);
            all.names.extend(addresses.names.iter().cloned());
        }
        all.networks.sort();
        all.networks.dedup();
        (!all.networks.is_empty() || !all.names.is_empty()).then_some(all)
    }

    /// Gives a role an address that objects tell.
    pub fn add(&mut self, role: &'static str, network: IpNet) {
        let networks = &mut self.roles.entry(role).or_default().networks;
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
}

#[derive(Default)]
struct Reader {
    roles: BTreeMap<&'static str, Addresses>,
    /// Every network with its role and line.
    placed: Vec<(IpNet, &'static Role, u32)>,
    /// The addresses read so far.
    count: usize,
    problems: Vec<InventoryProblem>,
}

impl Reader {
    fn problem(&mut self, line: u32, message: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(InventoryProblem { line, message: message.into(), remedy: remedy.into() });
    }

    fn no_inventory(&mut self, documents: &[Result<Node, portico_yaml::YamlError>]) {
        let remedy = "write roles and their addresses, such as worker: [10.0.1.0/24]";
        for document in documents {
            match document {
                Err(error) => self.problem(error.line, error.message.clone(), "correct the YAML"),
                Ok(Node { content: Content::Map(_), .. }) if documents.len() > 1 => {}
                Ok(node) => self.problem(node.line, "this is no inventory", remedy),
            }
        }
        if self.problems.is_empty() {
            let (line, message) = match documents {
                [] => (1, "the inventory is empty"),
                [_, second, ..] => {
                    (second.as_ref().map_or(1, |node| node.line), "there is a second document")
                }
                [_] => (1, "this is no inventory"),
            };
            self.problem(line, message, remedy);
        }
    }

    fn role(&mut self, entry: &Entry) {
        let all: Vec<_> = model::products().iter().collect();
        let found = match model::role(&all, &entry.key) {
            Ok(found) => found,
            Err(_) if matches!(entry.value.content, Content::Map(_)) => {
                let message = format!("{:?} is no role, and has keys of its own", entry.key);
                let remedy = "leave this line out: roles stand at the top, such as worker: [10.0.1.0/24]";
                return self.problem(entry.line, message, remedy);
            }
            Err(unknown) => {
                return self.problem(entry.line, unknown.to_string(), "name a role of the model");
            }
        };
        let Some(&role) = found.first() else { return };
        if self.roles.contains_key(role.key) {
            let message = format!("the role {} stands twice, under two of its names", role.key);
            return self.problem(entry.line, message, "put all its addresses in one place");
        }
        self.roles.insert(role.key, Addresses::default());
        let before = self.problems.len();
        match &entry.value.content {
            Content::List(items) => items.iter().for_each(|item| self.address(role, item)),
            Content::Scalar(Value::Null) => {}
            _ => self.address(role, &entry.value),
        }
        let is_empty = self.roles.get(role.key).is_none_or(|addresses| *addresses == Addresses::default());
        if is_empty && self.problems.len() == before {
            let remedy = "give it an address or a network, or leave the role out";
            self.problem(entry.line, format!("the role {} has no address", role.key), remedy);
        }
    }

    fn address(&mut self, role: &'static Role, node: &Node) {
        let Some(text) = node.as_str().map(str::trim) else {
            let message = format!("{}: this is no address", role.key);
            return self.problem(node.line, message, "write addresses and networks as text, in a list");
        };
        self.count += 1;
        if self.count > MAX_ADDRESSES {
            if self.count == MAX_ADDRESSES + 1 {
                let message = format!("there are more than {MAX_ADDRESSES} addresses");
                self.problem(node.line, message, "write networks instead of single addresses");
            }
            return;
        }
        let networks = match read_address(text) {
            Ok(Address::Networks(networks)) => networks,
            Ok(Address::Name(name)) => {
                return self.roles.entry(role.key).or_default().names.push(name);
            }
            Err((what, remedy)) => {
                return self.problem(node.line, format!("{}: {text:?} {what}", role.key), remedy);
            }
        };
        for network in networks {
            if network.prefix_len() == 0 && role.address_kind == AddressKind::Machines {
                let message = format!("{}: {text:?} is every address there is", role.key);
                return self.problem(node.line, message, "name the networks of these machines");
            }
            self.placed.push((network, role, node.line));
            self.roles.entry(role.key).or_default().networks.push(network);
        }
    }

    /// Networks nest or are apart. Sorted, a network follows those that hold it.
    fn overlaps(&mut self, facts: &Facts) {
        let mut placed = std::mem::take(&mut self.placed);
        placed.sort_by_key(|(network, _, line)| (*network, *line));
        let mut around: Vec<(IpNet, &'static Role, u32)> = Vec::new();
        let mut reported = Vec::new();
        for (network, role, line) in placed {
            around.retain(|(wide, ..)| wide.contains(&network));
            for &(wide, other, other_line) in &around {
                let pair = (role.key.min(other.key), role.key.max(other.key));
                let (first, second) = (line.min(other_line), line.max(other_line));
                if role.key == other.key {
                    let message = format!("{}: {network} is in {wide} of line {first}", role.key);
                    self.problem(second, message, "leave one of them out");
                } else if !may_share(role, other, facts) && !reported.contains(&pair) {
                    reported.push(pair);
                    let message =
                        format!("{network} ({}) and {wide} ({}, line {first}) overlap", role.key, other.key);
                    let remedy =
                        "give each address to one role; a machine of two roles needs the rules of both";
                    self.problem(second, message, remedy);
                }
            }
            around.push((network, role, line));
        }
    }
}

/// Whether an address may have both roles.
fn may_share(one: &Role, other: &Role, facts: &Facts) -> bool {
    let is_network = one.address_kind == AddressKind::Network || other.address_kind == AddressKind::Network;
    let is_on = one.on.contains(&other.key) || other.on.contains(&one.key);
    let same_host = one.on.iter().any(|host| other.on.contains(host));
    let of_seed = |role: &Role| ["master", "seed"].contains(&role.key);
    let one_cluster = facts.get("seed-is-master") == Some("true") && of_seed(one) && of_seed(other);
    let is_part = one.includes.contains(&other.key) || other.includes.contains(&one.key);
    is_network || is_on || same_host || one_cluster || is_part
}

enum Address {
    Networks(Vec<IpNet>),
    Name(Box<str>),
}

/// An address, a network, a host name or `any`; or what is wrong with it and what to do.
fn read_address(text: &str) -> Result<Address, (String, String)> {
    let wrong = |what: &str, remedy: &str| Err((what.to_owned(), remedy.to_owned()));
    if text == ANY {
        let all = [IpNet::from(IpAddr::from([0, 0, 0, 0])), IpNet::from(IpAddr::from(Ipv6Addr::UNSPECIFIED))];
        let all = all.iter().filter_map(|address| IpNet::new(address.addr(), 0).ok()).collect();
        return Ok(Address::Networks(all));
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return match address {
            IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => {
                wrong("is an IPv4 address written as IPv6", "write the IPv4 address")
            }
            address if address.is_unspecified() => {
                wrong("is no machine", "write the address of the machine, or any for every address")
            }
            address if address.is_multicast() => wrong("is a multicast address", "write unicast addresses"),
            address if let Some(Special::Loopback | Special::LinkLocal) = Special::of(address) => {
                wrong("means another machine on each", "write the address by which other machines reach it")
            }
            address => Ok(Address::Networks(vec![address.into()])),
        };
    }
    if let Ok(network) = text.parse::<IpNet>() {
        if network.addr() != network.network() {
            let remedy =
                format!("write {} for the network, or {} for the machine", network.trunc(), network.addr());
            return Err(("has bits set beyond its prefix".to_owned(), remedy));
        }
        if let IpAddr::V6(v6) = network.addr()
            && v6.to_ipv4_mapped().is_some()
        {
            return wrong("is an IPv4 network written as IPv6", "write the IPv4 network");
        }
        return Ok(Address::Networks(vec![network]));
    }
    if text.parse::<std::net::SocketAddr>().is_ok() {
        return wrong("has a port", "leave it out: ports are the model's");
    }
    if is_host_name(text) {
        return Ok(Address::Name(text.to_ascii_lowercase().into()));
    }
    match text.split_once('/') {
        Some((address, _)) if address.parse::<IpAddr>().is_ok() => {
            let most = if address.contains(':') { 128 } else { 32 };
            wrong("has no prefix length that it could have", &format!("give one from 0 to {most}"))
        }
        _ if text.contains('%') => wrong("has a zone", "write a global address: rules hold no zones"),
        _ if text.contains('-') => wrong("is no network", "write the range as networks in CIDR notation"),
        _ => wrong("is no address", "write 10.0.0.1, 10.0.0.0/24, 2001:db8::/64, a host name or any"),
    }
}

/// A host name of letters, digits and hyphens whose last label is no number, so that a mistyped address is
/// none.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let text = text.strip_suffix('.').unwrap_or(text);
    let last = text.rsplit('.').next().unwrap_or_default();
    text.len() <= 253
        && text.contains('.')
        && text.split('.').all(is_label)
        && last.bytes().any(|byte| byte.is_ascii_alphabetic())
}

#[cfg(test)]
#[path = "inventory/tests.rs"]
mod tests;
