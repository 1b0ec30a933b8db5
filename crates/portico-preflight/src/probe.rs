//! The messages between checks and responders, as functions over bytes.
//!
//! A datagram is a [`Probe`]: a request, which a responder answers with a reply that is never larger. Its
//! first bytes are chosen so that VXLAN, Geneve, WireGuard and Flannel drop it: a port in use can be probed.
//!
//! Over TCP the responder speaks first, as SSH does: [`Banner`]. So nothing is ever sent to a service that is
//! not ours. The prober may then ask for a probe in the other direction, `back TRANSPORT`, and gets one line
//! of JSON.

use std::collections::BTreeSet;
use std::fmt;

use crate::transport::Transport;

/// `P` is 0x50: no VNI in VXLAN, version 1 of Geneve, no message of WireGuard, no IP version in Flannel.
pub(crate) const MAGIC: [u8; 8] = *b"PortFlt1";

/// Magic, kind, nonce, size.
pub(crate) const PROBE_LENGTH: usize = 8 + 1 + 8 + 2;

/// The longest line over TCP, with its end.
pub(crate) const LONGEST_LINE: usize = 512;

/// The most silent transports that a banner names. Those that do not fit are reported as filtered, so that a
/// doubt is never hidden.
const MOST_SILENT: usize = 16;

const GREETING: &str = "portico-preflight/1";

/// A datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) is_reply: bool,
    /// Ties a reply to its request.
    pub(crate) nonce: u64,
    /// The length of the request, as its sender made it or as the responder received it.
    pub(crate) size: u16,
}

impl Probe {
    /// Writes it, padded to `length`.
    pub(crate) fn write(self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length.max(PROBE_LENGTH));
        bytes.extend(MAGIC);
        bytes.push(if self.is_reply { 2 } else { 1 });
        bytes.extend(self.nonce.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        bytes.resize(length.max(PROBE_LENGTH), 0);
        bytes
    }

    /// Reads one. `None`: something else.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (&kind, rest) = rest.split_first()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (size, _) = rest.split_first_chunk()?;
        let is_reply = match kind {
            1 => false,
            2 => true,
            _ => return None,
        };
        Some(Self { is_reply, nonce: u64::from_be_bytes(*nonce), size: u16::from_be_bytes(*size) })
    }
}

/// The first line of a responder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Banner {
    /// Its clock, in milliseconds since 1970.
    pub unix_millis: i64,
    /// What it cannot answer on this machine: taken by another program, and no raw socket allowed.
    pub silent: BTreeSet<Transport>,
}

/// What the beginning of a connection is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line<T> {
    Complete(T),
    NeedMore,
    /// Something else.
    Other,
}

impl Banner {
    /// Reads the first line that a server sends.
    pub(crate) fn parse(bytes: &[u8]) -> Line<Self> {
        let start = &GREETING.as_bytes()[..GREETING.len().min(bytes.len())];
        if !bytes.starts_with(start) {
            return Line::Other;
        }
        match line(bytes) {
            Line::Complete(text) => Self::of_line(text).map_or(Line::Other, Line::Complete),
            Line::NeedMore => Line::NeedMore,
            Line::Other => Line::Other,
        }
    }

    fn of_line(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        if words.next()? != GREETING {
            return None;
        }
        let unix_millis = words.next()?.strip_prefix("time=")?.parse().ok()?;
        let silent = words.next()?.strip_prefix("silent=")?;
        let silent = silent.split(',').filter(|word| !word.is_empty()).map(str::parse);
        Some(Self { unix_millis, silent: silent.collect::<Result<_, _>>().ok()? })
    }
}

impl fmt::Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{GREETING} time={} silent=", self.unix_millis)?;
        for (index, transport) in self.silent.iter().take(MOST_SILENT).enumerate() {
            write!(f, "{}{transport}", if index == 0 { "" } else { "," })?;
        }
        f.write_str("\n")
    }
}

