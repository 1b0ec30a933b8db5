//! Server and agent from outside, against peers made of plain h2.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod agent;
mod any_packet;
mod freezable;
mod grpc;
#[path = "../../../portico-tunnel/tests/all/client/names.rs"]
mod names;
mod server;
