//! The packets: what frontend, server and agent tell each other about dials and connections.
//!
//! [`Packet::decode`] reads one message, which is whole, so there are two answers. The payload of DATA is a
//! slice of the message and not copied. [`DataHead`] writes the bytes in front of a payload, so that it
//! leaves without a copy too.
//!
//! A packet's type and its payload must agree. Any other packet, and one of a type that a later version may
//! have, is [`Packet::Unknown`], which every peer ignores. Otherwise the empty message would be a DIAL_REQ,
//! which is type 0.

use bytes::{BufMut, Bytes, BytesMut};

use super::field::{Field, Fields, VARINT, put_bytes, put_int64, put_text, put_varint, tag};
use super::frame::{PREFIX, prefix_of};
use crate::Malformed;

/// The number of a dial, chosen by the one that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DialId(pub i64);

/// The number of a connection, chosen by the agent and unique on its Connect stream only. 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectId(pub i64);

/// One packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// Asks for a connection.
    DialRequest {
        /// A network of Go; everybody sends `tcp`.
        protocol: String,
        /// `HOST:PORT`; the agent resolves names.
        address: String,
        /// What the answer repeats.
        dial: DialId,
    },
    /// Answers a DIAL_REQ.
    DialResponse {
        /// The dial of the request.
        dial: DialId,
        /// The connection, or why there is none. An error is never empty.
        result: Result<ConnectId, String>,
    },
    /// Asks to close a connection.
    CloseRequest(ConnectId),
    /// Says that a connection is closed.
    CloseResponse {
        /// Which.
        connection: ConnectId,
        /// Why; empty in general.
        error: String,
    },
    /// Bytes of a connection.
    Data {
        /// Which.
        connection: ConnectId,
        /// The bytes.
        payload: Bytes,
    },
    /// Abandons a dial.
    CloseDial(DialId),
    /// The agent is about to stop: prefer others.
    Drain,
    /// A packet of a later version, or one whose type and payload disagree. To be ignored.
    Unknown,
}

/// Numbers of the types.
mod kind {
    pub(super) const DIAL_REQ: u8 = 0;
    pub(super) const DIAL_RSP: u8 = 1;
    pub(super) const CLOSE_REQ: u8 = 2;
    pub(super) const CLOSE_RSP: u8 = 3;
    pub(super) const DATA: u8 = 4;
    pub(super) const DIAL_CLS: u8 = 5;
    pub(super) const DRAIN: u8 = 6;
}

/// The field of the payload of a type. They are not in the same order.
const fn payload_field(kind: u8) -> u8 {
    match kind {
        kind::DIAL_REQ => 2,
        kind::DIAL_RSP => 3,
        kind::DATA => 4,
        kind::CLOSE_REQ => 5,
        kind::CLOSE_RSP => 6,
        kind::DIAL_CLS => 7,
        _ => 8,
    }
}

impl Packet {
    /// The types, by their names in the protocol and in upstream's metrics, in the order of their numbers;
    /// what is none of them comes last.
    pub const TYPES: [&str; 8] =
        ["DIAL_REQ", "DIAL_RSP", "CLOSE_REQ", "CLOSE_RSP", "DATA", "DIAL_CLS", "DRAIN", "Unknown"];

    /// The index of [`Packet::Data`] in [`Self::TYPES`].
    pub const DATA: usize = kind::DATA as usize;

    /// Bytes of memory that it takes: itself, its texts and its data.
    pub fn memory(&self) -> usize {
        let parts = match self {
            Self::DialRequest { protocol, address, .. } => protocol.len() + address.len(),
            Self::DialResponse { result: Err(error), .. } | Self::CloseResponse { error, .. } => error.len(),
            Self::Data { payload, .. } => payload.len(),
            Self::DialResponse { result: Ok(_), .. }
            | Self::CloseRequest(_)
            | Self::CloseDial(_)
            | Self::Drain
            | Self::Unknown => 0,
        };
        size_of::<Self>() + parts
    }

