//! The reasons against holding the address here: each finding with its evidence and its remedy.

use std::fmt::{self, Display, Formatter};
use std::net::IpAddr;

use super::host::{Address, Link};

/// The interface of KKP's Envoy agent: a dummy link with the agent's address.
const KKP_INTERFACE: &str = "envoyagent";

/// What helps against most collisions.
const OTHER_ADDRESS: &str =
    "choose another address with --address (the API server's --advertise-address must agree)";

/// A reason not to hold the address: something else has it, or may have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collision {
    /// The interface that should be made exists, and was not made by an agent.
    NameTaken {
        /// Its name.
        interface: Box<str>,
        /// What the kernel calls it: `dummy`, `veth`, `bridge`, ..., or empty for a device.
        kind: Box<str>,
        /// Its addresses, as `ip address` writes them.
        addresses: Box<[Box<str>]>,
    },
    /// Another interface of this host has the address.
    OnInterface {
        /// The address asked for.
        address: IpAddr,
        /// The interface that has it.
        interface: Box<str>,
        /// Whether another agent made that interface, under another name.
        agent: bool,
    },
    /// The address belongs to the network of an interface of this host: a neighbour may have it.
    InNetwork {
        /// The address asked for.
        address: IpAddr,
        /// The interface.
        interface: Box<str>,
        /// Its network, `10.0.0.0/8`.
        network: Box<str>,
    },
    /// A route other than the default route leads to the address.
    InRoute {
        /// The address asked for.
        address: IpAddr,
        /// The route, as `ip route` writes it.
        route: Box<str>,
    },
}

impl Collision {
    /// The finding that `link`, which no agent made, has the name of the interface to make.
    pub(super) fn name_taken(link: &Link, addresses: &[Address]) -> Self {
        let of_link = addresses.iter().filter(|address| address.index == link.index);
        Self::NameTaken {
            interface: link.name.clone(),
            kind: link.kind.clone(),
            addresses: of_link.map(|held| held.to_string().into()).collect(),
        }
    }
}

impl Display for Collision {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::NameTaken { interface, kind, addresses } => {
                let kind = if kind.is_empty() { "device" } else { kind };
                write!(f, "interface {interface} exists and was not made by Portico (a {kind} with ")?;
                match addresses.as_ref() {
                    [] => f.write_str("no address")?,
                    some => f.write_str(&some.join(", "))?,
                }
                write!(
                    f,
                    "); choose another name with --interface, or, if nothing needs it, remove it: \
                     ip link delete {interface}"
                )
            }
            Self::OnInterface { address, interface, .. } if &**interface == KKP_INTERFACE => write!(
                f,
                "{address} is on interface {interface} of this host, made by KKP's Envoy agent; stop that \
                 agent on this node (DaemonSet envoy-agent in namespace kube-system), then remove what it \
                 leaves: ip link delete {interface}"
            ),
            Self::OnInterface { address, interface, agent: true } => write!(
                f,
                "{address} is on interface {interface} of this host, made by another Portico agent; stop \
                 that agent, or give this one the same name with --interface {interface} to take over from it"
            ),
            Self::OnInterface { address, interface, agent: false } => write!(
                f,
                "{address} is on interface {interface} of this host; {OTHER_ADDRESS}, or remove it there: \
                 ip address delete {address} dev {interface}"
            ),
            Self::InNetwork { address, interface, network } => write!(
                f,
                "{address} lies in network {network} of interface {interface}: a neighbour there may have \
                 it; {OTHER_ADDRESS}"
            ),
            Self::InRoute { address, route } => write!(
                f,
                "{address} lies in the route \"{route}\" of this host, and what the route is for would be \
                 cut off; {OTHER_ADDRESS}, or remove the route"
            ),
        }
    }
}

/// What [`check`](super::check) has looked at, and what it has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Reasons not to hold the address. None: it can be held.
    pub collisions: Vec<Collision>,
    /// Every interface of this host, by name.
    pub interfaces: Vec<Box<str>>,
    /// Every address of the same family, as `ip address` writes it, with its interface.
    pub addresses: Vec<(Box<str>, Box<str>)>,
    /// How many routes of the same family there are in each table.
    pub routes: Vec<(Box<str>, usize)>,
}
