//! Hosts, firewalls and real Kubernetes on one machine, for tests and contributors.
//!
//! A [`Lab`] is a small network of its own. [`Host`]s are network namespaces on one switch, each with an
//! address, a `hosts` file and [`firewall`] rules that a test puts up and takes down. On hosts run
//! [`Process`]es, and out of processes come real Kubernetes parts: [`Etcd`], [`ControlPlane`], [`Node`].
//! [`Seed`] puts them together as a one-node cluster, in which a [`UserCluster`] runs as pods. [`wait`] waits
//! for a condition, with a deadline, and with the last error when it did not come true.
//!
//! Labs run side by side: [`Lab`] takes a free number and everything it makes carries that number.
//! All of it is taken down with the last handle, by a panic too, or later by `portico-lab down`.
//!
//! Blocking code throughout: a test reads as a story. Errors end a test, so they are `anyhow`. For tests
//! without a host: [`pki`] (certificates), [`frames`] and [`hostile_api`] (bad peers), [`leaks`], `clock`.
//!
//! Start with `tests/stories/kubernetes.rs`, then [`Seed`]. `docs/lab.md` has the layout on disk.

mod api_server;
pub mod cgroup;
pub mod cilium;
#[cfg(feature = "clock")]
pub mod clock;
pub mod control_plane;
pub mod demo;
mod ended;
pub mod etcd;
#[cfg(feature = "faulty-api")]
pub mod faulty_api;
pub mod firewall;
pub mod frames;
mod go;
pub mod host;
pub mod hostile_api;
pub mod image;
pub mod kkp;
pub mod konnectivity;
pub mod kubectl;
pub mod lab;
pub mod leaks;
pub mod log_lines;
pub mod manifests;
pub mod metrics;
mod name_server;
pub mod node;
pub mod operated;
pub mod pki;
pub mod process;
pub mod programs;
pub mod refusing;
pub mod seed;
pub mod steps;
pub mod user_cluster;
pub mod volumes;
pub mod wait;

pub use api_server::ApiServer;
pub use control_plane::{Access, ControlPlane};
pub use demo::Demo;
pub use ended::Ended;
pub use etcd::Etcd;
pub use host::Host;
pub use image::Image;
pub use kubectl::Kubectl;
pub use lab::Lab;
pub use node::Node;
pub use operated::Operated;
pub use pki::Authority;
pub use process::Process;
pub use seed::Seed;
pub use steps::{Steps, say};
pub use user_cluster::UserCluster;

/// The size of a long-running test: `short` in CI, `long` for `scripts/prove`, which sets `PORTICO_PROVE`.
pub fn long_form<T>(short: T, long: T) -> T {
    if std::env::var_os("PORTICO_PROVE").is_some() { long } else { short }
}