    /// The index of its type in [`Self::TYPES`].
    pub fn type_index(&self) -> usize {
        let kind = match self {
            Self::DialRequest { .. } => kind::DIAL_REQ,
            Self::DialResponse { .. } => kind::DIAL_RSP,
            Self::CloseRequest(_) => kind::CLOSE_REQ,
            Self::CloseResponse { .. } => kind::CLOSE_RSP,
            Self::Data { .. } => kind::DATA,
            Self::CloseDial(_) => kind::DIAL_CLS,
            Self::Drain => kind::DRAIN,
            Self::Unknown => return Self::TYPES.len() - 1,
        };
        usize::from(kind)
    }

    /// The name of its type.
    pub fn type_name(&self) -> &'static str {
        Self::TYPES[self.type_index()]
    }

    /// Reads the packet in one message.
    pub fn decode(message: &Bytes) -> Result<Self, Malformed> {
        let mut kind = 0;
        let mut payload = None;
        let mut fields = Fields::of(message);
        while let Some(Field { number, value }) = fields.next()? {
            match number {
                1 => kind = value.int64()?,
                2..=8 => payload = Some((number, value.bytes()?)),
                _ => {}
            }
        }
        let (Ok(kind), Some((number, payload))) = (u8::try_from(kind), payload) else {
            return Ok(Self::Unknown);
        };
        if kind > kind::DRAIN || number != u64::from(payload_field(kind)) {
            return Ok(Self::Unknown);
        }
        match kind {
            kind::DIAL_REQ => dial_request(payload),
            kind::DIAL_RSP => dial_response(payload),
            kind::CLOSE_REQ => Ok(Self::CloseRequest(ConnectId(number_in(payload, 1)?))),
            kind::CLOSE_RSP => close_response(payload),
            kind::DATA => data(message, payload),
            kind::DIAL_CLS => Ok(Self::CloseDial(DialId(number_in(payload, 1)?))),
            _ => number_in(payload, 1).map(|_| Self::Drain),
        }
    }

    /// Writes the packet as a gRPC message, prefix and all, behind what `to` has. [`Packet::Unknown`] writes
    /// nothing.
    pub fn encode(&self, to: &mut BytesMut) {
        let mut payload = BytesMut::new();
        let kind = match self {
            Self::DialRequest { protocol, address, dial } => {
                put_text(&mut payload, 1, protocol);
                put_text(&mut payload, 2, address);
                put_int64(&mut payload, 3, dial.0);
                kind::DIAL_REQ
            }
            Self::DialResponse { dial, result } => {
                match result {
                    Ok(connection) => put_int64(&mut payload, 2, connection.0),
                    Err(error) => put_text(&mut payload, 1, error),
                }
                put_int64(&mut payload, 3, dial.0);
                kind::DIAL_RSP
            }
            Self::CloseRequest(connection) => {
                put_int64(&mut payload, 1, connection.0);
                kind::CLOSE_REQ
            }
            Self::CloseResponse { connection, error } => {
                put_text(&mut payload, 1, error);
                put_int64(&mut payload, 2, connection.0);
                kind::CLOSE_RSP
            }
            Self::Data { connection, payload } => {
                to.extend_from_slice(DataHead::new(*connection, payload.len()).as_bytes());
                return to.extend_from_slice(payload);
            }
            Self::CloseDial(dial) => {
                put_int64(&mut payload, 1, dial.0);
                kind::DIAL_CLS
            }
            Self::Drain => kind::DRAIN,
            Self::Unknown => return,
        };
        let start = to.len();
        to.extend_from_slice(&[0; PREFIX]);
        put_int64(to, 1, i64::from(kind));
        put_bytes(to, payload_field(kind), &payload);
        let message = to.len() - start - PREFIX;
        to[start..start + PREFIX].copy_from_slice(&prefix_of(message));
    }

    /// The packet as a gRPC message, prefix and all.
    pub fn encoded(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        self.encode(&mut bytes);
        bytes.freeze()
    }
}

