//! The model: products, their roles, their rows, and what a row may depend on. The values are generated from
//! `model/*.yaml` by the build script.

use std::fmt;

use portico_api::port_range::PortRange;
use serde::{Serialize, Serializer};

use crate::nearest::UnknownWord;

/// A product whose requirements the model has.
#[derive(Debug)]
pub struct Product {
    /// Its key on the command line: `kkp`.
    pub key: &'static str,
    /// Its name.
    pub title: &'static str,
    /// Defaults of facts that differ from the general ones.
    pub defaults: &'static [(&'static str, &'static str)],
    /// The roles that take part.
    pub roles: &'static [Role],
    /// Its rows, in the order of its tables.
    pub rows: &'static [Row],
}

/// One side of a flow: some machines, or some network.
#[derive(Debug, PartialEq, Eq)]
pub struct Role {
    /// The product it belongs to.
    pub product: &'static str,
    /// Its key on the command line and in an inventory: `worker`.
    pub key: &'static str,
    /// The names that the tables give it: `User cluster nodes`.
    pub names: &'static [&'static str],
    /// What its addresses are.
    pub address_kind: AddressKind,
    /// Roles whose machines it may share.
    pub on: &'static [&'static str],
    /// Roles that it stands for together: a node is a master or a worker.
    pub includes: &'static [&'static str],
    /// What it is.
    pub meaning: &'static str,
}

/// What the addresses of a role are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressKind {
    /// Machines of the installation, or a load balancer before them.
    Machines,
    /// Whatever is in a network: people, the internet, pods. Machines of other roles may be in it too.
    Network,
}

/// One requirement, as written in the model.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// The product it belongs to.
    pub product: &'static str,
    /// Its stable name: `kkp-8`.
    pub id: &'static str,
    /// The end that opens the connection.
    pub source: End,
    /// The program at the source; `/` where the table says that it names none.
    pub component: Option<&'static str>,
    /// The end that accepts it.
    pub destination: End,
    /// One protocol, or two that need the same ports.
    pub protocols: &'static [Protocol],
    /// The ports of the destination; none for [`Protocol::IpInIp`].
    pub ports: &'static [Ports],
    /// The setting that replaces the ports, if there is one.
    pub setting: Option<&'static str>,
    /// When it is needed; all of them must hold.
    pub conditions: &'static [Condition],
    /// Whether the ports may be others; `None` where the table does not say.
    pub overridable: Option<Overridable>,
    /// What it is needed for.
    pub purpose: &'static str,
    /// Where it comes from.
    pub reference: &'static str,
    /// It is in no table of the product, but in the documentation of a part.
    pub beside_the_table: bool,
    /// Flags of our own programs that open the port: `gateway --sni-listen`.
    pub listeners: &'static [&'static str],
}

/// One end of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// The key of the role.
    pub role: &'static str,
    /// The name of the role in this row, as the table writes it.
    pub name: &'static str,
}

/// A protocol above IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// IP protocol 4, IP-in-IP: it has no ports.
    IpInIp,
}

impl Protocol {
    /// As the tables write it: `TCP`, `UDP`, `4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::IpInIp => "4",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Protocol {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Ports of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ports {
    /// One port or several in a row.
    Range(PortRange),
    /// Those of the cloud provider's API: they differ by provider.
    Provider,
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(range) if range.size() == 1 => write!(f, "{}", range.first()),
            Self::Range(range) => range.fmt(f),
            Self::Provider => f.write_str("provider"),
        }
    }
}

impl Serialize for Ports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Whether a port may be another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overridable {
    /// Yes; the custom port has to be opened instead.
    Yes,
    /// No.
    No,
    /// It is the default NodePort range, and follows the range of the seed.
    DefaultRange,
}

impl Overridable {
    /// Its name in the model.
    pub fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::DefaultRange => "default-range",
        }
    }
}

/// The condition of a row. A fact must, or must not, have one of some values.
#[derive(Debug, PartialEq, Eq)]
pub struct Condition {
    /// The key of the fact.
    pub fact: &'static str,
    /// The values.
    pub values: &'static [&'static str],
    /// Whether it must have one of them, or must not.
    pub is: bool,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is { "=" } else { "!=" };
        write!(f, "{}{sign}{}", self.fact, self.values.join("|"))
    }
}

/// Something that a row may depend on.
#[derive(Debug, PartialEq, Eq)]
pub struct Fact {
    /// Its key: `strategy`.
    pub key: &'static str,
    /// What it can be.
    pub kind: FactKind,
    /// The default where rules are written and nobody says otherwise.
    pub default: Option<&'static str>,
    /// What it says.
    pub meaning: &'static str,
}

/// What a fact can be.
#[derive(Debug, PartialEq, Eq)]
pub enum FactKind {
    /// One of these.
    Choice(&'static [&'static str]),
    /// True or false.
    Flag,
    /// A port, which replaces the generic one.
    Port,
    /// A range of ports, which replaces the generic one.
    Range,
}

impl Fact {
    /// The values it can have; empty for ports.
    pub fn values(&self) -> &'static [&'static str] {
        match self.kind {
            FactKind::Choice(values) => values,
            FactKind::Flag => &["true", "false"],
            FactKind::Port | FactKind::Range => &[],
        }
    }
}

