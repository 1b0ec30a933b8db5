//! The interface of the server half to the gateway. The server asks for an upstream for an authority, or a
//! refusal, and reports back.

use std::borrow::Cow;
use std::sync::Arc;

pub use http::StatusCode;
use http::{HeaderName, HeaderValue};
use portico_net::MemoryBudget;
pub use portico_net::{End, Meter, Side};
use tokio::net::TcpStream;

use crate::server::client_certificate::Presented;
use crate::token::Token;

/// Decides about every CONNECT request of one connection. The gateway implements it: this crate knows neither
/// routes nor the budgets of clusters.
pub trait Handler: Send + Sync + 'static {
    /// Counts the bytes of one tunnel.
    type Meter: Meter;

    /// Connects to what the request asks for. The client gets 200 only after this future is done. It is
    /// dropped if the client gives up first.
    fn connect(
        &self,
        request: &Request,
    ) -> impl Future<Output = Result<Upstream<Self::Meter>, Refusal>> + Send;

    /// Authenticates the client exactly as [`connect`](Self::connect) does, and opens nothing. It is for a
    /// client with a new token, or one that checks its credential before it needs it. By default every client
    /// is accepted.
    fn verify(&self, _request: &Request) -> impl Future<Output = Result<(), Refusal>> + Send {
        std::future::ready(Ok(()))
    }

    /// The HTTP/2 handshake is done, or the HTTP/1.1 head is read; under TLS or not, with this certificate or
    /// none. The connection no longer counts as one that has not sent what it wants.
    fn established(&self, _tls: bool, _certificate: Option<&Presented>) {}

    /// Whether the client has authenticated, by its certificate or by the token of a first request. Also true
    /// if clients are not asked to. From then on the limits are those of [`Settings`](crate::Settings);
    /// before, those of an agent that has just connected. Asked after [`established`](Self::established),
    /// until it is true.
    fn is_authenticated(&self) -> bool {
        true
    }

    /// The budget of the cluster that this connection counts for. It bounds the bytes that wait for the
    /// client, and its unfinished frames. `None` while that is not known. Asked until it is.
    fn memory(&self) -> Option<MemoryBudget> {
        None
    }

    /// Ready when others need this connection's slot. The client gets GOAWAY, or this as its response, and
    /// the connection closes. Called once, after [`established`](Self::established). By default it is never
    /// ready.
    fn evicted(&self) -> impl Future<Output = Refusal> + Send {
        std::future::pending()
    }

    /// The client of an HTTP/2 connection gets GOAWAY, and its requests are dropped. The client has not given
    /// up by itself.
    fn dismissed(&self) {}

    /// A request is refused before [`connect`](Self::connect) was called. Returns the status of its response.
    fn refused(&self, request: &BadRequest) -> StatusCode;

    /// The status of the response to an HTTP/1.1 request without TLS, where only TLS is served.
    fn plaintext_status(&self) -> StatusCode;
}

/// One CONNECT request.
#[derive(Debug, Clone)]
pub struct Request {
    /// The authority as the client wrote it: `host:port`, case and all.
    pub authority: Box<str>,
    /// The client's certificate. `None` if it was not asked for one, or had none.
    pub certificate: Option<Arc<Presented>>,
    /// The bearer token that came with the request.
    pub token: Option<Token>,
    /// The version of HTTP.
    pub protocol: Protocol,
    /// Whether it came under TLS.
    pub tls: bool,
    /// Whether bytes of the client came with it. The upstream gets them right after the client's 200.
    pub client_first: bool,
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
    /// Counts its bytes.
    pub meter: M,
}

/// The header of a refusal that says why, in one sentence.
pub const REASON: HeaderName = HeaderName::from_static("x-portico-reason");

/// Why a request is not served, as the client gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the response.
    pub status: StatusCode,
    /// One sentence: the header [`REASON`] of the response.
    pub reason: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with a fixed sentence.
    #[must_use]
    pub const fn new(status: StatusCode, reason: &'static str) -> Self {
        Self { status, reason: Cow::Borrowed(reason) }
    }

    /// The reason as a header: what a header may not have becomes `?`.
    pub(crate) fn header(&self) -> HeaderValue {
        let fits = |character: char| character.is_ascii_graphic() || character == ' ';
        let text: String = self.reason.chars().map(|c| if fits(c) { c } else { '?' }).collect();
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("?"))
    }
}

/// A request that is refused without asking [`Handler::connect`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadRequest {
    /// Its method is another than CONNECT.
    Method,
    /// It is not well formed, for the reason of this sentence.
    Malformed(&'static str),
    /// Its head did not come in time.
    TooSlow,
    /// As many as may wait on a connection do, and the client has not authenticated.
    TooManyWait,
    /// As many requests as its connection may have streams were cancelled before their answer within a
    /// second.
    TooManyCancelled,
}

impl BadRequest {
    /// The sentence that the client gets.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Method => "only CONNECT is served here",
            Self::Malformed(reason) => reason,
            Self::TooSlow => "the request head did not come in time",
            Self::TooManyWait => {
                "too many requests wait on a connection that has shown no accepted identity; wait for an \
                 answer"
            }
            Self::TooManyCancelled => {
                "too many requests of this connection were cancelled before their answer; try again in a \
                 second"
            }
        }
    }
}
