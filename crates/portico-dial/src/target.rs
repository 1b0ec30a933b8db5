//! `HOST:PORT`, as an operator writes it: a name or an IP address, IPv6 in brackets (RFC 3986 section 3.2.2).
//!
//! Nothing but names and addresses is accepted, because it goes into CONNECT requests and DNS questions.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

/// The longest name of DNS (RFC 1035 section 2.3.4), as text with a final dot.
const LONGEST_NAME: usize = 254;

/// The destination of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// Name or IP address. IPv6 without brackets.
    pub host: Box<str>,
    /// Port.
    pub port: u16,
}

/// Why text is no [`Target`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TargetError {
    /// There is no port.
    #[error("no port; write HOST:PORT, an IPv6 address as [ADDRESS]:PORT")]
    NoPort,
    /// The port is not a number from 1 to 65535.
    #[error("the port is no number from 1 to 65535")]
    Port,
    /// The host is neither a name nor an address.
    #[error("the host is neither a DNS name nor an IP address (IPv6 in brackets)")]
    Host,
}

impl Target {
    /// Returns the address, if the host is one.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or(TargetError::Host)?;
                host.parse::<Ipv6Addr>().map_err(|_| TargetError::Host)?;
                (host, port.strip_prefix(':').ok_or(TargetError::NoPort)?)
            }
            None => {
                let (host, port) = text.rsplit_once(':').ok_or(TargetError::NoPort)?;
                if !is_name(host) {
                    return Err(TargetError::Host);
                }
                (host, port)
            }
        };
        // The parser of numbers accepts a sign.
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(TargetError::Port);
        }
        match port.parse() {
            Ok(port @ 1..) => Ok(Self { host: host.into(), port }),
            _ => Err(TargetError::Port),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Whether it consists of labels of letters, digits, hyphens, and underscores, which hosts have too. So do
/// IPv4 addresses.
fn is_name(host: &str) -> bool {
    let labels = host.strip_suffix('.').unwrap_or(host);
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    host.len() <= LONGEST_NAME
        && labels.split('.').all(|label| (1..=63).contains(&label.len()) && label.bytes().all(letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_come_out_as_they_were_written() {
        for text in
            ["gateway.example.com:443", "gateway.:8088", "my_host:1", "192.0.2.1:65535", "[2001:db8::1]:443"]
        {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert_eq!(&*"[2001:db8::1]:443".parse::<Target>().unwrap().host, "2001:db8::1");
    }

    #[test]
    fn what_is_no_host_and_port_is_refused() {
        let long = format!("{}:1", "a.".repeat(200));
        for (text, error) in [
            ("", TargetError::NoPort),
            ("gateway", TargetError::NoPort),
            ("[::1]", TargetError::NoPort),
            ("gateway:", TargetError::Port),
            ("gateway:0", TargetError::Port),
            ("gateway:+1", TargetError::Port),
            ("gateway:65536", TargetError::Port),
            (":443", TargetError::Host),
            ("a..b:443", TargetError::Host),
            ("::1:443", TargetError::Host),
            ("[::1%eth0]:443", TargetError::Host),
            ("[gateway]:443", TargetError::Host),
            ("a b:443", TargetError::Host),
            ("a\r\nHost: b:443", TargetError::Host),
            ("user@gateway:443", TargetError::Host),
            (&long, TargetError::Host),
        ] {
            assert_eq!(text.parse::<Target>(), Err(error), "{text:?}");
        }
    }
}
