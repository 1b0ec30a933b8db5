//! What `portico join` does on a machine that becomes a node of a hosted cluster, part by part.
//!
//! The cluster is asked ([`cluster`]), the machine looked at ([`checks`]), what its agents go to tried
//! ([`reachability`]), files written ([`files`]), the kubelet started ([`kubelet`]), with which this process
//! may stay ([`kubelet_process`]). The verb says in which order. [`moving`] leads a kubelet to another
//! address, before which `draining` may empty the node.
//!
//! What is written, and what a machine trusts, is decided in `portico_hosting::join`.

pub mod checks;
pub mod cluster;
mod draining;
pub mod files;
pub mod kubelet;
pub mod kubelet_process;
pub mod moving;
pub mod reachability;
