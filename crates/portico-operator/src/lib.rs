//! The controllers of a seed, one a file, on [`kube::runtime::Controller`].
//!
//! `exposure` makes each Cluster reachable, `user_cluster` keeps what is inside of it, and `components` the
//! gateway that it is reached by. [`front`] publishes the ports of clusters on the LoadBalancer Services in
//! front of them: that of the seed, and, beside KKP, those of clusters with the strategy LoadBalancer.
//! `exposed` writes what gateways must know of Clusters, where `exposure` does not. `webhook` refuses
//! mistakes when they are made. `follow`, `above` and `cache` watch what controllers work from, `contention`
//! gives way to other writers, `outage` tells when the seed was away, and `tally` counts what each did.
//! `operator` runs them, `leadership` decides whether they write. [`mesh`] puts on nodes what
//! `portico-preflight` finds between them.
//!
//! What should exist is computed by pure code in `portico-expose`; what every controller needs is in
//! `portico-kube`. Only this crate writes to Kubernetes; bytes pass through the gateway, in another process
//! with fewer rights.

mod above;
mod cache;
mod components;
mod condition;
mod contention;
mod exposed;
mod exposure;
mod follow;
pub mod front;
mod issued;
mod kkp;
mod leadership;
pub mod mesh;
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
pub use operator::{Operator, OperatorError};
pub use status::{
    ClusterReport, ClustersStatus, ControllerStatus, ExposedClustersStatus, OperatorStatus, SeedReport,
    SeedsStatus, ServiceStatus, StatusHandle, UserClusterReport, UserClustersStatus, WatchStatus,
    WebhookStatus,
};
pub use tally::WorkStatus;
pub use user_cluster::UserClusterSettings;
pub use webhook::{Reached, WebhookSettings};
