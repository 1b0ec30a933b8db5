//! Both halves of a tunnel, from outside: real sockets, a handler of the test's own.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod client;
mod common;
mod http1;
mod http2;
mod leaks;
mod memory;
mod tls;
mod unauthenticated;
