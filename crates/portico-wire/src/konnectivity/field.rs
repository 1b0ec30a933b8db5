//! The protobuf wire format, as far as packets need it: varints, and values with their length in front.
//!
//! For `packet`. A field that is not known is skipped, as protobuf demands. A message is whole when it gets
//! here. So a length that points past its end is malformed, and no reason to wait.

use bytes::{BufMut, BytesMut};

use crate::Malformed;
use crate::reader::Reader;

/// One field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field<'a> {
    pub(super) number: u64,
    pub(super) value: Value<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Varint(u64),
    /// A string, bytes, or a message.
    Bytes(&'a [u8]),
    /// A fixed number, which packets do not have.
    Fixed,
}

impl<'a> Value<'a> {
    pub(super) fn int64(self) -> Result<i64, Malformed> {
        match self {
            Self::Varint(value) => Ok(value.cast_signed()),
            _ => Err(Malformed::because("a field of a packet has another type than the protocol says")),
        }
    }

    pub(super) fn bytes(self) -> Result<&'a [u8], Malformed> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(Malformed::because("a field of a packet has another type than the protocol says")),
        }
    }

    pub(super) fn text(self) -> Result<String, Malformed> {
        std::str::from_utf8(self.bytes()?)
            .map(str::to_owned)
            .map_err(|_| Malformed::because("a text in a packet is not UTF-8"))
    }
}

/// The fields of a message, in the order in which they come.
pub(super) struct Fields<'a>(Reader<'a>);

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self(Reader::new(message))
    }

    pub(super) fn next(&mut self) -> Result<Option<Field<'a>>, Malformed> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag = varint(&mut self.0)?;
        let (number, kind) = (tag >> 3, tag & 7);
        if number == 0 || number > u64::from(u32::MAX >> 3) {
            return Err(Malformed::because("a field of a packet has a number that does not exist"));
        }
        const SHORT: Malformed = Malformed::because("a packet ends within a field");
        let value = match kind {
            0 => Value::Varint(varint(&mut self.0)?),
            1 => self.0.array::<8>().map(|_| Value::Fixed).ok_or(SHORT)?,
            2 => {
                let len = usize::try_from(varint(&mut self.0)?).map_err(|_| SHORT)?;
                Value::Bytes(self.0.take(len).ok_or(SHORT)?)
            }
            5 => self.0.array::<4>().map(|_| Value::Fixed).ok_or(SHORT)?,
            _ => return Err(Malformed::because("a field of a packet has a type that does not exist")),
        };
        Ok(Some(Field { number, value }))
    }
}

fn varint(reader: &mut Reader<'_>) -> Result<u64, Malformed> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = reader.u8().ok_or(Malformed::because("a packet ends within a number"))?;
        if shift == 63 && byte > 1 {
            break;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Malformed::because("a number in a packet is longer than 64 bits"))
}

/// Bytes that [`put_varint`] writes at most.
pub(super) const VARINT: usize = 10;

pub(super) fn put_varint(to: &mut impl BufMut, mut value: u64) {
    while value >= 0x80 {
        to.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    to.put_u8(value as u8);
}

pub(super) const fn tag(number: u8, kind: u8) -> u8 {
    number << 3 | kind
}

/// Writes a number. Zero is left out, as proto3 has it.
pub(super) fn put_int64(to: &mut BytesMut, number: u8, value: i64) {
    if value != 0 {
        to.put_u8(tag(number, 0));
        put_varint(to, value.cast_unsigned());
    }
}

/// Writes a string, bytes, or a message.
pub(super) fn put_bytes(to: &mut BytesMut, number: u8, bytes: &[u8]) {
    to.put_u8(tag(number, 2));
    put_varint(to, bytes.len() as u64);
    to.extend_from_slice(bytes);
}

/// Like [`put_bytes`], for a text, which is left out if it is empty.
pub(super) fn put_text(to: &mut BytesMut, number: u8, text: &str) {
    if !text.is_empty() {
        put_bytes(to, number, text.as_bytes());
    }
}
