//! The node agent: holds the address of the `kubernetes` service on a worker node and carries its connections to a gateway.
//!
//! [`address`] makes the address exist on the node, and only there.

pub mod address;
