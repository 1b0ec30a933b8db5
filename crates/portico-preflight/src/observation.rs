//! The observation of a check, as a type. The words are the same in the table, in JSON, in metrics, and
//! between prober and responder. Whether it is good or bad is decided in `verdict`.

use std::fmt;
use std::io;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::sys::IcmpError;

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum Observation {
    /// The other side answered: it accepted the connection, or returned the datagram.
    Answered {
        /// After this time.
        micros: u64,
    },
    /// Nothing listens there: a reset in answer to a SYN, or "port unreachable" or "protocol unreachable".
    Refused {
        /// The sender of the ICMP message. `None`: a TCP reset, which bears the destination's address.
        by: Option<IpAddr>,
    },
    /// Nothing came.
    TimedOut {
        /// Within this time.
        millis: u64,
    },
    /// The connection was accepted, and then reset or closed before a responder could speak.
    Reset,
    /// An ICMP message says that there is no way, or that it is forbidden.
    Unreachable {
        /// Its sender. `None`: this machine's own kernel.
        by: Option<IpAddr>,
        /// The message.
        why: Box<str>,
    },
    /// A firewall on this machine dropped the packet (EPERM).
    DeniedHere,
    /// TLS, with a certificate that leads to a trusted CA and is for this name.
    Tls(Box<TlsSession>),
    /// The certificate was issued by a CA that is not trusted: something in between opens TLS.
    Intercepted {
        /// What was presented.
        session: Box<TlsSession>,
    },
    /// The certificate leads to a trusted CA, and is not right: another name, expired, not yet valid.
    WrongCertificate {
        /// Why.
        why: Box<str>,
        /// What was presented.
        session: Box<TlsSession>,
    },
    /// The handshake failed without a certificate.
    NoTls {
        /// Why.
        why: Box<str>,
    },
    /// The corporate proxy did not connect.
    Proxy {
        /// The proxy.
        proxy: Box<str>,
        /// Why.
        why: Box<str>,
    },
    /// The name resolves.
    Resolved {
        /// To these addresses.
        addresses: Vec<IpAddr>,
    },
    /// The name does not resolve.
    NotResolved {
        /// Why.
        why: Box<str>,
    },
    /// The largest packet that arrives unfragmented.
    PathMtu {
        /// Its size with all headers.
        mtu: u16,
        /// What the interface here takes.
        interface: u16,
        /// The router that reported it. `None`: larger packets vanish without a report.
        by: Option<IpAddr>,
    },
    /// The other clock, compared with ours.
    Clock {
        /// How far it is ahead.
        ahead_millis: i64,
    },
    /// The port is free on this machine.
    Free,
    /// The port is taken on this machine.
    Taken {
        /// By this program, with its process id; or by the kernel.
        by: Box<str>,
    },
    /// It could not be tried.
    NotTried {
        /// Why.
        why: Box<str>,
    },
}

/// What a TLS server presented.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TlsSession {
    /// Subjects of the certificates, leaf first.
    pub chain: Vec<Box<str>>,
    /// The issuer of the last certificate of the chain.
    pub issuer: Box<str>,
    /// The names of the leaf.
    pub names: Vec<Box<str>>,
    /// The protocol that was agreed on by ALPN.
    pub alpn: Option<Box<str>>,
    /// The version of TLS. Empty if the handshake did not get that far.
    pub version: Box<str>,
    /// The proxy that carried the connection.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub proxy: Option<Box<str>>,
}

impl Observation {
    /// Its word in JSON and in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Answered { .. } => "answered",
            Self::Refused { .. } => "refused",
            Self::TimedOut { .. } => "timed-out",
            Self::Reset => "reset",
            Self::Unreachable { .. } => "unreachable",
            Self::DeniedHere => "denied-here",
            Self::Tls(_) => "tls",
            Self::Intercepted { .. } => "intercepted",
            Self::WrongCertificate { .. } => "wrong-certificate",
            Self::NoTls { .. } => "no-tls",
            Self::Proxy { .. } => "proxy",
            Self::Resolved { .. } => "resolved",
            Self::NotResolved { .. } => "not-resolved",
            Self::PathMtu { .. } => "path-mtu",
            Self::Clock { .. } => "clock",
            Self::Free => "free",
            Self::Taken { .. } => "taken",
            Self::NotTried { .. } => "not-tried",
        }
    }

    pub(crate) fn not_tried(why: impl fmt::Display) -> Self {
        Self::NotTried { why: why.to_string().into() }
    }

    /// The meaning of a socket's error, with the ICMP message behind it if there was one.
    pub(crate) fn of_error(error: &io::Error, icmp: Option<IcmpError>) -> Self {
        let errno = icmp.map_or_else(|| error.raw_os_error(), |icmp| Some(icmp.errno));
        let by = icmp.and_then(|icmp| icmp.from);
        match errno {
            // Protocol unreachable is ENOPROTOOPT: the host is there and does not know the protocol.
            Some(libc::ECONNREFUSED | libc::ENOPROTOOPT) => Self::Refused { by },
            Some(libc::EPERM | libc::EACCES) if by.is_none() => Self::DeniedHere,
            Some(libc::ECONNRESET | libc::EPIPE) => Self::Reset,
            _ => {
                let why = match icmp.and_then(meaning) {
                    Some(text) => text.into(),
                    None => error.to_string().into(),
                };
                Self::Unreachable { by, why }
            }
        }
    }
}

