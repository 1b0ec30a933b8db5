//! Answers an operator's questions about the clusters of a seed. The way to each is a chain of links, up to
//! the first that is broken (`portico why`, `portico status`). [`nodes`] has the paths of the nodes of one,
//! [`doors`] which way in is recorded of it, and [`cluster`] its Cluster.
//!
//! Objects are read from the seed's API ([`SeedSnapshot`]). Gateways are asked by their admin listener
//! through that API, so a kubeconfig is enough. Name, TLS and answer are tried from the machine this runs on.
//! [`admin`] is the way into a cluster, as the seed knows it. [`personal`] makes a kubeconfig for a person,
//! valid for some hours.

pub mod admin;
mod chain;
pub mod cluster;
pub mod doors;
mod gateways;
mod inside;
mod links;
mod local_view;
pub mod nodes;
mod orphans;
pub mod personal;
mod seed;

pub use chain::Chain;
pub use doors::Migration;
pub use inside::preflight;
pub use links::{Link, State};
pub use orphans::Orphan;
pub use seed::{Front, SeedSnapshot};
