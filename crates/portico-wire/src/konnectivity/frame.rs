//! gRPC messages in a stream of bytes: one byte "compressed", four of length, the message.
//!
//! For the gRPC streams of server and agent. The caller has the stream's bytes and takes as many as
//! [`Frame::len`] says.

use crate::{Malformed, Parse};

/// Bytes in front of each message.
pub const PREFIX: usize = 5;

/// Largest message that a gRPC library of Go accepts by default: 4 MiB. A larger one ends the whole stream.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Where a message lies in the bytes that begin with its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Bytes of the message. It begins at [`PREFIX`].
    pub message: usize,
}

impl Frame {
    /// Prefix and message.
    pub const fn len(self) -> usize {
        PREFIX + self.message
    }

    /// Always false: there is a prefix at least.
    pub const fn is_empty(self) -> bool {
        false
    }
}

/// Reads the prefix at the start of `bytes`. The message itself need not be there yet.
pub fn prefix(bytes: &[u8], max_message: usize) -> Parse<Frame> {
    let Some((&[compressed, length @ ..], _)) = bytes.split_first_chunk::<PREFIX>() else {
        return match bytes.first() {
            None | Some(0) => Parse::NeedMore,
            Some(_) => Parse::Malformed(COMPRESSED),
        };
    };
    if compressed != 0 {
        return Parse::Malformed(COMPRESSED);
    }
    match usize::try_from(u32::from_be_bytes(length)) {
        Ok(message) if message <= max_message => Parse::Complete(Frame { message }),
        _ => Parse::Malformed(Malformed::because("a message is longer than the limit")),
    }
}

/// Nobody negotiated a compression, so that a compressed message is an error (gRPC over HTTP/2, "Message
/// encoding").
const COMPRESSED: Malformed = Malformed::because("a message is compressed, which was not agreed on");

/// The prefix of a message of `message` bytes.
pub fn prefix_of(message: usize) -> [u8; PREFIX] {
    // Messages are packets, and packets are far below 4 GiB.
    let [a, b, c, d] = u32::try_from(message).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

#[cfg(test)]
mod tests;
