//! The controllers of a seed, one a file, on [`kube::runtime::Controller`].
//!
//! [`front`] publishes the ports of NodePort clusters on the one LoadBalancer Service of the seed.
//!
//! What should exist is computed by pure code in `portico-expose`; what every controller needs is in
//! `portico-kube`. Only this crate writes to Kubernetes; bytes pass through the gateway, in another process
//! with fewer rights.

pub mod front;
#[cfg(test)]
mod testing;

pub use front::{Front, FrontStatus, Settings, StatusHandle};
