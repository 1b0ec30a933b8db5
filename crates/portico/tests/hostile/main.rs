//! Attacks on the `portico` binary, over real sockets: each test is named as the promise that it checks.
//!
//! One file a subject. [`support`] has what they share: a gateway under a memory limit, and a [`Bystander`],
//! a client of another cluster that makes requests beside the attack and whose every request has to succeed.
//! Frames that no library would send are made by `portico_lab::frames`. [`common`], [`proof`] and [`secure`]
//! are those of the binary's other tests.
//!
//! [`Bystander`]: support::Bystander
#![allow(clippy::unwrap_used, reason = "a test may")]

mod authenticated;
#[allow(dead_code, reason = "shared with the other test binary, which uses the rest")]
#[path = "../all/common.rs"]
mod common;
mod identity;
mod objects;
#[allow(dead_code, reason = "shared with the other test binary, which uses the rest")]
#[path = "../all/proof.rs"]
mod proof;
#[allow(dead_code, reason = "shared with the other test binary, which uses the rest")]
#[path = "../all/secure.rs"]
mod secure;
mod silent;
mod slices;
mod sources;
mod support;
mod tenants;
mod unauthenticated;
