//! How a connection to the tunnel port ends, in order or not.

use std::io;

use thiserror::Error;

use crate::cause::cause;
use crate::inbound::Flood;

/// How a connection ended orderly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// Both sides ended, or the client was refused with a response.
    Closed,
    /// GOAWAY was sent, and the last stream has ended.
    Drained,
}

/// How a connection failed. None of these concerns an upstream: tunnels report through their
/// [`Meter`](crate::Meter), refused requests through [`Handler::refused`](crate::Handler::refused).
#[derive(Debug, Error)]
pub enum Failure {
    /// The client left before its first bytes said what it speaks, as port scans and TCP health checks do.
    #[error("the client left before it said what it speaks")]
    ClosedEarly,
    /// The client did not finish its first bytes, handshake, preface or request head in time.
    #[error("the client did not say in time what it wants")]
    TooSlow,
    /// The first bytes belong to none of the protocols of this port.
    #[error("{0}")]
    Malformed(&'static str),
    /// TLS came, and no certificate is configured.
    #[error(
        "the client speaks TLS, and this listener has no certificate; \
         set --tunnel-tls-cert and --tunnel-tls-key"
    )]
    TlsNotServed,
    /// Plaintext came, and only TLS is served.
    #[error(
        "the client does not speak TLS, and this listener serves nothing else; \
         --tunnel-plaintext would allow it"
    )]
    PlaintextNotServed,
    /// The client does not hold the key of its certificate, or it is no certificate. Other problems of a
    /// certificate are reported in the response to a request.
    #[error("client certificate: {0}")]
    Untrusted(#[source] rustls::Error),
    /// The TLS handshake failed otherwise: no common version, or the client does not trust the listener's
    /// certificate.
    #[error("TLS handshake: {0}")]
    Tls(#[source] io::Error),
    /// The HTTP/2 connection broke, or its client broke the protocol. Before
    /// [`Handler::established`](crate::Handler::established) it never became one.
    #[error("HTTP/2 connection: {}", cause(.0))]
    Http2(#[source] h2::Error),
    /// The HTTP/1.1 client left before it had its response.
    #[error("HTTP/1.1 connection: {0}")]
    Http1(#[source] io::Error),
    /// [`Handler::evicted`](crate::Handler::evicted) was ready. The client got GOAWAY, or a response.
    #[error("the client had shown no identity that is accepted, and its slot was needed")]
    Evicted,
    /// The client sent more than it may. It got GOAWAY.
    #[error("{0}")]
    Flood(#[source] Flood),
    /// The client did not authenticate in time. It got GOAWAY.
    #[error("the client showed no identity that is accepted, for two minutes")]
    Unauthenticated,
    /// The client began a frame and did not finish it. It got GOAWAY.
    #[error("the client began a frame and did not finish it")]
    Unfinished,
    /// The HTTP/2 client answered no PING in time.
    #[error("the client gave no sign of life")]
    Silent,
}

impl From<h2::Error> for Failure {
    fn from(error: h2::Error) -> Self {
        // h2 has caps of its own.
        let is_flood = error.is_library() && error.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM);
        if is_flood { Self::Flood(Flood::Resets) } else { Self::Http2(error) }
    }
}

impl Failure {
    /// Whether the client left, or its connection broke: it did nothing wrong.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let is_gone = |error: &io::Error| {
            matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::NetworkUnreachable
            )
        };
        match self {
            Self::ClosedEarly | Self::Http1(_) | Self::Silent => true,
            Self::Tls(error) => is_gone(error),
            Self::Http2(error) => error.is_remote() || error.get_io().is_some_and(is_gone),
            _ => false,
        }
    }
}
