//! Hosting, as a plan: a Cluster to the objects of its control plane.
//!
//! [`validate`] says what is wrong with a Cluster as far as hosting goes. [`plan`] returns its
//! [`ControlPlane`]: every object, whole, in the order in which they are made. [`pki`] says what its Secrets
//! should hold, for `portico-pki`. [`inside`] says what the cluster has inside, and [`serving`] which
//! certificates its kubelets get. [`join`] says how machines become its nodes. [`quota`] says how many
//! clusters a seed hosts, and [`monitoring`] what Prometheus learns. Which images belong to a version is in
//! [`versions`].
//!
//! No plan depends on the expose strategy: a Cluster that migrates has the same one before and after, so
//! nothing restarts. Everything is a plain function or a plain value: no I/O, no clock, no random numbers.

mod config;
mod facts;
mod inside;
pub mod join;
pub mod monitoring;
mod network_policy;
mod pki;
mod plan;
mod pod;
mod program;
pub mod quota;
pub mod serving;
pub mod settings;
mod validate;
pub mod versions;

pub use facts::{CLUSTER, Digests, digests};
pub use inside::{Reach, inside};
pub use pki::{SecretUse, pki, secrets};
pub use plan::{ControlPlane, claim_name, has_etcd, plan};
pub use program::etcd::METRICS_PORT as ETCD_PROBES;
pub use program::prometheus::NAME as PROMETHEUS;
pub use settings::Settings;
pub use validate::{MOST_MEMBERS, judge, validate};
