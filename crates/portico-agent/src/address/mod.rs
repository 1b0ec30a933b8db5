//! The address of the `kubernetes` service on this node: made, guarded, kept, and taken away again.
//!
//! The API server of the user cluster tells its pods to find it at one address, the same on every worker node (100.64.30.10 by
//! default). So every node's agent holds that address for its own node: [`check`] looks whether someone else has it,
//! [`Held::take`] makes it, [`Held::keep`] puts it back when someone removes it, [`Held::release`] takes it away.

mod collision;
mod error;
mod held;

use std::net::{IpAddr, Ipv4Addr};

pub use collision::{Collision, Mac, Report, Warning};
pub use error::AddressError;
pub use held::{Held, How, Kind, Status};

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

/// Looks whether the address could be held here. Changes nothing; asks on the links if [`Settings::arp`] says so, which takes a
/// second. What it may not look at for lack of rights is a warning.
pub async fn check(_settings: &Settings) -> Result<Report, AddressError> {
    Err(held::not_yet())
}
