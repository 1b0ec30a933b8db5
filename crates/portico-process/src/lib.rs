//! What processes that serve connections have in common, whatever they serve: the gateway and the node agent.
//!
//! [`access`] writes one line a connection without ever holding one up, [`socket`] has the options of sockets, [`pipe`] lends pipes to bulk
//! transfers, and [`takeover`] hands listening sockets to the next process.

pub mod access;
pub mod pipe;
pub mod socket;
pub mod takeover;