/// The meaning of an ICMP message (RFC 792, RFC 1812, RFC 4443), in the word that an operator would look for.
fn meaning(icmp: IcmpError) -> Option<&'static str> {
    const DESTINATION_UNREACHABLE: u8 = 3;
    let is_ipv6 = icmp.from?.is_ipv6();
    match (is_ipv6, icmp.kind, icmp.code) {
        (false, DESTINATION_UNREACHABLE, 0) => Some("network unreachable"),
        (false, DESTINATION_UNREACHABLE, 1) => Some("host unreachable"),
        (false, DESTINATION_UNREACHABLE, 9 | 10 | 13) => Some("administratively prohibited, by a firewall"),
        (true, 1, 0) => Some("no route"),
        (true, 1, 1) => Some("administratively prohibited, by a firewall"),
        (true, 1, 3) => Some("address unreachable"),
        (true, 1, 5 | 6) => Some("refused by a policy, of a firewall or a router"),
        _ => None,
    }
}

// === Display ===

impl fmt::Display for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered { micros } => {
                write!(f, "answered in {}.{} ms", micros / 1000, micros % 1000 / 100)
            }
            Self::Refused { by: None } => f.write_str("refused (reset)"),
            Self::Refused { by: Some(by) } => write!(f, "refused (ICMP from {by})"),
            Self::TimedOut { millis } => {
                write!(f, "timed out after {}.{} s", millis / 1000, millis % 1000 / 100)
            }
            Self::Reset => f.write_str("reset after it was accepted"),
            Self::Unreachable { by: Some(by), why } => write!(f, "unreachable: {why} (ICMP from {by})"),
            Self::Unreachable { by: None, why } => write!(f, "unreachable: {why}"),
            Self::DeniedHere => f.write_str("dropped by a firewall on this machine"),
            Self::Tls(session) => write!(f, "{session}"),
            Self::Intercepted { session } => {
                write!(f, "intercepted: certificate issued by {}", session.issuer)
            }
            Self::WrongCertificate { why, session } => {
                write!(f, "wrong certificate: {why}; issued by {}", session.issuer)
            }
            Self::NoTls { why } => write!(f, "no TLS: {why}"),
            Self::Proxy { proxy, why } => write!(f, "proxy {proxy}: {why}"),
            Self::Resolved { addresses } => {
                f.write_str("resolves to ")?;
                for (index, address) in addresses.iter().enumerate() {
                    write!(f, "{}{address}", if index == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
            Self::NotResolved { why } => write!(f, "not resolved: {why}"),
            Self::PathMtu { mtu, interface, by: Some(by) } => {
                write!(f, "path MTU {mtu} of {interface} (ICMP from {by})")
            }
            Self::PathMtu { mtu, interface, by: None } if mtu < interface => {
                write!(f, "path MTU {mtu} of {interface}, larger packets vanish")
            }
            Self::PathMtu { mtu, .. } => write!(f, "path MTU {mtu}"),
            Self::Clock { ahead_millis } => {
                let (millis, word) = (
                    ahead_millis.unsigned_abs(),
                    if *ahead_millis < 0 { "behind ours" } else { "ahead of ours" },
                );
                write!(f, "clock {}.{:03} s {word}", millis / 1000, millis % 1000)
            }
            Self::Free => f.write_str("free"),
            Self::Taken { by } => write!(f, "taken by {by}"),
            Self::NotTried { why } => write!(f, "not tried: {why}"),
        }
    }
}

impl fmt::Display for TlsSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.version)?;
        if let Some(alpn) = &self.alpn {
            write!(f, ", {alpn}")?;
        }
        write!(f, ", certificate issued by {}", self.issuer)?;
        match &self.proxy {
            Some(proxy) => write!(f, ", through {proxy}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_icmp_message_is_told_apart_from_a_reset() {
        let refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        assert_eq!(Observation::of_error(&refused, None), Observation::Refused { by: None });
        let by = Some("192.0.2.1".parse().unwrap());
        let icmp = IcmpError { from: by, errno: libc::ECONNREFUSED, kind: 3, code: 3, info: 0 };
        assert_eq!(Observation::of_error(&refused, Some(icmp)), Observation::Refused { by });
        let icmp = IcmpError { errno: libc::EHOSTUNREACH, code: 13, ..icmp };
        let seen = Observation::of_error(&io::Error::from_raw_os_error(libc::EHOSTUNREACH), Some(icmp));
        assert_eq!(
            seen.to_string(),
            "unreachable: administratively prohibited, by a firewall (ICMP from 192.0.2.1)"
        );
    }

    #[test]
    fn the_word_is_the_same_in_json() {
        for seen in [
            Observation::Answered { micros: 1 },
            Observation::TimedOut { millis: 3000 },
            Observation::Tls(Box::default()),
            Observation::WrongCertificate { why: "x".into(), session: Box::default() },
            Observation::Free,
        ] {
            let json = serde_json::to_value(&seen).unwrap();
            assert_eq!(json["kind"], seen.kind());
            assert_eq!(serde_json::from_value::<Observation>(json).unwrap(), seen);
        }
    }
}
