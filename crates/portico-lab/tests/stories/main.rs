//! Stories on this machine: hosts in namespaces, real Kubernetes, real peers.
//!
//! [`shared_seed`] runs the stories that leave their seed whole on one seed. [`tunnel`], [`konnectivity`] and
//! [`operated`] break their own on purpose. The bars and the long migrations of [`hosted`] have theirs to
//! themselves, and [`demo`] has that of the program that it starts. The others have hosts and API servers
//! without a seed. Stories that start a Kubernetes take turns ([`turn`]): two of them on two cores would test
//! each other's patience.
#![allow(clippy::unwrap_used, reason = "a story that cannot go on ends here")]

mod demo;
mod deployed;
mod directory;
mod envoy;
mod firewall_rules;
mod hosted;
mod hosts;
mod konnectivity;
mod kubernetes;
mod operated;
mod own_gateway;
mod shared_seed;
mod squid;
mod support;
mod token_review;
mod tunnel;

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use portico_lab::{Image, Lab, Seed, UserCluster};

/// A lab of this name with a seed that knows Portico's image, and that of user clusters; its turn is held
/// until the story ends.
fn seeded(name: &str) -> (MutexGuard<'static, ()>, Lab, Seed) {
    seeded_by(name, Seed::start)
}

/// Like [`seeded`], with a seed that `start` starts.
fn seeded_by(name: &str, start: fn(&Lab) -> Result<Seed>) -> (MutexGuard<'static, ()>, Lab, Seed) {
    // First, since it may have to be built.
    let portico = Image::portico().unwrap();
    let turn = turn();
    let lab = Lab::start(name).unwrap();
    let seed = start(&lab).unwrap();
    UserCluster::prepare(&seed).unwrap();
    seed.import(&portico).unwrap();
    (turn, lab, seed)
}

/// Waits until no other story of this process runs a Kubernetes; held until the story ends.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A story that failed has taken its lab down, so the next may start.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
