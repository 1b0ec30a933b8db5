//! The API server's side asks for connections, by gRPC ([`proxy`]) or by HTTP CONNECT ([`connect`]). It uses
//! a Unix socket, or TCP with mutual TLS.

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
