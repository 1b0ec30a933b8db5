//! What the tunnel asks of the gateway: an upstream for an authority, or a reason why not; and what it reports back.

use std::borrow::Cow;
use std::sync::Arc;

pub use http::StatusCode;
pub use portico_net::{End, Meter, Side};
use tokio::net::TcpStream;

use crate::token::Token;
use crate::trust::Presented;

/// Decides about every CONNECT request of one connection. The gateway implements it; this crate knows neither routes nor budgets.
pub trait Handler: Send + Sync + 'static {
    /// Keeps count of one tunnel.
    type Meter: Meter;

    /// Connects to what the request asks for. The client hears 200 only after this future is done. It is dropped if the
    /// client gives up first.
    fn connect(
        &self,
        request: &Request,
    ) -> impl Future<Output = Result<Upstream<Self::Meter>, Refusal>> + Send;

    /// Verifies who asks, exactly as for [`connect`](Self::connect), and opens nothing: a client with a new token, or one that wants to
    /// know where it stands before it is needed. Without an implementation everybody is welcome, as without an identity to ask for.
    fn verify(&self, _request: &Request) -> impl Future<Output = Result<(), Refusal>> + Send {
        std::future::ready(Ok(()))
    }

    /// The client has said what it wants to say before requests: the HTTP/2 handshake is done, or the HTTP/1.1 head is read; under TLS
    /// or not, with this certificate or none. What bounds the number of those that have not may be given back.
    fn greeted(&self, _tls: bool, _certificate: Option<&Presented>) {}

    /// Ready when the room that the connection takes is needed for others: it is told (GOAWAY, or 429 in place of an answer) and closed.
    /// Asked for once, after [`greeted`](Self::greeted). Never, if not implemented.
    fn unwanted(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// A request was refused before [`connect`](Self::connect) could be asked: wrong method, or malformed.
    fn refused(&self, refusal: &Refusal);
}

/// One CONNECT request.
#[derive(Debug, Clone)]
pub struct Request {
    /// The authority as the client wrote it: `host:port`, case and all.
    pub authority: Box<str>,
    /// What the client showed of itself in its TLS handshake. `None` if it was not asked, or had nothing.
    pub certificate: Option<Arc<Presented>>,
    /// The bearer token that came with the request.
    pub token: Option<Token>,
    /// How the request came.
    pub protocol: Protocol,
    /// Whether it came under TLS.
    pub tls: bool,
}

/// Version of HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 (or 1.0): the connection becomes the tunnel.
    Http1,
    /// HTTP/2: a stream becomes the tunnel.
    Http2,
}

/// An upstream that is connected.
#[derive(Debug)]
pub struct Upstream<M> {
    /// The connection, with `TCP_NODELAY` set.
    pub stream: TcpStream,
    /// Keeps count of it.
    pub meter: M,
}

/// Why a request is not served: what the client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the answer.
    pub status: StatusCode,
    /// One sentence, the body of the answer.
    pub reason: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with a fixed sentence.
    #[must_use]
    pub const fn new(status: StatusCode, reason: &'static str) -> Self {
        Self { status, reason: Cow::Borrowed(reason) }
    }

    pub(crate) const METHOD: Self = Self::new(StatusCode::METHOD_NOT_ALLOWED, "only CONNECT is served here");
    pub(crate) const UNWANTED: Self = Self::new(
        StatusCode::TOO_MANY_REQUESTS,
        "the gateway needs the place for others; show an identity that is accepted, or try again",
    );
    pub(crate) const NO_AUTHORITY: Self =
        Self::new(StatusCode::BAD_REQUEST, "the request names no authority");
}
