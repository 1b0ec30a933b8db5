//! Konnectivity from outside: our server and agent and upstream's, in every pairing.
//!
//! Upstream's programs are built from the pinned Go module in `lab/konnectivity`. [`site`] starts a server,
//! an agent and what the frontend takes to reach them, both makes with the same flags; [`program`] is one of
//! those processes. [`frontend`] opens connections as kube-apiserver does: by upstream's client library where
//! the server speaks gRPC, by its exact bytes where it speaks HTTP CONNECT. [`endpoint`] is what the agent
//! dials.
//!
//! [`matrix`] moves bytes through all pairings. [`failures`] ends each part of them. [`dials`] asks for what
//! cannot be had. [`stopped`] stops reading, [`vanished`] loses every packet, [`hostile`] does harm.
//! [`fleet`] has several servers or agents. [`suite`] runs upstream's own tests; [`conformance`] says which
//! test stands for which of them.

mod conformance;
mod dials;
pub(crate) mod endpoint;
mod failures;
pub(crate) mod fleet;
mod frontend;
pub(crate) mod hostile;
mod matrix;
pub(crate) mod metrics;
pub(crate) mod program;
pub(crate) mod site;
mod stopped;
mod suite;
mod vanished;
