//! Parsers over bytes: ClientHello, PROXY protocol, CONNECT request heads; TLS alerts.
