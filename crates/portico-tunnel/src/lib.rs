//! Tunnels: CONNECT over HTTP/2 and HTTP/1.1, the server half and the client half.
//!
//! [`serve()`] (folder `server`) serves an accepted connection. It learns the protocol and takes the client's
//! certificate ([`Tls`], [`Presented`]). It asks the [`Handler`] for an [`Upstream`] for each request.
//! [`client`] keeps HTTP/2 connections to gateways and opens streams on them. In both, `bridge` joins each
//! stream with a TCP connection and reports to a [`Meter`]. `turn` writes each connection once a turn,
//! `inbound` looks at the frames that come, and `activity` counts waiting bytes in memory budgets.
//!
//! [`connection`] lends these parts to other protocols over HTTP/2.
//!
//! Elsewhere are parsers of HTTP/1.1 heads (`portico-wire`), and names, proxies and client TLS
//! (`portico-dial`). `portico-gateway`, which implements [`Handler`], has routes, allow lists, credentials
//! and counters. It also copies plain TCP ([`Served::Carry`]).

mod activity;
mod bridge;
mod cause;
mod chunk;
pub mod client;
pub mod connection;
mod handler;
mod inbound;
mod keepalive;
pub mod reset;
mod server;
mod settings;
mod token;
mod turn;
mod waiting;

pub use handler::{
    BadRequest, End, Handler, Meter, Protocol, REASON, Refusal, Request, Side, StatusCode, Upstream,
};
pub use inbound::Flood;
pub use server::{
    ALPN, CertificateProblem, ClientCaError, ClientCaFile, ClientCaFileError, Failure, Finished, Presented,
    RevocationList, Served, TenantPattern, Tls, TlsError, TlsFiles, serve,
};
pub use settings::Settings;
pub use token::Token;
