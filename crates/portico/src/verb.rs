//! The verbs of `portico`, one file each.

pub(crate) mod agent;
pub(crate) mod capacity;
pub(crate) mod check;
pub(crate) mod control_plane;
pub(crate) mod crds;
pub(crate) mod demo;
pub(crate) mod etcd;
pub(crate) mod firewall;
pub(crate) mod front;
pub(crate) mod gateway;
pub(crate) mod join;
pub(crate) mod konnectivity;
pub(crate) mod kubeconfig;
pub(crate) mod metrics;
pub(crate) mod migrate;
pub(crate) mod nodes;
pub(crate) mod operator;
pub(crate) mod ports;
pub(crate) mod preflight;
pub(crate) mod routes;
pub(crate) mod status;
pub(crate) mod why;