/// Reads the request of a prober: `back TRANSPORT`.
pub(crate) fn parse_back(bytes: &[u8]) -> Line<Transport> {
    match line(bytes) {
        Line::Complete(text) => {
            let transport = text.strip_prefix("back ").and_then(|word| word.parse().ok());
            transport.map_or(Line::Other, Line::Complete)
        }
        Line::NeedMore => Line::NeedMore,
        Line::Other => Line::Other,
    }
}

/// Returns the first line, without its end.
pub(crate) fn line(bytes: &[u8]) -> Line<&str> {
    match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => std::str::from_utf8(&bytes[..end]).map_or(Line::Other, Line::Complete),
        None if bytes.len() >= LONGEST_LINE => Line::Other,
        None => Line::NeedMore,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_comes_out_as_it_went_in_whatever_its_padding() {
        for (is_reply, length) in [(false, 0), (true, PROBE_LENGTH), (false, 1472)] {
            let probe = Probe { is_reply, nonce: 0x0102_0304_0506_0708, size: 1472 };
            let bytes = probe.write(length);
            assert_eq!(bytes.len(), length.max(PROBE_LENGTH));
            assert_eq!(Probe::parse(&bytes), Some(probe));
        }
    }

    #[test]
    fn what_is_cut_off_or_of_another_program_is_no_probe() {
        let bytes = Probe { is_reply: false, nonce: 1, size: 2 }.write(0);
        for length in 0..bytes.len() {
            assert_eq!(Probe::parse(&bytes[..length]), None, "{length}");
        }
        let mut other = bytes.clone();
        other[8] = 3;
        assert_eq!(Probe::parse(&other), None);
    }

    #[test]
    fn tunnels_of_container_networks_drop_a_probe() {
        assert_eq!(MAGIC[0] & 0x08, 0, "VXLAN: a packet without the I flag is ignored (RFC 7348)");
        assert_ne!(MAGIC[0] >> 6, 0, "Geneve: an unknown version is dropped (RFC 8926)");
        assert!(MAGIC[0] > 4, "WireGuard: four types of message");
        assert!(![4, 6].contains(&(MAGIC[0] >> 4)), "Flannel's UDP backend: no version of IP");
    }

    #[test]
    fn a_banner_is_read_when_it_is_complete_and_nothing_else_is_taken_for_one() {
        let silent = BTreeSet::from([Transport::Udp(8472), Transport::IpInIp]);
        for silent in [BTreeSet::new(), silent] {
            let banner = Banner { unix_millis: 1_700_000_000_123, silent };
            let text = banner.to_string();
            for length in 0..text.len() {
                assert_eq!(Banner::parse(&text.as_bytes()[..length]), Line::NeedMore, "{length}");
            }
            assert_eq!(Banner::parse(text.as_bytes()), Line::Complete(banner));
        }
        for text in
            ["SSH-2.0-OpenSSH_9.2\r\n", "portico-preflight/2 \n", "portico-preflight/1 time=x silent=\n"]
        {
            assert_eq!(Banner::parse(text.as_bytes()), Line::Other, "{text:?}");
        }
        let endless = [GREETING.as_bytes(), &[b' '; LONGEST_LINE]].concat();
        assert_eq!(Banner::parse(&endless), Line::Other);
    }

    #[test]
    fn a_banner_fits_into_a_line_however_much_is_silent() {
        let silent = (60_000..61_000).map(Transport::Udp).collect();
        let banner = Banner { unix_millis: i64::MIN, silent };
        assert!(banner.to_string().len() <= LONGEST_LINE);
    }

    #[test]
    fn a_request_for_the_way_back_names_a_transport() {
        assert_eq!(parse_back(b"back udp/8472\n"), Line::Complete(Transport::Udp(8472)));
        assert_eq!(parse_back(b"back udp/84"), Line::NeedMore);
        for text in [&b"back udp/99999\n"[..], b"GET / HTTP/1.1\r\n", b"\xff\n"] {
            assert_eq!(parse_back(text), Line::Other);
        }
    }
}
