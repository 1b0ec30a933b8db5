//! How a gRPC stream ends: `grpc-status` and `grpc-message` in its trailers.

use std::fmt;

/// A status code of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(u8);

impl Code {
    /// Done.
    pub const OK: Self = Self(0);
    /// The caller gave up.
    pub const CANCELED: Self = Self(1);
    /// The answer of upstream's server to every agent that it refuses.
    pub const UNKNOWN: Self = Self(2);
    /// A limit is reached: a message is too long, or there are too many streams.
    pub const RESOURCE_EXHAUSTED: Self = Self(8);
    /// There is no such method.
    pub const UNIMPLEMENTED: Self = Self(12);
    /// The protocol was broken.
    pub const INTERNAL: Self = Self(13);
    /// The connection is lost, or the server stops.
    pub const UNAVAILABLE: Self = Self(14);
    /// The caller has not proved its identity.
    pub const UNAUTHENTICATED: Self = Self(16);

    /// How many there are.
    pub const COUNT: usize = 17;

    const NAMES: [&str; Self::COUNT] = [
        "OK",
        "Canceled",
        "Unknown",
        "InvalidArgument",
        "DeadlineExceeded",
        "NotFound",
        "AlreadyExists",
        "PermissionDenied",
        "ResourceExhausted",
        "FailedPrecondition",
        "Aborted",
        "OutOfRange",
        "Unimplemented",
        "Internal",
        "Unavailable",
        "DataLoss",
        "Unauthenticated",
    ];

    /// The code in `grpc-status`. A text that is no code counts as [`UNKNOWN`](Self::UNKNOWN), as in every
    /// library.
    pub fn parse(header: &[u8]) -> Self {
        let number = std::str::from_utf8(header).ok().and_then(|text| text.parse().ok());
        number
            .map(Self)
            .filter(|code| Self::NAMES.get(usize::from(code.0)).is_some())
            .unwrap_or(Self::UNKNOWN)
    }

    /// Each of them, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        (0_u8..).zip(Self::NAMES).map(|(number, _)| Self(number))
    }

    /// The number, as in `grpc-status`.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// The name as Go's library and upstream's metrics have it: `Canceled`.
    pub fn name(self) -> &'static str {
        Self::NAMES.get(usize::from(self.0)).copied().unwrap_or("Unknown")
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text as the value of `grpc-message`: everything but visible ASCII is percent-encoded.
pub fn encode_message(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => {
                encoded.push('%');
                encoded.push(char::from(HEX[usize::from(byte >> 4)]));
                encoded.push(char::from(HEX[usize::from(byte & 15)]));
            }
        }
    }
    encoded
}

const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// The text in `grpc-message`. A part that is not encoded right stays as it is. Bytes that are no text are
/// replaced.
pub fn decode_message(value: &[u8]) -> String {
    String::from_utf8_lossy(&percent_decoded(value)).into_owned()
}

fn percent_decoded(value: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(value.len());
    let mut rest = value;
    while let Some((&first, behind)) = rest.split_first() {
        let escaped = (first == b'%').then(|| escape(behind)).flatten();
        decoded.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &behind[2..] } else { behind };
    }
    decoded
}

/// The byte behind a percent sign.
pub(super) fn escape(behind: &[u8]) -> Option<u8> {
    let digit = |index: usize| char::from(*behind.get(index)?).to_digit(16);
    u8::try_from(digit(0)? << 4 | digit(1)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn codes_have_the_names_of_gos_library() {
        assert_eq!(Code::parse(b"0"), Code::OK);
        assert_eq!(Code::parse(b"1").name(), "Canceled");
        assert_eq!(Code::parse(b"16"), Code::UNAUTHENTICATED);
        for unknown in [&b"17"[..], b"", b"-1", b"x", b"256", b"\xff"] {
            assert_eq!(Code::parse(unknown), Code::UNKNOWN);
        }
    }

    #[test]
    fn a_message_is_visible_ascii() {
        assert_eq!(encode_message("100 % of\nit: é"), "100 %25 of%0Ait: %C3%A9");
        assert_eq!(decode_message(b"100 %25 of%0ait: %C3%A9"), "100 % of\nit: é");
        assert_eq!(decode_message(b"50% off, %zz, %4"), "50% off, %zz, %4");
        assert_eq!(decode_message(b"\xff"), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn a_message_that_is_written_is_read(text in any::<String>()) {
            let encoded = encode_message(&text);
            prop_assert!(encoded.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            prop_assert_eq!(decode_message(encoded.as_bytes()), text);
        }

        #[test]
        fn any_value_gets_an_answer(bytes in any::<Vec<u8>>()) {
            let _ = (decode_message(&bytes), Code::parse(&bytes));
        }
    }
}
