//! What processes that serve connections have in common, whatever they serve: the gateway and the node agent.
//!
//! [`access`] writes one line a connection without ever holding one up, [`socket`] has the options of sockets, [`pipe`] lends pipes to bulk
//! transfers, and [`takeover`] hands listening sockets to the next process.

pub mod access;
pub mod error_watch;
pub mod idle;
pub mod linger;
pub mod memory;
pub mod pipe;
pub mod read_ahead;
pub mod rewind;
pub mod shared_tcp;
pub mod socket;
pub mod takeover;

pub use error_watch::ErrorWatch;
pub use idle::Idle;
pub use memory::MemoryBudget;
pub use read_ahead::ReadAhead;
pub use rewind::Rewind;
pub use shared_tcp::SharedTcp;
