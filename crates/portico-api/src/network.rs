//! A network as people write one: in CIDR notation, or a single address. And what is special about addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{AddrParseError, IpNet, Ipv4Net};

/// The prefix by which translators reach IPv4 from IPv6 (RFC 6052): the last 32 bits are the IPv4 address.
const NAT64: [u16; 6] = [0x64, 0xff9b, 0, 0, 0, 0];

/// A network. An address without prefix length is the network of that one address, as in KKP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network(IpNet);

impl FromStr for Network {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        let network: Result<IpNet, _> = text.parse();
        network.or_else(|error| text.parse::<IpAddr>().map(IpNet::from).map_err(|_| error)).map(Self::from)
    }
}

impl From<IpNet> for Network {
    /// IPv4 mapped into IPv6 becomes IPv4, as the addresses that networks are compared with.
    fn from(network: IpNet) -> Self {
        let mapped = match network {
            IpNet::V4(_) => None,
            IpNet::V6(v6) => v6.addr().to_ipv4_mapped().zip(v6.prefix_len().checked_sub(96)),
        };
        let plain = mapped.and_then(|(address, prefix)| Ipv4Net::new(address, prefix).ok());
        Self(plain.map_or(network, IpNet::from))
    }
}

impl From<Network> for IpNet {
    fn from(network: Network) -> Self {
        network.0
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An address that is no machine's own, or means another machine to each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Any address, or the machine itself: all of 0.0.0.0/8.
    Unspecified,
    /// The machine itself.
    Loopback,
    /// A machine on the same link, or all of them: broadcast.
    LinkLocal,
    /// A group.
    Multicast,
}

impl Special {
    /// The special meaning of `address`, or of the IPv4 address that it stands for. `None` if there is none.
    /// Kubernetes refuses all of these as endpoints.
    pub fn of(address: IpAddr) -> Option<Self> {
        let address = leads_to(address);
        let this_network = matches!(address, IpAddr::V4(v4) if v4.octets()[0] == 0);
        let link_local = match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        if address.is_unspecified() || this_network {
            Some(Self::Unspecified)
        } else if address.is_loopback() {
            Some(Self::Loopback)
        } else if link_local {
            Some(Self::LinkLocal)
        } else {
            address.is_multicast().then_some(Self::Multicast)
        }
    }
}

/// Where a connection to `address` goes: the kernel takes IPv4 mapped into IPv6 for IPv4, a translator what
/// has its prefix.
fn leads_to(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) if v6.segments()[..6] == NAT64 => {
            let [.., a, b, c, d] = v6.octets();
            IpAddr::from([a, b, c, d])
        }
        plain => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_network_of_one() {
        for (text, network) in [
            ("198.51.100.7", "198.51.100.7/32"),
            ("2001:db8::7", "2001:db8::7/128"),
            ("198.51.100.0/24", "198.51.100.0/24"),
        ] {
            assert_eq!(IpNet::from(text.parse::<Network>().unwrap()), network.parse().unwrap(), "{text}");
        }
        for text in ["", "here", "198.51.100", "198.51.100.7/", "198.51.100.7/33"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_network_of_mapped_addresses_is_one_of_ipv4() {
        for (text, network) in [
            ("::ffff:198.51.100.0/120", "198.51.100.0/24"),
            ("::ffff:198.51.100.7", "198.51.100.7/32"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::/0", "::/0"),
            ("::ffff:0:0/95", "::ffff:0:0/95"),
            ("64:ff9b::/96", "64:ff9b::/96"),
        ] {
            assert_eq!(IpNet::from(text.parse::<Network>().unwrap()), network.parse().unwrap(), "{text}");
        }
    }

    #[test]
    fn what_is_special_about_ipv4_is_so_in_the_clothes_of_ipv6() {
        for (v4, special) in [
            ("0.0.0.0", Some(Special::Unspecified)),
            ("0.1.2.3", Some(Special::Unspecified)),
            ("127.8.8.8", Some(Special::Loopback)),
            ("169.254.169.254", Some(Special::LinkLocal)),
            ("255.255.255.255", Some(Special::LinkLocal)),
            ("224.0.0.1", Some(Special::Multicast)),
            ("10.0.0.1", None),
        ] {
            for address in [v4.to_owned(), format!("::ffff:{v4}"), format!("64:ff9b::{v4}")] {
                assert_eq!(Special::of(address.parse().unwrap()), special, "{address}");
            }
        }
        for (v6, special) in [
            ("::", Some(Special::Unspecified)),
            ("::1", Some(Special::Loopback)),
            ("fe80::1", Some(Special::LinkLocal)),
            ("ff02::1", Some(Special::Multicast)),
            ("2001:db8::1", None),
            ("64:ff9b:1::7f00:1", None),
        ] {
            assert_eq!(Special::of(v6.parse().unwrap()), special, "{v6}");
        }
    }
}
