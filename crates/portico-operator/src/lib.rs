//! The controllers of a seed, on [`kube::runtime::controller::applier`], and what they share.
//!
//! `controllers` has them, a file or a folder each, and `manager` runs them with the parts that they share.
//! `leadership` decides whether they write. `follow`, `installation`, `clusters` and `cache` watch their
//! inputs, and `contention` gives way to other writers. `outage` tells when the seed was away.
//! `work_counters` count the work of each. [`mesh`] puts on nodes the findings of `portico-preflight` between
//! them. [`monitored`] knows the control planes whose metrics are read, and reads them.
//!
//! Pure code in `portico-expose` computes the objects that should exist. The common tools of controllers are
//! in `portico-kube`. Bytes pass through the gateway, in another process with fewer rights.

mod ask;
mod cache;
mod clock;
mod clusters;
mod condition;
mod contention;
mod controllers;
mod follow;
mod installation;
mod issued;
mod kkp;
mod leadership;
mod managed;
mod manager;
pub mod mesh;
pub mod monitored;
mod news;
mod observed;
mod outage;
mod status;
#[cfg(test)]
mod testing;
mod work_counters;
mod write;

pub use controllers::*;
pub use status::{
    ClusterInfo, ClusterPart, ClusterReport, ClustersStatus, ControllerStatus, ExposedClustersStatus,
    OperatorStatus, PartReport, PartsStatus, SeedReport, SeedsStatus, ServiceStatus, StatusHandle,
    WatchStatus, WebhookStatus,
};
pub use work_counters::WorkStatus;
