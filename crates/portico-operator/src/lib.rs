//! The controllers of a seed, a file or a folder each, on [`kube::runtime::controller::applier`].
//!
//! `hosting` makes the control plane of each Cluster that asks for one, `exposure` makes each reachable,
//! `user_cluster` keeps what is inside, and `components` the gateway. [`front`] publishes the ports of
//! clusters on the LoadBalancer Services in front of them: that of the seed, and, beside KKP, those of
//! clusters with the strategy LoadBalancer. `exposed` writes what gateways must know of Clusters, where
//! `exposure` does not. `webhook` refuses mistakes when they are made. `follow`, `above`, `clusters` and
//! `cache` watch what controllers work from, `contention` gives way to other writers, `outage` tells when the
//! seed was away, and `tally` counts what each did. `operator` runs them with what `manager` shares among
//! them, and `leadership` decides whether they write. [`mesh`] puts on nodes what `portico-preflight` finds
//! between them, and [`monitored`] knows the control planes whose metrics are read.
//!
//! What should exist is computed by pure code in `portico-expose`; what every controller needs is in
//! `portico-kube`. Only this crate writes to Kubernetes; bytes pass through the gateway, in another process
//! with fewer rights.

mod above;
mod ask;
mod cache;
mod clock;
mod clusters;
mod components;
mod condition;
mod contention;
mod exposed;
mod exposure;
mod follow;
pub mod front;
mod hosting;
mod issued;
mod kkp;
mod leadership;
mod manager;
pub mod mesh;
pub mod monitored;
mod observed;
mod operator;
mod outage;
mod slot;
mod status;
mod tally;
#[cfg(test)]
mod testing;
mod user_cluster;
mod webhook;
mod write;

pub use components::ComponentSettings;
pub use exposure::ExposureSettings;
pub use front::Settings;
pub use hosting::HostingSettings;
pub use operator::{Operator, OperatorError};
pub use status::{
    ClusterInfo, ClusterReport, ClustersStatus, ControllerStatus, ExposedClustersStatus, OperatorStatus,
    PartReport, PartsStatus, SeedReport, SeedsStatus, ServiceStatus, StatusHandle, WatchStatus,
    WebhookStatus,
};
pub use tally::WorkStatus;
pub use user_cluster::UserClusterSettings;
pub use webhook::{Reached, WebhookSettings};
