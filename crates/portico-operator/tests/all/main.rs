//! The controllers beside a real API server.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod admission;
mod components;
mod exposure;
mod front;
mod hanging;
mod hosting;
mod kkp_fields;
mod leaving;
mod migration;
mod names;
mod older_kkp;
mod seed_api;
mod support;
mod two_operators;
mod user_cluster;
mod webhook;

use std::time::Duration;

use anyhow::Result;
use portico_lab::wait;

/// Longer than anything takes when all is well: a Lease runs out in 15 s.
const LIMIT: Duration = Duration::from_secs(90);

/// A file of deploy/.
fn manifest(file: &str) -> String {
    std::fs::read_to_string(format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn until(what: &str, probe: impl FnMut() -> Result<()>) {
    wait::until(what, LIMIT, probe).unwrap();
}
