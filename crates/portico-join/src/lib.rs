//! What `portico join` does on a machine that becomes a node of a hosted cluster, part by part.
//!
//! The cluster is asked ([`cluster`]), the machine looked at ([`checks`]), what its agents go to tried
//! ([`reachability`]), files written ([`files`]), the kubelet started ([`kubelet`]), with which this process
//! may stay ([`kubelet_process`]). [`draining`] empties the node. The verb says in which order.
//!
//! What is written, and what a machine trusts, is decided in `portico_hosting::join`.

pub mod checks;
pub mod cluster;
pub mod draining;
pub mod files;
pub mod kubelet;
pub mod kubelet_process;
pub mod reachability;
