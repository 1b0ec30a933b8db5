//! Which address to hold, and on what kind of interface.

use std::fmt::{self, Display, Formatter};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use super::error::AddressError;

/// The address that KKP gives to the agents of a user cluster by default.
pub const DEFAULT_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(100, 64, 30, 10));

/// The longest name of an interface, in bytes (`IFNAMSIZ` less the closing zero).
pub(super) const NAME_MAX: usize = 15;

/// Which address to hold, and how.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address, IPv4 or IPv6.
    pub address: IpAddr,
    /// The name of the interface to make.
    pub interface: Box<str>,
    /// The kinds of interface to try, the best first.
    pub kinds: Box<[Kind]>,
    /// The file by which the agents of this node know whether others run, and beside it one for each address;
    /// `None` if there is only one agent.
    pub users: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { address: DEFAULT_ADDRESS, interface: "portico".into(), kinds: Kind::ALL.into(), users: None }
    }
}

/// A kind of interface that can hold the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A dummy interface: what Linux has for this. Not every kernel has the module.
    Dummy,
    /// A pair of veth interfaces, both ends on this host. Every kernel that runs pods has it. Unlike an alias
    /// of `lo` it carries the agent's mark, also for IPv6.
    Veth,
}

impl Kind {
    /// All of them, the best first.
    pub const ALL: [Kind; 2] = [Kind::Dummy, Kind::Veth];
}

impl Display for Kind {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dummy => "dummy",
            Self::Veth => "veth",
        })
    }
}

impl Settings {
    /// Refuses addresses that no host can hold for itself, and names that the kernel does not take.
    pub(super) fn validate(&self) -> Result<(), AddressError> {
        let address = self.address;
        let what = match address {
            _ if address.is_unspecified() => "no address",
            _ if address.is_loopback() => "a loopback address, which pods cannot reach",
            _ if address.is_multicast() => "a multicast address",
            IpAddr::V4(v4) if v4.is_broadcast() => "the broadcast address",
            IpAddr::V4(v4) if v4.octets()[0] == 0 => "an address of no network",
            IpAddr::V6(v6) if v6.is_unicast_link_local() => "an address that differs from link to link",
            IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => "an IPv4 address written as IPv6",
            _ if !is_name(&self.interface) => {
                return Err(AddressError::InterfaceName(self.interface.clone()));
            }
            _ => return Ok(()),
        };
        Err(AddressError::Unusable { address, what })
    }
}

/// Whether the kernel takes this as the name of a new interface.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(plain) && !["lo", ".", ".."].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_kernel_would_not_take_are_refused() {
        for name in ["", "lo", ".", "..", "a b", "a/b", "a:b", "äh", "sixteen-letters-"] {
            assert!(!is_name(name), "{name:?}");
        }
        assert!(is_name("portico") && is_name("fifteen-letters"));
    }
}
