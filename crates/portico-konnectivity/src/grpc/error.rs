//! How a gRPC stream ends.

use std::fmt;

use http::{HeaderMap, HeaderValue, StatusCode};
use portico_api::text::printable;
use portico_tunnel::connection::cause;
use portico_wire::Malformed;
use portico_wire::konnectivity::status::{Code, decode_message, encode_message};
use thiserror::Error;

/// The header with the code.
const CODE: &str = "grpc-status";

/// The header with the text.
const MESSAGE: &str = "grpc-message";

/// The end of a stream, as the server puts it in its trailers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The code.
    pub code: Code,
    /// Why, for people: one line, not long. Empty where all is well.
    pub message: Box<str>,
}

impl Status {
    /// All is well.
    #[must_use]
    pub fn ok() -> Self {
        Self::new(Code::OK, "")
    }

    /// A code and why.
    #[must_use]
    pub fn new(code: Code, message: impl Into<Box<str>>) -> Self {
        Self { code, message: message.into() }
    }

    /// Reads it from trailers, or from the headers of a response without messages. `None`: there is none.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let code = Code::parse(headers.get(CODE)?.as_bytes());
        let message = headers.get(MESSAGE).map(|text| decode_message(text.as_bytes())).unwrap_or_default();
        Some(Self::new(code, printable(&message)))
    }

    /// Writes it into trailers.
    pub(super) fn write(&self, headers: &mut HeaderMap) {
        headers.insert(CODE, HeaderValue::from(u16::from(self.code.number())));
        if !self.message.is_empty() {
            // What is encoded is visible ASCII.
            if let Ok(text) = HeaderValue::try_from(encode_message(&self.message)) {
                headers.insert(MESSAGE, text);
            }
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() { self.code.fmt(f) } else { write!(f, "{}: {}", self.code, self.message) }
    }
}

/// Why a stream is over before its end. None can be continued; a caller may make another call.
#[derive(Debug, Error)]
pub enum Error {
    /// The server ended the stream otherwise than with OK.
    #[error("the stream ended with status {0}")]
    Status(Status),
    /// The peer reset the stream, or the connection is lost.
    #[error("{}", cause(.0))]
    Http(#[from] h2::Error),
    /// What came is no gRPC message.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// The stream ended within a message, or without a status.
    #[error("the stream ended {0}")]
    Truncated(&'static str),
    /// The response is not of a gRPC server.
    #[error(
        "the answer is no gRPC: HTTP status {status}, content-type {content_type:?}; is this the address \
        of a Konnectivity server?"
    )]
    NotGrpc {
        /// Its status.
        status: StatusCode,
        /// Its media type.
        content_type: Option<HeaderValue>,
    },
    /// The request cannot be written.
    #[error("cannot make the request: {0}")]
    Request(#[from] http::Error),
    /// An unfinished message held memory that others needed.
    #[error("the peer does not finish a message, and the memory for that is used up")]
    Memory,
    /// The stream is closed on this side.
    #[error("the stream is closed")]
    Closed,
}

impl Error {
    /// The code that a caller sees.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Status(status) => status.code,
            Self::Malformed(_) | Self::Truncated(_) => Code::INTERNAL,
            Self::Memory => Code::RESOURCE_EXHAUSTED,
            Self::Http(_) | Self::NotGrpc { .. } | Self::Request(_) | Self::Closed => Code::UNAVAILABLE,
        }
    }
}
