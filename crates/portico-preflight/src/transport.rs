//! The transport that a packet is addressed to: a TCP port, a UDP port, or IP protocol 4.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// The part of a flow below its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// A TCP port.
    Tcp(u16),
    /// A UDP port.
    Udp(u16),
    /// IP-in-IP, which has no ports (RFC 2003).
    IpInIp,
}

/// The text names no transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no transport; write tcp/PORT, udp/PORT or ip/4")]
pub struct TransportError;

impl Transport {
    /// The port, if it has one.
    #[must_use]
    pub fn port(self) -> Option<u16> {
        match self {
            Self::Tcp(port) | Self::Udp(port) => Some(port),
            Self::IpInIp => None,
        }
    }

    /// Whether it can lead to this address: container networks carry IP-in-IP over IPv4 only.
    #[must_use]
    pub fn leads_to(self, address: IpAddr) -> bool {
        self != Self::IpInIp || address.is_ipv4()
    }
}

// === Display, FromStr ===

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(port) => write!(f, "tcp/{port}"),
            Self::Udp(port) => write!(f, "udp/{port}"),
            Self::IpInIp => f.write_str("ip/4"),
        }
    }
}

impl FromStr for Transport {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let (protocol, number) = text.split_once('/').ok_or(TransportError)?;
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        let number: u16 = number.parse().ok().filter(|_| is_number).ok_or(TransportError)?;
        match (protocol, number) {
            ("ip", 4) => Ok(Self::IpInIp),
            ("tcp", 1..) => Ok(Self::Tcp(number)),
            ("udp", 1..) => Ok(Self::Udp(number)),
            _ => Err(TransportError),
        }
    }
}

impl Serialize for Transport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_comes_out_as_it_was_written() {
        for text in ["tcp/10250", "udp/8472", "ip/4"] {
            assert_eq!(text.parse::<Transport>().unwrap().to_string(), text);
        }
        for text in ["", "tcp", "tcp/", "tcp/0", "tcp/+1", "tcp/65536", "ip/6", "sctp/1", "TCP/1", "tcp/1/2"]
        {
            assert_eq!(text.parse::<Transport>(), Err(TransportError), "{text:?}");
        }
    }
}
