//! Where a control plane runs that no pod of the seed serves: addresses on a Cluster.

use std::net::{IpAddr, SocketAddr};

use thiserror::Error;

use crate::network::Special;

/// Most addresses of one Service. A control plane has three, or five.
const MAX: usize = 16;

/// Why a list of endpoints cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadEndpoints {
    /// An item is no address with a port.
    #[error("{0:?} is no IP:PORT, such as 192.0.2.7:6443 or [2001:db8::7]:6443")]
    NoAddress(Box<str>),
    /// Kubernetes refuses such an endpoint, or it would lead into whatever proxy reads it.
    #[error("{address} cannot be an endpoint: {why}")]
    Unusable {
        /// The address.
        address: IpAddr,
        /// What it is.
        why: &'static str,
    },
    /// There are more than anybody needs.
    #[error("there are {0} addresses; at most {MAX} can be used")]
    TooMany(usize),
}

/// Reads the value of [`crate::annotations::ENDPOINTS`]: at least one address, sorted, each once.
pub fn parse(value: &str) -> Result<Vec<SocketAddr>, BadEndpoints> {
    let mut addresses = Vec::new();
    for item in value.split(',').map(str::trim) {
        let address: SocketAddr = item.parse().map_err(|_| BadEndpoints::NoAddress(item.into()))?;
        if address.port() == 0 {
            return Err(BadEndpoints::NoAddress(item.into()));
        }
        if let Some(why) = unusable(address.ip()) {
            return Err(BadEndpoints::Unusable { address: address.ip(), why });
        }
        addresses.push(address);
    }
    addresses.sort_unstable();
    addresses.dedup();
    if addresses.len() > MAX { Err(BadEndpoints::TooMany(addresses.len())) } else { Ok(addresses) }
}

/// Why Kubernetes refuses `address` as an endpoint.
fn unusable(address: IpAddr) -> Option<&'static str> {
    let mapped = matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    match Special::of(address) {
        Some(Special::Unspecified) => Some("it stands for any address"),
        Some(Special::Loopback) => Some("it is a loopback address"),
        Some(Special::Multicast) => Some("it is a multicast address"),
        Some(Special::LinkLocal) => Some("it is a link-local, broadcast or mapped address"),
        None => mapped.then_some("it is a link-local, broadcast or mapped address"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_sorted_and_names_each_address_once() {
        let parsed = parse("192.0.2.8:6443, 192.0.2.7:6443,192.0.2.8:6443,[2001:db8::7]:443").unwrap();
        let text: Vec<String> = parsed.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["192.0.2.7:6443", "192.0.2.8:6443", "[2001:db8::7]:443"]);
    }

    #[test]
    fn what_kubernetes_would_refuse_is_refused_with_the_reason() {
        for (value, expected) in [
            ("", "\"\" is no IP:PORT"),
            ("192.0.2.7", "is no IP:PORT"),
            ("api.example.com:6443", "is no IP:PORT"),
            ("192.0.2.7:0", "is no IP:PORT"),
            ("192.0.2.7:6443,", "\"\" is no IP:PORT"),
            ("127.0.0.1:6443", "loopback"),
            ("0.0.0.0:6443", "any address"),
            ("169.254.169.254:80", "link-local"),
            ("[::ffff:192.0.2.7]:6443", "mapped"),
            ("[ff02::1]:6443", "multicast"),
        ] {
            let error = parse(value).unwrap_err().to_string();
            assert!(error.contains(expected), "{value}: {error}");
        }
        let many: Vec<String> = (1..=17).map(|n| format!("192.0.2.{n}:6443")).collect();
        assert_eq!(parse(&many.join(",")), Err(BadEndpoints::TooMany(17)));
    }
}
