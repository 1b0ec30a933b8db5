//! The PROXY protocol, versions 1 and 2: the client's address, carried over hops that would hide it.
//!
//! For the gateway's listeners (read, from trusted addresses only) and its upstream side (written on
//! request). Follows HAProxy's `proxy-protocol.txt`. A header that does not name a client of TCP over IP is
//! [`Header::Local`], such as that of a load balancer's health check. The connection then speaks for its own
//! peer, as the text demands.
//!
//! A header that is not exactly right is malformed. The sender is a machine we trust, and a guess here would
//! be a guess about which client may pass an allow list.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use crate::reader::Reader;
use crate::{Malformed, Parse};

/// Most bytes of a version 1 header, with its CRLF: two IPv6 addresses and two ports in text.
pub const MAX_V1: usize = 107;

/// Most bytes of a version 2 header that are read. The text lets senders go up to 64 KiB but asks them to
/// stay within one segment (536 bytes). 4 KiB admits the client certificates some put into TLVs.
pub const MAX_V2: usize = 4096;

const SIGNATURE_V1: &[u8; 6] = b"PROXY ";
const SIGNATURE_V2: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, family and transport, length.
const FIXED_V2: usize = 16;

const VERSION_2: u8 = 0x20;
const COMMAND_LOCAL: u8 = 0;
const COMMAND_PROXY: u8 = 1;
const FAMILY_UNSPEC: u8 = 0x00;
const FAMILY_TCP4: u8 = 0x11;
const FAMILY_TCP6: u8 = 0x21;
const FAMILY_UNIX_STREAM: u8 = 0x31;

const TLV_ALPN: u8 = 0x01;
const TLV_AUTHORITY: u8 = 0x02;
const TLV_CRC32C: u8 = 0x03;
const TLV_UNIQUE_ID: u8 = 0x05;
/// The longest unique id the text allows.
const MAX_UNIQUE_ID: usize = 128;
/// A name or protocol longer than this is none.
const MAX_TEXT: usize = 255;

/// What a PROXY header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header<'a> {
    /// The connection speaks for its own peer: a health check, or a client that has no IP address.
    Local {
        /// Bytes of the header.
        len: usize,
    },
    /// The connection is passed on for a client.
    Proxied {
        /// The client. IPv4 addresses in IPv6 clothes come out as IPv4, so that allow lists see one form.
        source: SocketAddr,
        /// The address the client connected to, in the same form.
        destination: SocketAddr,
        /// What else a version 2 header says.
        tlvs: Tlvs<'a>,
        /// Bytes of the header.
        len: usize,
    },
}

impl Header<'_> {
    /// Bytes of the header, of either kind; what follows is the client's.
    pub fn consumed(&self) -> usize {
        match *self {
            Self::Local { len } | Self::Proxied { len, .. } => len,
        }
    }
}

/// The additional fields of a version 2 header that the gateway reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tlvs<'a> {
    /// The name the client asked for (`PP2_TYPE_AUTHORITY`): SNI or the host of a CONNECT target.
    pub authority: Option<&'a str>,
    /// The connection's name in everybody's logs (`PP2_TYPE_UNIQUE_ID`), up to 128 bytes.
    pub unique_id: Option<&'a [u8]>,
    /// The application protocol in use (`PP2_TYPE_ALPN`).
    pub alpn: Option<&'a [u8]>,
}

/// The answer of [`sniff`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// A PROXY header begins here: [`parse`] has the word.
    Header,
    /// Something else begins here.
    Other,
    /// Too few bytes to tell: at most twelve are needed.
    NeedMore,
}

/// Do these first bytes begin a PROXY header? For listeners on which the header is optional.
pub fn sniff(bytes: &[u8]) -> Sniff {
    if bytes.starts_with(SIGNATURE_V1) || bytes.starts_with(SIGNATURE_V2) {
        Sniff::Header
    } else if SIGNATURE_V1.starts_with(bytes) || SIGNATURE_V2.starts_with(bytes) {
        Sniff::NeedMore
    } else {
        Sniff::Other
    }
}

/// Reads the PROXY header at the start of `bytes`, which are all bytes received so far.
pub fn parse(bytes: &[u8]) -> Parse<Header<'_>> {
    let answer = match sniff(bytes) {
        Sniff::NeedMore => Ok(None),
        Sniff::Other => Err(Malformed::because("the connection does not begin with a PROXY header")),
        Sniff::Header if bytes.starts_with(SIGNATURE_V1) => parse_v1(bytes),
        Sniff::Header => parse_v2(bytes),
    };
    match answer {
        Ok(Some(header)) => Parse::Complete(header),
        Ok(None) => Parse::NeedMore,
        Err(malformed) => Parse::Malformed(malformed),
    }
}

