//! The tests of the agent that need sockets or hosts, in one program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

mod address;
mod agent;
mod connection;
mod ends;
mod gateway;
mod listen;
mod node;
mod refusals;
