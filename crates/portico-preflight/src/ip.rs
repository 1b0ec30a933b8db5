//! Headers of IP and UDP, as far as raw sockets need them: pure functions over bytes.

use std::net::{IpAddr, Ipv4Addr};

use socket2::SockFilter;

use crate::probe::MAGIC;

/// The number of IP-in-IP (RFC 2003).
pub(crate) const IP_IN_IP: u8 = 4;

/// The protocol of an inner packet: for experiments (RFC 3692), so that nothing takes it up.
const EXPERIMENT: u8 = 253;

/// Without options.
pub(crate) const IPV4_HEADER: usize = 20;
pub(crate) const IPV6_HEADER: usize = 40;
pub(crate) const UDP_HEADER: usize = 8;

/// Inner packets go no further than one hop.
const INNER_TTL: u8 = 1;

/// The headers before a probe, as a raw socket delivers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Headers {
    /// IPv4, then UDP.
    IpAndUdp,
    /// UDP: raw sockets of IPv6 deliver no header of their own.
    Udp,
    /// IPv4, then the inner IPv4 header.
    IpAndInner,
}

/// A program of the kernel's packet filter that lets only probes through. Without it a raw socket would copy
/// all traffic of a container network to us.
pub(crate) fn filter(headers: Headers) -> [SockFilter; 7] {
    let (after, is_indirect) = match headers {
        Headers::IpAndUdp => (UDP_HEADER, true),
        Headers::Udp => (UDP_HEADER, false),
        Headers::IpAndInner => (IPV4_HEADER, true),
    };
    let code = |parts: u32| parts as u16;
    let load = libc::BPF_LD | libc::BPF_W | if is_indirect { libc::BPF_IND } else { libc::BPF_ABS };
    let word = |at: usize| SockFilter::new(code(load), 0, 0, (after + at) as u32);
    let magic = |at: usize, otherwise: u8| {
        let bytes = [MAGIC[at], MAGIC[at + 1], MAGIC[at + 2], MAGIC[at + 3]];
        let jump = code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
        SockFilter::new(jump, 0, otherwise, u32::from_be_bytes(bytes))
    };
    let end = |length: u32| SockFilter::new(code(libc::BPF_RET | libc::BPF_K), 0, 0, length);
    // X: the length of the IPv4 header.
    let header = SockFilter::new(code(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH), 0, 0, 0);
    // Both jumps lead to the last instruction.
    [header, word(0), magic(0, 3), word(4), magic(4, 1), end(u32::MAX), end(0)]
}

/// Returns the payload of an IPv4 packet.
pub(crate) fn payload(packet: &[u8]) -> Option<&[u8]> {
    let first = *packet.first()?;
    let length = usize::from(first & 0xf) * 4;
    (first >> 4 == 4 && length >= IPV4_HEADER).then(|| packet.get(length..))?
}

/// Returns the payload of an inner packet that we made.
pub(crate) fn payload_of_inner(packet: &[u8]) -> Option<&[u8]> {
    (*packet.get(9)? == EXPERIMENT).then(|| payload(packet))?
}

/// Makes an inner packet.
pub(crate) fn inner(from: Ipv4Addr, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(IPV4_HEADER + payload.len()).unwrap_or(u16::MAX).to_be_bytes();
    let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0x40, 0, INNER_TTL, EXPERIMENT, 0, 0];
    packet.extend(from.octets());
    packet.extend(to.octets());
    let sum = checksum(&[&packet]).to_be_bytes();
    packet[10..12].copy_from_slice(&sum);
    packet.extend_from_slice(payload);
    packet
}

/// A UDP datagram: ports and payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Udp<'a> {
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) payload: &'a [u8],
}

impl<'a> Udp<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, payload) = bytes.split_at_checked(UDP_HEADER)?;
        let at = |start: usize| u16::from_be_bytes([header[start], header[start + 1]]);
        Some(Self { from: at(0), to: at(2), payload })
    }

    /// Writes it with the checksum for these addresses (RFC 768, RFC 8200 section 8.1).
    pub(crate) fn write(self, source: IpAddr, destination: IpAddr) -> Vec<u8> {
        let length = u16::try_from(UDP_HEADER + self.payload.len()).unwrap_or(u16::MAX);
        let mut bytes = Vec::with_capacity(UDP_HEADER + self.payload.len());
        bytes.extend(self.from.to_be_bytes());
        bytes.extend(self.to.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend_from_slice(self.payload);
        let (source, destination) = (octets(source), octets(destination));
        let pseudo = [0, 17, length.to_be_bytes()[0], length.to_be_bytes()[1]];
        // 0 would mean that there is none.
        let sum = match checksum(&[&source, &destination, &pseudo, &bytes]) {
            0 => 0xffff,
            sum => sum,
        };
        bytes[6..8].copy_from_slice(&sum.to_be_bytes());
        bytes
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The Internet checksum (RFC 1071) over parts, of which all but the last have an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
    let mut sum: u32 = parts.iter().flat_map(|part| part.chunks(2)).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_packet_has_a_header_that_adds_up_and_its_payload() {
        let (from, to) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
        let packet = inner(from, to, b"payload");
        assert_eq!(checksum(&[&packet[..IPV4_HEADER]]), 0);
        assert_eq!(payload_of_inner(&packet), Some(&b"payload"[..]));
        for length in 0..IPV4_HEADER {
            assert_eq!(payload_of_inner(&packet[..length]), None, "{length}");
        }
    }

    #[test]
    fn headers_with_options_are_skipped_and_short_ones_refused() {
        let mut packet = vec![0x46; 1];
        packet.resize(24, 0);
        packet.extend(b"x");
        assert_eq!(payload(&packet), Some(&b"x"[..]));
        for first in [0x44, 0x65, 0x4f] {
            packet[0] = first;
            assert_eq!(payload(&packet), None, "{first:#x}");
        }
    }

    #[test]
    fn a_datagram_carries_the_checksum_that_other_stacks_compute() {
        let datagram = Udp { from: 8472, to: 40_000, payload: b"odd" };
        let (source, destination) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
        let bytes = datagram.write(source, destination);
        let pseudo = [0, 17, 0, 11];
        assert_eq!(checksum(&[&octets(source), &octets(destination), &pseudo, &bytes]), 0);
        assert_eq!(Udp::parse(&bytes), Some(datagram));
        assert_eq!(Udp::parse(&bytes[..7]), None);
    }
}
