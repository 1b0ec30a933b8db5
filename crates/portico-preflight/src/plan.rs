//! From roles, an inventory and the model to checks: a pure function.
//!
//! A plan is for one machine. Every flow that one of its roles opens is tried towards each machine of the
//! other role. Every flow that it accepts is tried back by those machines. Every port that it needs is looked
//! at here. A range of ports is tried at its ends and in the middle. A check that cannot be tried is in the
//! plan as well, with the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use portico_dial::Target;
use portico_ports::facts::Facts;
use portico_ports::flow::{Flow, Query};
use portico_ports::inventory::{Addresses, Inventory};
use portico_ports::model::{AddressKind, End, Ports, Product, Protocol, Role, Row};
use portico_ports::site::{NodePorts, Site as Needs};
use rustls::RootCertStore;
use thiserror::Error;

use crate::check::tls::{Server, Trust};
use crate::runner::What;
use crate::transport::Transport;

/// Where name servers answer; their flows are tried with a question, not with a probe.
const DNS: u16 = 53;

/// TCP ports behind which TLS is spoken: APIs, Kubernetes' and others, and Kublr's secret store.
const TLS: [u16; 3] = [443, 6443, 11250];

/// The protocol offered by ALPN: every API speaks it, and tells its time then.
const ALPN: &str = "http/1.1";

/// The most addresses at which another machine is asked for the way back.
const MOST_VIA: usize = 4;

/// Why IP-in-IP is tried from here only.
const ONE_WAY: &str =
    "a firewall cannot tell the directions of IP-in-IP apart; run it on the other machine, too";

/// Why IP-in-IP is not tried between addresses of IPv6.
const IPV4_ONLY: &str = "container networks carry IP-in-IP over IPv4 only";

/// Roles whose certificates this machine must trust as its programs do. Those of others come from the
/// authority of the installation, which a machine does not know by itself.
const OUTSIDE: [&str; 4] = ["internet", "intranet", "infra-api", "provider-api"];

/// Facts that objects decide, for each cluster or datacenter by itself.
const BY_OBJECTS: [&str; 3] = ["strategy", "cni", "provider"];

/// What a plan follows from.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The products whose rows count.
    pub products: &'a [&'static Product],
    /// The roles of this machine, by words or names of the model.
    pub roles: &'a [String],
    /// What is known of the installation.
    pub facts: &'a Facts,
    /// Which addresses have which role.
    pub inventory: &'a Inventory,
    /// The facts from objects of the installation. Their ports and addresses come before those of the model
    /// and of the inventory.
    pub needs: Option<&'a Needs>,
    /// The addresses of this machine.
    pub here: &'a [IpAddr],
    /// How certificates are judged.
    pub tls: &'a TlsTrust,
}

/// How certificates are judged.
#[derive(Debug, Clone)]
pub struct TlsTrust {
    /// The authorities for machines outside of the installation: those that this machine trusts, and that of
    /// the installation.
    pub public: Arc<RootCertStore>,
    /// The authority of the installation. Without it its certificates are shown, and not judged.
    pub own: Option<Arc<RootCertStore>>,
    /// The server name for machines that are known by address only.
    pub server_name: Option<Box<str>>,
}

/// Why there is no plan.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// No role has this name.
    #[error(transparent)]
    Unknown(#[from] portico_ports::nearest::UnknownWord),
    /// No address of this machine has the role.
    #[error(
        "no address of this machine ({here}) is among those of the role {role} in the inventory; run it on \
         such a machine, or add this one"
    )]
    NotHere {
        /// The role.
        role: &'static str,
        /// The addresses.
        here: String,
    },
    /// Rows depend on something that is not known.
    #[error("{rows} depends on {fact}, which is not known; give --set {fact}={values}")]
    Undecided {
        /// What is not known.
        fact: &'static str,
        /// What it can be.
        values: String,
        /// The rows.
        rows: String,
    },
}

