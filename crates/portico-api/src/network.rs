//! A network as people write one: in CIDR notation, or a single address.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{AddrParseError, IpNet};

/// A network. An address without prefix length is the network of that one address, as in KKP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network(IpNet);

impl FromStr for Network {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        text.parse().or_else(|error| text.parse::<IpAddr>().map(IpNet::from).map_err(|_| error)).map(Self)
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
}
