//! Hosts, firewalls and real Kubernetes on one machine, for tests and contributors.
//!
//! A [`Lab`] is a small network of its own: [`Host`]s are network namespaces on one switch, each with an
//! address, a `hosts` file and [`firewall`] rules that a test puts up and takes down. On hosts run
//! [`Process`]es, and out of processes come real Kubernetes parts: [`Etcd`], [`ControlPlane`], [`Node`].
//! [`Seed`] puts them together as a one-node cluster, in which a [`UserCluster`] runs as pods. [`wait`] waits
//! for a condition, with a deadline, and with the last error when it did not come true.
//!
//! Labs run side by side: [`Lab`] takes a free number and everything it makes carries that number.
//! All of it is taken down with the last handle, also by a panic, or later by `portico-lab down`.
//!
//! Blocking code throughout: a test reads as a story. Errors end a test, so they are `anyhow`. Tests without
//! a host take [`pki`], which makes every certificate, [`frames`] for hostile clients, and `clock` (feature).
//!
//! Start with `tests/stories/kubernetes.rs`, then [`Seed`]. `docs/lab.md` has the layout on disk.

mod api_server;
pub mod cgroup;
#[cfg(feature = "clock")]
pub mod clock;
pub mod control_plane;
mod ended;
pub mod etcd;
#[cfg(feature = "faulty-api")]
pub mod faulty_api;
pub mod firewall;
pub mod frames;
mod go;
pub mod host;
pub mod image;
pub mod kkp;
pub mod kubectl;
pub mod lab;
pub mod node;
pub mod pki;
pub mod process;
pub mod programs;
pub mod seed;
pub mod user_cluster;
pub mod wait;

pub use api_server::ApiServer;
pub use control_plane::{Access, ControlPlane};
pub use ended::Ended;
pub use etcd::Etcd;
pub use host::Host;
pub use image::Image;
pub use kubectl::Kubectl;
pub use lab::Lab;
pub use node::Node;
pub use pki::Authority;
pub use process::Process;
pub use seed::Seed;
pub use user_cluster::UserCluster;

/// One line of progress for the person at the terminal: starting Kubernetes takes a while.
#[allow(clippy::print_stderr, reason = "the lab talks to a person; stdout belongs to results")]
pub fn say(line: impl std::fmt::Display) {
    eprintln!("lab: {line}");
}