/// Which way a flow goes, seen from this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From here.
    Out,
    /// To here.
    In,
    /// A port of this machine.
    Here,
}

/// One check, and the row of the model it is made for.
#[derive(Debug, Clone)]
pub struct Planned {
    /// The row.
    pub row: &'static Row,
    /// Which way the flow goes.
    pub direction: Direction,
    /// The end that opens it.
    pub from: Box<str>,
    /// The end that accepts it.
    pub to: Box<str>,
    /// The other machine, if it is known by its address.
    pub peer: Option<IpAddr>,
    /// What is opened. `None` if nothing is tried.
    pub transport: Option<Transport>,
    /// The check.
    pub what: What,
}

/// What is tried, and what the responder of this machine does meanwhile.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// The checks, row by row.
    pub checks: Vec<Planned>,
    /// Addresses of this machine in its roles.
    pub addresses: Vec<IpAddr>,
    /// What others open here.
    pub accepts: BTreeSet<Transport>,
    /// What this machine opens elsewhere.
    pub opens: BTreeSet<Transport>,
    /// All machines of the inventory.
    pub peers: Vec<IpNet>,
}

/// Makes the plan.
pub fn plan(site: &Site<'_>) -> Result<Plan, PlanError> {
    let mut maker = Maker { site, plan: Plan::default(), via: BTreeMap::new(), sized: BTreeSet::new() };
    let all = site.inventory.roles().flat_map(|(_, addresses)| &addresses.networks);
    // A network of everybody names nobody.
    maker.plan.peers = all.filter(|network| network.prefix_len() > 0).copied().collect();
    let mut incoming: Vec<(&Product, Flow)> = Vec::new();
    for word in site.roles {
        for role in portico_ports::model::role(site.products, word)? {
            maker.locate(role)?;
        }
    }
    for &product in site.products {
        for flow in flows(site, product)? {
            if has(product, flow.row.source, site.roles) {
                maker.outgoing(product, &flow);
            }
            if !has(product, flow.row.destination, site.roles) {
                continue;
            }
            // Clusters that are reached at different addresses have a flow each, of one row.
            match incoming.iter_mut().find(|(_, known)| known.row.id == flow.row.id) {
                Some((_, known)) => known.ports.extend(flow.ports),
                None => incoming.push((product, flow)),
            }
        }
    }
    // Afterwards: the way back is asked for over flows from here.
    for (product, flow) in &incoming {
        maker.incoming(product, flow);
    }
    Ok(maker.plan)
}

fn has(product: &Product, end: End, roles: &[String]) -> bool {
    roles.iter().filter_map(|word| product.role(word)).any(|role| product.concerns(end, role.key))
}

/// The flows of a product that this installation needs.
fn flows(site: &Site<'_>, product: &'static Product) -> Result<Vec<Flow>, PlanError> {
    let facts = match site.needs {
        Some(_) => site.facts.or_general_defaults(),
        None => site.facts.or_defaults(product),
    };
    let query = Query { products: vec![product], role: None, facts };
    let flows = match site.needs {
        Some(needs) => needs.flows(&query, NodePorts::Allocated)?,
        None => query.flows()?,
    };
    undecided(site, product, &query.facts, &flows)?;
    Ok(flows)
}

/// A row that may or may not be needed is not guessed at.
fn undecided(site: &Site<'_>, product: &Product, facts: &Facts, flows: &[Flow]) -> Result<(), PlanError> {
    let mut missing: BTreeMap<&'static str, Vec<&str>> = BTreeMap::new();
    for row in flows.iter().map(|flow| flow.row) {
        if has(product, row.source, site.roles) || has(product, row.destination, site.roles) {
            for condition in facts.missing(row) {
                if site.needs.is_none() || !BY_OBJECTS.contains(&condition.fact) {
                    missing.entry(condition.fact).or_default().push(row.id);
                }
            }
        }
    }
    let Some((fact, mut rows)) = missing.pop_first() else { return Ok(()) };
    rows.dedup();
    let known = portico_ports::model::fact(fact)?;
    Err(PlanError::Undecided { fact, values: known.values().join("|"), rows: rows.join(", ") })
}

