//! The exposure domain: strategies, plans, host names, addresses, NodePort allocation.
//!
//! For one cluster, [`resolve`] finds its seed and strategy, and [`validate`] what is wrong with it. [`plan`]
//! says what should exist. [`strategy`] holds one file for each strategy, and [`doors`] merges the plans of
//! two. For all clusters: the [`planner`] holds the objects, applies each [`change`] and returns what
//! follows. [`node_ports`] allocates NodePort numbers. For the load balancers in front of a seed: their ports
//! ([`front`]) and settings ([`load_balancer`]). For gateways that must not read Clusters: [`projection`].
//! From one strategy to another: [`migration`]. Inside a cluster: [`user_cluster`]. The objects of a Seed's
//! gateway are in [`components`].
//!
//! Everything here is a plain function or a plain value: no I/O, no async, no clock. Random numbers follow
//! from a seed ([`random`]).

mod address;
pub mod certificate;
pub mod change;
pub mod components;
pub mod doors;
pub mod exposure;
pub mod findings;
pub mod front;
pub mod hosts;
pub mod inputs;
#[cfg(test)]
mod kkp_rules;
pub mod load_balancer;
mod manifest;
pub mod migration;
pub mod networks;
pub mod node_ports;
pub mod persisted;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod projection;
pub mod random;
pub mod resolve;
pub mod services;
pub mod strategy;
#[cfg(test)]
mod testing;
pub mod user_cluster;
pub mod validate;
