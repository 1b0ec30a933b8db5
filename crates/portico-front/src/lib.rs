//! Keeps the ports of the one LoadBalancer Service of a seed in line with the Services exposed by NodePort.
//!
//! [`lease`] decides which replica may write; [`settle`] merges bursts of changes, because cloud load balancers are slow;
//! [`controller`] watches, plans with [`portico_expose::front`] and writes; [`status`] is what others may see of it. Newcomers start with
//! [`controller`].
//!
//! Which ports there should be, how they are called and who waits at the limit is decided in `portico-expose`; what passes through
//! them is the gateway's business, in another process with fewer rights.

pub mod controller;
pub mod lease;
pub mod settle;
pub mod status;

pub use controller::{Front, Settings};
pub use status::{FrontStatus, StatusHandle};
