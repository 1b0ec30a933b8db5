//! Stories on this machine: hosts in namespaces, real Kubernetes, real peers.
//!
//! [`shared_seed`] runs the stories that leave their seed whole on one seed; [`tunnel`] breaks its own on
//! purpose. The others have hosts and API servers without a seed. Stories that start a Kubernetes take turns
//! ([`turn`]): two of them on two cores would test each other's patience.
#![allow(clippy::unwrap_used, reason = "a story that cannot go on ends here")]

mod deployed;
mod directory;
mod envoy;
mod firewall_rules;
mod hosts;
mod kubernetes;
mod shared_seed;
mod squid;
mod support;
mod token_review;
mod tunnel;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other story of this process runs a Kubernetes; held until the story ends.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A story that failed has taken its lab down, so the next may start.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