struct Maker<'a> {
    site: &'a Site<'a>,
    plan: Plan,
    /// Where a machine can be asked for the way back.
    via: BTreeMap<IpAddr, Vec<SocketAddr>>,
    /// Machines towards which the path MTU is looked for already.
    sized: BTreeSet<IpAddr>,
}

impl Maker<'_> {
    /// Finds this machine among those of the role.
    fn locate(&mut self, role: &'static Role) -> Result<(), PlanError> {
        let addresses = self.site.inventory.addresses(role).unwrap_or_default();
        let in_role = |here: &&IpAddr| addresses.networks.iter().any(|network| network.contains(*here));
        let found: Vec<IpAddr> = self.site.here.iter().filter(in_role).copied().collect();
        if found.is_empty() {
            let here: Vec<String> = self.site.here.iter().map(ToString::to_string).collect();
            return Err(PlanError::NotHere { role: role.key, here: here.join(", ") });
        }
        self.plan.addresses.extend(found);
        self.plan.addresses.sort_unstable();
        self.plan.addresses.dedup();
        Ok(())
    }

    /// The address of this machine that speaks to `peer`.
    fn own(&self, peer: IpAddr) -> Option<IpAddr> {
        self.plan.addresses.iter().find(|own| own.is_ipv4() == peer.is_ipv4()).copied()
    }

    fn push(
        &mut self,
        row: &'static Row,
        direction: Direction,
        ends: (&str, &str),
        what: (Option<IpAddr>, Option<Transport>, What),
    ) {
        let ((from, to), (peer, transport, what)) = (ends, what);
        let (from, to) = (from.into(), to.into());
        self.plan.checks.push(Planned { row, direction, from, to, peer, transport, what });
    }

    /// Notes what cannot be tried.
    fn skip(&mut self, row: &'static Row, direction: Direction, other: &str, why: String) {
        let ends = if direction == Direction::In { (other, "this machine") } else { ("this machine", other) };
        self.push(row, direction, ends, (None, None, What::Nothing { why: why.into() }));
    }

    fn outgoing(&mut self, product: &Product, flow: &Flow) {
        let row = flow.row;
        let Some(role) = product.role_of(row.destination) else { return };
        let addresses = self.destination(role, flow);
        let transports = transports(flow);
        if transports.is_empty() {
            let why = "the model does not know which port this provider's API has".to_owned();
            return self.skip(row, Direction::Out, row.destination.name, why);
        }
        self.plan.opens.extend(&transports);
        if is_provider(row) {
            flow.hosts.iter().for_each(|host| self.api(flow, host, &transports));
        }
        for name in &addresses.names {
            self.named(row, role, name, &transports);
        }
        for address in
            addresses.hosts().filter(|address| !self.plan.addresses.contains(address)).collect::<Vec<_>>()
        {
            match self.own(address) {
                None => {
                    let family = if address.is_ipv6() { "IPv6" } else { "IPv4" };
                    let why = format!("this machine has no {family} address in its role");
                    self.skip(row, Direction::Out, &address.to_string(), why);
                }
                Some(own) => self.addressed(row, role, (own, address), &transports),
            }
        }
        for network in networks(&addresses) {
            let why = "it is a network; list its machines one by one to have them tried".to_owned();
            self.skip(row, Direction::Out, &network.to_string(), why);
        }
        if addresses == Addresses::default() && flow.hosts.is_empty() {
            let why = format!("the inventory has no address for the role {}", role.key);
            self.skip(row, Direction::Out, row.destination.name, why);
        }
    }

    /// Where the other end of a flow is, as objects tell, or else as the inventory says.
    fn destination(&self, role: &Role, flow: &Flow) -> Addresses {
        let hosts = flow.hosts.iter().filter(|_| !is_provider(flow.row));
        let mut addresses = Addresses::default();
        for text in hosts.chain(&flow.addresses) {
            match text.parse::<IpAddr>() {
                Ok(address) => addresses.networks.push(address.into()),
                Err(_) => addresses.names.push(text.as_str().into()),
            }
        }
        if addresses == Addresses::default() {
            return self.site.inventory.addresses(role).unwrap_or_default();
        }
        addresses
    }

    /// The API of a provider, which the model knows by name.
    fn api(&mut self, flow: &Flow, host: &str, transports: &[Transport]) {
        let trust = Trust::Roots(Arc::clone(&self.site.tls.public));
        for transport in transports {
            let Some(target) = target(host, *transport) else {
                let why = format!("{host} needs the region; put the full name into the inventory");
                self.skip(flow.row, Direction::Out, host, why);
                continue;
            };
            let server = server(target, host, trust.clone());
            let what = (None, Some(*transport), What::Tls(Box::new(server)));
            self.push(flow.row, Direction::Out, ("this machine", host), what);
        }
    }

    fn named(&mut self, row: &'static Row, role: &Role, name: &str, transports: &[Transport]) {
        for transport in transports {
            let Some(target) = target(name, *transport) else {
                let why = format!("{transport} is tried by address; put the address into the inventory");
                self.skip(row, Direction::Out, name, why);
                continue;
            };
            let tls = transport
                .port()
                .filter(|port| TLS.contains(port))
                .map(|_| Box::new(server(target.clone(), name, self.trust(role))));
            let what = match (role.address_kind, tls) {
                // The way to elsewhere may lead through a proxy, and ends at a service.
                (AddressKind::Network, Some(tls)) => What::Tls(tls),
                (_, tls) => What::TcpByName { target, tls },
            };
            self.push(row, Direction::Out, ("this machine", name), (None, Some(*transport), what));
        }
    }

    fn addressed(
        &mut self,
        row: &'static Row,
        role: &Role,
        ends: (IpAddr, IpAddr),
        transports: &[Transport],
    ) {
        let (own, to) = ends;
        let (from_text, to_text) = (own.to_string(), to.to_string());
        for &transport in transports {
            let what = match transport {
                _ if !transport.leads_to(to) => What::Nothing { why: IPV4_ONLY.into() },
                Transport::Tcp(port) => {
                    let address = SocketAddr::new(to, port);
                    let via = self.via.entry(to).or_default();
                    if role.address_kind == AddressKind::Machines
                        && via.len() < MOST_VIA
                        && !via.contains(&address)
                    {
                        via.push(address);
                    }
                    self.tcp(role, address)
                }
                Transport::Udp(DNS) => What::Dns { server: SocketAddr::new(to, DNS), is_tcp: false },
                _ => What::Datagram { to, transport },
            };
            let planned = (Some(to), Some(transport), what);
            self.push(row, Direction::Out, (&from_text, &to_text), planned);
            let is_tunnel =
                matches!(transport, Transport::Udp(port) if port != DNS) || transport == Transport::IpInIp;
            let is_sized = is_tunnel && transport.leads_to(to) && row.source.role == row.destination.role;
            if is_sized && self.sized.insert(to) {
                let planned = (Some(to), Some(transport), What::PathMtu { to, transport });
                self.push(row, Direction::Out, (&from_text, &to_text), planned);
            }
        }
    }

    fn tcp(&self, role: &Role, to: SocketAddr) -> What {
        if to.port() == DNS {
            return What::Dns { server: to, is_tcp: true };
        }
        let name = self.site.tls.server_name.clone().unwrap_or_else(|| to.ip().to_string().into());
        let tls = target(&to.ip().to_string(), Transport::Tcp(to.port()))
            .filter(|_| TLS.contains(&to.port()))
            .map(|target| Box::new(server(target, &name, self.trust(role))));
        What::Tcp { to, tls }
    }

    fn trust(&self, role: &Role) -> Trust {
        match &self.site.tls.own {
            _ if OUTSIDE.contains(&role.key) => Trust::Roots(Arc::clone(&self.site.tls.public)),
            Some(own) => Trust::Roots(Arc::clone(own)),
            None => Trust::Any,
        }
    }

    fn incoming(&mut self, product: &Product, flow: &Flow) {
        let row = flow.row;
        let Some(role) = product.role_of(row.source) else { return };
        let transports = transports(flow);
        for &transport in
            transports.iter().filter(|transport| !self.plan.accepts.contains(transport)).collect::<Vec<_>>()
        {
            let own = self.plan.addresses.iter().filter(|own| transport.leads_to(**own)).copied();
            for address in own.collect::<Vec<_>>() {
                let text = address.to_string();
                let planned = (None, Some(transport), What::LocalPort { address, transport });
                self.push(row, Direction::Here, (row.source.name, &text), planned);
            }
        }
        self.plan.accepts.extend(&transports);
        let addresses = self.site.inventory.addresses(role).unwrap_or_default();
        let mut unasked = addresses == Addresses::default();
        unasked |= networks(&addresses).next().is_some() || !addresses.names.is_empty();
        let peers: Vec<IpAddr> =
            addresses.hosts().filter(|address| !self.plan.addresses.contains(address)).collect();
        for peer in peers {
            let Some(own) = self.own(peer) else { continue };
            let Some(via) = self.via.get(&peer).filter(|via| !via.is_empty()) else {
                let why = format!(
                    "no TCP flow leads from here to {peer}, by which it could be asked; run portico \
                     preflight --role {} there",
                    role.key
                );
                self.skip(row, Direction::In, &peer.to_string(), why);
                continue;
            };
            let via: Arc<[SocketAddr]> = via.as_slice().into();
            for &transport in &transports {
                let what = match transport {
                    // Our own probe opens the way for theirs through a firewall that keeps state.
                    Transport::IpInIp => What::Nothing { why: ONE_WAY.into() },
                    _ => What::Back { via: Arc::clone(&via), transport },
                };
                let ends = (peer.to_string(), own.to_string());
                self.push(row, Direction::In, (&ends.0, &ends.1), (Some(peer), Some(transport), what));
            }
        }
        if unasked {
            let why = format!("run portico preflight --role {} on such a machine", role.key);
            self.skip(row, Direction::In, row.source.name, why);
        }
    }
}

