//! Makes the `:authority` of HTTP/2 requests one that HTTP libraries accept.
//!
//! On a Unix socket kube-apiserver sends the path of the socket there:
//! `%2Fetc%2Fkubernetes%2Fkonnectivity.socket`, or without the percent signs. h2 resets such a request. On a
//! Unix socket the name means nothing, so [`Rewriter`] puts another in its place before h2 reads it.
//!
//! Header blocks are compressed with a table that both ends keep (HPACK, RFC 7541), and yet nothing needs to
//! be decompressed here. A library writes the name `:authority` as entry 1 of the static table, followed by
//! the value. The new value is one character, and never longer than the one it replaces. So h2's table holds
//! at least the entries that the client's holds, at the same places. Everything else passes as it is.
//! Requests of another form are left for h2 to judge.

use std::mem;
use std::ops::Range;

use bytes::BytesMut;

/// Longest header block that is looked at, in one frame or several: what h2 accepts in one frame from any
/// client. A request of kube-apiserver has 200 bytes.
pub const MAX_BLOCK: usize = 16 * 1024;

/// Bytes that a client sends before its first frame (RFC 9113 section 3.4).
const PREFACE: usize = 24;

/// Bytes before each frame's payload.
const HEADER: usize = 9;

/// The literal `:authority: s`, with the bits that say how it is indexed left out.
const REPLACEMENT: [u8; 2] = [1, b's'];

mod kind {
    pub(super) const HEADERS: u8 = 1;
    pub(super) const CONTINUATION: u8 = 9;
}

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The bytes of one connection, from its first on.
#[derive(Debug)]
pub struct Rewriter {
    /// Bytes of the preface or of a payload that have to come.
    missing: usize,
    /// Not yet all there: part of a frame's header, or of a header block. At most [`MAX_BLOCK`] and what was
    /// read last.
    held: BytesMut,
    /// For the reader.
    ready: BytesMut,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self { missing: PREFACE, held: BytesMut::new(), ready: BytesMut::new() }
    }
}

impl Rewriter {
    /// Takes what was read, and returns how many bytes of it pass as they are. What follows them is held, or
    /// [`ready`](Self::ready). Nothing passes while something is held.
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        let passing = if self.holds() { 0 } else { pass(&mut self.missing, bytes) };
        self.held.extend_from_slice(&bytes[passing..]);
        self.advance();
        passing
    }

    /// Nothing more will come. The held bytes pass, and h2 then says that they end within a frame.
    pub fn end(&mut self) {
        self.ready.unsplit(mem::take(&mut self.held));
    }

    /// Whether bytes wait for those that follow them.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// The bytes for the reader before all that are read later.
    pub fn ready(&mut self) -> &mut BytesMut {
        &mut self.ready
    }

    /// Moves from `held` to `ready` what can be passed on.
    fn advance(&mut self) {
        loop {
            let passing = pass(&mut self.missing, &self.held);
            self.ready.extend_from_slice(&self.held.split_to(passing));
            match block(&self.held) {
                Block::None | Block::Unfinished => return,
                Block::Refused => self.missing = usize::MAX,
                Block::Whole(len) => rewrite(&self.held.split_to(len), &mut self.ready),
            }
        }
    }
}