/// Version 1: one line of text.
fn parse_v1(bytes: &[u8]) -> Result<Option<Header<'_>>, Malformed> {
    let within_cap = &bytes[..bytes.len().min(MAX_V1)];
    let Some(line_end) = within_cap.iter().position(|byte| matches!(byte, b'\r' | b'\n')) else {
        return match bytes.len() < MAX_V1 {
            true => Ok(None),
            false => Err(Malformed::because("the PROXY line is longer than 107 bytes")),
        };
    };
    match within_cap[line_end..] {
        [b'\r', b'\n', ..] => {}
        [b'\r'] if bytes.len() < MAX_V1 => return Ok(None),
        _ => return Err(Malformed::because("the PROXY line does not end in CRLF")),
    }
    let len = line_end + 2;
    let line = std::str::from_utf8(&within_cap[SIGNATURE_V1.len()..line_end])
        .map_err(|_| Malformed::because("the PROXY line is not text"))?;
    let mut words = line.split(' ');
    let header = match words.next() {
        // What follows UNKNOWN is to be ignored.
        Some("UNKNOWN") => Header::Local { len },
        Some("TCP4") => read_v1_addresses::<Ipv4Addr>(words, len)?,
        Some("TCP6") => read_v1_addresses::<Ipv6Addr>(words, len)?,
        _ => return Err(Malformed::because("the PROXY line has an unknown protocol")),
    };
    Ok(Some(header))
}

fn read_v1_addresses<'a, Ip: FromStr + Into<IpAddr>>(
    mut words: std::str::Split<'_, char>,
    len: usize,
) -> Result<Header<'a>, Malformed> {
    const WRONG: Malformed = Malformed::because("the PROXY line has a wrong address or port");
    let mut ip = || words.next()?.parse::<Ip>().ok().map(Into::into);
    let (source, destination) = (ip().ok_or(WRONG)?, ip().ok_or(WRONG)?);
    let mut port = || words.next().and_then(read_v1_port).ok_or(WRONG);
    let (source_port, destination_port) = (port()?, port()?);
    if words.next().is_some() {
        return Err(Malformed::because("the PROXY line has words after the ports"));
    }
    Ok(Header::Proxied {
        source: canonical(source, source_port),
        destination: canonical(destination, destination_port),
        tlvs: Tlvs::default(),
        len,
    })
}

/// A port in decimal digits, without sign or leading zeros.
fn read_v1_port(word: &str) -> Option<u16> {
    let plain = word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    if plain { word.parse().ok() } else { None }
}

/// Version 2: a fixed part, addresses by family, then TLVs.
fn parse_v2(bytes: &[u8]) -> Result<Option<Header<'_>>, Malformed> {
    let mut reader = Reader::new(&bytes[SIGNATURE_V2.len()..]);
    let Some(version_and_command) = reader.u8() else { return Ok(None) };
    let command = version_and_command & 0x0f;
    if version_and_command & 0xf0 != VERSION_2 || !matches!(command, COMMAND_LOCAL | COMMAND_PROXY) {
        return Err(Malformed::because("the PROXY header has an unknown version or command"));
    }
    let Some(family) = reader.u8() else { return Ok(None) };
    let known = matches!(family, FAMILY_UNSPEC | FAMILY_TCP4 | FAMILY_TCP6 | FAMILY_UNIX_STREAM);
    if command == COMMAND_PROXY && !known {
        return Err(Malformed::because("the PROXY header is for something else than a stream"));
    }
    let Some(payload_len) = reader.u16() else { return Ok(None) };
    let len = FIXED_V2 + usize::from(payload_len);
    if len > MAX_V2 {
        return Err(Malformed::because("the PROXY header is longer than 4 KiB"));
    }
    let Some(whole) = bytes.get(..len) else { return Ok(None) };
    if command == COMMAND_LOCAL {
        return Ok(Some(Header::Local { len }));
    }
    read_v2(whole, family).map(Some)
}

/// Reads a whole version 2 header with command PROXY: nothing here can need more.
fn read_v2(whole: &[u8], family: u8) -> Result<Header<'_>, Malformed> {
    const SHORT: Malformed = Malformed::because("the PROXY header is too short for its addresses");
    let len = whole.len();
    let mut reader = Reader::new(&whole[FIXED_V2..]);
    let (source, destination): (IpAddr, IpAddr) = match family {
        FAMILY_TCP4 => (reader.array::<4>().ok_or(SHORT)?.into(), reader.array::<4>().ok_or(SHORT)?.into()),
        FAMILY_TCP6 => (reader.array::<16>().ok_or(SHORT)?.into(), reader.array::<16>().ok_or(SHORT)?.into()),
        _ => return Ok(Header::Local { len }),
    };
    let (source_port, destination_port) = (reader.u16().ok_or(SHORT)?, reader.u16().ok_or(SHORT)?);
    Ok(Header::Proxied {
        source: canonical(source, source_port),
        destination: canonical(destination, destination_port),
        tlvs: read_tlvs(whole, reader)?,
        len,
    })
}

