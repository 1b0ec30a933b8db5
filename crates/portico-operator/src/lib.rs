//! The controllers of a seed, one a file, on [`kube::runtime::Controller`].
//!
//! [`front`] publishes the ports of clusters on the LoadBalancer Services in front of them: that of the seed,
//! and those of clusters with the strategy LoadBalancer. `exposed` writes what gateways must know of
//! Clusters. `follow` and `above` watch what controllers work from. [`mesh`] puts
//! on nodes what `portico-preflight` finds between them.
//!
//! What should exist is computed by pure code in `portico-expose`; what every controller needs is in
//! `portico-kube`. Only this crate writes to Kubernetes; bytes pass through the gateway, in another process
//! with fewer rights.

mod above;
mod exposed;
mod follow;
pub mod front;
pub mod mesh;
mod status;
#[cfg(test)]
mod testing;

pub use front::{Front, Settings};
pub use status::{ExposedClustersStatus, FrontStatus, ServiceStatus, StatusHandle, WatchStatus};
