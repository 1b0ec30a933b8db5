//! gRPC as far as Konnectivity needs it: bidirectional streams of messages over h2 (gRPC over HTTP/2).
//!
//! A server takes a [`Call`] from a request and starts it; a client makes one with [`call`]. Both get a
//! [`Sender`] and a [`Receiver`]. Messages leave and arrive as the bytes of h2: nothing is decoded here, and
//! nothing is copied that came in one frame. A receiver gives window back only for bytes that its owner has
//! passed on. A sender takes one message at a time. So flow control reaches from end to end.
//!
//! Not here: the content of a message (`portico-wire`), and the silence of a peer (the task of the
//! connection).

mod client;
mod error;
mod receiver;
mod sender;
mod server;

pub use client::{Answer, Request, call};
pub use error::{Error, Status};
pub use receiver::{Message, Receiver};
pub use sender::Sender;
pub use server::Call;

use http::HeaderValue;

/// The media type of requests and responses.
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Whether a media type is that of gRPC, with an encoding of messages or without.
fn is_grpc(content_type: Option<&HeaderValue>) -> bool {
    let rest = content_type.and_then(|value| value.as_bytes().strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"+") || rest.starts_with(b";"))
}
