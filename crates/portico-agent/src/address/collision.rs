//! What stands against holding an address here: each finding with its evidence and with what to do about it.

use std::fmt::{self, Display, Formatter};
use std::net::IpAddr;

/// The interface that KKP's Envoy agent makes (facts of KKP: a dummy link with the agent's address).
const KKP_INTERFACE: &str = "envoyagent";

/// A reason not to hold the address: someone else has it, or might.
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
    /// A machine on the link answers for the address.
    Answered {
        /// The address asked for.
        address: IpAddr,
        /// The interface on which the answer came.
        interface: Box<str>,
        /// Who answers.
        mac: Mac,
    },
}

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl Display for Mac {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
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
                    "); choose another name with --interface, or, if nothing needs it, remove it: ip link delete {interface}"
                )
            }
            Self::OnInterface { address, interface, .. } if &**interface == KKP_INTERFACE => write!(
                f,
                "{address} is on interface {interface} of this host, made by KKP's Envoy agent; stop that agent on this node \
                 (DaemonSet envoy-agent in namespace kube-system), then remove what it leaves: ip link delete {interface}"
            ),
            Self::OnInterface { address, interface, agent: true } => write!(
                f,
                "{address} is on interface {interface} of this host, made by another Portico agent; stop that agent, or give \
                 this one the same name with --interface {interface} to take over from it"
            ),
            Self::OnInterface { address, interface, agent: false } => write!(
                f,
                "{address} is on interface {interface} of this host; choose another address with --address (the API server's \
                 --advertise-address must agree), or remove it there: ip address delete {address} dev {interface}"
            ),
            Self::InNetwork { address, interface, network } => write!(
                f,
                "{address} lies in network {network} of interface {interface}: a neighbour there may have it; choose an address \
                 outside of it with --address (the API server's --advertise-address must agree)"
            ),
            Self::InRoute { address, route } => write!(
                f,
                "{address} lies in the route \"{route}\" of this host, and what the route is for would be cut off; choose an address \
                 outside of it with --address (the API server's --advertise-address must agree), or remove the route"
            ),
            Self::Answered { address, interface, mac } => write!(
                f,
                "{address} is answered for by {mac} on interface {interface}; if that is a machine of its own, choose another address \
                 with --address (the API server's --advertise-address must agree); if it is a node of this cluster that still \
                 runs KKP's Envoy agent, which answers on every wire, start with --no-arp-check until all nodes are changed"
            ),
        }
    }
}

/// Something to know that is no reason to refuse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// Something could not be looked at.
    Unchecked {
        /// What.
        what: Box<str>,
        /// Why not.
        why: Box<str>,
        /// The capability that would be needed, if that is the reason: `CAP_NET_RAW`.
        capability: Option<&'static str>,
    },
    /// Someone answers for the address, but since this kernel cannot keep nodes from doing so, it may well be a node of this
    /// cluster.
    Answered {
        /// Who.
        collision: Collision,
        /// Why nodes cannot be kept from answering.
        why: Box<str>,
    },
}

impl Display for Warning {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchecked { what, why, capability: None } => write!(f, "{what} not checked: {why}"),
            Self::Unchecked { what, why, capability: Some(capability) } => {
                write!(f, "{what} not checked: {why}; it needs {capability}")
            }
            Self::Answered { collision, why } => write!(
                f,
                "{collision}; this is no more than a warning, since nodes cannot be kept from answering here ({why})"
            ),
        }
    }
}

/// What a look at host and link has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Reasons not to hold the address. None: it can be held.
    pub collisions: Vec<Collision>,
    /// What else there is to know.
    pub warnings: Vec<Warning>,
}
