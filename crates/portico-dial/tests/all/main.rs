//! Dialling over real sockets: DNS, proxies (a scripted one, and squid), TLS.

mod client_tls;
mod dial;
mod echo;
#[path = "../../../portico-tunnel/tests/all/client/names.rs"]
mod names;
mod squid;
