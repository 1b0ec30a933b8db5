//! The gateway over real sockets on loopback, one module a promise.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

mod doors;
mod identity;
mod lifecycle;
mod outcomes;
mod pipes;
mod routing;
mod shared_port;
mod socket_options;
mod tcp_promises;
mod tunnel;
