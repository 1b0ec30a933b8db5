//! Messages of netlink(7): a header, the fixed part of the protocol, and attributes that may hold attributes.
//!
//! Everything is in the byte order of the host; nftables asks for some values in that of the network, which is its matter.

use rustix::net::netlink;

/// Length, type, flags, sequence number, port.
const HEADER: usize = 16;
/// Length and type.
const ATTRIBUTE: usize = 4;
/// What messages and attributes are padded to.
const ALIGNMENT: usize = 4;
/// An attribute that holds attributes says so (`NLA_F_NESTED`).
const NESTED: u16 = 0x8000;
/// The type of an attribute without what it says about itself (`NLA_TYPE_MASK`).
const TYPE_MASK: u16 = 0x3fff;

/// A message that asks.
#[derive(Debug)]
pub(in super::super) struct Message(Vec<u8>);

impl Message {
    /// A message of type `kind`, with the fixed part of its protocol.
    pub(in super::super) fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(fixed);
        let mut message = Self(bytes);
        message.pad();
        message
    }

    /// Appends an attribute.
    #[must_use]
    pub(in super::super) fn with(mut self, kind: u16, value: &[u8]) -> Self {
        self.attribute(kind, |message| message.0.extend_from_slice(value));
        self
    }

    /// Appends an attribute that is text, closed by a zero byte.
    #[must_use]
    pub(in super::super) fn text(mut self, kind: u16, value: &str) -> Self {
        self.attribute(kind, |message| {
            message.0.extend_from_slice(value.as_bytes());
            message.0.push(0);
        });
        self
    }

    /// Appends an attribute that holds what `content` appends.
    #[must_use]
    pub(in super::super) fn nest(mut self, kind: u16, content: impl FnOnce(Self) -> Self) -> Self {
        self.attribute(kind | NESTED, |message| *message = content(Self(std::mem::take(&mut message.0))));
        self
    }

    /// Appends bytes as they are: a fixed part inside of an attribute.
    #[must_use]
    pub(in super::super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.pad();
        self
    }

    fn attribute(&mut self, kind: u16, value: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.0.extend_from_slice(&[0; 2]);
        self.0.extend_from_slice(&kind.to_ne_bytes());
        value(self);
        let length = u16::try_from(self.0.len() - start).expect("what is sent has a few hundred bytes");
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.pad();
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
    }

    /// The message as it is sent, with the number its answers will carry.
    pub(super) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).expect("what is sent has a few hundred bytes");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

/// A message of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer<'a> {
    pub(super) kind: u16,
    pub(super) sequence: u32,
    /// The fixed part and the attributes.
    pub(super) body: &'a [u8],
}

/// The messages of one datagram. Ends early at one that is cut off.
pub(super) fn answers(mut datagram: &[u8]) -> impl Iterator<Item = Answer<'_>> {
    std::iter::from_fn(move || {
        let (length, kind) = (number32(datagram, 0)? as usize, number16(datagram, 4)?);
        let sequence = number32(datagram, 8)?;
        let body = datagram.get(HEADER..length)?;
        datagram = datagram.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some(Answer { kind, sequence, body })
    })
}

/// The attributes of a message or of an attribute.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Attributes<'a>(&'a [u8]);

/// The attributes in `bytes`. Ends early at one that is cut off.
pub(in super::super) fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes(bytes)
}

impl<'a> Attributes<'a> {
    /// The value of the first attribute of this type.
    pub(in super::super) fn find(self, wanted: u16) -> Option<&'a [u8]> {
        let mut all = self;
        all.find_map(|(kind, value)| (kind == wanted).then_some(value))
    }

    /// A number of the host's byte order.
    pub(in super::super) fn number(self, wanted: u16) -> Option<u32> {
        number32(self.find(wanted)?, 0)
    }

    /// Text, without the zero byte that closes it.
    pub(in super::super) fn text(self, wanted: u16) -> Option<Box<str>> {
        let bytes = self.find(wanted)?;
        let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(bytes).into())
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (length, kind) = (usize::from(number16(self.0, 0)?), number16(self.0, 2)?);
        let value = self.0.get(ATTRIBUTE..length)?;
        self.0 = self.0.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some((kind & TYPE_MASK, value))
    }
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// What an acknowledgement says: nothing, or the number of an error.
pub(super) fn errno(answer: &Answer<'_>) -> Option<rustix::io::Errno> {
    let code = number32(answer.body, 0)?.cast_signed();
    (code != 0).then(|| rustix::io::Errno::from_raw_os_error(code.saturating_neg()))
}

/// Who sends as the kernel itself; a process can send to our port too.
pub(super) fn is_kernel(sender: Option<rustix::net::SocketAddrAny>) -> bool {
    let sender = sender.and_then(|sender| netlink::SocketAddrNetlink::try_from(sender).ok());
    sender.is_some_and(|sender| sender.pid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let message = Message::new(16, 5, &[1; 3])
            .text(3, "portico")
            .nest(18, |inner| inner.text(1, "veth").nest(2, |peer| peer.raw(&[9; 2]).with(3, b"x")));
        let bytes = message.finish(7);
        let mut all = answers(&bytes);
        let answer = all.next().unwrap();
        assert_eq!((answer.kind, answer.sequence, all.next()), (16, 7, None));
        let fields = attributes(&answer.body[4..]);
        assert_eq!(fields.text(3).as_deref(), Some("portico"));
        let inner = attributes(fields.find(18).unwrap());
        assert_eq!(inner.text(1).as_deref(), Some("veth"));
        assert_eq!(attributes(&inner.find(2).unwrap()[4..]).find(3), Some(&b"x"[..]));
        assert_eq!(fields.find(99), None);
    }

    #[test]
    fn a_datagram_cut_anywhere_ends_early_and_nothing_else_happens() {
        let one = Message::new(16, 0, &[0; 4]).text(3, "portico").with(1, &[1, 2, 3, 4]).finish(1);
        let both: Vec<u8> = one.iter().chain(&one).copied().collect();
        for end in 0..both.len() {
            for answer in answers(&both[..end]) {
                assert!(attributes(answer.body.get(4..).unwrap_or_default()).count() <= 2);
            }
            assert!(attributes(&both[..end]).count() < 100);
        }
        assert_eq!(answers(&both).count(), 2);
    }

    #[test]
    fn an_attribute_that_claims_no_length_ends_the_list() {
        assert_eq!(attributes(&[0; 64]).count(), 0);
        assert_eq!(answers(&[0; 64]).count(), 0);
    }
}
