//! Certificates of a seed and of its clusters.
//!
//! The [`inventory`] lists every certificate: its Secret, names, usage and signer. An [`Authority`] is read
//! from such a Secret and issues a [`Pair`] for a [`Profile`]. [`wants_renewal`] says whether a pair that
//! exists has to be issued again, and why. [`unfit`] says that of one that something else issues. A
//! [`Succession`] replaces an authority long before it ends. [`Kubeconfig`] is what users and controllers
//! get, and a [`Request`] what is signed elsewhere. [`ClusterPki`] says which Secrets of a cluster are due,
//! all together.
//!
//! Everything here is a plain function or a plain value: no I/O, and the time is passed in. Keys come from
//! the operating system's random numbers. What writes Secrets is `portico-operator`.

mod authority;
mod certificate;
mod cluster;
pub mod inventory;
mod kubeconfig;
mod pair;
mod profile;
mod renewal;
mod request;
mod service_account;
mod succession;

pub use authority::{Authority, IssueError, Unusable};
pub use cluster::{ClusterPki, Due, Lost, LostWhy, Review, Secrets, Why};
pub use kubeconfig::{BadKubeconfig, Credential, Kubeconfig, cluster_info, read_cluster_info};
pub use pair::{KeyKind, Pair};
pub use profile::{LIFETIME, Names, Profile, Usage};
pub use renewal::{Reason, unfit, wants_renewal};
pub use request::Request;
pub use service_account::{BadKeys, ServiceAccountKeys};
pub use succession::{Step, Succession, ends};