/// Reads the TLVs, for which `reader` holds the rest of `whole`. If a type occurs twice, the first TLV
/// counts.
fn read_tlvs<'a>(whole: &[u8], mut reader: Reader<'a>) -> Result<Tlvs<'a>, Malformed> {
    const SHORT: Malformed = Malformed::because("a TLV points past the end of the PROXY header");
    let mut tlvs = Tlvs::default();
    while !reader.is_empty() {
        let kind = reader.u8().ok_or(SHORT)?;
        let value = reader.vec16().ok_or(SHORT)?;
        match kind {
            TLV_ALPN => tlvs.alpn = tlvs.alpn.or(Some(value)),
            TLV_AUTHORITY => {
                let authority = std::str::from_utf8(value)
                    .map_err(|_| Malformed::because("the authority in the PROXY header is not text"))?;
                tlvs.authority = tlvs.authority.or(Some(authority));
            }
            TLV_UNIQUE_ID if value.len() > MAX_UNIQUE_ID => {
                return Err(Malformed::because("the unique id in the PROXY header is longer than 128 bytes"));
            }
            TLV_UNIQUE_ID => tlvs.unique_id = tlvs.unique_id.or(Some(value)),
            TLV_CRC32C => check_crc32c(whole, whole.len() - reader.rest().len(), value)?,
            _ => {}
        }
    }
    Ok(tlvs)
}

/// Checks the checksum TLV that ends at `end`: it covers the header with its own four bytes taken as zero.
fn check_crc32c(whole: &[u8], end: usize, value: &[u8]) -> Result<(), Malformed> {
    const WRONG: Malformed = Malformed::because("the checksum of the PROXY header is wrong");
    let stated = <[u8; 4]>::try_from(value).map_err(|_| WRONG)?;
    let (before, after) = (&whole[..end - stated.len()], &whole[end..]);
    let covered = before.iter().chain(&[0; 4]).chain(after);
    if crc32c(covered) == u32::from_be_bytes(stated) { Ok(()) } else { Err(WRONG) }
}

/// CRC-32C (RFC 9260, appendix A), bit by bit: a table would earn nothing on one small header per connection.
fn crc32c<'a>(bytes: impl Iterator<Item = &'a u8>) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    !bytes.fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (REVERSED_POLYNOMIAL & (crc & 1).wrapping_neg())
        })
    })
}

/// One form for every address: IPv4-mapped IPv6 is IPv4.
fn canonical(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip.to_canonical(), port)
}

/// Writes a version 2 header for a TCP connection from `source` to `destination`.
///
/// The header has one family for both addresses: if they differ, IPv4 is written as IPv4-mapped IPv6. A TLV
/// that is longer than allowed is left out, so the header never exceeds 699 bytes. Allowed are 255 bytes for
/// the authority and the protocol, and 128 for the unique id.
pub fn encode_v2(source: SocketAddr, destination: SocketAddr, tlvs: Tlvs<'_>) -> Vec<u8> {
    let (source_ip, destination_ip) = (source.ip().to_canonical(), destination.ip().to_canonical());
    let mut header = Vec::with_capacity(128);
    header.extend_from_slice(SIGNATURE_V2);
    header.push(VERSION_2 | COMMAND_PROXY);
    if let (IpAddr::V4(source), IpAddr::V4(destination)) = (source_ip, destination_ip) {
        header.extend_from_slice(&[FAMILY_TCP4, 0, 0]);
        header.extend_from_slice(&source.octets());
        header.extend_from_slice(&destination.octets());
    } else {
        header.extend_from_slice(&[FAMILY_TCP6, 0, 0]);
        header.extend_from_slice(&mapped(source_ip).octets());
        header.extend_from_slice(&mapped(destination_ip).octets());
    }
    header.extend_from_slice(&source.port().to_be_bytes());
    header.extend_from_slice(&destination.port().to_be_bytes());
    push_tlv(&mut header, TLV_ALPN, tlvs.alpn, MAX_TEXT);
    push_tlv(&mut header, TLV_AUTHORITY, tlvs.authority.map(str::as_bytes), MAX_TEXT);
    push_tlv(&mut header, TLV_UNIQUE_ID, tlvs.unique_id, MAX_UNIQUE_ID);
    let payload_len = (header.len() - FIXED_V2) as u16;
    header[FIXED_V2 - 2..FIXED_V2].copy_from_slice(&payload_len.to_be_bytes());
    header
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

fn push_tlv(header: &mut Vec<u8>, kind: u8, value: Option<&[u8]>, longest: usize) {
    if let Some(value) = value.filter(|value| value.len() <= longest) {
        header.push(kind);
        header.extend_from_slice(&(value.len() as u16).to_be_bytes());
        header.extend_from_slice(value);
    }
}

#[cfg(test)]
mod tests;
