//! Dialling over real sockets: DNS, squid, TLS. The tests with a scripted proxy are in the crate.

mod client_tls;
mod dial;
mod echo;
#[path = "../../../portico-tunnel/tests/all/client/names.rs"]
mod names;
mod squid;
