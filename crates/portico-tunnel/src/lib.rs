//! HTTP/2 and HTTP/1.1 CONNECT: the server half, its TLS and its identities.
//!
//! What lives here: everything between an accepted connection on the tunnel port and an upstream connection that somebody else made.
//! [`serve()`] finds out what the client speaks and who it is ([`Tls`], [`Identity`]); `http2` and `http1` read its requests and
//! ask the [`Handler`] for an [`Upstream`] each; `bridge` (a stream of HTTP/2) and `pump` (HTTP/1.1 under TLS) then carry bytes until both
//! sides are done, and tell the [`Meter`] how it ended. What they hold meanwhile is in a [`MemoryBudget`](portico_net::MemoryBudget).
//!
//! What deliberately lives elsewhere: parsing of HTTP/1.1 heads (`portico-wire`); routes, allow lists, budgets, connecting and counting
//! (`portico-gateway`, which implements [`Handler`]); and the copying of plain TCP, which the gateway does best
//! ([`Served::Carry`]).

mod activity;
mod bridge;
mod chunk;
pub mod client;
mod handler;
mod keepalive;
mod server;
mod settings;
mod token;
mod turn;
mod waiting;

pub use handler::{End, Handler, Meter, Protocol, Refusal, Request, Side, StatusCode, Upstream};
pub use server::{
    ALPN, CertificateProblem, Failure, Finished, Identity, Presented, Served, Tls, TlsError, TlsFiles, serve,
};
pub use settings::Settings;
pub use token::Token;
