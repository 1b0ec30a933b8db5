//! Parsers over bytes: the first bytes of a connection, classified and parsed.
//!
//! [`hello`] reads the ClientHello that names a user cluster by SNI. [`alert`] writes the TLS alert for a
//! client that gets no route. [`proxy`] reads and writes the PROXY protocol that carries the client's address
//! across hops. [`connect`] tells the protocols on the tunnel port apart and reads an HTTP/1.1 request head.
//! A connection meets them in this order: `proxy`, then `connect::sniff` or `hello`, then `alert` if it is
//! refused. [`konnectivity`] is the protocol of an API server and its Konnectivity peers. [`authority`] mends
//! requests of an API server that HTTP libraries refuse.
//!
//! Every parser is a function over the bytes received so far and returns one of three answers, [`Parse`]. The
//! caller owns the socket and the buffer. Each module says as a constant how many bytes it may ever ask for,
//! and returns [`Parse::Malformed`] rather than ask for more.
//!
//! Elsewhere are sockets, timeouts and buffers (`portico-gateway`), and HTTP/2 (`portico-tunnel`). Names come
//! out of here exactly as they were sent; `portico-routes` knows their meaning.

pub mod alert;
pub mod authority;
pub mod connect;
pub mod hello;
pub mod konnectivity;
pub mod proxy;

mod reader;

/// The answer of every parser in this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parse<T> {
    /// Here it is. Bytes that follow it do not change this answer.
    Complete(T),
    /// Right so far, but not all of it is here: read more and ask again with all bytes received.
    NeedMore,
    /// No bytes that follow can make this right.
    Malformed(Malformed),
}

impl<T> Parse<T> {
    /// The parsed value, if the answer is [`Parse::Complete`].
    pub fn complete(self) -> Option<T> {
        match self {
            Self::Complete(value) => Some(value),
            Self::NeedMore | Self::Malformed(_) => None,
        }
    }

    /// Is the answer [`Parse::NeedMore`]?
    pub fn needs_more(&self) -> bool {
        matches!(self, Self::NeedMore)
    }
}

/// Why bytes were refused, in words for the access line. A fixed sentence per reason: nothing the peer sent
/// is repeated in it, so it is safe to log and cheap to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Malformed {
    reason: &'static str,
}

impl Malformed {
    pub(crate) const fn because(reason: &'static str) -> Self {
        Self { reason }
    }

    /// The reason as a fixed sentence without a full stop.
    pub const fn reason(self) -> &'static str {
        self.reason
    }
}
