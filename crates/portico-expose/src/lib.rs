//! The exposure domain: strategy resolution, exposure plan, host names, addresses, NodePort allocation.

pub mod change;
pub mod draw;
pub mod node_ports;
pub mod resolve;
#[cfg(test)]
mod testing;
