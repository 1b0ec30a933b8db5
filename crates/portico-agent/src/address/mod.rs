//! The address of the `kubernetes` service on this node: made, guarded, kept, and taken away again.
//!
//! The API server of the user cluster tells its pods to find it at one address, the same on every worker node (100.64.30.10 by
//! default). So every node's agent holds that address for its own node: [`check`] looks whether someone else has it,
//! [`Held::take`] makes it, [`Held::keep`] puts it back when someone removes it, [`Held::release`] takes it away.

mod arp;
mod collision;
mod error;
mod guard;
mod held;
mod host;
mod look;
mod netlink;
mod place;

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use futures_util::future::join_all;

pub use collision::{Collision, Mac, Report, Warning};
pub use error::AddressError;
pub use held::{Held, How, Status};
pub use place::Kind;

use arp::Probe;
use error::is_right_missing;
use guard::Guard;
use host::Host;
use look::View;

/// The address that KKP gives to the agents of a user cluster unless told otherwise.
pub const DEFAULT_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(100, 64, 30, 10));

/// Which address to hold, and how.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address. IPv6 is supported on interfaces of our own; no ARP then, and nothing in its place: unlike IPv4, a node does
    /// not answer on one interface for an IPv6 address of another.
    pub address: IpAddr,
    /// The name of the interface to make.
    pub interface: Box<str>,
    /// Whether to ask on the links whether someone answers for the address.
    pub arp: bool,
    /// The ways to hold it, the best first.
    pub kinds: Box<[Kind]>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { address: DEFAULT_ADDRESS, interface: "portico".into(), arp: true, kinds: Kind::ALL.into() }
    }
}

/// Interfaces to ask on by ARP at a time. A node has a handful; one with more is told which were left out.
const ASKED: usize = 64;

/// Looks whether the address could be held here. Changes nothing; asks on the links if [`Settings::arp`] says so, which takes a
/// second. What it may not look at for lack of rights is a warning.
pub async fn check(settings: &Settings) -> Result<Report, AddressError> {
    usable(settings)?;
    let looking = |source| AddressError::of("look at the network of this host", "CAP_NET_ADMIN", source);
    let view = Host::open().and_then(|mut host| View::read(&mut host, settings)).map_err(looking)?;
    let mut report = Report { collisions: view.collisions(settings), warnings: Vec::new() };
    if let (IpAddr::V4(address), true) = (settings.address, settings.arp) {
        ask(&view, settings, address, &mut report).await;
    }
    Ok(report)
}

/// Asks for the address on every link, on all of them at once.
async fn ask(view: &View, settings: &Settings, address: Ipv4Addr, report: &mut Report) {
    let own = view.macs();
    let patience = if view.is_held(settings) { arp::PATIENCE_OF_A_SUCCESSOR } else { arp::PATIENCE };
    let asked = view.links_to_ask().enumerate().map(async |(number, (link, mac))| {
        let answer = match number {
            0..ASKED => match Probe::open(link.index, mac) {
                Ok(probe) => probe.ask(address, &own, patience).await,
                Err(error) => Err(error),
            },
            _ => Err(io::Error::other(format!("only the first {ASKED} interfaces are asked on"))),
        };
        (link, answer)
    });
    // A node that cannot be kept from answering says nothing about who should have the address.
    let unguarded = match Guard::new(&settings.interface, address).try_out() {
        Err(error) if !is_right_missing(&error) => Some(Box::from(error.to_string())),
        _ => None,
    };
    for (link, answer) in join_all(asked).await {
        let interface = &link.name;
        match answer {
            Ok(owners) => report.answers(
                owners.into_iter().map(|mac| Collision::Answered {
                    address: address.into(),
                    interface: interface.clone(),
                    mac,
                }),
                unguarded.as_deref(),
            ),
            Err(error) => report.warnings.push(Warning::Unchecked {
                what: format!("whether someone on the link of {interface} has {address}").into(),
                why: error.to_string().into(),
                capability: is_right_missing(&error).then_some("CAP_NET_RAW"),
            }),
        }
    }
}

impl Report {
    /// Takes in who answered: as a reason to refuse, or as a warning where nodes cannot be kept from answering.
    fn answers(&mut self, found: impl Iterator<Item = Collision>, unguarded: Option<&str>) {
        match unguarded {
            None => self.collisions.extend(found),
            Some(why) => {
                self.warnings.extend(found.map(|collision| Warning::Answered { collision, why: why.into() }))
            }
        }
    }
}

/// Refuses what no host can hold, and names that the kernel would not take.
fn usable(settings: &Settings) -> Result<(), AddressError> {
    let address = settings.address;
    let what = match address {
        _ if address.is_unspecified() => "no address",
        _ if address.is_loopback() => "a loopback address, which pods cannot reach",
        _ if address.is_multicast() => "a multicast address",
        IpAddr::V4(v4) if v4.is_broadcast() => "the broadcast address",
        IpAddr::V4(v4) if v4.octets()[0] == 0 => "an address of no network",
        IpAddr::V6(v6) if v6.is_unicast_link_local() => "an address that differs from link to link",
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => "an IPv4 address written as IPv6",
        _ if !place::is_name(&settings.interface) => {
            return Err(AddressError::InterfaceName(settings.interface.clone()));
        }
        _ => return Ok(()),
    };
    Err(AddressError::Unusable { address, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_warning_where_nodes_cannot_be_kept_from_answering() {
        let answer = Collision::Answered {
            address: DEFAULT_ADDRESS,
            interface: "eth0".into(),
            mac: Mac([2, 0, 0, 0, 0, 1]),
        };
        let mut report = Report::default();
        report.answers([answer.clone()].into_iter(), None);
        assert_eq!((report.collisions.len(), report.warnings.len()), (1, 0));
        report.answers([answer].into_iter(), Some("Operation not supported"));
        assert_eq!((report.collisions.len(), report.warnings.len()), (1, 1));
        let text = report.warnings[0].to_string();
        assert!(text.contains("02:00:00:00:00:01 on interface eth0"), "{text}");
        assert!(text.contains("Operation not supported"), "{text}");
    }
}
