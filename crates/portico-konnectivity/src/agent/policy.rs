//! Which destinations an agent dials.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;

use ipnet::IpNet;
use thiserror::Error;

/// A network, and ports of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    network: IpNet,
    ports: RangeInclusive<u16>,
}

/// Why a text is no [`Destination`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DestinationError {
    /// It does not begin with a network or an address.
    #[error("no network; write 10.0.0.0/8, 10.0.0.0/8:10250, 10.0.0.0/8:9000-9999 or [fd00::/8]:443")]
    Network,
    /// What follows the network are no ports.
    #[error("no port or range of ports behind the network; write :10250 or :9000-9999")]
    Ports,
}

/// All that may be dialled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy(Box<[Destination]>);

impl Policy {
    /// Allows these destinations; without any, every destination.
    #[must_use]
    pub fn new(allowed: impl IntoIterator<Item = Destination>) -> Self {
        Self(allowed.into_iter().collect())
    }

    /// Whether the address may be dialled.
    #[must_use]
    pub fn allows(&self, address: SocketAddr) -> bool {
        // An IPv4 address in IPv6 clothes is the same host.
        let host = address.ip().to_canonical();
        let contains = |one: &Destination| one.network.contains(&host) && one.ports.contains(&address.port());
        self.0.is_empty() || self.0.iter().any(contains)
    }
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let (network, ports) = match text.strip_prefix('[') {
            Some(rest) => rest.split_once(']').ok_or(DestinationError::Network)?,
            // An IPv6 address with ports needs brackets: a colon may be part of the address.
            None if text.matches(':').count() > 1 => (text, ""),
            None => text.find(':').map_or((text, ""), |colon| text.split_at(colon)),
        };
        let ports = match ports.strip_prefix(':') {
            None if ports.is_empty() => 0..=u16::MAX,
            None => return Err(DestinationError::Ports),
            Some(ports) => range(ports).ok_or(DestinationError::Ports)?,
        };
        let address = || network.parse::<IpAddr>().map(IpNet::from);
        let network = network.parse().or_else(|_| address()).map_err(|_| DestinationError::Network)?;
        Ok(Self { network, ports })
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().ok()?..=last.parse().ok()?;
    (!range.is_empty() && *range.start() > 0).then_some(range)
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { network, ports } = self;
        if *ports == (0..=u16::MAX) {
            return network.fmt(f);
        }
        if network.addr().is_ipv6() {
            write!(f, "[{network}]:")?
        } else {
            write!(f, "{network}:")?
        }
        if ports.start() == ports.end() {
            ports.start().fmt(f)
        } else {
            write!(f, "{}-{}", ports.start(), ports.end())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(texts: &[&str]) -> Policy {
        Policy::new(texts.iter().map(|text| text.parse().unwrap()))
    }

    #[test]
    fn without_a_list_everything_is_allowed_and_with_one_nothing_else() {
        assert!(Policy::default().allows("192.0.2.1:22".parse().unwrap()));
        let policy = policy(&["10.0.0.0/8:10250", "fd00::/8", "[2001:db8::/32]:443", "192.0.2.7:8000-8999"]);
        for (address, allowed) in [
            ("10.1.2.3:10250", true),
            ("10.1.2.3:10251", false),
            ("11.0.0.1:10250", false),
            ("[fd00::1]:22", true),
            ("[2001:db8::1]:443", true),
            ("[2001:db8::1]:80", false),
            ("192.0.2.7:8000", true),
            ("192.0.2.7:8999", true),
            ("192.0.2.7:9000", false),
            ("192.0.2.8:8000", false),
            ("[::ffff:10.1.2.3]:10250", true),
            ("[::ffff:11.1.2.3]:10250", false),
        ] {
            assert_eq!(policy.allows(address.parse().unwrap()), allowed, "{address}");
        }
    }

    #[test]
    fn a_destination_is_a_network_with_ports_or_without() {
        for text in ["10.0.0.0/8", "10.0.0.0/8:10250", "fd00::/8", "[fd00::/8]:443", "0.0.0.0/0:1-1024"] {
            assert_eq!(text.parse::<Destination>().unwrap().to_string(), text);
        }
        assert_eq!("10.0.0.1".parse::<Destination>().unwrap().to_string(), "10.0.0.1/32");
        for (text, error) in [
            ("", DestinationError::Network),
            ("example.com", DestinationError::Network),
            ("10.0.0.0/33", DestinationError::Network),
            ("[fd00::/8", DestinationError::Network),
            ("10.0.0.0/8:", DestinationError::Ports),
            ("10.0.0.0/8:0", DestinationError::Ports),
            ("10.0.0.0/8:9-1", DestinationError::Ports),
            ("10.0.0.0/8:70000", DestinationError::Ports),
            ("[fd00::/8]443", DestinationError::Ports),
        ] {
            assert_eq!(text.parse::<Destination>(), Err(error), "{text:?}");
        }
    }
}