fn dial_request(payload: &[u8]) -> Result<Packet, Malformed> {
    let (mut protocol, mut address, mut dial) = (String::new(), String::new(), DialId(0));
    let mut fields = Fields::of(payload);
    while let Some(Field { number, value }) = fields.next()? {
        match number {
            1 => protocol = value.text()?,
            2 => address = value.text()?,
            3 => dial = DialId(value.int64()?),
            _ => {}
        }
    }
    Ok(Packet::DialRequest { protocol, address, dial })
}

fn dial_response(payload: &[u8]) -> Result<Packet, Malformed> {
    let (mut error, mut connection, mut dial) = (String::new(), ConnectId(0), DialId(0));
    let mut fields = Fields::of(payload);
    while let Some(Field { number, value }) = fields.next()? {
        match number {
            1 => error = value.text()?,
            2 => connection = ConnectId(value.int64()?),
            3 => dial = DialId(value.int64()?),
            _ => {}
        }
    }
    let result = if error.is_empty() { Ok(connection) } else { Err(error) };
    Ok(Packet::DialResponse { dial, result })
}

fn close_response(payload: &[u8]) -> Result<Packet, Malformed> {
    let (mut error, mut connection) = (String::new(), ConnectId(0));
    let mut fields = Fields::of(payload);
    while let Some(Field { number, value }) = fields.next()? {
        match number {
            1 => error = value.text()?,
            2 => connection = ConnectId(value.int64()?),
            _ => {}
        }
    }
    Ok(Packet::CloseResponse { connection, error })
}

fn data(message: &Bytes, payload: &[u8]) -> Result<Packet, Malformed> {
    let (mut connection, mut bytes) = (ConnectId(0), Bytes::new());
    let mut fields = Fields::of(payload);
    while let Some(Field { number, value }) = fields.next()? {
        match number {
            1 => connection = ConnectId(value.int64()?),
            3 => bytes = message.slice_ref(value.bytes()?),
            _ => {}
        }
    }
    Ok(Packet::Data { connection, payload: bytes })
}

/// The one number of a payload.
fn number_in(payload: &[u8], wanted: u64) -> Result<i64, Malformed> {
    let mut found = 0;
    let mut fields = Fields::of(payload);
    while let Some(Field { number, value }) = fields.next()? {
        if number == wanted {
            found = value.int64()?;
        }
    }
    Ok(found)
}

/// The bytes in front of the payload of a DATA packet: gRPC's prefix, the type, the connection's number, the
/// length. The payload follows as it is.
#[derive(Clone, Copy, Debug)]
pub struct DataHead {
    bytes: [u8; DataHead::MAX],
    len: usize,
}

impl DataHead {
    /// Bytes that a head takes at most: prefix, type, and three fields with their numbers.
    pub const MAX: usize = PREFIX + 2 + 3 + 3 * VARINT;

    /// The head of a packet with `payload` bytes. Never of an empty one towards a frontend, which takes it
    /// for the end.
    pub fn new(connection: ConnectId, payload: usize) -> Self {
        let mut inner = [0; 2 + 2 * VARINT];
        let mut end = &mut inner[..];
        if connection.0 != 0 {
            put_varint(&mut end, u64::from(tag(1, 0)));
            put_varint(&mut end, connection.0.cast_unsigned());
        }
        if payload != 0 {
            put_varint(&mut end, u64::from(tag(3, 2)));
            put_varint(&mut end, payload as u64);
        }
        let left = end.len();
        let inner = &inner[..2 + 2 * VARINT - left];
        let mut bytes = [0; Self::MAX];
        let mut end = &mut bytes[PREFIX..];
        put_varint(&mut end, u64::from(tag(1, 0)));
        put_varint(&mut end, u64::from(kind::DATA));
        put_varint(&mut end, u64::from(tag(payload_field(kind::DATA), 2)));
        put_varint(&mut end, (inner.len() + payload) as u64);
        end.put_slice(inner);
        let len = Self::MAX - end.len();
        bytes[..PREFIX].copy_from_slice(&prefix_of(len - PREFIX + payload));
        Self { bytes, len }
    }

    /// The bytes to send before the payload.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests;