/// Whether a row leads to the API of a cloud provider.
fn is_provider(row: &Row) -> bool {
    row.ports.contains(&Ports::Provider)
}

/// The networks of more than one address.
fn networks(addresses: &Addresses) -> impl Iterator<Item = &IpNet> {
    addresses.networks.iter().filter(|network| network.prefix_len() < network.max_prefix_len())
}

/// The ports of a flow: all of them, and of a range the ends and the middle.
fn transports(flow: &Flow) -> Vec<Transport> {
    let mut found = BTreeSet::new();
    for protocol in flow.protocols() {
        if *protocol == Protocol::IpInIp {
            found.insert(Transport::IpInIp);
        }
        for ports in &flow.ports {
            let Ports::Range(range) = ports else { continue };
            let (first, last) = (range.first(), range.last());
            for port in [first, first + (last - first) / 2, last] {
                match protocol {
                    Protocol::Tcp => found.insert(Transport::Tcp(port)),
                    Protocol::Udp => found.insert(Transport::Udp(port)),
                    Protocol::IpInIp => false,
                };
            }
        }
    }
    found.into_iter().collect()
}

fn target(host: &str, transport: Transport) -> Option<Target> {
    let Transport::Tcp(port) = transport else { return None };
    let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    text.parse().ok()
}

fn server(target: Target, name: &str, trust: Trust) -> Server {
    Server { target, name: name.into(), trust, alpn: vec![ALPN.into()] }
}

#[cfg(test)]
#[path = "plan/tests.rs"]
mod tests;
