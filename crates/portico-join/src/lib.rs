//! The parts of `portico join` on a machine that becomes a node of a hosted cluster.
//!
//! [`cluster`] asks the cluster, [`checks`] looks at the machine, and [`reachability`] tries the addresses
//! that its agents use. [`files`] writes the files. [`kubelet`] starts the kubelet, with which this process
//! may stay ([`kubelet_process`]). The verb says in which order. [`moving`] leads a kubelet to another
//! address, before which `draining` may empty the node.
//!
//! `portico_hosting::join` decides on the files, and on the authority that a machine trusts.

pub mod checks;
pub mod cluster;
mod draining;
pub mod files;
pub mod kubelet;
pub mod kubelet_process;
pub mod moving;
pub mod reachability;
