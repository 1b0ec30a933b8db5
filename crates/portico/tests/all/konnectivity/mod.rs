//! Konnectivity from outside: our agent with upstream's server, each a process.
//!
//! Upstream's programs are built from the pinned Go module in `lab/konnectivity`. [`site`] starts a server,
//! an agent and what the frontend takes to reach them, both makes with the same flags; [`program`] is one of
//! those processes. [`frontend`] opens connections as kube-apiserver does: by upstream's client library where
//! the server speaks gRPC, by its exact bytes where it speaks HTTP CONNECT. [`endpoint`] is what the agent
//! dials.
//!
//! [`matrix`] moves bytes in every mode, [`failures`] ends each part, [`dials`] asks for what
//! cannot be had, [`fleet`] has several servers or agents, and [`suite`] runs upstream's own tests.

mod dials;
mod endpoint;
mod failures;
mod fleet;
mod frontend;
mod matrix;
mod program;
mod site;
mod suite;