/// Where the API of a cloud provider is.
#[derive(Debug)]
pub struct Provider {
    /// The key in the Seed's datacenters.
    pub key: &'static str,
    /// Its hosts; `{region}` stands for the region.
    pub hosts: &'static [&'static str],
    /// The field of the datacenter's spec that has the region.
    pub region: Option<&'static str>,
    /// The field of the datacenter's spec that has the address. It is for providers that run where their
    /// owner put them.
    pub field: Option<&'static str>,
    /// The field that has the port, if there is one.
    pub port_field: Option<&'static str>,
    /// The port, unless the address has another.
    pub port: u16,
    /// The address is in a Secret, which Portico does not read.
    pub secret: bool,
    /// Where this comes from.
    pub reference: &'static str,
}

/// The needs of one user cluster from its seed.
#[derive(Debug)]
pub struct ClusterCost {
    /// Its strategy.
    pub strategy: &'static str,
    /// NodePorts of its own Services.
    pub node_ports: u32,
    /// NodePorts that Services of type LoadBalancer take for its ports.
    pub service_ports: u32,
    /// Listeners on the seed's one load balancer.
    pub listeners: u32,
    /// Load balancers, and addresses, of its own.
    pub load_balancers: u32,
    /// Where this comes from.
    pub reference: &'static str,
}

/// The capacity of a provider's load balancer.
#[derive(Debug)]
pub struct LoadBalancer {
    /// Its key on the command line: `aws-nlb`.
    pub key: &'static str,
    /// Its name.
    pub title: &'static str,
    /// Most listeners of one load balancer; `None` where their number has no limit.
    pub listeners: Option<u32>,
    /// The provider raises that limit on request.
    pub listeners_adjustable: bool,
    /// Most load balancers of one account or region; `None` where no limit is known.
    pub count: Option<u32>,
    /// The provider raises that limit on request.
    pub count_adjustable: bool,
    /// Where the provider says so.
    pub reference: &'static str,
}

mod generated {
    use super::*;

    /// A range that the build script has read.
    const fn range(first: u16, last: u16) -> PortRange {
        match PortRange::new(first, last) {
            Ok(range) => range,
            Err(_) => panic!("the build script has read the range"),
        }
    }

    include!(concat!(env!("OUT_DIR"), "/model.rs"));
}

/// All products.
pub fn products() -> &'static [Product] {
    generated::PRODUCTS
}

/// All facts.
pub fn facts() -> &'static [Fact] {
    generated::FACTS
}

/// The APIs of all providers.
pub fn providers() -> &'static [Provider] {
    generated::PROVIDERS
}

/// What clusters take, by strategy.
pub fn cluster_costs() -> &'static [ClusterCost] {
    generated::CLUSTER_COSTS
}

/// Listeners that the seed's one load balancer has whatever the clusters are.
pub fn shared_listeners() -> u32 {
    generated::SHARED_LISTENERS
}

/// The load balancers whose limits are known.
pub fn load_balancers() -> &'static [LoadBalancer] {
    generated::LOAD_BALANCERS
}

/// The product with this key.
///
/// # Errors
/// If there is none; the error has the nearest.
pub fn product(key: &str) -> Result<&'static Product, UnknownWord> {
    let products = products();
    products
        .iter()
        .find(|product| product.key.eq_ignore_ascii_case(key))
        .ok_or_else(|| UnknownWord::new("product", key, products.iter().map(|product| product.key)))
}

/// The load balancer with this key.
///
/// # Errors
/// If there is none; the error has the nearest.
pub fn load_balancer(key: &str) -> Result<&'static LoadBalancer, UnknownWord> {
    let all = load_balancers();
    all.iter()
        .find(|load_balancer| load_balancer.key.eq_ignore_ascii_case(key))
        .ok_or_else(|| UnknownWord::new("load balancer", key, all.iter().map(|known| known.key)))
}

/// The fact of this key.
///
/// # Errors
/// If there is none; the error has the nearest.
pub fn fact(key: &str) -> Result<&'static Fact, UnknownWord> {
    facts()
        .iter()
        .find(|fact| fact.key.eq_ignore_ascii_case(key))
        .ok_or_else(|| UnknownWord::new("key", key, facts().iter().map(|fact| fact.key)))
}

impl Product {
    /// The role with this key, or with this name in the tables.
    pub fn role(&self, word: &str) -> Option<&'static Role> {
        let is = |known: &&str| known.eq_ignore_ascii_case(word);
        self.roles.iter().find(|role| is(&role.key) || role.names.iter().any(&is))
    }

    /// The role of an end of a row; `None` only for a row of another product.
    pub fn role_of(&self, end: End) -> Option<&'static Role> {
        self.roles.iter().find(|role| role.key == end.role)
    }

    /// Whether the rows of `role` concern `end`: it is its role, or one that its role includes.
    pub fn concerns(&self, end: End, role: &str) -> bool {
        end.role == role || self.role_of(end).is_some_and(|wide| wide.includes.contains(&role))
    }
}

/// The roles of `products` that have this key or name.
///
/// # Errors
/// If there is none; the error has the nearest.
pub fn role(products: &[&'static Product], word: &str) -> Result<Vec<&'static Role>, UnknownWord> {
    let found: Vec<&Role> = products.iter().filter_map(|product| product.role(word)).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let mut words: Vec<&str> =
        products.iter().flat_map(|product| product.roles).map(|role| role.key).collect();
    words.sort_unstable();
    words.dedup();
    Err(UnknownWord::new("role", word, words))
}
