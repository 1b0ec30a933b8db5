//! Which addresses may be endpoints at all.
//!
//! The author of an EndpointSlice says where the gateway connects to. So the author could make the gateway
//! reach an address that is out of the author's reach. Kubernetes refuses most of these addresses in an
//! EndpointSlice too; in a directory nothing checks them. A listener of the gateway itself is recognised when
//! it is connected to: see `portico-gateway`.

use std::net::IpAddr;

use ipnet::IpNet;
use portico_api::network::Special;

/// Which addresses may be endpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndpointRules {
    /// Whether endpoints may be on this machine: true for a directory, whose author runs it.
    pub loopback: bool,
    /// The networks that endpoints are in; empty for any.
    pub networks: Box<[IpNet]>,
}

impl EndpointRules {
    /// Why `address` may not be an endpoint; `None` if it may.
    pub(crate) fn refusal(&self, address: IpAddr) -> Option<&'static str> {
        let special = match Special::of(address) {
            Some(Special::Unspecified) => Some("unspecified, which means this machine"),
            Some(Special::LinkLocal) => Some("link-local, where metadata services are, or broadcast"),
            Some(Special::Multicast) => Some("a multicast address"),
            Some(Special::Loopback) if !self.loopback => Some("loopback, which is the gateway's own"),
            Some(Special::Loopback) | None => None,
        };
        let address = address.to_canonical();
        let outside = !self.networks.is_empty() && !self.networks.iter().any(|net| net.contains(&address));
        special.or(outside.then_some("outside --endpoint-networks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(rules: &EndpointRules, address: &str) -> bool {
        rules.refusal(address.parse().unwrap()).is_none()
    }

    #[test]
    fn what_is_no_machine_or_is_this_one_is_no_endpoint() {
        let cluster = EndpointRules::default();
        let directory = EndpointRules { loopback: true, ..EndpointRules::default() };
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "::",
            "::ffff:0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "ff02::1",
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::169.254.169.254",
            "fe80::1",
        ] {
            assert!(!admits(&cluster, address) && !admits(&directory, address), "{address}");
        }
        for address in ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1"] {
            assert!(!admits(&cluster, address) && admits(&directory, address), "{address}");
        }
        for address in ["10.0.0.1", "100.64.0.1", "203.0.113.9", "2001:db8::1", "fd00::1"] {
            assert!(admits(&cluster, address) && admits(&directory, address), "{address}");
        }
    }

    #[test]
    fn networks_bound_every_endpoint_and_open_none_that_is_special() {
        let networks =
            ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "fd00::/8"].map(|net| net.parse().unwrap());
        let rules = EndpointRules { loopback: false, networks: networks.into() };
        assert!(admits(&rules, "10.1.2.3") && admits(&rules, "::ffff:10.1.2.3") && admits(&rules, "fd00::1"));
        for address in ["192.0.2.1", "2001:db8::1", "127.0.0.1", "169.254.169.254"] {
            assert!(!admits(&rules, address), "{address}");
        }
    }
}
