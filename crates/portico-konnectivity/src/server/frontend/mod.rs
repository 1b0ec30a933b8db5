//! The API server's side: connections to ask for, by gRPC ([`proxy`]) or by HTTP CONNECT ([`connect`]), on a
//! Unix socket or over TCP with mutual TLS.

pub(super) mod connect;
pub(super) mod proxy;

/// What frontends speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `ProxyService` over HTTP/2.
    Grpc,
    /// CONNECT over HTTP/1.1.
    HttpConnect,
}
