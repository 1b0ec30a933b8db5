//! Dialling over real sockets: DNS, proxies (a scripted one, and squid), TLS.

mod client_tls;
mod dial;
#[path = "../../../portico-tunnel/tests/all/client/names.rs"]
mod names;
#[path = "../../../portico-tunnel/tests/pki/mod.rs"]
mod pki;
mod squid;