/// How many of `bytes` pass as they are: up to a header block, or to a frame's header that is not whole.
/// `missing` bytes of the preface or of a payload are to come before the next frame.
fn pass(missing: &mut usize, bytes: &[u8]) -> usize {
    let mut passed = 0;
    loop {
        let payload = (*missing).min(bytes.len() - passed);
        passed += payload;
        *missing -= payload;
        match Header::parse(&bytes[passed..]) {
            Some(header) if *missing == 0 && header.kind != kind::HEADERS => {
                passed += HEADER;
                *missing = header.length;
            }
            _ => return passed,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Header {
    length: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl Header {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let &[high, middle, low, kind, flags, ref stream @ ..] = bytes.first_chunk::<HEADER>()?;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        Some(Self { length, kind, flags, stream: *stream })
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// What `held` begins with.
enum Block {
    /// Nothing, or part of a frame's header.
    None,
    /// Part of a header block.
    Unfinished,
    /// Something that h2 will refuse: a block longer than [`MAX_BLOCK`], or another frame within it. From
    /// here on everything passes.
    Refused,
    /// A header block of so many bytes with the headers of its frames.
    Whole(usize),
}

/// Looks for the end of a header block: HEADERS, then CONTINUATION until END_HEADERS.
fn block(held: &[u8]) -> Block {
    let mut len = 0;
    while let Some(header) = Header::parse(&held[len..]) {
        if len > 0 && header.kind != kind::CONTINUATION {
            return Block::Refused;
        }
        len += HEADER + header.length;
        if len > MAX_BLOCK {
            return Block::Refused;
        }
        if held.len() < len {
            return Block::Unfinished;
        }
        if header.has(END_HEADERS) {
            return Block::Whole(len);
        }
    }
    if len > 0 { Block::Unfinished } else { Block::None }
}

/// Writes the header block in `frames` with another authority, as one HEADERS frame without padding and
/// priority, which say nothing to h2.
fn rewrite(frames: &[u8], to: &mut BytesMut) {
    let mut fragments = BytesMut::new();
    let mut rest = frames;
    while let Some(header) = Header::parse(rest) {
        let (frame, behind) = rest.split_at(HEADER + header.length);
        let Some(fragment) = fragment(header, &frame[HEADER..]) else {
            // Against the protocol. As it is, h2 says so.
            return to.extend_from_slice(frames);
        };
        fragments.extend_from_slice(fragment);
        rest = behind;
    }
    let Some(first) = Header::parse(frames) else { return };
    let block = replaced(&fragments);
    let [_, high, middle, low] = u32::try_from(block.len()).unwrap_or_default().to_be_bytes();
    let flags = first.flags & !(PADDED | PRIORITY) | END_HEADERS;
    to.extend_from_slice(&[high, middle, low, kind::HEADERS, flags]);
    to.extend_from_slice(&first.stream);
    to.extend_from_slice(&block);
}

/// The part of a header block in one frame.
fn fragment(header: Header, mut payload: &[u8]) -> Option<&[u8]> {
    if header.kind == kind::HEADERS && header.has(PADDED) {
        let (&padding, rest) = payload.split_first()?;
        payload = rest.get(..rest.len().checked_sub(usize::from(padding))?)?;
    }
    if header.kind == kind::HEADERS && header.has(PRIORITY) {
        payload = payload.get(5..)?;
    }
    Some(payload)
}

/// The block with the value of each literal `:authority` replaced.
fn replaced(block: &[u8]) -> BytesMut {
    let mut out = BytesMut::with_capacity(block.len());
    let mut copied = 0;
    let mut at = 0;
    while let Some(field) = field(block, at) {
        if let Some(value) = field.authority {
            out.extend_from_slice(&block[copied..value.start]);
            out.extend_from_slice(&REPLACEMENT);
            copied = value.end;
        }
        at = field.end;
    }
    out.extend_from_slice(&block[copied..]);
    out
}

/// One field of a header block (RFC 7541 section 6).
struct Field {
    end: usize,
    /// Where the value is, with its length, if the field is an authority that is not empty.
    authority: Option<Range<usize>>,
}

/// Reads the field at `at`. `None` at the end of the block, or where it is malformed.
fn field(block: &[u8], at: usize) -> Option<Field> {
    let first = *block.get(at)?;
    let (prefix, is_literal) = match first {
        0x80.. => (7, false),
        0x40.. => (6, true),
        // The size of the table changes.
        0x20.. => (5, false),
        _ => (4, true),
    };
    let (name, mut end) = integer(block, at, prefix)?;
    if !is_literal {
        return Some(Field { end, authority: None });
    }
    if name == 0 {
        end = string(block, end)?;
    }
    let value = end..string(block, end)?;
    let is_authority = name == 1 && value.len() > 1;
    Some(Field { end: value.end, authority: is_authority.then_some(value) })
}

/// The end of the string at `at`.
fn string(block: &[u8], at: usize) -> Option<usize> {
    let (len, start) = integer(block, at, 7)?;
    let end = start.checked_add(len)?;
    (end <= block.len()).then_some(end)
}

/// The integer at `at` whose first byte has `prefix` bits of it, and where it ends (RFC 7541 section 5.1).
fn integer(block: &[u8], at: usize, prefix: u32) -> Option<(usize, usize)> {
    let mask = (1_u8 << prefix) - 1;
    let first = *block.get(at)? & mask;
    if first < mask {
        return Some((usize::from(first), at + 1));
    }
    let mut value = usize::from(first);
    // Three bytes more hold two million, far more than a block has.
    for (index, &byte) in block.get(at + 1..)?.iter().take(3).enumerate() {
        value += usize::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            return Some((value, at + 2 + index));
        }
    }
    None
}

#[cfg(test)]
mod tests;
