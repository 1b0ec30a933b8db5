//! The exposure domain: strategy resolution, exposure plan, host names, addresses, NodePort allocation.
//!
//! For one cluster: [`resolve`] finds its seed and strategy, [`validate`] what is wrong with it, [`plan`] what should exist.
//! For all of them: the [`planner`] keeps the objects, applies each [`change`] and says what follows. [`node_ports`] gives
//! every NodePort number once. For the one load balancer before a seed: [`front`].
//!
//! Everything here is a plain function or a plain value: no I/O, no async, no clock; randomness comes from a seed
//! ([`draw`]).

pub mod address;
pub mod change;
pub mod draw;
pub mod front;
pub mod hosts;
pub mod memory;
pub mod networks;
pub mod node_ports;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod resolve;
pub mod services;
#[cfg(test)]
mod testing;
pub mod validate;
